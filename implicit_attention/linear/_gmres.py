"""Restarted generalised minimal residuals, for any square system."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._types import LinearMap
from .._validate import check_integer
from ..status import Status
from ._vectors import ROUNDOFF, choose, coordinates, divide, dot, length, orthogonalise
from .base import LinearSolver, SweepState, fresh


@dataclass(frozen=True)
class GMRESState(SweepState):
    """After j steps: Q H = [R; 0] for the Hessenberg matrix H, Q kept as rows so that one product rotates a column."""

    basis: tuple[Tensor, ...]  # the j + 1 columns of V, (*batch, n) each
    rotated: Tensor  # the first j rows of Q, (*batch, j, j + 1)
    last: Tensor  # row j + 1 of Q, the only one that later rotations change, (*batch, j + 1)
    triangle: Tensor  # R, (*batch, j, j); a frozen problem gets unit columns
    target: Tensor  # the first j entries of Q |r| e_1, (*batch, j); 0 for a frozen problem
    pending: Tensor  # entry j + 1: the signed residual, (*batch)
    stiffness: Tensor  # the largest |A v| met: a lower bound of |A|, (*batch)


@dataclass(frozen=True)
class GMRES(LinearSolver[GMRESState]):
    """Restarted generalised minimal residuals, for any square A, symmetric or not.

    Not for symmetric matrices, for which `CG()` and `MINRES()` keep a few vectors instead of `restart`.

    x_k minimises |b - A x| over span{b, A b, ..., A^{k-1} b} by Arnoldi's method (Gram-Schmidt done twice) and one
    Givens rotation per step; after `restart` steps the basis is dropped and a new cycle begins at the true residual.
    A cycle that leaves 99.9 % of the residual ends a problem as STALLED; so does a singular Hessenberg matrix.

    Args:
        restart: steps between two restarts; the memory is (restart + 1) vectors per problem.

    Reference: Saad, Schultz (1986).

    Examples:
        >>> import torch
        >>> from implicit_attention.linear import GMRES
        >>> matrix, b = torch.tensor([[2.0, 1.0], [-1.0, 3.0]]), torch.ones(4, 2)
        >>> solution = GMRES(restart=10).solve(lambda v: v @ matrix.mT, b)
        >>> bool(solution.converged.all()), torch.allclose(solution.value @ matrix.mT, b)
        (True, True)
    """

    restart: int = 30

    symmetric: ClassVar[bool] = False
    max_sweeps: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("restart", self.restart, low=1)

    def sweep_steps(self, max_steps: int) -> int:
        return min(self.restart, max_steps)

    def begin(self, residual: Tensor) -> GMRESState:
        size = length(residual)
        zeros = torch.zeros_like(size)
        none = zeros.unsqueeze(-1)[..., :0]
        return GMRESState(
            **fresh(size),
            basis=(divide(residual, size),),
            rotated=none.unsqueeze(-1),
            last=torch.ones_like(zeros).unsqueeze(-1),
            triangle=none.unsqueeze(-1)[..., :0],
            target=none,
            pending=size,
            stiffness=zeros,
        )

    def step(self, matvec: LinearMap, state: GMRESState, active: Tensor) -> GMRESState:
        product = matvec(state.basis[-1])
        column, remainder = orthogonalise(state.basis, product)
        stiffness = torch.maximum(state.stiffness, length(product))
        tiny = ROUNDOFF * torch.finfo(product.dtype).eps * stiffness
        height = length(remainder)
        height = torch.where(height <= tiny, 0.0, height)  # happy breakdown: the Krylov space is invariant
        above, diagonal = coordinates(state.rotated, column), dot(state.last, column)
        pivot = torch.hypot(diagonal, height)
        blocked = active & (pivot <= tiny)  # A is singular on the invariant space
        used = active & ~blocked
        cosine, sine = divide(diagonal, pivot), divide(height, pivot)
        pending = torch.where(used, -sine * state.pending, state.pending)
        following = remainder / torch.where(height == 0, 1.0, height).unsqueeze(-1)
        following = choose(used & (height != 0), following, torch.zeros_like(remainder))
        return GMRESState(
            residual_norm=pending.abs(),
            verdict=state.verdict.masked_fill(blocked, int(Status.STALLED)),
            negative_curvature=state.negative_curvature,
            basis=(*state.basis, following),
            rotated=_bordered(state.rotated, _appended(cosine, state.last, sine)),
            last=_appended(-sine, state.last, cosine),
            triangle=_with_column(state.triangle, above, pivot, used),
            target=torch.cat([state.target, torch.where(used, cosine * state.pending, 0.0).unsqueeze(-1)], -1),
            pending=pending,
            stiffness=stiffness,
        )

    def correction(self, state: GMRESState) -> Tensor:
        # Column by column, so that the unit columns of a frozen problem change no bit of its sum.
        target, value = state.target, torch.zeros_like(state.basis[0])
        for index in reversed(range(target.shape[-1])):
            column = state.triangle[..., index]
            weight = (target[..., index] / column[..., index]).unsqueeze(-1)
            target = torch.addcmul(target, weight, column, value=-1)
            value = torch.addcmul(value, weight, state.basis[index])
        return value


def _appended(factor: Tensor, row: Tensor, entry: Tensor) -> Tensor:
    """[factor * row, entry]."""
    return torch.cat([factor.unsqueeze(-1) * row, entry.unsqueeze(-1)], -1)


def _bordered(rows: Tensor, row: Tensor) -> Tensor:
    """The rows, widened by a column of zeros, and one more row below."""
    return torch.cat([pad(rows, (0, 1)), row.unsqueeze(-2)], -2)


def _with_column(triangle: Tensor, above: Tensor, diagonal: Tensor, used: Tensor) -> Tensor:
    """The triangle with one more column [above, diagonal], or [0, 1] for the problems that do not use it."""
    column = torch.cat([above, diagonal.unsqueeze(-1)], -1)
    unit = torch.cat([torch.zeros_like(above), torch.ones_like(diagonal).unsqueeze(-1)], -1)
    return torch.cat([pad(triangle, (0, 0, 0, 1)), choose(used, column, unit).unsqueeze(-1)], -1)
