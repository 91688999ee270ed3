"""The equilibrium of every query, by the native library."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..._fused_rule import FusedRule
from ...solution import Record
from ..problem import Hopfield
from ..rule import Solved
from ..trust import empty
from .library import library
from .operands import MOST_STEPS, Operands


class Evidence:
    """The evidence of a solve in two pieces of memory, of which tensors are made when they are read."""

    __slots__ = ("codes", "numbers", "rows")

    def __init__(self, rows: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = rows
        self.numbers = empty((3, *rows), dtype=dtype, device=device)
        # Steps in four bytes, a status in one.
        self.codes = empty((5 * rows.numel(),), dtype=torch.uint8, device=device)

    def addresses(self) -> tuple[int, ...]:
        """Return where logsumexp, residual, tolerance, status and steps are."""
        count, start, steps = self.rows.numel(), self.numbers.data_ptr(), self.codes.data_ptr()
        size = count * self.numbers.itemsize
        return start, start + size, start + 2 * size, steps + 4 * count, steps

    @property
    def logsumexp(self) -> Tensor:
        return self.numbers[0]

    @property
    def residual(self) -> Tensor:
        return self.numbers[1]

    @property
    def record(self) -> Record:
        """Return the report of the solve."""
        count = self.rows.numel()
        steps = self.codes[: 4 * count].view(torch.int32).view(self.rows)
        status = self.codes[4 * count :].view(torch.int8).view(self.rows)
        return Record(status, self.numbers[1], self.numbers[2], steps, steps + 1)


class Equilibria(NamedTuple):
    """The states z, (*batch, N, D), the means of the keys there, the evidence, and how many queries have no answer.

    The mean and the evidence are None where nobody asked for them.
    """

    state: Tensor
    mean: Tensor | None
    evidence: Evidence | None
    failed: int


def equilibria(
    problem: Hopfield, initial: Tensor, rule: FusedRule, *, mean: bool = True, evidence: bool = True
) -> Equilibria:
    """Solve every query of a problem, all of one dtype."""
    query, keys, beta, anchor, mask, first = problem
    loaded = library()
    assert loaded is not None
    operands = Operands(query, keys, beta, anchor, mask, first, initial, expanded=True)
    shape, dtype, device = query.shape, query.dtype, query.device
    state = empty(shape, dtype=dtype, device=device)
    means = empty(shape, dtype=dtype, device=device) if mean else None
    told = Evidence(shape[:-1], dtype, device) if evidence else None
    outputs = [state.data_ptr(), 0 if means is None else means.data_ptr()]
    outputs += (0,) * 5 if told is None else told.addresses()
    steps_of_rule = (min(rule.max_steps, MOST_STEPS), min(rule.plain_steps, MOST_STEPS + 1))
    numbers_of_rule = [rule.rtol, rule.atol, *steps_of_rule]
    failed = operands.call(loaded.solve, dtype.itemsize, numbers_of_rule, outputs, loaded.parallel_for)
    return Equilibria(state, means, told, failed)


def solve(problem: Hopfield, initial: Tensor, rule: FusedRule, *, keep_mean: bool = True) -> Solved:
    """Solve a problem whose tensors are all of one dtype; without `keep_mean` the mean that is returned has no rows."""
    state, mean, told, _ = equilibria(problem, initial, rule, mean=keep_mean)
    assert told is not None
    mean = state.new_empty(0, state.shape[-1]) if mean is None else mean
    return Solved(state, mean, told.logsumexp, *told.record)
