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
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import _validate
from .._autograd import is_batched, transforms_active
from .._norm import norm
from ..fixed_point_map import FixedPointMap
from ..problem import Problem, evaluate_pure
from ..solution import Record, Remedies, Trace
from ..status import Status
from ._rows import flat
from .anderson import Anderson
from .broyden import Broyden
from .loop import Outcome, Solver
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
_METHODS = (*_BY_EVALUATIONS, *_BY_STEPS)
# Arguments of a torchdeq solver that follow from ours.
_RESERVED = {
    "func": "problem",
    "x0": "initial",
    "max_iter": "max_steps",
    "tol": "rtol or atol",
    "stop_mode": "rtol or atol",
    "indexing": "trace",
    "return_final": "rtol=0 and atol=0",
}
# torchdeq's Anderson spends this many evaluations before its loop, and returns x0 if that is all it has.
_ANDERSON_FIRST = 3


class _Finished(Exception):
    """Raised out of a foreign solver when nothing is left for it to do."""


class _Part(NamedTuple):
    """Some of the problems, and where they sit in an object that evaluates them.

    base (Q, n) are states of all problems of `problem`, of the shape `shape`; `position` are the places of `rows`.
    """

    rows: Tensor
    problem: Problem
    base: Tensor
    shape: torch.Size
    position: Tensor


class _Recorder:
    """Evaluates f for a foreign solver and records the same as the library's own loop.

    All leading axes are one, P problems of n numbers each. The record of a problem is closed at the first state that
    meets the tolerance (or at the first non-finite one), so it does not depend on how long its neighbours take.

    Args:
        strictness: part of the tolerance at which a record is closed.
    """

    def __init__(
        self, solver: Solver, problem: Problem, initial: Tensor, *, trace: bool = False, strictness: float = 1.0
    ) -> None:
        event = initial.shape[initial.ndim - problem.event_ndim :]
        self.solver, self.problem, self.strictness = solver, problem, strictness
        self.shape, self.lead = initial.shape, initial.shape[: initial.ndim - len(event)]
        self.initial = flat(initial, event).reshape(self.lead.numel(), event.numel())
        self.rows = torch.arange(len(self.initial), device=initial.device)
        self.value = self.initial.clone()
        self.residual = initial.new_full((len(self.value),), torch.inf)
        self.tolerance = torch.zeros_like(self.residual)
        self.num_steps = torch.zeros_like(self.residual, dtype=torch.int32)
        self.num_evals = torch.zeros_like(self.num_steps)
        self.done, self.broken, self.stalled = (torch.zeros_like(self.residual, dtype=torch.bool) for _ in range(3))
        self.energy = self.residual.clone() if trace and problem.has_energy else None
        self.events: list[tuple[Tensor, Tensor, Tensor | None, Tensor]] | None = [] if trace else None
        self.in_map = False
        self.first_mapped = self.evaluate(self.part(self.rows), self.initial, 0)
        self.unreadable = self.broken.clone()

    # Parts of the batch, and their evaluation.

    def part(self, rows: Tensor) -> _Part:
        """`rows` as problems of the whole."""
        return _Part(rows, self.problem, self.initial, self.shape, rows)

    def alone(self, row: int) -> _Part:
        """One problem, evaluated with as few others as the whole allows."""
        rows = torch.tensor([row], device=self.initial.device)
        if not self.lead:
            return self.part(rows)
        batch, last = divmod(row, self.lead[-1])
        index = rows.new_full((*self.lead[:-1], 1), last)
        selected = self.problem.select(index)
        if selected is None:
            return self.part(rows)
        axis = len(self.lead) - 1
        base = self.initial.reshape(self.shape).narrow(axis, last, 1)
        states = base.reshape(self.lead[:-1].numel(), self.initial.shape[1])
        return _Part(rows, selected, states, base.shape, rows.new_tensor([batch]))

    def unsettled(self, rows: Tensor) -> Tensor:
        """Those of `rows` in which something is left to do."""
        return rows[~(self.done | self.broken | self.stalled | (self.residual == 0))[rows]]

    def evaluate(self, part: _Part, z: Tensor, step: int, *, last: bool = False) -> Tensor:
        """f(z) of the states z (len(rows), n), recorded. `last`: z is the foreign solver's answer.

        Inside a torch.func transform f is being linearised, which is no step: nothing is recorded.
        """
        z = z.reshape(len(part.rows), part.base.shape[1])
        state = part.base.index_copy(0, part.position, z)
        self.in_map = True
        mapped, energy = evaluate_pure(
            part.problem, state.reshape(part.shape), energy=self.energy is not None, call=step
        )
        self.in_map = False
        mapped = mapped.reshape(state.shape)[part.position].to(state.dtype)
        if not transforms_active():
            self._observe(part, z.detach(), mapped.detach(), energy, step, last)
        return mapped

    def tried(self, part: _Part, z: Tensor, step: int) -> Tensor:
        """`evaluate`, after which the solver is left where nothing is left for it to do."""
        mapped = self.evaluate(part, z, step)
        if len(self.unsettled(part.rows)) == 0:
            raise _Finished
        return mapped

    def _observe(self, part: _Part, z: Tensor, mapped: Tensor, energy: Tensor | None, step: int, last: bool) -> None:
        rows = part.rows
        residual = norm(mapped - z)
        tolerance = self.solver.atol + self.solver.rtol * norm(mapped)
        finite = torch.isfinite(residual) & torch.isfinite(tolerance)
        first = self.num_evals[rows] == 0
        met = finite & (residual <= self.strictness * tolerance) & (not self.solver.fixed_budget)
        better = first | met | finite & ((residual < self.residual[rows]) | (last and self.solver.fixed_budget))
        better = better & ~(self.done | self.broken)[rows]
        # As in the library's own loop: a map that is not finite at the initial state makes the value NaN.
        z = torch.where((first & ~finite)[:, None], torch.nan, z)
        self.value[rows] = torch.where(better[:, None], z, self.value[rows])
        self.residual[rows] = torch.where(better, residual, self.residual[rows])
        self.tolerance[rows] = torch.where(better, tolerance, self.tolerance[rows])
        self.num_steps[rows] = torch.where(better, min(step, self.solver.max_steps), self.num_steps[rows])
        self.num_evals[rows] += 1
        if self.energy is not None and energy is not None:
            self.energy[rows] = torch.where(better, energy.reshape(-1)[part.position], self.energy[rows])
        self.broken[rows] |= ~finite & ~self.done[rows]
        self.done[rows] |= met & better
        self._take_down(rows)

    def _take_down(self, rows: Tensor) -> None:
        if self.events is not None:
            energy = None if self.energy is None else self.energy[rows]
            self.events.append((rows, self.residual[rows], energy, self.value[rows]))

    # The results.

    def round_to(self, problem: Problem, dtype: torch.dtype) -> None:
        """Round the values to another precision, and measure the residuals of `problem` at the rounded values."""
        self._measure(problem, self.value.to(dtype))
        self.num_evals += 1
        self._take_down(self.rows)

    def _measure(self, problem: Problem, value: Tensor) -> None:
        states = value.nan_to_num(0.0, 0.0, 0.0).reshape(self.shape)
        mapped, energy = problem.evaluate(states, energy=self.energy is not None)
        mapped = mapped.reshape(value.shape)
        residual = norm(mapped - value)
        self.value, self.residual = value, torch.where(self.unreadable, self.residual.to(value.dtype), residual)
        self.tolerance = self.solver.atol + self.solver.rtol * norm(mapped)
        self.energy = None if energy is None else energy.reshape(-1)
        if not self.solver.fixed_budget:
            self.stalled |= self.done
            self.done = torch.isfinite(self.residual) & (self.residual <= self.tolerance)

    def outcome(self) -> Outcome:
        """All of it, with the leading axes of the initial state."""
        if not self.problem.separates and len(self.rows) > 1 and self.value.dtype == self.initial.dtype:
            # A problem may read others that have moved since its own end.
            self._measure(self.problem, self.value)
        status = torch.full_like(self.num_steps, int(self.solver.exhausted), dtype=torch.int8)
        status[self.stalled] = int(Status.STALLED)
        status[self.broken] = int(Status.DIVERGED)
        status[self.done] = int(Status.CONVERGED)
        status[self.unreadable] = int(Status.NONFINITE)
        record = Record(status, self.residual, self.tolerance, self.num_steps, self.num_evals)
        return Outcome(self.value.reshape(self.shape), record.map(lambda t: t.reshape(self.lead)), self._trace())

    def _trace(self) -> Trace | None:
        """One row per evaluation; a problem with fewer evaluations than others repeats its last entry."""
        if self.events is None:
            return None
        length = int(self.num_evals.max()) if len(self.num_evals) else 1
        residual, value = self.residual.repeat(length, 1), self.value.repeat(length, 1, 1)
        energy = None if self.energy is None else self.energy.repeat(length, 1)
        count = torch.zeros_like(self.num_evals, dtype=torch.int64)
        for rows, best, best_energy, state in self.events:
            residual[count[rows], rows] = best.to(residual.dtype)
            value[count[rows], rows] = state.to(value.dtype)
            if energy is not None and best_energy is not None:
                energy[count[rows], rows] = best_energy.to(energy.dtype)
            count[rows] += 1
        spent = torch.arange(1, length + 1, dtype=torch.int32, device=residual.device)[:, None].minimum(self.num_evals)
        per_problem = [t.reshape(length, *self.lead) for t in (residual, energy, spent) if t is not None]
        return Trace.of(*per_problem, value.reshape(length, *self.shape))


class _Options(Mapping[str, Any]):
    """Options of a foreign solver: a copy that cannot be changed, hashable even where the values are not."""

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(_validate.message("options", "be a mapping from names to values", repr(given)))
        self._items = deepcopy(dict(given or {}))

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items))

    def __repr__(self) -> str:
        return repr(self._items)


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

    A subclass defines `work`, which calls the library by `call` for rows of a `_Recorder`.
    """

    differentiable: ClassVar[bool] = False
    #: Options that follow from arguments of this library, and from which.
    reserved: ClassVar[Mapping[str, str]]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "options", _Options(self.__dict__["options"]))
        for name, argument in self.reserved.items():
            kept = name not in self._options
            _validate.require(kept, "options", f"not hold {name!r}", repr(self._options), f"use `{argument}`")

    @property
    def _options(self) -> _Options:
        options: _Options = self.__dict__["options"]
        return options

    def run(self, problem: Problem, initial: Tensor, *, trace: bool = False, graph: bool = False) -> Outcome:
        name = type(self).__name__
        required = f"be False: the steps of {name} cannot be differentiated"
        _validate.require(not graph, "graph", required, graph, "use Implicit()")
        if is_batched(initial, *problem.tensors()):
            raise ValueError(
                f"{name} cannot run inside torch.vmap: it reads numbers on the host; use solve with Implicit()"
            )
        with torch.no_grad():
            recorder = self.recorder(problem, initial, trace)
            if self.max_steps > 0:
                self.work(recorder, recorder.unsettled(recorder.rows))
            if recorder.value.dtype != initial.dtype:
                recorder.round_to(problem, initial.dtype)
            return recorder.outcome()

    def recorder(self, problem: Problem, initial: Tensor, trace: bool) -> _Recorder:
        """The record of a solve that begins."""
        return _Recorder(self, problem, initial, trace=trace)

    def work(self, recorder: _Recorder, rows: Tensor) -> None:
        """Solve the rows of the record."""
        raise NotImplementedError(f"{type(self).__name__} must define work(recorder, rows)")

    def call(self, recorder: _Recorder, part: _Part, library: Callable[[], tuple[Tensor, int, bool]]) -> None:
        """Call the library for some rows: it returns its answer, the steps to it, and whether it spent its budget.

        Where it meets a singular matrix, it is called again for the rows in halves; one that is alone has stalled.
        """
        rows = part.rows
        try:
            answer, step, exhausted = library()
            recorder.evaluate(part, answer, step, last=True)
        except _Finished:
            return
        except (torch.linalg.LinAlgError, ValueError) as error:  # type: ignore[attr-defined]
            singular = isinstance(error, torch.linalg.LinAlgError | np.linalg.LinAlgError)  # type: ignore[attr-defined]
            if recorder.in_map or not (singular or "inversion yielded zero vector" in str(error)):
                raise
            if len(rows) == 1:
                recorder.stalled[rows] = True
            else:
                for half in recorder.unsettled(rows).tensor_split(2):
                    self.work(recorder, half)
            return
        if not exhausted:
            recorder.stalled[recorder.unsettled(rows)] = True


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

    method: str = "hybr"
    options: Mapping[str, Any] | None = None

    reserved: ClassVar[Mapping[str, str]] = {"maxiter": "max_steps", "maxfev": "max_steps"}
    remedies: ClassVar[Remedies] = {
        **Solver.remedies,
        Status.STALLED: "SciPy gave up: use a larger rtol, or a solver of this library such as Anderson()",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.check_choice("method", self.method, _METHODS)

    def recorder(self, problem: Problem, initial: Tensor, trace: bool) -> _Recorder:
        wide = problem.replace(*(t.double() if t.is_floating_point() else t for t in problem.tensors()))
        strictness = 1.0 if initial.dtype == torch.float64 else 0.5
        return _Recorder(self, wide, initial.double(), trace=trace, strictness=strictness)

    def work(self, recorder: _Recorder, rows: Tensor) -> None:
        for row in rows.tolist():
            part = recorder.alone(row)
            self.call(recorder, part, functools.partial(self._found, recorder, part))

    def _found(self, recorder: _Recorder, part: _Part) -> tuple[Tensor, int, bool]:
        calls = steps = 0
        counted = self.method not in ("hybr", "lm")

        def residual(x: Any) -> Any:
            nonlocal calls
            z = state(x)
            step = min(calls, steps + 1) if counted else calls
            calls += 1
            return (recorder.tried(part, z, step)[0] - z).cpu().numpy()

        def state(x: Any) -> Tensor:
            return torch.as_tensor(x, dtype=torch.float64).to(recorder.initial.device)

        def count(*_: Any) -> None:
            nonlocal steps
            steps += 1

        start = recorder.initial[part.rows[0]].cpu().numpy().copy()
        result = self._root(residual, start, count if counted else None)
        exhausted = result.nfev >= self.max_steps if self.method in _BY_EVALUATIONS else result.status == 2
        return state(result.x), steps if counted else calls, exhausted

    def _root(self, residual: Any, start: Any, callback: Any) -> Any:
        optimize = _needed("scipy.optimize", "SciPy")
        budget, tolerances = _BY_EVALUATIONS.get(self.method, ("maxiter", {"fatol": 0.0}))
        options = {budget: self.max_steps, **tolerances, **deepcopy(dict(self._options))}
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.filterwarnings("ignore", module=r"scipy\.")
            warnings.filterwarnings("error", category=optimize.OptimizeWarning)
            try:
                return optimize.root(residual, start, method=self.method, callback=callback, options=options)
            except optimize.OptimizeWarning as warning:
                raise ValueError(
                    _validate.message(
                        "options",
                        f"hold options of scipy.optimize.root(method={self.method!r})",
                        f"{self._options!r} ({warning})",
                        f"see scipy.optimize.show_options('root', {self.method!r})",
                    )
                ) from warning


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
    options: Mapping[str, Any] | None = None

    reserved: ClassVar[Mapping[str, str]] = _RESERVED
    remedies: ClassVar[Remedies] = {
        **Solver.remedies,
        Status.STALLED: "torchdeq gave up: use a larger rtol, or a solver of this library such as Anderson()",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        valid = _options_of(self._function())
        for option in self._options:
            _validate.require(
                option in valid,
                "options",
                f"hold options of torchdeq's {self.name!r}: {', '.join(valid) or 'there are none'}",
                repr(option),
            )
        _validate.require(
            not (self.name == "anderson" and self.fixed_budget and 0 < self.max_steps < _ANDERSON_FIRST),
            "max_steps",
            f"be 0 or >= {_ANDERSON_FIRST} for torchdeq's 'anderson' with a fixed budget",
            self.max_steps,
            "with fewer it returns the initial state",
        )

    def _function(self) -> Callable[..., Any]:
        registry = _registry("TorchDEQ")
        _validate.check_choice("name", self.name, sorted(registry))
        return registry[self.name]

    def work(self, recorder: _Recorder, rows: Tensor) -> None:
        if len(rows):
            part = recorder.part(rows)
            self.call(recorder, part, functools.partial(self._found, recorder, part))

    def _found(self, recorder: _Recorder, part: _Part) -> tuple[Tensor, int, bool]:
        function, start, calls = self._function(), recorder.initial[part.rows], 0

        def mapped(x: Tensor, tau: float = 1.0) -> Tensor:
            nonlocal calls
            if transforms_active():
                return recorder.evaluate(part, x, calls)
            calls += 1
            known = calls == 1 and torch.equal(x, start)
            fx = recorder.first_mapped[part.rows] if known else recorder.tried(part, x, calls - 1)
            # A problem that has left the finite numbers stands still, so that it does not disturb the others.
            fx = torch.where(torch.isfinite(fx).all(-1, keepdim=True), fx, x)
            return fx if tau == 1 else tau * fx + (1 - tau) * x

        answer = function(mapped, x0=start, max_iter=self.max_steps, **self._stopping(function), **self._options)[0]
        return answer, calls, calls >= self.max_steps

    def _stopping(self, function: Callable[..., Any]) -> dict[str, Any]:
        if self.fixed_budget:
            final = {"return_final": True} if _takes(function, "return_final") else {}
            return {"tol": 0.0, "stop_mode": "abs", **final}
        # A damped step is shorter than the residual by tau.
        tau = self._options.get("tau", 1.0)
        return {"tol": (self.rtol or self.atol) * min(1.0, tau), "stop_mode": "rel" if self.rtol > 0 else "abs"}


def _registry(user: str) -> dict[str, Callable[..., Any]]:
    registry: dict[str, Callable[..., Any]] = _needed("torchdeq.solver", user)._solvers
    return registry


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _options_of(function: Callable[..., Any]) -> list[str]:
    """The options that a torchdeq solver names; it ignores all others."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    _, *parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in named and p.name not in _RESERVED]


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
        course = _Course(func, x0, indexing or [], return_final)
        problem = FixedPointMap(course.mapped, event_ndim=max(x0.ndim - 1, 0))
        outcome = chosen.run(problem, x0)
        return outcome.value, course.trajectory(outcome), course.statistics(outcome, int(max_iter))

    shown = [p for p in inspect.signature(solver).parameters.values() if p.kind is not p.VAR_KEYWORD]
    extra = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in fields]
    solver.__signature__ = inspect.Signature([*shown, *extra])  # type: ignore[attr-defined]
    solver.__name__ = solver.__qualname__ = f"{kind.__name__.lower()}_solver"
    solver.__doc__ = f"`implicit_attention.solvers.{kind.__name__}` with the signature of torchdeq's solvers."
    return solver


class _Course:
    """Torchdeq's report of a run: errors after every step, and the best (or latest) states after some of them."""

    def __init__(self, func: Callable[[Tensor], Tensor], x0: Tensor, indexing: list[int], latest: bool) -> None:
        self.func, self.indexing, self.latest = func, indexing, latest
        self.samples = x0.shape[0] if x0.ndim >= 2 else x0.numel()
        self.absolute: list[Tensor] = []
        self.relative: list[Tensor] = []
        self.best, self.states = x0, list[Tensor]()
        self.lowest = torch.full((self.samples,), torch.inf, dtype=x0.dtype, device=x0.device)

    def mapped(self, z: Tensor) -> Tensor:
        fz = self.func(z)
        if not transforms_active():  # linearisations are not steps
            self._take_down(z.detach(), fz.detach())
        return fz

    def _take_down(self, z: Tensor, fz: Tensor) -> None:
        error, size = (self._norm(t) for t in (fz - z, fz))
        if self.indexing:
            lower = (error < self.lowest) | self.latest
            self.lowest = torch.where(lower, error, self.lowest)
            self.best = torch.where(_per_sample(lower, z), z, self.best)
            if len(self.absolute) in self.indexing:
                self.states.append(self.best)
        self.absolute.append(error)
        self.relative.append(error / (size + 1e-9))

    def _norm(self, t: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(t.reshape(self.samples, -1 if t.numel() else 0), dim=-1)
        return norm

    def trajectory(self, outcome: Outcome) -> list[Tensor]:
        """One state per index: the answer itself after a sample has converged, and after the end."""
        value, record = outcome.value, outcome.record
        ended = [record.num_steps.masked_fill(record.status != Status.CONVERGED, k + 1) <= k for k in self.indexing]
        states = [torch.where(_per_sample(e, value), value, s) for e, s in zip(ended, self.states, strict=False)]
        return states + [value] * (len(self.indexing) - len(states))

    def statistics(self, outcome: Outcome, max_iter: int) -> Any:
        """The entries of torchdeq's SolverStat, the traces max_iter + 1 long as with its own solvers."""
        steps = outcome.record.num_steps.reshape(self.samples)
        at = steps.to(torch.int64)[:, None]
        # Evaluations of a sample after it has converged are no part of its course.
        after = torch.arange(len(self.absolute), device=at.device) > at
        after = after & (outcome.record.status.reshape(self.samples, 1) == Status.CONVERGED)
        errors: dict[str, Tensor] = {}
        for name, trace in (("abs", self.absolute), ("rel", self.relative)):
            full = torch.stack(trace, dim=1)
            lowest = full.gather(1, at)
            rest = lowest.expand(-1, max_iter + 1 - len(trace))
            errors[f"{name}_lowest"] = lowest.squeeze(1)
            errors[f"{name}_trace"] = torch.cat([torch.where(after, lowest, full), rest], dim=1)
        module = _needed("torchdeq.solver.stat", "register_with_torchdeq")
        return module.SolverStat(**errors, nstep=steps.to(torch.float32))


def _per_sample(flags: Tensor, z: Tensor) -> Tensor:
    """One flag per sample, shaped to broadcast with a batch z of torchdeq."""
    return flags.reshape(*z.shape[:1], *(1,) * (z.ndim - 1))
