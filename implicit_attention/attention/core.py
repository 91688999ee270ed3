"""The core of equilibrium attention, which the function and the layers share: solve for the queries, then read out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .._autograd import (
    backward_running,
    exact_precision,
    is_batched,
    is_differentiated,
    is_fake,
    may_have_tangent,
    transforms_active,
    uncompiled,
)
from .._reporting import report_failures
from .._types import OnFailure
from ..adjoints import Implicit, Unrolled
from ..energies import AnchoredEnergy
from ..errors import UnsupportedImplementation
from ..ops.attention import FLASH_KEYS
from ..ops.problem import carries
from ..options import SolveOptions
from ..potentials import LogSumExp
from ..potentials.log_sum_exp import ReferenceLogSumExp, SDPALogSumExp, TritonLogSumExp
from ..problem import Problem
from ..solution import AdjointReport, Record, Solution, SolveReport, Trace
from ..solve import solve
from ..solvers import Picard
from ..status import Status
from .heads import group_size, split_groups
from .masks import check_whole
from .read_out import PotentialFactory, at_least_single, explicit_read_out, made_by, read_out, weights_of, with_anchor


def report_from_graph(record: Record, on_failure: OnFailure) -> SolveReport:
    """The report of a solve in a compiled graph, which the host has not looked at; warns if a problem failed."""
    report_failures("warn" if on_failure == "raise" else on_failure, "the compiled solve", *record[:4])
    return SolveReport(**record._asdict(), adjoint=AdjointReport(in_graph=True, on_failure=on_failure))


def is_repetition(remembered: SolveReport | Record | None) -> bool:
    """Whether a backward pass runs that will fill the remembered report, so that what is solved now repeats that solve.

    Checkpointing that is not reentrant computes a forward pass again in the backward pass. The gradient is then that of
    the first solve's graph, and so is its report.
    """
    return isinstance(remembered, SolveReport) and remembered.adjoint.awaited and backward_running()


class Attended(NamedTuple):
    """What was read out, and the solve behind it.

    Attributes:
        output: (*batch, H, N, E), or (*batch, N, E) without heads.
        state: the equilibrium that was read at, in the precision of the solve.
        solution: the `Solution`; from a compiled graph its `Record`, at which the host has not looked.
        report: what a layer may remember of it; None inside torch.vmap, which no tensor may leave.
        weights: (*batch, H, N, M), if they were asked for.
    """

    output: Tensor
    state: Tensor
    solution: Solution | Record
    report: SolveReport | Record | None
    weights: Tensor | None


def _attended(output: Tensor, state: Tensor, solution: Solution, weights: Tensor | None) -> Attended:
    return Attended(output, state, solution, None if is_batched(solution.status) else solution.report, weights)


class _Inputs(NamedTuple):
    """What attends, to what, and how strongly."""

    query: Tensor
    keys: Tensor
    values: Tensor | None
    beta: float | Tensor
    anchor: float | Tensor
    mask: Tensor | None
    bias: Tensor | None
    initial: Tensor | None


class _Request(NamedTuple):
    """How it is answered, and what is asked for beside the answer."""

    potential: PotentialFactory
    options: SolveOptions
    dropout_p: float
    grouped: bool | Literal["tiled"]
    trace: bool
    return_solution: bool
    return_weights: bool


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor | None,
    *,
    beta: float | Tensor,
    anchor: float | Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    potential: PotentialFactory = LogSumExp,
    options: SolveOptions,
    dropout_p: float = 0.0,
    grouped: bool | Literal["tiled"] = False,
    initial: Tensor | None = None,
    trace: bool = False,
    return_solution: bool = False,
    return_weights: bool = False,
) -> Attended:
    """Equilibria of `query` over `keys` and what is read out there: softmax attention over `values`, or the state.

    With max_steps=0 nothing is solved: the read-out is taken at the query, and without values it is one step of the
    map. The residual there is evaluated with `return_solution` (or `trace`) only.

    Under torch.compile the solve is one operation of the graph where there is one for it; the host then learns of
    failures when it asks for the report. Otherwise the graph breaks once. Tensors that have shapes alone (meta, fake)
    take the same path.
    """
    check_whole()
    inputs = _Inputs(query, keys, values, beta, anchor, mask, bias, initial)
    request = _Request(potential, options, dropout_p, grouped, trace, return_solution or trace, return_weights)
    if torch.compiler.is_compiling() and any(isinstance(t, Tensor) and may_have_tangent(t) for t in inputs):
        raise UnsupportedImplementation(
            "equilibria have no forward-mode derivative (torch.func.jvp, jacfwd, hessian, dual numbers) inside "
            "torch.compile; call them outside of it"
        )
    if (torch.compiler.is_compiling() or is_fake(query)) and _fits_graph(inputs, request):
        return _by_heads(inputs, request, _in_graph)
    return _outside_graph(inputs, request)


@uncompiled
def _outside_graph(inputs: _Inputs, request: _Request) -> Attended:
    return _by_heads(inputs, request, _attend)


def _by_heads(inputs: _Inputs, request: _Request, answer: Callable[[_Inputs, _Request], Attended]) -> Attended:
    """The answer, with an axis for the heads that share keys while it is found."""
    if not request.grouped or (groups := group_size(inputs.query, inputs.keys)) == 1:
        return answer(inputs, request)
    query, keys, values, beta, anchor, mask, bias, initial = inputs
    heads, tiled = query.shape[-3], request.grouped == "tiled"
    query, mask, bias, initial = (  # type: ignore[assignment]
        t if t is None else split_groups(t, heads, groups, -3, tiled) for t in (query, mask, bias, initial)
    )
    beta, anchor = (
        split_groups(t, heads, groups, -1, tiled) if isinstance(t, Tensor) and t.ndim else t for t in (beta, anchor)
    )
    shared = -4 if tiled else -3
    keys, values = keys.unsqueeze(shared), None if values is None else values.unsqueeze(shared)
    attended = answer(_Inputs(query, keys, values, beta, anchor, mask, bias, initial), request)
    output, state = attended.output.flatten(-4, -3), attended.state.flatten(-4, -3)
    weights = None if attended.weights is None else attended.weights.flatten(-4, -3)
    if isinstance(attended.solution, Record):
        record = attended.solution.map(lambda t: t.flatten(-3, -2))
        return Attended(output, state, record, record, weights)
    return _attended(output, state, _merge_groups(attended.solution), weights)


def _attend(inputs: _Inputs, request: _Request) -> Attended:
    query, keys, values, beta, anchor, mask, bias, initial = inputs
    potential, options, trace = request.potential, request.options, request.trace
    if empty := keys.shape[-2] == 0:
        # Nothing to attend to is one key that nobody attends to.
        keys = keys.new_zeros(*keys.shape[:-2], 1, keys.shape[-1])
        values = None if values is None else values.new_zeros(*values.shape[:-2], 1, values.shape[-1])
        mask, bias = torch.zeros(1, dtype=torch.bool, device=keys.device), None
    make = _implementation(potential, options, keys, bias, trace)
    dtype, narrow = query.dtype, (query, keys, values, bias)
    with exact_precision(query):
        query, keys, values, bias, initial = map(at_least_single, (query, keys, values, bias, initial))
        beta, anchor = (t.to(query.dtype) if isinstance(t, Tensor) else t for t in (beta, anchor))
        energy = AnchoredEnergy(made_by(make, keys, beta, mask, bias), query, anchor)
        if values is not None and not hasattr(energy.potential, "readout"):
            raise UnsupportedImplementation(
                f"{type(energy.potential).__name__} has no weights to read values out with (no method `readout`); "
                "use readout='state'"
            )
        if not options.explicit:
            solution = solve(
                energy,
                query if initial is None else initial,
                solver=options.effective_solver,
                adjoint=options.effective_adjoint,
                on_failure=options.on_failure,
                trace=trace,
            )
            z = output = solution.value
            if values is not None:
                output = read_out(energy.potential, z, values, request.dropout_p)
        else:
            z = query
            solution = _explicit_solution(energy, query, trace) if request.return_solution else _unmeasured(query)
            if values is None:
                output = with_anchor(energy.fixed_point_map(query), anchor)
            else:
                parts = (query, values, narrow, beta, anchor, mask, request.dropout_p)
                output = explicit_read_out(make, energy.potential, *parts)
        weights = weights_of(energy.potential, z)[..., : 0 if empty else None] if request.return_weights else None
        return _attended(output.to(dtype), z, solution, weights)


def _implementation(
    potential: PotentialFactory, options: SolveOptions, keys: Tensor, bias: Tensor | None, trace: bool
) -> PotentialFactory:
    """The factory that does it as `options.impl` says, or an error that says who can."""
    impl = options.impl
    if impl == "auto":
        return potential
    if potential is not LogSumExp:
        name = getattr(potential, "__name__", type(potential).__name__)
        raise UnsupportedImplementation(f"`impl={impl!r}` exists for LogSumExp only, not for {name}; use impl='auto'")
    if impl == "reference":
        return ReferenceLogSumExp
    if impl == "sdpa" and keys.shape[-2] < FLASH_KEYS:
        raise UnsupportedImplementation(
            f"`impl='sdpa'` needs at least {FLASH_KEYS} keys (torch's kernel loses NaN below), got "
            f"{keys.shape[-2]}; use impl='auto' or 'reference'"
        )
    if transforms_active() or (bias is not None and is_differentiated(bias)):
        what = "inside torch.func" if transforms_active() else "with an additive mask that requires grad"
        raise UnsupportedImplementation(f"`impl={impl!r}` has no derivative {what}; use impl='auto' or 'reference'")
    if impl == "sdpa":
        return SDPALogSumExp
    if options.explicit:
        raise UnsupportedImplementation("`impl='triton'` solves, and max_steps=0 solves nothing; use impl='sdpa'")
    if trace or options.effective_solver.stop(_MONOTONE) is None:
        what = "a trajectory" if trace else f"{type(options.effective_solver).__name__} with these options"
        remedy = "use solver=Anderson() or Picard(), or impl='auto'"
        raise UnsupportedImplementation(f"`impl='triton'` has no kernel for {what}; {remedy}")
    return TritonLogSumExp


# Under torch.compile.


class _Monotone(Problem):
    """What a solver must know of an AnchoredEnergy of LogSumExp to say how it would stop."""

    event_ndim = 1
    symmetric = has_energy = plain_steps_descend = True


_MONOTONE = _Monotone()


def _fits_graph(inputs: _Inputs, request: _Request) -> bool:
    """Whether the solve can be an operation in the graph of the compiler."""
    options = request.options
    if request.potential is not LogSumExp or request.return_solution or request.return_weights:
        return False
    if inputs.keys.shape[-2] == 0 or options.on_failure == "raise" or (options.explicit and inputs.values is None):
        return False
    if not carries(inputs.query.dtype, inputs.anchor):
        return False
    stop = options.effective_solver.stop(_MONOTONE)
    exact = options.adjoint is None or (isinstance(options.adjoint, Implicit) and options.adjoint.linear_solver is None)
    solvable = exact and stop is not None and not stop.fixed_budget
    return (options.explicit or solvable) and not (inputs.bias is not None and inputs.bias.requires_grad)


def _in_graph(inputs: _Inputs, request: _Request) -> Attended:
    query, keys, values, beta, anchor, mask, bias, initial = inputs
    options, dropout_p = request.options, request.dropout_p
    dtype, narrow = query.dtype, (query, keys, values, bias)
    with exact_precision(query):
        query, keys, values, bias, initial = map(at_least_single, (query, keys, values, bias, initial))
        beta, anchor = (t.to(query.dtype) if isinstance(t, Tensor) else t for t in (beta, anchor))
        energy = LogSumExp(keys, beta, mask=mask, bias=bias)
        if options.explicit:
            assert values is not None
            output = explicit_read_out(LogSumExp, energy, query, values, narrow, beta, anchor, mask, dropout_p)
            record = _unmeasured_record(query)
            return Attended(output.to(dtype), query, record, record, None)
        stop = options.effective_solver.stop(_MONOTONE)
        assert stop is not None
        initial = query if initial is None else initial
        found = energy.solve_in_graph(query, anchor, initial, stop, impl=options.impl, on_failure=options.on_failure)
        state, _, _, status, residual, tolerance, steps, evals = found
        output = state if values is None else read_out(energy, state, values, dropout_p)
        record = Record(status, residual, tolerance, steps, evals)
    return Attended(output.to(dtype), state, record, record, None)


# Explicit steps.


def _explicit_solution(energy: AnchoredEnergy, query: Tensor, trace: bool) -> Solution:
    """The query as a solution with the status EXPLICIT and its residual."""
    with torch.no_grad():
        detached = energy.replace(*(t.detach() for t in energy.tensors()))
        return solve(
            detached,
            query.detach(),
            # Without tolerances the status is EXPLICIT even where the query solves its problem.
            solver=Picard(rtol=0, atol=0, max_steps=0),
            adjoint=Unrolled(),
            on_failure="ignore",
            trace=trace,
        )


def _unmeasured(query: Tensor) -> Solution:
    return Solution(value=query.detach(), **_unmeasured_record(query)._asdict())


def _unmeasured_record(query: Tensor) -> Record:
    unknown = query.detach().new_full(query.shape[:-1], torch.nan)
    none = torch.zeros_like(unknown, dtype=torch.int32)
    status = torch.full_like(none, int(Status.EXPLICIT), dtype=torch.int8)
    return Record(status, unknown, unknown, none, none)


def _merge_groups(solution: Solution) -> Solution:
    fields: dict[str, Any] = {name: getattr(solution, name).flatten(-3, -2) for name in Record._fields}
    trace, function = solution.trace, solution.energy_function
    split = solution.value.shape
    if trace is not None:
        residual, energy, evals = (None if t is None else t.flatten(-3, -2) for t in trace[:3])
        fields["trace"] = Trace(residual, energy, evals, trace.value.flatten(-4, -3))  # type: ignore[arg-type]
    if function is not None:
        fields["energy_function"] = lambda z: function(z.reshape(split)).flatten(-3, -2)
    solution.adjoint.lead = fields["status"].shape
    return dataclasses.replace(solution, value=solution.value.flatten(-4, -3), **fields)
