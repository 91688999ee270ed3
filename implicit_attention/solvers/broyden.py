"""Broyden's method, problem by problem, with a safeguard."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _validate
from ..problem import Problem
from .loop import Iteration, rows_where
from .safeguard import Proposal, Safeguarded


class BroydenHistory(NamedTuple):
    """-H = I - sum_i u_i v_i^T, the inverse of minus the Jacobian of r = f(z) - z, newest pair first."""

    u: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    valid: tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Broyden(Safeguarded):
    """z <- z - H r with H the inverse Jacobian of r = f(z) - z, updated by rank one after every accepted step.

    Not for long attention, whose 2 x `history` states per query take memory: use `Anderson()`.

    Starts from H = -I, that is from the plain step.

    Args:
        history: largest number of rank-one updates kept; the oldest is dropped.
        guard: see `Safeguarded`; without it the method ends on saddles of attention energies.

    Reference: Broyden (1965), the first ("good") method, in the limited-memory form of its inverse.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, solve
        >>> from implicit_attention.solvers import Broyden
        >>> cosine = FixedPointMap(torch.cos, event_ndim=1)
        >>> solution = solve(cosine, torch.zeros(3, 1), solver=Broyden(history=5))
        >>> bool(solution.converged.all()), round(float(solution.value[0]), 3)
        (True, 0.739)
    """

    history: int = _validate.integer(20, low=1)

    def init_history(self, z: Tensor) -> BroydenHistory:
        return BroydenHistory((), (), ())

    def remember(
        self, problem: Problem, history: BroydenHistory, dz: Tensor, dr: Tensor, fresh: Tensor
    ) -> BroydenHistory:
        # Minus H everywhere: B = -H, so that B r is the step and B dr = -dz is the secant condition.
        v = _apply(history, dz, transposed=True)
        denominator = (v * dr).sum(-1)
        well = fresh & (denominator.abs() > torch.finfo(dr.dtype).eps * (v.norm(dim=-1) * dr.norm(dim=-1)))
        u = (dz + _apply(history, dr)) / torch.where(well, denominator, 1.0)[..., None]
        keep = self.history - 1
        return BroydenHistory(
            (u, *history.u[:keep]),
            (v, *history.v[:keep]),
            (well, *(old & fresh for old in history.valid[:keep])),
        )

    def propose(self, problem: Problem, history: BroydenHistory, point: Iteration, accepted: Tensor) -> Proposal:
        if not history.u:
            return Proposal(point.r, torch.zeros_like(accepted))
        return Proposal(_apply(history, point.r), history.valid[0])


def _apply(history: BroydenHistory, x: Tensor, *, transposed: bool = False) -> Tensor:
    """B x = x - sum_i u_i <v_i, x>, or its transpose."""
    pairs = (history.v, history.u) if transposed else (history.u, history.v)
    result = x
    for u, v, valid in zip(*pairs, history.valid, strict=True):
        result = result - rows_where(valid, u * (v * x).sum(-1, keepdim=True), 0.0)
    return result
