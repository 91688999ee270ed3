"""`solve`: the one door to solver and adjoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import _validate
from ._autograd import (
    are_plain,
    backward_running,
    in_own_precision,
    is_exporting,
    is_fake,
    transforms_active,
    uncompiled,
    unobserved,
)
from ._reporting import check_on_failure, report_failures, without_gradient
from ._types import Impl, OnFailure, check_impl
from .adjoints import Adjoint, Implicit, Request, Reversible, Unrolled
from .adjoints.native import NativeSolve, is_differentiated, is_native, native_rule, problem_of, solve_natively
from .failure_policy import FailurePolicy, located, policy_of
from .fused import lower, written_out
from .problem import Problem, widened
from .solution import NO_GRADIENT, AdjointReport, Record, Remedies, Solution
from .solvers import Anderson, Outcome, Solver
from .solvers.exported import check_budget, check_no_evidence, stepped
from .solvers.iterate import Callback
from .status import Status


@uncompiled
@in_own_precision
def solve(
    problem: Problem,
    initial: Tensor,
    *,
    solver: Solver | None = None,
    adjoint: Adjoint | None = None,
    impl: Impl = "auto",
    on_failure: OnFailure = "raise",
    trace: bool = False,
    callback: Callback | None = None,
    verbose: int = 0,
) -> Solution:
    """Find z = f(z) (for an energy: grad E(z) = 0), each problem on its own, with evidence and exact gradients.

    Args:
        problem: an energy such as `AnchoredEnergy`, a `FixedPointMap`, or any other `Problem`.
        initial: where to start, (*lead, *event): the last `problem.event_ndim` axes form one problem.
        solver: default `Anderson()`. Half-precision problems are solved in float32.
        adjoint: default `Implicit()`, the exact gradient of the solution.
        impl: "auto" solves by a kernel where there is one for the problem and the solver, else by the solvers' loop;
            "reference" always by the loop, with every product written out; "native" (compiled for this CPU) and
            "triton" insist on their kernel.
        on_failure: what to do if a problem has no answer: "raise" `ConvergenceError`, "warn", "ignore", or a
            `FailurePolicy`. The same holds for a backward solve. Inside torch.vmap, where the host cannot look,
            `Solution.status` alone tells.
        trace: keep the course of the iteration in `Solution.trace` (without leaving out finished problems); with
            `Unrolled()` also the graph of every state, for `Solution.states`.
        callback: called after every evaluation with the number of steps before it, |f(z) - z| of every problem's best
            state so far (*lead), and which problems are unfinished (*lead), both on the problem's device. It costs what
            it does: a look at the numbers makes the host wait. The solve then goes by the loop, and leaves no finished
            problem out. What it raises ends the solve.
        verbose: print a line every so many steps; True is every step, False none. It is a callback that looks.

    Returns:
        A `Solution`: value, and per problem status, residual of that value, steps and evaluations.

    Raises:
        ConvergenceError: with on_failure="raise", naming how many problems failed and the first of them.
        TypeError, ValueError: arguments that do not fit; a tensor that f reads and that requires grad without being
            declared; a callback inside torch.func, or for a solver of another library, which has no steps of ours.
        UnsupportedImplementation: an `impl` that cannot do it, or is wrong on this machine, and why.

    Not for attention with heads, values and masks: use `equilibrium_attention` or a layer, which call this.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp, solve
        >>> keys, query = torch.randn(16, 4), torch.randn(3, 4, requires_grad=True)
        >>> solution = solve(AnchoredEnergy(LogSumExp(keys, beta=0.5), query, anchor=0.5), query)
        >>> solution.value.shape, solution.converged.all().item()
        (torch.Size([3, 4]), True)
        >>> solution.value.sum().backward()
        >>> query.grad.shape
        torch.Size([3, 4])

    Gradients: with respect to every tensor of the problem, as the adjoint says; to `initial` only with `Unrolled()` and
    `Reversible()`.
    """
    solver = Anderson() if solver is None else solver
    adjoint = Implicit() if adjoint is None else adjoint
    for name, value, kind, remedy in (
        ("problem", problem, Problem, "wrap a function as FixedPointMap(f, *tensors, event_ndim=...)"),
        ("solver", solver, Solver, "for example Anderson()"),
        ("adjoint", adjoint, Adjoint, "for example Implicit()"),
    ):
        _validate.check_instance(name, value, kind, f"be an instance of {kind.__name__}", remedy)
    if is_exporting():
        check_no_evidence(callback is not None or bool(verbose), "callback")
        return _exported(problem, initial, solver, trace)
    callback = _checked_callback(callback, verbose, solver)
    report = _report(on_failure)
    check_impl(impl)
    problem.check_start({"initial": initial, "trace": trace, "on_failure": report.on_failure}, solver, adjoint)
    whole, origin = problem, None
    if (moved := problem._about_origin()) is not None:
        problem.check_state(initial)
        problem, origin = moved
        initial = initial - origin
    request = Request(problem, initial, solver, impl, trace, report, callback)
    watched = trace or callback is not None or _sampled(report) is not None
    if not watched and (native := _natively(request, adjoint)) is not None:
        outcome, failed = native
        found = concluded(outcome, solver, adjoint, report, problem.energy, failed=failed > 0, advice=problem.advice)
    else:
        found = by_adjoint(request, adjoint)
    return found if origin is None else _moved_back(found, origin, problem, whole)


def _moved_back(found: Solution, origin: Tensor, about: Problem, problem: Problem) -> Solution:
    """The solution of a problem from that of the same one about an origin, whose energy is another by a constant."""
    value, course, trace = found.value + origin, tuple(state + origin for state in found.course), found.trace
    if trace is not None:
        trace = trace._replace(value=trace.value + origin)
    if trace is not None and trace.energy is not None:
        with torch.no_grad():
            constant = problem.energy(value.detach()) - about.energy(found.value.detach())
        trace = trace._replace(energy=trace.energy + constant)
    return dataclasses.replace(found, value=value, course=course, trace=trace, energy_function=problem.energy)


def _report(on_failure: Any) -> AdjointReport:
    """The report that a backward pass will fill, by the policy about failures, which is checked."""
    check_on_failure(on_failure)
    on_failure, site = located(on_failure)
    if isinstance(on_failure, FailurePolicy) and on_failure.forward == "explicit" and site is None:
        required = "have forward='best' here: only attention has an explicit step"
        raise ValueError(_validate.message("on_failure", required, repr(on_failure)))
    return AdjointReport(on_failure=on_failure, site=site)


def _sampled(report: AdjointReport) -> Any:
    """The tally of the layer that solves, if it takes samples of problems and states."""
    site = report.site
    return None if site is None or site.tally is None or not site.tally.spectral else site.tally


@in_own_precision
def by_adjoint(request: Request, adjoint: Adjoint) -> Solution:
    """The solution as the adjoint runs the solver, for every kind of problem and tensor; options are not checked."""
    problem, initial = _checked(request.problem, request.initial)
    solver, impl = request.solver, request.impl
    solver.check_problem(problem)
    problem.check_solver(solver)
    every_step = request.trace or request.callback is not None or isinstance(adjoint, Unrolled | Reversible)
    if impl == "reference":
        problem = written_out(problem)
    elif impl != "auto":
        lower(problem, solver, impl, every_step=every_step)
    request = dataclasses.replace(request, problem=problem, initial=initial)
    adjoint.check(request)
    if (torch.is_grad_enabled() or transforms_active()) and not isinstance(adjoint, Unrolled):
        problem.check_undeclared(initial)
    outcome = adjoint.run(request)
    outcome = outcome._replace(record=_judged(problem, outcome.value, outcome.record))
    if (tally := _sampled(request.report)) is not None:
        tally.keep(problem, outcome.value)
    energy = problem.energy if problem.has_energy else None
    cause = partial(problem.cause, outcome.value)
    tokens = None if request.by_token is None else request.by_token.record
    return concluded(
        outcome, solver, adjoint, request.report, energy, cause=cause, advice=problem.advice, tokens=tokens
    )


def _checked_callback(callback: Any, verbose: Any, solver: Solver) -> Callback | None:
    """Return the callback for every step, or raise where no step can be reported."""
    if callback is not None and not callable(callback):
        remedy = "for example lambda step, residual, active: print(step, residual.max())"
        raise TypeError(_validate.message("callback", "be callable", type(callback).__name__, remedy))
    every = _validate.check_integer("verbose", int(verbose) if isinstance(verbose, bool) else verbose, low=0)
    if callback is None and not every:
        return None
    name = "callback" if callback is not None else "verbose"
    required = "be left out inside torch.func and torch.vmap, where the host sees no numbers"
    _validate.require(not transforms_active(), name, required, "one", "use trace=True")
    required = f"be left out for {type(solver).__name__}, whose steps are not made by this library's loop"
    _validate.require(type(solver).run is Solver.run, name, required, "one", "use trace=True")

    def both(step: int, residual: Tensor, active: Tensor) -> None:
        if callback is not None:
            callback(step, residual, active)
        if every and (step % every == 0 or not bool(active.any())):
            print(_line(step, residual, active))

    return both


def _line(step: int, residual: Tensor, active: Tensor) -> str:
    """Return the printed line of a step."""
    left = f"step {step}: {int(active.sum())} of {active.numel()} unfinished"
    known = residual[residual.isfinite()]
    return f"{left}, residual {float(known.median()):.1e} (median), {float(known.max()):.1e}" if known.numel() else left


def _exported(problem: Problem, initial: Tensor, solver: Solver, trace: bool) -> Solution:
    """The state after a fixed budget of steps, as plain operations; nothing is measured there."""
    check_no_evidence(trace, "trace")
    check_budget(solver)
    problem.check_state(initial)
    solver.check_problem(problem)
    problem.check_solver(solver)
    problem, (initial,) = widened(problem.settled(), initial)
    value = stepped(solver, written_out(problem), initial)
    record = Record.unmeasured(value, solver.exhausted, problem.event_ndim)
    report, told = AdjointReport(in_graph=True), (solver.rtol, solver.atol)
    return Solution(record, report, solver.remedies, tolerances=told, value=value)


def concluded(
    outcome: Outcome,
    solver: Solver,
    adjoint: Adjoint,
    report: AdjointReport,
    energy_function: Callable[[Tensor], Tensor] | None,
    *,
    cause: Callable[[], str] = str,
    advice: Callable[[Remedies], Remedies] = dict,
    failed: bool = True,
    tokens: Record | None = None,
) -> Solution:
    """The solution with its evidence, once failures are reported as `report.on_failure` says, with their `cause`.

    advice: adds to the solver's remedies what the problem knows.
    failed: whether a problem may have no answer; False spares a look at all of them.
    tokens: the record of every token of the problems, which is reported in place of theirs.
    """
    report.awaited = outcome.value.requires_grad and not backward_running()
    on_failure, record, value, course = report.on_failure, outcome.record, outcome.value, outcome.states
    if failed and policy_of(on_failure).backward != "keep":
        value = without_gradient(on_failure, record.failed, value)
        course = tuple(without_gradient(on_failure, record.failed, state) for state in course)
    solution = Solution(
        record if tokens is None else tokens,
        report,
        adjoint.advice(advice(solver.remedies)),
        tolerances=(solver.rtol, solver.atol),
        value=value,
        trace=outcome.trace,
        course=course,
        energy_function=energy_function,
    )
    if value.requires_grad or transforms_active():
        if on_failure != "ignore" and not transforms_active():
            report.state_residual = record.residual
        if adjoint.needs_solution:
            report.unsolved = record.failed

    def explained() -> str:
        policy = policy_of(on_failure)
        wrong = report.awaited and adjoint.needs_solution and (policy.over, policy.backward) == ("warn", "keep")
        return cause() or (NO_GRADIENT if wrong else "")

    # Checkpointing computes a forward pass again, whose failures were reported before.
    if (failed or policy_of(on_failure).counts) and not backward_running():
        report_failures(
            on_failure, type(solver).__name__, solution.record, solution.remedies, explained, site=report.site
        )
    return solution


def _natively(request: Request, adjoint: Adjoint) -> tuple[Outcome, int] | None:
    """The outcome for plain tensors by one native call, and how many problems failed; None where there is none."""
    solver, impl, initial = request.solver, request.impl, request.initial
    rule = native_rule(solver, adjoint, impl) if unobserved() else None
    problem = None if rule is None else problem_of(request.problem)
    if rule is None or problem is None or not is_native(problem, impl):
        return None
    if not are_plain(problem.field.dtype, initial) or initial.shape != problem.field.shape:
        return None
    answer = solve_natively(problem, initial, rule, impl, mean=is_differentiated(*problem), evidence=True)
    if answer is None:
        return None
    value, mean, evidence, failed = answer
    assert evidence is not None
    record = evidence.record
    if mean is not None:
        native = NativeSolve(solver, impl, request.report, failed == 0, evidence)
        value = native.states(problem, value, mean)
    return Outcome(value, record), failed


def _checked(problem: Problem, initial: Tensor) -> tuple[Problem, Tensor]:
    """Problem and initial state in the precision of the solve, or an error that names what does not fit."""
    problem.check_state(initial)
    problem = problem.settled()
    named = [*problem.named_tensors(), ("initial", initial)]
    # A short test for the most frequent kind.
    if initial.dtype in (torch.float32, torch.float64) and are_plain(initial.dtype, *(t for _, t in named)):
        return problem, initial
    for name, tensor in named:
        if tensor.is_complex():
            raise TypeError(_validate.message(name, "be real", tensor.dtype, "declare its real and imaginary part"))
        if is_fake(tensor):
            # The number of evaluations depends on the numbers.
            _validate.check_numbers(name, tensor, "hopfield_solve and equilibrium_attention answer shapes with shapes")
    if problem.dtypes != "kept":
        problem, (initial,) = widened(problem, initial)
    _validate.check_same_kind([*problem.named_tensors(), ("initial", initial)], dtypes=problem.dtypes == "one")
    return problem, initial


def _judged(problem: Problem, value: Tensor, record: Record) -> Record:
    """The record, OUT_OF_RANGE where f leaves a state as it is without solving anything."""
    outside = problem.outside(value.detach())
    if outside is None:
        return record
    return record._replace(status=record.status.masked_fill(record.converged & outside, int(Status.OUT_OF_RANGE)))
