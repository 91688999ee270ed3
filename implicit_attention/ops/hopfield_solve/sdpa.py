"""Torch's attention kernels, for the queries that are not done yet."""

from __future__ import annotations

from torch import Tensor

from .._door import without_kernel
from .._hopfield import Hopfield
from .iterate import iterate
from .rule import Solved, Stop


def solve(problem: Hopfield, initial: Tensor, stop: Stop, *, keep_mean: bool = True) -> Solved:
    """Solve from `initial`, (*batch, N, D); what the kernels cannot do is multiplied out."""
    fused = without_kernel(problem) is None
    return iterate(problem.to(initial.dtype), initial, stop, fused=fused, compact=True, keep_mean=keep_mean)
