"""The small problems by which the native operations earn trust."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import adjoint_errors, small_problem, solve_errors
from ..problem import Hopfield
from ..rule import AdjointAnswer, AdjointRule, Solved
from ..trust import Errors
from .adjoint import solve_adjoint
from .solve import solve

# More than one tile of queries and one block of keys, and parts of these.
ROWS, KEYS = 37, 259


class NativeVariant(NamedTuple):
    """The properties of a call that select the code path of a native operation."""

    isa: str
    dtype: torch.dtype
    head_dim: int
    mask: str
    causal: bool


def check_solve(variant: NativeVariant) -> Errors:
    return solve_errors(_small(variant), solve)


def check_adjoint(variant: NativeVariant) -> Errors:
    def solved(problem: Hopfield, state: Tensor, g: Tensor, there: Solved, stop: AdjointRule) -> AdjointAnswer:
        return solve_adjoint(problem, state, g, there.mean, stop)

    return adjoint_errors(_small(variant), solve, solved)


CHECKS = {"hopfield_solve": check_solve, "hopfield_adjoint": check_adjoint}


def _small(variant: NativeVariant) -> Hopfield:
    dtype, rows = variant.dtype, ROWS if variant.mask.endswith("pair") else 1
    field, keys = (torch.empty(1, size, variant.head_dim, dtype=dtype) for size in (ROWS, KEYS))
    mask = None
    if variant.mask != "none":
        mask = torch.empty(1, rows, KEYS, dtype=torch.bool if variant.mask.startswith("boolean") else dtype)
    number = torch.empty(1, 1, 1, dtype=dtype)
    return small_problem(Hopfield(field, keys, number, number, mask, 0 if variant.causal else None), ROWS, KEYS)
