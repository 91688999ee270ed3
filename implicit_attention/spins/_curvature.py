"""Whether a stationary point of a mean-field free energy is a minimum, from a few products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._torch import LinearMap, is_batched
from ..linear.spectrum import Eigenvalue, extreme_eigenvalues, ritz_radius
from ..potentials import SphericalLaw
from .bonds import Graph
from .system import SpinSystem

#: Up to so many sites all eigenvalues of couplings cost less than Lanczos vectors.
DENSE = 128

#: Numbers of Lanczos vectors for an extreme eigenvalue: the next is tried where the verdict is not certain.
STEPS = (24, 96, 384)

#: Steps of the power method for a bound of the couplings, and the least entry of its vector, as a part of the largest.
POWERS, LEAST = 2, 1e-3


def local_field(response: SphericalLaw, m: Tensor, beta: float | Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """The field in which a lone spin has the mean m, (*batch, N, D), and where |m| is R to rounding, (*batch, N).

    There it is the weakest field that makes it so; NaN where |m| is larger.
    """
    square = (m / radius).square().sum(-1)
    rounding = 8 * torch.finfo(m.dtype).eps
    saturated = (square - 1).abs() <= rounding
    shorter = ((1 - rounding) / torch.where(saturated, square, 1.0)).sqrt()
    return response.inverse(m * torch.where(saturated, shorter, 1.0)[..., None], beta, radius), saturated


def covariance_roots(
    response: SphericalLaw, field: Tensor, beta: float | Tensor, radius: float
) -> tuple[LinearMap, LinearMap]:
    """v -> Cov^{1/2} v and v -> Cov^{-1/2} v for lone spins in the field, (*batch, N, D); the latter 0 where Cov is."""
    tau, rho = response.covariance_parts(field, beta, radius)
    unit = field / torch.linalg.vector_norm(field, dim=-1, keepdim=True).clamp(min=torch.finfo(field.dtype).tiny)
    across, along = (part.clamp(min=0).sqrt()[..., None] for part in (tau, rho))

    def scaled(v: Tensor, across: Tensor, along: Tensor) -> Tensor:
        part: Tensor = (unit * v).sum(-1, keepdim=True) * unit
        return across * (v - part) + along * part

    inverse = [torch.where(part > 0, part.reciprocal(), 0.0) for part in (across, along)]
    return lambda v: scaled(v, across, along), lambda v: scaled(v, *inverse)


def everywhere(verdict: Tensor) -> bool:
    """Whether it is True for all samples, as far as the host can look."""
    return not is_batched(verdict) and bool(verdict.all())


def coupling_bound(system: SpinSystem, *, squares: Tensor | None = None, enough: float | Tensor = 0.0) -> Tensor:
    """An upper bound of the largest eigenvalue of M, M_ij = |J_ij| + squares J_ij^2, (*batch), at little cost.

    That of |J| bounds the spectral radius of J, which is the norm of symmetric couplings. For a matrix without negative
    entries and any x > 0 no eigenvalue is larger than max_i (M x)_i/x_i, by which M enlarges max_i |v_i|/x_i at most.
    For x = 1 it is the largest sum of a row. Where that is not below `enough`, steps of the power method bring x near
    to the eigenvector, at which the bound is the eigenvalue.

    Args:
        system: the spins; couplings as matrices count with their norm.
        squares: (*#batch), for couplings that are a number per pair and not low rank.
        enough: (*#batch), a bound that suffices for the caller.
    """
    if system.low_rank:
        # The larger of both ends: U U^T and the diagonal, both of eigenvalues >= 0, are subtracted from each other.
        factors = system.live_factors.detach()
        diagonal = factors.square().sum(-1).amax(-1)
        inner = (factors.mT @ factors).abs()
        largest = torch.maximum(_perron_bound(_rows_of(inner), inner[..., 0]), diagonal)
        return largest.expand(system.batch)
    graph = system.graph
    couplings = system.live_pairs.detach()
    if system.block:
        couplings = torch.linalg.matrix_norm(couplings)

    def size() -> Tensor:
        return couplings.abs() if squares is None else couplings.abs() + squares[..., None, None] * couplings.square()

    if graph is not None:
        sums = _rows_of(size(), graph)(couplings.new_ones(*couplings.shape[:-2], system.num_sites))
    else:
        sums = torch.linalg.vector_norm(couplings, ord=1, dim=-1) if system.row_sums is None else system.row_sums
        if squares is not None:
            sums = sums + squares[..., None] * torch.linalg.vector_norm(couplings, dim=-1).square()
    bound = _widened(sums.amax(-1))
    if not everywhere(bound < enough):
        bound = torch.minimum(bound, _perron_bound(_rows_of(size(), graph), sums))
    return bound.expand(system.batch)


def _rows_of(size: Tensor, graph: Graph | None = None) -> LinearMap:
    """The products of matrices (*batch, N, N), or of numbers of both directions of bonds."""
    if graph is not None:
        return lambda x: graph.pair_product(size, x[..., None])[..., 0]
    # Its bits do not depend on the rest of the batch.
    return lambda x: torch.linalg.vecdot(size, x[..., None, :])


def _perron_bound(product: LinearMap, like: Tensor) -> Tensor:
    """An upper bound of the largest eigenvalue of a map of vectors that has no negative entries."""
    following = product(torch.ones_like(like))
    for _ in range(POWERS):
        largest = following.amax(-1, keepdim=True)
        x = (following / torch.where(largest > 0, largest, 1.0)).clamp(min=LEAST)
        following = product(x)
    return _widened((following / x).amax(-1))


def _widened(bound: Tensor) -> Tensor:
    """The bound beyond rounding."""
    return torch.mul(bound, 1 + torch.finfo(bound.dtype).eps ** 0.5)


def lowest_eigenvalue(system: SpinSystem) -> Tensor:
    """The smallest eigenvalue of symmetric couplings, (*batch); of many sites an estimate from inside the spectrum."""
    field, couplings = system.field.detach(), system.couplings.detach()
    constant = system.at(field, couplings, system.beta)
    if not (system.low_rank or system.block) and system.num_sites <= DENSE:
        lowest: Tensor = torch.linalg.eigvalsh(constant.live_couplings)[..., 0]
        return lowest.expand(system.batch)
    # Numbers couple all components of the spins alike: one component has all eigenvalues.
    like = field if system.block else field[..., :1]
    return extreme_eigenvalues(flattened(constant.coupled, like), torch.zeros_like(like.flatten(-2)), STEPS[0])[0].value


def exceeds_one(product: LinearMap, like: Tensor) -> Tensor:
    """Whether the largest eigenvalue of a symmetric map of states is above 1 beyond rounding, (*batch).

    An estimate above 1 is certain, being from inside the spectrum; one below is taken where its error does not reach 1.
    Else there are more vectors. With N D > 384 an eigenvalue very near to 1 may be missed.
    """
    return _above_one(product, like, lambda *arguments: extreme_eigenvalues(*arguments)[1])


def radius_exceeds_one(product: LinearMap, like: Tensor) -> Tensor:
    """`exceeds_one` for the spectral radius of a map that need not be symmetric."""
    return _above_one(product, like, ritz_radius)


def _above_one(product: LinearMap, like: Tensor, estimate: Callable[[LinearMap, Tensor, int], Eigenvalue]) -> Tensor:
    """Whether an estimate, by a number of vectors, is above 1, from as few vectors as decide it."""
    rows, start = flattened(product, like), torch.zeros_like(like.flatten(-2))
    look, limit = not is_batched(like), 1 + torch.finfo(like.dtype).eps ** 0.5
    # Where the host cannot look, the largest number is taken at once.
    for steps in STEPS if look else STEPS[-1:]:
        value, error = estimate(rows, start, steps)
        above: Tensor = value > limit
        if steps >= like.shape[-2:].numel() or (look and not bool(((value + error > limit) & ~above).any())):
            break
    return above


def flattened(product: LinearMap, like: Tensor) -> LinearMap:
    """A map of states (*batch, N, D) as one of vectors (*batch, N D)."""
    return lambda v: product(v.reshape(like.shape)).flatten(-2)
