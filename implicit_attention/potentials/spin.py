"""One vector spin of fixed length in a field: log-partition function, magnetization and covariance in any dimension."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from . import _bessel


class _Site(NamedTuple):
    """A field in the precision of the computation, beta with one entry per row of it, and t = (beta R |f|)^2."""

    field: Tensor
    beta: float | Tensor
    radius: float
    t: Tensor

    @property
    def dim(self) -> int:
        return self.field.shape[-1]


@dataclass(frozen=True)
class Response:
    """A spin s of length R in D dimensions, whose weight in the field f is exp(beta f.s) against the uniform measure.

    With kappa = beta R |f| and u = f/|f|, all in closed form and exact at f = 0:

        log_partition  log Z_1(f) = log of the mean of exp(beta f.s) over the sphere, 0 at f = 0, convex
        magnetization  m = R A(kappa) u = (1/beta) grad log Z_1
        covariance     tau (I - u u^T) + rho u u^T = (1/beta) dm/df,  tau = R^2 A/kappa,  rho = R^2 dA/dkappa
        entropy        S(m) = min over f of log Z_1(f) - beta f.m

    S is relative to the uniform measure: 0 at m = 0, else negative, concave. Gamma = -S is the Legendre transform of
    log Z_1, with grad Gamma = beta f. In mean field
    beta F = -sum_i S(m_i) - (beta/2) sum_ij J_ij m_i.m_j - beta sum_i h_i.m_i.

    A subclass gives the functions of t = kappa^2 and q = |m|^2/R^2 below; what they are functions of keeps them smooth
    where the length of a vector is not. Half precision is computed in float32.

    Gradients: with respect to field, magnetization and beta, to any order, also at 0.
    """

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

    def inverse_gain(self, q: Tensor, dim: int) -> Tensor:
        """kappa/A where A^2 = q < 1."""
        raise NotImplementedError

    def scaled_entropy(self, q: Tensor, dim: int) -> Tensor:
        """S as a function of q = |m|^2/R^2 < 1."""
        raise NotImplementedError

    def check(self, argument: str, dim: int, radius: float) -> None:
        """Raise if the response does not exist at this dimension and radius."""

    def log_partition(
        self, field: Float[Tensor, "*batch N D"], beta: float | Float[Tensor, "*#batch"], radius: float
    ) -> Float[Tensor, "*batch N"]:
        """log Z_1 per site, relative to the uniform measure on the sphere.

        Args:
            field: f, (*batch, N, D).
            beta: > 0, a float or a tensor that broadcasts to *batch.
            radius: R > 0.

        Returns:
            (*batch, N).
        """
        return self._value(self._site(field, beta, radius)).to(field.dtype)

    def magnetization(
        self, field: Float[Tensor, "*batch N D"], beta: float | Float[Tensor, "*#batch"], radius: float
    ) -> Float[Tensor, "*batch N D"]:
        """m = <s>, (*batch, N, D), for arguments as in `log_partition`."""
        return self._mean(self._site(field, beta, radius)).to(field.dtype)

    def covariance_parts(
        self, field: Float[Tensor, "*batch N D"], beta: float | Float[Tensor, "*#batch"], radius: float
    ) -> tuple[Float[Tensor, "*batch N"], Float[Tensor, "*batch N"]]:
        """(tau, rho), the variances across and along the field, each (*batch, N) and exact however small it is.

        In one dimension nothing is across the field, and tau = rho.
        """
        tau, rho = self._parts(self._site(field, beta, radius))
        return tau.to(field.dtype), rho.to(field.dtype)

    def covariance_terms(
        self, field: Float[Tensor, "*batch N D"], beta: float | Float[Tensor, "*#batch"], radius: float
    ) -> tuple[Float[Tensor, "*batch N"], Float[Tensor, "*batch N"]]:
        """(tau, slope) with Cov(s) = tau I + slope f f^T, slope = (rho - tau)/|f|^2: smooth where f/|f| is not."""
        tau, slope = self._terms(self._site(field, beta, radius))
        return tau.to(field.dtype), slope.to(field.dtype)

    def covariance_product(
        self,
        field: Float[Tensor, "*batch N D"],
        beta: float | Float[Tensor, "*#batch"],
        radius: float,
        v: Float[Tensor, "*batch N D"],
    ) -> Float[Tensor, "*batch N D"]:
        """Cov(s) v per site; beta Cov(s) is the derivative of `magnetization`, and symmetric."""
        site = self._site(field, beta, radius)
        _validate.check_float_tensor("v", v, min_ndim=2)
        _validate.check_same_kind([("field", field), ("v", v)])
        _validate.check_together("v", v.shape, field.shape, "the shape of `field`")
        tau, slope = self._terms(site)
        wide = _wide(v)
        along = slope * (site.field * wide).sum(-1)
        return (tau[..., None] * wide + along[..., None] * site.field).to(field.dtype)

    def inverse(
        self, magnetization: Float[Tensor, "*batch N D"], beta: float | Float[Tensor, "*#batch"], radius: float
    ) -> Float[Tensor, "*batch N D"]:
        """The field that gives `magnetization`; NaN at sites with |m| >= R, which no finite field gives."""
        m = self._vectors("magnetization", magnetization, radius) / radius
        rows = _rows(beta, magnetization, "magnetization")
        return (self._inverse(m) / (_column(rows) * radius)).to(magnetization.dtype)

    def entropy(self, magnetization: Float[Tensor, "*batch N D"], radius: float) -> Float[Tensor, "*batch N"]:
        """S(m) = log Z_1 - beta f.m <= 0 at the field that gives m, whatever beta; NaN at sites with |m| >= R."""
        m = self._vectors("magnetization", magnetization, radius) / radius
        return self._entropy(m).to(magnetization.dtype)

    def _value(self, site: _Site) -> Tensor:
        return self.scaled_log_partition(site.t, site.dim)

    def _mean(self, site: _Site) -> Tensor:
        rows = site.beta * site.radius**2 * self.gain(site.t, site.dim)
        return rows[..., None] * site.field

    def _parts(self, site: _Site) -> tuple[Tensor, Tensor]:
        tau, rho = self.gain(site.t, site.dim), self.radial_gain(site.t, site.dim)
        return site.radius**2 * tau, site.radius**2 * rho

    def _terms(self, site: _Site) -> tuple[Tensor, Tensor]:
        square = site.radius**2
        slope = 2 * square**2 * site.beta * site.beta * self.gain_slope(site.t, site.dim)
        return square * self.gain(site.t, site.dim), slope

    def _inverse(self, m: Tensor) -> Tensor:
        """Beta R f for a magnetization in units of R."""
        return self.inverse_gain(_square(m), m.shape[-1])[..., None] * m

    def _entropy(self, m: Tensor) -> Tensor:
        return self.scaled_entropy(_square(m), m.shape[-1])

    def _site(self, field: Tensor, beta: float | Tensor, radius: float) -> _Site:
        wide = self._vectors("field", field, radius)
        rows = _rows(beta, field, "field")
        scale = rows * radius
        t = scale * scale * wide.square().sum(-1)
        # Beyond the largest number t is unknown, and a gain of 1/inf would give m = 0.
        return _Site(wide, rows, radius, torch.where(t.isinf(), torch.nan, t))

    def _vectors(self, argument: str, vectors: Tensor, radius: float) -> Tensor:
        _validate.check_float_tensor(argument, vectors, min_ndim=2)
        dim = vectors.shape[-1]
        _validate.require(dim > 0, argument, "have at least one dimension", f"shape {tuple(vectors.shape)}")
        radius = _validate.check_number("radius", radius, low=0.0, open_low=True)
        self.check(argument, dim, radius)
        return _wide(vectors)


@dataclass(frozen=True)
class BesselResponse(Response):
    """The exact response, of the von Mises-Fisher law: A = I_{D/2}/I_{D/2-1}; tanh for D = 1, coth - 1/kappa for D = 3.

    Value and derivatives are right to rounding for every kappa that has a square, and for D from 1 to 4096 and beyond.
    A call costs a fixed number of operations per site (not per component), about 250 for small D, fewer for D > 60.
    """

    def scaled_log_partition(self, t: Tensor, dim: int) -> Tensor:
        return _bessel.log_partition(t, dim)

    def gain(self, t: Tensor, dim: int) -> Tensor:
        return _bessel.ratio(t, dim)

    def gain_slope(self, t: Tensor, dim: int) -> Tensor:
        return _bessel.ratio_slope(t, dim)

    def radial_gain(self, t: Tensor, dim: int) -> Tensor:
        return _bessel.radial(t, dim)

    def inverse_gain(self, q: Tensor, dim: int) -> Tensor:
        return _bessel.length(q, dim)

    def scaled_entropy(self, q: Tensor, dim: int) -> Tensor:
        return _bessel.entropy(q, dim)

    # An Ising spin has elementary functions, and a variance that vanishes exponentially with kappa. They are functions
    # of the field itself, which has a sign, not of its length.

    def _value(self, site: _Site) -> Tensor:
        return _log_cosh(_ising(site)) if site.dim == 1 else super()._value(site)

    def _mean(self, site: _Site) -> Tensor:
        return site.radius * torch.tanh(_ising(site))[..., None] if site.dim == 1 else super()._mean(site)

    def _parts(self, site: _Site) -> tuple[Tensor, Tensor]:
        if site.dim > 1:
            return super()._parts(site)
        x = 2 * _ising(site)
        rho = 4 * site.radius**2 * torch.sigmoid(x) * torch.sigmoid(-x)
        return rho, rho

    def _terms(self, site: _Site) -> tuple[Tensor, Tensor]:
        if site.dim > 1:
            return super()._terms(site)
        rho, _ = self._parts(site)
        return rho, torch.zeros_like(rho)

    def _inverse(self, m: Tensor) -> Tensor:
        return torch.atanh(m) if m.shape[-1] == 1 else super()._inverse(m)

    def _entropy(self, m: Tensor) -> Tensor:
        return _ising_entropy(m[..., 0]) if m.shape[-1] == 1 else super()._entropy(m)


@dataclass(frozen=True)
class _AlgebraicResponse(Response):
    """Responses of the form A = kappa/(a + sqrt(b^2 + kappa^2)); a subclass gives a and b."""

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
        # L(1 - q) - (a + b) - a log(...) with L = inverse_gain, every difference of near numbers taken out.
        a, b = self.coefficients(dim)
        root = (a**2 + (1 - q) * (b**2 - a**2)).sqrt()
        return -q * (b**2 - a**2) / (root + b) - a * torch.log1p(q * (root + a) / ((root + b) * (1 - q)))


@dataclass(frozen=True)
class AmosResponse(_AlgebraicResponse):
    """The bound of Amos, a = (D - 1)/2 and b = (D + 1)/2: exact for small and large kappa, never above the exact A.

    The largest relative error of m is 4.5 % at D = 2, 1.1 % at D = 8, .14 % at D = 64, at the cost of one square root.

    Reference: Amos (1974), Computation of modified Bessel functions and their ratios, eq. 16.
    """

    def coefficients(self, dim: int) -> tuple[float, float]:
        return (dim - 1) / 2, (dim + 1) / 2


@dataclass(frozen=True)
class SaddlePointResponse(_AlgebraicResponse):
    """Steepest descent over the length of the spin, a = b = D/2, for any radius: exact for D to infinity.

    m = 2 beta R^2 f / (D + sqrt(D^2 + 4 beta^2 R^2 |f|^2)); about 2.7 times the error of `AmosResponse`.
    """

    def coefficients(self, dim: int) -> tuple[float, float]:
        return dim / 2, dim / 2


@dataclass(frozen=True)
class LargeDResponse(_AlgebraicResponse):
    """The usual large-D response, only for R^2 = D/2 - 1: m = beta f/(1 + g), g = sqrt(1 + beta^2 |f|^2/R^2).

    In the form of the others a = b = D/2 - 1. Its gain at zero field is off by the factor D/(D - 2).
    """

    def coefficients(self, dim: int) -> tuple[float, float]:
        return dim / 2 - 1, dim / 2 - 1

    def check(self, argument: str, dim: int, radius: float) -> None:
        other = "use BesselResponse or AmosResponse, which take any"
        required = "have more than 2 dimensions for LargeDResponse, whose radius^2 is D/2 - 1"
        _validate.require(dim > 2, argument, required, f"D = {dim}", other)
        # Radii come as roots that may have been rounded to float32.
        required = f"be sqrt(D/2 - 1) = {math.sqrt(dim / 2 - 1):.6g} for LargeDResponse at D = {dim}"
        _validate.require(math.isclose(radius**2, dim / 2 - 1, rel_tol=1e-6), "radius", required, radius, other)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _column(rows: float | Tensor) -> float | Tensor:
    return rows[..., None] if isinstance(rows, Tensor) else rows


def _rows(beta: float | Tensor, vectors: Tensor, name: str) -> float | Tensor:
    """Beta with one entry per row of `vectors`, in the precision of the computation."""
    if not isinstance(beta, Tensor):
        beta = _validate.check_number("beta", beta, low=0.0, open_low=True)
        return beta
    _validate.check_float_tensor("beta", beta)
    _validate.check_same_kind([(name, vectors), ("beta", beta)])
    _validate.check_broadcast("beta", beta.shape, vectors.shape[:-2], f"the leading axes of `{name}`")
    _validate.check_range("beta", beta, low=0.0, open_low=True, remedy="parametrise it, for example as an exponential")
    return _wide(beta)[..., None]


def _square(m: Tensor) -> Tensor:
    """|m|^2 in units of R, NaN where no field gives it."""
    q = m.square().sum(-1)
    return torch.where(q < 1, q, torch.nan)


def _ising(site: _Site) -> Tensor:
    return site.beta * site.radius * site.field[..., 0]


def _log_cosh(x: Tensor) -> Tensor:
    # Each form is right where it is used, and sees a harmless number elsewhere: NaN times zero would be NaN.
    near = x.abs() < 1
    small, large = torch.where(near, x, 0.0), torch.where(near, 1.0, x).abs()
    far = large + torch.log1p(torch.exp(-2 * large)) - math.log(2)
    return torch.where(near, torch.log1p(torch.sinh(small).square()) / 2, far)


def _ising_entropy(m: Tensor) -> Tensor:
    """Binary entropy minus log 2, also at m = -1 and 1, where it is -log 2."""
    m = torch.where(m.abs() <= 1, m, torch.nan)
    near = m.abs() < 0.5
    small, large = torch.where(near, m, 0.0), torch.where(near, 0.5, m)
    far = (torch.special.entr((1 + large) / 2) + torch.special.entr((1 - large) / 2)) - math.log(2)
    return torch.where(near, -torch.log1p(-small.square()) / 2 - small * torch.atanh(small), far)
