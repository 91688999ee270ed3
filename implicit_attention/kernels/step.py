"""The work between two evaluations of a user's map: what a kernel keeps of the rows of a solve, on any device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..solution import Record, Status
from .problem import FusedRule

#: Changes that are mixed at most, as in step.h.
MOST_MIXED = 8


class StepMemory(NamedTuple):
    """All that is kept of rows (*lead) with n numbers each, in the order of step.h; m changes are mixed at most.

    r, residual, tolerance: f(z) - z (*lead, n), its length and the tolerance, at the last states.
    active, better: which rows are unfinished, and, for the native library, of which the last states are the best.
    best_residual, best_tolerance, steps, evaluations, status: the record at the best states.
    accelerated: whether the steps to the last states were mixed.
    last_z, last_r, last_residual: the last accepted states; without a history they have no numbers.
    dr, df, gram: changes of r and f(z), (*lead, m, n), and the products of the former, (*lead, m, m).
    counts: how many changes may be mixed, and how many were made, (*lead, 2).
    """

    r: Tensor
    residual: Tensor
    tolerance: Tensor
    active: Tensor
    better: Tensor
    best_residual: Tensor
    best_tolerance: Tensor
    steps: Tensor
    evaluations: Tensor
    status: Tensor
    accelerated: Tensor
    last_z: Tensor
    last_r: Tensor
    last_residual: Tensor
    dr: Tensor
    df: Tensor
    gram: Tensor
    counts: Tensor

    @classmethod
    def of(cls, z: Tensor, active: Tensor, m: int) -> StepMemory:
        """The memory before the first evaluation, at the states z (*lead, n)."""
        lead, n, kept = active.shape, z.shape[-1], z.shape[-1] if m else 0

        def zeros(*axes: int, dtype: torch.dtype = z.dtype) -> Tensor:
            return z.new_zeros((*lead, *axes), dtype=dtype)

        return cls(
            *(z.new_empty((*lead, n)), zeros(), zeros(), active.clone(), zeros(dtype=torch.bool)),
            *(zeros(), zeros(), zeros(dtype=torch.int32), zeros(dtype=torch.int32)),
            *(z.new_full(lead, Status.MAX_STEPS, dtype=torch.int8), zeros(dtype=torch.bool)),
            *(z.new_empty((*lead, kept)), z.new_empty((*lead, kept)), zeros()),
            *(z.new_empty((*lead, m, n)), z.new_empty((*lead, m, n)), z.new_empty((*lead, m, m))),
            zeros(2, dtype=torch.int32),
        )


class Step:
    """The work between two evaluations by a kernel, which brings the memory up to date.

    Args:
        rule: when a row ends, and how many steps are plain at first.
        history: number of changes that Anderson's method mixes; 0 for Picard's.
        ridge: of the mixing.
        growth: how much |r| may grow in a mixed step.
        z: the first states, plain numbers (*lead, n).
        active: which rows are to be solved, (*lead).
    """

    #: Whether the host knows that no row has finished.
    whole = False

    def __init__(self, rule: FusedRule, history: int, ridge: float, growth: float, z: Tensor, active: Tensor) -> None:
        self.rule, self.history, self.ridge, self.growth = rule, history, ridge, growth
        self.go_on_with(StepMemory.of(z, active, history), z)
        self.value = self.read(z)

    def go_on_with(self, memory: StepMemory, value: Tensor) -> None:
        """Keep this memory of rows, and their best states."""
        self.memory, self.value = StepMemory(*(t.contiguous() for t in memory)), value

    @property
    def record(self) -> Record:
        """The record at the best states."""
        *numbers, status = self.memory[5:10]
        return Record(status, *numbers)

    def reads(self, mapped: Tensor) -> bool:
        """Whether an image is plain numbers like the states."""
        raise NotImplementedError

    def read(self, tensor: Tensor) -> Tensor:
        """States or images as a kernel reads them: a map may return other tensors later than those at first."""
        return tensor.contiguous() if self.reads(tensor) else torch.empty_like(self.memory.r).copy_(tensor)

    def __call__(self, z: Tensor, mapped: Tensor, number: int) -> Tensor:
        """Return the states to evaluate next, from those with this number and their images, (*lead, n)."""
        raise NotImplementedError
