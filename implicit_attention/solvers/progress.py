"""The progress of a solve: which problems are unfinished, and the best state of each with what was measured there."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._autograd import host_may_look
from .._fused_rule import FusedRule
from .._norm import norm
from ..solution import Record
from ..status import Status
from ._rows import Best, Rows, rows_where
from .in_order import Tokens


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
    """The unfinished problems (`active`), their evaluations, and the best states.

    Args:
        rule: when a problem ends.
        rows: the working set.
        energy: whether the energy at the best states is kept.
        descends: whether the last state is the best one.
    """

    def __init__(self, rule: FusedRule, rows: Rows, *, energy: bool, descends: bool) -> None:
        self.rule, self.rows, self.descends = rule, rows, descends
        self._go_on_with(rows.active)
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

    def _go_on_with(self, active: Tensor) -> None:
        #: Which problems are unfinished, and True for each problem, (*lead).
        self.active, self.everyone = active, torch.ones_like(active)
        #: Whether the host knows that all are unfinished. Tokens end by rules of their own, too.
        looks = active.numel() > 0 and host_may_look(active) and not isinstance(self.rows.problem, Tokens)
        self.whole = looks and bool(active.all())

    def unfinished(self) -> bool:
        """Whether a problem is unfinished: a look of the host."""
        return self.whole or bool(self.active.any())

    def decide(self, point: Iteration, tolerance: Tensor, accepted: Tensor | None, fallen: Tensor | None) -> None:
        """Keep what is better, and end the problems that have converged or are broken, after a step.

        accepted: which steps the solver accepts, None for all.
        fallen: problems whose energy falls without end.
        """
        self.num_evals = self.num_evals + self.active
        candidates = self.active if accepted is None else self.active & accepted
        if self.whole and fallen is None and self._all_go_on(point.residual, tolerance):
            self._improve(point, tolerance, candidates, None)
            return
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
            self.active, self.whole = self.active & ~settled, False

    def _all_go_on(self, residual: Tensor, tolerance: Tensor) -> bool:
        """Whether no residual or tolerance ends a problem: one look, which mostly spares all else."""
        above = tolerance < (torch.inf if self.rule.fixed_budget else residual)
        return bool((above & (residual < torch.inf)).all())

    def _improve(self, point: Iteration, tolerance: Tensor, candidates: Tensor, converged: Tensor | None) -> None:
        """Keep the candidates that are better; where the energy `descends` all candidates are."""
        value, record, energy = self.best
        number = self.rows.made + point.step
        if self.rule.fixed_budget or number == 0:
            better = candidates
        elif self.descends:
            better = candidates & (point.residual < torch.inf)
        else:
            better = candidates & (point.residual < record.residual)
            better = better if converged is None else better | converged
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
        self.active, self.whole = self.active & ~which, False

    def spend(self, num_evals: Tensor) -> None:
        """Count further evaluations of the unfinished problems."""
        self.num_evals = self.num_evals + torch.where(self.active, num_evals, 0).to(self.num_evals.dtype)

    def tree(self) -> tuple[Any, ...]:
        """Return the tensors with an entry for each problem."""
        return self.active, self.num_evals, self.best

    def restrict(self, active: Tensor, num_evals: Tensor, best: Best) -> None:
        """Go on with some of the problems."""
        self._go_on_with(active)
        self.num_evals, self.best = num_evals, best

    def result(self) -> Best:
        """Return the best states; evaluations that did not improve a problem were spent on it all the same."""
        return self.best._replace(record=self.best.record._replace(num_evals=self.num_evals))


def first_state(point: Iteration) -> Tensor:
    """Return the initial state; NaN, loudly, for problems whose map is not finite there."""
    return rows_where(point.residual < torch.inf, point.z, torch.nan)
