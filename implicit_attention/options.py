"""`SolveOptions`: the options of every function and layer that solves for an equilibrium."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from typing_extensions import TypedDict, Unpack

from . import _validate
from ._solve import Plan, plan_of
from .adjoints import Adjoint, Unrolled
from .failure import OnFailure, check_on_failure
from .kernels.problem import Impl, check_impl
from .solvers import Anderson, Solver


class SolveKeywords(TypedDict, total=False):
    """The fields of `SolveOptions` as keyword arguments (`**options: Unpack[SolveKeywords]`)."""

    solver: Solver | None
    adjoint: Adjoint | None
    impl: Impl | None
    max_steps: int | None
    on_failure: OnFailure | None


_NAMES = tuple(SolveKeywords.__annotations__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SolveOptions(_validate.Options):
    """The options of a solve and of its gradient.

    Functions and layers take these options as keyword arguments, `ImplicitAttention(64, 4, solver=Picard())`. A layer
    keeps them as `layer.options`, and each call of it may override some: `layer(x, max_steps=0)`. An option that is
    left out, or None, stays as it is. A solver that is given to a call brings its own `max_steps`.

    Args:
        solver: the method that finds the equilibrium; default `Anderson()`, with rtol 1e-3 where a card's
            kernels solve half precision.
        adjoint: how the gradient is computed; default `Implicit()`, the exact gradient of an equilibrium, and
            `Unrolled()` for a solver with a fixed budget of steps (rtol = atol = 0).
        impl: which implementation runs. "auto" chooses. "reference" writes every product out. "native" is compiled for
            this CPU, and "triton" one kernel for the whole solve; each raises where it cannot be used.
        max_steps: replaces the solver's `max_steps`. With 0 nothing is solved: the answer is one explicit step of
            attention, whatever the anchor.
        on_failure: what to do about queries without an answer, and about gradients that did not converge: "raise",
            "warn" (the default), "ignore" or a `FailurePolicy`. A layer warns of its first failing call, and then of
            the 10th, 100th, 1000th, ...

    Raises:
        TypeError: an option that does not exist, or of another type. ValueError: a value out of range.

    Examples:
        >>> from implicit_attention import ImplicitAttention, Picard
        >>> layer = ImplicitAttention(8, heads=2, solver=Picard(max_steps=100))
        >>> layer.options.effective_solver.max_steps
        100
        >>> layer.options.override(max_steps=0).explicit
        True

    Not for `solve`, which takes solver and adjoint themselves.
    """

    solver: Solver | None = _validate.instance(None, Solver, "be None or a Solver", "for example Anderson()")
    adjoint: Adjoint | None = _validate.instance(None, Adjoint, "be None or an Adjoint", "for example Implicit()")
    impl: Impl = _validate.option(check_impl, "auto")
    max_steps: int | None = _validate.integer(None, low=0)
    on_failure: OnFailure = _validate.option(check_on_failure, "warn")

    def override(self, **given: Unpack[SolveKeywords]) -> SolveOptions:
        """These options with some replaced; None keeps an option as it is."""
        for name in given:
            if name not in _NAMES:
                raise TypeError(
                    f"unexpected keyword argument {name!r}; beside the arguments that are named in the signature there "
                    f"are the options of the solve: {', '.join(_NAMES)} (see SolveOptions)"
                )
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if "solver" in changes:
            changes.setdefault("max_steps", None)
        return dataclasses.replace(self, **changes) if changes else self

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def plan(self) -> Plan:
        """The choice that these options make for every call."""
        return plan_of(self.effective_solver, self.effective_adjoint, self.impl)

    @property
    def explicit(self) -> bool:
        """Whether nothing is solved."""
        return self.effective_solver.max_steps == 0

    @property
    def effective_solver(self) -> Solver:
        """The solver with the budget of these options."""
        solver = Anderson() if self.solver is None else self.solver
        return solver if self.max_steps is None else dataclasses.replace(solver, max_steps=self.max_steps)

    @property
    def effective_adjoint(self) -> Adjoint | None:
        """`adjoint`, or `Unrolled()` where a fixed budget of steps needs it: no equilibrium is reached there, so that
        `Implicit()` would give another gradient."""
        solver = self.effective_solver
        unrolls = self.adjoint is None and solver.fixed_budget and solver.differentiable
        return Unrolled() if unrolls else self.adjoint
