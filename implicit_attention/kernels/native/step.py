"""The work between two evaluations of a user's map, by one call of the native library."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from ..._autograd import are_plain
from ..._fused_rule import FusedRule
from ...solution import Record
from ...status import Status
from .library import Library

#: Changes that are mixed at most, as in step.h.
MOST_MIXED = 8


class NativeStep:
    """The records of all rows of a solve, and the memory of its method, which each call brings up to date.

    Args:
        rule: when a row ends, and how many steps are plain at first.
        history: number of changes that Anderson's method mixes; 0 for Picard's.
        ridge: of the mixing.
        growth: how much |r| may grow in a mixed step.
        z: the first states, plain numbers (*lead, n).
        active: which rows are to be solved, (*lead).
    """

    def __init__(
        self, library: Library, rule: FusedRule, history: int, ridge: float, growth: float, z: Tensor, active: Tensor
    ) -> None:
        self.library, self.rule, self.history = library, rule, history
        self._numbers = array("d", (rule.rtol, rule.atol, ridge, growth))
        lead, n, m = active.shape, z.shape[-1], history
        residual, tolerance, best, best_tolerance, last_residual = (z.new_zeros(lead) for _ in range(5))
        steps, evaluations = (z.new_zeros(lead, dtype=torch.int32) for _ in range(2))
        status = z.new_full(lead, Status.MAX_STEPS, dtype=torch.int8)
        better, accelerated = (z.new_zeros(lead, dtype=torch.bool) for _ in range(2))
        r, last_z, last_r = (z.new_empty(*lead, size) for size in (n, *[n if m else 0] * 2))
        dr, df, gram = z.new_empty(*lead, m, n), z.new_empty(*lead, m, n), z.new_empty(*lead, m, m)
        at_best, counts = (best, best_tolerance, steps, evaluations, status), z.new_zeros(*lead, 2, dtype=torch.int32)
        last = (accelerated, last_z, last_r, last_residual, dr, df, gram, counts)
        self.go_on_with((r, residual, tolerance, active.clone(), better, *at_best, *last), z)

    def go_on_with(self, tensors: tuple[Tensor, ...], value: Tensor) -> None:
        """Keep these tensors of rows, in the order of step.h, and their best states."""
        self.tensors = tuple(t.contiguous() for t in tensors)
        #: r = f(z) - z (*lead, n), its length and the tolerance at the last states, and which rows are unfinished.
        self.r, self.residual, self.tolerance, self.active, self._better, *kept = self.tensors
        self.value, self.record = value, Record(kept[4], *kept[:4])
        self.left = count = self.active.numel()
        self._integers = array("q", (count, self.r.shape[-1], self.history, 0, self.rule.fixed_budget, 0))
        self._addresses = array("Q", (0, 0, 0, *(t.data_ptr() for t in self.tensors)))
        places = (buffer.buffer_info()[0] for buffer in (self._integers, self._numbers, self._addresses))
        self._call = (value.itemsize, *places, self.library.parallel_for, torch.get_num_threads())

    def reads(self, mapped: Tensor) -> bool:
        """Whether an image is plain numbers like the states."""
        return are_plain(self.r.dtype, mapped) and mapped.shape == self.r.shape

    def __call__(self, z: Tensor, mapped: Tensor, number: int) -> Tensor:
        """Return the states to evaluate next, from those with this number and their images, (*lead, n)."""
        # A map may return other tensors later than those that it returned first.
        z, mapped = (t.contiguous() if self.reads(t) else torch.empty_like(self.r).copy_(t) for t in (z, mapped))
        to = torch.empty_like(z) if self.history else mapped
        self._addresses[0], self._addresses[1], self._addresses[2] = z.data_ptr(), mapped.data_ptr(), to.data_ptr()
        self._integers[3], self._integers[5] = number, number >= self.rule.plain_steps
        counts: int = self.library.step(*self._call)
        better, self.left = counts >> 32, counts & 0xFFFFFFFF
        whole = self.left == self.active.numel()
        # What is not finite from the start is NaN, loudly.
        new = z if whole or number else torch.where(self.residual[..., None] < torch.inf, z, torch.nan)
        if better == self.active.numel():
            self.value = new
        elif better:
            self.value = torch.where(self._better[..., None], new, self.value)
        # Others may read the state that is returned for a finished row.
        return to if whole else torch.where(self.active[..., None], to, self.value.nan_to_num(0.0, 0.0, 0.0))
