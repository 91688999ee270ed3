"""A solve in which each token of a causal block ends on its own, and later ones read the keys of settled ones."""

from __future__ import annotations

import copy
import dataclasses
from typing import cast

import torch
from torch import Tensor

from .._torch import along, is_batched, transforms_active
from ..attention.masks import triangle
from ..problem import Problem, TokenOrder, of_problems
from ..solution import Record, SolveReport, Status
from ..solvers import Outcome, Solver
from .exits import RULES, Exit, ExitReport, Exits
from .past import BlockCache, KeyValueMemory
from .past_check import check_past, check_update
from .token_window import (
    CausalProblem,
    OneToken,
    Reads,
    TokensInWindow,
    TokensTogether,
    TokenWindow,
)

#: Codes of failures, the worst last.
FAILURES = tuple(int(status) for status in Status if status.failed)


@dataclasses.dataclass(eq=False)
class TokenSolve:
    """A solve of all tokens of a call, in place of that of whole samples.

    Attributes:
        reads: which tokens read which, beside causality; None for a block that has masks of its own.
        past: whether the block reads the past.
        cache: the tokens before.
        chunk: the number of tokens that are solved at once, each chunk behind those before it.
        exit: rules that end tokens.
        record: how it went for every token, (*batch, N), once it was solved.
        lost: tokens, (*batch, N), that are not finite, or read such ones; None for none.
        ended: the tokens of each chunk that rules have ended.
    """

    reads: Reads | None
    past: bool
    cache: BlockCache | None = None
    chunk: int | None = None
    exit: Exit | None = None
    record: Record | None = None
    lost: Tensor | None = None
    ended: list[Exits] = dataclasses.field(default_factory=list)
    _order: TokenOrder | None = None

    @property
    def differentiable(self) -> bool:
        """Whether the states can have a gradient."""
        return self.cache is None and self.exit is None

    @property
    def order(self) -> TokenOrder:
        """The order of the tokens."""
        if self._order is None:
            # Not a cached property: its lock breaks the graphs of compilers.
            pairs = None if self.reads is None else self.reads.all_pairs()
            if pairs is not None:
                pairs = pairs & triangle(pairs.shape[-2], pairs.shape[-1], 0, pairs.device)
            self._order = TokenOrder(pairs)
        return self._order

    def run(self, solver: Solver, problem: Problem, initial: Tensor, *, trace: bool, graph: bool) -> Outcome:
        """The outcome for whole samples; the record of each token is kept here."""
        graph = graph and (torch.is_grad_enabled() or transforms_active())
        windows = self.past and not (trace or graph or transforms_active())
        if windows and isinstance(problem, CausalProblem) and self._holds_windows(problem):
            check_past(problem, initial, self.reads, self.cache)
            outcome = self._in_windows(solver, problem, initial)
            if self.cache is not None:
                check_update(problem, self.cache)
            # The first evaluation shows whether the block draws random numbers.
            if self._holds_windows(problem):
                return self._kept(outcome)
            self.ended.clear()
        one = self.exit is None and initial.shape[initial.ndim - problem.event_ndim] == 1
        if one and isinstance(problem, CausalProblem) and not transforms_active():
            # A single token has no order.
            alone = copy.copy(problem)
            alone.token_order = None
            outcome = solver.run(alone, initial, trace=trace, graph=graph)
            record = self.judged(outcome.record.map(lambda field: field.unsqueeze(-1)))
            return self._kept(outcome._replace(record=record))
        exits = self._exits(solver, problem, initial, problem.event_ndim - 1, getattr(problem, "in_mask", None))
        tokens = TokensTogether(problem, exits)
        outcome = solver.run(tokens, initial, trace=trace, graph=graph)
        if is_batched(outcome.record.status) or transforms_active() or not isinstance(problem, CausalProblem):
            record = of_problems(outcome.record, problem.event_ndim - tokens.event_ndim)
            return outcome._replace(record=record)
        value, record = self._with_exits(outcome.value, outcome.record, exits)
        return self._kept(outcome._replace(value=value, record=record, trace=tokens.course(outcome.trace)))

    def _holds_windows(self, problem: CausalProblem) -> bool:
        """Whether f of some tokens is that of all: a block that draws random numbers draws others for fewer tokens."""
        return self.cache is not None or not problem.draws.repeated

    def _exits(
        self, solver: Solver, problem: Problem, start: Tensor, event_ndim: int, exists: Tensor | None
    ) -> Exits | None:
        if self.exit is None:
            return None
        count = start.shape[: start.ndim - event_ndim].numel() if exists is None else int(exists.sum())
        unpack = cast(CausalProblem, problem).function.layout.unpack
        exits = Exits(self.exit, start, event_ndim, count, unpack, getattr(solver, "damping", 0.0))
        self.ended.append(exits)
        return exits

    @staticmethod
    def _with_exits(value: Tensor, record: Record, exits: Exits | None) -> tuple[Tensor, Record]:
        """Value and record with the images of tokens that a rule ended; their residual is not known."""
        if exits is None:
            return value, record
        ended = exits.code > 0
        image = ended & (exits.code != RULES.index("past"))
        status = record.status.masked_fill(ended & ~record.failed, int(Status.BUDGET))
        steps = record.num_steps + image.to(record.num_steps.dtype)
        record = record._replace(status=status, residual=record.residual.masked_fill(image, torch.nan), num_steps=steps)
        return torch.where(along(image, value), exits.value.view_as(value), value), record

    def report(self, report: SolveReport) -> SolveReport:
        """The report of a call, with the rules that ended tokens."""
        if not self.ended:
            return report
        rule, step = (torch.cat([getattr(exits, name) for exits in self.ended], -1) for name in ("code", "step"))
        rule = rule.masked_fill(report.failed, 0)
        return ExitReport(**report._parts, rule=rule, step=step)

    def _kept(self, outcome: Outcome) -> Outcome:
        record = outcome.record
        if self.lost is not None:
            record = record.nonfinite_at(self.lost)
        self.record = record
        # Tokens that are lost take no part in the solve, and spoil no gradient.
        return outcome._replace(record=of_problems(outcome.record, 1))

    def exist(self) -> Tensor | None:
        """Which tokens of cache and call exist, (*batch, M + N); None for all."""
        return None if self.reads is None else self.reads.exists

    def window(
        self, problem: CausalProblem, initial: Tensor, memory: KeyValueMemory | None = None, chunk: slice | None = None
    ) -> TokenWindow:
        """All tokens of a call, or those of a chunk, beside the tokens before them."""
        axis = initial.ndim - problem.event_ndim
        count = initial.shape[axis]
        before = 0 if self.cache is None else self.cache.length
        memory = self.memory(count) if memory is None else memory
        begin, end = (0, count) if chunk is None else (chunk.start, chunk.stop)
        return TokenWindow(problem, initial, self.reads, memory, before, begin, end)

    def memory(self, count: int) -> KeyValueMemory:
        """Memory with room for the keys and values of the call."""
        if self.cache is None:
            return KeyValueMemory(count)
        if self.cache.length == 0:
            # What a call that failed has left there may be of another kind.
            self.cache.memory = KeyValueMemory(self.cache.memory.capacity)
        self.cache.memory.grow(self.cache.length + count)
        return self.cache.memory

    def _in_windows(self, solver: Solver, problem: CausalProblem, initial: Tensor) -> Outcome:
        event_ndim = problem.event_ndim - 1
        axis = initial.ndim - event_ndim - 1
        count = initial.shape[axis]
        memory, chunk = self.memory(count), self.chunk or max(count, 1)
        values, records = [], []
        for begin in range(0, count, chunk):
            end = min(begin + chunk, count)
            window = self.window(problem, initial, memory, slice(begin, end))
            start = initial.narrow(axis, begin, end - begin)
            exits = self._exits(solver, problem, start, event_ndim, window.in_mask)
            if end - begin == 1 and exits is None:
                outcome = solver.run(OneToken(window, event_ndim), start)
            else:
                order = self.order.restricted(torch.arange(begin, end, device=initial.device))
                outcome = solver.run(TokensInWindow(window, order, event_ndim, exits), start)
            value, record = self._with_exits(outcome.value, outcome.record, exits)
            values.append(value)
            records.append(record)
        value = torch.cat(values, dim=axis) if len(values) > 1 else values[0]
        parts = zip(*records, strict=True)
        record = Record(*(torch.cat(fields, dim=-1) for fields in parts)) if len(records) > 1 else records[0]
        return Outcome(value, self.judged(record))

    def judged(self, record: Record) -> Record:
        """The record in which tokens behind one that failed, in an earlier chunk or call, failed as it did."""
        held = None if self.cache is None else self.cache.failed
        if held is None and not bool(record.failed.any()):
            return record
        held, codes = record.status.new_zeros(()) if held is None else held, record.status
        for code in FAILURES:
            behind = self.order.behind(record.status == code) | (held == code)
            codes = torch.where(behind & ~(codes > code), code, codes)
        codes = torch.where(record.failed, record.status, codes)
        exists = self.exist()
        if exists is not None:
            codes = torch.where(exists[..., -record.status.shape[-1] :], codes, record.status)
        return record._replace(status=codes.to(record.status.dtype))
