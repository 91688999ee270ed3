"""The base of adjoints: ways to run a solver and to let gradients through its answer."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor

from .. import _validate
from ..kernels.problem import Impl
from ..linear import LinearSolver
from ..problem import Problem
from ..solution import AdjointReport, Remedies
from ..solvers import Outcome, Solver
from ..solvers.loop import Callback, iterate


@dataclasses.dataclass
class Request:
    """One call of `solve`, as the adjoints see it.

    Not for users of `solve`: it is what `Adjoint.run` of an own adjoint is given.

    Examples:
        >>> from implicit_attention.adjoints import Request
        >>> list(Request.__dataclass_fields__)[:6]
        ['problem', 'initial', 'solver', 'impl', 'trace', 'report']
    """

    problem: Problem
    initial: Tensor
    solver: Solver
    impl: Impl
    trace: bool
    report: AdjointReport
    callback: Callback | None = None
    #: The method of the backward solve, where the adjoint names one.
    linear_solver: LinearSolver[Any] | None = None
    #: The solve of the tokens of a causal block, in place of that of whole samples: its `run` is called as that of a
    #: solver, which comes first, and its `record` is that of each token, (*lead, N).
    by_token: Any = None
    #: Whether the residual of the answer is wanted where it costs an evaluation of its own.
    measured: bool = True
    #: The `Route` that `solve` chose: the functions of kernels that may be used.
    route: Any = None
    #: The `Outcome.evaluation` at the state at which the gradient is taken.
    evaluation: tuple[Tensor, ...] = ()
    #: The outcome, where a kernel has it already.
    known: Outcome | None = None

    def without_tensors(self, count: int) -> Request:
        """The request as a graph keeps it, which has to save the problem's `count` tensors so that hooks see them."""
        # One for each: modules would take equal ones for a parameter that they share.
        empty = self.problem.replace(*(torch.empty(0) for _ in range(count)))
        return dataclasses.replace(self, problem=empty, initial=torch.empty(0), evaluation=(), known=None)

    def solved(self, problem: Problem, initial: Tensor, *, differentiated: bool = False) -> Outcome:
        """The outcome for `problem` without a graph, by a kernel where `impl` has or wants one.

        differentiated: whether its `evaluation` is wanted, for the backward solve.
        """
        found: Outcome | None = self.route.outcome(problem, initial, differentiated)
        return self.run(problem, initial) if found is None else found

    def run(self, problem: Problem, initial: Tensor, *, graph: bool = False) -> Outcome:
        """The outcome for `problem` by the solver's own steps, after each of which the callback is called."""
        if self.by_token is not None:
            return cast(Outcome, self.by_token.run(self.solver, problem, initial, trace=self.trace, graph=graph))
        # `solve` has refused a callback for solvers that run otherwise.
        if type(self.solver).run is not Solver.run:
            return self.solver.run(problem, initial, trace=self.trace, graph=graph)
        watched = self.trace or graph or self.callback is not None
        kernel = None if watched else self.route.steps_by_kernel(problem, initial)
        told = self.callback
        return iterate(self.solver, problem, initial, trace=self.trace, graph=graph, callback=told, kernel=kernel)


@dataclasses.dataclass(frozen=True)
class Adjoint(_validate.Options):
    """Base of adjoints. A subclass defines `run`, which returns an `Outcome` whose value carries the gradient.

    Not for choosing among those that exist: pass `Implicit()`, `Unrolled()`, `Reversible()`, `OneStep()` or
    `Phantom()` to `solve`.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, solve
        >>> from implicit_attention.adjoints import Adjoint
        >>> class Detached(Adjoint):
        ...     def run(self, request):
        ...         outcome = request.solved(request.problem, request.initial)
        ...         return outcome._replace(value=outcome.value.detach())
        >>> shift = torch.tensor(0.5, requires_grad=True)
        >>> problem = FixedPointMap(lambda z, shift: z / 2 + shift, shift, event_ndim=1)
        >>> solve(problem, torch.zeros(1, 1), adjoint=Detached()).value.requires_grad
        False
    """

    @property
    def needs_solution(self) -> bool:
        """Whether the gradient is wrong at a state that is no solution."""
        return False

    def check(self, request: Request) -> None:
        """Raise if the gradient would be wrong."""

    def advice(self, remedies: Remedies) -> Remedies:
        """Return the remedies for problems that failed, given those of their solver."""
        return remedies

    def through(self, problem: Problem, value: Tensor) -> Tensor | None:
        """`value`, which need be no solution, with a gradient through steps from it; None where that makes no sense."""
        return None

    def run(self, request: Request) -> Outcome:
        raise NotImplementedError(f"{type(self).__name__} must define run(request)")


def attach(value: Tensor, graph: Tensor) -> Tensor:
    """`value`, bit for bit, with the derivatives of `graph` where both are finite."""
    return torch.where(torch.isfinite(graph) & torch.isfinite(value), value + (graph - graph.detach()), value)
