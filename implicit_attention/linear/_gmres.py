"""Restarted generalised minimal residuals, for any square system."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._autograd import host_may_look
from .._norm import length
from .._types import LinearMap
from .._validate import check_integer
from ..status import Status
from ._vectors import ROUNDOFF, choose, coordinates, divide, orthogonalise
from .base import LinearSolver, SweepState, fresh


@dataclass(frozen=True)
class GMRESState(SweepState):
    """After j steps: Q H = [R; 0] for the Hessenberg matrix H, Q kept as rows so that one product rotates a column."""

    basis: tuple[Tensor, ...]  # the j + 1 columns of V, (*batch, n) each
    turned: Tensor  # Q, (*batch, j + 1, j + 1)
    triangle: tuple[
        Tensor, ...
    ]  # the j columns of R, (*batch, 1), ..., (*batch, j); a frozen problem gets unit columns
    target: tuple[Tensor, ...]  # the first j entries of Q |r| e_1, (*batch) each; 0 for a frozen problem
    pending: Tensor  # entry j + 1: the residual, (*batch)
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
        return GMRESState(
            **fresh(size),
            basis=(residual / size.masked_fill(size == 0, 1.0).unsqueeze(-1),),
            turned=torch.ones_like(size)[..., None, None],
            triangle=(),
            target=(),
            pending=size,
            stiffness=torch.zeros_like(size),
        )

    def step(self, matvec: LinearMap, state: GMRESState, active: Tensor) -> GMRESState:
        product = matvec(state.basis[-1])
        column, remainder, size, height = orthogonalise(state.basis, product)
        stiffness = torch.maximum(state.stiffness, size)
        tiny = ROUNDOFF * torch.finfo(product.dtype).eps * stiffness
        invariant = height <= tiny  # happy breakdown: nothing new is in the Krylov space
        column = coordinates(state.turned, column)
        verdict, diagonal = state.verdict, column[..., -1]
        # Mostly the host sees that all problems take part, and that the space of each grows: nothing is to be masked.
        used = active & ~invariant
        whole = host_may_look(used) and bool(used.all())
        if not whole:
            height = height.masked_fill(invariant, 0.0)
        pivot = torch.hypot(diagonal, height)
        # A reflection of the last row and one more, by which the residual stays positive.
        cosine, sine = (side / pivot if whole else divide(side, pivot) for side in (diagonal, height))
        turned = _turned(state.turned, cosine.unsqueeze(-1), sine.unsqueeze(-1))
        target, pending = cosine * state.pending, sine * state.pending
        # The column has no other reader, and its last entry none from here on.
        diagonal.copy_(pivot)
        if whole:
            # The remainder has no other reader.
            following = remainder.div_(height.unsqueeze(-1))
        else:
            blocked = active & (pivot <= tiny)  # A is singular on the invariant space
            verdict, used = verdict.masked_fill(blocked, int(Status.STALLED)), active & ~blocked
            unit = torch.zeros_like(column)
            unit[..., -1] = 1.0
            column, target = choose(used, column, unit), torch.where(used, target, 0.0)
            pending = torch.where(used, pending, state.pending)
            following = remainder / height.masked_fill(invariant, 1.0).unsqueeze(-1)
            following = choose(used & ~invariant, following, 0.0)
        return GMRESState(
            residual_norm=pending,
            verdict=verdict,
            negative_curvature=state.negative_curvature,
            basis=(*state.basis, following),
            turned=turned,
            triangle=(*state.triangle, column),
            target=(*state.target, target),
            pending=pending,
            stiffness=stiffness,
        )

    def correction(self, state: GMRESState) -> Tensor:
        # Column by column, so that the unit columns of a frozen problem change no bit of its sum.
        if not state.target:
            return torch.zeros_like(state.basis[0])
        target, value = torch.stack(state.target, -1), None
        for index in reversed(range(len(state.triangle))):
            column, vector = state.triangle[index], state.basis[index]
            weight = (target[..., index] / column[..., index]).unsqueeze(-1)
            target = torch.addcmul(target[..., : index + 1], weight, column, value=-1)
            value = weight * vector if value is None else torch.addcmul(value, weight, vector)
        assert value is not None
        return value


def _turned(rows: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Q with its last row and one more below reflected, by (*batch, 1) each."""
    last = rows[..., -1, :]
    pair = torch.cat([cosine * last, sine, sine * last, -cosine], -1).reshape(*last.shape[:-1], 2, -1)
    return torch.cat([pad(rows[..., :-1, :], (0, 1)), pair], -2)
