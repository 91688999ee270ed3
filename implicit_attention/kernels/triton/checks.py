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
from .layout import ALIGNMENT, TILES, fitting, gathered_after, in_memory, order_of, tiles, whole_tiles

#: In a check queries are gathered after so many evaluations, as small problems need few.
GATHERED_AFTER = (1, 2, 3, 5)


class TritonVariant(NamedTuple):
    """The properties of a call that select the code path of a Triton kernel."""

    dtype: torch.dtype
    head_dim: int
    mask: str
    causal: bool
    #: How keys and mask stand in memory, and the dtype of what a mask adds.
    key_order: str
    mask_order: str
    added: torch.dtype | None
    #: The `Tiles` of every kernel involved.
    tiles: tuple[tuple[int | None, ...], ...]
    #: Whether a solve has a fixed budget, and whether it gathers the queries that have not ended.
    fixed_budget: bool
    gathers: bool


def variant(problem: Hopfield, kernels: tuple[str, ...], rule: FusedRule) -> TritonVariant:
    problem = in_memory(problem)
    keys, mask = problem.keys, problem.mask
    return TritonVariant(
        dtype=keys.dtype,
        head_dim=keys.shape[-1],
        mask=mask_kind(mask),
        causal=problem.first is not None,
        key_order=order_of(keys),
        mask_order="none" if mask is None else order_of(mask),
        added=mask.dtype if mask is not None and mask.is_floating_point() else None,
        tiles=tuple(tuple(tiles(kernel, problem)) for kernel in kernels),
        fixed_budget=rule.fixed_budget,
        gathers=bool(gathered_after(problem, rule)),
    )


def _solve(problem: Hopfield, chosen: TritonVariant) -> Errors:
    ends = GATHERED_AFTER if chosen.gathers else ()
    return solve_errors(_small(problem, chosen, "solve"), partial(_solved, ends=ends), fixed_budget=chosen.fixed_budget)


def _adjoint(problem: Hopfield, chosen: TritonVariant) -> Errors:
    from .adjoint import solve_adjoint

    def solved(problem: Hopfield, state: Tensor, g: Tensor, there: Solved, stop: AdjointRule) -> AdjointAnswer:
        return solve_adjoint(problem, state, g, there.mean, there.logsumexp, stop)

    return adjoint_errors(_small(problem, chosen, "solve", "adjoint", "keys"), _solved, solved)


#: Operation -> its check, and the kernels whose tiles it is made of.
CHECKS = {
    "hopfield_solve": (_solve, ("solve",)),
    "hopfield_adjoint": (_adjoint, ("solve", "adjoint", "keys")),
}


def _small(problem: Hopfield, chosen: TritonVariant, *kernels: str) -> Hopfield:
    """A problem of the same code and tiles, with tiles of every kind: some pairs masked, none, all, and some again.

    All problems of these tiles trust what it shows, so that its number of keys is theirs only where one tile has them.
    """
    problem = in_memory(problem)
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
        small = small._replace(mask=laid_out(small.mask.to(chosen.added or torch.bool), chosen.mask_order))
    if small.first is not None and many:
        small = small._replace(first=3 * most)
    return small._replace(keys=laid_out(small.keys, chosen.key_order))


def laid_out(tensor: Tensor, order: str) -> Tensor:
    """The same numbers in memory of an order (`order_of`)."""
    if order == "columns":
        return laid_out(tensor.mT, "rows").mT
    # Numbers from one of the tensor to the next, and how far behind a multiple of 16 bytes the first is.
    step, late = 1 if order == "rows" else 2, int(order == "unaligned")
    *lead, columns = tensor.shape
    memory = tensor.new_empty(*lead, -(-(columns * step + late) // ALIGNMENT) * ALIGNMENT)
    return memory[..., late : late + columns * step : step].copy_(tensor)


def _solved(small: Hopfield, initial: Tensor, stop: FusedRule, ends: tuple[int, ...] = ()) -> Solved:
    from .solve import solve

    return solve(small, initial, stop, ends)
