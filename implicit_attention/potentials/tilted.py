"""A potential seen from another origin: its cumulants at a tilt."""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor

from .. import _validate
from .._torch import sum_to_shape
from ._rays import Ray
from ._shapes import States
from .base import Composite, CovarianceMap, Potential


class Tilted(Composite):
    """Phi(z + tilt) - Phi(tilt): the log-partition function of the law of Phi after the tilt.

    Its mean at 0 is mean(tilt), and its value there is 0. For a log-sum-exp the tilt is a bias beta <k_j, tilt> of
    every key, less its normaliser.

    Args:
        potential: Phi.
        tilt: broadcasts to the states, (D,) for one, (*#batch, #N, D) for one per problem.

    Raises:
        TypeError, ValueError: a tilt that is no floating-point tensor; shapes or dtypes that do not fit the states.

    Gradients: with respect to z, the tilt and the tensors of the potential, to any order that it has.

    Reference: Efron (2022), Exponential Families in Theory and Practice, section 1.2.

    Not for reading values out by attention weights: use `LogSumExp` with a bias.

    Examples:
        >>> import torch
        >>> from implicit_attention import LogSumExp
        >>> from implicit_attention.potentials import Tilted
        >>> coin = LogSumExp(torch.tensor([[0.0], [1.0]]), beta=1.0)
        >>> phi, z = Tilted(coin, torch.tensor([2.0])), torch.zeros(1, 1)
        >>> phi.value(z), phi.mean(z).round(decimals=3)
        (tensor([0.]), tensor([[0.8810]]))
    """

    declares_all = True
    _by_row = ("tilt",)

    def __init__(self, potential: Potential, tilt: Float[Tensor, "*#batch D"]) -> None:
        _validate.check_float_tensor("tilt", tilt, min_ndim=1)
        super().__init__(potential)
        self.tilt = tilt

    def check_state(self, argument: str, z: Tensor) -> None:
        super().check_state(argument, z)
        _validate.check_same_kind([("tilt", self.tilt), (argument, z)])
        _validate.check_broadcast("tilt", self.tilt.shape, z.shape, f"the shape of `{argument}`")

    def value(self, z: States) -> Float[Tensor, "*lead"]:
        """Phi(z + tilt) - Phi(tilt), one number per problem."""
        return self.parts[0].value(z + self.tilt) - self.parts[0].value(self.tilt.expand_as(z))

    def mean(self, z: States) -> States:
        """mean(z + tilt) of the potential, (*batch, N, D) -> (*batch, N, D)."""
        return self.parts[0].mean(z + self.tilt)

    def covariance_product(self, z: States, v: States) -> States:
        """Hess Phi(z + tilt) v."""
        return self.parts[0].covariance_product(z + self.tilt, v)

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        value, mean = self.parts[0].evaluate(z + self.tilt)
        return value - self.parts[0].value(self.tilt.expand_as(z)), mean

    def linearize(self, z: Tensor) -> CovarianceMap | None:
        cov = self.parts[0].linearize(z + self.tilt)
        if cov is None or not self._has_only("parts", "tilt"):
            return None

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            return *cov.vjp_tensors(u), sum_to_shape(cov.product(u), self.tilt.shape)

        return CovarianceMap(cov.product, pullback)

    def bounded_below(self, scale: float) -> bool | None:
        # With y = z + tilt it is |y|^2/2 - scale Phi(y) less a linear term, which takes a little of |y|^2/2.
        return self.parts[0].bounded_below(math.inf) or self.parts[0].bounded_below(scale * (1 + 1e-6)) or None

    def falling_ray(self, scale: float | Tensor = math.inf) -> Ray | None:
        return self.parts[0].falling_ray(scale)

    def lipschitz(self) -> Tensor | None:
        return self.parts[0].lipschitz()
