"""First derivatives of what is read over keys that are spread over processes, and the refusal of others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._autograd import exact_precision, is_differentiated, sum_to_shape
from ..errors import UnsupportedImplementation
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
        local, by_temperature = potential.local, None
        with torch.no_grad(), exact_precision(z):
            # -inf is no number that anything depends on.
            by_logsumexp = by_logsumexp.where(logsumexp != -torch.inf, 0.0)
            weights = LocalWeights(local, z, values, logsumexp)
            shared = ctx.needs_input_grad[1] or (isinstance(local.beta, Tensor) and local.beta.requires_grad)
            by_scores, by_keys, by_values, by_bias = weights.gradients(out, by_out, by_logsumexp, by_states=shared)
            by_z = None
            if by_scores is not None:
                cotangent = torch.cat([by_out, by_logsumexp[..., None]], -1)
                (by_scores,) = potential._steps.sum("backward pass", cotangent, by_scores)
                by_z = local._scale * by_scores
                if isinstance(local.beta, Tensor):
                    by_temperature = by_beta(by_scores, z, local.beta)
        gradients = [by_z, by_values, by_keys]
        gradients += [by_temperature] if isinstance(local.beta, Tensor) else []
        gradients += [None] if local.mask is not None else []
        gradients += [by_bias] if local.bias is not None else []
        inputs = (by_out, by_logsumexp, z)
        return None, *(None if g is None else undifferentiated(g, "The gradient", *inputs) for g in gradients)


class _Undifferentiated(torch.autograd.Function):
    """(result, what it is, *inputs) -> the result, whose derivative raises."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, what: str, *inputs: Tensor) -> Tensor:
        ctx.what = what
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise UnsupportedImplementation(
            f"{ctx.what} of ShardedLogSumExp has no derivative: keys that are spread over processes have gradients of "
            "first order alone; use LogSumExp in one process, or leave create_graph=True out"
        )


def undifferentiated(result: Tensor, what: str, *inputs: Tensor) -> Tensor:
    if not is_differentiated(*inputs):
        return result
    found: Tensor = _Undifferentiated.apply(result, what, *inputs)  # type: ignore[no-untyped-call]
    return found


def by_beta(by_scores: Tensor, z: Tensor, beta: Tensor) -> Tensor:
    """The gradient of beta, from that of beta z."""
    return sum_to_shape((by_scores * z).sum((-1, -2)), beta.shape)
