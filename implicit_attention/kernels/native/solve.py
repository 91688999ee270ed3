"""The equilibrium of every query, by the native library."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..._fused_rule import FusedRule
from ...solution import Record
from ..problem import Hopfield
from ..rule import Solved
from ..trust import empty, empty_like
from .library import library
from .operands import MOST_STEPS, Operands, in_memory


class Evidence:
    """The evidence of a solve, or of an adjoint solve, in one piece of memory, of which tensors are made when read.

    Three numbers a query (`number`), its steps in four bytes, its status in one, and with `flags` one byte more.
    """

    __slots__ = ("count", "dtype", "memory", "rows")

    def __init__(self, rows: torch.Size, dtype: torch.dtype, device: torch.device, *, flags: bool = False) -> None:
        self.rows, self.dtype, self.count = rows, dtype, rows.numel()
        size = self.count * (3 * dtype.itemsize + (6 if flags else 5))
        self.memory = empty(size, dtype=torch.uint8, device=device)

    def addresses(self) -> tuple[int, int, int, int, int, int]:
        """Return where the three numbers, status, steps and flags are."""
        count, start = self.count, self.memory.data_ptr()
        size = count * self.dtype.itemsize
        steps = start + 3 * size
        return start, start + size, start + 2 * size, steps + 4 * count, steps, steps + 5 * count

    def number(self, index: int) -> Tensor:
        size = self.count * self.dtype.itemsize
        return self._part(index * size, size, self.dtype)

    @property
    def steps(self) -> Tensor:
        return self._part(3 * self.count * self.dtype.itemsize, 4 * self.count, torch.int32)

    @property
    def status(self) -> Tensor:
        return self._part(self.count * (3 * self.dtype.itemsize + 4), self.count, torch.int8)

    @property
    def flags(self) -> Tensor:
        return self._part(self.count * (3 * self.dtype.itemsize + 5), self.count, torch.bool)

    @property
    def residual(self) -> Tensor:
        """Return the residuals of a solve."""
        return self.number(1)

    @property
    def record(self) -> Record:
        """Return the report of a solve."""
        steps = self.steps
        return Record(self.status, self.number(1), self.number(2), steps, steps + 1)

    def _part(self, start: int, size: int, dtype: torch.dtype) -> Tensor:
        # A copy: files hold no memory of several types, and in inference mode its views would be of that mode for good.
        with torch.inference_mode(False):
            return self.memory[start : start + size].clone().view(dtype).view(self.rows)


# Addresses at which nothing is written.
_NOWHERE = (0,) * 5


class Equilibria(NamedTuple):
    """The states z, (*batch, N, D), the means of the keys at them, the evidence, and the number of failed queries.

    The mean and the evidence are None if the caller does not want them.
    """

    state: Tensor
    mean: Tensor | None
    evidence: Evidence | None
    failed: int


def equilibria(
    problem: Hopfield, initial: Tensor, rule: FusedRule, *, mean: bool = True, evidence: bool = True
) -> Equilibria:
    """Solve every query of a problem of tensors `in_memory`, all of one dtype."""
    query, keys, beta, anchor, mask, first = problem
    loaded = library()
    assert loaded is not None
    operands = Operands(query, keys, beta, anchor, mask, first, initial, expanded=True)
    state, means = empty_like(query), empty_like(query) if mean else None
    kept = Evidence(query.shape[:-1], query.dtype, query.device) if evidence else None
    outputs = [state.data_ptr(), 0 if means is None else means.data_ptr()]
    outputs += _NOWHERE if kept is None else kept.addresses()
    steps_of_rule = (min(rule.max_steps, MOST_STEPS), min(rule.plain_steps, MOST_STEPS + 1))
    numbers_of_rule = [rule.rtol, rule.atol, *steps_of_rule]
    failed = operands.call(loaded.solve, query.itemsize, numbers_of_rule, outputs, loaded.parallel_for)
    return Equilibria(state, means, kept, failed)


def solve(problem: Hopfield, initial: Tensor, rule: FusedRule, *, keep_mean: bool = True) -> Solved:
    """Solve a problem whose tensors are all of one dtype; without `keep_mean` the returned mean has no rows."""
    problem = Hopfield._make(map(in_memory, problem))
    state, mean, evidence, _ = equilibria(problem, in_memory(initial), rule, mean=keep_mean)
    assert evidence is not None
    mean = state.new_empty(0, state.shape[-1]) if mean is None else mean
    return Solved(state, mean, evidence.number(0), *evidence.record)
