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
from ..solution import Record
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
    """What a solver returns: the values, how the solve went, and its course.

    `trace` holds (residual, energy if there is one, num_evals, value), or nothing.
    """

    value: Tensor
    record: Record
    trace: tuple[Tensor, ...] = ()


class _Best(NamedTuple):
    """The best state of every problem so far, with what was measured at that very state."""

    value: Tensor
    record: Record
    energy: Tensor | None


def iterate(solver: Solver, problem: Problem, initial: Tensor, *, trace: bool, graph: bool) -> Outcome:
    """Run `solver` on `problem` from `initial`.

    Every problem stops on its own, its outcome does not depend on the others, and what is returned for it is the state
    with the smallest residual that was accepted (with a fixed budget: the last one). Finished problems leave the
    working set where the problem can be restricted to some of its rows.
    """
    graph = graph and (torch.is_grad_enabled() or transforms_active())
    with torch.set_grad_enabled(graph):
        rows = _Rows(problem, initial, pad=not graph, compact=not trace)
        look = not is_batched(initial) and not any(is_batched(t) for t in problem.tensors())
        every = (solver.check_every or (1 if initial.device.type == "cpu" else 4)) if look else 0
        event = initial.shape[initial.ndim - problem.event_ndim :]
        best, traced = _loop(solver, rows, every, trace, graph, event)
        value, record = rows.all(best)
        kept = tuple(rows.unpadded(torch.stack(t).detach(), 1) for t in zip(*traced, strict=True)) if trace else ()
        return Outcome(value.reshape(initial.shape), record.map(torch.Tensor.detach), kept)


def _loop(
    solver: Solver, rows: _Rows, every: int, trace: bool, graph: bool, event: torch.Size
) -> tuple[_Best, list[Any]]:
    z, active = rows.initial, rows.active
    state = solver.init(rows.problem, z)
    trace_energy = trace and rows.problem.has_energy
    best = _nothing_yet(z, trace_energy)
    num_evals = best.record.num_evals
    traced: list[Any] = []
    point: Iteration | None = None
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
        best = _improve(best, point, tolerance, active & accepted, converged, num_evals, solver.fixed_budget)
        broken = active & accepted & ~finite
        best = _finish(best, converged, Status.CONVERGED)
        best = _finish(best, broken, Status.NONFINITE if index == 0 else Status.DIVERGED)
        active = active & ~converged & ~broken
        if trace:
            course = (best.record.residual, best.energy, num_evals, unflat(best.value, event))
            traced.append([t for t in course if t is not None])
        if index == solver.max_steps:
            break
        if every and index % every == 0:
            if not bool(active.any()):
                break
            if (order := rows.compaction(active)) is not None:
                state, point, active, accepted, num_evals, best = rows.take(
                    order, best, (state, point, active, accepted, num_evals)
                )
        update = solver.step(rows.problem, state, point, accepted)
        state, z = update.state, update.candidate
        if graph:
            # What a finished problem goes on doing has no gradient; a zero one would turn into NaN at the first 0/0.
            state, z = pytree.tree_map(functools.partial(_live, active=active), (state, z))
        if update.num_evals is not None:
            num_evals = num_evals + torch.where(active, update.num_evals, 0).to(num_evals.dtype)
        if update.stalled is not None:
            best = _finish(best, active & update.stalled, Status.STALLED)
            active = active & ~update.stalled
    last = Status.EXPLICIT if solver.max_steps == 0 else Status.BUDGET if solver.fixed_budget else Status.MAX_STEPS
    # Evaluations that did not improve a problem were spent on it all the same.
    best = _finish(best, active, last)
    return best._replace(record=best.record._replace(num_evals=num_evals)), traced


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


def _nothing_yet(z: Tensor, energy: bool) -> _Best:
    per_problem = z[..., 0] if z.shape[-1] else z.sum(-1)
    unknown = torch.full_like(per_problem, torch.inf)
    count = torch.zeros_like(per_problem, dtype=torch.int32)
    status = torch.full_like(count, Status.MAX_STEPS, dtype=torch.int8)
    record = Record(status, unknown, torch.zeros_like(unknown), count, count)
    return _Best(z, record, unknown if energy else None)


def _improve(
    best: _Best,
    point: Iteration,
    tolerance: Tensor,
    candidates: Tensor,
    converged: Tensor,
    num_evals: Tensor,
    last: bool,
) -> _Best:
    value, record, energy = best
    better = candidates if last or point.step == 0 else candidates & (point.residual < record.residual) | converged
    # A map that is not finite at the initial state makes the value NaN, loudly; later, the best state is kept.
    new = point.z.where(torch.isfinite(point.residual)[..., None], torch.nan) if point.step == 0 else point.z
    return _Best(
        torch.where(better[..., None], new, value),
        Record(
            record.status,
            residual=torch.where(better, point.residual, record.residual),
            tolerance=torch.where(better, tolerance, record.tolerance),
            num_steps=torch.where(better, point.step, record.num_steps),
            num_evals=num_evals,
        ),
        None if energy is None or point.energy is None else torch.where(better, point.energy, energy),
    )


def _finish(best: _Best, which: Tensor, status: Status) -> _Best:
    record = best.record
    return best._replace(record=record._replace(status=record.status.masked_fill(which, int(status))))


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
        self.full: _Best | None = None
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

    def take(self, order: Tensor, best: _Best, tree: Any) -> list[Any]:
        """Restrict problem, best states and solver memory to the rows `order` of the present working set."""
        lead_ndim = order.ndim

        def pick(tensor: Any) -> Any:
            if not isinstance(tensor, Tensor):
                return tensor
            tail = tensor.shape[lead_ndim:]
            index = order.reshape(*order.shape, *(1,) * len(tail)).expand(*order.shape, *tail)
            return tensor.gather(lead_ndim - 1, index)

        self.full = self._merged(best)
        self.rows = order if self.rows is None else self.rows.gather(-1, order)
        selected = self.base.select(self.rows)
        assert selected is not None
        self.problem = selected
        return [*pytree.tree_map(pick, tree), pytree.tree_map(pick, best)]

    def all(self, best: _Best) -> tuple[Tensor, Record]:
        """Value and record of all rows, in their order, without padding."""
        best = self._merged(best)
        return self.unpadded(best.value, 0), best.record.map(lambda t: self.unpadded(t, 0))

    def unpadded(self, tensor: Tensor, before: int) -> Tensor:
        """`tensor`, whose leading axes follow `before` others, without the rows that were added."""
        if self.active.ndim == 0 or self.active.shape[-1] == self.count:
            return tensor
        return tensor.narrow(before + self.active.ndim - 1, 0, self.count)

    def _merged(self, best: _Best) -> _Best:
        if self.rows is None:
            return best
        rows = self.rows

        def put(full: Tensor, part: Tensor) -> Tensor:
            index = rows[..., None].expand(*rows.shape, part.shape[-1]) if part.ndim > rows.ndim else rows
            return full.scatter(rows.ndim - 1, index, part)

        assert self.full is not None
        # No rows leave a solve that is traced, so that there is no energy.
        record = Record(*map(put, self.full.record, best.record))
        return best._replace(value=put(self.full.value, best.value), record=record)
