"""`solve`: the one door to solver and adjoint."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _validate
from ._autograd import transforms_active
from ._reporting import check_on_failure, report_failures
from ._types import OnFailure
from .adjoints import Adjoint, Implicit, Request, Unrolled
from .problem import Problem
from .solution import AdjointReport, Solution, Trace
from .solvers import Anderson, Solver

_HALF = (torch.float16, torch.bfloat16)


def solve(
    problem: Problem,
    initial: Tensor,
    *,
    solver: Solver | None = None,
    adjoint: Adjoint | None = None,
    on_failure: OnFailure = "raise",
    trace: bool = False,
) -> Solution:
    """Find z = f(z) (for an energy: grad E(z) = 0), each problem on its own, with evidence and exact gradients.

    Args:
        problem: an energy such as `AnchoredEnergy`, a `FixedPointMap`, or any other `Problem`.
        initial: where to start, (*lead, *event): the last `problem.event_ndim` axes form one problem.
        solver: default `Anderson()`. Half-precision problems are solved in float32.
        adjoint: default `Implicit()`, the exact gradient of the solution.
        on_failure: what to do if a problem has no answer: "raise" `ConvergenceError`, "warn", or "ignore". The same
            holds for a backward solve.
        trace: keep the course of the iteration in `Solution.trace` (without leaving out finished problems).

    Returns:
        A `Solution`: value, and per problem status, residual of that value, steps and evaluations.

    Raises:
        ConvergenceError: with on_failure="raise", naming how many problems failed and the first of them.
        TypeError, ValueError: arguments that do not fit; a tensor that f reads and that requires grad without being
            declared.

    Gradients: with respect to every tensor of the problem, as the adjoint says; to `initial` only with `Unrolled()`.
    """
    solver = Anderson() if solver is None else solver
    adjoint = Implicit() if adjoint is None else adjoint
    for name, value, kind in (("problem", problem, Problem), ("solver", solver, Solver), ("adjoint", adjoint, Adjoint)):
        if not isinstance(value, kind):
            hint = (
                "wrap a function as FixedPointMap(f, *tensors, event_ndim=...)" if name == "problem" else "see the docs"
            )
            raise TypeError(_validate.message(name, f"be an instance of {kind.__name__}", type(value).__name__, hint))
    check_on_failure(on_failure)
    problem.check_state(initial)
    _validate.check_same_kind([*problem.named_tensors(), ("initial", initial)])
    solver.check_problem(problem)
    if initial.dtype in _HALF:
        # The state keeps float32: in half precision it would sit up to a percent away from the solution.
        problem = problem.replace(*(t.float() if t.dtype in _HALF else t for t in problem.tensors()))
        initial = initial.float()
    request = Request(problem, initial, solver, trace, AdjointReport(), on_failure)
    adjoint.check(request)
    if (torch.is_grad_enabled() or transforms_active()) and not isinstance(adjoint, Unrolled):
        problem.check_closure(initial)
    with torch.autocast(initial.device.type, enabled=False):
        outcome = adjoint.run(request)
    solution = Solution(
        *outcome[:6],
        trace=_trace(outcome.trace),
        adjoint=request.report,
        energy_function=problem.energy if problem.has_energy else None,
    )
    report_failures(
        on_failure,
        f"{type(solver).__name__}",
        solution.status,
        solution.residual,
        solution.tolerance,
        solution.num_steps,
    )
    return solution


def _trace(kept: tuple[Tensor, ...]) -> Trace | None:
    if not kept:
        return None
    return Trace(kept[0], kept[1] if len(kept) == 3 else None, kept[-1])
