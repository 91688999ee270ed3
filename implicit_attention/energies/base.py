"""Energies: fixed-point problems whose residual f(z) - z is a negative gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Self

from .. import _validate
from .._autograd import check_graph, grad, vjp
from ..fixed_point_map import UserProblem
from ..problem import Problem


class Energy(Problem, general=True):
    """E(z) per problem, with f(z) = z - grad E(z). A subclass defines `energy` and sets `event_ndim`.

    Not for |z|^2/2 minus a potential: use `AnchoredEnergy`, whose steps and bounds follow from the potential's.

    Examples:
        >>> import torch
        >>> from implicit_attention import solve
        >>> from implicit_attention.energies import Energy
        >>> class Bowl(Energy):
        ...     event_ndim = 1
        ...     def energy(self, z):
        ...         return (z - 1).square().sum(-1)
        >>> solve(Bowl(), torch.zeros(2, 3)).value.round(decimals=3)[0]
        tensor([1., 1., 1.])
    """

    symmetric = True
    has_energy = True
    if_bottomless = "check that E has a lower bound, and no kink (as |z| has) where it is lowest"

    @property
    def to_contract(self) -> str:
        return super().to_contract or "scale E down"

    def gradient(self, z: Tensor) -> Tensor:
        """Grad E(z), of z's shape."""

        def total(z: Tensor) -> Tensor:
            energy = self.energy(z)
            check_graph(self._map_name(), energy, self.energy, z)
            return energy.sum()

        gradient: Tensor = grad(total)(z)
        return gradient

    def hessian_product(self, z: Tensor, v: Tensor) -> Tensor:
        """Hess E(z) v, each problem with its own Hessian."""
        _, pullback = vjp(self.gradient, z)
        product: Tensor = pullback(v)[0]
        return product

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return z - self.gradient(z)


def check_fixed_budget(solver: Any, remedy: str) -> None:
    """Raise unless the solver makes a fixed number of steps, for dynamics without a fixed point."""
    fixed = solver.fixed_budget or solver.max_steps == 0
    required = "make a fixed number of steps: these dynamics have no fixed point"
    _validate.require(fixed, "solver", required, f"{type(solver).__name__} with rtol={solver.rtol:g}", remedy)


class EnergyFunction(UserProblem, Energy):
    """The energy E(z, *tensors) of a user's function, with f(z) = z - grad E(z).

    Plain steps descend where no curvature of E exceeds 2; elsewhere `GradientDescent(step_size)` or `Picard(damping)`
    take shorter ones, and the accelerated solvers halve theirs until E falls.

    Args:
        function: E(z, *tensors) -> one number per problem, i.e. of z's shape without its last `event_ndim` axes; or an
            nn.Module, whose parameters are then declared.
        *inputs: every tensor that E reads and whose gradient may be wanted, maybe as `PerSample(t)` or `Shared(t)`.
        event_ndim: number of trailing axes of z that form one problem.

    Gradients: with respect to every declared tensor, first and second order.

    Not for a map that is no gradient: use `FixedPointMap`.

    Examples:
        >>> import torch
        >>> from implicit_attention import EnergyFunction, solve
        >>> target = torch.tensor([2.0, -1.0], requires_grad=True)
        >>> energy = EnergyFunction(lambda z, t: (z - t).square().sum(-1), target, event_ndim=1)
        >>> solution = solve(energy, torch.zeros(3, 2))
        >>> torch.autograd.grad(solution.value.sum(), target)[0].round(decimals=3)
        tensor([3., 3.])
    """

    row_block = 1

    def select(self, index: Tensor) -> Self | None:
        return self._restricted(index)

    def energy(self, z: Tensor) -> Tensor:
        lead = z.shape[: z.ndim - self.event_ndim]
        return self._check_output(self._called(z), z, lead, "of z without its event axes")
