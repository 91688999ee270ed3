"""`hopfield_solve` as an operation of torch: known to autograd, to the compiler, and to vmap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..hopfield_cg.ops import hopfield_cg_op
from ..hopfield_cg.rule import MAX_STEPS
from ..problem import Hopfield
from ..registration import PROBLEM, batched, refuse_tangents, sum_to
from .api import dispatch
from .rule import FusedRule

hopfield_solve_op = torch.library.custom_op(
    "implicit_attention::hopfield_solve",
    lambda *args: _solve(*args),
    mutates_args=(),
    schema=f"({PROBLEM}, Tensor initial, float rtol, float atol, int max_steps, int plain_steps, str impl, "
    f"str on_failure) -> ({', '.join(['Tensor'] * 8)})",
)


def _solve(*args: Any) -> tuple[Tensor, ...]:
    problem, initial, impl = Hopfield(*args[:6]), args[6], args[-2]
    found = dispatch(problem, initial, FusedRule(*args[7:-2]), impl)
    # Results of an operation share no memory.
    return tuple(t.clone(memory_format=torch.contiguous_format) for t in found)


@hopfield_solve_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    initial = args[6]
    row = initial.new_empty(initial.shape[:-1])
    codes, counts = row.new_empty(row.shape, dtype=torch.int8), row.new_empty(row.shape, dtype=torch.int32)
    vectors = (torch.empty_like(initial, memory_format=torch.contiguous_format) for _ in range(2))
    return (*vectors, row, codes, torch.empty_like(row), torch.empty_like(row), counts, torch.empty_like(counts))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.is_causal, ctx.impl, ctx.on_failure = inputs[5], *inputs[-2:]
    ctx.save_for_backward(*inputs[:5], output[0], output[1])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, cotangent: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    field, keys, beta, anchor, mask, state, mean = ctx.saved_tensors
    if cotangent is None:
        return (None,) * 13
    refuse_tangents("hopfield_solve", cotangent)
    problem = (field, keys, beta, anchor, mask, ctx.is_causal)
    # A query that failed and that the loss leaves out must not reach what it shares with others: 0 * NaN is NaN.
    lost = ~torch.isfinite(state).all(-1, keepdim=True)
    read = lost & (cotangent != 0).any(-1, keepdim=True)
    state, mean, field = (t.masked_fill(lost, 0.0) for t in (state, mean, field))
    cotangent = cotangent.masked_fill(read, torch.nan)
    u, *_, by_beta, by_keys = hopfield_cg_op(*problem, state, cotangent, None, MAX_STEPS, ctx.impl, ctx.on_failure)
    by_anchor = (u * (field - mean)).sum(-1)
    gradients = (
        (anchor * u).to(field.dtype),
        by_keys.to(keys.dtype),
        sum_to(by_beta[..., None], beta),
        sum_to(by_anchor[..., None], anchor),
    )
    return (*gradients, *(None,) * 9)


hopfield_solve_op.register_autograd(_backward, setup_context=_setup)
hopfield_solve_op.register_vmap(batched(hopfield_solve_op, states=(0, 6), outputs=8))
