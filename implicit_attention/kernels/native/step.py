"""The step of a user's map by one call of the native library."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor

from ..._torch import are_plain
from ..step import Step, StepMemory
from .library import Library


class NativeStep(Step):
    """`Step` by the library, which tells the host how many rows are left."""

    def __init__(self, library: Library, *given: Any) -> None:
        self.library = library
        super().__init__(*given)

    def go_on_with(self, memory: StepMemory, value: Tensor) -> None:
        super().go_on_with(memory, value)
        rule, (count, n) = self.rule, (self.memory.active.numel(), value.shape[-1])
        self.whole = True
        self._integers = array("q", (count, n, self.history, 0, rule.fixed_budget, 0))
        self._numbers = array("d", (rule.rtol, rule.atol, self.ridge, self.growth))
        self._addresses = array("Q", (0, 0, 0, *(t.data_ptr() for t in self.memory)))
        places = (buffer.buffer_info()[0] for buffer in (self._integers, self._numbers, self._addresses))
        self._call = (value.itemsize, *places, self.library.parallel_for, torch.get_num_threads())

    def reads(self, mapped: Tensor) -> bool:
        return are_plain(self.value.dtype, mapped) and mapped.shape == self.value.shape

    def __call__(self, z: Tensor, mapped: Tensor, number: int) -> Tensor:
        z, mapped = self.read(z), self.read(mapped)
        to = torch.empty_like(z) if self.history else mapped
        self._addresses[0], self._addresses[1], self._addresses[2] = z.data_ptr(), mapped.data_ptr(), to.data_ptr()
        self._integers[3], self._integers[5] = number, number >= self.rule.plain_steps
        counts: int = self.library.step(*self._call)
        count, active, residual = self.memory.active.numel(), self.memory.active, self.memory.residual
        better, left = counts >> 32, counts & 0xFFFFFFFF
        self.whole = left == count
        # What is not finite from the start is NaN, loudly.
        new = z if self.whole or number else torch.where(residual[..., None] < torch.inf, z, torch.nan)
        if better == count:
            self.value = new
        elif better:
            self.value = torch.where(self.memory.better[..., None], new, self.value)
        # Others may read the state that is returned for a finished row.
        return to if self.whole else torch.where(active[..., None], to, self.value.nan_to_num(0.0, 0.0, 0.0))
