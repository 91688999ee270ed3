"""The working set of the loop: states as rows of numbers, and which of them are still being iterated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._torch import along, host_may_look
from ..problem import Problem, pick, put
from ..solution import Record, Status

# The working set is restricted anew when the unfinished problems are less than this part of it.
COMPACT_BELOW = 2 / 3


def flat(z: Tensor, event: torch.Size) -> Tensor:
    """(*lead, *event) -> (*lead, n)."""
    return z.reshape((*z.shape[: z.ndim - len(event)], math.prod(event)))


def unflat(z: Tensor, event: torch.Size) -> Tensor:
    """(*lead, n) -> (*lead, *event)."""
    return z.reshape((*z.shape[:-1], *event))


def rows_where(condition: Tensor, yes: Tensor, no: Tensor | float) -> Tensor:
    """torch.where with one condition per problem, (*lead), on states (*lead, n), numbers or truth values (*lead)."""
    if host_may_look(condition):
        # Mostly all rows agree: a look at them then saves a pass over the states.
        if bool(condition.all()):
            return yes
        if isinstance(no, Tensor) and not bool(condition.any()):
            return no
    condition = along(condition, yes)
    if yes.dtype == torch.bool:
        # onnxruntime cannot choose between truth values.
        return (condition & yes) | (~condition & no)
    return torch.where(condition, yes, no)


class Best(NamedTuple):
    """The best state of every problem so far, with the numbers measured at that state."""

    value: Tensor
    record: Record


#: The record of a solve that goes on, None for one that begins, and the number of its steps so far.
Begun: TypeAlias = tuple[Record | None, int]


class Rows:
    """The working set: which rows of the last leading axis are still being iterated.

    Without a graph rows are padded to multiples of `problem.row_block` from the first evaluation on, so that a row's
    bits do not depend on how many others are left, unless they may read each other (`Problem.separates`). A problem
    that cannot be restricted keeps all its rows to the end.

    Args:
        problem: of all rows.
        initial: their states, (*lead, *event).
        compact: whether finished ones may leave.
        together: whether none has finished before all have, as they read each other.
        begun: the record of steps that led to `initial`, of which those with MAX_STEPS go on, and how many were made.
    """

    def __init__(
        self, problem: Problem, initial: Tensor, *, compact: bool, together: bool = False, begun: Begun = (None, 0)
    ) -> None:
        lead = initial.shape[: initial.ndim - problem.event_ndim]
        self.event = initial.shape[len(lead) :]
        self.initial = flat(initial, self.event)
        self.active = torch.ones(lead, dtype=torch.bool, device=initial.device)
        self.count = lead[-1] if lead else 0
        self.base = self.problem = problem
        self.rows: Tensor | None = None
        self.full: Best | None = None
        self.compact = compact and not together and self.count > 0 and initial.numel() > 0
        self.together = together
        self.begun, self.made = begun
        if self.begun is not None:
            self.active = self.begun.status == Status.MAX_STEPS
        #: Whether f was not evaluated yet since some left.
        self.untried = False
        #: Whether it has as few sizes as there are powers of two.
        self.few_sizes = False
        pad = problem.separates and initial.numel() > 0 and not torch.is_grad_enabled()
        padded = self._rounded_up(self.count) if pad else self.count
        if padded > self.count:
            index = torch.arange(padded, device=initial.device)
            selected = problem.select(index.clamp(max=self.count - 1).expand(*lead[:-1], -1))
            self.compact = self.compact and selected is not None
            if selected is not None:
                self.base = self.problem = selected
                self.active = (index < self.count).expand(*lead[:-1], padded)
                self.initial = torch.cat(
                    [self.initial, self.initial[..., -1:, :].expand(*lead[:-1], padded - self.count, -1)], dim=-2
                )

    def _rounded_up(self, count: int) -> int:
        if self.few_sizes:
            return min(1 << max(count - 1, 0).bit_length(), self.count)
        return -(-count // self.base.row_block) * self.base.row_block

    def compaction(self, left: int, active: Tensor, needed: Callable[[], float]) -> Tensor | None:
        """The working rows to keep, unfinished ones first, or None if too few have finished.

        left: the largest number of unfinished ones in a batch entry.
        needed: how many steps they are expected to need, to let none leave where it is not worth while.
        """
        if not self.compact or active.shape[-1] <= self.base.row_block:
            return None
        stay = self._rounded_up(left)
        if stay > COMPACT_BELOW * active.shape[-1]:
            return None
        begins = self.rows is None
        if begins and not self.base.separates and needed() * (1 - stay / active.shape[-1]) < 1:
            # The evaluation of all that judges them at the end has to be worth it.
            return None
        # All distinct: finished rows fill up the block and are carried along unchanged.
        order = torch.argsort(active.logical_not().to(torch.int8), dim=-1, stable=True)[..., :stay]
        if begins:
            # Some problems cannot be restricted.
            self.compact = self.base.select(order) is not None
        return order if self.compact else None

    def take(self, order: Tensor, best: Best, tree: Any) -> Any:
        """Restrict problem and solver memory to the rows `order` of the present working set, with the best states."""
        self.full = self._merged(best)
        self.untried = True
        self.rows = order if self.rows is None else self.rows.gather(-1, order)
        selected = self.base.select(self.rows)
        assert selected is not None
        self.problem = selected
        return pytree.tree_map_only(Tensor, lambda t: pick(t, order), tree)

    def all(self, best: Best) -> tuple[Tensor, Record]:
        """Value and record of all rows, in their order, without padding."""
        best = self._merged(best)
        return self.unpadded(best.value, 0), best.record.map(lambda t: self.unpadded(t, 0))

    def unpadded(self, tensor: Tensor, before: int) -> Tensor:
        """`tensor` without the rows that were added; its leading axes come after `before` other axes."""
        if self.active.ndim == 0 or self.active.shape[-1] == self.count:
            return tensor
        return tensor.narrow(before + self.active.ndim - 1, 0, self.count)

    def _merged(self, best: Best) -> Best:
        if self.rows is None:
            return best
        assert self.full is not None
        record = Record(*(put(full, self.rows, part) for full, part in zip(self.full.record, best.record, strict=True)))
        return Best(put(self.full.value, self.rows, best.value), record)
