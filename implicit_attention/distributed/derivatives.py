"""First derivatives of attention over keys that are spread over processes, and the refusal of others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import exact_precision, is_differentiated, refusing, sum_to_shape
from ..failure import UnsupportedImplementation
from ..potentials import LogSumExp
from .local_keys import LocalWeights


class Attend(torch.autograd.Function):
    """(potential, z, values, *tensors) -> (read-out, log-sum-exp), with first derivatives."""

    @staticmethod
    def forward(ctx: Any, potential: Any, z: Tensor, values: Tensor | None, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, logsumexp = potential._merged(z, values)
        # Tensors have to be saved where hooks see them.
        ctx.potential = potential.replace(*(torch.empty(0) for _ in tensors))
        ctx.save_for_backward(z, values, out, logsumexp, *tensors)
        return out, logsumexp

    @staticmethod
    def backward(ctx: Any, by_out: Tensor, by_logsumexp: Tensor) -> tuple[Tensor | None, ...]:
        z, values, out, logsumexp, *tensors = ctx.saved_tensors
        potential = ctx.potential.replace(*tensors)
        local, by_z, by_temperature = potential.local, None, None
        with torch.no_grad(), exact_precision(z):
            # Nothing depends on a log-sum-exp of -inf.
            by_logsumexp = by_logsumexp.where(logsumexp != -torch.inf, 0.0)
            weights = LocalWeights(local, z, values, logsumexp)
            shared = ctx.needs_input_grad[1] or (isinstance(local.beta, Tensor) and local.beta.requires_grad)
            by_scores, by_keys, by_values, by_bias = weights.gradients(out, by_out, by_logsumexp, by_states=shared)
            if by_scores is not None:
                cotangent = torch.cat([by_out, by_logsumexp[..., None]], -1)
                (by_scores,) = potential._steps.sum("backward pass", cotangent, by_scores)
                by_z = local._scale * by_scores
                if isinstance(local.beta, Tensor):
                    by_temperature = by_beta(by_scores, z, local.beta)
        gradients = [by_z, by_values, *by_tensors(local, by_keys, by_temperature, by_bias)]
        inputs = (by_out, by_logsumexp, z)
        return None, *(None if g is None else undifferentiated(g, "The gradient", *inputs) for g in gradients)


def undifferentiated(result: Tensor, name: str, *inputs: Tensor) -> Tensor:
    if not is_differentiated(*inputs):
        return result
    message = (
        f"{name} of ShardedLogSumExp has no derivative: keys that are spread over processes have gradients of first "
        "order alone; use LogSumExp in one process, or leave create_graph=True out"
    )
    return refusing(result, UnsupportedImplementation, message, *inputs)


def by_tensors(
    local: LogSumExp, by_keys: Tensor, by_temperature: Tensor | None, by_bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of the tensors of a potential in their order: keys, beta, mask and bias, where it has them."""
    optional = ((local.beta, by_temperature), (local.mask, None), (local.bias, by_bias))
    return by_keys, *(gradient for tensor, gradient in optional if isinstance(tensor, Tensor))


def by_beta(by_scores: Tensor, z: Tensor, beta: Tensor) -> Tensor:
    """The gradient of beta, from that of beta z."""
    return sum_to_shape((by_scores * z).sum((-1, -2)), beta.shape)
