"""The expansion of log Z in the couplings at fixed magnetizations to second or third order, and where it is stationary.

Natural units: fields x = beta f and bonds K = beta J, symmetric and without a diagonal. With the covariance S_i and the
third cumulant T_i of the law of site i, in the field that gives it its magnetization, the terms are

    second = 1/4 sum_ij Tr(K_ij S_j K_ji S_i)
    third  = 1/12 sum_ij K_ij K_ij K_ij : T_i T_j + 1/6 sum_ijk Tr(K_ij S_j K_jk S_k K_ki S_i)

over ordered pairs and triples, whose sites the missing diagonal keeps apart. All laws are symmetric about their field,

    m = tau x,    S = tau + slope x x^T,    T_abc = slope (x_a d_bc + x_b d_ca + x_c d_ab) + bend x_a x_b x_c,

for each is the derivative of the one before, so that numbers K_ij need no D x D matrix.

Reference: Plefka (1982) and Georges and Yedidia (1991), for Ising spins; vectors by the same route.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from einops import einsum
from torch import Tensor

from .._torch import vjp
from ..linear import extreme_eigenvalues
from ..potentials import SphericalLaw
from ..problem import Linearization, pullback
from ._site import outer, stretched
from .approximation import SampleProblem, gradient
from .bonds import Graph
from .system import couple

# Lanczos vectors for the largest eigenvalue of a matrix without negative entries.
VECTORS = 8


class Expansion(SampleProblem, general=True):
    """x = field + K m(x) + dG/dm for the natural fields x of all sites: log Z is stationary there.

    Args:
        field: beta h, (*batch, N, D).
        bonds: K, (*batch, N, N) or (*batch, N, N, D, D), without a diagonal; on a graph (*batch, E).
        onsite: where bonds are matrices, their diagonal, traceless: (*batch, N, D, D), which counts to first order.
            None where they are numbers.
        response: of one spin to its field.
        radius: R.
        order: of the expansion, 2 or 3.
        graph: of the bonds, if they are on one.
    """

    #: Those of the triangles of the graph, where they count.
    corners: Graph | None
    sides: Graph | None

    def __init__(
        self,
        field: Tensor,
        bonds: Tensor,
        onsite: Tensor | None,
        *,
        response: SphericalLaw,
        radius: float,
        order: int,
        graph: Graph | None = None,
    ) -> None:
        self.field = field
        self.bonds = bonds
        self.onsite = onsite
        self.block = onsite is not None
        self.response = response
        self.radius = radius
        self.order = order
        self.graph = graph
        self.corners, self.sides = (None, None) if graph is None or order == 2 else graph.triangles()
        self.own_axes = {"field": 2, "bonds": 4 if self.block else 2 if graph is None else 1, "onsite": 3}

    def coupled(self, bonds: Tensor, v: Tensor) -> Tensor:
        """sum_j B_ij v_j, (*batch, N, D), for numbers B that are laid out as the bonds, or for themselves."""
        if self.graph is not None:
            return self.graph.product(bonds, v)
        return couple(bonds, v, block=self.block and bonds is self.bonds)

    def sums(self, bonds: Tensor, v: Tensor) -> Tensor:
        """sum_j B_ij v_j for a number of each site, (*batch, N)."""
        return self.coupled(bonds, v[..., None])[..., 0]

    def square_sums(self, v: Tensor) -> Tensor:
        """sum_j K_ij^2 v_j for a number of each site, (*batch, N)."""
        if self.graph is None:
            return self.sums(self.bonds.square(), v)
        return self.graph.product(self.bonds, v[..., None], squares=True)[..., 0]

    def form(self, u: Tensor, bonds: Tensor, v: Tensor) -> Tensor:
        """sum_ij u_i B_ij v_j, (*batch)."""
        return (u * self.sums(bonds, v)).sum(-1)

    def joined(self, bonds: Tensor, v: Tensor) -> Tensor:
        """sum_k B_ik v_k B_kj where i and j are coupled, laid out as the bonds B."""
        if self.corners is None or self.sides is None:
            return bonds @ (v[..., None] * bonds)
        sides, corners = self.sides.at_ends(bonds), self.corners.at_ends(torch.nn.functional.pad(v, (1, 0)))
        return self.sides.sums(corners * sides.roll(1, -2) * sides.roll(2, -2))

    def correction(self, x: Tensor) -> Tensor:
        """G, the part of log Z beyond first order, (*batch)."""
        raise NotImplementedError

    def log_partition(self, x: Tensor) -> Tensor:
        """log Z of spins in the fields x, stationary at the solution, (*batch)."""
        m = self.response.magnetization(x, 1.0, self.radius)
        seen = self.field - x + self.coupled(self.bonds, m) / 2
        first = self.response.log_partition(x, 1.0, self.radius).sum(-1) + (m * seen).sum((-1, -2))
        return first + self.correction(x)

    def instability(self, x: Tensor) -> Tensor:
        """The largest eigenvalue of K_ij^2 v_i v_j, v the largest variance of a site, (*batch); see `TAP`."""
        strength = self.bonds.square().sum((-1, -2)) / x.shape[-1] if self.block else None
        variance = torch.maximum(*self.response.covariance_parts(x, 1.0, self.radius))
        start, steps = torch.ones_like(variance), min(VECTORS, variance.shape[-1])

        def product(v: Tensor) -> Tensor:
            seen = variance * v
            return variance * (self.square_sums(seen) if strength is None else self.sums(strength, seen))

        return extreme_eigenvalues(product, start, steps)[1].value


class IsingExpansion(Expansion):
    """The expansion for spins +-R, a polynomial of m: it does not divide by variances, which may round to 0."""

    def correction(self, x: Tensor) -> Tensor:
        m = self.response.magnetization(x, 1.0, self.radius)[..., 0]
        variance = (self.radius - m) * (self.radius + m)
        total = (variance * self.square_sums(variance)).sum(-1) / 4
        if self.order > 2:
            skewness, around = -2 * m * variance, self.bonds * self.joined(self.bonds, variance)
            pairs, triples = self.form(skewness, self.bonds**3, skewness), self.form(variance, around, variance)
            total = total + pairs / 12 + triples / 6
        return total

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return self._answer(self.response.magnetization(z, 1.0, self.radius))

    def _answer(self, means: Tensor) -> Tensor:
        m = means[..., 0]
        variance = (self.radius - m) * (self.radius + m)
        # dG/dm.
        reaction = -m * self.square_sums(variance)
        if self.order > 2:
            reaction = reaction - m * self.sums(self.bonds * self.joined(self.bonds, variance), variance)
            reaction = reaction + (2 * m.square() - variance) / 3 * self.sums(self.bonds**3, -2 * m * variance)
        return self.field + self.coupled(self.bonds, means) + reaction[..., None]

    def linearize(self, z: Tensor) -> Linearization:
        _, back = vjp(self._answer, self.response.magnetization(z, 1.0, self.radius))
        variance = self.response.covariance_parts(z, 1.0, self.radius)[0][..., None]

        # In m the Jacobian is symmetric, A = K + d^2 G/dm dm. It is A S in x.
        return Linearization(
            lambda v: back(variance * v)[0], lambda u: variance * back(u)[0], lambda u: pullback(self, z, u)
        )


class VectorExpansion(Expansion):
    """The expansion for spins on a sphere. It reads functions of |x|, each the derivative of the one before: tau,
    slope, bend, ... with d tau/dx = slope x, d slope/dx = bend x, ...
    """

    def correction(self, x: Tensor) -> Tensor:
        return self._correction(x, self._ladder(x, self.order)[0])

    def _correction(self, x: Tensor, ladder: Sequence[Tensor]) -> Tensor:
        if self.onsite is None:
            return self._vectors(x, *ladder)
        # <s s^T> = m m^T + S, of which the part tau 1 does not meet a traceless matrix.
        weight = ladder[0].square() + ladder[1]
        onsite = einsum(weight, x, self.onsite, x, "... i, ... i a, ... i a b, ... i b -> ...") / 2
        return onsite + _blocks(self.bonds, x, *ladder)

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return self._answer(z, *self._ladder(z, self.order + 1))

    def _answer(self, x: Tensor, ladder: Sequence[Tensor], rho: Tensor) -> Tensor:
        """The map at x, from `order` + 1 functions of |x|."""

        def correction(y: Tensor) -> Tensor:
            return self._correction(y, _continued(ladder, x, y)[: self.order])

        closed = self.order == 2 and self.onsite is None
        slope = self._vectors_slope(x, *ladder) if closed else gradient(correction, x)
        reaction = _unresponded(slope, x, ladder, rho)
        return self.field + self.coupled(self.bonds, ladder[0][..., None] * x) + reaction

    def _overlap(self, x: Tensor) -> Tensor:
        """x_i . x_j, laid out as the bonds."""
        return x @ x.mT if self.graph is None else self.graph.overlap(x)

    def _vectors(self, x: Tensor, tau: Tensor, slope: Tensor, bend: Tensor | None = None) -> Tensor:
        """The terms for numbers K_ij, (*batch): second order in O(N^2 D), with `bend` the third in O(N^3)."""
        dim, square, overlap, weights = x.shape[-1], x.square().sum(-1), self._overlap(x), self.bonds.square()
        twice = overlap.square()
        # Tr(S_i S_j) has these three parts.
        total = self.form(dim * tau + 2 * slope * square, weights, tau) + self.form(slope, weights * twice, slope)
        if bend is None:
            return total / 4
        cubes, turned = self.bonds * weights * overlap, self.bonds * overlap
        pairs = self.form(slope, cubes, (3 * dim + 6) * slope + 6 * bend * square)
        pairs = pairs + self.form(bend, cubes * twice, bend)
        # In Tr(S_i S_j S_k) at least one site gives a multiple of 1, by which the others are joined, or none does.
        joined = self.bonds * self.joined(self.bonds, tau)
        triples = self.form(tau, joined, dim * tau + 3 * slope * square) + 3 * self.form(slope, joined * twice, slope)
        triples = triples + self.form(slope, turned * self.joined(turned, slope), slope)
        return total / 4 + pairs / 12 + triples / 6

    def _vectors_slope(self, x: Tensor, tau: Tensor, slope: Tensor, bend: Tensor) -> Tensor:
        """The derivative by x of the second order for numbers K_ij, (*batch, N, D)."""
        square, overlap, weights = x.square().sum(-1), self._overlap(x), self.bonds.square()
        seen = weights * overlap
        sums = self.coupled(weights, torch.stack([x.shape[-1] * tau + slope * square, tau], -1))
        quadratic = self.sums(seen * overlap, slope)
        own = slope * sums[..., 0] + (bend * square + 2 * slope) * sums[..., 1] + bend * quadratic
        across: Tensor = self.coupled(seen, slope[..., None] * x)
        return own[..., None] * x / 2 + slope[..., None] * across

    def linearize(self, z: Tensor) -> Linearization:
        # The derivative of the map reads one function more than the map.
        ladder, rho = self._ladder(z, self.order + 2)
        rho_slope = 3 * ladder[1] + ladder[2] * z.square().sum(-1)

        def answer(x: Tensor) -> Tensor:
            return self._answer(x, _continued(ladder, z, x)[:-1], rho + rho_slope * _half_square(x, z))

        _, back = vjp(answer, z)

        # In m the Jacobian is symmetric, A = K + d^2 G/dm dm. It is A S in x, and S A transposed.
        return Linearization(
            lambda v: _unresponded(back(stretched(v, z, *ladder[:2]))[0], z, ladder, rho),
            lambda u: back(u)[0],
            lambda u: pullback(self, z, u),
        )

    def _ladder(self, x: Tensor, count: int) -> tuple[Sequence[Tensor], Tensor]:
        """The first `count` of tau, slope, bend, ..., each (*batch, N), and rho, the variance along the field.

        rho is tau + slope |x|^2 without a difference of near numbers.
        """
        *ladder, rho = self.response.cumulant_terms(x, 1.0, self.radius, count)
        return ladder, rho


def _blocks(bonds: Tensor, x: Tensor, tau: Tensor, slope: Tensor, bend: Tensor | None = None) -> Tensor:
    """The terms for matrices K_ij, (*batch)."""
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    covariance = tau[..., None, None] * eye + slope[..., None, None] * outer(x, x)
    chain = einsum(bonds, covariance, "... i j a b, ... j b c -> ... i a j c").flatten(-2, -1).flatten(-3, -2)
    total = (chain * chain.mT).sum((-1, -2)) / 4
    if bend is not None:
        seen = einsum(bonds, x, "... i j a b, ... j b -> ... i j a")
        overlap = einsum(x, seen, "... i a, ... i j a -> ... i j")
        # x_i^T K_ij K_ji K_ij x_j
        there_and_back = einsum(seen.transpose(-3, -2), bonds, seen, "... i j b, ... i j a b, ... i j a -> ... i j")
        pairs = outer(slope, slope) * (3 * overlap * bonds.square().sum((-1, -2)) + 6 * there_and_back)
        pairs = pairs + 6 * outer(slope, bend) * overlap * seen.square().sum(-1) + outer(bend, bend) * overlap**3
        total = total + pairs.sum((-1, -2)) / 12 + ((chain @ chain) * chain.mT).sum((-1, -2)) / 6
    return total


def _unresponded(v: Tensor, x: Tensor, ladder: Sequence[Tensor], rho: Tensor) -> Tensor:
    """S^{-1} v: derivatives by m from derivatives by x."""
    along = ladder[1] * (x * v).sum(-1) / rho
    return (v - along[..., None] * x) / ladder[0][..., None]


def _continued(ladder: Sequence[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
    """Evaluate the functions of |x| at y, by Taylor series: right to so many derivatives as there are more functions.

    Differentiating this costs next to nothing, a Bessel function some hundred operations.
    """
    u = _half_square(y, x)
    return [
        torch.stack([value * u**k / math.factorial(k) for k, value in enumerate(ladder[first:])]).sum(0)
        for first in range(len(ladder))
    ]


def _half_square(y: Tensor, x: Tensor) -> Tensor:
    """(|y|^2 - |x|^2)/2, whose derivative by y is y."""
    return (y.square().sum(-1) - x.square().sum(-1)) / 2
