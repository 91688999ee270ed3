"""The adjoint solve of every query: products with the Hessian, between two of them a step of conjugate gradients."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...status import Status
from .. import trust
from ..problem import AdjointAnswer, AdjointRule, Attention
from .attend import (
    LOG2E,
    UNFINISHED,
    OverKeys,
    any_of,
    batch_offset,
    kernel,
    lost,
    narrow,
    power_of_two,
    query_tile,
    rounded,
)
from .keys import KernelOperands, gradient_of_keys
from .layout import KernelLayout, Left, counted, in_memory, in_order, launch, step_tiles
from .solve import note

CONVERGED = tl.constexpr(int(Status.CONVERGED))
MAX_STEPS = tl.constexpr(int(Status.MAX_STEPS))
STALLED = tl.constexpr(int(Status.STALLED))
NONFINITE = tl.constexpr(int(Status.NONFINITE))
EPS = tl.constexpr(torch.finfo(torch.float32).eps)
# A curvature below this times eps |p|^2 is rounding or negative.
NOISE = tl.constexpr(10.0)
# Rounding may keep the recomputed residual above the tolerance by this factor, where the recurrence is below it.
SLACK = tl.constexpr(10.0)
# Cotangents below this are multiplied by a power of two.
SMALLEST_LARGE = tl.constexpr(2.0**-60)
LIFT = tl.constexpr(2.0**64)


def solve_adjoint(
    problem: Attention,
    state: Tensor,
    cotangent: Tensor,
    mean: Tensor,
    logsumexp: Tensor,
    rule: AdjointRule,
) -> AdjointAnswer:
    """Solve A u = cotangent (*batch, N, D) for every query; mean and logsumexp are those at the state. All is float32.

    Queries that stall, saddles above all, have u = 0 and add nothing to the gradients: they wait for another method.
    One that is not finite makes the gradient of all keys in its reach NaN.
    """
    problem = in_memory(problem)
    keys, rows = problem.keys, state.shape[-2]
    empty = partial(trust.empty, device=keys.device)
    answer = AdjointAnswer.allocated(empty, state.shape, keys.shape, torch.float32)
    if state.numel() == 0:
        answer.by_keys.zero_()
        return answer
    layout = KernelLayout.of(problem)
    assert layout is not None
    product, chosen = OverKeys(problem, layout, "product"), step_tiles(problem)
    operands = KernelOperands.allocated(empty, state.shape, keys.dtype)
    state, mean, logsumexp, cotangent = map(in_order, (state, mean, logsumexp, cotangent))
    search, remainder, spread = (empty(state.shape, dtype=torch.float32) for _ in range(3))
    square, limit = (empty(state.shape[:-1], dtype=torch.float32) for _ in range(2))
    value, negative, steps = answer.value, answer.negative_curvature.view(torch.uint8), counted(rule.max_steps)
    numbers = problem.beta, *layout.beta, problem.anchor, *layout.anchor

    def run(kernel: Any, left: Left, *given: object) -> None:
        where = *left.placed(), *numbers, *layout.sizes[1:], rows, rule.rtol, steps
        programs = answer.status.numel() // rows * triton.cdiv(rows, chosen.rows)
        launch(kernel, programs, chosen, problem, *given, *where, picked=left.listed)

    left = Left(problem, answer.status, product.chosen)
    course = search, remainder, value, square, limit, answer.num_steps, negative
    run(_begin_kernel, left, cotangent, *course)
    for _ in range(steps):
        if not left.next():
            break
        product(left, state, mean, logsumexp, search, spread)
        run(_conjugate_kernel, left, spread, *course)
    left = Left(problem, answer.status, product.chosen)
    product(left, state, mean, logsumexp, value, spread)
    evidence = answer.residual, answer.tolerance, answer.by_beta
    run(_end_kernel, left, state, mean, logsumexp, cotangent, spread, value, *course[5:], *evidence, *operands)
    if keys.numel():
        gradient_of_keys(problem, layout, operands, answer.by_keys)
    return answer


@triton.jit
def scaled_cotangent(cotangent, whole, inside):
    """A cotangent in the units of the power of two that brings it to order one; that is the first over the second."""
    g = tl.load(cotangent + whole, mask=inside, other=0.0)
    peak = tl.max(tl.abs(g), 1)
    # Subnormal cotangents are lifted first, as the reciprocal of their power of two is no number.
    lift = tl.where(peak < SMALLEST_LARGE, LIFT, 1.0)
    unit = power_of_two(peak * lift)
    return g * lift[:, None] / unit[:, None], unit, lift


@triton.jit
def system(batch, beta, betas, anchor, anchors, sizes):
    """beta, and 1 - anchor."""
    b = tl.load(beta + batch_offset(batch, sizes, betas))
    return b, 1.0 - tl.load(anchor + batch_offset(batch, sizes, anchors))


@kernel
def _begin_kernel(
    cotangent,
    search,
    remainder,
    value_out,
    square_out,
    limit_out,
    num_steps_out,
    negative_out,
    status,
    order,
    counts,
    next_order,
    next_counts,
    beta,
    beta_0: tl.int64,
    beta_1: tl.int64,
    beta_2: tl.int64,
    anchor,
    anchor_0: tl.int64,
    anchor_1: tl.int64,
    anchor_2: tl.int64,
    middle: tl.int32,
    inner: tl.int32,
    N: tl.int32,
    rtol: tl.float32,
    max_steps: tl.int32,
    P: tl.constexpr,
):
    """u = 0, in units of the cotangent."""
    batch, _, first, local, dims, real, inside = query_tile(N, status, order, counts, P)
    at, whole = batch * N + first + local, (batch * N + first) * P.dim + local[:, None] * P.dim + dims[None, :]
    g, _, _ = scaled_cotangent(cotangent, whole, inside)
    square = tl.sum(g * g, 1)
    limit = rtol * rtol * square
    left = real & (square > limit) & (local * 0 < max_steps)
    tl.store(remainder + whole, g, mask=inside)
    tl.store(search + whole, g, mask=inside)
    tl.store(value_out + whole, g * 0.0, mask=inside)
    tl.store(square_out + at, square, mask=real)
    tl.store(limit_out + at, limit, mask=real)
    tl.store(num_steps_out + at, local * 0, mask=real)
    tl.store(negative_out + at, (local * 0).to(tl.uint8), mask=real)
    tl.store(status + at, tl.where(left, UNFINISHED, MAX_STEPS).to(tl.int8), mask=real)
    note(left, local + first, batch, N, next_order, next_counts, P)


@kernel
def _conjugate_kernel(
    spread,
    search,
    remainder,
    value_out,
    square_out,
    limit_out,
    num_steps_out,
    negative_out,
    status,
    order,
    counts,
    next_order,
    next_counts,
    beta,
    beta_0: tl.int64,
    beta_1: tl.int64,
    beta_2: tl.int64,
    anchor,
    anchor_0: tl.int64,
    anchor_1: tl.int64,
    anchor_2: tl.int64,
    middle: tl.int32,
    inner: tl.int32,
    N: tl.int32,
    rtol: tl.float32,
    max_steps: tl.int32,
    P: tl.constexpr,
):
    """A step of conjugate gradients, where `spread` is the covariance of the keys times the direction."""
    batch, _, first, local, dims, real, inside = query_tile(N, status, order, counts, P)
    if not any_of(real):
        return
    at, whole = batch * N + first + local, (batch * N + first) * P.dim + local[:, None] * P.dim + dims[None, :]
    b, rest = system(batch, beta, (beta_0, beta_1, beta_2), anchor, (anchor_0, anchor_1, anchor_2), (middle, inner))
    p = tl.load(search + whole, mask=inside, other=0.0)
    moved = p - rest * b * tl.load(spread + whole, mask=inside, other=0.0)
    r = tl.load(remainder + whole, mask=inside, other=0.0)
    value = tl.load(value_out + whole, mask=inside, other=0.0)
    square = tl.load(square_out + at, mask=real, other=1.0)
    steps = tl.load(num_steps_out + at, mask=real, other=0) + 1
    limit = tl.load(limit_out + at, mask=real, other=0.0)
    tl.debug_barrier()  # every thread has read what another may write
    curvature = tl.sum(p * moved, 1)
    # A NaN is not blocked: it goes on into the residual and is seen there.
    blocked = curvature <= NOISE * EPS * tl.sum(p * p, 1)
    rate = tl.where(blocked, 0.0, square / curvature)
    r -= rate[:, None] * moved
    reached = tl.sum(r * r, 1)
    left = real & ~blocked & (reached > limit) & (steps < max_steps)
    tl.store(value_out + whole, value + rate[:, None] * p, mask=inside)
    tl.store(remainder + whole, r, mask=inside)
    tl.store(search + whole, r + (reached / square)[:, None] * p, mask=inside)
    tl.store(square_out + at, reached, mask=real)
    tl.store(num_steps_out + at, steps, mask=real)
    tl.store(negative_out + at, blocked.to(tl.uint8), mask=real)
    tl.store(status + at, tl.where(left, UNFINISHED, MAX_STEPS).to(tl.int8), mask=real)
    note(left, local + first, batch, N, next_order, next_counts, P)


@kernel
def _end_kernel(
    state,
    mean,
    logsumexp,
    cotangent,
    spread,
    value_out,
    num_steps,
    negative,
    residual_out,
    tolerance_out,
    by_beta_out,
    state_half_out,
    state_scale_out,
    shift_out,
    value_half_out,
    value_scale_out,
    centre_out,
    status,
    order,
    counts,
    next_order,
    next_counts,
    beta,
    beta_0: tl.int64,
    beta_1: tl.int64,
    beta_2: tl.int64,
    anchor,
    anchor_0: tl.int64,
    anchor_1: tl.int64,
    anchor_2: tl.int64,
    middle: tl.int32,
    inner: tl.int32,
    N: tl.int32,
    rtol: tl.float32,
    max_steps: tl.int32,
    P: tl.constexpr,
):
    """The residual of u, its gradients, and what the kernel for the keys reads; `spread` is the product with u."""
    batch, _, first, local, dims, real, inside = query_tile(N, status, order, counts, P)
    at, whole = batch * N + first + local, (batch * N + first) * P.dim + local[:, None] * P.dim + dims[None, :]
    b, rest = system(batch, beta, (beta_0, beta_1, beta_2), anchor, (anchor_0, anchor_1, anchor_2), (middle, inner))
    g, unit, lift = scaled_cotangent(cotangent, whole, inside)
    value = tl.load(value_out + whole, mask=inside, other=0.0)
    z = tl.load(state + whole, mask=inside, other=0.0)
    m = tl.load(mean + whole, mask=inside, other=0.0)
    product = tl.load(spread + whole, mask=inside, other=0.0)
    blocked = tl.load(negative + at, mask=real, other=0) != 0
    steps = tl.load(num_steps + at, mask=real, other=0)
    tl.debug_barrier()  # every thread has read what another may write
    r = g - (value - rest * b * product)
    by_beta = rest * tl.sum(z * product, 1)
    size = tl.sqrt(tl.sum(g * g, 1))
    tolerance = rtol * size
    # A row without a cotangent adds nothing, even if it is not finite.
    idle = size == 0.0
    residual = tl.where(idle, 0.0, tl.sqrt(tl.sum(r * r, 1)))
    finite = residual < float("inf")
    solved = finite & (residual <= SLACK * tolerance) & ~blocked
    stalled = finite & ~solved & (blocked | (steps < max_steps))
    end = tl.where(stalled, STALLED, MAX_STEPS)
    end = tl.where(solved, CONVERGED, tl.where(finite, end, NONFINITE))
    dropped = stalled | idle
    tl.store(status + at, end.to(tl.int8), mask=real)
    tl.store(residual_out + at, tl.where(stalled, size, residual) * unit / lift, mask=real)
    tl.store(tolerance_out + at, tolerance * unit / lift, mask=real)
    tl.store(by_beta_out + at, tl.where(dropped, 0.0, by_beta) * unit / lift, mask=real)
    # A row that is not finite gives NaN.
    value = tl.where(dropped[:, None], 0.0, tl.where(finite[:, None], value, float("nan")))
    tl.store(value_out + whole, value * unit[:, None] / lift[:, None], mask=inside)
    # z and u' = (1 - anchor) u, rounded, and <mean, u'>. A query that adds nothing has probabilities exp2(-inf), even
    # if it is not finite.
    half, scale = rounded(z, P)
    level = (tl.load(logsumexp + at, mask=real, other=0.0) - lost(m, z, scale, b, P)) * LOG2E
    tl.store(state_scale_out + at, scale, mask=real)
    tl.store(shift_out + at, tl.where(dropped, float("inf"), level), mask=real)
    half = tl.where(dropped[:, None], 0.0, half)
    tl.store(state_half_out + whole, half.to(state_half_out.dtype.element_ty), mask=inside)
    value = rest * value
    if P.dtype == "fp16":
        u_half, u_scale = rounded(tl.where(finite[:, None], value, 0.0), P)
        u_half = narrow(value * (1.0 / u_scale)[:, None], P)
        tl.store(value_scale_out + at, u_scale * unit / lift, mask=real)
    else:
        u_half = narrow(value * unit[:, None] / lift[:, None], P)
    tl.store(value_half_out + whole, u_half.to(value_half_out.dtype.element_ty), mask=inside)
    centre = tl.sum(m * u_half.to(tl.float32), 1)
    tl.store(centre_out + at, tl.where(dropped, 0.0, centre), mask=real)
