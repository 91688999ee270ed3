"""The law of every spin in a field of its own, up to the third cumulant, and sums over pairs of such laws."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..potentials import SphereUnits, SphericalLaw
from .system import SpinSystem, mirrored


class Spread(NamedTuple):
    """The matrix tau_i I + slope_i f_i f_i^T of every spin: how it varies, or how it follows its field.

    field: f, (*batch, N, D). tau, slope: (*batch, N).
    """

    field: Tensor
    tau: Tensor
    slope: Tensor


class SpinSite:
    """Cumulants of spins in the fields f, (*batch, N, D), as functions that are smooth also at 0.

        m = beta tau f,    Sigma = tau I + slope f f^T,
        beta kappa_abc = skew (I_ab f_c + I_ac f_b + I_bc f_a) + cubic f_a f_b f_c,

    with slope and, for D > 1, skew = slope the derivative of tau, and cubic that of slope, over |f|.

    Args:
        response: of one spin to its field.
        field: f.
        system: whose beta and radius count.
    """

    def __init__(self, response: SphericalLaw, field: Tensor, system: SpinSystem) -> None:
        self.response, self.field = response, field
        self.beta, self.radius, self.dim = system.beta_over(1), system.radius, system.dim
        self.arguments = field, system.beta_over(0), system.radius
        self.squared = field.square().sum(-1)
        # The variance of an Ising spin may round to 0, but the derivative of its logarithm is -2 beta m.
        self.ising = self.dim == 1 and isinstance(response, SphereUnits)
        if self.ising:
            self.tau, self.slope = response.covariance_terms(*self.arguments)
        else:
            self.tau, self.slope, self.bend, self.rho = response.cumulant_terms(*self.arguments, 3)

    @functools.cached_property
    def mean(self) -> Tensor:
        """m, (*batch, N, D)."""
        if self.ising:
            return self.response.magnetization(*self.arguments)
        return (self.beta * self.tau)[..., None] * self.field

    @property
    def spread(self) -> Spread:
        """Sigma."""
        return Spread(self.field, self.tau, self.slope)

    @property
    def trace(self) -> Tensor:
        """Tr Sigma, (*batch, N)."""
        return self.dim * self.tau + self.slope * self.squared

    def product(self, v: Tensor) -> Tensor:
        """Sigma v."""
        return stretched(v, *self.spread)

    def inverse_product(self, v: Tensor) -> Tensor:
        """Sigma^{-1} v by the formula of Sherman and Morrison; zero where tau is."""
        tau = torch.where(self.tau > 0, self.tau, torch.inf)
        along = self.slope * (self.field * v).sum(-1) / (tau + self.slope * self.squared)
        return (v - along[..., None] * self.field) / tau[..., None]

    def onsager(self, along: Tensor, trace: Tensor) -> Tensor:
        """(beta/2) Sigma^{-1} (kappa : M) from M f, (*batch, N, D), and tr M, (*batch, N)."""
        if self.ising:
            return -(self.beta * trace)[..., None] * self.mean
        skew, cubic = self.skewness()
        across = skew / self.tau
        quadratic = (self.field * along).sum(-1)
        own = (skew * trace + (cubic - 2 * across * self.slope) * quadratic) / self.rho
        return across[..., None] * along + own[..., None] * self.field / 2

    def linear_response(self, system: SpinSystem) -> Tensor:
        """beta Tr Sigma_i J_ij Sigma_j, (*batch, N, N); for matrices without the trace, (*batch, N, N, D, D)."""
        return linear_response(system, self.spread, self.spread)

    def skew_response(self, system: SpinSystem) -> Tensor:
        """(beta^2/2) J_ij^2 kappa_i ::: kappa_j, (*batch, N, N)."""
        skew, cubic = self.skewness()
        overlap, crossed = self.field @ self.field.mT, outer(skew, cubic * self.squared)
        flat = (3 * self.dim + 6) * outer(skew, skew) + 3 * (crossed + crossed.mT)
        steep = outer(cubic, cubic) * overlap.square()
        return system.live_couplings.square() * overlap * (flat + steep) / 2

    def skewness(self) -> tuple[Tensor, Tensor]:
        """(skew, cubic)."""
        if not self.ising:
            return self.slope, self.bend
        scale = self.beta * self.beta * self.radius**2
        t = scale * self.squared
        return -2 / 3 * scale * self.response.gain(t, 1) * self.tau, torch.zeros_like(t)


def sum_pairs(system: SpinSystem, x: Tensor) -> Tensor:
    """The sum over all pairs, and over the entries of their matrices, (*batch)."""
    return x.sum((-4, -3, -2, -1) if system.block else (-2, -1))


def antisymmetric_sum(system: SpinSystem, delayed: Tensor) -> Tensor:
    """sum_ij Tr (J_ij - J_ji^T)^T D_ij, (*batch), which beta makes the entropy production of a stationary state."""
    couplings = system.live_couplings
    return sum_pairs(system, (couplings - mirrored(couplings, block=system.block)) * delayed)


def outer(a: Tensor, b: Tensor) -> Tensor:
    """a_i b_j."""
    return a[..., :, None] * b[..., None, :]


def stretched(v: Tensor, field: Tensor, tau: Tensor, slope: Tensor) -> Tensor:
    """(tau I + slope f f^T) v for vectors f and v along the last axis."""
    return tau[..., None] * v + (slope * (field * v).sum(-1))[..., None] * field


def linear_response(system: SpinSystem, after: Spread, before: Spread) -> Tensor:
    """beta Tr A_i J_ij B_j, (*batch, N, N), of A after and B before a step; for matrices without the trace,
    (*batch, N, N, D, D)."""
    couplings = system.live_couplings
    if not system.block:
        return system.beta_over(2) * couplings * pair_traces(after, before)
    # Row a of J_ij with the axes (i, j, a, b) meets B_j along b; its column b then A_i along a.
    at_j = before.field[..., None, :, None, :], before.tau[..., None, :, None], before.slope[..., None, :, None]
    at_i = after.field[..., :, None, None, :], after.tau[..., :, None, None], after.slope[..., :, None, None]
    return system.beta_over(4) * stretched(stretched(couplings, *at_j).mT, *at_i).mT


def pair_traces(first: Spread, second: Spread) -> Tensor:
    """Tr A_i B_j, (*batch, N, N)."""
    radial = [spread.slope * spread.field.square().sum(-1) for spread in (first, second)]
    both = outer(first.tau, first.field.shape[-1] * second.tau + radial[1]) + outer(radial[0], second.tau)
    return both + outer(first.slope, second.slope) * (first.field @ second.field.mT).square()
