"""Attention of which some queries fail, and what its gradients are then, written out."""

import torch

from implicit_attention import Picard
from implicit_attention.testing.numerics import random

B, H, N, M, D, E = 2, 2, 6, 7, 5, 4
#: Slow heads run out of steps, fast ones do not.
SOLVER = Picard(rtol=1e-9, atol=1e-11, max_steps=30)
NAMES = ("query", "key", "value", "scale", "anchor")


def inputs(*, keys=M, kv_heads=H, rows=N, dtype=torch.float64):
    """Query, key, value, and scale and anchor per head, all to be differentiated."""
    shapes = ((B, H, rows, D), (B, kv_heads, keys, D), (B, kv_heads, keys, E))
    tensors = [random(*shape, seed=seed, dtype=torch.float64) for seed, shape in enumerate(shapes)]
    # Queries from a place where weights are spread to one where a single key has all of it.
    tensors[0] = tensors[0] * torch.linspace(0.2, 4.0, rows, dtype=torch.float64)[:, None]
    tensors += [torch.tensor([0.7, 0.9]).double(), torch.tensor([0.35, 0.6]).double()]
    return [t.to(dtype).requires_grad_() for t in tensors]


def gradients(
    leaves, state, cotangent, *, failed, mask=None, explicit=False, zero=None, read=True
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output, and its gradients at the states of a solve, by dense linear algebra.

    failed: (B, H, N), where the solve has no answer. zero: where no gradient passes the solve. read: whether values
    are read out.
    """
    query, key, value, scale, anchor = leaves = [t.detach().clone().requires_grad_() for t in leaves]
    groups = query.shape[-3] // key.shape[-3]
    keys, values = (t.repeat_interleave(groups, dim=-3) for t in (key, value))
    scale, anchor = scale[:, None, None], anchor[:, None, None]

    def weights(z):
        scores = scale * z @ keys.mT
        return torch.softmax(scores if mask is None else scores.masked_fill(~mask, -torch.inf), dim=-1)

    def mapped(z):
        return anchor * query + (1 - anchor) * weights(z) @ keys

    z = state.detach().clone().requires_grad_()
    at = torch.where(failed[..., None], query if read else mapped(query), z) if explicit else z
    output = weights(at) @ values if read else at
    by_state, *direct = torch.autograd.grad(output, [z, *leaves], cotangent, allow_unused=True, retain_graph=True)
    with torch.no_grad():
        p = weights(z)
        mean = p @ keys
        second = torch.einsum("bhnm,bhmd,bhme->bhnde", p, keys, keys) - mean[..., :, None] * mean[..., None, :]
        jacobian = ((1 - anchor) * scale)[..., None] * second
        u = torch.linalg.solve(torch.eye(z.shape[-1], dtype=z.dtype) - jacobian, by_state)
        if zero is not None:
            u = u.masked_fill(zero[..., None], 0.0)
    implicit = torch.autograd.grad(mapped(z.detach()), leaves, u, allow_unused=True)
    total = [
        sum((g for g in pair if g is not None), torch.zeros_like(t))
        for t, *pair in zip(leaves, direct, implicit, strict=True)
    ]
    return output.detach(), total


def partly(failed):
    """What failed, if that are some and not all."""
    assert 0 < int(failed.sum()) < failed.numel()
    return failed


def some_steps(run):
    """The first number of steps that are too few for some problems and enough for others; `run` says where it fails."""
    for steps in range(1, 200):
        if 0 < int((failed := run(steps)).sum()) < failed.numel():
            return steps
    raise AssertionError("all problems take as many steps")
