"""Energies: fixed-point problems whose residual f(z) - z is a negative gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .. import _validate
from .._autograd import vjp
from ..problem import Problem, UserProblem


class Energy(Problem):
    """E(z) per problem, with f(z) = z - grad E(z). A subclass defines `energy` and sets `event_ndim`."""

    symmetric = True
    has_energy: ClassVar[bool] = True

    def gradient(self, z: Tensor) -> Tensor:
        """Grad E(z), of z's shape."""

        def total(z: Tensor) -> Tensor:
            return self.energy(z).sum()

        gradient: Tensor = torch.func.grad(total)(z)
        return gradient

    def hessian_product(self, z: Tensor, v: Tensor) -> Tensor:
        """Hess E(z) v, each problem with its own Hessian."""
        _, pullback = vjp(self.gradient, z)
        product: Tensor = pullback(v)[0]
        return product

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return z - self.gradient(z)


class EnergyFunction(UserProblem, Energy):
    """The energy E(z, *tensors) of a user's function, minimised by f(z) = z - step_size grad E(z).

    Args:
        function: E(z, *tensors) -> one number per problem, i.e. of z's shape without its last `event_ndim` axes; or an
            nn.Module, whose parameters are then declared.
        *inputs: every tensor that E reads and whose gradient may be wanted.
        event_ndim: number of trailing axes of z that form one problem.
        step_size: scale of the gradient step in f; below 2 over the largest curvature plain steps descend.

    Gradients: with respect to every declared tensor, first and second order.
    """

    def __init__(
        self, function: Callable[..., Tensor] | nn.Module, *inputs: Any, event_ndim: int, step_size: float = 1.0
    ) -> None:
        super().__init__(function, *inputs, event_ndim=event_ndim)
        _validate.check_number("step_size", step_size, low=0.0, open_low=True)
        self.step_size = step_size

    def energy(self, z: Tensor) -> Tensor:
        lead = z.shape[: z.ndim - self.event_ndim]
        return self._check_output(self.function(z, *self.inputs), lead, "of z without its event axes")

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return z - self.step_size * self.gradient(z)
