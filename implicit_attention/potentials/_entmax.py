"""alpha-entmax of rows of scores and the maximum that it attains, with closed derivatives; a is alpha - 1 throughout.

Shifted so that the largest score of a row is 0, p_j = [1 + a (s_j - c)]_+^(1/a), where c makes their sum 1: for a -> 0
it is the log-sum-exp, and p the softmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import host_may_look, is_plain, sum_to_shape, tangent_rule, uncompiled

# Numbers in one block of work.
BLOCK = 2**18
LOG2 = math.log(2)
#: Terms of a series in numbers up to .3, of which the next is 1e-17 of the sum.
TERMS = 12


@uncompiled
def entmax(scores: Tensor, a: float | Tensor) -> Tensor:
    """The p that maximises <p, s> + H(p) over the simplex, along the last axis; derivatives of any order.

    Args:
        scores: (..., N, M); -inf has no weight, unless all of a row are.
        a: alpha - 1 in (0, 1], a number or a tensor (*#batch, 1, 1).
    """
    if is_plain(*(part for part in (scores, a) if isinstance(part, Tensor))):
        # Without the search of autograd for derivatives.
        return _Weights.forward(scores, a)
    return _Weights.apply(scores, a)  # type: ignore[no-any-return, no-untyped-call]


@uncompiled
def maximum(scores: Tensor, p: Tensor, a: float | Tensor) -> Tensor:
    """<p, s> + H(p) at p = entmax(s), (..., N), whose derivative by s is p; H(p) = (1 - sum p^(1 + a))/(a (1 + a))."""
    if is_plain(*(part for part in (scores, p, a) if isinstance(part, Tensor))):
        return _Maximum.forward(scores, p, a)
    return _Maximum.apply(scores, p, a)  # type: ignore[no-any-return, no-untyped-call]


def slopes(p: Tensor, a: float | Tensor) -> Tensor:
    """w = p^(1 - a) on the support, 0 elsewhere: dp = w (ds - <w, ds>/sum w)."""
    out = p == 0
    # p^0 is 1 there and the derivative of other powers infinite.
    safe = p.masked_fill(out, 1.0)
    return (safe.sqrt() if isinstance(a, float) and a == 0.5 else safe.pow(1 - a)).masked_fill(out, 0.0)


def by_order(p: Tensor, a: float | Tensor) -> Tensor:
    """dp/da at fixed scores."""
    logs = _logs(p)
    w = slopes(p, a)
    raw = -p * logs.square() * _bend(a * logs)
    return raw - w * (raw.sum(-1, keepdim=True) / w.sum(-1, keepdim=True))


def _logs(p: Tensor) -> Tensor:
    """Return log p, and 0 where p is 0."""
    return p.masked_fill(p == 0, 1.0).log()


def _turned(w: Tensor, v: Tensor) -> Tensor:
    """Multiply v by the Jacobian of p, which is symmetric."""
    return w * (v - (w * v).sum(-1, keepdim=True) / w.sum(-1, keepdim=True))


class _Weights(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, a: float | Tensor) -> Tensor:
        if not host_may_look(scores):
            return _entmax(scores, a)
        # Blocks of rows stay in the processor's cache: fresh memory costs more than the arithmetic.
        rows, weights = scores.flatten(0, -2), torch.empty_like(scores, memory_format=torch.contiguous_format)
        orders = a.expand(*scores.shape[:-1], 1).flatten(0, -2) if isinstance(a, Tensor) else None
        count = max(BLOCK // scores.shape[-1], 1)
        for start in range(0, len(rows), count):
            part = slice(start, start + count)
            weights.view(rows.shape)[part] = _entmax(rows[part], a if orders is None else orders[part])
        return weights

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float | Tensor], output: Tensor) -> None:
        _keep(ctx, inputs[1], output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, p = _kept(ctx, ctx.saved_tensors)
        by_scores = _turned(slopes(p, a), gradient) if ctx.needs_input_grad[0] else None
        by_a = None
        if ctx.needs_input_grad[1]:
            by_a = sum_to_shape((gradient * by_order(p, a)).sum((-1, -2), keepdim=True), a.shape)
        return by_scores, by_a

    @tangent_rule
    def jvp(ctx: Any, saved: list[Tensor], by_scores: Tensor | None, by_a: Tensor | None) -> Tensor:
        a, p = _kept(ctx, saved)
        moved = torch.zeros_like(p) if by_scores is None else _turned(slopes(p, a), by_scores)
        return moved if by_a is None else moved + by_a * by_order(p, a)


class _Maximum(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, p: Tensor, a: float | Tensor) -> Tensor:
        top = scores.amax(-1, keepdim=True)
        # On the support p^a is that of the largest score and a (s - top), so that H needs no power of each p.
        pull = ((scores - top) * a).clamp(min=-1).mul_(p).sum(-1, keepdim=True)
        rise = torch.expm1(a * p.amax(-1, keepdim=True).log()) / a
        return (top + (pull - rise) / (1 + a)).squeeze(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float | Tensor], output: Tensor) -> None:
        _keep(ctx, inputs[2], inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        a, p = _kept(ctx, ctx.saved_tensors)
        by_scores = gradient[..., None] * p if ctx.needs_input_grad[0] else None
        by_a = None
        if ctx.needs_input_grad[2]:
            by_a = sum_to_shape((gradient * _entropy_by_order(p, a)).sum(-1)[..., None, None], a.shape)
        # The value is stationary in p.
        return by_scores, None, by_a

    @tangent_rule
    def jvp(ctx: Any, saved: list[Tensor], by_scores: Tensor | None, _: Tensor | None, by_a: Tensor | None) -> Tensor:
        a, p = _kept(ctx, saved)
        moved = torch.zeros_like(p[..., 0]) if by_scores is None else (p * by_scores).sum(-1)
        return moved if by_a is None else moved + by_a.squeeze(-1) * _entropy_by_order(p, a)


def _entropy_by_order(p: Tensor, a: Tensor) -> Tensor:
    """dH/da at fixed p, (..., N)."""
    logs = _logs(p)
    y = a * logs
    terms = torch.expm1(y) / a - (1 + a) * y.exp() * logs.square() * _bend(y)
    return (p * terms / (1 + a).square()).sum(-1)


def _bend(y: Tensor) -> Tensor:
    """(exp(-y) - 1 + y)/y^2, near 0 by its series 1/2! - y/3! + y^2/4! - ..., as its terms cancel there."""
    near = y.abs() < 0.3
    small, large = torch.where(near, y, 0.0), torch.where(near, 1.0, y)
    series = torch.zeros_like(y)
    for n in range(TERMS, 0, -1):
        # Horner's scheme of y^(n - 1)/(n + 1)! with alternating signs.
        series = (1 - small * series) / (n + 1)
    return torch.where(near, series, (torch.expm1(-large) + large) / large.square())


def _entmax(scores: Tensor, a: float | Tensor) -> Tensor:
    """Compute the weights by Newton steps for the threshold."""
    shifted = scores - scores.amax(-1, keepdim=True)
    eps = torch.finfo(scores.dtype).eps
    # t = a c. The norm |q|_(1/a) of q = [1 + a s - t]_+ is convex and falls in t, and Newton steps for its root at 1,
    # which start where it is at least 1, rise to the root. By convexity each takes three quarters off (norm - 1) times
    # slope, which is at most M^2 at the start, and the slope is always at least 1.
    t = torch.zeros_like(shifted[..., :1])
    bits = math.log2(scores.shape[-1]) - math.log2(eps) / 2
    steps = math.ceil(bits) + 2
    for left in reversed(range(steps + 1)):
        p, w = _powers(shifted, t, a)
        total = p.sum(-1, keepdim=True)
        step = total.pow(1 - a) * torch.expm1(a * total.log()) / w.sum(-1, keepdim=True)
        moves = step > 4 * eps * (a + t)
        if left == 0 or (host_may_look(step) and not bool(moves.any())):
            break
        # A row that has converged stays, however many steps others take.
        t = torch.where(moves, t + step, t)
    # The reciprocals of smaller numbers are infinite.
    return F.threshold(p / total, torch.finfo(p.dtype).tiny, 0.0)


def _powers(shifted: Tensor, t: Tensor, a: float | Tensor) -> tuple[Tensor, Tensor]:
    """q^(1/a) and q^(1/a - 1) of q = [1 + a s - t]_+; NaN stays."""
    if isinstance(a, float) and a in (0.5, 1.0):
        q = (shifted * a).sub_(t - 1).relu_()
        return (q, (q > 0).to(q)) if a == 1 else (q.square(), q)
    # q - 1 keeps the digits of q for small a. The logarithm of 0 is -inf, whose power is 0: so no mask is needed, which
    # would cost more than all the rest.
    rest = (a * shifted).sub_(t).clamp(min=-1)
    p = (rest.log1p() * (1 / (a * LOG2))).exp2_()
    return p, p / rest.add_(1).clamp(min=torch.finfo(rest.dtype).tiny)


def _keep(ctx: Any, a: float | Tensor, p: Tensor) -> None:
    ctx.a = None if isinstance(a, Tensor) else a
    kept = (p, a) if isinstance(a, Tensor) else (p,)
    ctx.save_for_backward(*kept)
    ctx.save_for_forward(*kept)


def _kept(ctx: Any, saved: Sequence[Tensor]) -> tuple[Any, Tensor]:
    """Restore a and p; p has a graph, so that derivatives have derivatives."""
    p, *rest = saved
    return (rest[0] if rest else ctx.a), p
