"""The equilibrium of every query, by the native library."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._fused_rule import FusedRule
from ..problem import Hopfield
from ..rule import Solved
from ..trust import empty
from .library import library
from .operands import MOST_STEPS, Operands


def equilibria(
    problem: Hopfield, initial: Tensor, rule: FusedRule, *, mean: bool = True, evidence: bool = True
) -> tuple[Solved, int]:
    """Solve every query of a problem, all of one dtype, and count those that have no answer.

    Outputs that are not asked for are None.
    """
    query, keys, beta, anchor, mask, first = problem
    loaded = library()
    assert loaded is not None
    operands = Operands(query, keys, beta, anchor, mask, first, initial, expanded=True)
    shape, dtype, device = query.shape, query.dtype, query.device
    rows = shape[:-1]
    state = empty(shape, dtype=dtype, device=device)
    means = empty(shape, dtype=dtype, device=device) if mean else None
    numbers = status = steps = None
    if evidence:
        numbers = empty((3, *rows), dtype=dtype, device=device)
        status = empty(rows, dtype=torch.int8, device=device)
        steps = empty(rows, dtype=torch.int32, device=device)
    logsumexp, residual, tolerance = (None,) * 3 if numbers is None else numbers.unbind()
    wanted = (state, means, logsumexp, residual, tolerance, status, steps)
    steps_of_rule = (min(rule.max_steps, MOST_STEPS), min(rule.plain_steps, MOST_STEPS + 1))
    numbers_of_rule = [rule.rtol, rule.atol, *steps_of_rule]
    failed = operands.call(loaded.solve, dtype.itemsize, numbers_of_rule, wanted, loaded.parallel_for)
    evals = None if steps is None else steps + 1
    found: Any = (state, means, logsumexp, status, residual, tolerance, steps, evals)
    return Solved._make(found), failed


def solve(problem: Hopfield, initial: Tensor, rule: FusedRule, *, keep_mean: bool = True) -> Solved:
    """Solve a problem whose tensors are all of one dtype; without `keep_mean` the mean that is returned has no rows."""
    found, _ = equilibria(problem, initial, rule, mean=keep_mean)
    return found if keep_mean else found._replace(mean=found.state.new_empty(0, problem.field.shape[-1]))
