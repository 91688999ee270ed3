"""`hopfield_hvp` as an operation of torch: known to autograd, to the compiler, and to vmap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..problem import Hopfield
from ..registration import PROBLEM, batched, refuse_tangents
from .api import dispatch

hopfield_hvp_op = torch.library.custom_op(
    "implicit_attention::hopfield_hvp",
    lambda *args: _product(*args),
    mutates_args=(),
    schema=f"({PROBLEM}, Tensor state, Tensor vector, Tensor? mean, Tensor? logsumexp, str impl) -> Tensor",
)


def _product(*args: Any) -> Tensor:
    return dispatch(Hopfield(*args[:6]), *args[6:]).clone(memory_format=torch.contiguous_format)


@hopfield_hvp_op.register_fake
def _(*args: Any) -> Tensor:
    return torch.empty_like(args[7], memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    others = (*inputs[:5], inputs[6], inputs[8], inputs[9])
    if any(isinstance(t, Tensor) and t.requires_grad for t in others):
        raise ValueError(
            "`hopfield_hvp` has derivatives with respect to `vector` only, got another input that requires grad; "
            "differentiate AnchoredEnergy.hessian_product instead"
        )
    ctx.is_causal, ctx.impl = inputs[5], inputs[-1]
    ctx.save_for_backward(*inputs[:5], inputs[6], inputs[8], inputs[9])


def _backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
    *problem, state, mean, logsumexp = ctx.saved_tensors
    refuse_tangents("hopfield_hvp", cotangent)
    by_vector = hopfield_hvp_op(*problem, ctx.is_causal, state, cotangent, mean, logsumexp, ctx.impl)
    return (*(None,) * 7, by_vector, None, None, None)


hopfield_hvp_op.register_autograd(_backward, setup_context=_setup)
hopfield_hvp_op.register_vmap(batched(hopfield_hvp_op, states=(0, 6, 7, 8, 9), outputs=1))
