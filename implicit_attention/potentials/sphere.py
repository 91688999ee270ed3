"""The exact law of spins of fixed length: vectors in any dimension, and the two states of an Ising spin."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .. import _validate
from .._torch import at_least_single
from . import _bessel
from ._cosine import one_minus_cosine
from .spherical import Site, SphericalLaw, covariance_times
from .unit import SiteLaw, TiltMap, Units, require_dimension


@dataclass(frozen=True)
class SphereUnits(SphericalLaw, SiteLaw, Units):
    """A vector of length R in any direction, the von Mises-Fisher law: A = I_{D/2}/I_{D/2-1}, coth - 1/kappa for D = 3.

    As a hidden unit, h is one component of a unit vector in `dim` dimensions: K = log Z_1(t), NaN where t^2 is not
    finite; half precision is computed in float32. In one dimension a site has the two states of `SignUnits`.

    Value and derivatives are right to rounding for every kappa that has a square, and for D from 1 to 4096 and beyond.
    A call costs a fixed number of operations per site (not per component), about 100 for small D, fewer for D > 40;
    variances take about three times as many.

    Not for many spins where an error of a percent is allowed: use `AmosResponse`, which costs one square root.

    Args:
        dim: D >= 2. None takes the dimension of the spins; hidden units need a number.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import SphereUnits
        >>> SphereUnits(8).variance(torch.tensor([0.0, 100.0]))
        tensor([0.1250, 0.0003])
        >>> SphereUnits().log_partition(torch.ones(1, 4), beta=1.0, radius=2.0)
        tensor([1.5851])
    """

    dim: int | None = None
    linear_growth: ClassVar[bool] = True
    fixed_length: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.dim is not None:
            _validate.check_integer("dim", self.dim, low=2, remedy="use SignUnits() for one dimension")

    def check(self, argument: str, dim: int, radius: float) -> None:
        if self.dim is not None:
            require_dimension(self, argument, dim, self.dim, "use SphereUnits() for vectors of any dimension")

    def scaled_log_partition(self, t: Tensor, dim: int) -> Tensor:
        return _bessel.log_partition(t, dim)

    def gain(self, t: Tensor, dim: int) -> Tensor:
        return _bessel.ratio(t, dim)

    def gain_slope(self, t: Tensor, dim: int) -> Tensor:
        return _bessel.ratio_slope(t, dim)

    def radial_gain(self, t: Tensor, dim: int) -> Tensor:
        return _bessel.radial(t, dim)

    def gains(self, t: Tensor, dim: int, orders: int, *, radial: bool = False) -> tuple[Tensor, ...]:
        return _bessel.derivatives(t, dim, tuple(range(orders + 1)), (0,) if radial else ())

    def inverse_gain(self, q: Tensor, dim: int) -> Tensor:
        return _bessel.length(q, dim)

    def scaled_entropy(self, q: Tensor, dim: int) -> Tensor:
        return _bessel.entropy(q, dim)

    @property
    def largest_variance(self) -> float:
        return 1 / self._known_dim

    def cumulant(self, t: Tensor) -> Tensor:
        return self.scaled_log_partition(at_least_single(t).square(), self._known_dim).to(t.dtype)

    def mean(self, t: Tensor) -> Tensor:
        return t * self.gain(at_least_single(t).square(), self._known_dim).to(t.dtype)

    def variance(self, t: Tensor) -> Tensor:
        return self.radial_gain(at_least_single(t).square(), self._known_dim).to(t.dtype)

    def _draw(self, t: Tensor, generator: torch.Generator | None) -> Tensor:
        # Numbers from [0, 1) come in steps of eps/2, 0 included.
        level = torch.empty_like(t).uniform_(generator=generator).clamp_(min=torch.finfo(t.dtype).eps / 2)
        below = one_minus_cosine(t.abs(), self._known_dim, generator, level)
        return torch.where(t < 0, below - 1, 1 - below)

    def tilted_log_partition(self, theta: Tensor, v: Tensor, radius: float) -> Tensor:
        return self.log_partition(theta, 1.0, radius) + v * radius**2 / 2

    def tilted_moments(self, theta: Tensor, v: Tensor, radius: float) -> tuple[Tensor, Tensor]:
        tau, rho = self.covariance_parts(theta, 1.0, radius)
        m = self.magnetization(theta, 1.0, radius) if theta.shape[-1] == 1 else tau[..., None] * theta
        # The mean over directions: no digits are lost where it is small.
        return m, tau + (rho - tau) / theta.shape[-1]

    def tilted_covariance(self, theta: Tensor, v: Tensor, radius: float) -> TiltMap:
        terms = self.covariance_terms(theta, 1.0, radius)
        return lambda by_theta, by_v: (covariance_times(terms, theta, by_theta), torch.zeros_like(by_v))

    @property
    def _known_dim(self) -> int:
        if self.dim is None:
            required = "have a dimension as hidden units"
            raise ValueError(_validate.message("units", required, repr(self), "for example SphereUnits(3)"))
        return self.dim

    def _at(self, dim: int) -> SphericalLaw:
        return SignUnits() if dim == 1 else self


@dataclass(frozen=True)
class SignUnits(SphereUnits):
    """Two states, 1 and -1 with equal weight: K = log cosh t. As the law of a site these are R and -R, an Ising spin.

    The functions are elementary. They are functions of the field itself, which has a sign, and the variance is exact
    where it vanishes exponentially.

    Not for spins of more than one dimension: use `SphereUnits()`, which for one dimension is the same law.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import SignUnits
        >>> SignUnits().mean(torch.tensor([0.0, 1.0]))
        tensor([0.0000, 0.7616])
        >>> SignUnits().entropy(torch.tensor([[0.0], [1.0]]), radius=1.0)
        tensor([ 0.0000, -0.6931])
    """

    dim: int | None = field(default=1, init=False, repr=False)

    def __post_init__(self) -> None:
        """No check: the dimension is 1."""

    def cumulant(self, t: Tensor) -> Tensor:
        return _log_cosh(at_least_single(t)).to(t.dtype)

    def mean(self, t: Tensor) -> Tensor:
        return torch.tanh(t)

    def variance(self, t: Tensor) -> Tensor:
        return 4 * torch.sigmoid(2 * t) * torch.sigmoid(-2 * t)

    def _draw(self, t: Tensor, generator: torch.Generator | None) -> Tensor:
        return 2 * torch.bernoulli(torch.sigmoid(2 * t), generator=generator) - 1

    def _at(self, dim: int) -> SphericalLaw:
        return self

    def _value(self, site: Site) -> Tensor:
        return _log_cosh(site.x)

    def _mean(self, site: Site) -> Tensor:
        return site.radius * torch.tanh(site.x)[..., None]

    def _parts(self, site: Site) -> tuple[Tensor, Tensor]:
        rho = site.radius**2 * self.variance(site.x)
        return rho, rho

    def _terms(self, site: Site) -> tuple[Tensor, Tensor]:
        rho, _ = self._parts(site)
        return rho, torch.zeros_like(rho)

    def _inverse(self, m: Tensor) -> Tensor:
        return torch.atanh(m)

    def _entropy(self, m: Tensor) -> Tensor:
        """Binary entropy minus log 2, also at m = -1 and 1, where it is -log 2."""
        m = torch.where(m[..., 0].abs() <= 1, m[..., 0], torch.nan)
        near = m.abs() < 0.5
        small, large = torch.where(near, m, 0.0), torch.where(near, 0.5, m)
        far = (torch.special.entr((1 + large) / 2) + torch.special.entr((1 - large) / 2)) - math.log(2)
        return torch.where(near, -torch.log1p(-small.square()) / 2 - small * torch.atanh(small), far)


def _log_cosh(x: Tensor) -> Tensor:
    # Elsewhere each form gets a harmless number: a NaN there times a zero gradient would be NaN.
    near = x.abs() < 1
    small, large = torch.where(near, x, 0.0), torch.where(near, 1.0, x).abs()
    far = large + torch.log1p(torch.exp(-2 * large)) - math.log(2)
    return torch.where(near, torch.log1p(torch.sinh(small).square()) / 2, far)
