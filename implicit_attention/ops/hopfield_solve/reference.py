"""Every product written out, for all queries until the last is done: what the others are compared with."""

from __future__ import annotations

from torch import Tensor

from ..problem import Hopfield
from .iterate import iterate
from .rule import FusedRule, Solved


def solve(problem: Hopfield, initial: Tensor, stop: FusedRule) -> Solved:
    """Solve from `initial`, (*batch, N, D)."""
    return iterate(problem.to(initial.dtype), initial, stop, fused=False, compact=False)
