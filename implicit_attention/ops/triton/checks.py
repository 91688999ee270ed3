"""The small problems by which the Triton kernels earn trust."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..._fused_rule import FusedRule
from ..checks import adjoint_errors, mask_kind, small_problem, solve_errors
from ..problem import Hopfield
from ..rule import AdjointAnswer, AdjointRule, Solved
from ..trust import Errors
from .layout import TILES, tiles


class TritonVariant(NamedTuple):
    """The properties of a call that select the code path of a Triton kernel."""

    dtype: torch.dtype
    head_dim: int
    mask: str
    causal: bool
    #: Queries and keys per tile of every kernel involved.
    tiles: tuple[tuple[int, ...], ...]
    #: Whether a solve has a fixed budget.
    fixed_budget: bool


def variant(problem: Hopfield, kernels: tuple[str, ...], *, fixed_budget: bool) -> TritonVariant:
    sizes = tuple(tiles(kernel, problem)[:2] for kernel in kernels)
    dim, mask = problem.field.shape[-1], mask_kind(problem.mask)
    return TritonVariant(problem.keys.dtype, dim, mask, problem.first is not None, sizes, fixed_budget)


def _solve(problem: Hopfield, fixed_budget: bool) -> Errors:
    return solve_errors(_small(problem), _solved, fixed_budget=fixed_budget)


def _adjoint(problem: Hopfield, _: bool) -> Errors:
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
    """A problem that fills the same tiles twice."""
    most = max(max(sizes.rows, sizes.keys) for table in TILES.values() for sizes in table.values())
    return small_problem(problem, most + 5, 2 * most + 3)


def _solved(small: Hopfield, initial: Tensor, stop: FusedRule) -> Solved:
    from .solve import solve

    return solve(small, initial, stop)
