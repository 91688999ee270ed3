"""Hidden units summed over: the effective energy of the visible units of a restricted Boltzmann machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from .._autograd import sum_to_shape
from .base import CovarianceMap, Potential
from .spin import BesselResponse

_BESSEL = BesselResponse()


@dataclass(frozen=True)
class Units:
    """The law rho(h) of one hidden unit h, seen through its tilts rho(h) exp(t h).

        cumulant  K(t) = log of the mean of exp(t h), convex, 0 at t = 0
        mean      K'(t) = <h>
        variance  K''(t) = Var(h)

    All per unit, (*batch, N, H) -> (*batch, N, H), NaN where K is infinite. The n-th derivative of K at 0 is the n-th
    cumulant of h.

    Gradients: of all with respect to t, to any order.
    """

    #: Whether |K(t)| grows no faster than |t|.
    linear_growth: ClassVar[bool] = False

    @property
    def largest_variance(self) -> float:
        """An upper bound on K''(t) over all t; infinite if there is none."""
        return math.inf

    def cumulant(self, t: Float[Tensor, "*batch N H"]) -> Float[Tensor, "*batch N H"]:
        """K(t)."""
        raise NotImplementedError(f"{type(self).__name__} must define cumulant(t)")

    def mean(self, t: Float[Tensor, "*batch N H"]) -> Float[Tensor, "*batch N H"]:
        """K'(t)."""
        raise NotImplementedError(f"{type(self).__name__} must define mean(t)")

    def variance(self, t: Float[Tensor, "*batch N H"]) -> Float[Tensor, "*batch N H"]:
        """K''(t)."""
        raise NotImplementedError(f"{type(self).__name__} must define variance(t)")


@dataclass(frozen=True, init=False, repr=False)
class GaussianUnits(Units):
    """h normal: K = mean t + variance t^2/2. Summing them over makes a Hopfield network.

    Args:
        mean: <h> at t = 0; the attribute is `center`, as `mean` is K'.
        variance: >= 0; the attribute is `spread`, as `variance` is K''.
    """

    center: float
    spread: float

    def __init__(self, mean: float, variance: float) -> None:
        mean = _validate.check_number("mean", mean)
        variance = _validate.check_number("variance", variance, low=0.0)
        object.__setattr__(self, "center", mean)
        object.__setattr__(self, "spread", variance)

    def __repr__(self) -> str:
        return f"GaussianUnits(mean={self.center}, variance={self.spread})"

    @property
    def largest_variance(self) -> float:
        return self.spread

    def cumulant(self, t: Tensor) -> Tensor:
        return t * (self.center + self.spread * t / 2)

    def mean(self, t: Tensor) -> Tensor:
        return self.center + self.spread * t

    def variance(self, t: Tensor) -> Tensor:
        return torch.full_like(t, self.spread)


@dataclass(frozen=True)
class BernoulliUnits(Units):
    """h = 1 with probability p, else 0: K = log(1 - p + p e^t).

    Args:
        p: between 0 and 1, both excluded.
    """

    p: float
    linear_growth: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _validate.store_plain(self)
        _validate.check_number("p", self.p)
        _validate.require(0 < self.p < 1, "p", "be between 0 and 1", self.p, "use ConstantUnits(0.0 or 1.0) for these")

    @property
    def largest_variance(self) -> float:
        return 0.25

    def cumulant(self, t: Tensor) -> Tensor:
        # Both by the same function, so that K is 0 at 0; softplus would be cut off at 20.
        return F.logsigmoid(torch.full_like(t, -self._logit)) - F.logsigmoid(-t - self._logit)

    def mean(self, t: Tensor) -> Tensor:
        return torch.sigmoid(t + self._logit)

    def variance(self, t: Tensor) -> Tensor:
        return torch.sigmoid(t + self._logit) * torch.sigmoid(-t - self._logit)

    @property
    def _logit(self) -> float:
        return math.log(self.p) - math.log1p(-self.p)


@dataclass(frozen=True)
class SignUnits(Units):
    """h = 1 or -1 with equal weight: K = log cosh t."""

    linear_growth: ClassVar[bool] = True

    @property
    def largest_variance(self) -> float:
        return 1.0

    def cumulant(self, t: Tensor) -> Tensor:
        return _BESSEL.log_partition(t[..., None], 1.0, 1.0)

    def mean(self, t: Tensor) -> Tensor:
        return torch.tanh(t)

    def variance(self, t: Tensor) -> Tensor:
        return 4 * torch.sigmoid(2 * t) * torch.sigmoid(-2 * t)


@dataclass(frozen=True)
class PoissonUnits(Units):
    """h = 0, 1, 2, ...: K = rate (e^t - 1). Gaussian visible units cannot be normalised against it.

    Args:
        rate: > 0.
    """

    rate: float

    def __post_init__(self) -> None:
        _validate.store_plain(self)
        _validate.check_number("rate", self.rate, low=0.0, open_low=True)

    def cumulant(self, t: Tensor) -> Tensor:
        return self.rate * torch.expm1(t)

    def mean(self, t: Tensor) -> Tensor:
        return self.rate * torch.exp(t)

    def variance(self, t: Tensor) -> Tensor:
        return self.rate * torch.exp(t)


@dataclass(frozen=True)
class ExponentialUnits(Units):
    """h > 0 of density rate exp(-rate h): K = -log(1 - t/rate) for t < rate, else NaN.

    Args:
        rate: > 0.
    """

    rate: float

    def __post_init__(self) -> None:
        _validate.store_plain(self)
        _validate.check_number("rate", self.rate, low=0.0, open_low=True)

    def cumulant(self, t: Tensor) -> Tensor:
        return -torch.log1p(-self._inside(t) / self.rate)

    def mean(self, t: Tensor) -> Tensor:
        return (self.rate - self._inside(t)).reciprocal()

    def variance(self, t: Tensor) -> Tensor:
        return (self.rate - self._inside(t)).square().reciprocal()

    def _inside(self, t: Tensor) -> Tensor:
        return torch.where(t < self.rate, t, torch.nan)


@dataclass(frozen=True)
class LaplaceUnits(Units):
    """h of density exp(-|h|/scale)/(2 scale): K = -log(1 - scale^2 t^2) for |t| < 1/scale, else NaN.

    Args:
        scale: > 0.
    """

    scale: float

    def __post_init__(self) -> None:
        _validate.store_plain(self)
        _validate.check_number("scale", self.scale, low=0.0, open_low=True)

    def cumulant(self, t: Tensor) -> Tensor:
        return -torch.log1p(-self._inside(t).square())

    def mean(self, t: Tensor) -> Tensor:
        x = self._inside(t)
        return 2 * self.scale * x / (1 - x.square())

    def variance(self, t: Tensor) -> Tensor:
        square = self._inside(t).square()
        return 2 * self.scale**2 * (1 + square) / (1 - square).square()

    def _inside(self, t: Tensor) -> Tensor:
        x = self.scale * t
        return torch.where(x.abs() < 1, x, torch.nan)


@dataclass(frozen=True)
class ConstantUnits(Units):
    """h = value for certain: K = value t, a field on the visible units.

    Args:
        value: any number.
    """

    value: float
    linear_growth: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _validate.store_plain(self)
        _validate.check_number("value", self.value)

    @property
    def largest_variance(self) -> float:
        return 0.0

    def cumulant(self, t: Tensor) -> Tensor:
        return self.value * t

    def mean(self, t: Tensor) -> Tensor:
        # Not a constant tensor, so that every order of its derivative exists, and NaN stays NaN.
        return self.value + 0 * t

    def variance(self, t: Tensor) -> Tensor:
        return 0 * t


@dataclass(frozen=True)
class SphereUnits(Units):
    """h one component of a uniform unit vector in `dim` dimensions: K = log Z_1(t), that of `BesselResponse`.

    Args:
        dim: D >= 2. K'(t) = I_{D/2}/I_{D/2-1}, exact also at 0, where K'' = 1/D; half precision goes by float32.
            All are NaN where t^2 is not finite.
    """

    dim: int
    linear_growth: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _validate.check_integer("dim", self.dim, low=2, remedy="use SignUnits() for one dimension")

    @property
    def largest_variance(self) -> float:
        return 1 / self.dim

    def cumulant(self, t: Tensor) -> Tensor:
        return _BESSEL.scaled_log_partition(self._square(t), self.dim).to(t.dtype)

    def mean(self, t: Tensor) -> Tensor:
        return t * _BESSEL.gain(self._square(t), self.dim).to(t.dtype)

    def variance(self, t: Tensor) -> Tensor:
        return _BESSEL.radial_gain(self._square(t), self.dim).to(t.dtype)

    def _square(self, t: Tensor) -> Tensor:
        return (t.float() if torch.finfo(t.dtype).bits < 32 else t).square()


class HiddenUnits(Potential):
    """Phi(v) = sum_mu K(t_mu), t = W^T v: what is left of independent hidden units h_mu with energy -t_mu h_mu.

    E(v) = -a.v - Phi(v) is the effective energy of visible units v in a field a, dE/dv = -a - W <h|v>:
    mean(v) = W K'(t); covariance_product(v, u) = W (K''(t) * W^T u).

    Args:
        weights: W, (*batch, D, H); leading axes broadcast to those of the states.
        units: the law of the hidden units, for example `BernoulliUnits(0.5)`.

    A row v with a t outside the domain of K (`ExponentialUnits`, `LaplaceUnits`) has value and mean NaN; no other row
    is changed.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit; units that are no `Units`.

    Gradients: with respect to v and weights, to any order.

    Reference: Smolensky (1986), restricted Boltzmann machines; Barra et al. (2012) for Gaussian hidden units.
    """

    convex = True
    declares_all = True

    def __init__(self, weights: Float[Tensor, "*batch D H"], units: Units) -> None:
        _validate.check_float_tensor("weights", weights, min_ndim=2)
        required = "have at least one visible and one hidden unit, shape (*batch, D, H)"
        _validate.require(0 not in weights.shape[-2:], "weights", required, f"shape {tuple(weights.shape)}")
        if not isinstance(units, Units):
            raise TypeError(_validate.message("units", "be Units", repr(units), "for example BernoulliUnits(0.5)"))
        self.weights = weights
        self.units = units

    def check_state(self, argument: str, z: Tensor) -> None:
        _validate.check_float_tensor(argument, z, min_ndim=2)
        dim = self.weights.shape[-2]
        required = f"have one entry for each of the {dim} rows of `weights` on its last axis"
        _validate.require(z.shape[-1] == dim, argument, required, f"shape {tuple(z.shape)}")
        _validate.check_same_kind([("weights", self.weights), (argument, z)])
        _validate.check_broadcast("weights", self.weights.shape[:-2], z.shape[:-2], f"the leading axes of `{argument}`")

    def value(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N"]:
        """Phi(v), (*batch, N, D) -> (*batch, N)."""
        return self.units.cumulant(z @ self.weights).sum(-1)

    def mean(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N D"]:
        """W <h|v>, (*batch, N, D) -> (*batch, N, D)."""
        return self.units.mean(z @ self.weights) @ self.weights.mT

    def covariance_product(
        self, z: Float[Tensor, "*batch N D"], v: Float[Tensor, "*batch N D"]
    ) -> Float[Tensor, "*batch N D"]:
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

        def product(v: Tensor) -> Tensor:
            return (variance * (v @ weights)) @ weights.mT

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            by_weights = u.mT @ hidden + z.mT @ (variance * (u @ weights))
            return (sum_to_shape(by_weights, weights.shape),)

        return CovarianceMap(product, pullback)

    def select(self, index: Tensor) -> Self | None:
        return self if self._has_only("weights", "units") else None

    def bounded_below(self, scale: float) -> bool:
        """Whether K grows no faster than |t|, or scale max K'' lambda_max(W W^T) < 1 for every batch entry."""
        if scale == 0 or self.units.linear_growth:
            return True
        bound = self.lipschitz()
        return bound is not None and bool((scale * bound < 1).all())

    def lipschitz(self) -> Tensor | None:
        """max K'' lambda_max(W W^T), (*batch); None for units without a largest variance."""
        if math.isinf(self.units.largest_variance):
            return None
        largest: Tensor = torch.linalg.matrix_norm(self.weights.detach(), ord=2)
        return self.units.largest_variance * largest.square()
