"""Solvers of other libraries for our problems, SciPy's and torchdeq's, and ours for torchdeq's models.

A library is imported when one of its solvers is created. What it evaluates is recorded as the loop of this library
would: the best state of each problem among all of these, its residual, and how it ended.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.fx.immutable_collections import immutable_dict

from .. import _validate
from .._torch import is_batched, norm, transforms_active
from ..problem import FixedPointMap, Problem, evaluate_pure
from ..solution import Record, Remedies, Status, Trace
from .anderson import Anderson
from .broyden import Broyden
from .loop import Outcome, Solver, flat, rows_where
from .newton import NewtonKrylov
from .picard import Picard

#: What to install, by the library.
_REQUIREMENTS = {"scipy": "scipy>=1.11", "torchdeq": "torchdeq>=0.1.0"}

# The option that bounds the work of each method, and the tolerances of its own, set so that they never end a run.
_BY_EVALUATIONS = {
    "hybr": ("maxfev", {"xtol": 0.0}),
    "lm": ("maxiter", {"xtol": 0.0, "ftol": 0.0}),
    "df-sane": ("maxfev", {"ftol": 0.0, "fatol": 0.0}),
}
_BY_STEPS = ("broyden1", "broyden2", "anderson", "linearmixing", "diagbroyden", "excitingmixing", "krylov")
# torchdeq's Anderson spends this many evaluations before its loop, and returns x0 if that is all it has.
_ANDERSON_FIRST = 3


class _Finished(Exception):
    """Raised out of a foreign solver when nothing is left for it to do."""


class _Recorder:
    """Evaluates f for a foreign solver and records the same as the library's own loop.

    All leading axes are one, P problems of n numbers each, in the precision of the solver. Problems that a solver does
    not ask about stand at their initial states, or are left out. The record of a problem is closed at the first state
    that meets the tolerance (half of it for states that are rounded in the end), or at the first non-finite one, so it
    does not depend on how long its neighbours take.
    """

    def __init__(self, solver: _Foreign, problem: Problem, initial: Tensor, trace: bool) -> None:
        self.event = event = initial.shape[initial.ndim - problem.event_ndim :]
        self.solver, self.asked, self.dtype, self.problem = solver, problem, initial.dtype, problem
        self.shape, self.lead = initial.shape, initial.shape[: initial.ndim - len(event)]
        if solver.works_in is not None:
            numbers = (t.to(solver.works_in) if t.is_floating_point() else t for t in problem.tensors())
            self.problem, initial = problem.replace(*numbers), initial.to(solver.works_in)
        self.rounds = initial.dtype != self.dtype
        self.initial = flat(initial, event).reshape(self.lead.numel(), event.numel())
        rows = torch.arange(len(self.initial), device=initial.device)
        self.value, self.rule = self.initial.clone(), solver.end_rule
        self.record = Record.unmeasured(self.initial, self.rule.exhausted, event_ndim=1).map(torch.clone)
        self.energy = self.record.residual.clone() if trace and problem.has_energy else None
        self.events: list[tuple[Tensor, Tensor, list[Tensor]]] | None = [] if trace else None
        #: Whether f is being evaluated, whose errors are not those of the solver.
        self.in_map = False
        #: f at the initial states.
        self.first_mapped: Any = None
        self.first_mapped = self.evaluate(rows, self.initial, 0, last=True)
        #: Those that the solver is to solve.
        self.rows = self.unsettled(rows)

    def unsettled(self, rows: Tensor) -> Tensor:
        """Those of `rows` in which something is left to do."""
        going = (self.record.status == self.rule.exhausted) & (self.record.residual != 0)
        return rows[going[rows]]

    def evaluate(self, rows: Tensor, z: Tensor, step: int, *, last: bool = False) -> Tensor:
        """f(z) of the states z (len(rows), n), recorded, after which a solver is left that has nothing left to do.

        Inside a torch.func transform f is being linearised, which is no step: nothing is recorded.

        last: whether z is the foreign solver's answer, or where it starts.
        """
        record, rule, first = self.record, self.rule, self.first_mapped is None
        problem, states, shape, places = self._part(rows)
        z = z.reshape(len(rows), states.shape[1])
        mapped, energy, residual, tolerance = self._at(problem, states.index_copy(0, places, z), shape, step)
        mapped = mapped[places]
        if transforms_active():
            return mapped
        residual, tolerance = residual[places], tolerance[places]
        going = record.status[rows] == rule.exhausted
        finite = torch.isfinite(residual) & torch.isfinite(tolerance)
        met = finite & (residual <= (0.5 if self.rounds else 1.0) * tolerance) & (not rule.fixed_budget)
        lower = finite & ((residual < record.residual[rows]) | (last and rule.fixed_budget))
        better = going & (met | lower | first)
        # As in the library's own loop: a map that is not finite at the initial state makes the value NaN.
        found = [(self.value, rows_where(finite, z, torch.nan) if first else z)]
        found += [(record.residual, residual), (record.tolerance, tolerance)]
        if self.energy is not None and energy is not None:
            found += [(self.energy, energy[places])]
        for kept, new in found:
            kept[rows[better]] = new[better].to(kept.dtype)
        record.num_steps[rows[better]] = min(step, rule.max_steps)
        record.num_evals[rows] += 1
        record.status[rows[going & met]] = int(Status.CONVERGED)
        record.status[rows[going & ~finite]] = int(Status.NONFINITE if first else Status.DIVERGED)
        if self.events is not None:
            self.events.append((record.num_evals[rows] - 1, rows, [t[rows] for t in self._shown()]))
        if not last and len(self.unsettled(rows)) == 0:
            raise _Finished
        return mapped

    def _part(self, rows: Tensor) -> tuple[Problem, Tensor, torch.Size, Tensor]:
        """The problem of which f is evaluated for `rows`, its initial states (P, n), their shape, and where `rows` are.

        A problem that is solved alone has as few others beside it as the whole allows.
        """
        if self.solver.alone and len(rows) == 1 and self.lead:
            place = rows % self.lead[-1]
            selected = self.problem.select(place.expand(*self.lead[:-1], 1))
            if selected is not None:
                states = self.initial.reshape(self.shape).index_select(len(self.lead) - 1, place)
                return selected, flat(states, self.event).flatten(0, -2), states.shape, rows // self.lead[-1]
        return self.problem, self.initial, self.shape, rows

    def _at(
        self, problem: Problem, states: Tensor, shape: torch.Size, step: int
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """f at the states (P, n), of this `shape`, E where it is traced, residuals and their tolerances."""
        self.in_map = True
        image, energy = evaluate_pure(problem, states.reshape(shape), energy=self.energy is not None, call=step)
        self.in_map = False
        mapped = image.reshape(states.shape).to(states.dtype)
        tolerance = self.rule.atol + self.rule.rtol * norm(mapped)
        return mapped, None if energy is None else energy.reshape(-1), norm(mapped - states), tolerance

    def outcome(self) -> Outcome:
        """All of it, in the precision and with the leading axes of the initial state."""
        if self.rounds:
            self.record.num_evals.add_(1)
        if self.rounds or (not self.problem.separates and len(self.value) > 1):
            # A problem may read others that have moved since its own end.
            self._measure()
        record = self.record.map(lambda t: t.reshape(self.lead))
        return Outcome(self.value.reshape(self.shape), record, self._trace())

    def _measure(self) -> None:
        """Measure the residuals at the values as they are returned."""
        self.value = self.value.to(self.dtype)
        states = self.value.nan_to_num(0.0, 0.0, 0.0)
        mapped, self.energy, _, tolerance = self._at(self.asked, states, self.shape, 2)
        # A value that is not finite, as one may be that was rounded, has no finite residual.
        status, residual = self.record.status, norm(mapped - self.value)
        lost = status == Status.NONFINITE
        if not self.rule.fixed_budget:
            small = torch.isfinite(residual) & (residual <= tolerance) & ~lost
            status = status.masked_fill(status == Status.CONVERGED, int(Status.STALLED))
            status = status.masked_fill(small, int(Status.CONVERGED))
        residual = torch.where(lost, self.record.residual.to(residual.dtype), residual)
        self.record = self.record._replace(status=status, residual=residual, tolerance=tolerance)

    def _shown(self) -> list[Tensor]:
        """The fields that a trace shows, of all problems."""
        fields = self.record.residual, self.energy, self.record.num_evals, self.value
        return [t for t in fields if t is not None]

    def _trace(self) -> Trace | None:
        """One row per evaluation; a problem with fewer evaluations than others repeats its last entry."""
        if self.events is None:
            return None
        length = int(self.record.num_evals.max()) if len(self.value) else 1
        courses = [t.repeat(length, *(1,) * t.ndim) for t in self._shown()]
        for index, rows, shown in self.events:
            for course, values in zip(courses, shown, strict=True):
                course[index, rows] = values.to(course.dtype)
        *numbers, value = courses
        return Trace.of(*(t.reshape(length, *self.lead) for t in numbers), value.reshape(length, *self.shape))


def _needed(module: str, user: str) -> Any:
    """The module of another library, imported now."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ImportError(f"{user} needs {package}: pip install '{_REQUIREMENTS[package]}'") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Foreign(Solver):
    """Base of solvers of other libraries, whose `options` are the library's own.

    A subclass defines `found`, which calls the library for rows of a `_Recorder`.
    """

    differentiable: ClassVar[bool] = False
    #: Options that follow from arguments of this library, and from which.
    reserved: ClassVar[Mapping[str, str]]
    #: Whether the library solves one problem at a time.
    alone: ClassVar[bool] = False
    #: The precision that the library works in; None for that of the problem.
    works_in: ClassVar[torch.dtype | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given, required = self._options, "be a mapping from names to values"
        _validate.require(isinstance(given, Mapping | None), "options", required, repr(given), kind=TypeError)
        # A copy of its own, which nobody can change.
        object.__setattr__(self, "options", immutable_dict(deepcopy(dict(given or {}))))
        for name, argument in self.reserved.items():
            kept = name not in self._options
            _validate.require(kept, "options", f"not hold {name!r}", repr(self._options), f"use `{argument}`")

    @property
    def _options(self) -> Any:
        return self.__dict__["options"]

    def run(self, problem: Problem, initial: Tensor, *, trace: bool = False, graph: bool = False) -> Outcome:
        name = type(self).__name__
        required = f"be False: the steps of {name} cannot be differentiated"
        _validate.require(not graph, "graph", required, graph, "use Implicit()")
        if is_batched(initial, *problem.tensors()):
            raise ValueError(
                f"{name} cannot run inside torch.vmap: it reads numbers on the host; use solve with Implicit()"
            )
        with torch.no_grad():
            recorder = _Recorder(self, problem, initial, trace)
            if self.max_steps > 0:
                for rows in recorder.rows[:, None] if self.alone else (recorder.rows,):
                    self.work(recorder, rows)
            return recorder.outcome()

    def work(self, recorder: _Recorder, rows: Tensor) -> None:
        """Solve the rows of the record.

        Where the library meets a singular matrix, it is called again for the rows in halves; one that is alone has
        stalled.
        """
        if len(rows) == 0:
            return
        try:
            answer, step, exhausted = self.found(recorder, rows)
            recorder.evaluate(rows, answer, step, last=True)
        except _Finished:
            return
        except (torch.linalg.LinAlgError, ValueError) as error:  # type: ignore[attr-defined]
            singular = isinstance(error, torch.linalg.LinAlgError | np.linalg.LinAlgError)  # type: ignore[attr-defined]
            if recorder.in_map or not (singular or "inversion yielded zero vector" in str(error)):
                raise
            if len(rows) > 1:
                for half in recorder.unsettled(rows).tensor_split(2):
                    self.work(recorder, half)
                return
            exhausted = False
        if not exhausted:
            recorder.record.status[recorder.unsettled(rows)] = int(Status.STALLED)

    def found(self, recorder: _Recorder, rows: Tensor) -> tuple[Tensor, int, bool]:
        """The library's answer for the rows, the steps to it, and whether it spent its budget."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class SciPy(_Foreign):
    """`scipy.optimize.root` on f(z) - z, each problem alone and in float64: slow, and independent of our solvers.

    Not for batches of any size: use `Anderson()` or `NewtonKrylov()`, to which this is an oracle.

    A run ends at the first evaluated state with |f(z) - z| <= atol + rtol |f(z)| (half of that for other precisions
    than float64), else with the best state evaluated. The value is cast back to the initial state's precision and
    judged there, by one more evaluation: tolerances below that precision end as STALLED. SciPy's vectors are on the
    CPU; the map is evaluated on its own device.

    Ends as MAX_STEPS when the budget is spent, as STALLED when SciPy gives up before, as DIVERGED at the first
    non-finite evaluation. `num_steps` counts evaluations for 'hybr' and 'lm', which do not tell their steps.
    `check_every` has no effect.

    Args:
        method: 'hybr', 'lm', 'df-sane' (for which max_steps bounds the evaluations, finite differences included),
            'broyden1', 'broyden2', 'anderson', 'linearmixing', 'diagbroyden', 'excitingmixing' or 'krylov'.
        options: further options of that method, as in `scipy.optimize.show_options("root", method)`.

    Raises:
        ImportError: SciPy is not installed.
        ValueError: a method that there is none of; in the run, an option that SciPy does not know.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, solve
        >>> from implicit_attention.solvers import SciPy
        >>> cosine = FixedPointMap(torch.cos, event_ndim=1)
        >>> solution = solve(cosine, torch.zeros(3, 1, dtype=torch.float64), solver=SciPy("krylov", rtol=1e-10))
        >>> bool(solution.converged.all()), round(float(solution.value[0]), 6)
        (True, 0.739085)
    """

    method: str = _validate.choice("hybr", (*_BY_EVALUATIONS, *_BY_STEPS))
    options: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)

    reserved: ClassVar[Mapping[str, str]] = {"maxiter": "max_steps", "maxfev": "max_steps"}
    alone: ClassVar[bool] = True
    works_in: ClassVar[torch.dtype | None] = torch.float64
    remedies: ClassVar[Remedies] = {
        **Solver.remedies,
        Status.STALLED: "SciPy gave up: use a larger rtol, or a solver of this library such as Anderson()",
    }

    def found(self, recorder: _Recorder, rows: Tensor) -> tuple[Tensor, int, bool]:
        optimize, calls, steps = _needed("scipy.optimize", "SciPy"), 0, 0
        tells_steps = self.method not in ("hybr", "lm")

        def state(x: Any) -> Tensor:
            return torch.as_tensor(x, dtype=torch.float64, device=recorder.initial.device)

        def residual(x: Any) -> Any:
            nonlocal calls
            z, step = state(x), min(calls, steps + 1) if tells_steps else calls
            calls += 1
            return (recorder.evaluate(rows, z, step)[0] - z).cpu().numpy()

        def count(*_: Any) -> None:
            nonlocal steps
            steps += 1

        start = recorder.initial[rows[0]].cpu().numpy().copy()
        budget, tolerances = _BY_EVALUATIONS.get(self.method, ("maxiter", {"fatol": 0.0}))
        options = {budget: self.max_steps, **tolerances, **deepcopy(self._options)}
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.filterwarnings("ignore", module=r"scipy\.")
            warnings.filterwarnings("error", category=optimize.OptimizeWarning)
            try:
                told = count if tells_steps else None
                result = optimize.root(residual, start, method=self.method, callback=told, options=options)
            except optimize.OptimizeWarning as warning:
                required = f"hold options of scipy.optimize.root(method={self.method!r})"
                received = f"{self._options!r} ({warning})"
                remedy = f"see scipy.optimize.show_options('root', {self.method!r})"
                _validate.refuse("options", required, received, remedy)
        exhausted = result.nfev >= self.max_steps if self.method in _BY_EVALUATIONS else result.status == 2
        return state(result.x), steps if tells_steps else calls, exhausted


@dataclasses.dataclass(frozen=True)
class TorchDEQ(_Foreign):
    """A solver of torchdeq's registry, one row per problem, ended and judged by this library's rule.

    Not for speed: use `Anderson()`, to which this is a comparison.

    The run ends when every problem has met |f(z) - z| <= atol + rtol |f(z)| at some state that was evaluated (torchdeq
    is also given tol = rtol in its mode 'rel', or atol in 'abs' if rtol = 0). Each problem's answer is the first such
    state, else the best one evaluated, torchdeq's own answer included; its residual was measured at that very state.
    All problems still in the run are evaluated at every step: `num_evals` counts them until the worst one is done.

    Problems that are solved, or not finite, at the initial state are left out of the run. One that leaves the finite
    numbers ends as DIVERGED with its best state. Where torchdeq meets a singular matrix, which stops its whole batch,
    the unfinished problems are run again in halves, until those that cause it are alone: they end as STALLED. So a
    problem's answer does not depend on its neighbours, up to rounding in batched linear algebra; except with
    `ls=True`, torchdeq's line search, which has one step length for the batch.

    `check_every` has no effect: torchdeq looks at the numbers at every step.

    Args:
        name: 'anderson', 'broyden', 'fixed_point_iter', 'simple_fixed_point_iter', or a name that was registered with
            `torchdeq.solver.register_solver`.
        options: further arguments of that solver by name, such as m, lam, tau, LBFGS_thres or ls.

    Raises:
        ImportError: torchdeq is not installed.
        ValueError: a name that is not registered, an option that the solver does not have (torchdeq ignores those).

    Reference: Geng and Kolter (2023), TorchDEQ 0.1.0.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, solve
        >>> from implicit_attention.solvers import TorchDEQ
        >>> cosine = FixedPointMap(torch.cos, event_ndim=1)
        >>> solution = solve(cosine, torch.zeros(3, 1), solver=TorchDEQ("broyden"))
        >>> bool(solution.converged.all()), round(float(solution.value[0]), 3)
        (True, 0.739)
    """

    name: str
    options: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)

    reserved: ClassVar[Mapping[str, str]] = {
        "func": "problem",
        "x0": "initial",
        "max_iter": "max_steps",
        "tol": "rtol or atol",
        "stop_mode": "rtol or atol",
        "indexing": "trace",
        "return_final": "rtol=0 and atol=0",
    }
    remedies: ClassVar[Remedies] = {
        **Solver.remedies,
        Status.STALLED: "torchdeq gave up: use a larger rtol, or a solver of this library such as Anderson()",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        # Torchdeq ignores all that a solver does not name.
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        _, *parameters = inspect.signature(self._function()).parameters.values()
        valid = [p.name for p in parameters if p.kind in named and p.name not in self.reserved]
        required = f"hold options of torchdeq's {self.name!r}: {', '.join(valid) or 'there are none'}"
        for option in self._options:
            _validate.require(option in valid, "options", required, repr(option))
        few = self.name == "anderson" and self.fixed_budget and 0 < self.max_steps < _ANDERSON_FIRST
        required = f"be 0 or >= {_ANDERSON_FIRST} for torchdeq's 'anderson' with a fixed budget"
        remedy = "with fewer it returns the initial state"
        _validate.require(not few, "max_steps", required, self.max_steps, remedy)

    def _function(self) -> Callable[..., Any]:
        registry: dict[str, Callable[..., Any]] = _needed("torchdeq.solver", "TorchDEQ")._solvers
        _validate.check_choice("name", self.name, sorted(registry))
        return registry[self.name]

    def found(self, recorder: _Recorder, rows: Tensor) -> tuple[Tensor, int, bool]:
        function, start, calls = self._function(), recorder.initial[rows], 0

        def mapped(x: Tensor, tau: float = 1.0) -> Tensor:
            nonlocal calls
            if transforms_active():
                return recorder.evaluate(rows, x, calls)
            calls += 1
            known = calls == 1 and torch.equal(x, start)
            fx = recorder.first_mapped[rows] if known else recorder.evaluate(rows, x, calls - 1)
            # A problem that has left the finite numbers stands still, so that it does not disturb the others.
            fx = torch.where(torch.isfinite(fx).all(-1, keepdim=True), fx, x)
            return fx if tau == 1 else tau * fx + (1 - tau) * x

        answer = function(mapped, x0=start, max_iter=self.max_steps, **self._stopping(function), **self._options)[0]
        return answer, calls, calls >= self.max_steps

    def _stopping(self, function: Callable[..., Any]) -> dict[str, Any]:
        if self.fixed_budget:
            parameters = inspect.signature(function).parameters
            takes = "return_final" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            return {"tol": 0.0, "stop_mode": "abs", **({"return_final": True} if takes else {})}
        # A damped step is shorter than the residual by tau.
        tau = self._options.get("tau", 1.0)
        return {"tol": (self.rtol or self.atol) * min(1.0, tau), "stop_mode": "rel" if self.rtol > 0 else "abs"}


# Our solvers in torchdeq. They need no energy: a torchdeq model has none.
_SOLVERS: dict[str, type[Solver]] = {
    "picard": Picard,
    "anderson": Anderson,
    "broyden": Broyden,
    "newton_krylov": NewtonKrylov,
}


def register_with_torchdeq(prefix: str = "implicit_") -> tuple[str, ...]:
    """Make our solvers known to torchdeq, as `torchdeq.get_deq(f_solver="implicit_anderson")`; returns their names.

    Not for problems of this library, which take its solvers as they are: use `solve(problem, start,
    solver=Anderson())`.

    They are implicit_picard, implicit_anderson, implicit_broyden and implicit_newton_krylov. Every sample of the batch
    (the first axis of x0; of a vector each entry) is one problem, and stops on its own. `solver_kwargs` of the model's
    call are their options (history, guard, ...); unknown ones raise. Registering again changes nothing.

    newton_krylov differentiates f by torch.func, which torchdeq's backward map does not allow: use it as `f_solver`,
    not as `b_solver`.

    Examples:
        >>> import torch, torchdeq
        >>> from implicit_attention.solvers import register_with_torchdeq
        >>> register_with_torchdeq()[:2]
        ('implicit_picard', 'implicit_anderson')
        >>> deq = torchdeq.get_deq(f_solver="implicit_anderson")
        >>> states, info = deq(torch.cos, torch.zeros(3, 1))
        >>> round(float(states[0][0]), 3)
        0.739
    """
    _validate.require(isinstance(prefix, str), "prefix", "be a string", repr(prefix))
    registry = _needed("torchdeq.solver", "register_with_torchdeq")
    for name in _SOLVERS:
        registry.register_solver(prefix + name, _as_torchdeq(name))
    return tuple(prefix + name for name in _SOLVERS)


@functools.cache
def _as_torchdeq(name: str) -> Callable[..., Any]:
    """One of our solvers as a function with torchdeq's signature."""
    kind = _SOLVERS[name]
    fields = [f.name for f in dataclasses.fields(kind) if f.name not in ("rtol", "atol", "max_steps")]

    def solver(
        func: Callable[[Tensor], Tensor],
        x0: Tensor,
        max_iter: int = 50,
        tol: float = 1e-3,
        stop_mode: str = "abs",
        indexing: list[int] | None = None,
        return_final: bool = False,
        **options: Any,
    ) -> tuple[Tensor, list[Tensor], Any]:
        _validate.check_float_tensor("x0", x0)
        _validate.check_choice("stop_mode", stop_mode, ("abs", "rel"))
        for option in options:
            _validate.check_choice(f"option of {kind.__name__}", option, fields)
        # torchdeq runs all steps at tol = 0 too, but returns the best state; a fixed budget of ours returns the last.
        tol = 0.0 if return_final else max(tol, torch.finfo(x0.dtype).tiny)
        rtol, atol = (tol, 0.0) if stop_mode == "rel" else (0.0, tol)
        chosen = kind(max_steps=int(max_iter), rtol=rtol, atol=atol, **options)
        event = x0.shape[1:]
        errors, sizes = list[Tensor](), list[Tensor]()

        def mapped(z: Tensor) -> Tensor:
            fz = func(z)
            if not transforms_active():  # linearisations are not steps
                errors.append(norm(flat(fz - z, event).detach()))
                sizes.append(norm(flat(fz, event).detach()))
            return fz

        outcome = chosen.run(FixedPointMap(mapped, event_ndim=len(event)), x0, trace=bool(indexing))
        # One state per index: the answer itself after a sample has converged, and after the end.
        states = () if outcome.trace is None else outcome.trace.value
        trajectory = [states[min(k, len(states) - 1)] for k in indexing or ()]
        return outcome.value, trajectory, _statistics(errors, sizes, outcome.record, int(max_iter))

    shown = [p for p in inspect.signature(solver).parameters.values() if p.kind is not p.VAR_KEYWORD]
    extra = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in fields]
    solver.__signature__ = inspect.Signature([*shown, *extra])  # type: ignore[attr-defined]
    solver.__name__ = solver.__qualname__ = f"{kind.__name__.lower()}_solver"
    solver.__doc__ = f"`implicit_attention.solvers.{kind.__name__}` with the signature of torchdeq's solvers."
    return solver


def _statistics(errors: list[Tensor], sizes: list[Tensor], record: Record, steps: int) -> Any:
    """The entries of torchdeq's SolverStat, from |f(z) - z| and |f(z)| at every evaluation, (samples)."""
    at = record.num_steps.reshape(-1, 1).to(torch.int64)
    # An evaluation of all at the states that are returned is no step.
    length = min(len(errors), steps + 1)
    absolute, size = (torch.stack(each[:length], dim=-1).reshape(len(at), length) for each in (errors, sizes))
    # Evaluations of a sample after it has converged are no part of its course.
    after = torch.arange(length, device=at.device) > at
    after = after & (record.status.reshape(-1, 1) == Status.CONVERGED)
    found: dict[str, Tensor] = {}
    for name, course in (("abs", absolute), ("rel", absolute / (size + 1e-9))):
        lowest = course.gather(1, at)
        # As long as with torchdeq's own solvers.
        rest = lowest.expand(-1, steps + 1 - length)
        found[f"{name}_lowest"] = lowest.squeeze(1)
        found[f"{name}_trace"] = torch.cat([torch.where(after, lowest, course), rest], dim=1)
    from torchdeq.solver.stat import SolverStat

    return SolverStat(**found, nstep=at.squeeze(1).to(torch.float32))
