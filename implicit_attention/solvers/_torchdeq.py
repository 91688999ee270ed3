"""torchdeq's solvers for our problems, and our solvers for torchdeq's models."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import _validate
from .._autograd import transforms_active
from ..fixed_point_map import FixedPointMap
from ..problem import Problem
from ..solution import Remedies
from ..status import Status
from ._recorder import Finished, Options, Recorder, check_plain, needed
from .anderson import Anderson
from .broyden import Broyden
from .loop import Outcome, Solver
from .newton import NewtonKrylov
from .picard import Picard

REQUIREMENT = "torchdeq>=0.1.0"
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


@dataclasses.dataclass(frozen=True)
class TorchDEQ(Solver):
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

    differentiable: ClassVar[bool] = False
    remedies: ClassVar[Remedies] = {
        **Solver.remedies,
        Status.STALLED: "torchdeq gave up: use a larger rtol, or a solver of this library such as Anderson()",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "options", Options(self.options))
        self._options.check_reserved(_RESERVED)
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

    @property
    def _options(self) -> Options:
        assert isinstance(self.options, Options)
        return self.options

    def _function(self) -> Callable[..., Any]:
        registry = _registry("TorchDEQ")
        _validate.check_choice("name", self.name, sorted(registry))
        return registry[self.name]

    def run(self, problem: Problem, initial: Tensor, *, trace: bool = False, graph: bool = False) -> Outcome:
        check_plain(self, problem, initial, graph)
        with torch.no_grad():
            recorder = Recorder(self, problem, initial, trace=trace)
            if self.max_steps > 0:
                self._solve(recorder, recorder.unsettled(recorder.rows))
            return recorder.outcome()

    def _solve(self, recorder: Recorder, rows: Tensor) -> None:
        if len(rows) == 0:
            return
        function, part, start = self._function(), recorder.part(rows), recorder.initial[rows]
        calls = 0

        def mapped(x: Tensor, tau: float = 1.0) -> Tensor:
            nonlocal calls
            if transforms_active():
                return recorder.evaluate(part, x, calls)
            calls += 1
            known = calls == 1 and torch.equal(x, start)
            fx = recorder.first_mapped[rows] if known else recorder.evaluate(part, x, calls - 1)
            if len(recorder.unsettled(rows)) == 0:
                raise Finished
            # A problem that has left the finite numbers stands still, so that it does not disturb the others.
            fx = torch.where(torch.isfinite(fx).all(-1, keepdim=True), fx, x)
            return fx if tau == 1 else tau * fx + (1 - tau) * x

        try:
            answer = function(mapped, x0=start, max_iter=self.max_steps, **self._stopping(function), **self._options)[0]
            recorder.evaluate(part, answer, calls, last=True)
        except Finished:
            return
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            if recorder.in_map:
                raise
            if len(rows) == 1:
                recorder.stalled[rows] = True
            else:
                for half in recorder.unsettled(rows).tensor_split(2):
                    self._solve(recorder, half)
            return
        if calls < self.max_steps:
            recorder.stalled[recorder.unsettled(rows)] = True

    def _stopping(self, function: Callable[..., Any]) -> dict[str, Any]:
        if self.fixed_budget:
            final = {"return_final": True} if _takes(function, "return_final") else {}
            return {"tol": 0.0, "stop_mode": "abs", **final}
        # A damped step is shorter than the residual by tau.
        tau = self._options.get("tau", 1.0)
        return {"tol": (self.rtol or self.atol) * min(1.0, tau), "stop_mode": "rel" if self.rtol > 0 else "abs"}


def _registry(user: str) -> dict[str, Callable[..., Any]]:
    registry: dict[str, Callable[..., Any]] = needed("torchdeq.solver", REQUIREMENT, user)._solvers
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
    registry = needed("torchdeq.solver", REQUIREMENT, "register_with_torchdeq")
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
        module = needed("torchdeq.solver.stat", REQUIREMENT, "register_with_torchdeq")
        return module.SolverStat(**errors, nstep=steps.to(torch.float32))


def _per_sample(flags: Tensor, z: Tensor) -> Tensor:
    """One flag per sample, shaped to broadcast with a batch z of torchdeq."""
    return flags.reshape(*z.shape[:1], *(1,) * (z.ndim - 1))
