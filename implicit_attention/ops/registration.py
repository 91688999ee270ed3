"""The operations as torch knows them: in the graphs of autograd and of the compiler, and under torch.vmap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._autograd import may_have_tangent
from .._fused_rule import FusedRule
from .._reporting import forgiven, left_out, lost, report_failures
from ..errors import UnsupportedImplementation
from ..failure_policy import FailureSite, of_text
from ..linear import CG
from ..linear.base import adjoint_rtol
from . import dispatch
from .problem import Hopfield
from .rule import MAX_STEPS, AdjointAnswer, Solved

_PROBLEM = "Tensor field, Tensor keys, Tensor beta, Tensor anchor, Tensor? mask, SymInt? first"
_EIGHT = f"({', '.join(['Tensor'] * 8)})"


def refuse_tangents(operation: str, *inputs: Any) -> None:
    """Raise in forward mode, for which torch lets an operation have no rule: every derivative would be 0."""
    if any(isinstance(t, Tensor) and may_have_tangent(t) for t in inputs):
        raise UnsupportedImplementation(
            f"`{operation}` has no forward-mode derivative (torch.func.jvp, jacfwd, hessian, dual numbers); use "
            "solve(AnchoredEnergy(LogSumExp(keys, beta), query, anchor), query), which has every derivative"
        )


def _run_solve(*args: Any) -> tuple[Tensor, ...]:
    problem, initial, impl = Hopfield(*args[:6]), args[6], args[11]
    return _unshared(dispatch.solve(problem, initial, FusedRule(*args[7:11]), impl))


def _run_adjoint(*args: Any) -> tuple[Tensor, ...]:
    problem, given, text = Hopfield(*args[:6]), args[6:11], args[11]
    # Torch leaves out arguments that have their default.
    handle = args[12] if len(args) > 12 else None
    answer = dispatch.solve_adjoint(problem, *given)
    on_failure, site, cotangent = of_text(text), FailureSite.of(handle), given[1]
    if site is not None and site.tally is not None:
        site.tally.add_backward(*answer[1:5], lost(answer.status, cotangent))
    if dispatch.may_look(answer.status):
        # A compiled graph has no other place that could report its backward pass.
        what = "the adjoint solve of `hopfield_solve`, whose gradient is therefore wrong,"
        reported = forgiven(answer.record, cotangent)
        report_failures(on_failure, what, reported, CG.remedies, site=site, side="backward")
    if (rest := left_out(on_failure, answer.status, cotangent)) is not None:
        again = dispatch.solve_adjoint(problem, given[0], rest, *given[2:])
        answer = answer._replace(value=again.value, by_keys=again.by_keys, by_beta=again.by_beta)
    return _unshared(answer)


def _unshared(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    # Results of an operation share no memory.
    return tuple(t.clone(memory_format=torch.contiguous_format) for t in tensors)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.first, ctx.rtol, (ctx.impl, ctx.on_failure) = inputs[5], inputs[7], inputs[11:13]
    site = inputs[13] if len(inputs) > 13 else None
    ctx.save_for_backward(*inputs[:5], output[0], output[1], site)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, cotangent: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    field, keys, beta, anchor, mask, state, mean, site = ctx.saved_tensors
    if cotangent is None:
        return (None,) * 14
    refuse_tangents("hopfield_solve", cotangent)
    problem = (field, keys, beta, anchor, mask, ctx.first)
    # A failed query without a cotangent must not reach the gradients that it shares with others: 0 * NaN is NaN.
    lost = ~torch.isfinite(state).all(-1, keepdim=True)
    read = lost & (cotangent != 0).any(-1, keepdim=True)
    # A failed query with a cotangent stays NaN: its backward solve fails and is reported.
    state, mean, field = (t.masked_fill(lost & ~read, 0.0) for t in (state, mean, field))
    # Products of keys in half precision have a tolerance of their own.
    rtol = adjoint_rtol(ctx.rtol, state.dtype) if keys.dtype == state.dtype else None
    answer = AdjointAnswer(*adjoint_op(*problem, state, cotangent, rtol, MAX_STEPS, ctx.impl, ctx.on_failure, site))
    by_anchor = (answer.value * (field - mean)).sum(-1, keepdim=True)
    gradients = (anchor * answer.value, answer.by_keys, answer.by_beta[..., None], by_anchor)
    # The gradients of broadcast tensors are sums.
    likes = (field, keys, beta, anchor)
    return (*(g.sum_to_size(t.shape).to(t.dtype) for g, t in zip(gradients, likes, strict=True)), *(None,) * 10)


def _batched(operation: Any, states: tuple[int, ...]) -> Callable[..., tuple[Any, Any]]:
    """The rule of torch.vmap: one more leading axis, of which all but the arguments `states` may have size 1."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        given: list[Any] = []
        for index, (argument, dim) in enumerate(zip(args, in_dims, strict=True)):
            # Texts and the number of a site, which come last, have no such axis.
            if isinstance(argument, Tensor) and index < states[-1] + 1:
                argument = argument.unsqueeze(0) if dim is None else argument.movedim(dim, 0)
                if index in states:
                    argument = argument.expand(info.batch_size, *argument.shape[1:])
            given.append(argument)
        return operation(*given), (0,) * 8

    return rule


solve_op = torch.library.custom_op(
    "implicit_attention::hopfield_solve",
    _run_solve,
    mutates_args=(),
    schema=f"({_PROBLEM}, Tensor initial, float rtol, float atol, int max_steps, int plain_steps, str impl, "
    f"str on_failure, Tensor? site=None) -> {_EIGHT}",
)
solve_op.register_autograd(_backward, setup_context=_setup)
solve_op.register_vmap(_batched(solve_op, states=(0, 6)))


@solve_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    initial = args[6]
    return Solved.allocated(initial.new_empty, initial.shape, initial.dtype)


adjoint_op = torch.library.custom_op(
    "implicit_attention::hopfield_adjoint",
    _run_adjoint,
    mutates_args=(),
    schema=f"({_PROBLEM}, Tensor state, Tensor cotangent, float? rtol, int max_steps, str impl, str on_failure, "
    f"Tensor? site=None) -> {_EIGHT}",
)


@adjoint_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    keys, state = args[1], args[6]
    return AdjointAnswer.allocated(state.new_empty, state.shape, keys.shape, state.dtype)


# The gradient of the keys, an output, has the new axis too.
adjoint_op.register_vmap(_batched(adjoint_op, states=(0, 1, 6, 7)))
