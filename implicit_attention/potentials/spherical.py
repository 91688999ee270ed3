"""Spins of fixed length in a field: the interface of their laws, and approximations by one square root."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import _validate
from .._torch import at_least_single, vjp
from ._shapes import PerBatch
from .unit import Sites, Vectors

Beta: TypeAlias = PerBatch


class Site(NamedTuple):
    """A field in the precision of the computation, and beta with one entry per row of it."""

    field: Tensor
    beta: float | Tensor
    radius: float

    @property
    def dim(self) -> int:
        return self.field.shape[-1]

    @property
    def t(self) -> Tensor:
        """kappa^2 = (beta R |f|)^2."""
        scale = self.beta * self.radius
        t = scale * scale * self.field.square().sum(-1)
        # Where t overflows it is unknown; a gain of 1/inf would give m = 0.
        return torch.where(t.isinf(), torch.nan, t)

    @property
    def x(self) -> Tensor:
        """beta R f in one dimension."""
        return self.beta * self.radius * self.field[..., 0]


@dataclass(frozen=True)
class SphericalLaw:
    """A spin s of length R in D dimensions, whose weight in the field f is exp(beta f.s) against the uniform measure.

    With kappa = beta R |f| and u = f/|f|, all in closed form and exact at f = 0:

        log_partition  log Z_1(f) = log of the mean of exp(beta f.s) over the sphere, 0 at f = 0, convex
        magnetization  m = R A(kappa) u = (1/beta) grad log Z_1
        covariance     tau (I - u u^T) + rho u u^T = (1/beta) dm/df,  tau = R^2 A/kappa,  rho = R^2 dA/dkappa
        entropy        S(m) = min over f of log Z_1(f) - beta f.m

    S is relative to the uniform measure: 0 at m = 0, else negative, concave. Gamma = -S is the Legendre transform of
    log Z_1, with grad Gamma = beta f. In mean field
    beta F = -sum_i S(m_i) - (beta/2) sum_ij J_ij m_i.m_j - beta sum_i h_i.m_i.

    A subclass gives the functions of t = kappa^2 and q = |m|^2/R^2 below. These are smooth also at 0, where functions
    of the lengths kappa and |m| are not. Half precision is computed in float32.

    A subclass may be an approximation (`AmosResponse`); then it has no moments beyond these, and is no `SiteLaw`.

    Not for spins whose length varies: use `GaussianUnits` or `DiscreteUnits` with `AdaTAP`.

    Gradients: with respect to field, magnetization and beta, to any order, also at 0.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import SphereUnits, SphericalLaw
        >>> law, field = SphereUnits(), torch.tensor([[0.0, 0.0, 2.0]])
        >>> isinstance(law, SphericalLaw)
        True
        >>> m = law.magnetization(field, beta=1.0, radius=1.0)
        >>> m
        tensor([[0.0000, 0.0000, 0.5373]])
        >>> torch.allclose(law.inverse(m, beta=1.0, radius=1.0), field)
        True
    """

    def check(self, argument: str, dim: int, radius: float) -> None:
        """Raise, with the name of the argument, if the law does not exist at this dimension and radius."""

    def scaled_log_partition(self, t: Tensor, dim: int) -> Tensor:
        """log Z_1 as a function of t = kappa^2."""
        raise NotImplementedError

    def gain(self, t: Tensor, dim: int) -> Tensor:
        """A/kappa, twice the derivative of `scaled_log_partition`."""
        raise NotImplementedError

    def gain_slope(self, t: Tensor, dim: int) -> Tensor:
        """The derivative of `gain`."""
        raise NotImplementedError

    def radial_gain(self, t: Tensor, dim: int) -> Tensor:
        """dA/dkappa, which is gain + 2 t gain_slope."""
        raise NotImplementedError

    def gains(self, t: Tensor, dim: int, orders: int, *, radial: bool = False) -> tuple[Tensor, ...]:
        """`gain` and its derivatives up to `orders`, then `radial_gain` if it is asked for."""
        found = [self.gain(t, dim), self.gain_slope(t, dim)][: orders + 1]
        function: Callable[[Tensor], Tensor] = lambda t: self.gain_slope(t, dim)  # noqa: E731
        for _ in range(2, orders + 1):
            function = _derivative(function)
            found.append(function(t))
        return (*found, self.radial_gain(t, dim)) if radial else tuple(found)

    def inverse_gain(self, q: Tensor, dim: int) -> Tensor:
        """kappa/A where A^2 = q < 1."""
        raise NotImplementedError

    def scaled_entropy(self, q: Tensor, dim: int) -> Tensor:
        """S as a function of q = |m|^2/R^2 < 1."""
        raise NotImplementedError

    def log_partition(self, field: Vectors, beta: Beta, radius: float) -> Sites:
        """log Z_1 per site, relative to the uniform measure on the sphere.

        Args:
            field: f, (*batch, N, D).
            beta: > 0, a float or a tensor that broadcasts to *batch.
            radius: R > 0.

        Returns:
            (*batch, N).
        """
        site = self._site(field, beta, radius)
        return self._at(site.dim)._value(site).to(field.dtype)

    def magnetization(self, field: Vectors, beta: Beta, radius: float) -> Vectors:
        """m = <s>, (*batch, N, D), for arguments as in `log_partition`."""
        site = self._site(field, beta, radius)
        return self._at(site.dim)._mean(site).to(field.dtype)

    def covariance_parts(self, field: Vectors, beta: Beta, radius: float) -> tuple[Sites, Sites]:
        """(tau, rho), the variances across and along the field, each (*batch, N), to rounding however small they are.

        One dimension has no direction across the field; there tau = rho.
        """
        site = self._site(field, beta, radius)
        tau, rho = self._at(site.dim)._parts(site)
        return tau.to(field.dtype), rho.to(field.dtype)

    def covariance_terms(self, field: Vectors, beta: Beta, radius: float) -> tuple[Sites, Sites]:
        """(tau, slope) with Cov(s) = tau I + slope f f^T, slope = (rho - tau)/|f|^2: smooth where f/|f| is not."""
        site = self._site(field, beta, radius)
        tau, slope = self._at(site.dim)._terms(site)
        return tau.to(field.dtype), slope.to(field.dtype)

    def cumulant_terms(self, field: Vectors, beta: Beta, radius: float, count: int) -> tuple[Sites, ...]:
        """(tau, slope, bend, ..., rho): `count` functions of |f|, each the derivative of the one before, and rho.

        d tau/df = slope f, d slope/df = bend f, and so on. Not for Ising spins, whose covariance has no such parts.
        """
        site = self._site(field, beta, radius)
        *series, radial = self.gains(site.t, site.dim, count - 1, radial=True)
        square = site.radius**2
        by_square = 2 * site.beta * site.beta * square
        terms = [square * series[0]]
        factor: float | Tensor = square
        for gain in series[1:]:
            factor = factor * by_square
            terms.append(factor * gain)
        return tuple(term.to(field.dtype) for term in (*terms, square * radial))

    def covariance_product(self, field: Vectors, beta: Beta, radius: float, v: Vectors) -> Vectors:
        """Cov(s) v per site; beta Cov(s) is the derivative of `magnetization`, and symmetric."""
        site = self._site(field, beta, radius)
        _validate.check_float_tensor("v", v, min_ndim=2)
        _validate.check_same_kind([("field", field), ("v", v)])
        _validate.check_together("v", v.shape, field.shape, "the shape of `field`")
        return covariance_times(self._at(site.dim)._terms(site), site.field, at_least_single(v)).to(field.dtype)

    def inverse(self, magnetization: Vectors, beta: Beta, radius: float) -> Vectors:
        """The field that gives `magnetization`; NaN at sites with |m| >= R, which no finite field gives."""
        m = self._vectors("magnetization", magnetization, radius) / radius
        rows = _rows(beta, magnetization, "magnetization")
        scale = (rows[..., None] if isinstance(rows, Tensor) else rows) * radius
        return (self._at(m.shape[-1])._inverse(m) / scale).to(magnetization.dtype)

    def entropy(self, magnetization: Vectors, radius: float) -> Sites:
        """S(m) = log Z_1 - beta f.m <= 0 at the field that gives m, whatever beta; NaN at sites with |m| >= R."""
        m = self._vectors("magnetization", magnetization, radius) / radius
        return self._at(m.shape[-1])._entropy(m).to(magnetization.dtype)

    # The same functions in the precision of the computation, without checks.

    def answer(self, field: Tensor, beta: float | Tensor, radius: float) -> Tensor:
        """`magnetization` for arguments in that precision that were checked before."""
        rows = beta[..., None] if isinstance(beta, Tensor) else beta
        return self._at(field.shape[-1])._mean(Site(field, rows, radius))

    def _at(self, dim: int) -> SphericalLaw:
        """Return the law with the formulas for this dimension."""
        return self

    def _value(self, site: Site) -> Tensor:
        return self.scaled_log_partition(site.t, site.dim)

    def _mean(self, site: Site) -> Tensor:
        rows = site.beta * site.radius**2 * self.gain(site.t, site.dim)
        return rows[..., None] * site.field

    def _parts(self, site: Site) -> tuple[Tensor, Tensor]:
        square = site.radius**2
        gain, radial = self.gains(site.t, site.dim, 0, radial=True)
        return square * gain, square * radial

    def _terms(self, site: Site) -> tuple[Tensor, Tensor]:
        square = site.radius**2
        gain, slope = self.gains(site.t, site.dim, 1)
        return square * gain, 2 * square**2 * site.beta * site.beta * slope

    def _inverse(self, m: Tensor) -> Tensor:
        """Beta R f for a magnetization in units of R."""
        return self.inverse_gain(_square(m), m.shape[-1])[..., None] * m

    def _entropy(self, m: Tensor) -> Tensor:
        return self.scaled_entropy(_square(m), m.shape[-1])

    def _site(self, field: Tensor, beta: float | Tensor, radius: float) -> Site:
        return Site(self._vectors("field", field, radius), _rows(beta, field, "field"), radius)

    def _vectors(self, argument: str, vectors: Tensor, radius: float) -> Tensor:
        _validate.check_float_tensor(argument, vectors, min_ndim=2)
        dim = vectors.shape[-1]
        _validate.require(dim > 0, argument, "have at least one dimension", f"shape {tuple(vectors.shape)}")
        radius = _validate.check_number("radius", radius, low=0.0, open_low=True)
        self.check(argument, dim, radius)
        wide: Tensor = at_least_single(vectors)
        return wide


class _AlgebraicResponse(SphericalLaw):
    """Approximations of the form A = kappa/(a + sqrt(b^2 + kappa^2)); a subclass gives a and b."""

    def coefficients(self, dim: int) -> tuple[float, float]:
        raise NotImplementedError

    def scaled_log_partition(self, t: Tensor, dim: int) -> Tensor:
        a, b = self.coefficients(dim)
        above = t / ((t + b**2).sqrt() + b)  # sqrt(b^2 + t) - b
        return above - a * torch.log1p(above / (a + b))

    def gain(self, t: Tensor, dim: int) -> Tensor:
        a, b = self.coefficients(dim)
        return (a + (t + b**2).sqrt()).reciprocal()

    def gain_slope(self, t: Tensor, dim: int) -> Tensor:
        b = self.coefficients(dim)[1]
        return -self.gain(t, dim).square() / (2 * (t + b**2).sqrt())

    def radial_gain(self, t: Tensor, dim: int) -> Tensor:
        a, b = self.coefficients(dim)
        return (a + b**2 / (t + b**2).sqrt()) * self.gain(t, dim).square()

    def inverse_gain(self, q: Tensor, dim: int) -> Tensor:
        a, b = self.coefficients(dim)
        return (a + (a**2 + (1 - q) * (b**2 - a**2)).sqrt()) / (1 - q)

    def scaled_entropy(self, q: Tensor, dim: int) -> Tensor:
        # L(1 - q) - (a + b) - a log(...) with L = inverse_gain, rewritten without differences of near numbers.
        a, b = self.coefficients(dim)
        root = (a**2 + (1 - q) * (b**2 - a**2)).sqrt()
        return -q * (b**2 - a**2) / (root + b) - a * torch.log1p(q * (root + a) / ((root + b) * (1 - q)))


class AmosResponse(_AlgebraicResponse):
    """Amos' bound for `SphereUnits`, a = (D - 1)/2 and b = (D + 1)/2: exact for small and large kappa, and a lower one.

    The largest relative error of m is 4.5 % at D = 2, 1.1 % at D = 8, .14 % at D = 64, at the cost of one square root.

    Not for one dimension, where the exact law is as cheap: use `SignUnits`.

    Reference: Amos (1974), Computation of modified Bessel functions and their ratios, eq. 16.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import AmosResponse, SphereUnits
        >>> field = torch.ones(1, 2)
        >>> AmosResponse().log_partition(field, beta=1.0, radius=1.0)
        tensor([0.4378])
        >>> SphereUnits().log_partition(field, beta=1.0, radius=1.0)
        tensor([0.4486])
    """

    def coefficients(self, dim: int) -> tuple[float, float]:
        return (dim - 1) / 2, (dim + 1) / 2


class SaddlePointResponse(_AlgebraicResponse):
    """Steepest descent over the length of the spin, a = b = D/2, for any radius: exact for D to infinity.

    m = 2 beta R^2 f / (D + sqrt(D^2 + 4 beta^2 R^2 |f|^2)).

    Not for accuracy: its error is about 2.7 times that of `AmosResponse`, at the same cost.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import SaddlePointResponse
        >>> SaddlePointResponse().magnetization(torch.tensor([[3.0, 4.0]]), beta=1.0, radius=1.0)
        tensor([[0.4919, 0.6558]])
    """

    def coefficients(self, dim: int) -> tuple[float, float]:
        return dim / 2, dim / 2


class LargeDResponse(_AlgebraicResponse):
    """The usual large-D response, only for R^2 = D/2 - 1: m = beta f/(1 + g), g = sqrt(1 + beta^2 |f|^2/R^2).

    In the form of the others a = b = D/2 - 1.

    Not for few dimensions: its gain at zero field is off by the factor D/(D - 2); use `AmosResponse`.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import LargeDResponse
        >>> LargeDResponse().magnetization(torch.ones(1, 4), beta=1.0, radius=1.0)
        tensor([[0.3090, 0.3090, 0.3090, 0.3090]])
    """

    def coefficients(self, dim: int) -> tuple[float, float]:
        return dim / 2 - 1, dim / 2 - 1

    def check(self, argument: str, dim: int, radius: float) -> None:
        other = "use SphereUnits or AmosResponse, which take any"
        required = "have more than 2 dimensions for LargeDResponse, whose radius^2 is D/2 - 1"
        _validate.require(dim > 2, argument, required, f"D = {dim}", other)
        # A radius is a root that may have been rounded to float32.
        required = f"be sqrt(D/2 - 1) = {math.sqrt(dim / 2 - 1):.6g} for LargeDResponse at D = {dim}"
        _validate.require(math.isclose(radius**2, dim / 2 - 1, rel_tol=1e-6), "radius", required, radius, other)


def _rows(beta: float | Tensor, vectors: Tensor, name: str) -> float | Tensor:
    """Beta with one entry per row of `vectors`, in the precision of the computation."""
    remedy = "parametrise it, for example as an exponential"
    beta = _validate.check_per_batch("beta", beta, low=0.0, open_low=True, remedy=remedy)
    _validate.check_fits_batch("beta", beta, name, vectors)
    return at_least_single(beta)[..., None] if isinstance(beta, Tensor) else beta


def _square(m: Tensor) -> Tensor:
    """Return |m|^2 in units of R^2, NaN where no field gives it."""
    q = m.square().sum(-1)
    return torch.where(q < 1, q, torch.nan)


def _derivative(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The derivative of a function that acts entry by entry."""

    def derivative(t: Tensor) -> Tensor:
        value, pullback = vjp(function, t)
        slope: Tensor = pullback(torch.ones_like(value))[0]
        return slope

    return derivative


def covariance_times(terms: tuple[Tensor, Tensor], field: Tensor, v: Tensor) -> Tensor:
    """Return (tau I + slope f f^T) v."""
    tau, slope = terms
    along = slope * (field * v).sum(-1)
    return tau[..., None] * v + along[..., None] * field
