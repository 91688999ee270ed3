"""The equilibrium of every query, by the native library."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._fused_rule import FusedRule
from ..problem import Hopfield
from ..rule import Solved
from ..trust import empty
from .library import library
from .operands import MOST_STEPS, Operands


class Equilibria(NamedTuple):
    """The final states, as `Solved`, and the number of queries without an answer; outputs not asked for are None."""

    state: Tensor
    mean: Tensor | None
    logsumexp: Tensor | None
    status: Tensor | None
    residual: Tensor | None
    tolerance: Tensor | None
    num_steps: Tensor | None
    failed: int


def equilibria(
    query: Tensor,
    keys: Tensor,
    beta: float | Tensor,
    anchor: float | Tensor,
    mask: Tensor | None,
    first: int | None,
    initial: Tensor,
    rule: FusedRule,
    *,
    mean: bool = True,
    evidence: bool = True,
) -> Equilibria:
    """Solve every query from `initial`; all numbers are of one dtype, float32 or float64.

    query, initial: (*batch, N, D). keys: (*#batch, M, D). beta, anchor: numbers or (*#batch). mask: boolean, or added
    to the scaled scores, (*#batch, #N, #M).
    """
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
        status, steps = (empty(rows, dtype=kind, device=device) for kind in (torch.int8, torch.int32))
    logsumexp, residual, tolerance = (None,) * 3 if numbers is None else numbers.unbind()
    wanted = (state, means, logsumexp, residual, tolerance, status, steps)
    steps_of_rule = (min(rule.max_steps, MOST_STEPS), min(rule.plain_steps, MOST_STEPS + 1))
    numbers_of_rule = [rule.rtol, rule.atol, *steps_of_rule]
    failed = operands.call(loaded.solve, dtype.itemsize, numbers_of_rule, wanted, loaded.parallel_for)
    return Equilibria(state, means, logsumexp, status, residual, tolerance, steps, failed)


def solve(problem: Hopfield, initial: Tensor, rule: FusedRule, *, keep_mean: bool = True) -> Solved:
    """Solve a problem whose tensors are all of one dtype; without `keep_mean` the mean that is returned has no rows."""
    field, keys, beta, anchor, mask, first = problem
    beta, anchor = beta.squeeze((-2, -1)), anchor.squeeze((-2, -1))
    found = equilibria(field, keys, beta, anchor, mask, first, initial, rule, mean=keep_mean)
    mean = found.state.new_empty(0, field.shape[-1]) if found.mean is None else found.mean
    # All of it is there, as it was asked for.
    evidence: Any = (found.logsumexp, found.status, found.residual, found.tolerance, found.num_steps)
    return Solved._make((found.state, mean, *evidence, evidence[-1] + 1))
