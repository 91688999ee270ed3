"""Laws of a unit whose K is infinite beyond a tilt: exponential and Laplace, with a soft barrier before that tilt."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import _validate
from .unit import Units


class _BoundedTilt(Units):
    """A law whose K is finite for tilts below `_limit` only (and above -`_limit` where it is symmetric).

    Beyond a soft barrier at tilts b, K is continued by its parabola at b, with two continuous derivatives.
    """

    soft_barrier: float | None
    _symmetric: ClassVar[bool]

    def __post_init__(self) -> None:
        super().__post_init__()
        name = dataclasses.fields(self)[0].name
        _validate.check_number(name, getattr(self, name), low=0.0, open_low=True)
        if self.soft_barrier is not None:
            _validate.check_number("soft_barrier", self.soft_barrier, low=0.0, open_low=True)
            required, remedy = "be in (0, 1), a share of the domain", "leave it out for none"
            _validate.require(self.soft_barrier < 1, "soft_barrier", required, self.soft_barrier, remedy)

    @property
    def largest_variance(self) -> float:
        """K'' at the soft barrier; infinite without one."""
        if self.soft_barrier is None:
            return math.inf
        return float(self._inner(torch.tensor(self._barrier, dtype=torch.float64))[2])

    def cumulant(self, t: Tensor) -> Tensor:
        inside, beyond = self._split(t)
        value, mean, variance = self._inner(inside)
        return value if beyond is None else value + beyond * (mean + beyond * variance / 2)

    def mean(self, t: Tensor) -> Tensor:
        inside, beyond = self._split(t)
        _, mean, variance = self._inner(inside)
        return mean if beyond is None else mean + beyond * variance

    def variance(self, t: Tensor) -> Tensor:
        return self._inner(self._split(t)[0])[2]

    @property
    def _limit(self) -> float:
        """The end of the domain, at which K becomes infinite."""
        raise NotImplementedError

    def _inner(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """K, K' and K'' inside the domain."""
        raise NotImplementedError

    def _can_draw(self, t: Tensor) -> Tensor:
        inside, beyond = self._split(t)
        # Beyond the barrier no law has the parabola as its cumulant.
        return inside.isfinite() if beyond is None else beyond == 0

    @property
    def _barrier(self) -> float:
        return (1 - (self.soft_barrier or 0.0)) * self._limit

    def _split(self, t: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the tilt, NaN outside of the domain, and None; or the tilt up to the barrier, and the rest."""
        if self.soft_barrier is None:
            return torch.where((t.abs() if self._symmetric else t) < self._limit, t, torch.nan), None
        inside = t.clamp(min=-self._barrier if self._symmetric else None, max=self._barrier)
        return inside, t - inside


@dataclass(frozen=True)
class ExponentialUnits(_BoundedTilt):
    """h > 0 of density rate exp(-rate h): K = -log(1 - t/rate) for t < rate, else NaN.

    Not for weights that grow without bound, which leave the domain of K: use `BernoulliUnits`.

    Args:
        rate: > 0.
        soft_barrier: None, or a share of the domain in (0, 1): from t = (1 - soft_barrier) rate on, K
            goes on as its parabola there, finite for every t and with two continuous derivatives. That parabola is no
            law's: `sample` is NaN there.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import ExponentialUnits
        >>> ExponentialUnits(2.0).mean(torch.tensor([0.0, 1.0, 2.0]))
        tensor([0.5000, 1.0000,    nan])
    """

    rate: float
    soft_barrier: float | None = None
    _symmetric: ClassVar[bool] = False

    @property
    def _limit(self) -> float:
        return self.rate

    def _inner(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = (self.rate - t).reciprocal()
        return -torch.log1p(-t / self.rate), mean, mean.square()

    def _draw(self, t: Tensor, generator: torch.Generator | None) -> Tensor:
        return torch.empty_like(t).exponential_(generator=generator) / (self.rate - t)


@dataclass(frozen=True)
class LaplaceUnits(_BoundedTilt):
    """h of density exp(-|h|/scale)/(2 scale): K = -log(1 - scale^2 t^2) for |t| < 1/scale, else NaN.

    Not for weights that grow without bound, which leave the domain of K: use `SignUnits`.

    Args:
        scale: > 0.
        soft_barrier: None, or a share of the domain in (0, 1): from |t| = (1 - soft_barrier)/scale on,
            K goes on as its parabola there, finite for every t and with two continuous derivatives. That parabola is
            no law's: `sample` is NaN there.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import LaplaceUnits
        >>> LaplaceUnits(0.5).mean(torch.tensor([0.0, 1.0, -2.0]))
        tensor([0.0000, 0.6667,    nan])
    """

    scale: float
    soft_barrier: float | None = None
    _symmetric: ClassVar[bool] = True

    @property
    def _limit(self) -> float:
        return 1 / self.scale

    def _inner(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.scale * t
        square = x.square()
        variance = 2 * self.scale**2 * (1 + square) / (1 - square).square()
        return -torch.log1p(-square), 2 * self.scale * x / (1 - square), variance

    def _draw(self, t: Tensor, generator: torch.Generator | None) -> Tensor:
        # An exponential law on either side, each with the weight of its mean.
        x = self.scale * t
        sign = 2 * torch.bernoulli((1 + x) / 2, generator=generator) - 1
        return sign * self.scale * torch.empty_like(t).exponential_(generator=generator) / (1 - sign * x)
