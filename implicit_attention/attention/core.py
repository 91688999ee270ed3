"""The core of equilibrium attention, which the function and the layers share: solve for the queries, then read out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._autograd import (
    HALF,
    at_least_single,
    backward_running,
    exact_precision,
    host_may_look,
    in_own_precision,
    into_onnx,
    is_batched,
    is_exporting,
    is_fake,
    may_have_tangent,
    uncompiled,
)
from .._operations import solved_in_graph
from .._reporting import report_failures, without_gradient
from .._solve import solve
from ..adjoints import Implicit, Unrolled
from ..energies import AnchoredEnergy
from ..errors import UnsupportedImplementation
from ..failure_policy import FailurePolicy, FailureSite, located, policy_of
from ..fused import lower
from ..kernels.problem import Hopfield
from ..options import SolveOptions
from ..potentials import LogSumExp, Potential
from ..potentials.log_sum_exp import OverLogSumExp
from ..potentials.scored_keys import ScoredKeys
from ..solution import NO_REMEDIES, AdjointReport, Record, Solution, SolveReport, Trace
from ..solvers import Picard
from ..solvers.exported import check_budget, check_no_evidence, is_budget, stepped
from ..status import OF_ATTENTION, Status, advice
from . import direct
from .call import Attended, Call
from .heads import group_size, split_groups
from .masks import check_whole, triangle
from .read_out import made_by, read_out, reads_out, refuse_shapes


def report_from_graph(record: Record, options: SolveOptions, site: FailureSite | None = None) -> SolveReport:
    """The report of a solve in a compiled graph, at which the host looks now; warns if a problem failed."""
    on_failure, remedies = options.on_failure, advice(options.effective_solver.remedies, f"attention: {OF_ATTENTION}")
    # The policy of the call is in the graph. Reading an attribute of a layer warns, and does not raise.
    policy: Any = "warn" if on_failure == "raise" else on_failure
    if isinstance(policy, FailurePolicy) and policy.over == "raise":
        policy = dataclasses.replace(policy, over="warn")
    report_failures(policy, "the compiled solve", record, remedies, site=site)
    adjoint, solver = AdjointReport(in_graph=True, on_failure=on_failure, site=site), options.effective_solver
    return SolveReport(record, adjoint, remedies, tolerances=(solver.rtol, solver.atol))


def is_repetition(remembered: SolveReport | Record | None) -> bool:
    """Whether a backward pass runs that will fill the remembered report, so that the present solve repeats that one.

    Checkpointing that is not reentrant computes a forward pass again in the backward pass. The gradient is then that of
    the first solve's graph, and so is its report.
    """
    return isinstance(remembered, SolveReport) and remembered.adjoint.awaited and backward_running()


def attend(call: Call, *, eager: bool | None = None) -> Attended:
    """Equilibria of the queries over the keys, and the read-out there: softmax attention over values, or the state.

    With max_steps=0 nothing is solved: the read-out is taken at the query, and without values it is one step of the
    map.

    Under torch.compile the solve is one operation of the graph where there is one for it; the host then learns of
    failures when it reads the report. Otherwise the graph breaks once. Tensors that have shapes alone (meta, fake) take
    the same path.

    eager: the value of `direct.eager()`, if the caller has it.
    """
    eager = direct.eager() if eager is None else eager
    if eager and type(call.query) is Tensor and call.query.is_cpu:
        # The contexts and wrappers below have nothing to keep out.
        call = call if call.first is None else _with_triangle(call)
        dtype, grouped = call.query.dtype, call.grouped and call.query.shape[-3] != call.keys.shape[-3]
        # Most calls need neither groups nor another precision.
        attended = None if grouped or dtype in HALF else _directly(call, dtype)
        return _by_groups(call, _answer, in_graph=False) if attended is None else attended  # type: ignore[return-value]
    check_whole()
    call = _with_triangle(call.recorded())
    in_graph = torch.compiler.is_compiling()
    if is_exporting():
        return _exported(call)
    if in_graph and any(isinstance(t, Tensor) and may_have_tangent(t) for t in call):
        raise UnsupportedImplementation(
            "equilibria have no forward-mode derivative (torch.func.jvp, jacfwd, hessian, dual numbers) inside "
            "torch.compile; call them outside of it"
        )
    if (in_graph or is_fake(call.query)) and _fits_graph(call):
        attended = _by_groups(call, _answered, in_graph=True)
        if attended is not None:
            return attended
    return _outside_graph(call)


def _with_triangle(call: Call) -> Call:
    """The call with a mask in the place of `first`, unless the potential takes `first` itself."""
    first, count = call.first, call.keys.shape[-2]
    if first is None:
        return call
    # An exported program must hold for other lengths.
    if not is_exporting():
        if first + 1 >= count:
            return call._replace(first=None)
        if call.mask is None and call.bias is None and call.potential is LogSumExp:
            return call
    lower = triangle(call.query.shape[-2], count, first, call.query.device)
    return call._replace(mask=lower if call.mask is None else call.mask & lower, first=None)


@uncompiled
def _outside_graph(call: Call) -> Attended:
    return _whole(_by_groups(call, _answered, in_graph=False))


def _whole(attended: Attended | None) -> Attended:
    assert attended is not None
    return attended


def _fits_graph(call: Call) -> bool:
    """Whether the solve may be an operation in the graph of a compiler, if there is one for it."""
    options, adjoint = call.options, call.options.adjoint
    if call.return_solution or call.trace or call.return_weights:
        return False
    make = call.potential
    if make is not LogSumExp and not (isinstance(make, type) and OverLogSumExp in make.__bases__):
        return False
    if call.keys.shape[-2] == 0 or policy_of(options.on_failure).over == "raise" or options.impl == "reference":
        return False
    if call.bias is not None and call.bias.requires_grad:
        return False
    if options.explicit:
        return call.values is not None
    exact = adjoint is None or (isinstance(adjoint, Implicit) and adjoint.linear_solver is None)
    return exact and not options.effective_solver.fixed_budget


def _exported(call: Call) -> Attended:
    """The answer as operations of an exported program: plain ones of a fixed budget, or the one of a solve."""
    check_no_evidence(call.return_solution, "return_solution")
    check_no_evidence(call.trace, "return_trajectory")
    solver, attended = call.options.effective_solver, None
    if is_budget(solver):
        # Products written out take any number of keys, torch's kernels at least one.
        call = call._replace(options=call.options.override(impl="reference"))
    if is_budget(solver) or (_fits_graph(call) and not into_onnx()):
        attended = _by_groups(call, _answered, in_graph=True)
    if attended is None:
        check_budget(solver)
    assert attended is not None
    return attended


# Heads that share keys.


def _by_groups(call: Call, answer: Callable[[Call, bool], Attended | None], *, in_graph: bool) -> Attended | None:
    """The answer of a call whose heads share keys, by a call with an axis along which the keys broadcast.

    None if a compiler's graph needs operations, and no operation does the solve.
    """
    if not call.grouped or call.query.shape[-3] == call.keys.shape[-3] != 0:
        return answer(call, in_graph)
    groups = group_size(call.query, call.keys)
    attended = answer(_split(call.recorded(), groups), in_graph)
    if attended is None:
        return None
    output, state, report, solution, weights = attended
    output, state = output.flatten(-4, -3), state.flatten(-4, -3)
    weights = None if weights is None else weights.flatten(-4, -3)
    if solution is not None:
        solution = _merged(solution)
        report = None if report is None else solution.report
    elif report is not None:
        report = report.map(_merge_heads)
    return Attended(output, state, report, solution, weights)


def _merge_heads(of_problems: Tensor) -> Tensor:
    return of_problems.flatten(-3, -2)


def _split(call: Call, groups: int) -> Call:
    heads, tiled = call.query.shape[-3], call.grouped == "tiled"
    shared = -4 if tiled else -3
    return call._replace(
        query=split_groups(call.query, heads, groups, -3, tiled),
        keys=call.keys.unsqueeze(shared),
        values=None if call.values is None else call.values.unsqueeze(shared),
        beta=split_groups(call.beta, heads, groups, -1, tiled),
        anchor=split_groups(call.anchor, heads, groups, -1, tiled),
        mask=split_groups(call.mask, heads, groups, -3, tiled),
        bias=split_groups(call.bias, heads, groups, -3, tiled),
        initial=split_groups(call.initial, heads, groups, -3, tiled),
    )


def _merged(solution: Solution) -> Solution:
    merged = solution.map(_merge_heads)
    trace, function, split = merged.trace, merged.energy_function, merged.value.shape
    if trace is not None:
        residual, energy, evals = (None if t is None else _merge_heads(t) for t in trace[:3])
        trace = Trace(residual, energy, evals, trace.value.flatten(-4, -3))  # type: ignore[arg-type]
    whole = None if function is None else lambda z: _merge_heads(function(z.reshape(split)))
    return dataclasses.replace(merged, value=merged.value.flatten(-4, -3), trace=trace, energy_function=whole)


# The answer.


@in_own_precision
def _answered(given: Call, in_graph: bool) -> Attended | None:
    """The answer in the precision of the call, also inside autocast and modes of torch; None as in `_by_groups`."""
    with exact_precision(given.query):
        return _answer(given, in_graph, eager=not in_graph and direct.eager())


def _answer(given: Call, in_graph: bool, *, eager: bool = True) -> Attended | None:
    if empty := given.keys.shape[-2] == 0:
        given = _with_masked_key(given)
    call = _in_single(given)
    if eager and not empty and (attended := _directly(call, given.query.dtype)) is not None:
        return attended
    call, given = call.recorded(), given.recorded()
    try:
        potential = _potential(call)
        unbounded = "ignore" if call.options.explicit else call.unbounded
        energy = AnchoredEnergy(potential, call.query, call.anchor, unbounded=unbounded)
        if call.values is not None or call.return_weights:
            reads_out(potential)
        if call.options.explicit:
            if (impl := call.options.impl) in ("native", "triton"):
                reason = "solves, and max_steps=0 solves nothing; use impl='auto'"
                raise UnsupportedImplementation(f"`impl={impl!r}` {reason}")
            state, solution = call.query, _explicit_solution(energy, call, in_graph)
            output = _explicit_output(energy, call, given)
        else:
            solved = _solved(energy, call, in_graph)
            if solved is None:
                return None
            state, solution = _stood_in(energy, call, *solved)
            output = state if call.values is None else read_out(potential, state, call.values, call.dropout_p)
    except (RuntimeError, ValueError) as error:
        refuse_shapes(call, error)
        raise
    weights = reads_out(potential).probabilities(state) if call.return_weights else None
    if empty and weights is not None:
        weights = weights[..., :0]
    output = output.to(given.query.dtype)
    if isinstance(solution, Record):
        return Attended(output, state, solution, None, weights)
    report = None if is_batched(solution.status) else solution.report
    return Attended(output, state, report, solution, weights)


def _directly(call: Call, dtype: torch.dtype) -> Attended | None:
    """The answer for inputs of `dtype` by operations on plain tensors, else None. Call while `eager`."""
    options = call.options
    plan = options.plan if call.potential is LogSumExp else None
    if plan is None or not (plan.explicit or plan.rule is not None):
        return None
    asked = call.dropout_p != 0 or call.trace or call.return_weights or (plan.explicit and call.return_solution)
    if asked or (call.mask is not None and call.bias is not None):
        return None
    site, on_failure = call.site, options.on_failure
    if site is not None and site.tally is not None and site.tally.spectral:
        return None
    if type(on_failure) is not str and policy_of(on_failure).forward == "explicit":
        return None
    if plan.explicit and torch.is_grad_enabled():
        call = call.recorded()
    pairs, sources = call.mask if call.bias is None else call.bias, call.sources
    problem = Hopfield(call.query, call.keys, call.beta, call.anchor, pairs, call.first)
    if plan.explicit:
        # A read-out in half precision widens nothing.
        fits = dtype not in HALF and call.values is not None and options.impl == "auto"
        output = direct.explicit(problem, call.values, sources) if fits else None
        if output is None:
            return None
        # The report must not keep the queries.
        shape, kind = call.query.shape, call.query.dtype
        later: dict[str, Callable[[], Any]] = {
            "record": lambda: Record.unmeasured(torch.empty(*shape[:-1], 0, dtype=kind), Status.EXPLICIT, 1),
            "adjoint": AdjointReport,
        }
        return Attended(output, call.query, SolveReport.deferred(later, remedies=NO_REMEDIES), None)
    initial = call.query if call.initial is None else call.initial
    if type(on_failure) is not str:
        on_failure, site = located(call.on_failure)
    attended = direct.solved(
        problem, call.values, initial, plan, on_failure, site, sources, solution=call.return_solution
    )
    return attended if attended is None or dtype not in HALF else attended._replace(output=attended.output.to(dtype))


def _with_masked_key(call: Call) -> Call:
    """The call with one masked key in the place of no key: a query attends to nothing either way."""
    keys, values = call.keys, call.values
    return call._replace(
        keys=keys.new_zeros(*keys.shape[:-2], 1, keys.shape[-1]),
        values=None if values is None else values.new_zeros(*values.shape[:-2], 1, values.shape[-1]),
        mask=torch.zeros(1, dtype=torch.bool, device=keys.device),
        bias=None,
        first=None,
    )


def _in_single(call: Call) -> Call:
    """The call in the precision of the solve: float32 where it came in half precision."""
    dtype, beta, anchor = call.query.dtype, call.beta, call.anchor
    if (
        dtype not in HALF
        and call.keys.dtype == dtype
        and (call.values is None or call.values.dtype == dtype)
        and call.bias is None
        and call.initial is None
        and (not isinstance(beta, Tensor) or beta.dtype == dtype)
        and (not isinstance(anchor, Tensor) or anchor.dtype == dtype)
    ):
        return call
    call = call.recorded()
    query, keys, values, bias, initial = map(
        at_least_single, (call.query, call.keys, call.values, call.bias, call.initial)
    )
    beta, anchor = (t.to(query.dtype) if isinstance(t, Tensor) else t for t in (call.beta, call.anchor))
    return call._replace(query=query, keys=keys, values=values, bias=bias, initial=initial, beta=beta, anchor=anchor)


def _potential(call: Call) -> Potential:
    made = made_by(call.potential, call.keys, call.beta, mask=call.mask, bias=call.bias, query_offset=call.first)
    if call.options.impl == "reference" and isinstance(made, LogSumExp | OverLogSumExp):
        return made.written_out()
    return made


def _solved(energy: AnchoredEnergy, call: Call, in_graph: bool) -> tuple[Tensor, Solution | Record] | None:
    options, initial = call.options, call.query if call.initial is None else call.initial
    if in_graph and is_budget(options.effective_solver):
        solver = options.effective_solver
        return stepped(solver, energy, initial), Record.unmeasured(call.query, solver.exhausted, 1)
    if in_graph:
        lowered = lower(energy, options.effective_solver, options.impl)
        # The operation has no gradient of a bias, which the potential may compute from its keys.
        if lowered is None or (lowered.potential.bias is not None and lowered.potential.bias.requires_grad):
            return None
        # An exported program keeps no site, and counts nothing.
        site = None if is_exporting() else located(call.on_failure)[1]
        state, record = solved_in_graph(lowered, initial, options.on_failure, site)
        return without_gradient(options.on_failure, record.failed, state), record
    solution = solve(
        energy,
        initial,
        solver=options.effective_solver,
        adjoint=options.effective_adjoint,
        impl=options.impl,
        on_failure=call.on_failure,
        trace=call.trace,
    )
    return solution.value, solution


def _stood_in(
    energy: AnchoredEnergy, call: Call, state: Tensor, solution: Solution | Record
) -> tuple[Tensor, Solution | Record]:
    """The states; with forward="explicit" those of failed queries are replaced by the states of max_steps=0."""
    failed = solution.failed
    if policy_of(call.options.on_failure).forward == "best" or (host_may_look(failed) and not bool(failed.any())):
        return state, solution
    instead = energy.fixed_point_map(call.query) if call.values is None else call.query
    return torch.where(failed[..., None], instead, state), solution


# Explicit steps.


def _explicit_solution(energy: AnchoredEnergy, call: Call, in_graph: bool) -> Solution | Record:
    """The query as a solution with the status EXPLICIT; its residual is evaluated only if it is asked for."""
    if not (call.return_solution or call.trace):
        record = Record.unmeasured(call.query, Status.EXPLICIT, 1)
        return record if in_graph else Solution(record, value=call.query.detach())
    # Without tolerances the status is EXPLICIT even where the query solves its problem.
    solver = Picard(rtol=0, atol=0, max_steps=0)
    with torch.no_grad():
        detached = energy.replace(*(t.detach() for t in energy.tensors()))
        query = call.query.detach()
        return solve(detached, query, solver=solver, adjoint=Unrolled(), on_failure="ignore", trace=call.trace)


def _explicit_output(energy: AnchoredEnergy, call: Call, given: Call) -> Tensor:
    """One step of the map, or the values read out at the query: in half precision if the whole call `given` has it."""
    if call.values is None or given.values is None:
        return energy.fixed_point_map(call.query)
    dtype, potential, query, values = given.query.dtype, energy.potential, call.query, call.values
    # A potential that computes a bias from its keys and beta differs from the one of keys and beta in half precision.
    scores_alone = isinstance(potential, ScoredKeys) and potential.bias is call.bias
    half = all(t is None or t.dtype == dtype for t in (given.keys, given.values, given.bias))
    if dtype in HALF and scores_alone and half:
        query, values, beta = given.query, given.values, call.beta
        if isinstance(beta, Tensor):
            # A rounded temperature would shift all scores alike; the rounding of a product does not.
            query, beta = (beta[..., None, None] * query).to(dtype), 1.0
        potential = _potential(given._replace(beta=beta))
    output = read_out(potential, query, values, call.dropout_p)
    # The output does not depend on the anchor, but a parameter without any gradient stops distributed training.
    anchor = given.anchor
    return output + 0 * anchor.sum() if isinstance(anchor, Tensor) and anchor.requires_grad else output
