"""The small problems by which the Triton kernels earn trust."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..._fused_rule import FusedRule
from ..checks import adjoint_errors, mask_kind, small_problem, solve_errors
from ..problem import Hopfield
from ..rule import AdjointAnswer, AdjointRule, Solved
from ..trust import Errors
from .layout import TILES, gathered_after, tiles

#: In a check queries are gathered after so many evaluations, as small problems need few.
GATHERED_AFTER = (1, 2, 3, 5)


class TritonVariant(NamedTuple):
    """The properties of a call that select the code path of a Triton kernel."""

    dtype: torch.dtype
    head_dim: int
    mask: str
    causal: bool
    #: The `Tiles` of every kernel involved.
    tiles: tuple[tuple[int | None, ...], ...]
    #: Whether a solve has a fixed budget, and whether it gathers the queries that have not ended.
    fixed_budget: bool
    gathers: bool


def variant(problem: Hopfield, kernels: tuple[str, ...], rule: FusedRule) -> TritonVariant:
    sizes = tuple(tuple(tiles(kernel, problem)) for kernel in kernels)
    dim, mask = problem.field.shape[-1], mask_kind(problem.mask)
    gathers = bool(gathered_after(problem, rule))
    return TritonVariant(problem.keys.dtype, dim, mask, problem.first is not None, sizes, rule.fixed_budget, gathers)


def _solve(problem: Hopfield, chosen: TritonVariant) -> Errors:
    ends = GATHERED_AFTER if chosen.gathers else ()
    return solve_errors(_small(problem), partial(_solved, ends=ends), fixed_budget=chosen.fixed_budget)


def _adjoint(problem: Hopfield, _: TritonVariant) -> Errors:
    from .adjoint import solve_adjoint

    def solved(problem: Hopfield, state: Tensor, g: Tensor, there: Solved, stop: AdjointRule) -> AdjointAnswer:
        return solve_adjoint(problem, state, g, there.mean, there.logsumexp, stop)

    return adjoint_errors(_small(problem), _solved, solved)


#: Operation -> its check, and the kernels whose tiles it is made of.
CHECKS = {
    "hopfield_solve": (_solve, ("solve",)),
    "hopfield_adjoint": (_adjoint, ("solve", "adjoint", "keys")),
}


def _small(problem: Hopfield) -> Hopfield:
    """A problem that fills the same tiles twice, with tiles of every kind where there is a mask."""
    most = max(max(sizes.rows, sizes.keys) for table in TILES.values() for sizes in table.values())
    small = small_problem(problem, most + 5, 3 * most + 3)
    if small.mask is not None:
        rows, boolean = small.mask.shape[-2], small.mask.dtype == torch.bool
        # All queries but the one that attends to no key.
        others = [row for row in range(rows) if rows == 1 or row != rows // 2]
        small.mask[:, others, :most] = True if boolean else 0.0
        small.mask[:, :, most : 2 * most] = False if boolean else -torch.inf
    return small


def _solved(small: Hopfield, initial: Tensor, stop: FusedRule, ends: tuple[int, ...] = ()) -> Solved:
    from .solve import solve

    return solve(small, initial, stop, ends)
