"""The only generic loop: evaluates candidates, decides per problem when to stop, keeps the evidence."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._autograd import is_batched, transforms_active
from ..problem import Problem, check_kept, evaluate_pure, share_memory
from ..status import Status

if TYPE_CHECKING:
    from .base import Solver

# The working set is made anew when it falls below this part of its size.
COMPACT_BELOW = 2 / 3


class Iteration(NamedTuple):
    """One evaluated candidate per problem: z, f(z) and r = f(z) - z are (*lead, n), the rest (*lead)."""

    z: Tensor
    mapped: Tensor
    r: Tensor
    residual: Tensor
    energy: Tensor | None
    step: int
    event_shape: torch.Size


class Outcome(NamedTuple):
    """The fields of a `Solution` as plain tensors; `trace` holds (residual, energy if there is one, num_evals,
    value) or nothing."""

    value: Tensor
    status: Tensor
    residual: Tensor
    tolerance: Tensor
    num_steps: Tensor
    num_evals: Tensor
    trace: tuple[Tensor, ...] = ()


class _Record(NamedTuple):
    """The best state of every problem so far, with the evidence measured at that very state."""

    value: Tensor
    status: Tensor
    residual: Tensor
    tolerance: Tensor
    num_steps: Tensor
    num_evals: Tensor
    energy: Tensor | None


def iterate(solver: Solver, problem: Problem, initial: Tensor, *, trace: bool, graph: bool) -> Outcome:
    """Run `solver` on `problem` from `initial`.

    Every problem stops on its own, and its outcome does not depend on the others. Returned for it is the accepted state
    with the smallest residual; the last one where the budget is fixed, and where every accepted step lowers the energy.
    Finished problems leave the working set where the problem can be restricted to some of its rows.
    """
    graph = graph and (torch.is_grad_enabled() or transforms_active())
    with torch.set_grad_enabled(graph):
        rows = _Rows(problem, initial, pad=not graph, compact=not trace)
        look = not is_batched(initial) and not any(is_batched(t) for t in problem.tensors())
        every = (solver.check_every or (1 if initial.device.type == "cpu" else 4)) if look else 0
        event = initial.shape[initial.ndim - problem.event_ndim :]
        record, traced = _loop(solver, rows, every, trace, graph, event)
        record = rows.all(record)
        value = record.value.reshape(initial.shape)
        kept = tuple(rows.unpadded(torch.stack(t).detach(), 1) for t in zip(*traced, strict=True)) if trace else ()
        residual, tolerance = record.residual.detach(), record.tolerance.detach()
        return Outcome(value, record.status, residual, tolerance, record.num_steps, record.num_evals, kept)


def _loop(
    solver: Solver, rows: _Rows, every: int, trace: bool, graph: bool, event: torch.Size
) -> tuple[_Record, list[Any]]:
    z, active = rows.initial, rows.active
    state = solver.init(rows.problem, z)
    trace_energy = trace and rows.problem.has_energy
    record = _empty_record(z, trace_energy)
    num_evals = torch.zeros_like(record.num_evals)
    traced: list[Any] = []
    point: Iteration | None = None
    # What fused operations return, which keep no other state: as the energy falls, it is the best of all.
    descends = rows.problem.plain_steps_descend and solver.fused_rule(rows.problem) is not None
    for index in range(solver.max_steps + 1):
        energy = trace_energy or solver.needs_energy(rows.problem, index)
        point, tolerance = _evaluate(solver, rows.problem, z, energy, index, event, point)
        num_evals = num_evals + active
        accepted = solver.accept(rows.problem, state, point)
        accepted = torch.ones_like(active) if accepted is None else accepted
        # |f(z)|, and with it the tolerance, may overflow while |f(z) - z| does not.
        finite = torch.isfinite(point.residual) & torch.isfinite(tolerance)
        small = finite & (point.residual <= tolerance)
        converged = active & accepted & small if not solver.fixed_budget else torch.zeros_like(active)
        record = _improve(solver, record, point, tolerance, active & accepted, converged, num_evals, descends)
        broken = active & accepted & ~finite
        record = _finish(record, converged, Status.CONVERGED)
        record = _finish(record, broken, Status.NONFINITE if index == 0 else Status.DIVERGED)
        active = active & ~converged & ~broken
        if trace:
            best = (record.residual, record.energy, num_evals, unflat(record.value, event))
            traced.append([t for t in best if t is not None])
        if index == solver.max_steps:
            break
        if every and index % every == 0:
            if not bool(active.any()):
                break
            if (order := rows.compaction(active)) is not None:
                state, point, active, accepted, num_evals, record = rows.take(
                    order, record, (state, point, active, accepted, num_evals)
                )
        update = solver.step(rows.problem, state, point, accepted)
        state, z = update.state, update.candidate
        if graph:
            # What a finished problem goes on doing has no gradient; a zero one would turn into NaN at the first 0/0.
            state, z = pytree.tree_map(functools.partial(_live, active=active), (state, z))
        if update.num_evals is not None:
            num_evals = num_evals + torch.where(active, update.num_evals, 0).to(num_evals.dtype)
        if update.stalled is not None:
            record = _finish(record, active & update.stalled, Status.STALLED)
            active = active & ~update.stalled
    last = Status.EXPLICIT if solver.max_steps == 0 else Status.BUDGET if solver.fixed_budget else Status.MAX_STEPS
    # Evaluations that did not improve a problem were spent on it all the same.
    return _finish(record, active, last)._replace(num_evals=num_evals), traced


def _live(tensor: Any, *, active: Tensor) -> Any:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return tensor
    where = active.reshape((*active.shape, *(1,) * (tensor.ndim - active.ndim)))
    # 0 * NaN is NaN: what diverged must not reach what the problems share.
    return torch.where(where, tensor, tensor.detach().nan_to_num(0.0, 0.0, 0.0))


def _evaluate(
    solver: Solver,
    problem: Problem,
    z: Tensor,
    energy: bool,
    index: int,
    event: torch.Size,
    before: Iteration | None,
) -> tuple[Iteration, Tensor]:
    mapped, value = evaluate_pure(problem, unflat(z, event), energy=energy, call=index)
    mapped = flat(mapped, event)
    if index == 1 and before is not None and share_memory(mapped, before.mapped):
        # A map may return the same numbers twice, but no others in their place.
        check_kept(problem, before.mapped - before.z, before.r)
    r = mapped - z
    residual = torch.linalg.vector_norm(r, dim=-1)
    tolerance = solver.atol + solver.rtol * torch.linalg.vector_norm(mapped, dim=-1)
    return Iteration(z, mapped, r, residual, value, index, event), tolerance


def flat(z: Tensor, event: torch.Size) -> Tensor:
    """(*lead, *event) -> (*lead, n)."""
    return z.reshape((*z.shape[: z.ndim - len(event)], math.prod(event)))


def unflat(z: Tensor, event: torch.Size) -> Tensor:
    """(*lead, n) -> (*lead, *event)."""
    return z.reshape((*z.shape[:-1], *event))


def _empty_record(z: Tensor, energy: bool) -> _Record:
    per_problem = z[..., 0] if z.shape[-1] else z.sum(-1)
    unknown = torch.full_like(per_problem, torch.inf)
    count = torch.zeros_like(per_problem, dtype=torch.int32)
    status = torch.full_like(count, Status.MAX_STEPS, dtype=torch.int8)
    return _Record(z, status, unknown, torch.zeros_like(unknown), count, count, unknown if energy else None)


def _improve(
    solver: Solver,
    record: _Record,
    point: Iteration,
    tolerance: Tensor,
    candidates: Tensor,
    converged: Tensor,
    num_evals: Tensor,
    descends: bool,
) -> _Record:
    if solver.fixed_budget or point.step == 0:
        better = candidates
    elif descends:
        better = candidates & torch.isfinite(point.residual)
    else:
        better = candidates & (point.residual < record.residual) | converged
    # A map that is not finite at the initial state makes the value NaN, loudly; later, the best state is kept.
    value = point.z.where(torch.isfinite(point.residual)[..., None], torch.nan) if point.step == 0 else point.z
    return _Record(
        value=torch.where(better[..., None], value, record.value),
        status=record.status,
        residual=torch.where(better, point.residual, record.residual),
        tolerance=torch.where(better, tolerance, record.tolerance),
        num_steps=torch.where(better, point.step, record.num_steps),
        num_evals=num_evals,
        # A record has an energy only where every point was evaluated with one.
        energy=None if record.energy is None else torch.where(better, point.energy, record.energy),  # type: ignore[arg-type]
    )


def _finish(record: _Record, which: Tensor, status: Status) -> _Record:
    return record._replace(status=record.status.masked_fill(which, int(status)))


class _Rows:
    """The working set: which rows of the last leading axis are still being iterated.

    Rows are padded to multiples of `problem.row_block` from the first evaluation on, so that a row's bits do not depend
    on how many others are left. A problem that cannot be restricted keeps all its rows to the end.
    """

    def __init__(self, problem: Problem, initial: Tensor, *, pad: bool, compact: bool) -> None:
        lead = initial.shape[: initial.ndim - problem.event_ndim]
        self.initial = flat(initial, initial.shape[len(lead) :])
        self.active = torch.ones(lead, dtype=torch.bool, device=initial.device)
        self.count = lead[-1] if lead else 0
        self.base = self.problem = problem
        self.rows: Tensor | None = None
        self.full: _Record | None = None
        self.compact = False
        if pad and self.count > 0 and initial.numel() > 0:
            padded = self._rounded_up(self.count)
            index = torch.arange(padded, device=initial.device)
            # Without padding one row tells whether there is a restriction, and does not copy the problem.
            asked = index.clamp(max=self.count - 1) if padded > self.count else index[:1]
            selected = problem.select(asked.expand(*lead[:-1], -1))
            self.compact = compact and selected is not None
            if selected is not None and padded > self.count:
                self.base = self.problem = selected
                self.active = (index < self.count).expand(*lead[:-1], padded)
                self.initial = torch.cat(
                    [self.initial, self.initial[..., -1:, :].expand(*lead[:-1], padded - self.count, -1)], dim=-2
                )

    def _rounded_up(self, count: int) -> int:
        return -(-count // self.base.row_block) * self.base.row_block

    def compaction(self, active: Tensor) -> Tensor | None:
        """The working rows to keep, unfinished ones first, or None if too few have finished."""
        if not self.compact or active.shape[-1] <= self.base.row_block:
            return None
        needed = self._rounded_up(int(active.sum(-1).max()))
        if needed > COMPACT_BELOW * active.shape[-1]:
            return None
        # All distinct: finished rows fill up the block and are carried along unchanged.
        return torch.argsort(active.logical_not().to(torch.int8), dim=-1, stable=True)[..., :needed]

    def take(self, order: Tensor, record: _Record, tree: Any) -> list[Any]:
        """Restrict problem, record and solver memory to the rows `order` of the present working set."""
        lead_ndim = order.ndim

        def pick(tensor: Any) -> Any:
            if not isinstance(tensor, Tensor):
                return tensor
            tail = tensor.shape[lead_ndim:]
            index = order.reshape(*order.shape, *(1,) * len(tail)).expand(*order.shape, *tail)
            return tensor.gather(lead_ndim - 1, index)

        self.full = self._merged(record)
        self.rows = order if self.rows is None else self.rows.gather(-1, order)
        selected = self.base.select(self.rows)
        assert selected is not None
        self.problem = selected
        return [*pytree.tree_map(pick, tree), pytree.tree_map(pick, record)]

    def all(self, record: _Record) -> _Record:
        """The record of all rows, in their order, without padding."""
        record = self._merged(record)
        # Only the energy may be None, which the type of the fields by position cannot say.
        return _Record(*(None if t is None else self.unpadded(t, 0) for t in record))  # type: ignore[arg-type]

    def unpadded(self, tensor: Tensor, before: int) -> Tensor:
        """`tensor`, whose leading axes follow `before` others, without the rows that were added."""
        if self.active.ndim == 0 or self.active.shape[-1] == self.count:
            return tensor
        return tensor.narrow(before + self.active.ndim - 1, 0, self.count)

    def _merged(self, record: _Record) -> _Record:
        if self.rows is None:
            return record
        rows = self.rows

        def put(full: Tensor | None, part: Tensor | None) -> Tensor | None:
            if full is None or part is None:
                return None
            index = rows[..., None].expand(*rows.shape, part.shape[-1]) if part.ndim > rows.ndim else rows
            return full.scatter(rows.ndim - 1, index, part)

        assert self.full is not None
        return _Record(*map(put, self.full, record))  # type: ignore[arg-type]
