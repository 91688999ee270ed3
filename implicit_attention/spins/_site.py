"""The law of every spin in a field of its own, up to the third cumulant, and sums over pairs of such laws."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..potentials import SphereUnits, SphericalLaw
from .bonds import Graph
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
        """`linear_response` of Sigma after and before."""
        return linear_response(system, self.spread, self.spread)

    def skew_response(self, system: SpinSystem) -> Tensor:
        """(beta^2/2) J_ij^2 kappa_i ::: kappa_j, (*batch, N, N), or (*batch, 2, E) on bonds."""
        (skew, cubic), graph = self.skewness(), system.graph
        overlap, longer = inner(self.field, self.field, graph), cubic * self.squared
        crossed = outer(skew, longer, graph) + outer(longer, skew, graph)
        flat = (3 * self.dim + 6) * outer(skew, skew, graph) + 3 * crossed
        steep = outer(cubic, cubic, graph) * overlap.square()
        return system.live_pairs.square() * overlap * (flat + steep) / 2

    def skewness(self) -> tuple[Tensor, Tensor]:
        """(skew, cubic)."""
        if not self.ising:
            return self.slope, self.bend
        scale = self.beta * self.beta * self.radius**2
        t = scale * self.squared
        return -2 / 3 * scale * self.response.gain(t, 1) * self.tau, torch.zeros_like(t)


def sum_pairs(system: SpinSystem, x: Tensor) -> Tensor:
    """The sum over all pairs, and over the entries of their matrices, (*batch)."""
    if system.graph is not None:
        x = system.graph.once(x, block=system.block)
    return x.sum((-4, -3, -2, -1) if system.block else (-2, -1))


def antisymmetric_sum(system: SpinSystem, delayed: Tensor) -> Tensor:
    """sum_ij Tr (J_ij - J_ji^T)^T D_ij, (*batch), which beta makes the entropy production of a stationary state."""
    couplings = system.live_pairs
    return sum_pairs(system, (couplings - mirrored(couplings, block=system.block, graph=system.graph)) * delayed)


def at_pairs(x: Tensor, graph: Graph | None) -> tuple[Tensor, Tensor]:
    """Numbers of sites (*batch, N) at i and at j of all pairs: (*batch, N, 1) and (*batch, 1, N), or those of the
    bonds, (*batch, 2, E)."""
    if graph is None:
        return x[..., :, None], x[..., None, :]
    here = graph.at_ends(x)
    return here, here.flip(-2)


def outer(a: Tensor, b: Tensor, graph: Graph | None = None) -> Tensor:
    """a_i b_j of all pairs."""
    return at_pairs(a, graph)[0] * at_pairs(b, graph)[1]


def inner(a: Tensor, b: Tensor, graph: Graph | None = None) -> Tensor:
    """a_i . b_j of all pairs, for vectors (*batch, N, D)."""
    return a @ b.mT if graph is None else outer(a.mT, b.mT, graph.of_components()).sum(-3)


def stretched(v: Tensor, field: Tensor, tau: Tensor, slope: Tensor) -> Tensor:
    """(tau I + slope f f^T) v for vectors f and v along the last axis."""
    return tau[..., None] * v + (slope * (field * v).sum(-1))[..., None] * field


def linear_response(system: SpinSystem, after: Spread, before: Spread) -> Tensor:
    """beta Tr A_i J_ij B_j, (*batch, N, N), or (*batch, 2, E) on bonds, of A after and B before a step; for matrices
    without the trace, with (D, D) behind."""
    couplings, graph = system.live_pairs, system.graph
    if not system.block:
        beyond, past = (x.slope * x.field.square().sum(-1) for x in (after, before))
        traces = outer(after.tau, system.dim * before.tau + past, graph) + outer(beyond, before.tau, graph)
        steep = outer(after.slope, before.slope, graph)
        traces = traces + steep * inner(after.field, before.field, graph).square()
        return system.beta_over(2) * couplings * traces
    # Row a of J_ij with the axes (i, j, a, b) meets B_j along b; its column b then A_i along a.
    moved = stretched(couplings, *_of_rows(before, graph, 1)).mT
    return system.beta_over(4) * stretched(moved, *_of_rows(after, graph, 0)).mT


def _of_rows(spread: Spread, graph: Graph | None, side: int) -> Spread:
    """The spreads of i (side 0) or j (side 1) of all pairs, for the rows of their matrices."""
    vectors = at_pairs(spread.field.mT, None if graph is None else graph.of_components())[side].movedim(-3, -1)
    return Spread(vectors[..., None, :], *(at_pairs(x, graph)[side][..., None] for x in spread[1:]))
