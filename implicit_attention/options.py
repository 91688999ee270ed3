"""How an equilibrium is found and differentiated, as functions and layers take it."""

from __future__ import annotations

import dataclasses
from typing import Any

from . import _validate
from ._reporting import check_on_failure
from ._types import Impl, OnFailure
from .adjoints import Adjoint, Unrolled
from .solvers import Anderson, Solver

_IMPLEMENTATIONS = ("auto", "reference", "tiled", "triton")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SolveOptions:
    """How an equilibrium is found and differentiated: what `solve` takes, with the budget in short.

    Args:
        solver: default `Anderson()`.
        adjoint: default `Implicit()`, and `Unrolled()` for a fixed budget of steps (rtol = atol = 0).
        impl: "auto"; "reference" writes every product out; "tiled" insists on torch's fused attention, "triton" on the
            Triton kernels.
        max_steps: the solver's `max_steps` in short; 0 is one explicit step of attention, without any solve.
        on_failure: "raise", "warn" or "ignore".
    """

    solver: Solver | None = None
    adjoint: Adjoint | None = None
    impl: Impl = "auto"
    max_steps: int | None = None
    on_failure: OnFailure = "warn"

    def __post_init__(self) -> None:
        _validate.store_plain(self)
        for name, kind in (("solver", Solver), ("adjoint", Adjoint)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                example = "Anderson()" if name == "solver" else "Implicit()"
                received = value.__name__ if isinstance(value, type) else repr(value)
                raise TypeError(
                    _validate.message(name, f"be None or a {kind.__name__}", received, f"for example {example}")
                )
        _validate.check_choice("impl", self.impl, _IMPLEMENTATIONS)
        if self.max_steps is not None:
            _validate.check_integer("max_steps", self.max_steps, low=0)
        check_on_failure(self.on_failure)

    def override(self, **given: Any) -> SolveOptions:
        """These options with those that are not None replaced; another solver comes with its own `max_steps`."""
        changes = {name: value for name, value in given.items() if value is not None}
        if "solver" in changes:
            changes.setdefault("max_steps", None)
        return dataclasses.replace(self, **changes) if changes else self

    @property
    def explicit(self) -> bool:
        """Whether nothing is solved."""
        return self.effective_solver.max_steps == 0

    @property
    def effective_solver(self) -> Solver:
        solver = Anderson() if self.solver is None else self.solver
        return solver if self.max_steps is None else dataclasses.replace(solver, max_steps=self.max_steps)

    @property
    def effective_adjoint(self) -> Adjoint | None:
        """None for `Implicit()`, whose gradient is no gradient of what a fixed budget of steps returns."""
        solver = self.effective_solver
        unrolls = self.adjoint is None and solver.fixed_budget and solver.differentiable
        return Unrolled() if unrolls else self.adjoint
