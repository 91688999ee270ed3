"""Hidden units summed over: the effective energy of the visible units of a restricted Boltzmann machine."""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from .._torch import sum_to_shape
from ._rays import Ray, finite, spectral_norm
from ._shapes import PerRow, States
from .base import CovarianceMap, Potential, check_fits
from .laws import units_ray
from .masked_keys import in_double
from .unit import Units, check_units


class HiddenUnits(Potential):
    r"""Independent hidden units h_mu with energy -t_mu h_mu, summed over.

    ```math
    \Phi(v) = \sum_\mu K(t_\mu), \qquad t = W^\top v
    ```

    E(v) = -a.v - Phi(v) is the effective energy of visible units v in a field a, dE/dv = -a - W <h|v>:
    mean(v) = W K'(t); covariance_product(v, u) = W (K''(t) * W^T u).

    Not for hidden units that exclude each other, of which one is on at a time: that is `LogSumExp`.

    Args:
        weights: W, (*batch, D, H); leading axes broadcast to those of the states.
        units: the law of the hidden units, for example `BernoulliUnits(0.5)`; see `implicit_attention.potentials`.

    A row v with a t outside the domain of K (`ExponentialUnits`, `LaplaceUnits`) has value and mean NaN; no other row
    is changed.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit; units that are no `Units`, or are
            `SphereUnits()` without a dimension.

    Gradients: with respect to v and weights, to any order.

    Reference: Smolensky (1986), restricted Boltzmann machines; Barra et al. (2012) for Gaussian hidden units.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import HiddenUnits, SignUnits
        >>> potential = HiddenUnits(torch.eye(2), SignUnits())
        >>> v = torch.tensor([[0.0, 1.0]])
        >>> potential.value(v), potential.mean(v)
        (tensor([0.4338]), tensor([[0.0000, 0.7616]]))
    """

    convex = True
    declares_all = True

    def __init__(self, weights: Float[Tensor, "*batch D H"], units: Units) -> None:
        _validate.check_float_tensor("weights", weights, min_ndim=2)
        required = "have at least one visible and one hidden unit, shape (*batch, D, H)"
        _validate.require(0 not in weights.shape[-2:], "weights", required, f"shape {tuple(weights.shape)}")
        check_units(units)
        self.weights = weights
        self.units = units

    def check_state(self, argument: str, z: Tensor) -> None:
        dim = self.weights.shape[-2]
        check_fits(argument, z, dim, f"one entry for each of the {dim} rows of `weights`", "weights", self.weights)

    def value(self, z: States) -> PerRow:
        """Phi(v), (*batch, N, D) -> (*batch, N)."""
        return self.units.cumulant(z @ self.weights).sum(-1)

    def mean(self, z: States) -> States:
        """W <h|v>, (*batch, N, D) -> (*batch, N, D)."""
        return self.units.mean(z @ self.weights) @ self.weights.mT

    def covariance_product(self, z: States, v: States) -> States:
        """W Cov(h|z) W^T v, per row; the hidden units are independent, and Cov(h|z) is diagonal."""
        return (self.units.variance(z @ self.weights) * (v @ self.weights)) @ self.weights.mT

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        t = z @ self.weights
        return self.units.cumulant(t).sum(-1), self.units.mean(t) @ self.weights.mT

    def linearize(self, z: Tensor) -> CovarianceMap | None:
        if not self._has_only("weights", "units"):
            return None
        weights, t = self.weights, z @ self.weights
        hidden, variance = self.units.mean(t), self.units.variance(t)

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            by_weights = u.mT @ hidden + z.mT @ (variance * (u @ weights))
            return (sum_to_shape(by_weights, weights.shape),)

        return CovarianceMap(lambda v: (variance * (v @ weights)) @ weights.mT, pullback)

    def select(self, index: Tensor) -> Self | None:
        return self if self._has_only("weights", "units") else None

    def bounded_below(self, scale: float) -> bool:
        """Whether K grows no faster than |t|, or scale max K'' lambda_max(W W^T) < 1 for every batch entry."""
        return scale == 0 or self.units.linear_growth or bool(super().bounded_below(scale))

    def falling_ray(self, scale: float | Tensor = math.inf) -> Ray | None:
        """Return the ray of the law: of Gaussian units from a scale on, of Poisson units at every scale."""
        return units_ray(self.units, lambda: finite(in_double(self.weights)).mT, 1.0, scale)

    def lipschitz(self) -> Tensor | None:
        """max K'' lambda_max(W W^T), (*batch); None for units without a largest variance."""
        if math.isinf(self.units.largest_variance):
            return None
        return self.units.largest_variance * spectral_norm(self.weights).square()
