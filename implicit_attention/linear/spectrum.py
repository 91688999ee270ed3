"""Eigenvalues of matrix-free maps from a few matvecs: Lanczos for symmetric ones, Arnoldi for the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from .._torch import LinearMap, length
from .._validate import check_integer, require
from ._vectors import ROUNDOFF, choose, divide, dot, normalised, orthogonalise
from .base import check_arguments, checked


@dataclass(frozen=True)
class LanczosResult:
    """A symmetric map on a k-dimensional subspace: Q A Q^T = T, tridiagonal.

    Not for maps that are not symmetric: use `spectral_radius`.

    Attributes:
        alphas: diagonal of T, (*batch, k).
        betas: off-diagonal of T, (*batch, k - 1); 0 where an invariant subspace was complete.
        ritz_values: eigenvalues of T, ascending, (*batch, k).
        error_bounds: |A y - theta y| of the unit Ritz vectors y, (*batch, k): an eigenvalue of A lies that near.
        basis: the rows of Q, orthonormal, (*batch, k, n).

    Examples:
        >>> import torch
        >>> from implicit_attention.linear import lanczos
        >>> eigenvalues, start = torch.tensor([1.0, 2.0, 5.0]), torch.ones(2, 3)
        >>> result = lanczos(lambda v: eigenvalues * v, start, steps=2)
        >>> result.basis.shape, bool((result.error_bounds < 2).all())
        (torch.Size([2, 2, 3]), True)
    """

    alphas: Tensor
    betas: Tensor
    ritz_values: Tensor
    error_bounds: Tensor
    basis: Tensor


class Eigenvalue(NamedTuple):
    """An estimate (*batch) and its error bound (*batch): a true eigenvalue lies within `error_bound`.

    Not for a proof that no eigenvalue lies further out: Krylov spaces may miss one.

    Examples:
        >>> import torch
        >>> from implicit_attention.linear import extreme_eigenvalues
        >>> eigenvalues, start = torch.tensor([1.0, 2.0, 5.0]), torch.ones(2, 3)
        >>> _, largest = extreme_eigenvalues(lambda v: eigenvalues * v, start, steps=3)
        >>> largest.value.round(decimals=3), bool((largest.error_bound < 1e-4).all())
        (tensor([5., 5.]), True)
    """

    value: Tensor
    error_bound: Tensor


def lanczos(matvec: LinearMap, start: Tensor, steps: int) -> LanczosResult:
    """Reduce a symmetric map to tridiagonal form on the Krylov space of `start`, with full reorthogonalisation.

    Not for maps that are not symmetric: use `spectral_radius`.

    A q_j = beta_{j-1} q_{j-1} + alpha_j q_j + beta_j q_{j+1}. Where the Krylov space is complete before k vectors, the
    recurrence goes on with beta = 0 and a fixed pseudo-random vector orthogonal to it, so every Ritz value is genuine
    and k = n gives the whole spectrum. A problem that meets a NaN gets NaN throughout.

    Args:
        matvec: x -> A x, symmetric, (*batch, n) -> (*batch, n), acting on each row separately.
        start: first vector, (*batch, n), any length; a zero start is replaced.
        steps: number k of vectors, at most n of them are used.

    Returns:
        `LanczosResult`.

    Raises:
        TypeError, ValueError: wrong types, shapes or dtypes, or steps < 1.

    Reference: Lanczos (1950); error bound: Parlett (1980), section 13.2.

    Examples:
        >>> import torch
        >>> from implicit_attention.linear import lanczos
        >>> eigenvalues, start = torch.tensor([1.0, 2.0, 5.0]), torch.ones(2, 3)
        >>> lanczos(lambda v: eigenvalues * v, start, steps=3).ritz_values[0].round(decimals=3)
        tensor([1., 2., 5.])
    """
    with torch.no_grad():
        basis, hessenberg, last = arnoldi(matvec, start, steps)
        alphas = hessenberg.diagonal(dim1=-2, dim2=-1)
        betas = hessenberg.diagonal(offset=-1, dim1=-2, dim2=-1)
        tridiagonal = alphas.diag_embed() + betas.diag_embed(-1) + betas.diag_embed(1)
        clean, broken = _without_nan(tridiagonal)
        values, vectors = torch.linalg.eigh(clean)
        bounds = last.unsqueeze(-1) * vectors[..., -1, :].abs()
        fill = broken.unsqueeze(-1)
        values, bounds = (t.masked_fill(fill, torch.nan) for t in (values, bounds))
        return LanczosResult(alphas, betas, values, bounds, basis)


def extreme_eigenvalues(matvec: LinearMap, start: Tensor, steps: int = 30) -> tuple[Eigenvalue, Eigenvalue]:
    """Estimate the smallest and the largest eigenvalue of a symmetric map, each with its error bound.

    Not for maps that are not symmetric: use `spectral_radius`.

    The smallest Ritz value lies above the smallest eigenvalue, the largest below the largest; `error_bound` is the
    distance within which some eigenvalue lies, not a proof that it is the extreme one.

    Args:
        matvec: x -> A x, symmetric, (*batch, n) -> (*batch, n), acting on each row separately.
        start: first vector, (*batch, n); a random one.
        steps: number of Lanczos vectors.

    Returns:
        (smallest, largest), each an `Eigenvalue` (value, error_bound) of (*batch) tensors.

    Raises:
        TypeError, ValueError: as `lanczos`.

    Reference: Parlett (1980), chapter 13.

    Examples:
        >>> import torch
        >>> from implicit_attention.linear import extreme_eigenvalues
        >>> eigenvalues, start = torch.tensor([1.0, 2.0, 5.0]), torch.ones(2, 3)
        >>> smallest, largest = extreme_eigenvalues(lambda v: eigenvalues * v, start, steps=3)
        >>> round(float(smallest.value[0]), 3), round(float(largest.value[0]), 3)
        (1.0, 5.0)
    """
    result = lanczos(matvec, start, steps)
    values, bounds = result.ritz_values, result.error_bounds
    return Eigenvalue(values[..., 0], bounds[..., 0]), Eigenvalue(values[..., -1], bounds[..., -1])


def spectral_radius(matvec: LinearMap, start: Tensor, steps: int = 30) -> Tensor:
    """Estimate max |lambda| over the eigenvalues of a map, symmetric or not, by Arnoldi's method.

    Not for symmetric maps, of which `extreme_eigenvalues` says more at the same cost.

    The largest eigenvalue modulus of the small Hessenberg matrix: an estimate, not a bound; exact for steps = n.

    Args:
        matvec: x -> A x, (*batch, n) -> (*batch, n), acting on each row separately.
        start: first vector, (*batch, n); a random one.
        steps: number of Arnoldi vectors.

    Returns:
        The spectral radius, (*batch); NaN for a problem that meets one.

    Raises:
        TypeError, ValueError: as `lanczos`.

    Reference: Arnoldi (1951).

    Examples:
        >>> import torch
        >>> from implicit_attention.linear import spectral_radius
        >>> rotation = torch.tensor([[0.0, -2.0], [2.0, 0.0]])
        >>> spectral_radius(lambda v: v @ rotation.mT, torch.ones(3, 2)).round(decimals=3)
        tensor([2., 2., 2.])
    """
    return ritz_radius(matvec, start, steps).value


def ritz_radius(matvec: LinearMap, start: Tensor, steps: int) -> Eigenvalue:
    """`spectral_radius`, and the residual |A y - theta y| of the unit Ritz vector y that belongs to it: an error bound
    for normal maps, an indication for others."""
    with torch.no_grad():
        _, hessenberg, last = arnoldi(matvec, start, steps)
        clean, broken = _without_nan(hessenberg)
        values, vectors = torch.linalg.eig(clean)
        moduli = values.abs()
        radius, which = moduli.max(-1)
        error = last * vectors[..., -1, :].abs().gather(-1, which.unsqueeze(-1)).squeeze(-1)
        return Eigenvalue(radius.masked_fill(broken, torch.nan), error.masked_fill(broken, torch.nan))


def arnoldi(matvec: LinearMap, start: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows v_j, (*batch, k, n); H, (*batch, k, k); last): A v_j = sum_i H_ij v_i, plus last v_{k+1} for j = k."""
    check_arguments(1.0, matvec, start, None)
    check_integer("steps", steps, low=1)
    n = start.shape[-1]
    require(n > 0, "start", "have at least one entry per problem", f"shape {tuple(start.shape)}")
    apply, count = checked(matvec, start), min(steps, n)
    # The same vectors on every call and device: by numpy, as torch's random numbers cannot be had inside torch.vmap.
    drawn = np.random.default_rng(0).standard_normal((count, n))
    fillers = torch.from_numpy(drawn).to(device=start.device, dtype=start.dtype)
    unit, _ = normalised(start.detach())
    basis: tuple[Tensor, ...] = (_unit(choose(dot(unit, unit) != 0, unit, fillers[0])),)
    columns = []
    stiffness = torch.zeros_like(unit[..., 0])
    for index in range(count):
        column, vector, size, height = orthogonalise(basis, apply(basis[-1]) if start.numel() else unit)
        stiffness = torch.maximum(stiffness, size)
        # The filler replaces an A v with nothing new in it.
        complete = height <= ROUNDOFF * torch.finfo(size.dtype).eps * stiffness
        vector, height = choose(~complete, vector, fillers[index]), height.masked_fill(complete, 0.0)
        # What is left of a product may be so short that it has lost its right angles.
        basis = (*basis, _unit(orthogonalise(basis, _unit(vector))[1]))
        columns.append(pad(torch.cat([column, height.unsqueeze(-1)], -1), (0, count - 1 - index)))
    return torch.stack(basis[:-1], -2), torch.stack(columns, -1)[..., :-1, :], height


def _unit(vector: Tensor) -> Tensor:
    return divide(vector, length(vector))


def _without_nan(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """(matrices, zeros where one is not finite; which ones are not): LAPACK refuses a batch that holds a NaN."""
    broken = ~matrix.isfinite().all(-1).all(-1)
    return matrix.masked_fill(broken.unsqueeze(-1).unsqueeze(-1), 0.0), broken
