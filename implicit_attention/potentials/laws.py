"""Laws of a unit that is a number: K(t) = log of the mean of exp(t h) with its derivatives, one class per law.

Hidden units of a Boltzmann machine take all of them (`Units`). Sites of a spin system take those that answer to a
quadratic term as well (`SiteLaw`). Units of fixed length are in `sphere`, those whose K is
infinite beyond a tilt in `bounded_tilts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _validate
from ._rays import Ray, faster_ray, quadratic_ray
from .unit import SiteLaw, TiltMap, Units, require_dimension


@dataclass(frozen=True, init=False, repr=False)
class GaussianUnits(Units, SiteLaw):
    """h normal: K = mean t + variance t^2/2. Summing such hidden units over makes a Hopfield network.

    As the law of a site, with mean 0 and variance 1, every component of s is normal with variance R^2/D, so that
    <|s|^2> = R^2; SpinSystem's radius="sqrt_dim" makes the variance 1. Then
    log A = (c |theta|^2 - D log(D/R^2 c'))/2 with c = 1/(D/R^2 - V), and m = c theta. It exists for V < D/R^2.

    Not for units that must stay bounded: the effective energy then has no minimum once the weights are large; use
    `SignUnits` or `SphereUnits`.

    Args:
        mean: <h> at t = 0; the attribute is `center`, as `mean` is K'.
        variance: >= 0, a number, or a tuple with one for each unit, the last axis of t; the attribute is `spread`, as
            `variance` is K''.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import GaussianUnits
        >>> GaussianUnits(mean=1.0, variance=2.0).cumulant(torch.tensor([0.0, 1.0]))
        tensor([0., 2.])
    """

    center: float
    spread: float | tuple[float, ...]

    def __init__(self, mean: float = 0.0, variance: float | tuple[float, ...] = 1.0) -> None:
        object.__setattr__(self, "center", _validate.check_number("mean", mean))
        if isinstance(variance, tuple | list):
            spread = tuple(_validate.check_number("variance", each, low=0.0) for each in variance)
            _validate.require(len(spread) > 0, "variance", "have at least one entry", variance)
        else:
            spread = _validate.check_number("variance", variance, low=0.0)
        object.__setattr__(self, "spread", spread)

    def __repr__(self) -> str:
        return f"GaussianUnits(mean={self.center}, variance={self.spread})"

    @property
    def largest_variance(self) -> float:
        return max(self.spread) if isinstance(self.spread, tuple) else self.spread

    def spread_of(self, t: Tensor) -> float | Tensor:
        """The variance as a factor of t: a number, or one for each entry of the last axis, (H,)."""
        if not isinstance(self.spread, tuple):
            return self.spread
        required = f"have {len(self.spread)} entries on the last axis, one for each variance of the units"
        _validate.require(t.shape[-1:] == (len(self.spread),), "t", required, f"shape {tuple(t.shape)}")
        return torch.tensor(self.spread, dtype=t.dtype, device=t.device)

    def cumulant(self, t: Tensor) -> Tensor:
        return t * (self.center + self.spread_of(t) * t / 2)

    def mean(self, t: Tensor) -> Tensor:
        return self.center + self.spread_of(t) * t

    def variance(self, t: Tensor) -> Tensor:
        return torch.ones_like(t) * self.spread_of(t)

    def _draw(self, t: Tensor, generator: torch.Generator | None) -> Tensor:
        noise = torch.empty_like(t).normal_(generator=generator)
        return self.mean(t) + self.variance(t).sqrt() * noise

    def check(self, argument: str, dim: int, radius: float) -> None:
        required = "be GaussianUnits() of mean 0 and variance 1 as the law of a site"
        remedy = "the radius of the system is the scale of its spins, and a field moves their mean"
        _validate.require((self.center, self.spread) == (0, 1), "prior", required, repr(self), remedy)

    def tilted_log_partition(self, theta: Tensor, v: Tensor, radius: float) -> Tensor:
        m, c = self.tilted_moments(theta, v, radius)
        dim = theta.shape[-1]
        return ((m * theta).sum(-1) + dim * (c * (dim / radius**2)).log()) / 2

    def tilted_moments(self, theta: Tensor, v: Tensor, radius: float) -> tuple[Tensor, Tensor]:
        plain = radius**2 / theta.shape[-1]
        scale = 1 - plain * v
        c = plain * torch.where(scale > 0, scale, torch.nan).reciprocal()
        return c[..., None] * theta, c


@dataclass(frozen=True)
class DiscreteUnits(Units, SiteLaw):
    """One of finitely many numbers x: K = log sum_k w_k exp(t x_k).

    As the law of a site s = R x, D = 1: log A = log sum_k w_k exp(theta R x_k + V R^2 x_k^2/2).
    `DiscreteUnits((-1, 0, 1))` is the spin 1.

    Not for two states: `SignUnits` and `BernoulliUnits` have closed forms. A variance costs the square of the number of
    states.

    Args:
        values: x, at least one number.
        weights: w > 0, one for each; divided by their sum. None makes them equal.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import DiscreteUnits
        >>> DiscreteUnits((0, 1, 2), weights=(1, 2, 1)).mean(torch.tensor([0.0, 9.0]))
        tensor([1.0000, 1.9998])
    """

    values: tuple[float, ...]
    weights: tuple[float, ...] | None = None
    linear_growth: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _numbers("values", self.values))
        if self.weights is not None:
            object.__setattr__(self, "weights", _numbers("weights", self.weights, low=0.0))
            required = f"have {len(self.values)} entries, one for each value"
            _validate.require(len(self.weights) == len(self.values), "weights", required, len(self.weights))

    @property
    def largest_variance(self) -> float:
        return (max(self.values) - min(self.values)) ** 2 / 4

    def cumulant(self, t: Tensor, v: Tensor | float = 0.0) -> Tensor:
        _, logs, tilt = self._tilted(t, v)
        # A sum of exponentials would be rounded at 1 where K is near 0; the sum of differences overflows far away.
        near = tilt.abs().amax(-1) < 1
        small = torch.where(near[..., None], tilt, 0.0)
        return torch.where(near, (logs.exp() * torch.expm1(small)).sum(-1).log1p(), (logs + tilt).logsumexp(-1))

    def mean(self, t: Tensor, v: Tensor | float = 0.0) -> Tensor:
        x, weights = self._weights(t, v)
        return (weights * x).sum(-1)

    def variance(self, t: Tensor, v: Tensor | float = 0.0) -> Tensor:
        x, weights = self._weights(t, v)
        return _covariance(weights, x, x)

    def _draw(self, t: Tensor, generator: torch.Generator | None) -> Tensor:
        x, weights = self._weights(t, 0.0)
        # The first of waiting times with rates p_k is that of the state k with probability p_k.
        return x[(torch.empty_like(weights).exponential_(generator=generator) / weights).argmin(-1)]

    def check(self, argument: str, dim: int, radius: float) -> None:
        require_dimension(self, argument, dim, 1, "use SphereUnits() or GaussianUnits() for vectors")

    def tilted_log_partition(self, theta: Tensor, v: Tensor, radius: float) -> Tensor:
        return self.cumulant(radius * theta[..., 0], radius**2 * v)

    def tilted_moments(self, theta: Tensor, v: Tensor, radius: float) -> tuple[Tensor, Tensor]:
        x, weights = self._weights(radius * theta[..., 0], radius**2 * v)
        return radius * (weights * x).sum(-1, keepdim=True), radius**2 * _covariance(weights, x, x)

    def tilted_covariance(self, theta: Tensor, v: Tensor, radius: float) -> TiltMap:
        x, weights = self._weights(radius * theta[..., 0], radius**2 * v)
        x, half_square = radius * x, (radius * x).square() / 2

        def product(by_theta: Tensor, by_v: Tensor) -> tuple[Tensor, Tensor]:
            change = by_theta * x + by_v[..., None] * half_square
            return _covariance(weights, x, change)[..., None], _covariance(weights, half_square, change)

        return product

    def _weights(self, t: Tensor, v: Tensor | float) -> tuple[Tensor, Tensor]:
        """The states, (K,), and their probabilities, (..., K)."""
        x, logs, tilt = self._tilted(t, v)
        return x, (logs + tilt).softmax(-1)

    def _tilted(self, t: Tensor, v: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
        """The states and the logarithms of their weights, (K,), and the exponents of their tilts, (..., K)."""
        weights = self.weights or (1.0,) * len(self.values)
        x, logs = (
            torch.tensor(numbers, dtype=t.dtype, device=t.device)
            for numbers in (self.values, [math.log(w / sum(weights)) for w in weights])
        )
        return x, logs, t[..., None] * x + x.square() * (v[..., None] if isinstance(v, Tensor) else v) / 2


def _numbers(name: str, values: Any, low: float = -math.inf) -> tuple[float, ...]:
    """Return a tuple of the numbers, which the caller cannot change afterwards."""
    if not isinstance(values, tuple | list):
        raise TypeError(_validate.message(name, "be a tuple of numbers", type(values).__name__))
    _validate.require(len(values) > 0, name, "have at least one entry", values)
    return tuple(float(_validate.check_number(name, x, low=low, open_low=math.isfinite(low))) for x in values)


def _covariance(weights: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return Cov(a, b) over states, (..., K), as a sum over pairs: exact however near 1 a weight is."""
    pairs = weights[..., :, None] * weights[..., None, :]
    differences = [x[..., :, None] - x[..., None, :] for x in (a, b)]
    return (pairs * differences[0] * differences[1]).sum((-2, -1)) / 2


@dataclass(frozen=True)
class BernoulliUnits(Units):
    """h = 1 with probability p, else 0: K = log(1 - p + p e^t).

    Not for a p of 0 or 1: use `ConstantUnits`.

    Args:
        p: between 0 and 1, both excluded.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import BernoulliUnits
        >>> BernoulliUnits(0.5).mean(torch.tensor([0.0, 2.0]))
        tensor([0.5000, 0.8808])
    """

    p: float
    linear_growth: ClassVar[bool] = True
    largest_variance: ClassVar[float] = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.check_number("p", self.p)
        _validate.require(0 < self.p < 1, "p", "be between 0 and 1", self.p, "use ConstantUnits(0.0 or 1.0) for these")

    def cumulant(self, t: Tensor) -> Tensor:
        # Both terms by the same function, so that K is 0 at 0; softplus would be cut off at 20.
        return F.logsigmoid(torch.full_like(t, -self._logit)) - F.logsigmoid(-t - self._logit)

    def mean(self, t: Tensor) -> Tensor:
        return torch.sigmoid(t + self._logit)

    def variance(self, t: Tensor) -> Tensor:
        return torch.sigmoid(t + self._logit) * torch.sigmoid(-t - self._logit)

    def _draw(self, t: Tensor, generator: torch.Generator | None) -> Tensor:
        return torch.bernoulli(self.mean(t), generator=generator)

    @property
    def _logit(self) -> float:
        return math.log(self.p) - math.log1p(-self.p)


@dataclass(frozen=True)
class PoissonUnits(Units):
    """h = 0, 1, 2, ...: K = rate (e^t - 1).

    `sample` is NaN from the mean 2^53 on, where counts have no numbers of their own.

    Not for Gaussian visible units, whose law cannot be normalised against it: use `BernoulliUnits`.

    Args:
        rate: > 0.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import PoissonUnits
        >>> PoissonUnits(2.0).variance(torch.tensor([0.0, 1.0]))
        tensor([2.0000, 5.4366])
    """

    rate: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.check_number("rate", self.rate, low=0.0, open_low=True)

    def cumulant(self, t: Tensor) -> Tensor:
        return self.rate * torch.expm1(t)

    def mean(self, t: Tensor) -> Tensor:
        return self.rate * torch.exp(t)

    def variance(self, t: Tensor) -> Tensor:
        return self.mean(t)

    def _draw(self, t: Tensor, generator: torch.Generator | None) -> Tensor:
        return torch.poisson(self.mean(t), generator=generator)

    def _can_draw(self, t: Tensor) -> Tensor:
        return self.mean(t) < 2**53


@dataclass(frozen=True)
class ConstantUnits(Units):
    """h = value for certain: K = value t, a field on the visible units.

    Not for a field that every visible unit has of its own: give that to the energy.

    Args:
        value: any number.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import ConstantUnits
        >>> ConstantUnits(3.0).cumulant(torch.tensor([0.0, 2.0]))
        tensor([0., 6.])
    """

    value: float
    linear_growth: ClassVar[bool] = True
    largest_variance: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.check_number("value", self.value)

    def cumulant(self, t: Tensor) -> Tensor:
        return self.value * t

    def mean(self, t: Tensor) -> Tensor:
        # Not a constant tensor, so that every order of its derivative exists, and NaN stays NaN.
        return self.value + 0 * t

    def variance(self, t: Tensor) -> Tensor:
        return 0 * t

    def _draw(self, t: Tensor, generator: torch.Generator | None) -> Tensor:
        return torch.full_like(t, self.value)


def units_ray(
    units: Units, keys: Callable[[], Tensor], beta: float | Tensor, scale: float | Tensor, *, together: bool = True
) -> Ray | None:
    """Return the ray of (1/beta) sum_j K(beta <k_j, z>) for a law's cumulant K; `keys` are computed only if needed."""
    if type(units) is GaussianUnits:
        rows = keys()
        roots = torch.tensor(units.spread, dtype=rows.dtype, device=rows.device).sqrt()
        return quadratic_ray(rows * roots[..., None], beta, scale, together=together)
    return faster_ray(keys()) if type(units) is PoissonUnits else None
