"""The core of equilibrium attention, which the function and the layers share: solve for the queries, then read out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import _validate
from .._autograd import (
    backward_running,
    exact_precision,
    is_batched,
    is_fake,
    may_have_tangent,
    uncompiled,
)
from .._reporting import report_failures
from .._types import Impl, OnFailure
from ..adjoints import Implicit, Unrolled
from ..energies import AnchoredEnergy
from ..errors import UnsupportedImplementation
from ..fused import lower
from ..options import SolveOptions
from ..potentials import LogSumExp
from ..problem import HALF
from ..solution import AdjointReport, Solution, SolveReport, Trace
from ..solve import solve
from ..solvers import Picard
from ..status import Status
from .read_out import PotentialFactory, at_least_single, explicit_read_out, made_by, read_out, weights_of, with_anchor


class Measured(NamedTuple):
    """The fields of `SolveReport` as they come out of a compiled graph, which the host has not looked at."""

    status: Tensor
    residual: Tensor
    tolerance: Tensor
    num_steps: Tensor
    num_evals: Tensor

    def report(self, on_failure: OnFailure) -> SolveReport:
        """As `SolveReport`, with a warning if a problem failed."""
        report_failures("warn" if on_failure == "raise" else on_failure, "the compiled solve", *self[:4])
        return SolveReport(**self._asdict(), adjoint=AdjointReport(in_graph=True, on_failure=on_failure))


def is_repetition(remembered: SolveReport | Measured | None) -> bool:
    """Whether what is solved now repeats what is remembered, in a backward pass whose evidence goes to the first solve.

    Checkpointing that is not reentrant computes again what a graph did not keep; the gradient is then that graph's.
    """
    return isinstance(remembered, SolveReport) and remembered.adjoint.awaited and backward_running()


class Attended(NamedTuple):
    """What was read out, the solution behind it, and its evidence (None inside torch.vmap, which it would leave).

    The output is (*batch, H, N, E), or (*batch, N, E) without heads; weights (*batch, H, N, M) if they were asked for.
    From a compiled graph the solution is the state alone, and the evidence `Measured`.
    """

    output: Tensor
    solution: Any
    report: SolveReport | Measured | None
    weights: Tensor | None


_A = TypeVar("_A", Attended, Attended | None)


def _attended(output: Tensor, solution: Solution, weights: Tensor | None) -> Attended:
    return Attended(output, solution, None if is_batched(solution.status) else solution.report, weights)


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
    grouped: bool
    trace: bool
    measure: bool
    weigh: bool


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
    grouped: bool = False,
    initial: Tensor | None = None,
    trace: bool = False,
    measure: bool = True,
    weigh: bool = False,
) -> Attended:
    """Equilibria of `query` over `keys` and what is read out there: softmax attention over `values`, or the state.

    With an explicit budget nothing is solved: the read-out is taken at the query, and without values it is one step of
    the map. Its residual is evaluated only if `measure`; `weigh` returns the weights of the read-out.

    Under torch.compile the solve is one operation of the graph where there is one for it; its failures are then told by
    the evidence alone. Otherwise the graph breaks once. Tensors that are shapes alone (meta, fake) go the same way.
    """
    _check_whole()
    inputs = _Inputs(query, keys, values, beta, anchor, mask, bias, initial)
    request = _Request(potential, options, dropout_p, grouped, trace, measure, weigh)
    if torch.compiler.is_compiling() and any(isinstance(t, Tensor) and may_have_tangent(t) for t in inputs):
        raise UnsupportedImplementation(
            "equilibria have no forward-mode derivative (torch.func.jvp, jacfwd, hessian, dual numbers) inside "
            "torch.compile; call them outside of it"
        )
    if torch.compiler.is_compiling() or is_fake(query):
        attended = _by_heads(inputs, request, _in_graph)
        if attended is not None:
            return attended
    return _outside_graph(inputs, request)


@uncompiled
def _outside_graph(inputs: _Inputs, request: _Request) -> Attended:
    return _by_heads(inputs, request, _attend)


def _by_heads(inputs: _Inputs, request: _Request, answer: Callable[[_Inputs, _Request], _A]) -> _A:
    """The answer, with an axis for the heads that share keys while it is found."""
    if not request.grouped or (groups := _group_size(inputs.query, inputs.keys)) == 1:
        return answer(inputs, request)
    heads = inputs.query.shape[-3]
    query, keys, values, beta, anchor, mask, bias, initial = inputs
    query, mask, bias, initial = (  # type: ignore[assignment]
        t if t is None else _split_heads(t, heads, groups, -3) for t in (query, mask, bias, initial)
    )
    beta, anchor = (
        _split_heads(t, heads, groups, -1) if isinstance(t, Tensor) and t.ndim else t for t in (beta, anchor)
    )
    keys, values = keys.unsqueeze(-3), None if values is None else values.unsqueeze(-3)
    attended = answer(_Inputs(query, keys, values, beta, anchor, mask, bias, initial), request)
    if attended is None:
        return attended
    output, weights = (None if t is None else t.flatten(-4, -3) for t in (attended.output, attended.weights))
    assert output is not None
    if isinstance(attended.report, Measured):
        measured = Measured(*(t.flatten(-3, -2) for t in attended.report))
        return Attended(output, attended.solution.flatten(-4, -3), measured, weights)
    return _attended(output, _merge_heads(attended.solution), weights)


def _attend(inputs: _Inputs, request: _Request) -> Attended:
    query, keys, values, beta, anchor, mask, bias, initial = inputs
    potential, options, trace = request.potential, request.options, request.trace
    if empty := keys.shape[-2] == 0:
        # Nothing to attend to is one key that nobody attends to.
        keys = keys.new_zeros(*keys.shape[:-2], 1, keys.shape[-1])
        values = None if values is None else values.new_zeros(*values.shape[:-2], 1, values.shape[-1])
        mask, bias = torch.zeros(1, dtype=torch.bool, device=keys.device), None
    make = _written_out(potential) if options.impl == "reference" else potential
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
                impl=options.impl,
                on_failure=options.on_failure,
                trace=trace,
            )
            z = output = solution.value
            if values is not None:
                output = read_out(energy.potential, z, values, request.dropout_p)
        else:
            if options.impl in ("tiled", "triton"):
                _check_explicit(energy, options.impl)
            z = query
            solution = _explicit_solution(energy, query, trace) if request.measure else _unmeasured(query)
            if values is None:
                output = with_anchor(energy.fixed_point_map(query), anchor)
            else:
                parts = (query, values, narrow, beta, anchor, mask, request.dropout_p)
                output = explicit_read_out(make, energy.potential, *parts)
        weights = weights_of(energy.potential, z)[..., : 0 if empty else None] if request.weigh else None
        return _attended(output.to(dtype), solution, weights)


def _written_out(make: PotentialFactory) -> PotentialFactory:
    """The same potentials with every product written out."""

    def made(*given: Any, **pairs: Any) -> Any:
        potential = make(*given, **pairs)
        return potential.written_out() if isinstance(potential, LogSumExp) else potential

    return made


def _check_explicit(energy: AnchoredEnergy, impl: Impl) -> None:
    """Raise if `impl` is named and cannot do an explicit step."""
    if impl == "triton":
        raise UnsupportedImplementation("`impl='triton'` solves, and max_steps=0 solves nothing; use impl='tiled'")
    lower(energy, Picard(), impl)


# Under torch.compile.


def _fits_graph(inputs: _Inputs, request: _Request) -> bool:
    """Whether the solve may be an operation in the graph of the compiler, if there is one for it."""
    options, solver = request.options, request.options.effective_solver
    if request.potential is not LogSumExp or request.trace or request.measure or request.weigh:
        return False
    if inputs.keys.shape[-2] == 0 or options.on_failure == "raise" or options.impl == "reference":
        return False
    if inputs.bias is not None and inputs.bias.requires_grad:
        return False
    if options.explicit:
        return inputs.values is not None
    exact = options.adjoint is None or (isinstance(options.adjoint, Implicit) and options.adjoint.linear_solver is None)
    return exact and not solver.fixed_budget


def _in_graph(inputs: _Inputs, request: _Request) -> Attended | None:
    """The answer by operations that the compiler keeps in its graph, or None if there are none for it."""
    if not _fits_graph(inputs, request):
        return None
    query, keys, values, beta, anchor, mask, bias, initial = inputs
    options, dropout_p = request.options, request.dropout_p
    dtype, narrow = query.dtype, (query, keys, values, bias)
    with exact_precision(query):
        query, keys, values, bias, initial = map(at_least_single, (query, keys, values, bias, initial))
        beta, anchor = (t.to(query.dtype) if isinstance(t, Tensor) else t for t in (beta, anchor))
        potential = LogSumExp(keys, beta, mask=mask, bias=bias)
        if options.explicit:
            assert values is not None
            output = explicit_read_out(LogSumExp, potential, query, values, narrow, beta, anchor, mask, dropout_p)
            return Attended(output.to(dtype), query, _unmeasured_numbers(query), None)
        lowered = lower(AnchoredEnergy(potential, query, anchor), options.effective_solver, options.impl)
        if lowered is None:
            return None
        state, record = lowered.in_graph(query if initial is None else initial, options.on_failure)
        output = state if values is None else read_out(potential, state, values, dropout_p)
    return Attended(output.to(dtype), state, Measured(*record), None)


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
    return Solution(value=query.detach(), **_unmeasured_numbers(query)._asdict())


def _unmeasured_numbers(query: Tensor) -> Measured:
    unknown = query.detach().new_full(query.shape[:-1], torch.nan)
    none = torch.zeros_like(unknown, dtype=torch.int32)
    status = torch.full_like(none, int(Status.EXPLICIT), dtype=torch.int8)
    return Measured(status, unknown, unknown, none, none)


# Grouped queries: heads that share keys become an axis along which the keys broadcast.


def _group_size(query: Tensor, keys: Tensor) -> int:
    heads, kv_heads = query.shape[-3], keys.shape[-3]
    _validate.require(
        kv_heads > 0 and heads % kv_heads == 0,
        "query",
        f"have a number of heads that the {kv_heads} heads of `key` divide",
        f"{heads} heads, shape {tuple(query.shape)}",
    )
    return heads // kv_heads


def _split_heads(tensor: Tensor, heads: int, groups: int, axis: int) -> Tensor:
    """The axis of H heads as (Hkv, groups); one of size 1 as (1, 1); none stays none."""
    if tensor.ndim < -axis:
        return tensor
    split = (heads // groups, groups) if tensor.shape[axis] == heads else (tensor.shape[axis], 1)
    parts: Tensor = tensor.unflatten(axis, split)  # type: ignore[no-untyped-call]
    return parts


def _merge_heads(solution: Solution) -> Solution:
    fields: dict[str, Any] = {
        name: getattr(solution, name).flatten(-3, -2)
        for name in ("status", "residual", "tolerance", "num_steps", "num_evals")
    }
    trace, function = solution.trace, solution.energy_function
    split = solution.value.shape
    if trace is not None:
        residual, energy, evals = (None if t is None else t.flatten(-3, -2) for t in trace[:3])
        fields["trace"] = Trace(residual, energy, evals, trace.value.flatten(-4, -3))  # type: ignore[arg-type]
    if function is not None:
        fields["energy_function"] = lambda z: function(z.reshape(split)).flatten(-3, -2)
    solution.adjoint.lead = fields["status"].shape
    return dataclasses.replace(solution, value=solution.value.flatten(-4, -3), **fields)


# Checks.


def _check_whole() -> None:
    """Inside `context_parallel` each process has some of the tokens, and only torch's own attention knows."""
    replaced = torch.nn.functional.scaled_dot_product_attention
    # By identity first, which the compiler can follow.
    if replaced is not torch._C._nn.scaled_dot_product_attention and "context_parallel" in replaced.__module__:
        raise ValueError(
            "equilibrium attention inside `context_parallel` would attend to the tokens of this process only: an "
            "equilibrium needs all keys at every evaluation; keep sequences whole and shard samples (DDP, FSDP) or "
            "heads (parallelize_module with ColwiseParallel and RowwiseParallel)"
        )


def split_mask(argument: str, mask: Tensor | None, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(mask, bias) from a boolean or an additive mask."""
    if mask is None:
        return None, None
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        received = str(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            _validate.message(
                argument, "be boolean (True = attend) or additive floating-point", received, f"use {argument}.bool()"
            )
        )
    _validate.check_dense(argument, mask)
    remedy = "move it with .to(device)"
    _validate.require(mask.device == like.device, argument, f"be on {like.device}", mask.device, remedy)
    if mask.dtype == torch.bool:
        return mask, None
    if like.dtype in HALF:
        return None, mask if mask.dtype == like.dtype else mask.float()
    return None, mask.to(like.dtype)


def check_causal(argument: str, mask: Tensor | None, causal: str) -> None:
    """Beside a causal flag a mask may say which keys exist, not which query reads which."""
    if mask is not None and mask.ndim > 1 and mask.shape[-2] != 1:
        raise ValueError(
            _validate.message(
                argument,
                f"have one row for all queries, shape (..., 1, M), beside {causal}=True, which they may contradict",
                f"shape {tuple(mask.shape)}",
                f"pass {causal}=False with the causal triangle in {argument}, e.g. mask & mask.new_ones(N, M).tril()",
            )
        )
