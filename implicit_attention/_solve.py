"""`solve`, the one door to solver and adjoint, and `route`, the one place that decides between kernels and torch.

Kernels take a record of tensors, `Attention`, that a problem or a door gives, and answer with tensors. All that torch
may do to these (transforms, modes, compilers, precisions) is asked here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import _validate
from ._torch import (
    HALF,
    are_plain,
    at_least_single,
    backward_running,
    exact_precision,
    host_may_look_at_constant,
    in_own_precision,
    is_differentiated,
    is_exporting,
    is_fake,
    sum_to_shape,
    transforms_active,
    uncompiled,
    unobserved,
)
from .adjoints import Adjoint, Implicit, Request, Reversible, Unrolled
from .adjoints.implicit import attached
from .adjoints.linear_system import Known, gradients_by_rows, jacobian_product
from .energies import AnchoredEnergy
from .failure import (
    WORDS,
    FailurePolicy,
    FailureSite,
    OnFailure,
    UnsupportedImplementation,
    check_on_failure,
    located,
    policy_of,
    report_failures,
    unread,
    without_gradient,
)
from .kernels import trust
from .kernels.native import library
from .kernels.native import solve as native
from .kernels.native.step import NativeStep
from .kernels.problem import (
    FLOOR,
    RTOL,
    SOLVE_RTOL,
    THERE,
    AdjointAnswer,
    AdjointRule,
    Attention,
    FusedRule,
    Impl,
    Solved,
    check_impl,
    mapped,
)
from .kernels.step import MOST_MIXED, Step
from .kernels.triton import support as triton
from .linear import CG, GMRES, LinearSolution, LinearSolver
from .linear._vectors import normalised
from .linear.base import FLOAT32_RTOL
from .potentials import LogSumExp
from .potentials._attention import triangle
from .potentials._read import surely_finite, without_nan, without_nan_before
from .potentials.log_sum_exp import OverLogSumExp
from .problem import Problem, check_start, isolated, widened
from .solution import NO_GRADIENT, OF_ATTENTION, AdjointReport, Record, Remedies, Solution, SolveReport, Status, advice
from .solvers import Anderson, Outcome, Picard, Solver
from .solvers.loop import Callback, check_budget, check_no_evidence, stepped

_R = TypeVar("_R")

# The default gradient.
EXACT = Implicit()
# The default solver of keys that stay in half precision.
HALF_SOLVER = Anderson(rtol=SOLVE_RTOL)
# Where "auto" tries the Triton kernels.
TRITON_DEVICES = ("cuda",)
# Precisions of states that the native library takes as they are.
PRECISIONS = (torch.float32, torch.float64)
# Limits of an inverse temperature; more numbers than so many are not read one by one.
LEAST, MOST, MOST_NUMBERS = math.ulp(0.0), sys.float_info.max, 256


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
        solver: default `Anderson()`. Half-precision problems are solved in float32; where a card's kernels take one,
            their products are in half precision, states and sums in float32, and the default rtol is 1e-3.
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
        verbose: print the route, then a line every so many steps; True is every step, False none. It is a callback that
            looks.

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
    plan = plan_of(solver, adjoint, impl)
    remedy = "wrap a function as FixedPointMap(f, *tensors, event_ndim=...)"
    _validate.check_instance("problem", problem, Problem, "be an instance of Problem", remedy)
    if is_exporting():
        check_no_evidence(callback is not None or bool(verbose), "callback")
        return _exported(problem, initial, plan.solver, trace)
    callback = _checked_callback(callback, verbose, plan.solver)
    report = _report(on_failure)
    if impl != "reference" and type(problem) is not AnchoredEnergy and (given := problem.as_attention()) is not None:
        # What kernels and the loop share, which checks the parts.
        problem = energy_of(given)
    whole, origin = problem, None
    if (moved := problem._about_origin() if type(problem) is AnchoredEnergy else None) is not None:
        problem.check_state(initial)
        problem, origin = moved
        initial = initial - origin
    call, found = None if trace or callback is not None else problem.as_attention(), None
    if call is not None and call.keys.dtype in HALF:
        problem.check_state(initial)
        half = plan_of(HALF_SOLVER, adjoint, impl) if solver is None else plan
        found = solve_plainly(call, initial, half, report)
    elif call is not None and unobserved():
        found = solve_plainly(call, initial, plan, report, problem=problem)
    solution = None if found is None else found[1]
    if not isinstance(solution, Solution):
        start = {"initial": initial, "trace": trace, "on_failure": report.on_failure}
        check_start(whole, start, plan.solver, plan.adjoint)
        request = Request(problem, initial, plan.solver, impl, trace, report, callback)
        solution = by_adjoint(request, plan.adjoint, verbose=bool(verbose))
    return solution if origin is None else _moved_back(solution, origin, problem, whole)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The choices that options make once for all calls.

    solver, adjoint, impl: with defaults and the budget filled in.
    remedies: the advice about queries that fail, by status.
    """

    solver: Solver
    adjoint: Adjoint
    impl: Impl
    remedies: Remedies

    @functools.cached_property
    def rule(self) -> FusedRule | None:
        """The rule by which a kernel is this solver and adjoint; None for others and for fixed budgets."""
        if self.adjoint != EXACT or self.impl == "reference" or type(self.solver) not in (Anderson, Picard):
            return None
        row = torch.zeros(1, 1, device="cpu")
        rule = self.solver.fused_rule(AnchoredEnergy(LogSumExp(row, 1.0), row, 0.0))
        return None if rule is None or rule.max_steps == 0 or rule.fixed_budget else rule


def plan_of(solver: Solver | None, adjoint: Adjoint | None, impl: Impl) -> Plan:
    """The choices for these options, which are checked."""
    # Objects of the user's may be equal and yet not the same.
    own = type(solver) in (type(None), Anderson, Picard) and (adjoint is None or adjoint == EXACT)
    return (_plan if own and type(impl) is str else _plan.__wrapped__)(solver, adjoint, impl)


#: Calls are many, their options few.
@functools.lru_cache(maxsize=256, typed=True)
def _plan(solver: Solver | None, adjoint: Adjoint | None, impl: Impl) -> Plan:
    solver = Anderson() if solver is None else solver
    adjoint = EXACT if adjoint is None else adjoint
    _validate.check_instance("solver", solver, Solver, "be an instance of Solver", "for example Anderson()")
    _validate.check_instance("adjoint", adjoint, Adjoint, "be an instance of Adjoint", "for example Implicit()")
    check_impl("impl", impl)
    return Plan(solver, adjoint, impl, adjoint.advice(advice(solver.remedies, OF_ATTENTION)))


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
    if type(on_failure) is str and on_failure in WORDS:
        return AdjointReport(on_failure=on_failure)
    check_on_failure("on_failure", on_failure)
    on_failure, site = located(on_failure)
    if isinstance(on_failure, FailurePolicy) and on_failure.forward == "explicit" and site is None:
        required = "have forward='best' here: only attention has an explicit step"
        _validate.refuse("on_failure", required, repr(on_failure))
    return AdjointReport(on_failure=on_failure, site=site)


def _sampled(site: FailureSite | None) -> Any:
    """The tally of the layer that solves, if it takes samples of problems and states."""
    return None if site is None or site.tally is None or not site.tally.spectral else site.tally


@in_own_precision
def by_adjoint(request: Request, adjoint: Adjoint, *, verbose: bool = False) -> Solution:
    """The solution as the adjoint runs the solver, for every kind of problem and tensor; options are not checked."""
    solver, impl = request.solver, request.impl
    problem, initial = _checked(request.problem, request.initial, solver)
    every_step = request.trace or request.callback is not None or isinstance(adjoint, Unrolled | Reversible)
    way = route(problem, initial, solver, impl, adjoint, every_step=every_step)
    if verbose:
        print(way)
    if impl == "reference":
        problem = written_out(problem)
    request = dataclasses.replace(request, problem=problem, initial=initial, route=way)
    adjoint.check(request)
    if (torch.is_grad_enabled() or transforms_active()) and not isinstance(adjoint, Unrolled):
        problem.check_undeclared(initial)
    outcome = adjoint.run(request)
    if (outside := problem.outside(outcome.value.detach())) is not None:
        # Where f leaves a state as it is nothing was solved.
        outside, record = outside & outcome.record.converged, outcome.record
        status = record.status.masked_fill(outside, int(Status.OUT_OF_RANGE))
        outcome = outcome._replace(record=record._replace(status=status))
    if (tally := _sampled(request.report.site)) is not None:
        tally.keep(problem, outcome.value)
    outcome, told = concluded(
        outcome,
        request.report,
        adjoint.advice(problem.advice(solver.remedies)),
        way,
        needs_solution=adjoint.needs_solution,
        cause=partial(problem.cause, outcome.value),
        tokens=None if request.by_token is None else request.by_token.record,
    )
    return _whole(told, outcome, problem.energy if problem.has_energy else None)


def _whole(told: dict[str, Any], outcome: Outcome, energy: Callable[[Tensor], Tensor] | None) -> Solution:
    value, _, trace, course, _ = outcome
    return Solution(**told, value=value, trace=trace, course=course, energy_function=energy)


def _checked_callback(callback: Any, verbose: Any, solver: Solver) -> Callback | None:
    """The callback for every step, which prints, too; an error where no step can be reported."""
    if callback is not None:
        remedy = "for example lambda step, residual, active: print(step, residual.max())"
        _validate.check_callable("callback", callback, remedy)
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
            known = residual[residual.isfinite()]
            text = f", residual {float(known.median()):.1e} (median), {float(known.max()):.1e}" if known.numel() else ""
            print(f"step {step}: {int(active.sum())} of {active.numel()} unfinished{text}")

    return both


def _exported(problem: Problem, initial: Tensor, solver: Solver, trace: bool) -> Solution:
    """The state after a fixed budget of steps, as plain operations; nothing is measured there."""
    check_no_evidence(trace, "trace")
    check_budget(solver)
    problem, initial = _checked(problem, initial, solver)
    value = stepped(solver, written_out(problem), initial)
    record = Record.unmeasured(value, solver.end_rule.exhausted, problem.event_ndim)
    report, told = AdjointReport(in_graph=True), (solver.rtol, solver.atol)
    return Solution(record, report, solver.remedies, tolerances=told, value=value)


def concluded(
    outcome: Outcome,
    report: AdjointReport,
    remedies: Remedies,
    way: Route,
    *,
    needs_solution: bool = True,
    cause: Callable[[], str] = str,
    failed: bool = True,
    tokens: Record | None = None,
) -> tuple[Outcome, dict[str, Any]]:
    """The outcome and the fields of its report, once failures are reported as `report.on_failure` says.

    cause: why problems failed; it is asked where that is told.
    needs_solution: whether the gradient is wrong at a state that is no solution.
    failed: whether a problem may have no answer; False, for plain tensors, spares a look at all of them.
    tokens: the record of every token of the problems, which is reported in place of theirs.
    """
    record, on_failure, tracked = outcome.record, report.on_failure, outcome.value.requires_grad
    report.awaited = tracked and not backward_running()
    if failed and policy_of(on_failure).backward != "keep":
        kept = partial(without_gradient, on_failure, record.failed)
        outcome = outcome._replace(value=kept(outcome.value), states=tuple(map(kept, outcome.states)))
    in_transform = failed and transforms_active()
    if tracked or in_transform:
        if on_failure != "ignore" and not in_transform:
            report.state_residual = record.residual
        if needs_solution:
            report.unsolved = record.failed
    record, tolerances = record if tokens is None else tokens, (way.solver.rtol, way.solver.atol)
    told = {"record": record, "adjoint": report, "remedies": remedies, "tolerances": tolerances, "route": way}
    # Checkpointing computes a forward pass again, whose failures were reported before.
    counts = type(on_failure) is not str and policy_of(on_failure).counts
    if (failed or counts) and not backward_running():

        def explained() -> str:
            policy = policy_of(on_failure)
            wrong = report.awaited and needs_solution and (policy.over, policy.backward) == ("warn", "keep")
            return cause() or (NO_GRADIENT if wrong else "")

        report_failures(on_failure, type(way.solver).__name__, record, remedies, explained, site=report.site)
    return outcome, told


def _checked(problem: Problem, initial: Tensor, solver: Solver) -> tuple[Problem, Tensor]:
    """Problem and initial state in the precision of the solve, or an error that names what does not fit."""
    problem.check_state(initial)
    problem = problem.settled()
    named = [*problem.named_tensors(), ("initial", initial)]
    for name, tensor in named:
        if tensor.is_complex():
            _validate.refuse(name, "be real", tensor.dtype, "declare its real and imaginary part", TypeError)
        if not is_exporting():
            # The number of evaluations depends on the numbers.
            _validate.check_numbers(name, tensor, "hopfield_solve and equilibrium_attention answer shapes with shapes")
    if problem.dtypes != "kept":
        problem, (initial,) = widened(problem, initial)
        named = [(name, at_least_single(tensor)) for name, tensor in named]
    _validate.check_same_kind(named, dtypes=problem.dtypes == "one")
    solver.check_problem(problem)
    problem.check_solver(solver)
    return problem, initial


# The choice.


@dataclasses.dataclass(repr=False)
class Route:
    """The functions by which a solve runs, each of a kernel ("native", "triton") or of torch, and the choice of them.

    Attributes:
        evaluate: of the map at a state.
        step: from an evaluation to the next state.
        product: of the backward pass, with the Hessian of attention, or the Jacobian of f.
        dtype: precision of the states.
        heads: of attention.
        where: what is around the call: a compiled graph, or torch.func.
        floor: the part of |f(z)| to which residuals are known where products are in half precision, else None.

    It is a plan until the functions have run. A kernel that fails its check, or cannot have what it is given, leaves
    them to torch, and is not named then.
    """

    solver: Solver
    impl: Impl
    every_step: bool
    dtype: torch.dtype
    evaluate: str = "torch"
    step: str = "torch"
    product: str = "torch"
    where: str = ""
    heads: int | None = None
    floor: float | None = None

    def __str__(self) -> str:
        ran: dict[str, list[str]] = {}
        for function in ("evaluate", "step", "product"):
            ran.setdefault(getattr(self, function), []).append(function)
        parts = [f"{name}: {', '.join(functions)}" for name, functions in ran.items()]
        parts.append(str(self.dtype).removeprefix("torch."))
        parts += [] if self.floor is None else [f"products in float16: residuals known to {self.floor:g} |f(z)|"]
        parts += [] if self.heads is None else [f"{self.heads} head{'s' if self.heads != 1 else ''}"]
        return "; ".join([*parts, self.where] if self.where else parts)

    __repr__ = __str__

    def __getstate__(self) -> dict[str, Any]:
        # A solver of the user's need have no pickle; what ran does.
        return {**vars(self), "solver": None}

    def outcome(self, problem: Problem, initial: Tensor, differentiated: bool) -> Outcome | None:
        """The solution from `initial` without a graph, by a kernel; None where none answers.

        differentiated: whether the `evaluation` is wanted, if a kernel is to solve the backward pass.
        """
        given = for_kernel(problem, initial, self.solver, self.impl, every_step=self.every_step)
        found = None if given is None else solve_by_kernel(*given, self.impl)
        if given is None or found is None:
            self.evaluate = self.step = "torch"
            return None
        self.evaluate = self.step = _kernel(given[0], self.impl) or "torch"
        kept = differentiated and self.product != "torch"
        return Outcome(found.state, found.record, evaluation=found[1:3] if kept else ())

    def gradients(
        self, problem: Problem, z: Tensor, cotangent: Tensor, method: CG, evaluation: tuple[Tensor, ...]
    ) -> Known | None:
        """The gradients of the problem's tensors, and the linear system, by a kernel; None where none has them all.

        It has the gradient of a bias per key, which is the same for all queries. A problem that it could not solve has
        a failing status and an approximate gradient or NaN; one that it gives up (STALLED) adds nothing.
        """
        with torch.enable_grad():
            live = attention_of(problem, None, self.impl)
        if live is None or not _has_all_gradients(live, self.impl):
            return None
        by_bias = None
        if live.bias is not None and live.bias.requires_grad:
            by_bias = z.new_zeros(*z.shape[:-2], live.keys.shape[-2])
        with torch.no_grad():
            call = _isolated(live.detached(), z)[0]
            limits = method.rtol, method.default_max_steps(z.shape[-1])
            found = adjoint_by_kernel(call, z, cotangent, limits, self.impl, evaluation, by_bias=by_bias)
        if found is None:
            return None
        self.product = _kernel(call, self.impl) or "torch"
        answer, mean = found
        by_call = _by_tensors(live, answer, mean, by_bias)
        sources = {t: g.to(t.dtype) for t, g in by_call if t.requires_grad}
        if computed := [(t, g) for t, g in sources.items() if not t.is_leaf]:
            wanted = [t for t in problem.tensors() if t.requires_grad]
            with torch.enable_grad():
                # Not as cotangents, for which torch first imports sympy.
                total = torch.stack([(t * g).sum() for t, g in computed]).sum()
            for t, g in zip(wanted, torch.autograd.grad(total, wanted, allow_unused=True), strict=True):
                if g is not None:
                    sources[t] = sources[t] + g if t in sources else g
        gradients = tuple(map(sources.get, problem.tensors()))
        return gradients, LinearSolution(answer.record, answer.value, answer.negative_curvature)

    def steps_by_kernel(self, problem: Problem, initial: Tensor) -> Callable[[Tensor, Tensor], Step] | None:
        """Return what makes the steps on a user's map by a kernel, given states and rows; None where nothing can."""
        solver = self.solver
        if type(solver) is Anderson:
            history, ridge, plain_steps = solver._history(problem), solver.ridge, solver._plain_steps(problem)
            fits = history <= MOST_MIXED and solver._guard(problem) == "residual" and not problem.symmetric
        else:
            history, ridge, plain_steps = 0, 0.0, solver.max_steps + 1
            # A subclass may step or accept otherwise.
            own = (getattr(type(solver), name) is getattr(Picard, name, None) for name in ("init", "accept", "step"))
            fits = isinstance(solver, Picard) and solver.damping == 0 and all(own)
        # The bits of a token must not depend on whether those behind it are plain tensors.
        if not fits or problem.has_energy or problem.mixes or problem.token_order is not None or not unobserved():
            return None
        if self.impl == "reference" or initial.dtype not in PRECISIONS or not 0 < initial.numel() < 2**31:
            return None
        options = FusedRule(solver.rtol, solver.atol, solver.max_steps, plain_steps), history, ridge, Anderson.growth
        if initial.device.type in TRITON_DEVICES:
            event = initial.shape[initial.ndim - problem.event_ndim :].numel()
            if not _trusts("step", triton.step_variant(initial, event, history), triton.step_errors, initial.device):
                return None
            from .kernels.triton.step import TritonStep

            self.step = "triton"
            return partial(TritonStep, *options)
        loaded = library.found()[0] if are_plain(initial.dtype, initial) else None
        if loaded is None:
            return None
        self.step = "native"
        return partial(NativeStep, loaded, *options)

    def linear_solver(self, method: LinearSolver[Any], z: Tensor) -> LinearSolver[Any]:
        """The method for linear systems at z, between whose products there are kernels alone where that can be."""
        if z.device.type not in TRITON_DEVICES or type(method) is not GMRES or self.impl == "reference":
            return method
        if not unobserved() or triton.absent(z.device) is not None:
            return method
        from .kernels.triton.gmres import TritonGMRES

        return TritonGMRES(**vars(method), trusts=_trusts_sweeps)


def _trusts_sweeps(residual: Tensor, steps: int) -> bool:
    """Whether kernels may make sweeps of GMRES of so many steps from such residuals."""
    return _trusts("GMRES", triton.gmres_variant(residual, steps), triton.gmres_errors, residual.device)


def _trusts(name: str, variant: Any, errors: Callable[..., trust.Errors], device: torch.device) -> bool:
    """Whether there is a Triton kernel of this name and variant, and its errors on the device are small."""
    if variant is None:
        return False
    use, check = trust.Use(f"{name} (triton)", device, variant), partial(errors, variant, device)
    return trust.answer(use, check, lambda: True) is not None


def route(
    problem: Problem, initial: Tensor, solver: Solver, impl: Impl, adjoint: Adjoint, *, every_step: bool = False
) -> Route:
    """Decide by which functions a problem is solved and differentiated.

    Args:
        problem: the problem, whose `as_attention()` kernels may take.
        initial: where it starts.
        solver: the method.
        impl: "auto" takes a kernel where there is one; "native" and "triton" insist on theirs.
        adjoint: the derivative, of which kernels know that of `Implicit()`.
        every_step: whether every step must be recorded, for a trace or for a gradient through the steps.

    Raises:
        UnsupportedImplementation: an `impl` was named that cannot do it, and why.
    """
    way = Route(solver, impl, every_step, initial.dtype, where="inside torch.func" if transforms_active() else "")
    if (call := attention_of(problem, solver, impl, every_step=every_step)) is not None:
        way.evaluate = way.step = _kernel(call, impl) or "torch"
    if isinstance(adjoint, Implicit) and adjoint.linear_solver is None:
        call = attention_of(problem, None, impl) if call is None else call
        if call is not None and _has_all_gradients(call, impl):
            way.product = _kernel(call, impl) or "torch"
    return way


def attention_of(problem: Problem, solver: Solver | None, impl: Impl, *, every_step: bool = False) -> Attention | None:
    """The record that a kernel takes of a problem; None if it cannot do that, or `impl` is "reference".

    solver: None for the backward pass alone, whatever method solved the problem.
    """
    if impl == "reference":
        return None
    call = problem.as_attention()
    reason = None
    if call is None:
        names = f"not for {type(problem).__name__} of {type(getattr(problem, 'potential', problem)).__name__}"
        reason = f"it exists for AnchoredEnergy of LogSumExp, {names} (or with added attributes); use impl='auto'"
    elif every_step:
        kept = "no step is kept, for a trace, a callback or Unrolled()"
        reason = f"{kept}; use Implicit() without a trace and without a callback, or impl='auto'"
    elif solver is not None and solver.fused_rule(problem) is None:
        name = type(solver).__name__
        reason = f"there is no kernel for {name} with these options; use Anderson() or Picard(), or impl='auto'"
    elif not _validate.keeps_digits(call.query.dtype, call.anchor):
        digits = f"an anchor of {call.anchor} leaves 1 - anchor no digits in {call.query.dtype}"
        reason = f"{digits}; use impl='auto' or float64"
    elif impl != "auto" and transforms_active():
        reason = "there is no derivative inside torch.func; use impl='auto' or 'reference'"
    elif impl != "auto" and torch.is_grad_enabled() and not _has_all_gradients(call, impl):
        # Of a bias that the problem computes, torch has the derivative.
        given = any(call.bias is t for t in problem.tensors())
        named = "there is no derivative with an additive mask that requires grad; use impl='auto' or 'reference'"
        reason = named if given else None
    if impl != "auto" and reason is not None:
        raise UnsupportedImplementation(f"`impl={impl!r}`: {reason}")
    if call is None or reason is not None:
        return None
    check_kernel(impl, call)
    if torch.compiler.is_compiling() or is_fake(call.query):
        # As a part of a graph the operations take tensors of transforms, and shapes that are not known yet.
        return call
    wrapped = any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in call if isinstance(t, Tensor))
    return None if wrapped or call.query.numel() == 0 else call


def _has_all_gradients(call: Attention, impl: Impl) -> bool:
    """Whether kernels have the gradient of the bias of a call too, if that takes one."""
    bias = call.bias
    if bias is None or not bias.requires_grad:
        return True
    # One that is the same for all queries.
    return impl != "triton" and (bias.ndim < 2 or bias.shape[-2] == 1)


def check_kernel(impl: Impl, call: Attention) -> None:
    """Raise if a kernel is named that cannot take the call; it reads no numbers, which torch may trace."""
    reasons = {"native": native.unsupported, "triton": triton.unsupported}
    reason = reasons[impl](call) if impl in reasons else None
    if reason is not None:
        raise UnsupportedImplementation(f"`impl={impl!r}`: {reason}")


def in_half(call: Attention, impl: Impl) -> bool:
    """Whether products are in the half precision of the keys: by the kernels of a card, in float32 but for these."""
    return call.keys.dtype in HALF and _is_for_triton(impl, call._replace(beta=1.0, anchor=1.0))


def _is_for_triton(impl: Impl, call: Attention) -> bool:
    able = call.query.device.type in TRITON_DEVICES and triton.unsupported(call) is None
    return impl == "triton" or (impl == "auto" and able)


def _kernel(call: Attention, impl: Impl, rule: FusedRule = THERE) -> str | None:
    """The name of the kernel that answers, if its check lets it; None where torch answers."""
    if _is_for_triton(impl, call):
        if (reason := triton.too_fine(call.keys, rule)) is None:
            return "triton"
        if impl == "triton":
            raise UnsupportedImplementation(f"`impl='triton'`: {reason}")
    if impl != "native" and not (impl == "auto" and call.query.device.type == "cpu"):
        return None
    if not host_may_look_at_constant(*(t for t in call if isinstance(t, Tensor))):
        # A mode of torch sees operations on tensors, and not what a library writes to their memory.
        if impl == "native" and not is_fake(call.query):
            reason = "a mode is active that sees operations of torch alone, or the tensors are wrapped"
            raise UnsupportedImplementation(f"`impl='native'`: {reason}; use impl='auto'")
        return None
    if library.found()[0] is None:
        library.warn_once()
        return None
    return None if impl == "auto" and native.unsupported(call) is not None else "native"


# Kernels.


def solve_by_kernel(call: Attention, initial: Tensor, rule: FusedRule, impl: Impl) -> Solved | None:
    """Every query solved from `initial`, (*batch, N, D), by a kernel; None where none answers."""
    if initial.numel() == 0:
        return None
    call, name = call.joined(), _kernel(call, impl, rule)
    if name is None:
        return None
    if name == "native":
        call, initial = mapped(call.to(initial.dtype), native.in_memory), native.in_memory(initial)

    def run() -> Solved:
        if name == "native":
            return native.solve(call, initial, rule)[0]
        from .kernels.triton.solve import solve as triton_solve

        return triton_solve(call, initial, rule)

    return _trusted(name, "hopfield_solve", call, run, impl)


def adjoint_by_kernel(
    call: Attention,
    state: Tensor,
    cotangent: Tensor,
    limits: tuple[float | None, int],
    impl: Impl,
    evaluation: tuple[Tensor, ...],
    *,
    by_bias: Tensor | None = None,
) -> tuple[AdjointAnswer, Tensor] | None:
    """The solution of A u = cotangent for every query at its state, and the means of the keys there; None without.

    Queries that the kernel gives up, at saddles above all, have the status STALLED and add 0 to every gradient; NaN
    during the capture of a CUDA graph, where nothing can solve them again.

    limits: the rtol, None for that of the precision of products, and the largest number of products.
    evaluation: the means of the keys at the state, as a solve found them, and for Triton the log-sum-exps, too; without
        them they are evaluated here.
    by_bias: zeros (*batch, M), to which (df/db)^T u is added for a bias b of every key; Triton does not know it.
    """
    if state.numel() == 0:
        return None
    call, name = call.joined(), _kernel(call, impl)
    if name is None or (name == "triton" and by_bias is not None):
        return None
    if name == "native":
        call = mapped(call.to(state.dtype), native.in_memory)
        state, cotangent = map(native.in_memory, (state, cotangent))
    rule = AdjointRule(RTOL[call.keys.dtype] if limits[0] is None else limits[0], limits[1])

    def run() -> tuple[AdjointAnswer, Tensor]:
        if name == "native":
            mean = native.in_memory(evaluation[0]) if evaluation else None
            # A query that diverged has the mean of a later point than its state.
            if mean is None or not is_finite(mean):
                mean = native.solve(call, state, THERE)[0].mean
            return native.adjoint(call, state, cotangent, mean, None, rule, by_bias=by_bias), mean
        from .kernels.triton.adjoint import solve_adjoint as triton_adjoint
        from .kernels.triton.solve import solve as triton_solve

        mean, logsumexp = evaluation if len(evaluation) == 2 else triton_solve(call, state, THERE)[1:3]
        return triton_adjoint(call, state, cotangent, mean, logsumexp, rule), mean

    found = _trusted(name, "hopfield_adjoint", call, run, impl)
    if found is None:
        return None
    answer, mean = found
    stalled = answer.status == Status.STALLED
    if trust.captures(state.device):
        answer = unanswered(answer, stalled)
    elif bool(stalled.any()):
        answer = answer._replace(value=answer.value.masked_fill(stalled[..., None], 0.0))
    return answer, mean


def unanswered(answer: AdjointAnswer, stalled: Tensor) -> AdjointAnswer:
    """Answers with NaN for stalled queries and their sums: nothing can solve them again during a capture."""
    poison = torch.zeros_like(answer.by_beta).masked_fill(stalled, torch.nan)
    value, by_beta = answer.value + poison[..., None], answer.by_beta + poison
    by_keys = answer.by_keys + poison.sum(-1)[..., None, None].sum_to_size(*answer.by_keys.shape[:-2], 1, 1)
    return answer._replace(value=value, by_beta=by_beta, by_keys=by_keys)


def _trusted(name: str, operation: str, call: Attention, run: Callable[[], _R], impl: Impl) -> _R | None:
    """Return the answer of `run`, which calls the kernel of this name, if that is trusted, else None."""
    keys = call.keys
    if name == "triton":
        use = trust.Use(f"{operation} (triton)", keys.device, triton.variant(call, operation))
        check = partial(triton.errors, call, operation)
    else:
        loaded = library.found()[0]
        assert loaded is not None
        kind = "none" if call.mask is None and call.bias is None else trust.mask_kind(call.pairs)
        causal = call.first is not None
        use = _native_use(operation, keys.device, loaded.isa, keys.dtype, keys.shape[-1], kind, causal)
        check = partial(native.CHECKS[operation], call)
    return trust.answer(use, check, run, insists=name if impl == name else None)


@functools.lru_cache(maxsize=256)
def _native_use(operation: str, device: torch.device, *variant: Any) -> trust.Use:
    return trust.Use(f"{operation} (native)", device, native.NativeVariant(*variant))


def for_kernel(
    problem: Problem, initial: Tensor, solver: Solver, impl: Impl, *, every_step: bool = False, keys: Any = None
) -> tuple[Attention, Tensor, FusedRule] | None:
    """The arguments of a solve by a kernel; None where none can do it.

    keys: those of the problem in half precision, where they stay in it.
    """
    call = attention_of(problem, solver, impl, every_step=every_step)
    if call is None or (rule := solver.fused_rule(problem)) is None:
        return None
    return *_isolated((call if keys is None else call._replace(keys=keys)).joined(), initial), rule


def _isolated(call: Attention, initial: Tensor) -> tuple[Attention, Tensor]:
    """The call, in which keys that are not finite are 0; the states of queries that read such a key are NaN."""
    pairs = call.joined().pairs
    if (pairs is None and call.first is None) or surely_finite(call.keys):
        return call, initial
    dtype = call.query.dtype
    if pairs is None:
        assert call.first is not None
        (keys,), poison = without_nan_before([call.keys], call.first, call.query.shape[-2], dtype)
    else:
        attended = pairs if pairs.dtype == torch.bool else torch.ne(pairs, -torch.inf)
        # As many axes as the mask has.
        keys = call.keys[(None,) * (initial.ndim - call.keys.ndim)]
        (keys, _), poison = without_nan([keys, keys], attended[(None,) * (initial.ndim - attended.ndim)], dtype)
        keys = keys.reshape(call.keys.shape)
    return call._replace(keys=keys), initial if poison is None else initial + poison[..., None]


def _by_tensors(
    call: Attention, answer: AdjointAnswer, mean: Tensor, by_bias: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors of a call with their gradients, from the adjoint solve."""
    u, beta, anchor, bias = answer.value, call.beta, call.anchor, call.bias
    yield call.query, u * (anchor.detach()[..., None, None] if isinstance(anchor, Tensor) else anchor)
    yield call.keys, answer.by_keys
    if isinstance(beta, Tensor):
        yield beta, sum_to_shape(answer.by_beta.sum(-1), beta.shape)
    if isinstance(anchor, Tensor):
        yield anchor, sum_to_shape((u * (call.query.detach() - mean)).sum((-1, -2)), anchor.shape)
    if bias is not None and by_bias is not None:
        yield bias, sum_to_shape(by_bias[..., None, :], bias.shape)


# Plain tensors.


def fits_kernels(call: Attention, *others: Tensor) -> bool:
    """Whether all tensors are numbers in memory of one precision, and a mask takes no gradient, while `unobserved`.

    Few betas and anchors are read here: modules make them, and parameters change after they were checked.
    """
    query, keys, beta, anchor, mask, bias, _, values, _ = call
    tensors = [query, keys, *others]
    for part in (beta, anchor, bias, values):
        if isinstance(part, Tensor):
            tensors.append(part)
    if query.dtype not in PRECISIONS or not are_plain(query.dtype, *tensors):
        return False
    if (mask is not None and not are_plain(torch.bool, mask)) or (bias is not None and bias.requires_grad):
        return False
    for given, low, high in ((beta, LEAST, MOST), (anchor, 0.0, 1.0)):
        known: list[Any] = [given] if type(given) in (float, int) else []
        if isinstance(given, Tensor) and given.numel() <= MOST_NUMBERS and _broadcasts(given.shape, query.shape[:-2]):
            known = given.flatten().tolist()
        if not known or not (all(map(low.__le__, known)) and all(map(high.__ge__, known))):
            return False
    return query.numel() > 0 and keys.numel() > 0 and (values is None or values.numel() > 0)


@functools.lru_cache(maxsize=1024)
def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether `shape` broadcasts to `target` without enlarging it."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, whole) for size, whole in pairs)


def in_one_piece(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous, or would be with tokens before heads, as projections lay out heads."""
    return tensor.is_contiguous() or (tensor.ndim > 2 and tensor.transpose(-3, -2).is_contiguous())


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers of a plain tensor are known to be finite."""
    loaded = library.found()[0]
    if loaded is None or not in_one_piece(tensor):
        return math.isfinite(tensor.detach().sum().item())
    return bool(loaded.finite(tensor.itemsize, tensor.data_ptr(), tensor.numel()))


def solve_plainly(
    call: Attention,
    initial: Tensor,
    plan: Plan,
    report: AdjointReport,
    *,
    whole: bool = True,
    problem: Problem | None = None,
) -> tuple[Tensor, SolveReport, bool] | None:
    """The states by one call of a kernel, differentiable, their report, and whether some may have failed, else None.

    Keys in half precision stay in it, for a card's kernel; plain tensors of others are for the native library: for
    these call it while `unobserved`.

    whole: whether the report is to be the whole solution.
    problem: the energy of the call, which is made where it is needed.
    """
    rule, impl, half = plan.rule, plan.impl, call.keys.dtype in HALF
    if rule is None or _sampled(report.site) is not None:
        return None
    if half:
        given = _solved_in_half(call, initial, rule, impl)
        if given is None:
            return None
        (call, solved), failed = given, True
        differentiated = is_differentiated(*(t for t in call if isinstance(t, Tensor)))
    else:
        if impl == "triton" or not fits_kernels(call, initial) or initial.shape != call.query.shape:
            return None
        # Keys that are not finite must not reach queries that do not attend to them.
        is_masked = call.mask is not None or call.bias is not None or call.first is not None
        if call.query.ndim > native.AXES + 2 or (is_masked and not is_finite(call.keys)):
            return None
        if not (isinstance(call.anchor, Tensor) or _validate.keeps_digits(call.query.dtype, call.anchor)):
            return None
        if library.found()[0] is None:
            library.warn_once()
            return None
        call = call if call.mask is None or call.bias is None else call.joined()
        # Query, keys, beta, anchor, mask and bias; values are read out afterwards.
        differentiated = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in call[:6])
        run = partial(native.solve, call, initial, rule)
        found = _trusted("native", "hopfield_solve", call, run, impl)
        if found is None:
            return None
        solved, failed = found[0], found[1] > 0
    name = "triton" if half else "native"
    way = Route(plan.solver, impl, False, solved.state.dtype, name, name, name, floor=FLOOR if half else None)
    outcome = Outcome(solved.state, Record(*solved[3:]), evaluation=solved[1:3] if half or not failed else ())
    if differentiated:
        energy, start = _unchecked(call) if problem is None else problem, solved.state.detach()
        request = Request(energy, start, plan.solver, impl, False, report, route=way, known=outcome)
        outcome = outcome._replace(value=attached(request, *energy.tensors())[0])
    outcome, told = concluded(outcome, report, plan.remedies, way, failed=failed)
    if not whole:
        return outcome.value, SolveReport(**told), failed
    energy_function = partial(_energy_at, call) if problem is None else problem.energy
    return outcome.value, _whole(told, outcome, energy_function), failed


def _solved_in_half(call: Attention, initial: Tensor, rule: FusedRule, impl: Impl) -> tuple[Attention, Solved] | None:
    """The call, with temperatures and anchors in float32, and its states by a card's kernel; None where none answers.

    States are float32, too.
    """
    # Where the host does not look, numbers out of their range become NaN.
    beta = _validate.inside(call.beta, low=0.0, open_low=True)
    anchor = _validate.inside(call.anchor, low=0.0, high=1.0)
    beta, anchor = (t.float() if isinstance(t, Tensor) else t for t in (beta, anchor))
    call = call._replace(beta=beta, anchor=anchor, values=None, dropout=0.0)
    if not in_half(call, impl) or transforms_active() or is_fake(call.keys):
        return None
    # Other starts are refused where problems are checked.
    if initial.dtype not in (torch.float32, *HALF) or initial.device != call.keys.device or initial.numel() == 0:
        return None
    if initial.shape != call.query.shape or not _validate.keeps_digits(torch.float32, call.anchor):
        return None
    if call.bias is not None and is_differentiated(call.bias):
        return None
    check_kernel(impl, call)
    if _kernel(call, impl, rule) != "triton":
        return None
    with torch.no_grad():
        found = solve_by_kernel(*_isolated(call.detached(), initial.detach().float()), rule, impl)
    return None if found is None else (call, found)


def _energy_at(call: Attention, z: Tensor) -> Tensor:
    return energy_of(call.to(z.dtype)).energy(z)


def energy_of(call: Attention) -> AnchoredEnergy:
    """The energy of a call, for the loop, which checks shapes; numbers out of their range are NaN once it is solved."""
    query, keys, beta, anchor, mask, bias, first = call[:7]
    if first is not None and (mask is not None or bias is not None):
        lower = triangle(query.shape[-2], keys.shape[-2], first, query.device)
        mask, first = lower if mask is None else mask & lower, None
    # Ones pass the checks of numbers.
    ones = [torch.ones_like(t) if isinstance(t, Tensor) else t for t in (beta, anchor)]
    potential = LogSumExp(keys, ones[0], mask=mask, bias=bias, query_offset=first)
    energy = AnchoredEnergy(potential, query, ones[1], unbounded="ignore")
    return energy.replace(*(t for t in (keys, beta, mask, bias, query, anchor) if isinstance(t, Tensor)))


def _unchecked(call: Attention) -> AnchoredEnergy:
    """The same for a call that a kernel has answered, whose keys may be in half precision beside float32."""
    query, keys, beta, anchor, mask, bias, first = call[:7]
    potential, energy = object.__new__(LogSumExp), object.__new__(AnchoredEnergy)
    vars(potential).update(keys=keys, beta=beta, mask=mask, bias=bias, _dense=False, query_offset=first)
    vars(energy).update(potential=potential, field=query, anchor=anchor)
    return energy


# Calls of the operations that torch knows by name.


def solved(call: Attention, initial: Tensor, rule: FusedRule, impl: Impl) -> Solved:
    """The equilibria by a kernel, or by the loop where none answers."""
    if (found := solve_by_kernel(call, initial, rule, impl)) is not None:
        return found
    options: dict[str, Any] = {"rtol": rule.rtol, "atol": rule.atol, "max_steps": rule.max_steps}
    plain = rule.plain_steps > rule.max_steps
    solver = Picard(**options) if plain else Anderson(history=1, plain_steps=rule.plain_steps, **options)
    with torch.no_grad(), exact_precision(initial):
        energy = _read_energy(call.to(initial.dtype), impl)
        state, record = solver.run(energy, initial)[:2]
        potential = energy.potential
        assert isinstance(potential, LogSumExp)
        mean, logsumexp = potential.readout_with_logsumexp(state, potential.keys)
    return Solved(state, mean, logsumexp.masked_fill(logsumexp == -torch.inf, 0.0), *record)


def _read_energy(call: Attention, impl: Impl) -> AnchoredEnergy:
    """The energy of a call without a graph, whose queries are not read where the anchor is 0."""
    call = call.detached()
    unread = call.anchor == 0
    query = call.query.masked_fill(unread[..., None, None], 0.0) if isinstance(unread, Tensor) else call.query
    energy = energy_of(call._replace(query=query))
    return written_out(energy) if impl == "reference" else energy  # type: ignore[return-value]


def adjoint_solved(
    call: Attention,
    state: Tensor,
    cotangent: Tensor,
    limits: tuple[float | None, int],
    impl: Impl,
    evaluation: tuple[Tensor, ...],
) -> AdjointAnswer:
    """The adjoint solves by a kernel, and by the linear solvers where none answers or it gives a query up."""
    found = adjoint_by_kernel(call, state, cotangent, limits, impl, evaluation)
    kernel = None if found is None else found[0]
    if kernel is not None and (trust.captures(state.device) or not bool((kernel.status == Status.STALLED).any())):
        return kernel
    least = FLOAT32_RTOL if state.dtype == torch.float32 else 0.0
    rtol = RTOL[state.dtype] if limits[0] is None else limits[0]
    method = CG(rtol=min(max(rtol, least), 1.0), max_steps=max(limits[1], 1))
    with torch.no_grad(), exact_precision(state):
        whole = _read_energy(call.to(state.dtype), impl)
        energy, state = isolated(whole, state, unread(state, cotangent, 1))
        keys, *others = energy.tensors()
        energy = energy.replace(keys.requires_grad_(), *others)
        known = None
        if kernel is not None:
            solution = LinearSolution(kernel.record, kernel.value, kernel.negative_curvature)
            known = (kernel.by_keys, *(None for _ in others)), solution
        gradients, answer = gradients_by_rows(method, energy, state, cotangent, known=known)
        u, scale = normalised(answer.value)
        beta = call.beta[..., None] if isinstance(call.beta, Tensor) else call.beta
        by_beta = scale * ((state * jacobian_product(energy, state, u)).sum(-1) / beta)
    assert gradients[0] is not None
    if kernel is not None:
        by_beta = torch.where(kernel.status == Status.STALLED, by_beta, kernel.by_beta)
    evidence = answer.status, answer.residual, answer.tolerance, answer.num_steps.to(torch.int32)
    return AdjointAnswer(answer.value, *evidence, answer.negative_curvature, by_beta, gradients[0])


def written_out(problem: Problem) -> Problem:
    """The same problem with every product of its potential written out, for impl="reference"."""
    if not isinstance(problem, AnchoredEnergy) or not isinstance(problem.potential, LogSumExp | OverLogSumExp):
        return problem
    clone = problem.replace(*problem.tensors())
    clone.potential = problem.potential.written_out()
    return clone
