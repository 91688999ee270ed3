"""The base of solvers (options, and the hooks of a method), and the one generic loop.

The loop evaluates candidates, decides per problem when to stop, and keeps the best state with what was measured there.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import _validate
from .._autograd import host_may_look, looks_every, transforms_active
from .._fused_rule import FusedRule
from .._norm import length, norm
from ..problem import Problem, check_kept, counted, evaluate_pure, share_memory
from ..solution import Record, Remedies, Trace
from ..status import CONTRACT, Status
from ._rows import Best, Rows, flat, rows_where, unflat
from .in_order import Tokens, of_problems
from .progress import Iteration, LoopState, compared


class Outcome(NamedTuple):
    """The result of a solver: the values, how the solve went, and its course.

    Not for users of `solve`, which returns a `Solution`.

    `trace` is the course of the solve, if it was asked for; `states` are the values after every step with their graph,
    where both were asked for. `evaluation` is what a kernel found at the values and that of the backward solve
    reads: the mean of the keys, for Triton their log-sum-exp, too.

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


class Ended(NamedTuple):
    """The best states of a working set, and the last evaluation with the tolerances that hold there."""

    best: Best
    point: Iteration
    tolerance: Tensor


#: Runs a solver on a working set.
Run: TypeAlias = Callable[..., Ended]

#: An evaluation with its tolerances.
Given: TypeAlias = tuple[Iteration, Tensor] | None

#: Called with (step, residuals (*lead), which problems are unfinished (*lead)) after every evaluation of a solve.
Callback: TypeAlias = Callable[[int, Tensor, Tensor], object]


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
class Solver:
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
        check_every: steps between two looks at whether all problems are finished, each of which makes the host wait;
            None is 1 on a CPU and 4 on an accelerator. Results do not depend on it.

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

    rtol: float = 1e-4
    atol: float = 1e-8
    max_steps: int = 200
    check_every: int | None = None

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

    def __post_init__(self) -> None:
        _validate.store_plain(self)
        _validate.check_number("rtol", self.rtol, low=0.0)
        _validate.check_number("atol", self.atol, low=0.0)
        _validate.check_integer("max_steps", self.max_steps, low=0)
        if self.check_every is not None:
            _validate.check_integer("check_every", self.check_every, low=1)

    @property
    def fixed_budget(self) -> bool:
        """Whether all steps are made whatever the residual."""
        return self.rtol == 0 and self.atol == 0

    @property
    def exhausted(self) -> Status:
        """The status of a problem on which all steps were spent."""
        return self.end_rule.exhausted

    @property
    def end_rule(self) -> FusedRule:
        """When a problem ends: tolerances and budget."""
        return FusedRule(self.rtol, self.atol, self.max_steps, plain_steps=0)

    def fused_rule(self, problem: Problem) -> FusedRule | None:
        """Return the rule by which a fused operation is this solver on such a problem, or None if none can be."""
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

    def run(self, problem: Problem, initial: Tensor, *, trace: bool = False, graph: bool = False) -> Outcome:
        """Solve `problem` from `initial`. With `graph` every step is recorded for differentiation."""
        return iterate(self, problem, initial, trace=trace, graph=graph)


def iterate(
    solver: Solver,
    problem: Problem,
    initial: Tensor,
    *,
    trace: bool,
    graph: bool,
    callback: Callback | None = None,
    step: Callable[[Tensor, Tensor], Any] | None = None,
) -> Outcome:
    """Run `solver` on `problem` from `initial`, and call `callback` after every evaluation.

    Every problem stops on its own, and its outcome does not depend on the others. Returned for it is the accepted state
    with the smallest residual; the last one where the budget is fixed, where every accepted step lowers the energy, and
    of problems that go on together.
    Finished problems leave the working set where the problem can be restricted to some of its rows. Each token of a
    problem with a `token_order` stops on its own. Problems that may read each other (`Problem.separates`) are `judged`
    together at the end.

    step: what makes the same steps faster, for states (*lead, n) and the rows (*lead) that are to be solved.
    """
    if problem.token_order is not None and not isinstance(problem, Tokens):
        tokens, start = Tokens(problem), 1 - problem.event_ndim

        def by_problem(step: int, residual: Tensor, active: Tensor) -> None:
            assert callback is not None
            callback(step, norm(residual.flatten(start)), active.flatten(start).any(-1))

        watched = None if callback is None else by_problem
        outcome = iterate(solver, tokens, initial, trace=trace, graph=graph, callback=watched)
        record = of_problems(outcome.record, problem.event_ndim - 1)
        return outcome._replace(record=record, trace=tokens.course(outcome.trace))
    keep = graph and trace
    graph = graph and (torch.is_grad_enabled() or transforms_active())
    with torch.set_grad_enabled(graph):
        compact = not trace and not graph and callback is None
        rows = Rows(problem, initial, compact=compact, together=problem.mixes)
        # Nothing is batched outside of transforms, and a search for tensors costs as much as a small evaluation.
        every = looks_every(solver.check_every, initial, *(problem.tensors() if transforms_active() else ()))
        traced: list[Any] = []
        numbers = itertools.count()
        told = callback and (lambda _, *shown: callback(next(numbers), *shown))
        # A fixed budget does not wait for another device.
        looks = 0 if solver.fixed_budget and initial.device.type != "cpu" else every
        go_on = functools.partial(loop, solver, every=looks, traced=traced if trace else None, callback=told)
        begin = go_on if step is None else functools.partial(_stepped, step, go_on, solver, every=every)
        value, record = judged(solver, rows, begin, go_on, every=every)
        if share_memory(value, initial):
            value = value.clone()
        kept = [rows.unpadded(torch.stack(t).detach(), 1) for t in zip(*traced, strict=True)]
        states = tuple(rows.unpadded(course[-1], 0) for course in traced) if keep else ()
        course = Trace.of(*kept) if trace else None
        return Outcome(value.reshape(initial.shape), record.map(torch.Tensor.detach), course, states)


def judged(solver: Solver, rows: Rows, begin: Run, go_on: Run, *, every: int) -> tuple[Tensor, Record]:
    """The states (*lead, n) of all problems, and their record, which holds at these states of all of them.

    A problem may read others that have moved on, or left the work, since it was found to have converged. One evaluation
    of all tells, unless the last one was at these states. Problems above their tolerance go on. Where residuals differ
    from those found before by rounding only, the others stand still; elsewhere problems read each other, and all go on.

    Args:
        begin: runs the solver on a working set.
        go_on: the same from an evaluation, `given`.
        every: as for the loop.
    """
    problem, event, rule, compact = rows.problem, rows.event, solver.end_rule, rows.compact
    run, rest, before = begin, rows.active, torch.empty(0)
    point: Any
    while True:
        try:
            best, point, tolerance = run(rows)
        except Exception:
            if problem.separates or not rows.untried:
                raise
            # f may take no other number of problems than all.
            best, point, rows.rows, compact = cast(Best, rows.full), None, None, False
        value, record = rows.all(best)
        if rows.begun is not None:
            # Steps are counted for each problem: those of before, and those of this run.
            more = record.num_steps - rows.made
            record = record._replace(num_steps=torch.where(rest & (more >= 0), before + more, record.num_steps))
        if problem.separates or not (every or not rule.fixed_budget):
            return value, record
        states, raised, given = value.nan_to_num(0.0, 0.0, 0.0), point is None, None
        beside = point is None or not every or not torch.equal(point.z, states)
        if beside:
            with torch.no_grad():
                point, tolerance = evaluated(problem, states, False, 2, event, None, rule)
        if not torch.is_grad_enabled():
            given = point._replace(step=0), tolerance
        small = (point.residual <= tolerance) & (point.residual < torch.inf) & (tolerance < torch.inf)
        solved, known = record.status == Status.CONVERGED, record.status != Status.NONFINITE
        if isinstance(problem, Tokens) and problem.exits is not None:
            known = known & ~problem.exits.ended_at(None)
        change = (point.residual - record.residual).abs()
        residual = torch.where(known, point.residual.detach(), record.residual)
        record = record._replace(residual=residual, tolerance=torch.where(known, tolerance.detach(), record.tolerance))
        if rule.fixed_budget or (every and bool((solved & (small | ~known)).all())):
            return value, record
        late, ended = solved & known & ~small, record.status != Status.MAX_STEPS
        early = small & known & (~ended | (record.status == Status.STALLED))
        if isinstance(problem, Tokens):
            early = early & ~problem.behind(~small)
        status = record.status.masked_fill(late, int(Status.MAX_STEPS)).masked_fill(early, int(Status.CONVERGED))
        record = record._replace(status=status)
        if not every:
            return value, record
        rounding = torch.finfo(value.dtype).eps ** (2 / 3) * norm(point.mapped)
        mixes = rows.together or bool((known & (change < torch.inf) & (change > rounding)).any())
        rest, steps = late, record.num_steps.masked_fill(~late, 0).amax()
        if rows.together:
            rest, steps = status == Status.MAX_STEPS, record.num_steps.amax()
        elif mixes or raised:
            # Steps since the first problem has ended do not count: others left it, or moved beside it.
            rest, steps = known & ~small, record.num_steps.masked_fill(~ended, solver.max_steps).amin()
        made = max(int(steps), 1)
        if made >= solver.max_steps or not bool(rest.any()):
            return value, record
        if mixes:
            rest = known & (point.residual < torch.inf)
        before, again = record.num_steps, rest if given is not None and not beside else torch.zeros_like(rest)
        # An evaluation that was counted already is given once more.
        counts = {"num_steps": before.clone(), "num_evals": record.num_evals - again.to(before.dtype)}
        begun = record._replace(status=status.masked_fill(rest, int(Status.MAX_STEPS)), **counts), made
        rows = Rows(problem, unflat(value, event), compact=compact, together=mixes, begun=begun)
        run = functools.partial(go_on, given=given)


def loop(
    solver: Solver, rows: Rows, given: Given = None, *, every: int, traced: list[Any] | None, callback: Callback | None
) -> Ended:
    """Make steps until all problems have finished, with a graph where gradients are enabled.

    given: the first evaluation, with its tolerances.
    traced: takes the course; None where nobody wants it.
    """
    trace, graph = traced is not None, torch.is_grad_enabled()
    z = rows.initial if rows.begun is None else rows.initial.nan_to_num(0.0, 0.0, 0.0)
    event, last = rows.event, solver.max_steps - rows.made
    state = solver.init(rows.problem, z)
    if (type(solver), z.ndim) not in _PASSED:
        check_memory(f"{type(solver).__name__}.init", state, z)
    trace_energy = trace and rows.problem.has_energy
    point: Iteration | None = None
    falls, floor, begun = rows.falls(), None, None
    # The last state, which fused operations return as well: as the energy falls, it is the best of all. A residual of a
    # token holds for the last states of the tokens before it.
    descends = rows.problem.plain_steps_descend and solver.fused_rule(rows.problem) is not None
    descends = descends or rows.together or isinstance(rows.problem, Tokens)
    rule = solver.end_rule
    progress = LoopState(rule, rows, energy=trace_energy, descends=descends)
    index = 0
    while True:
        before, energy = point, trace_energy or solver.needs_energy(rows.problem, index) or falls is not None
        if given is not None and not energy:
            (point, tolerance), given = given, None
        else:
            z = flat(rows.problem.retract(unflat(z, event)), event)
            point, tolerance = evaluated(rows.problem, z, energy, index, event, point, rule)
        rows.untried = False
        if point.energy is not None:
            # An energy overflows where squares do, and shows no descent there: too long, unless it began as long.
            sizes = length(point.r) + length(point.mapped)
            if not (host_may_look(sizes) and bool((sizes < torch.inf).all())):
                long, far = (~(length(t) < torch.inf) for t in (point.r, point.mapped))
                begun = long | far if begun is None else begun
                point = point._replace(residual=point.residual.masked_fill(long & ~begun, torch.inf))
                tolerance = tolerance.masked_fill(far & ~begun, torch.inf)
            elif begun is None:
                begun = torch.zeros_like(progress.active)
        judged = solver.accept(rows.problem, state, point)
        accepted = progress.everyone if judged is None else judged
        fallen = None
        if falls is not None:
            floor = _floor(falls, point) if floor is None else floor
            fallen = _below(floor, point, accepted)
        progress.decide(point, tolerance, judged, fallen)
        if traced is not None and (index > 0 or rows.begun is None):
            best = progress.best
            course = (best.record.residual, best.energy, progress.num_evals, unflat(best.value, event))
            traced.append([t for t in course if t is not None])
        if callback is not None and (index > 0 or rows.begun is None):
            shown = progress.best.record.residual, progress.active
            callback(index, *(rows.unpadded(t.detach(), 0).clone() for t in shown))
        if index == last:
            break
        if every and index % every == 0:
            if not progress.unfinished():
                break
            if index == 0:
                first = point.residual
            measures = (index, first, point.residual, tolerance)
            if not progress.whole and (order := rows.compaction(progress.active, *measures)) is not None:
                state, point, accepted, falls, floor, begun, parts = rows.take(
                    order, progress.best, (state, point, accepted, falls, floor, begun, progress.tree())
                )
                progress.restrict(*parts)
        update = updated(solver, rows.problem, state, point, accepted)
        state, z = update.state, update.candidate
        if graph:
            # Further steps of a finished problem are detached: at the first 0/0 their gradient of zero would turn into
            # NaN.
            live = functools.partial(_live, active=progress.active)
            state, z = pytree.tree_map_only(Tensor, live, (state, z))
        if update.num_evals is not None:
            progress.spend(update.num_evals)
        if update.stalled is not None:
            progress.end(update.stalled, Status.STALLED)
        if not (rows.problem.separates or progress.whole):
            # Others read the state that is returned for a finished problem; a NaN stays where it is.
            z = rows_where(progress.active, z, progress.best.value.nan_to_num(0.0, 0.0, 0.0))
        index += 1
    if falls is not None and solver.exhausted == Status.MAX_STEPS and before is not None and point is not None:
        # More steps would not help where the energy curves downwards; near a minimum they would.
        downward = ((point.z - before.z) * (point.r - before.r)).sum(-1) > 0
        downward = downward | rows.problem.curves_down(unflat(point.z, event))
        progress.end(falls & downward, Status.DIVERGED)
    progress.end(progress.active, solver.exhausted)
    return Ended(progress.result(), point, tolerance)


def _stepped(step: Callable[[Tensor, Tensor], Any], otherwise: Run, solver: Solver, rows: Rows, *, every: int) -> Ended:
    """The same where one call does all between two evaluations; `otherwise` where it cannot read the images."""
    z, event, rule, index = rows.initial, rows.event, solver.end_rule, 0
    after, first = step(z, rows.active), z
    point: Iteration | None = None
    while True:
        z = flat(rows.problem.retract(unflat(z, event)), event)
        z, mapped, _ = _imaged(rows.problem, z, False, index, event, point)
        if index == 0 and not after.reads(mapped):
            r, residual, tolerance = compared(rule, z, mapped)
            return otherwise(rows, (Iteration(z, mapped, r, residual, None, 0, event), tolerance))
        rows.untried = False
        if mapped.shape != z.shape or mapped.dtype != z.dtype:
            check_candidate(f"{type(solver).__name__}.step", mapped, z)
        following = after(z, mapped, index)
        if index == 0:
            first = after.residual.clone()
        point = Iteration(z, mapped, after.r, after.residual, None, index, event)
        looks, best = index % every == 0, Best(after.value, after.record, None)
        if index == solver.max_steps or (looks and after.left == 0):
            after.end()
            return Ended(best, point, after.tolerance)
        if looks and after.left < after.active.numel():
            order = rows.compaction(after.active, index, first, after.residual, after.tolerance)
            if order is not None:
                following, point, *kept = rows.take(order, best, (following, point, after.tensors, after.value))
                after.go_on_with(*kept)
        z, index = following, index + 1


#: Classes of solvers, with a number of axes of states, whose first two steps were checked.
_PASSED: set[tuple[type[Solver], int]] = set()


def updated(solver: Solver, problem: Problem, state: Any, point: Iteration, accepted: Tensor) -> Update:
    """A step of the solver. The first two are checked, as many methods extrapolate in the second, once a class."""
    update, z, passed = solver.step(problem, state, point, accepted), point.z, (type(solver), point.z.ndim)
    tested = point.step > 1 or passed in _PASSED
    # Later candidates of another size or dtype would be broadcast or rounded.
    if not (tested and update.candidate.shape == z.shape and update.candidate.dtype == z.dtype):
        name = f"{type(solver).__name__}.step"
        _validate.check_instance(name, update, Update, "return Update(state, candidate)", "state may be ()")
        _validate.check_instance(name, update.candidate, Tensor, "return Update(state, candidate) with a tensor")
        check_candidate(name, update.candidate, z)
        check_memory(name, update.state, z)
        _PASSED.update([passed] * (point.step == 1))
    return update


def check_candidate(name: str, candidate: Tensor, z: Tensor) -> None:
    """Raise unless the state to evaluate next is like the last one, z."""
    wanted, given = ((tuple(t.shape), t.dtype, str(t.device)) for t in (z, candidate))
    if given != wanted:
        remedy = "form it from point.z, point.r and point.mapped, or convert it with .to(point.z)"
        raise ValueError(_validate.message(name, f"return a candidate like point.z, {wanted}", given, remedy))


def check_memory(name: str, state: Any, z: Tensor) -> None:
    """Raise unless the tensors of a solver's memory have an entry for each problem of z, (*lead, n)."""
    for kept in pytree.tree_leaves(state):
        if isinstance(kept, Tensor) and kept.shape[: z.ndim - 1] != z.shape[:-1]:
            required = f"return a state whose tensors begin with the axes of the problems, {tuple(z.shape[:-1])}"
            remedy = "expand it to them, as problems leave the work one by one; what all share can be no tensor there"
            raise ValueError(_validate.message(name, required, f"shape {tuple(kept.shape)}", remedy))


def _live(tensor: Tensor, *, active: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    where = active.reshape((*active.shape, *(1,) * (tensor.ndim - active.ndim)))
    # 0 * NaN is NaN: a problem that diverged must not reach tensors that all problems share.
    return torch.where(where, tensor, tensor.detach().nan_to_num(0.0, 0.0, 0.0))


def evaluated(
    problem: Problem,
    z: Tensor,
    energy: bool,
    index: int,
    event: torch.Size,
    before: Iteration | None,
    rule: FusedRule,
) -> tuple[Iteration, Tensor]:
    """The evaluation of states (*lead, n), and the tolerances of the rule there."""
    z, mapped, value = _imaged(problem, z, energy, index, event, before)
    r, residual, tolerance = compared(rule, z, mapped)
    force = None
    if energy and problem.has_metric:
        force = flat(problem.metric_product(unflat(z, event), unflat(r, event)), event)
    return Iteration(z, mapped, r, residual, value, index, event, force), tolerance


def _imaged(
    problem: Problem, z: Tensor, energy: bool, index: int, event: torch.Size, before: Iteration | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """z, f(z) and E(z), once the map has passed its tests."""
    # Of inference tensors nobody would see that the map writes to them, or to what it returned before.
    z = counted(z)
    mapped, value = evaluate_pure(problem, unflat(z, event), energy=energy, call=index)
    mapped = flat(mapped, event)
    if index == 1 and before is not None and share_memory(mapped, before.mapped):
        # A map may return the same numbers twice, but no others in their place.
        check_kept(problem, before.mapped - before.z, before.r)
    return z, mapped, value


def _floor(falls: Tensor, point: Iteration) -> Tensor:
    """The energy (*lead) below which a problem that `falls` without end is given up; NaN for the others.

    Where it starts sets the scale: a minimum 1/eps^2 times as deep shares no digit with it. Of problems that are not
    certain to fall this would not be true: the start may be near a saddle, and tell nothing of the minimum.
    """
    assert point.energy is not None
    scale = point.energy.abs() + point.z.square().sum(-1) + point.residual.square()
    level = point.energy - scale / torch.finfo(point.z.dtype).eps ** 2
    return torch.where(falls, level, torch.nan).detach()


def _below(floor: Tensor, point: Iteration, accepted: Tensor) -> Tensor:
    """Return where the energy is below the floor; for a refused step, which may jump a minimum, where -inf."""
    assert point.energy is not None
    return (accepted & (point.energy < floor)) | (floor.isfinite() & (point.energy == -torch.inf))
