"""The progress of a solve: which problems are unfinished, and the best state of each with what was measured there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from typing_extensions import Self

from .._autograd import are_plain, host_may_look, unobserved
from .._fused_rule import FusedRule
from .._norm import norm
from ..ops.native.library import Library, library
from ..ops.native.loop import Decisions, Measured, MixedSteps, PlainSteps, Planned
from ..ops.native.loop import measured as measured_natively
from ..problem import counted
from ..solution import Record
from ..status import Status
from ._rows import COMPACT_BELOW, Best, Rows, rows_where
from .in_order import Tokens

#: Numbers that the library counts.
MOST = 2**31


#: Makes the steps that follow evaluations by the library alone.
LibrarySteps: TypeAlias = Callable[[Planned], MixedSteps | PlainSteps]


class Iteration(NamedTuple):
    """One evaluated candidate per problem: z, f(z) and r = f(z) - z are (*lead, n), the rest (*lead).

    force: -grad E (*lead, n), where energies are read and the problem has a metric; elsewhere it is r.

    Not for the course of a solve: ask for `solve(..., trace=True)`.

    Examples:
        >>> import torch
        >>> from implicit_attention.solvers import Iteration, Picard
        >>> z = torch.ones(3, 2)
        >>> r = z / 2 - z
        >>> point = Iteration(z, z / 2, r, r.norm(dim=-1), energy=None, step=0, event_shape=torch.Size([2]))
        >>> Picard().step(None, (), point, torch.ones(3, dtype=torch.bool)).candidate[0]
        tensor([0.5000, 0.5000])
    """

    z: Tensor
    mapped: Tensor
    r: Tensor
    residual: Tensor
    energy: Tensor | None
    step: int
    event_shape: torch.Size
    force: Tensor | None = None


def compared(rule: FusedRule, z: Tensor, mapped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return r = f(z) - z (*lead, n), its length and the tolerance, (*lead)."""
    r = mapped - z
    return r, norm(r), rule.atol + rule.rtol * norm(mapped)


class LoopState:
    """The unfinished problems (`active`), their evaluations, and the best states, by operations of torch.

    Args:
        rule: when a problem ends.
        rows: the working set.
        energy: whether the energy at the best states is kept.
        descends: whether the last state is the best one.
    """

    def __init__(self, rule: FusedRule, rows: Rows, *, energy: bool, descends: bool) -> None:
        self.rule, self.rows, self.active, self.descends = rule, rows, rows.active, descends
        z = rows.initial
        per_problem = z[..., 0] if z.shape[-1] else z.sum(-1)
        unknown = torch.full_like(per_problem, torch.inf)
        count, steps = (torch.zeros_like(per_problem, dtype=torch.int32) for _ in range(2))
        status = torch.full_like(count, Status.MAX_STEPS, dtype=torch.int8)
        record = Record(status, unknown, torch.zeros_like(unknown), steps, count) if rows.begun is None else rows.begun
        self.num_evals = record.num_evals
        if energy and rows.begun is not None:
            unknown = rows.problem.energy(z.reshape(*z.shape[:-1], *rows.event))
        self.best = Best(z, record, unknown if energy else None)

    def measured(self, z: Tensor, mapped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return r = f(z) - z (*lead, n), its length and the tolerance, (*lead)."""
        return compared(self.rule, z, mapped)

    def everyone(self) -> Tensor:
        """Return True for each problem, (*lead)."""
        return torch.ones_like(self.active)

    def unfinished(self) -> bool:
        """Whether a problem is unfinished: a look of the host."""
        return bool(self.active.any())

    def may_shrink(self, below: float) -> bool:
        """Whether less than this part of the problems may be unfinished; True where nothing is known."""
        return True

    def decide(self, point: Iteration, tolerance: Tensor, accepted: Tensor | None, fallen: Tensor | None) -> None:
        """Keep what is better, and end the problems that have converged or are broken, after a step.

        accepted: which steps the solver accepts, None for all.
        fallen: problems whose energy falls without end.
        """
        self.num_evals = self.num_evals + self.active
        candidates = self.active if accepted is None else self.active & accepted
        # |f(z)|, and with it the tolerance, may overflow while |f(z) - z| does not.
        finite = (point.residual < torch.inf) & (tolerance < torch.inf)
        broken = candidates & ~finite
        converged = None if self.rule.fixed_budget else candidates & finite & (point.residual <= tolerance)
        if self.rows.together and converged is not None:
            converged = converged & ~(self.active & ~converged).any()
        if fallen is not None:
            fallen = self.active & fallen
            broken = broken | (fallen if converged is None else fallen & ~converged)
        if isinstance(self.rows.problem, Tokens):
            numbered = point._replace(step=self.rows.made + point.step)
            converged, broken = self.rows.problem.settled_of(self.active, converged, broken, numbered)
        settled = broken if converged is None else converged | broken
        self._improve(point, tolerance, candidates, converged)
        if not (host_may_look(settled) and not bool(settled.any())):
            if converged is not None:
                self._finish(converged, Status.CONVERGED)
            self._finish(broken, Status.NONFINITE if self.rows.made + point.step == 0 else Status.DIVERGED)
            self.active = self.active & ~settled

    def _improve(self, point: Iteration, tolerance: Tensor, candidates: Tensor, converged: Tensor | None) -> None:
        """Keep the candidates that are better; where the energy `descends` all candidates are."""
        value, record, energy = self.best
        number = self.rows.made + point.step
        if converged is None or number == 0:
            better = candidates
        elif self.descends:
            better = candidates & (point.residual < torch.inf)
        else:
            better = candidates & (point.residual < record.residual) | converged
        new = first_state(point) if number == 0 else point.z
        residual, steps = point.residual, torch.full_like(record.num_steps, number)
        reached = None if energy is None else point.energy
        if not (host_may_look(better) and bool(better.all())):
            new = rows_where(better, new, value)
            fields = zip((residual, tolerance, steps), record[1:4], strict=True)
            residual, tolerance, steps = (torch.where(better, *pair) for pair in fields)
            reached = reached if reached is None or energy is None else torch.where(better, reached, energy)
        self.best = Best(new, Record(record.status, residual, tolerance, steps, self.num_evals), reached)

    def _finish(self, which: Tensor, status: Status) -> None:
        record = self.best.record
        self.best = self.best._replace(record=record._replace(status=record.status.masked_fill(which, int(status))))

    def end(self, which: Tensor, status: Status) -> None:
        """Give up problems `which` are unfinished, with a status."""
        self._finish(self.active & which, status)
        self.active = self.active & ~which

    def spend(self, num_evals: Tensor) -> None:
        """Count further evaluations of the unfinished problems."""
        self.num_evals = self.num_evals + torch.where(self.active, num_evals, 0).to(self.num_evals.dtype)

    def tree(self) -> tuple[Any, ...]:
        """Return the tensors with an entry for each problem."""
        return self.active, self.num_evals, self.best

    def restrict(self, active: Tensor, num_evals: Tensor, best: Best) -> None:
        """Go on with some of the problems."""
        self.active, self.num_evals, self.best = active, num_evals, best

    def result(self) -> Best:
        """Return the best states; evaluations that did not improve a problem were spent on it all the same."""
        return self.best._replace(record=self.best.record._replace(num_evals=self.num_evals))


def first_state(point: Iteration) -> Tensor:
    """Return the initial state; NaN, loudly, for problems whose map is not finite there."""
    return rows_where(point.residual < torch.inf, point.z, torch.nan)


class NativeLoopState(LoopState):
    """The same for plain tensors, by two native calls for each evaluation."""

    def __init__(self, library: Library, rule: FusedRule, rows: Rows, *, descends: bool) -> None:
        super().__init__(rule, rows, energy=False, descends=descends)
        self.library = library
        #: The last native measurement.
        self.own: Measured | None = None
        self._own(self.best.record)

    def _own(self, record: Record) -> None:
        """Write to these tensors from now on, and to `active` and `num_evals`, which nobody else reads."""
        self.active, self.num_evals = self.active.contiguous(), self.num_evals.contiguous()
        status, residual, tolerance, steps = (t.contiguous() for t in record[:4])
        self.best = Best(self.best.value, Record(status, residual, tolerance, steps, self.num_evals), None)
        self.decisions = Decisions(self.active, residual, tolerance, steps, self.num_evals, status)
        self.left: int | None = None
        self.accepted = torch.ones_like(self.active)

    def measured(self, z: Tensor, mapped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if are_plain(z.dtype, z, mapped):
            z, mapped = z.contiguous(), mapped.contiguous()
            like = self.best.record.residual
            self.own = measured_natively(self.library, z, mapped, self.rule.rtol, self.rule.atol, like)
            return self.own
        return super().measured(z, mapped)

    def everyone(self) -> Tensor:
        return self.accepted

    def unfinished(self) -> bool:
        return super().unfinished() if self.left is None else self.left > 0

    def may_shrink(self, below: float) -> bool:
        # Where some rows of the last axis are fewer than a part of it, so are they on the whole.
        return self.left is None or self.left <= below * self.active.numel()

    def decide(self, point: Iteration, tolerance: Tensor, accepted: Tensor | None, fallen: Tensor | None) -> None:
        measured = self.own is not None and self.own.residual is point.residual and self.own.tolerance is tolerance
        plain = fallen is None and (measured or are_plain(point.z.dtype, point.residual, tolerance))
        of_all = accepted is None or (accepted.shape == self.active.shape and are_plain(torch.bool, accepted))
        if not (plain and of_all):
            super().decide(point, tolerance, accepted, fallen)
            # The residual is that of the point.
            self._own(self.best.record.map(torch.clone))
            return
        residual, number = point.residual, self.rows.made + point.step
        if not measured:
            residual, tolerance = residual.contiguous(), tolerance.contiguous()
        improved, self.left = self.decisions.decide(
            self.library,
            number,
            residual,
            tolerance,
            None if accepted is None else accepted.contiguous(),
            fixed=self.rule.fixed_budget,
            descends=self.descends,
        )
        # Where all go on, all are finite.
        new = first_state(point) if number == 0 and self.left < self.active.numel() else point.z
        if 0 < improved < self.active.numel():
            new = torch.where(self.decisions.better[..., None], new, self.best.value)
        if improved:
            self.best = self.best._replace(value=new)

    def end(self, which: Tensor, status: Status) -> None:
        if self.left == 0:
            return
        self.best.record.status.masked_fill_(self.active & which, int(status))
        self.active.masked_fill_(which, False)
        self.left = None

    def spend(self, num_evals: Tensor) -> None:
        self.num_evals += torch.where(self.active, num_evals, 0).to(self.num_evals.dtype)

    def restrict(self, active: Tensor, num_evals: Tensor, best: Best) -> None:
        super().restrict(active, num_evals, best)
        self._own(best.record)


class Stretch:
    """Evaluations in a row between which the library does all that has to be done, until the host has to decide.

    The host decides at an end, and where so few problems are left that the working set may shrink.

    Args:
        progress: of the solve.
        steps: gives the steps, for the evaluations that are planned.
        z: a state, (*lead, n).
        event: the shape of one problem.
    """

    def __init__(self, progress: NativeLoopState, steps: LibrarySteps, z: Tensor, event: torch.Size) -> None:
        rule, like = progress.rule, progress.best.record.residual
        given = progress.library, progress.decisions, z.contiguous(), like, rule.rtol, rule.atol
        self.planned = Planned(*given, fixed=rule.fixed_budget, descends=progress.descends)
        self.progress, self.steps, self.event = progress, steps(self.planned), event
        self.shape = (*z.shape[:-1], *event)
        rows, count = progress.rows, progress.active.numel()
        self.shown = progress.active.view((*z.shape[:-1], *(1,) * len(event)))
        #: Whether others may read the state that is returned for a finished problem, until some have left.
        self.holds = not rows.problem.separates and rows.rows is None
        #: With so few unfinished problems the host has to decide.
        self.few = COMPACT_BELOW * count if rows.compact else 0

    @classmethod
    def of(cls, progress: NativeLoopState, steps: LibrarySteps | None, z: Tensor, event: torch.Size) -> Self | None:
        """None where the library does not make the steps, or where it cannot read a state."""
        return cls(progress, steps, z, event) if steps is not None and are_plain(z.dtype, z) else None

    def run(
        self, later: Callable[[Tensor], Tensor], z: Tensor, index: int, every: int, last: int
    ) -> tuple[Tensor, int, Iteration | None]:
        """Evaluate z, with the number `index`, and further states: the last one, its number, and what was measured.

        every: evaluations between two looks at whether all problems are finished.
        last: the number of the last evaluation.

        Nothing is measured of an image that the library cannot read, or of another shape.
        """
        planned, steps, progress, dtype = self.planned, self.steps, self.progress, z.dtype
        state, count = z.contiguous().view(self.shape), progress.active.numel()
        value, point = progress.best.value.reshape(self.shape), None
        while True:
            state = counted(state)
            mapped = later(state)
            if not are_plain(dtype, mapped) or mapped.shape != state.shape:
                break
            mapped = mapped.contiguous()
            planned.measure(state, mapped)
            steps.accept()
            improved, left = planned.decide(progress.rows.made + index)
            if improved == count:
                value = state
            elif improved:
                better = progress.decisions.better.view(self.shown.shape)
                value = torch.where(better, state, value)
            if index == last or (left <= self.few and index % every == 0):
                measured = planned.r, planned.residual, None, index, self.event
                point = Iteration(state.view(z.shape), mapped.view(z.shape), *measured)
                progress.left = left
                break
            state, index = steps.next(state, mapped, index), index + 1
            if left < count and self.holds:
                state = torch.where(self.shown, state, value.nan_to_num(0.0, 0.0, 0.0))
        progress.best = progress.best._replace(value=value.view(z.shape))
        return state.view(z.shape), index, point


def progress_of(rule: FusedRule, rows: Rows, *, energy: bool, descends: bool, plain: bool) -> LoopState:
    """Return the progress of a solve that begins.

    plain: whether nobody sees its course, and no graph is recorded.
    """
    plain = plain and not (rows.together or isinstance(rows.problem, Tokens))
    loaded = library_for(rows.initial) if plain else None
    if loaded is None:
        return LoopState(rule, rows, energy=energy, descends=descends)
    return NativeLoopState(loaded, rule, rows, descends=descends)


def library_for(*tensors: Tensor) -> Library | None:
    """Return the native library if it may work on these tensors: plain numbers of one dtype, without a graph."""
    dtype = tensors[0].dtype
    if torch.is_grad_enabled() or dtype not in (torch.float32, torch.float64) or not unobserved():
        return None
    return library() if are_plain(dtype, *tensors) and tensors[0].numel() < MOST else None
