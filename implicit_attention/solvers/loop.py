"""The one loop: solvers (their options, and the hooks of a method), and what evaluates, decides and steps for all.

`advance` makes the steps of every loop. Three call it: a `Loop` gathers evidence, decides for each problem when to
stop, and keeps the best state with what was measured there; `stepped` makes the steps of an exported program, without a
look at a number; `plain_steps` makes a number of steps of Picard's method, as a loop by hand does.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import _validate
from .._torch import Looks, along, host_may_look, into_onnx, length, looks_every, norm, transforms_active
from ..failure import UnsupportedImplementation
from ..kernels.problem import FusedRule
from ..problem import Problem, Tokens, check_kept, counted, evaluate_pure, of_problems, pick, put, share_memory
from ..solution import CONTRACT, Record, Remedies, Status, Trace


class Outcome(NamedTuple):
    """The result of a solver: the values, how the solve went, and its course.

    Not for users of `solve`, which returns a `Solution`.

    `trace` is the course of the solve, if it was asked for; `states` are the values after every step with their graph,
    where both were asked for. `evaluation` is what a kernel found at the values, for that of the backward solve: the
    mean of the keys and, by Triton, their log-sum-exp.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap
        >>> from implicit_attention.solvers import Picard
        >>> outcome = Picard().run(FixedPointMap(torch.cos, event_ndim=1), torch.zeros(3, 1))
        >>> outcome.value.shape, outcome.record.status.tolist()
        (torch.Size([3, 1]), [0, 0, 0])
    """

    value: Tensor
    record: Record
    trace: Trace | None = None
    states: tuple[Tensor, ...] = ()
    evaluation: tuple[Tensor, ...] = ()


#: Called with (step, residuals (*lead), which problems are unfinished (*lead)) after every evaluation of a solve.
Callback: TypeAlias = Callable[[int, Tensor, Tensor], object]


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


class Update(NamedTuple):
    """The result of a solver's step.

    Not for the results of a solve: those are in `Solution`.

    state: the solver's memory, tuples, lists and dicts whose tensors have the problems' leading axes.
    candidate: the state to evaluate next, (*lead, n).
    stalled: (*lead), problems that the method gives up; None for none.
    num_evals: (*lead), evaluations beyond the one that led here (inner products); None for none.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, solve
        >>> from implicit_attention.solvers import Solver, Update
        >>> class Halfway(Solver):
        ...     def step(self, problem, state, point, accepted):
        ...         return Update(state, point.z + point.r / 2)
        >>> cosine = FixedPointMap(torch.cos, event_ndim=1)
        >>> solve(cosine, torch.zeros(3, 1), solver=Halfway(max_steps=1), on_failure="ignore").value[0]
        tensor([0.5000])
    """

    state: Any
    candidate: Tensor
    stalled: Tensor | None = None
    num_evals: Tensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Solver(_validate.Options):
    """Base of all solvers.

    Not for use as it is: use one of its subclasses, such as `Anderson()`, or write one by defining `step`.

    A problem has converged when |f(z) - z|_2 <= atol + rtol |f(z)|_2 at a state that the solver accepts.

    Args:
        rtol: tolerance relative to |f(z)|.
        atol: absolute tolerance, in the units of the state: what a solution at 0 is held to. Where |f(z)| <= atol/rtol
            (1e-4 by default) it decides, and for data of its own scale any state has converged: lower it, or scale the
            data. `repr(solution)` and `solution.message()` say where that happened. With rtol = atol = 0 exactly
            `max_steps` steps are made, status BUDGET.
        max_steps: largest number of updates; 0 returns the initial state, status EXPLICIT. Where problems turn out to
            read each other, updates since the first of them ended do not count.
        check_every: the most steps between two looks at whether all problems are finished, each of which makes the host
            wait; fewer where residuals tell that all end before. None is 1 on a CPU and 8 on an accelerator. Results do
            not depend on it.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, solve
        >>> from implicit_attention.solvers import Solver, Update
        >>> class Halfway(Solver):
        ...     def step(self, problem, state, point, accepted):
        ...         return Update(state, point.z + point.r / 2)
        >>> cosine = FixedPointMap(torch.cos, event_ndim=1)
        >>> solution = solve(cosine, torch.zeros(3, 1), solver=Halfway(rtol=1e-5))
        >>> bool(solution.converged.all()), round(float(solution.value[0]), 3)
        (True, 0.739)
    """

    rtol: float = _validate.number(1e-4, low=0)
    atol: float = _validate.number(1e-8, low=0)
    max_steps: int = _validate.integer(200, low=0)
    check_every: int | None = _validate.integer(None, low=1)

    #: Whether the steps can be differentiated through (`Unrolled`).
    differentiable: ClassVar[bool] = True
    #: Whether each token of a causal layer can be solved on its own, though it reads others. Directions of Newton and
    #: Broyden hold only where the others stand still; solvers of other libraries stop for all at once.
    by_token: ClassVar[bool] = False
    #: What to do about a problem that ended with a status.
    remedies: ClassVar[Remedies] = {
        Status.UNSTABLE: "start elsewhere, or use a solver with guard='energy'",
        Status.MAX_STEPS: f"raise max_steps, or {CONTRACT}",
        Status.STALLED: "use a larger rtol or a wider dtype",
        Status.DIVERGED: CONTRACT,
        Status.NONFINITE: "check the numbers that the problem reads",
    }

    @property
    def fixed_budget(self) -> bool:
        """Whether all steps are made whatever the residual."""
        return self.rtol == 0 and self.atol == 0

    @property
    def end_rule(self) -> FusedRule:
        """When a problem ends: tolerances and budget."""
        return FusedRule(self.rtol, self.atol, self.max_steps, plain_steps=0)

    def fused_rule(self, problem: Problem) -> FusedRule | None:
        """Return the rule by which a kernel makes the steps of this solver on such a problem; None if it cannot."""
        return None

    def check_problem(self, problem: Problem) -> None:
        """Raise if the method cannot solve such a problem."""

    def needs_energy(self, problem: Problem, step: int) -> bool:
        """Whether E(z) is read at the state reached after this many steps."""
        return False

    def init(self, problem: Problem, z: Tensor) -> Any:
        """The memory before the first evaluation, for a state z of shape (*lead, n)."""
        return ()

    def accept(self, problem: Problem, state: Any, point: Iteration) -> Tensor | None:
        """(*lead), whether the evaluated candidate is better than the state before it; None accepts all."""
        return None

    def step(self, problem: Problem, state: Any, point: Iteration, accepted: Tensor) -> Update:
        """The next candidate, from the evaluated one (or, where it was rejected, from the memory)."""
        raise NotImplementedError(f"{type(self).__name__} must define step(problem, state, point, accepted)")

    def _loop(self, problem: Problem, initial: Tensor) -> type[Loop]:
        """The class of the loop for such a problem, where nobody watches the steps."""
        return Loop

    def run(self, problem: Problem, initial: Tensor, *, trace: bool = False, graph: bool = False) -> Outcome:
        """Solve `problem` from `initial`. With `graph` every step is recorded for differentiation."""
        return iterate(self, problem, initial, trace=trace, graph=graph)


def advance(
    evaluate: Callable[[Any, int], Any],
    step: Callable[[Any, int], Any],
    z: Any,
    *,
    steps: int | None = None,
    decide: Callable[[Any, int], bool | None] | None = None,
) -> Any:
    """The state after `steps` steps from z, or where `decide` ends them: the loop of all that is iterated.

    Args:
        evaluate: (state, its number) -> what is found there.
        step: (what was found, the number) -> the next state.
        decide: (what was found, the number) -> whether no step follows.
    """
    for index in itertools.count() if steps is None else range(steps):
        found = evaluate(z, index)
        if decide is not None and decide(found, index):
            return z
        z = step(found, index)
    return z


def plain_steps(
    mapped: Callable[[Any], Any],
    z: Any,
    steps: int,
    damping: float,
    seen: Callable[[tuple[Any, Any], int], None] | None = None,
) -> Any:
    """The state after `steps` steps of `Picard(damping)`, made as in a loop by hand.

    z: a tensor, or a tuple, list or dict of tensors.
    seen: shown each state with its image.
    """

    def step(found: tuple[Any, Any], index: int) -> Any:
        z, image = found
        return image if damping == 0 else pytree.tree_map(lambda f, z: f - damping * (f - z), image, z)

    return advance(lambda z, _: (z, mapped(z)), step, z, steps=steps, decide=seen)


def iterate(
    solver: Solver,
    problem: Problem,
    initial: Tensor,
    *,
    trace: bool,
    graph: bool,
    callback: Callback | None = None,
    kernel: Callable[[Tensor, Tensor], Any] | None = None,
) -> Outcome:
    """Run `solver` on `problem` from `initial`, and call `callback` after every evaluation.

    Every problem stops on its own, and its outcome does not depend on the others. Returned for it is the accepted state
    with the smallest residual; the last one where the budget is fixed, where every accepted step lowers the energy, and
    of problems that go on together.
    Finished problems leave the working set where the problem can be restricted to some of its rows. Each token of a
    problem with a `token_order` stops on its own. Problems that may read each other (`Problem.separates`) are `judged`
    together at the end.

    kernel: as for a `Loop`, in the first working set; problems that go on afterwards make the steps of the solver.
    """
    # How many axes number the tokens of a problem; where there are some, each token is iterated as a problem.
    axes = problem.event_ndim - 1 if problem.token_order is not None and not isinstance(problem, Tokens) else 0
    problem = Tokens(problem) if axes else problem
    keep = graph and trace
    graph = graph and (torch.is_grad_enabled() or transforms_active())
    with torch.set_grad_enabled(graph):
        compact = not trace and not graph and callback is None
        rows = Rows(problem, initial, compact=compact, together=problem.mixes)
        # Nothing is batched outside of transforms, and a search for tensors costs as much as a small evaluation.
        every = looks_every(solver.check_every, initial, *(problem.tensors() if transforms_active() else ()))
        traced: list[list[Tensor]] = []
        numbers = itertools.count()

        def seen(loop: Loop) -> None:
            record, residual, active = loop.best.record, loop.best.record.residual.detach(), loop.active
            if trace:
                z = unflat(loop.best.value, rows.event)
                with torch.no_grad():
                    energy = [loop.rows.problem.energy(z)] if problem.has_energy else []
                traced.append([record.residual, *energy, record.num_evals, z])
            if callback is not None:
                if axes:
                    residual, active = norm(residual.flatten(-axes)), active.flatten(-axes).any(-1)
                callback(next(numbers), *(rows.unpadded(t, 0).clone() for t in (residual, active)))

        shown = seen if trace or callback is not None else None
        # A fixed budget does not wait for another device.
        looks = 0 if solver.fixed_budget and initial.device.type != "cpu" else every
        kind = solver._loop(problem, initial) if compact else Loop

        def loop(rows: Rows, given: Tensor | None) -> Loop:
            if rows.begun is not None:
                return Loop(solver, rows, looks, shown, given=given)
            return kind(solver, rows, looks, shown, kernel=kernel)

        value, record = judged(rows, loop, solver.end_rule, every=every)
        if share_memory(value, initial):
            value = value.clone()
        stacked = [rows.unpadded(torch.stack(t).detach(), 1) for t in zip(*traced, strict=True)]
        states = tuple(rows.unpadded(course[-1], 0) for course in traced) if keep else ()
        course = Trace.of(*stacked) if trace else None
        record = record.map(torch.Tensor.detach)
        if isinstance(problem, Tokens) and axes:
            record, course = of_problems(record, axes), problem.course(course)
        return Outcome(value.reshape(initial.shape), record, course, states)


def judged(
    rows: Rows, loop: Callable[[Rows, Tensor | None], Loop], rule: FusedRule, *, every: int
) -> tuple[Tensor, Record]:
    """The states (*lead, n) of all problems, and their record, which holds at these states of all of them.

    A problem may read others that have moved on, or left the work, since it was found to have converged. One evaluation
    of all tells, unless the last one was at these states. Problems above their tolerance go on. Where residuals differ
    from those found before by rounding only, the others stand still; elsewhere problems read each other, and all go on.

    Args:
        loop: makes the `Loop` of a working set, and of f at its states where that is known.
        every: as for a `Loop`.
    """
    problem, event, compact, given = rows.problem, rows.event, rows.compact, None
    point: Any
    while True:
        try:
            best, point, tolerance = loop(rows, given).run()
        except Exception:
            if problem.separates or not rows.untried:
                raise
            # f may take no other number of problems than all.
            best, point, rows.rows, compact = rows.full, None, None, False
        value, record = rows.all(best)
        if problem.separates or not (every or not rule.fixed_budget):
            return value, record
        states, raised = value.nan_to_num(0.0, 0.0, 0.0), point is None
        solved, known = record.status == Status.CONVERGED, record.status != Status.NONFINITE
        if isinstance(problem, Tokens) and problem.exits is not None:
            known = known & ~problem.exits.ended_at(None)
        # Whether f has to be evaluated at these states, as the last evaluation was elsewhere.
        anew, found = raised or not every or point.z.shape != states.shape, False
        while not found:
            if found := anew:
                with torch.no_grad():
                    images = imaged(problem, states, False, 2, event, None)
                    point, tolerance = measured(problem, images, 2, event, rule)
            small = (point.residual <= tolerance) & (point.residual < torch.inf) & (tolerance < torch.inf)
            done: Any = (solved & (small | ~known)).all()
            if not anew:
                # One look at both: whether the last evaluation was there, and what it says.
                found, done = torch.stack([(point.z == states).all(), done]).tolist()
                anew = not found
        change = (point.residual - record.residual).abs()
        residual = torch.where(known, point.residual.detach(), record.residual)
        tolerance = torch.where(known, tolerance.detach(), record.tolerance)
        late, ended = solved & known & ~small, record.status != Status.MAX_STEPS
        early = small & known & (~ended | (record.status == Status.STALLED))
        if isinstance(problem, Tokens):
            early = early & ~problem.behind(~small)
        status = record.status.masked_fill(late, int(Status.MAX_STEPS)).masked_fill(early, int(Status.CONVERGED))
        record = record._replace(status=status, residual=residual, tolerance=tolerance)
        if rule.fixed_budget or not every or bool(done):
            return value, record
        rounding = torch.finfo(value.dtype).eps ** (2 / 3) * norm(point.mapped)
        mixes = rows.together or bool((known & (change < torch.inf) & (change > rounding)).any())
        rest, steps = late, record.num_steps.masked_fill(~late, 0).amax()
        if rows.together:
            rest, steps = status == Status.MAX_STEPS, record.num_steps.amax()
        elif mixes or raised:
            # Steps since the first problem has ended do not count: others left it, or moved beside it.
            rest, steps = known & ~small, record.num_steps.masked_fill(~ended, rule.max_steps).amin()
        made = max(int(steps), 1)
        if made >= rule.max_steps or not bool(rest.any()):
            return value, record
        if mixes:
            rest = known & (point.residual < torch.inf)
        given, evals = None if torch.is_grad_enabled() else point.mapped, record.num_evals
        if given is not None and not anew:
            # The next loop counts the evaluation that it is given, which this one has counted.
            evals = evals - rest.to(evals.dtype)
        record = record._replace(status=status.masked_fill(rest, int(Status.MAX_STEPS)), num_evals=evals)
        rows = Rows(problem, unflat(value, event), compact=compact, together=mixes, begun=record)
        rows.made = made


# The working set, whose states are rows of numbers.

#: The working set is restricted anew when the unfinished problems are less than this part of it.
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
        begun: the record of the steps that led to `initial`, of which problems with MAX_STEPS go on; None at first.
    """

    def __init__(
        self, problem: Problem, initial: Tensor, *, compact: bool, together: bool, begun: Record | None = None
    ) -> None:
        lead = initial.shape[: initial.ndim - problem.event_ndim]
        self.event = initial.shape[len(lead) :]
        self.initial = flat(initial, self.event)
        self.active = torch.ones(lead, dtype=torch.bool, device=initial.device)
        self.count = lead[-1] if lead else 0
        self.base = self.problem = problem
        self.rows: Tensor | None = None
        #: The best states of all rows as some left, which those that stay are put into.
        self.full: Any = None
        self.compact = compact and not together and self.count > 0 and initial.numel() > 0
        self.together, self.begun = together, begun
        #: How many steps led to `initial`.
        self.made = 0
        if begun is not None:
            self.active = begun.status == Status.MAX_STEPS
        #: Whether f was not evaluated yet since some left.
        self.untried = False
        #: Whether the number of rows is a power of two, so that graphs of few sizes are compiled.
        self.few_sizes = False
        pad = problem.separates and initial.numel() > 0 and not torch.is_grad_enabled()
        padded = self._rounded_up(self.count) if pad else self.count
        if padded > self.count:
            numbers = torch.arange(padded, device=initial.device)
            # The last row once more in the place of those that are added.
            index = numbers.clamp(max=self.count - 1)
            selected = problem.select(index.expand(*lead[:-1], -1))
            self.compact = self.compact and selected is not None
            if selected is not None:
                self.base = self.problem = selected
                self.active = (numbers < self.count).expand(*lead[:-1], padded)
                self.initial = self.initial.index_select(-2, index)

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
        self.problem = cast(Problem, self.base.select(self.rows))
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
        record = Record(*(put(full, self.rows, part) for full, part in zip(self.full.record, best.record, strict=True)))
        return Best(put(self.full.value, self.rows, best.value), record)


# One loop.


@dataclasses.dataclass(eq=False)
class Loop:
    """A solve of a working set: which problems are unfinished, and the best state of each with what was measured there.

    Args:
        solver: the method.
        rows: the working set.
        every: the most evaluations between two looks of the host at whether all have finished; 0 for none.
        seen: called with this object after every evaluation, if the course of the solve is wanted.
        kernel: from the first states (*lead, n), and which rows are to be solved (*lead), to a `Step`. That does all
            between two evaluations if it `reads` the images. None for the solver's own steps.
        given: f at the first states, (*lead, n), where it is known.
    """

    solver: Solver
    rows: Rows
    every: int
    seen: Callable[[Loop], None] | None
    kernel: Callable[[Tensor, Tensor], Any] | None = None
    given: Tensor | None = None

    #: The attributes with an entry for each problem.
    OF_ROWS: ClassVar[tuple[str, ...]] = (
        *("state", "point", "accepted", "following", "active", "best", "steps", "bottomless", "floor", "overflows"),
    )

    def __post_init__(self) -> None:
        solver, rows = self.solver, self.rows
        self.rule = solver.end_rule
        #: The last step; the last evaluation with its tolerances, and the one before it.
        self.last = solver.max_steps - rows.made
        self.point: Any = None
        self.before: Any = None
        #: The memory of the solver.
        self.state: Any = None
        self.steps: Any = None
        #: What the steps are made by, if not by the solver, and the states that it has found to follow.
        self.by_kernel: Any = None
        self.accepted: Any = None
        self.following: Any = None
        self.start = rows.initial if rows.begun is None else rows.initial.nan_to_num(0.0, 0.0, 0.0)
        #: Which problems have an energy without a minimum, the floor at which they end, and which of them began where
        #: their energy overflows, (*lead) each.
        known = rows.problem.bottomless() if rows.problem.has_energy else None
        self.bottomless = None if known is None else known.to(rows.active.device)[..., None].expand(rows.active.shape)
        self.floor: Tensor | None = None
        self.overflows: Tensor | None = None
        #: Whether the last state that is accepted is returned, whatever its residual. Where kernels solve, too, each
        #: step lowers the energy, and they return the last. A token's residual holds beside the last states of others.
        self.descends = rows.problem.plain_steps_descend and solver.fused_rule(rows.problem) is not None
        self.descends = self.descends or rows.together or isinstance(rows.problem, Tokens)
        self._go_on_with(rows.active)

    def _begin(self, mapped: Tensor) -> None:
        """Begin with the steps of a kernel, if it reads the first images, else with the solver's own."""
        solver, rows, z = self.solver, self.rows, self.start
        if self.kernel is not None:
            by = self.kernel(z, rows.active)
            if by.reads(mapped):
                self.by_kernel = by
                return
        self.state = solver.init(rows.problem, z)
        check_memory(f"{type(solver).__name__}.init", self.state, z)
        record = Record.unmeasured(z, Status.MAX_STEPS, 1) if rows.begun is None else rows.begun
        #: The best states so far, and the number of steps that led to the first, (*lead).
        self.best, self.steps = Best(rows.initial, record), record.num_steps

    def _go_on_with(self, active: Tensor) -> None:
        #: Which problems are unfinished, (*lead).
        self.active = active
        #: Whether the host knows that all are unfinished. Tokens end by rules of their own, too.
        looks = active.numel() > 0 and host_may_look(active) and not isinstance(self.rows.problem, Tokens)
        self.whole = looks and bool(active.all())

    def run(self) -> tuple[Best, Iteration, Tensor]:
        """Make steps until all problems have finished, with a graph where gradients are enabled.

        Returns the best states, and the last evaluation with its tolerances.
        """
        advance(self.evaluate, self.step, self.start, decide=self.decide)
        if self.bottomless is not None and self.rule.exhausted == Status.MAX_STEPS and self.before is not None:
            # More steps would not help where the energy curves downwards; near a minimum they would.
            downward = ((self.point.z - self.before.z) * (self.point.r - self.before.r)).sum(-1) > 0
            here = self.rows.problem.bottomless(unflat(self.point.z, self.rows.event))
            downward = downward if here is None else downward | here
            self.end(self.bottomless & downward, Status.DIVERGED)
        self.end(self.active, self.rule.exhausted)
        return self.best, self.point, self.tolerance

    def evaluate(self, z: Tensor, index: int) -> Images:
        """The states that stand for z, with f and, where it is wanted, E there."""
        problem, event = self.rows.problem, self.rows.event
        energy = self.solver.needs_energy(problem, index) or self.bottomless is not None
        if index == 0 and self.given is not None and not energy:
            return z, self.given, None
        if type(problem).retract is not Problem.retract:
            z = flat(problem.retract(unflat(z, event)), event)
        return imaged(problem, z, energy, index, event, self.point)

    def decide(self, found: Images, index: int) -> bool:
        """Keep what is better, end problems that have converged or are broken, and say whether no step follows."""
        rows = self.rows
        rows.untried = False
        if index == 0:
            self._begin(found[1])
        judge = self._judge if self.by_kernel is None else self._judge_by_kernel
        judge(found, index)
        if self.seen is not None and (index > 0 or rows.begun is None):
            self.seen(self)
        if index == self.last:
            return True
        measured = self.active, self.point.residual, self.tolerance
        if index == 0 and self.every:
            self.looks = Looks(self.every, *measured)
        if self.every and self.due(index):
            left = self.active.numel() if self.whole else self.looks.left(index, *measured)
            if left == 0:
                return True
            if (order := self.leaving(left, index, *measured)) is not None:
                mine = rows.take(order, self.best, {name: getattr(self, name) for name in self.OF_ROWS})
                vars(self).update(mine)
                self._go_on_with(self.active)
                if self.by_kernel is not None:
                    self.by_kernel.go_on_with(self.state, self.best.value)
        return False

    def due(self, index: int) -> bool:
        """Whether the host looks after this evaluation."""
        return index >= self.looks.due

    def leaving(self, left: int, index: int, *measured: Tensor) -> Tensor | None:
        """The rows that stay in the working set, of which so many are unfinished; None where none leaves it."""
        return self.rows.compaction(left, self.active, lambda: self.looks.needed(index, *measured))

    def _judge_by_kernel(self, found: Images, index: int) -> None:
        z, mapped, _ = found
        if mapped.shape != z.shape or mapped.dtype != z.dtype:
            check_candidate(f"{type(self.solver).__name__}.step", mapped, z)
        by = self.by_kernel
        self.following, self.state = by(z, mapped, index), by.memory
        r, residual, self.tolerance, self.active, *_ = by.memory
        self.point = Iteration(z, mapped, r, residual, None, index, self.rows.event)
        self.best = Best(by.value, by.record)
        self.whole = by.whole

    def _judge(self, found: Images, index: int) -> None:
        rows = self.rows
        point, tolerance = measured(rows.problem, found, index, rows.event, self.rule)
        if point.energy is not None:
            # Where |r|^2 or |f(z)|^2 overflows, an energy does, too, and cannot show that it falls: the problem counts
            # as one that left the finite numbers, unless it began there.
            long, far = (~(length(t) < torch.inf) for t in (point.r, point.mapped))
            self.overflows = long | far if self.overflows is None else self.overflows
            point = point._replace(residual=point.residual.masked_fill(long & ~self.overflows, torch.inf))
            tolerance = tolerance.masked_fill(far & ~self.overflows, torch.inf)
        self.point, self.tolerance = point, tolerance
        accepted = self.solver.accept(rows.problem, self.state, point)
        self.accepted = torch.ones_like(self.active) if accepted is None else accepted
        candidates = self.active if accepted is None else self.active & accepted
        # |f(z)|, and with it the tolerance, may overflow while |f(z) - z| does not.
        finite = (point.residual < torch.inf) & (tolerance < torch.inf)
        broken = candidates & ~finite
        converged = None if self.rule.fixed_budget else candidates & finite & (point.residual <= tolerance)
        if rows.together and converged is not None:
            converged = converged & ~(self.active & ~converged).any()
        if self.bottomless is not None:
            below = self._below_floor()
            broken = broken | (below if converged is None else below & ~converged)
        if isinstance(rows.problem, Tokens):
            numbered = point._replace(step=rows.made + index)
            converged, broken = rows.problem.settled_of(self.active, converged, broken, numbered)
        self._improve(candidates, converged)
        if converged is not None:
            self.end(converged, Status.CONVERGED)
        self.end(broken, Status.NONFINITE if rows.made + index == 0 else Status.DIVERGED)

    def _below_floor(self) -> Tensor:
        """Which unfinished problems, of those whose energy is `bottomless`, are below its floor, (*lead), and given up.

        The floor is 1/eps^2 times the scale at the start below the first energy: a minimum there would share no digit
        with the start. Others have no floor: they may start near a saddle, which tells nothing of how deep a minimum
        is. States that were refused do not count, as such a step may have jumped over a minimum; -inf always does.
        """
        point, energy, floor = self.point, cast(Tensor, self.point.energy), self.floor
        if floor is None:
            scale = energy.abs() + point.z.square().sum(-1) + point.residual.square()
            level = energy - scale / torch.finfo(point.z.dtype).eps ** 2
            floor = self.floor = level.where(cast(Tensor, self.bottomless), torch.nan).detach()
        below: Tensor = self.accepted & (energy < floor)
        return self.active & (below | (floor.isfinite() & (energy == -torch.inf)))

    def _improve(self, candidates: Tensor, converged: Tensor | None) -> None:
        """Keep the candidates that are better; where the energy `descends` all candidates are."""
        (value, record), point, z, better = self.best, self.point, self.point.z, candidates
        if self.rows.made + point.step == 0:
            # An initial state at which f is not finite is NaN, loudly.
            z = rows_where(point.residual < torch.inf, z, torch.nan)
        elif not self.rule.fixed_budget:
            better = candidates & (point.residual < (torch.inf if self.descends else record.residual))
            better = better if self.descends or converged is None else better | converged
        kept = functools.partial(rows_where, better)
        residual, tolerance = kept(point.residual, record.residual), kept(self.tolerance, record.tolerance)
        steps = kept(self.steps + point.step, record.num_steps)
        # Evaluations that do not improve a problem are spent on it all the same.
        record = Record(record.status, residual, tolerance, steps, record.num_evals + self.active)
        self.best = Best(kept(z, value), record)

    def end(self, which: Tensor, status: Status) -> None:
        """End the problems `which`, where they are unfinished, with a status."""
        if host_may_look(which) and not bool(which.any()):
            return
        record = self.best.record
        record = record._replace(status=record.status.masked_fill(self.active & which, int(status)))
        self.best, self.active, self.whole = self.best._replace(record=record), self.active & ~which, False

    def step(self, found: Images, index: int) -> Tensor:
        """The states to evaluate next."""
        self.before = self.point
        if self.by_kernel is not None:
            return cast(Tensor, self.following)
        problem = self.rows.problem
        update = updated(self.solver, problem, self.state, self.point, self.accepted)
        self.state, z = update.state, update.candidate
        if torch.is_grad_enabled():
            # Further steps of a finished problem are detached. Their gradient is 0, which a division 0/0 in them would
            # turn into NaN, also for the tensors that all problems share.
            def live(t: Tensor) -> Tensor:
                return rows_where(self.active, t, t.detach().nan_to_num(0.0, 0.0, 0.0))

            self.state, z = pytree.tree_map_only(Tensor, live, (self.state, z))
        if update.num_evals is not None:
            record = self.best.record
            spent = torch.where(self.active, update.num_evals, 0).to(record.num_evals.dtype)
            self.best = self.best._replace(record=record._replace(num_evals=record.num_evals + spent))
        if update.stalled is not None:
            self.end(update.stalled, Status.STALLED)
        if not (problem.separates or self.whole):
            # Others go on to read, of a finished problem, the state that is returned for it, but no NaN.
            z = rows_where(self.active, z, self.best.value.nan_to_num(0.0, 0.0, 0.0))
        return z


def stepped(solver: Solver, problem: Problem, initial: Tensor) -> Tensor:
    """The state after a fixed budget of steps: that of `solver.run`, without evidence, and without a look at numbers.

    For exported programs. A problem that leaves the finite numbers is not kept from there on, and may end in NaN.
    """
    event, rule = initial.shape[initial.ndim - problem.event_ndim :], solver.end_rule
    value = flat(initial, event)
    state, accepted = solver.init(problem, value), None
    everyone = going = torch.ones(value.shape[:-1], dtype=torch.bool, device=initial.device)
    # Where all steps are accepted, nothing is evaluated at the last state.
    chooses = type(solver).accept is not Solver.accept

    def evaluate(z: Tensor, index: int) -> Iteration:
        z = flat(problem.retract(unflat(z, event)), event)
        images = imaged(problem, z, solver.needs_energy(problem, index), index, event, None)
        return measured(problem, images, index, event, rule)[0]

    def decide(point: Iteration, index: int) -> bool:
        nonlocal value, accepted
        accepted = solver.accept(problem, state, point)
        kept = going if accepted is None else accepted & going
        value = point.z if kept is everyone else rows_where(kept, point.z, value)
        return index == solver.max_steps

    def step(point: Iteration, index: int) -> Tensor:
        nonlocal state, going
        update = updated(solver, problem, state, point, everyone if accepted is None else accepted)
        state, going = update.state, going if update.stalled is None else going & ~update.stalled
        return update.candidate

    z = advance(evaluate, step, value, steps=None if chooses else solver.max_steps, decide=decide)
    return unflat(value, event) if chooses else problem.retract(unflat(z, event))


def is_budget(solver: Solver) -> bool:
    """Whether the steps are counted before anything is computed, and are all made of tensor operations."""
    counted = solver.fixed_budget or solver.max_steps == 0
    return counted and solver.differentiable and type(solver).run is Solver.run


def check_budget(solver: Solver) -> None:
    """Raise if an exported program cannot hold the steps of this solver."""
    if not is_budget(solver):
        where = "ONNX" if into_onnx() else "an exported program"
        required = f"make a number of steps that is known beforehand, to be a part of {where}"
        remedy = "use a fixed budget: solver=Picard(max_steps=4, rtol=0, atol=0), or max_steps=0"
        _validate.refuse("solver", required, repr(solver), remedy, UnsupportedImplementation)


def check_no_evidence(wanted: bool, name: str) -> None:
    """Raise if the evidence `name` of a solve is wanted, which no exported program has."""
    if wanted:
        remedy = "leave it out, and look at the evidence before the model is exported"
        _validate.refuse(name, "be False in an exported program", True, remedy, UnsupportedImplementation)


def updated(solver: Solver, problem: Problem, state: Any, point: Iteration, accepted: Tensor) -> Update:
    """A step of the solver. The first two are checked, as many methods extrapolate in the second.

    Of later ones size and dtype are compared, which would be broadcast or rounded without an error.
    """
    update, z = solver.step(problem, state, point, accepted), point.z
    if not (point.step > 1 and update.candidate.shape == z.shape and update.candidate.dtype == z.dtype):
        name = f"{type(solver).__name__}.step"
        _validate.check_instance(name, update, Update, "return Update(state, candidate)", "state may be ()")
        _validate.check_instance(name, update.candidate, Tensor, "return Update(state, candidate) with a tensor")
        check_candidate(name, update.candidate, z)
        check_memory(name, update.state, z)
    return update


def check_candidate(name: str, candidate: Tensor, z: Tensor) -> None:
    """Raise unless the state to evaluate next is like the last one, z."""
    wanted, given = ((tuple(t.shape), t.dtype, str(t.device)) for t in (z, candidate))
    if given != wanted:
        remedy = "form it from point.z, point.r and point.mapped, or convert it with .to(point.z)"
        _validate.refuse(name, f"return a candidate like point.z, {wanted}", given, remedy)


def check_memory(name: str, state: Any, z: Tensor) -> None:
    """Raise unless the tensors of a solver's memory have an entry for each problem of z, (*lead, n)."""
    for kept in pytree.tree_leaves(state):
        if isinstance(kept, Tensor) and kept.shape[: z.ndim - 1] != z.shape[:-1]:
            required = f"return a state whose tensors begin with the axes of the problems, {tuple(z.shape[:-1])}"
            remedy = "expand it to them, as problems leave the work one by one; what all share can be no tensor there"
            _validate.refuse(name, required, f"shape {tuple(kept.shape)}", remedy)


#: States z (*lead, n), f(z), and E(z) (*lead) where it is wanted.
Images: TypeAlias = tuple[Tensor, Tensor, Tensor | None]


def imaged(
    problem: Problem, z: Tensor, energy: bool, index: int, event: torch.Size, before: Iteration | None
) -> Images:
    """z, f(z) and E(z), once the map has passed its tests."""
    # Torch counts no writes to inference tensors, whose copies show whether the map writes to its state.
    z = counted(z)
    mapped, value = evaluate_pure(problem, unflat(z, event), energy=energy, call=index)
    mapped = flat(mapped, event)
    if index == 1 and before is not None and share_memory(mapped, before.mapped):
        # A map may return the same numbers twice, but no others in their place.
        check_kept(problem, before.mapped - before.z, before.r)
    return z, mapped, value


def measured(
    problem: Problem, images: Images, index: int, event: torch.Size, rule: FusedRule
) -> tuple[Iteration, Tensor]:
    """The evaluation, and the tolerances of the rule there."""
    z, mapped, energy = images
    r = mapped - z
    force = None
    if energy is not None and problem.has_metric:
        force = flat(problem.metric_product(unflat(z, event), unflat(r, event)), event)
    tolerance = rule.atol + rule.rtol * norm(mapped)
    return Iteration(z, mapped, r, norm(r), energy, index, event, force), tolerance
