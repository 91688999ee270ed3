"""What the public doors answer, written out in float64: plain loops to the fixed point, dense implicit gradients."""

import torch


def copied(tensor):
    """The numbers alone: float64, contiguous, without graph."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    tensor = tensor.detach()
    return (tensor if tensor.dtype == torch.bool else tensor.double()).clone(memory_format=torch.contiguous_format)


def added(mask):
    """A mask as what is added to the scores."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)


def column(number):
    """A number per sample, to multiply rows."""
    return number[..., None, None] if isinstance(number, torch.Tensor) else number


def weights(z, keys, beta, pairs=None):
    """softmax(beta z K^T + pairs); zeros where a row attends to nothing."""
    scores = column(beta) * z @ keys.mT
    if pairs is None:
        return scores.softmax(-1)
    scores = scores + pairs
    empty = torch.isneginf(scores).all(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)


def attention_map(z, field, keys, beta, anchor, pairs=None):
    """anchor x + (1 - anchor) softmax(beta z K^T + pairs) K."""
    return column(anchor) * field + (1 - column(anchor)) * (weights(z, keys, beta, pairs) @ keys)


def fixed_point(step, start):
    """z = step(z), by applying it again and again."""
    z = start
    for _ in range(5000):
        following = step(z)
        if float((following - z).abs().amax()) <= 1e-13 * (1 + float(z.abs().amax())):
            return following
        z = following
    raise AssertionError("the reference did not converge")


def jacobian(step, z, event_ndim):
    """Df/dz of every problem, (*lead, S, S), for problems of S numbers."""
    lead = z.shape[: z.ndim - event_ndim]
    z = z.detach().requires_grad_()
    columns = step(z).reshape(*lead, -1)
    rows = [
        torch.autograd.grad(columns[..., i].sum(), z, retain_graph=True)[0].reshape(*lead, -1)
        for i in range(columns.shape[-1])
    ]
    return torch.stack(rows, dim=-2)


def implicit_gradients(step, z, leaves, cotangent, event_ndim=1):
    """u with (I - J)^T u = cotangent, by a dense solve, and (df/dt)^T u for each leaf of step(z, *leaves)."""
    found = jacobian(lambda z: step(z, *leaves), z, event_ndim)
    identity = torch.eye(found.shape[-1], dtype=torch.float64)
    rows = cotangent.reshape(*found.shape[:-1], 1)
    u = torch.linalg.solve(identity - found.mT, rows).reshape(z.shape)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    return u, torch.autograd.grad(step(z, *leaves), leaves, u, allow_unused=True, materialize_grads=True)


def through(step, read, z, leaves, cotangent, event_ndim=1):
    """Gradients of read(z*, *leaves) where z* = step(z*, *leaves)."""
    z = z.detach().requires_grad_()
    held = [leaf.detach().requires_grad_() for leaf in leaves]
    by_state, *direct = torch.autograd.grad(
        read(z, *held), [z, *held], cotangent, allow_unused=True, materialize_grads=True
    )
    _, indirect = implicit_gradients(step, z.detach(), leaves, by_state, event_ndim)
    return [a + b for a, b in zip(direct, indirect, strict=True)]
