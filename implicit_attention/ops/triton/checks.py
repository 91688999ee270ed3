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
from .layout import TILES, fitting, gathered_after, tiles, whole_tiles

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
    return solve_errors(_small(problem, "solve"), partial(_solved, ends=ends), fixed_budget=chosen.fixed_budget)


def _adjoint(problem: Hopfield, _: TritonVariant) -> Errors:
    from .adjoint import solve_adjoint

    def solved(problem: Hopfield, state: Tensor, g: Tensor, there: Solved, stop: AdjointRule) -> AdjointAnswer:
        return solve_adjoint(problem, state, g, there.mean, there.logsumexp, stop)

    return adjoint_errors(_small(problem, "solve", "adjoint", "keys"), _solved, solved)


#: Operation -> its check, and the kernels whose tiles it is made of.
CHECKS = {
    "hopfield_solve": (_solve, ("solve",)),
    "hopfield_adjoint": (_adjoint, ("solve", "adjoint", "keys")),
}


def _small(problem: Hopfield, *kernels: str) -> Hopfield:
    """A problem of the same tiles, with tiles of every kind: some pairs masked, none, all, and some again.

    All problems of these tiles trust what it shows, so that its number of keys is theirs only where one tile has them.
    """
    most = max(max(sizes.rows, sizes.keys) for table in TILES.values() for sizes in table.values())
    rows, count = min(problem.field.shape[-2], most + 5), problem.keys.shape[-2]
    many = all(tiles(kernel, problem).keys == whole_tiles(kernel, problem).keys for kernel in kernels)
    small = small_problem(problem, rows, 4 * most + 3 if many else fitting(count, most))
    if small.mask is not None:
        low, high = (False, True) if small.mask.dtype == torch.bool else (-torch.inf, 0.0)
        # All queries but the one that attends to no key.
        others = [row for row in range(small.mask.shape[-2]) if row == 0 or row != small.mask.shape[-2] // 2]
        if many:
            small.mask[:, others, most : 2 * most] = high
            small.mask[:, :, 2 * most : 3 * most] = low
        else:
            small.mask[1] = high
    if small.first is not None and many:
        small = small._replace(first=3 * most)
    return small


def _solved(small: Hopfield, initial: Tensor, stop: FusedRule, ends: tuple[int, ...] = ()) -> Solved:
    from .solve import solve

    return solve(small, initial, stop, ends)
