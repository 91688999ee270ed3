"""Restarted generalised minimal residuals, for any square system."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._torch import LinearMap, length
from .._validate import integer
from ..solution import Status
from ._vectors import ROUNDOFF, choose, coordinates, orthogonalise
from .base import LinearSolver, SweepState, fresh


@dataclass(frozen=True)
class GMRESState(SweepState):
    """After j steps: Q H = [R; 0] for the Hessenberg matrix H, Q kept as rows so that one product rotates a column.

    Entry j + 1 of Q |r| e_1 is `residual_norm`.
    """

    basis: tuple[Tensor, ...]  # the j + 1 columns of V, (*batch, n) each
    turned: Tensor  # Q, (*batch, j + 1, j + 1)
    triangle: tuple[Tensor, ...]  # the j columns of R, (*batch, 1), ..., (*batch, j); unit columns for a frozen one
    target: tuple[Tensor, ...]  # the first j entries of Q |r| e_1, (*batch) each; 0 for a frozen problem
    stiffness: Tensor  # the largest |A v| met: a lower bound of |A|, (*batch)


@dataclass(frozen=True)
class GMRES(LinearSolver[GMRESState]):
    """Restarted generalised minimal residuals, for any square A, symmetric or not.

    Not for symmetric matrices, for which `CG()` and `MINRES()` keep a few vectors instead of `restart`.

    x_k minimises |b - A x| over span{b, A b, ..., A^{k-1} b} by Arnoldi's method (Gram-Schmidt done twice) and one
    Givens reflection per step; after `restart` steps the basis is dropped and a new cycle begins at the true residual.
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

    restart: int = integer(30, low=1)

    symmetric: ClassVar[bool] = False
    max_sweeps: ClassVar[int | None] = None

    def sweep_steps(self, max_steps: int) -> int:
        return min(self.restart, max_steps)

    def begin(self, residual: Tensor) -> GMRESState:
        size = length(residual)
        return GMRESState(
            **fresh(size),
            basis=(residual / size.masked_fill(size == 0, 1.0).unsqueeze(-1),),
            turned=torch.ones_like(size)[..., None, None],
            triangle=(),
            target=(),
            stiffness=torch.zeros_like(size),
        )

    def step(self, matvec: LinearMap, state: GMRESState, active: Tensor) -> GMRESState:
        column, remainder, size, height = orthogonalise(state.basis, matvec(state.basis[-1]))
        stiffness = torch.maximum(state.stiffness, size)
        tiny = ROUNDOFF * torch.finfo(size.dtype).eps * stiffness
        height = height.masked_fill(height <= tiny, 0.0)  # happy breakdown: nothing new is in the Krylov space
        column = coordinates(state.turned, column)
        diagonal = column[..., -1]
        pivot = torch.hypot(diagonal, height)
        blocked = active & (pivot <= tiny)  # A is singular on the invariant space
        used = active & ~blocked
        # A reflection of the last row and one more, by which the residual stays positive; 0/0 where it is blocked.
        cosine, sine = diagonal / pivot, height / pivot
        triangle = choose(used, column, 0.0)
        triangle[..., -1] = torch.where(used, pivot, 1.0)
        # The remainder has no other reader.
        following = remainder.div_(height.unsqueeze(-1)).masked_fill_(~(used & (height != 0)).unsqueeze(-1), 0.0)
        return replace(
            state,
            residual_norm=torch.where(used, sine * state.residual_norm, state.residual_norm),
            verdict=state.verdict.masked_fill(blocked, int(Status.STALLED)),
            basis=(*state.basis, following),
            turned=_turned(state.turned, cosine.unsqueeze(-1), sine.unsqueeze(-1)),
            triangle=(*state.triangle, triangle),
            target=(*state.target, torch.where(used, cosine * state.residual_norm, 0.0)),
            stiffness=stiffness,
        )

    def correction(self, state: GMRESState) -> Tensor:
        # Column by column, so that the unit columns of a frozen problem change no bit of its sum.
        target, value = torch.stack(state.target, -1), torch.zeros_like(state.basis[0])
        for index in reversed(range(len(state.triangle))):
            column = state.triangle[index]
            weight = (target[..., index] / column[..., index]).unsqueeze(-1)
            target = torch.addcmul(target[..., : index + 1], weight, column, value=-1)
            value = torch.addcmul(value, weight, state.basis[index])
        return value


def _turned(rows: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Q with its last row and one more below reflected, by (*batch, 1) each."""
    last = rows[..., -1, :]
    pair = torch.cat([cosine * last, sine, sine * last, -cosine], -1).reshape(*last.shape[:-1], 2, -1)
    return torch.cat([pad(rows[..., :-1, :], (0, 1)), pair], -2)
