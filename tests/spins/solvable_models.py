"""Solvable models, to measure approximations by, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from scipy.optimize import brentq
from torch import Tensor

from implicit_attention import _validate
from implicit_attention.spins import SphereUnits
from implicit_attention.spins.enumeration import states
from implicit_attention.spins.exact import _checked, _log_two_cosh
from implicit_attention.spins.system import _radius

# Gaussian averages by equal steps of this many standard deviations out to this many: to rounding for smooth functions.
STEP, REACH = 0.02, 12.0


class CurieWeiss(NamedTuple):
    """log Z per site, states counted, and the magnetization per site."""

    log_partition: float
    magnetization: float


def curie_weiss(sites: int | None, beta: float, field: float = 0.0) -> CurieWeiss:
    """The Ising model with J_ij = 1/N for all pairs, the diagonal included: E = -M^2/(2 N) - h M, M = sum_i s_i.

    Args:
        sites: N, or None for the limit N -> infinity, in which m = tanh(beta (m + h)) is the solution along the field
            (the positive one without a field).
        beta: inverse temperature > 0.
        field: h.
    """
    _validate.check_number("beta", beta, low=0.0, open_low=True)
    _validate.check_number("field", field)
    if sites is None:
        h = abs(field)
        m = _largest_root(lambda m: math.tanh(beta * (m + h)) - m, start=1.0)
        log_two_cosh = beta * (m + h) + math.log1p(math.exp(-2 * beta * (m + h)))
        return CurieWeiss(log_two_cosh - beta * m * m / 2, math.copysign(m, field) if m else 0.0)
    _validate.check_integer("sites", sites, low=1)
    up = torch.arange(sites + 1, dtype=torch.float64)
    count = math.lgamma(sites + 1) - torch.lgamma(up + 1) - torch.lgamma(sites - up + 1)
    total = 2 * up - sites
    weight = count + beta * (total.square() / (2 * sites) + field * total)
    m = float((weight.softmax(0) * total).sum()) / sites
    return CurieWeiss(float(weight.logsumexp(0)) / sites, m)


def curie_weiss_magnetization(
    beta: float, dim: float, *, radius: Literal["sqrt_dim", "bessel"] | float = "sqrt_dim"
) -> float:
    """|m|/R of spins in D dimensions with J_ij = 1/N for all pairs, the diagonal included, N -> infinity, no field.

    x = A_D(beta R^2 x): 0 up to beta_c = D/R^2, which is 1 for R = sqrt(D) and 2 D/(D - 2) for R = sqrt(D/2 - 1).

    Args:
        beta: inverse temperature > 0.
        dim: D >= 1, or infinity: sqrt(1 - 1/beta) with R = sqrt(D).
        radius: R, as in `SpinSystem`.
    """
    _validate.check_number("beta", beta, low=0.0, open_low=True)
    if dim == math.inf:
        # R^2/D -> 1 or 1/2, and A_D(D y) -> 2 y/(1 + sqrt(1 + 4 y^2)).
        _validate.check_choice("radius", radius, ("sqrt_dim", "bessel"))
        return math.sqrt(max(0.0, 1 - 1 / (beta if radius == "sqrt_dim" else beta / 2)))
    _validate.require(dim == int(dim), "dim", "be an integer or infinity", dim)
    dim = int(dim)
    _validate.check_integer("dim", dim, low=1)
    strength = beta * _radius(radius, dim) ** 2
    response = SphereUnits()

    def excess(x: float) -> float:
        kappa = torch.tensor(strength * x, dtype=torch.float64)
        return float(kappa * response.gain(kappa.square(), dim)) - x

    return _largest_root(excess, start=1.0)


def peretto(couplings: Float[Tensor, "N N"], field: Float[Tensor, "N"], beta: float = 1.0) -> Tensor:
    """The stationary law of synchronous dynamics with symmetric couplings, in closed form: probabilities, (2^N).

    pi(s) ~ exp(beta h . s) prod_i 2 cosh(beta f_i(s)), which is not Boltzmann's.

    Args: as in `stationary_law`, whose order of states is used; couplings symmetric.

    Reference: Peretto (1984).
    """
    couplings, field = _checked(couplings, field, beta)
    apart = float((couplings - couplings.mT).abs().max())
    scale = float(couplings.abs().max())
    _validate.require(
        apart <= 64 * torch.finfo(torch.float64).eps * scale,
        "couplings",
        "be symmetric",
        f"a difference of {apart:.1e}",
        "use stationary_law, which asymmetric couplings have, too",
    )
    spins = states(0, 2 ** len(field), len(field), field)
    weight = beta * spins @ field + _log_two_cosh(beta * (field + spins @ couplings.mT)).sum(-1)
    return weight.softmax(0)


class SherringtonKirkpatrick(NamedTuple):
    """Overlap q, de Almeida-Thouless number (> 1: unstable), free energy per site f, states counted."""

    overlap: float
    at_number: float
    free_energy: float


def sherrington_kirkpatrick(beta: float, field: float = 0.0) -> SherringtonKirkpatrick:
    """The replica-symmetric solution of the Ising model with Gaussian couplings of variance 1/N.

    q = E tanh^2(beta (sqrt(q) z + h)), AT = beta^2 E cosh^-4, f = -beta (1 - q)^2/4 - E log(2 cosh)/beta over a normal
    z. It is right where the AT number is < 1. Without a field, at beta > 1, the solution with q > 0.

    Reference: Sherrington and Kirkpatrick (1975); de Almeida and Thouless (1978).
    """
    _validate.check_number("beta", beta, low=0.0, open_low=True)
    _validate.check_number("field", field)
    z = torch.arange(-REACH, REACH + STEP / 2, STEP, dtype=torch.float64)
    weight = (-z.square() / 2).softmax(0)

    def force(q: float) -> Tensor:
        return beta * (math.sqrt(q) * z + field)

    q = _largest_root(lambda q: float(weight @ force(q).tanh().square()) - q, start=1.0)
    at_number = beta**2 * float(weight @ (1 - force(q).tanh().square()).square())
    average = float(weight @ _log_two_cosh(force(q)))
    return SherringtonKirkpatrick(q, at_number, -beta * (1 - q) ** 2 / 4 - average / beta)


def at_line(field: float) -> float:
    """The inverse temperature above which the replica-symmetric solution in this field is unstable (AT number 1)."""
    _validate.check_number("field", field)
    if field == 0:
        return 1.0
    top = 2.0
    while sherrington_kirkpatrick(top, field).at_number < 1:
        _validate.require(top < 1e3, "field", "be smaller", field, "the line is beyond beta = 1000")
        top *= 2
    return float(brentq(lambda b: sherrington_kirkpatrick(b, field).at_number - 1, 1.0, top, xtol=1e-13, rtol=1e-14))


def spherical_sk(beta: float) -> float:
    """log Z/(N D) of vector spins under one spherical constraint, couplings of variance 1/N, no field, N -> infinity.

    beta^2/4 up to beta = 1, beta - 3/4 - log(beta)/2 beyond.

    Reference: Kosterlitz, Thouless and Jones (1976).
    """
    _validate.check_number("beta", beta, low=0.0, open_low=True)
    return beta**2 / 4 if beta <= 1 else beta - 3 / 4 - math.log(beta) / 2


def _largest_root(excess: Callable[[float], float], start: float) -> float:
    """The largest x in [0, start] with excess(x) = 0, for a concave excess that is negative at `start`."""
    low = start
    # What is concave and negative here is positive on one interval below, or nowhere but for rounding.
    while low > 1e-12:
        low *= 0.7
        if excess(low) > 1e-14 * low:
            return float(brentq(excess, low, low / 0.7, xtol=1e-16, rtol=1e-15))
    return 0.0
