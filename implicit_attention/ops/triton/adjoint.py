"""The adjoint solve as two kernels: conjugate gradients per tile of queries, then the gradient per tile of keys."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...status import Status
from .. import trust
from ..problem import Hopfield
from ..rule import AdjointAnswer, AdjointRule
from .kernels import (
    LOG2E,
    batch_offset,
    covariance_product,
    narrow,
    power_of_two,
    query_tile,
    rounded,
    score_shift,
)
from .keys import KernelOperands, gradient_of_keys
from .layout import KernelLayout, in_memory, in_order, launch, offset_of, placed, tiles

CONVERGED = tl.constexpr(int(Status.CONVERGED))
UNFINISHED = tl.constexpr(int(Status.MAX_STEPS))
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
    problem: Hopfield,
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
    operands = KernelOperands.allocated(empty, state.shape, keys.dtype)
    layout = KernelLayout.of(problem)
    assert layout is not None
    chosen = tiles("adjoint", problem)
    launch(
        _adjoint_kernel,
        answer.status.numel() // rows * triton.cdiv(rows, chosen.rows),
        chosen,
        problem,
        *(in_order(tensor) for tensor in (state, mean, logsumexp, cotangent)),
        *placed(problem, layout),
        *answer._replace(negative_curvature=answer.negative_curvature.view(torch.uint8))[:-1],
        *(*operands, layout.sizes, rows, keys.shape[-2], offset_of(problem), *rule),
    )
    if keys.numel():
        gradient_of_keys(problem, layout, operands, answer.by_keys)
    return answer


@triton.jit(do_not_specialize=["N", "M", "offset", "rtol", "max_steps"])
def _adjoint_kernel(
    state,
    mean,
    logsumexp,
    cotangent,
    keys,
    keys_strides,
    beta,
    beta_strides,
    anchor,
    anchor_strides,
    mask,
    mask_strides,
    value_out,
    status_out,
    residual_out,
    tolerance_out,
    num_steps_out,
    negative_out,
    by_beta_out,
    state_half_out,
    state_scale_out,
    shift_out,
    value_half_out,
    value_scale_out,
    centre_out,
    sizes,
    N,
    M,
    offset,
    rtol,
    max_steps,
    P: tl.constexpr,
):
    """Conjugate gradients per query, in units of the power of two that brings its cotangent to order one."""
    ROWS: tl.constexpr = P.rows
    DIMS: tl.constexpr = P.dims
    D: tl.constexpr = P.dim
    batch, first, local, dims, real, inside = query_tile(N, P)
    begin = batch * N + first
    places = begin * D + local[:, None] * D + dims[None, :]
    at = begin + local

    b = tl.load(beta + batch_offset(batch, sizes, beta_strides)).to(tl.float32)
    a = tl.load(anchor + batch_offset(batch, sizes, anchor_strides)).to(tl.float32)
    key_rows = (keys + batch_offset(batch, sizes, keys_strides), keys_strides[3], keys_strides[4])
    pairs = (mask + batch_offset(batch, sizes, mask_strides), mask_strides[3], mask_strides[4], offset)

    z = tl.load(state + places, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(mean + places, mask=inside, other=0.0).to(tl.float32)
    level = tl.load(logsumexp + at, mask=real, other=0.0).to(tl.float32)
    half, scale = rounded(z, P)
    shift = score_shift(z, m, level, half, scale, b)
    by = scale * (b * LOG2E)

    residual = tl.load(cotangent + places, mask=inside, other=0.0).to(tl.float32)
    # Subnormal cotangents are lifted first, as the reciprocal of their power of two is no number.
    peak = tl.max(tl.abs(residual), 1)
    lift = tl.where(peak < SMALLEST_LARGE, LIFT, 1.0)
    unit = power_of_two(peak * lift)
    residual = residual * lift[:, None] / unit[:, None]
    search = residual
    value = tl.zeros([ROWS, DIMS], tl.float32)
    square = tl.sum(residual * residual, 1)
    limit = rtol * rtol * square
    size = tl.sqrt(square)
    tolerance = rtol * size
    num_steps = tl.zeros([ROWS], tl.int32)
    blocked = local < 0
    active = real & (square > limit) & (num_steps < max_steps)
    running = tl.max(active.to(tl.int32), 0) > 0
    while running:
        m = tl.load(mean + places, mask=inside, other=0.0).to(tl.float32)
        product = covariance_product(half, by, shift, search, m, first, key_rows, pairs, N, M, P)
        product = search - (1.0 - a) * b * product
        curvature = tl.sum(search * product, 1)
        num_steps += active.to(tl.int32)
        # A NaN is not blocked: it goes on into the residual and is seen there.
        met = active & (curvature <= NOISE * EPS * tl.sum(search * search, 1))
        blocked = blocked | met
        active = active & ~met
        rate = tl.where(active, square / curvature, 0.0)
        value += rate[:, None] * search
        residual -= rate[:, None] * product
        reached = tl.sum(residual * residual, 1)
        search = residual + tl.where(active, reached / square, 0.0)[:, None] * search
        square = reached
        active = active & (square > limit) & (num_steps < max_steps)
        running = tl.max(active.to(tl.int32), 0) > 0

    # The same product gives the residual of u and its gradients.
    m = tl.load(mean + places, mask=inside, other=0.0).to(tl.float32)
    spread = covariance_product(half, by, shift, value, m, first, key_rows, pairs, N, M, P)
    residual = tl.load(cotangent + places, mask=inside, other=0.0).to(tl.float32) * lift[:, None] / unit[:, None]
    residual = residual - (value - (1.0 - a) * b * spread)
    # A row without a cotangent adds nothing, even if it is not finite.
    idle = size == 0.0
    answer = tl.where(idle, 0.0, tl.sqrt(tl.sum(residual * residual, 1)))
    finite = answer < float("inf")
    solved = finite & (answer <= SLACK * tolerance) & ~blocked
    stalled = finite & ~solved & (blocked | (num_steps < max_steps))
    status = tl.where(stalled, STALLED, UNFINISHED)
    status = tl.where(solved, CONVERGED, tl.where(finite, status, NONFINITE))
    dropped = stalled | idle
    # A row that is not finite gives NaN.
    value = tl.where(finite[:, None], value, float("nan"))
    value = tl.where(dropped[:, None], 0.0, value)
    z = tl.load(state + places, mask=inside, other=0.0).to(tl.float32)
    by_beta = tl.where(dropped, 0.0, (1.0 - a) * tl.sum(z * spread, 1))
    answer = tl.where(stalled, size, answer)
    tl.store(value_out + places, value * unit[:, None] / lift[:, None], mask=inside)
    tl.store(status_out + at, status.to(tl.int8), mask=real)
    tl.store(residual_out + at, answer * unit / lift, mask=real)
    tl.store(tolerance_out + at, tolerance * unit / lift, mask=real)
    tl.store(num_steps_out + at, num_steps, mask=real)
    tl.store(negative_out + at, blocked.to(tl.uint8), mask=real)
    tl.store(by_beta_out + at, by_beta * unit / lift, mask=real)

    # What the kernel for the keys reads: z and u' = (1 - anchor) u, rounded, and <mean, u'>. A query that adds nothing
    # has probabilities exp2(-inf), even if it is not finite.
    half = tl.where(dropped[:, None], 0.0, half.to(tl.float32))
    tl.store(state_half_out + places, half.to(state_half_out.dtype.element_ty), mask=inside)
    tl.store(state_scale_out + at, scale, mask=real)
    tl.store(shift_out + at, tl.where(dropped, float("inf"), shift), mask=real)
    value = (1.0 - a) * value
    if P.dtype == "fp16":
        u_half, u_scale = rounded(value, P)
        tl.store(value_scale_out + at, u_scale * unit / lift, mask=real)
    else:
        u_half = narrow(value * unit[:, None] / lift[:, None], P)
    tl.store(value_half_out + places, u_half.to(value_half_out.dtype.element_ty), mask=inside)
    m = tl.load(mean + places, mask=inside, other=0.0).to(tl.float32)
    centre = tl.sum(m * u_half.to(tl.float32), 1)
    tl.store(centre_out + at, tl.where(dropped, 0.0, centre), mask=real)
