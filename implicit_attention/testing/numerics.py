"""Small dense oracles and comparisons for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..problem import Problem


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers from a seed of their own, the same in every dtype."""
    # NumPy's generator, unlike torch's, may be called inside torch.vmap.
    numbers = np.random.default_rng(seed).standard_normal(shape)
    return torch.as_tensor(numbers, dtype=torch.float64).to(dtype)


def relative_error(value: Tensor, truth: Tensor) -> float:
    """|value - truth| / |truth|, norms over everything; the absolute error where the truth is zero."""
    error = float(torch.linalg.vector_norm((value - truth).detach().double()))
    norm = float(torch.linalg.vector_norm(truth.detach().double()))
    return error / norm if norm > 0 else error


def check_close(value: Any, truth: Any, tolerance: float, absolute: float | None = None) -> None:
    """Check tensors, or tuples of them, against others of the same dtypes; `absolute` is by default the tolerance."""
    torch.testing.assert_close(value, truth, rtol=tolerance, atol=tolerance if absolute is None else absolute)


def check_autocast(function: Callable[..., Any], *inputs: Tensor) -> None:
    """Check that autocast changes no bit of the tensors that a function returns."""
    plain = function(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_close(function(*inputs), plain, 0.0)


def check_derivatives(function: Callable[..., Any], inputs: Sequence[Tensor], **options: Any) -> None:
    """Check first and second derivatives against differences."""
    assert torch.autograd.gradcheck(function, inputs, **options)
    assert torch.autograd.gradgradcheck(function, inputs, **options)


def dense_jacobian(problem: Problem, z: Tensor) -> Tensor:
    """df/dz of every problem as a matrix, (*lead, n, n), by differentiating each output: the slow, sure way."""
    event = z.shape[z.ndim - problem.event_ndim :]
    lead, n = z.shape[: z.ndim - problem.event_ndim], event.numel()
    state = z.detach().requires_grad_()
    mapped = problem.fixed_point_map(state).reshape(*lead, n)
    rows = [torch.autograd.grad(mapped[..., i].sum(), state, retain_graph=True)[0].reshape(*lead, n) for i in range(n)]
    return torch.stack(rows, dim=-2)


def dense_gradients(problem: Problem, z: Tensor, cotangent: Tensor) -> tuple[Tensor | None, ...]:
    """dL/dt of every floating-point tensor t at a solution z, by a dense solve of the implicit function theorem."""
    event = z.shape[z.ndim - problem.event_ndim :]
    jacobian = dense_jacobian(problem, z)
    eye = torch.eye(event.numel(), dtype=z.dtype)
    flat = cotangent.reshape(*jacobian.shape[:-1])
    u = torch.linalg.solve(eye - jacobian.mT, flat[..., None]).squeeze(-1).reshape(z.shape)
    tensors = [t.detach().requires_grad_(t.is_floating_point()) for t in problem.tensors()]
    mapped = problem.replace(*tensors).fixed_point_map(z.detach())
    floating = [t for t in tensors if t.is_floating_point()]
    gradients = iter(torch.autograd.grad(mapped, floating, u.detach(), allow_unused=True))
    return tuple(next(gradients) if t.is_floating_point() else None for t in tensors)


def equilibrium_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    beta: float | Tensor,
    anchor: float | Tensor,
    steps: int = 3000,
) -> Tensor:
    """Equilibrium attention in float64 by repeating its map, every product written out: the slow, sure way.

    One axis of heads, keys not shared; `mask` boolean or additive, `beta` and `anchor` per head or numbers. Without
    `value` the state is returned. Raises where so many plain steps do not settle to 1e-10.
    """
    q, k = query.double(), key.double()
    beta, anchor = (torch.as_tensor(t, dtype=torch.float64)[..., None, None] for t in (beta, anchor))
    bias = torch.zeros((), dtype=torch.float64)
    if mask is not None:
        bias = bias.where(mask, -torch.inf) if mask.dtype == torch.bool else mask.double()

    def weights(z: Tensor) -> Tensor:
        scores = beta * (z @ k.mT) + bias
        nothing = torch.isneginf(scores).all(-1, keepdim=True)
        return scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)

    z = q
    for _ in range(steps):
        before, z = z, anchor * q + (1 - anchor) * weights(z) @ k
        change = float((z - before).detach().abs().max())
        if change <= 1e-14:
            break
    if change > 1e-10:
        raise RuntimeError(f"plain steps have not settled after {steps}: change {change:.1e}")
    return z if value is None else weights(z) @ value.double()
