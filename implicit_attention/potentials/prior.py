"""Laws of one unit: log A(theta, V) = log of the mean of exp(theta.s + V |s|^2/2), its mean and its variance."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from .._autograd import vjp
from .spin import BesselResponse

#: Changes of theta and V -> changes of <s> and <|s|^2>/2.
CovarianceMap: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

_BESSEL = BesselResponse()


@dataclasses.dataclass(frozen=True)
class Prior:
    """A normalised law rho(s) of one unit s in R^D, seen through its tilts rho(s) exp(theta.s + V |s|^2/2) / A.

        log_partition  log A(theta, V), convex, 0 at theta = 0 and V = 0
        mean           m = <s> = d log A/d theta
        variance       c = Tr Cov(s) / D, where <|s|^2> = 2 d log A/dV = |m|^2 + D c

    All per unit: theta (*batch, N, D), V (*batch, N), both without a unit if s has none. `radius` R is the scale of s.
    A subclass defines `log_partition`. The rest follows by automatic differentiation, but the variance then is a
    difference of squares, and a closed form is worth having. Where V is so large that A is infinite, log A is NaN.

    Gradients: of all with respect to theta and V, to any order.
    """

    #: Whether |s| = R for certain, so that V |s|^2/2 is a constant.
    fixed_length: ClassVar[bool] = False

    def check(self, dim: int) -> None:
        """Raise if the law does not exist in D dimensions."""

    def log_partition(
        self, theta: Float[Tensor, "*batch N D"], v: Float[Tensor, "*batch N"], radius: float
    ) -> Float[Tensor, "*batch N"]:
        """log A, (*batch, N).

        Args:
            theta: (*batch, N, D), what stands before s in the exponent.
            v: V, (*batch, N), what stands before |s|^2/2.
            radius: R > 0.
        """
        raise NotImplementedError(f"{type(self).__name__} must define log_partition(theta, v, radius)")

    def mean(
        self, theta: Float[Tensor, "*batch N D"], v: Float[Tensor, "*batch N"], radius: float
    ) -> Float[Tensor, "*batch N D"]:
        """m = <s>, (*batch, N, D), for arguments as in `log_partition`."""
        return self._first(theta, v, radius)[0]

    def variance(
        self, theta: Float[Tensor, "*batch N D"], v: Float[Tensor, "*batch N"], radius: float
    ) -> Float[Tensor, "*batch N"]:
        """c = Tr Cov(s)/D, (*batch, N)."""
        m, half_square = self._first(theta, v, radius)
        return (2 * half_square - m.square().sum(-1)) / theta.shape[-1]

    def covariance(
        self, theta: Float[Tensor, "*batch N D"], v: Float[Tensor, "*batch N"], radius: float
    ) -> CovarianceMap:
        """The Hessian of log A, symmetric: what changes of theta and V change in <s> and <|s|^2>/2."""
        _, pullback = vjp(lambda theta, v: self._first(theta, v, radius), theta, v)
        return lambda by_theta, by_v: pullback((by_theta, by_v))

    def _first(self, theta: Tensor, v: Tensor, radius: float) -> tuple[Tensor, Tensor]:
        """(<s>, <|s|^2>/2)."""

        def total(theta: Tensor, v: Tensor) -> Tensor:
            return self.log_partition(theta, v, radius).sum()

        first: tuple[Tensor, Tensor] = torch.func.grad(total, argnums=(0, 1))(theta, v)
        return first


@dataclasses.dataclass(frozen=True)
class SpherePrior(Prior):
    """Vectors of length R in any direction: log A = log Z_1(theta) + V R^2/2, Z_1 by Bessel functions.

    In one dimension these are the two states of `IsingPrior`.
    """

    fixed_length: ClassVar[bool] = True

    def log_partition(self, theta: Tensor, v: Tensor, radius: float) -> Tensor:
        return _BESSEL.log_partition(theta, 1.0, radius) + v * radius**2 / 2

    def mean(self, theta: Tensor, v: Tensor, radius: float) -> Tensor:
        return _BESSEL.magnetization(theta, 1.0, radius)

    def variance(self, theta: Tensor, v: Tensor, radius: float) -> Tensor:
        # The mean over directions, of which the one along theta counts least: no digits are lost where it is small.
        across, slope = _BESSEL.covariance_terms(theta, 1.0, radius)
        return across + slope * theta.square().sum(-1) / theta.shape[-1]

    def covariance(self, theta: Tensor, v: Tensor, radius: float) -> CovarianceMap:
        across, slope = _BESSEL.covariance_terms(theta, 1.0, radius)

        def product(by_theta: Tensor, by_v: Tensor) -> tuple[Tensor, Tensor]:
            along = slope * (theta * by_theta).sum(-1)
            return across[..., None] * by_theta + along[..., None] * theta, torch.zeros_like(by_v)

        return product


@dataclasses.dataclass(frozen=True)
class IsingPrior(SpherePrior):
    """s = R or -R with equal weight, D = 1: m = R tanh(R theta), c = R^2 - m^2, log A = log cosh(R theta) + V R^2/2."""

    def check(self, dim: int) -> None:
        _require_one_dimension(self, dim, "use SpherePrior() for vectors of fixed length")


@dataclasses.dataclass(frozen=True)
class GaussianPrior(Prior):
    """Every component is normal with variance R^2/D, so that <|s|^2> = R^2; radius="sqrt_dim" makes that 1.

    log A = (c |theta|^2 - D log(D/R^2 c'))/2 with c = 1/(D/R^2 - V): m = c theta. It exists for V < D/R^2.
    """

    def log_partition(self, theta: Tensor, v: Tensor, radius: float) -> Tensor:
        dim = theta.shape[-1]
        spread = _gaussian_spread(v, radius**2 / dim)
        return (radius**2 / dim * spread * theta.square().sum(-1) + dim * spread.log()) / 2

    def mean(self, theta: Tensor, v: Tensor, radius: float) -> Tensor:
        return self.variance(theta, v, radius)[..., None] * theta

    def variance(self, theta: Tensor, v: Tensor, radius: float) -> Tensor:
        plain = radius**2 / theta.shape[-1]
        return plain * _gaussian_spread(v, plain)


@dataclasses.dataclass(frozen=True)
class DiscretePrior(Prior):
    """s = R x for one of finitely many numbers x, D = 1: log A = log sum_k w_k exp(theta R x_k + V R^2 x_k^2/2).

    `DiscretePrior((-1, 0, 1))` is the spin 1, `DiscretePrior((-1, 1))` is `IsingPrior`.

    Args:
        values: x, at least one number.
        weights: w > 0, one for each; divided by their sum. None makes them equal.
    """

    values: tuple[float, ...]
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _numbers("values", self.values))
        if self.weights is not None:
            object.__setattr__(self, "weights", _numbers("weights", self.weights, low=0.0))
            required = f"have {len(self.values)} entries, one for each value"
            _validate.require(len(self.weights) == len(self.values), "weights", required, len(self.weights))

    def check(self, dim: int) -> None:
        _require_one_dimension(self, dim, "use SpherePrior() or GaussianPrior() for vectors")

    def log_partition(self, theta: Tensor, v: Tensor, radius: float) -> Tensor:
        return self._exponents(theta, v, radius)[1].logsumexp(-1)

    def mean(self, theta: Tensor, v: Tensor, radius: float) -> Tensor:
        x, exponents = self._exponents(theta, v, radius)
        return (exponents.softmax(-1) * x).sum(-1, keepdim=True)

    def variance(self, theta: Tensor, v: Tensor, radius: float) -> Tensor:
        x, exponents = self._exponents(theta, v, radius)
        return _covariance(exponents.softmax(-1), x, x)

    def covariance(self, theta: Tensor, v: Tensor, radius: float) -> CovarianceMap:
        x, exponents = self._exponents(theta, v, radius)
        weights, half_square = exponents.softmax(-1), x.square() / 2

        def product(by_theta: Tensor, by_v: Tensor) -> tuple[Tensor, Tensor]:
            change = by_theta * x + by_v[..., None] * half_square
            return _covariance(weights, x, change)[..., None], _covariance(weights, half_square, change)

        return product

    def _exponents(self, theta: Tensor, v: Tensor, radius: float) -> tuple[Tensor, Tensor]:
        """The states, (K,), and the logarithms of their weights, (*batch, N, K)."""
        x = radius * torch.tensor(self.values, dtype=theta.dtype, device=theta.device)
        weights = self.weights or (1.0,) * len(self.values)
        logs = torch.tensor([math.log(w / sum(weights)) for w in weights], dtype=theta.dtype, device=theta.device)
        return x, logs + theta * x + v[..., None] * x.square() / 2


def _numbers(name: str, given: Any, low: float = -math.inf) -> tuple[float, ...]:
    """A tuple that no one else can change."""
    if not isinstance(given, tuple | list):
        raise TypeError(_validate.message(name, "be a tuple of numbers", type(given).__name__))
    _validate.require(len(given) > 0, name, "have at least one entry", given)
    for x in given:
        _validate.check_number(name, x, low=low, open_low=math.isfinite(low))
    return tuple(float(x) for x in given)


def _covariance(weights: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Of numbers a and b of states, (..., K), as a sum over pairs: exact however near 1 a weight is."""
    pairs = weights[..., :, None] * weights[..., None, :]
    return (pairs * _differences(a) * _differences(b)).sum((-2, -1)) / 2


def _differences(a: Tensor) -> Tensor:
    return a[..., :, None] - a[..., None, :]


def _gaussian_spread(v: Tensor, variance: float) -> Tensor:
    """Tilted over plain variance, NaN where there is none."""
    scale = 1 - variance * v
    return torch.where(scale > 0, scale, torch.nan).reciprocal()


def _require_one_dimension(prior: Any, dim: int, remedy: str) -> None:
    required = f"have spins of dimension 1 for {type(prior).__name__}"
    _validate.require(dim == 1, "system", required, f"D = {dim}", remedy)
