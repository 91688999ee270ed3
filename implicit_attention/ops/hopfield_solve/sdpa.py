"""Torch's attention kernels, for the queries that are not done yet."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..._types import Impl
from ..dispatch import by_attention, without_kernel
from ..problem import Hopfield
from .iterate import iterate
from .rule import FusedRule, Solved


def solve(
    problem: Hopfield, initial: Tensor, stop: FusedRule, *, impl: Impl = "auto", keep_mean: bool = True
) -> Solved:
    """Solve from `initial`, (*batch, N, D); what the kernels cannot do is multiplied out."""
    problem = problem.to(initial.dtype)
    run = partial(iterate, problem, initial, stop, compact=True, keep_mean=keep_mean)
    found = None
    if without_kernel(problem) is None:
        masked, causal = problem.mask is not None, problem.is_causal
        found = by_attention(impl, problem.keys, partial(run, fused=True), mask=masked, causal=causal)
    return run(fused=False) if found is None else found
