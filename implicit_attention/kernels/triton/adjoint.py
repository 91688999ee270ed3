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
from ..problem import AdjointAnswer, AdjointRule, Attention
from .kernels import (
    HEADROOM,
    LOG2E,
    batch_offset,
    columns,
    kernel,
    matrix,
    narrow,
    no_sums,
    power_of_two,
    query_tile,
    rounded,
    scaled_back,
    sums,
    visited_tiles,
    weighted_keys,
)
from .keys import KernelOperands, gradient_of_keys
from .layout import KernelLayout, counted, in_memory, in_order, launch, offset_of, placed, tiles
from .mask_tiles import MaskTiles

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
        *(empty(state.shape, dtype=torch.float32) for _ in range(3)),
        *placed(problem, layout),
        *answer._replace(negative_curvature=answer.negative_curvature.view(torch.uint8))[:-1],
        *(*operands, *MaskTiles.of(problem, layout, chosen, by_keys=False).placed(), *layout.sizes[1:]),
        *(rows, keys.shape[-2], offset_of(problem), rule.rtol, counted(rule.max_steps)),
    )
    if keys.numel():
        gradient_of_keys(problem, layout, operands, answer.by_keys)
    return answer


@triton.jit
def _spread(
    v, mean, spread, half, by, shift, rows, local, dims, real, inside, keys, pairs, visited, N, M, P: tl.constexpr
):
    """Write the weighted keys of a vector v in memory to `spread`; what sum_j w_j times the mean is, and their unit."""
    D: tl.constexpr = P.dim
    whole = local[:, None] * D + dims[None, :]
    tl.debug_barrier()  # every thread has written v and read what `spread` was
    v_half, v_scale = rounded(tl.load(v + whole, mask=inside, other=0.0), P)
    centre = no_sums(P)
    for column in tl.range(0, D, P.columns, num_stages=1):
        place, exists = columns(column, local, P)
        there = real[:, None] & exists
        some = narrow(tl.load(v + place, mask=there, other=0.0) * (1.0 / v_scale)[:, None], P)
        centre += sums(tl.load(mean + place, mask=there, other=0.0) * some.to(tl.float32), P)
    total, rest = weighted_keys(half, by, shift, v_half, tl.sum(centre, 1), rows, keys, pairs, visited, N, M, P)
    tl.store(spread + whole, total, mask=inside)
    tl.debug_barrier()  # every thread has written its part
    if P.dtype == "fp16":
        v_scale = v_scale * HEADROOM
    return rest, v_scale


@triton.jit
def _spread_at(column, mean, spread, rest, unit, local, real, P: tl.constexpr):
    """Read some columns: offsets, which of them exist, the mean, the covariance of the keys times the vector."""
    place, exists = columns(column, local, P)
    there = real[:, None] & exists
    m = tl.load(mean + place, mask=there, other=0.0)
    product = tl.load(spread + place, mask=there, other=0.0) - rest[:, None] * m
    return place, there, m, product * unit[:, None]


@kernel
def _adjoint_kernel(
    state,
    mean,
    logsumexp,
    cotangent,
    search,
    remainder,
    spread,
    keys,
    keys_0: tl.int64,
    keys_1: tl.int64,
    keys_2: tl.int64,
    keys_row: tl.int64,
    keys_column: tl.int64,
    beta,
    beta_0: tl.int64,
    beta_1: tl.int64,
    beta_2: tl.int64,
    anchor,
    anchor_0: tl.int64,
    anchor_1: tl.int64,
    anchor_2: tl.int64,
    mask,
    mask_0: tl.int64,
    mask_1: tl.int64,
    mask_2: tl.int64,
    mask_row: tl.int64,
    mask_column: tl.int64,
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
    listed,
    listed_counts,
    listed_0: tl.int64,
    listed_1: tl.int64,
    listed_2: tl.int64,
    middle: tl.int32,
    inner: tl.int32,
    N: tl.int32,
    M: tl.int32,
    offset: tl.int32,
    rtol: tl.float32,
    max_steps: tl.int32,
    P: tl.constexpr,
):
    """Conjugate gradients per query, in units of the power of two that brings its cotangent to order one.

    The solution `value_out`, the residual `remainder` and the direction `search` are read a few columns at a time: the
    registers are those of the loop over the keys.
    """
    ROWS: tl.constexpr = P.rows
    D: tl.constexpr = P.dim
    batch, tile, first, local, dims, real, inside = query_tile(N, None, None, P)
    begin = batch * N + first
    start, at = begin * D, begin + local
    rows = first + local
    state, mean, cotangent, value_out = state + start, mean + start, cotangent + start, value_out + start
    search, remainder, spread = search + start, remainder + start, spread + start

    sizes = (middle, inner)
    b = tl.load(beta + batch_offset(batch, sizes, (beta_0, beta_1, beta_2)))
    a = tl.load(anchor + batch_offset(batch, sizes, (anchor_0, anchor_1, anchor_2)))
    key_rows = matrix(keys, batch, sizes, (keys_0, keys_1, keys_2, keys_row, keys_column), P, False)
    pairs = (matrix(mask, batch, sizes, (mask_0, mask_1, mask_2, mask_row, mask_column), P, True), offset)
    tiles = (listed, listed_counts, (listed_0, listed_1, listed_2))
    visited = visited_tiles(batch, tile, first, local, real, offset, tiles, sizes, N, M, P)

    half, scale = rounded(tl.load(state + local[:, None] * D + dims[None, :], mask=inside, other=0.0), P)
    moved, peak = no_sums(P), tl.zeros([ROWS], tl.float32)
    for column in tl.range(0, D, P.columns, num_stages=1):
        place, exists = columns(column, local, P)
        there = real[:, None] & exists
        z = tl.load(state + place, mask=there, other=0.0)
        moved += sums(tl.load(mean + place, mask=there, other=0.0) * (scaled_back(z, scale, P) - z), P)
        peak = tl.maximum(peak, tl.max(tl.abs(tl.load(cotangent + place, mask=there, other=0.0)), 1))
    # The log-sum-exp of the scores of the rounded z, in units of log 2: with it probabilities sum to 1.
    shift = (tl.load(logsumexp + at, mask=real, other=0.0) + b * tl.sum(moved, 1)) * LOG2E
    by = scale * (b * LOG2E)

    # Subnormal cotangents are lifted first, as the reciprocal of their power of two is no number.
    lift = tl.where(peak < SMALLEST_LARGE, LIFT, 1.0)
    unit = power_of_two(peak * lift)
    square = no_sums(P)
    for column in tl.range(0, D, P.columns, num_stages=1):
        place, exists = columns(column, local, P)
        there = real[:, None] & exists
        g = tl.load(cotangent + place, mask=there, other=0.0) * lift[:, None] / unit[:, None]
        square += sums(g * g, P)
        tl.store(remainder + place, g, mask=there)
        tl.store(search + place, g, mask=there)
        tl.store(value_out + place, g * 0.0, mask=there)
    square = tl.sum(square, 1)
    limit = rtol * rtol * square
    size = tl.sqrt(square)
    tolerance = rtol * size
    num_steps = tl.zeros([ROWS], tl.int32)
    blocked = local < 0
    active = real & (square > limit) & (num_steps < max_steps)
    running = tl.max(active.to(tl.int32), 0) > 0
    while running:
        rest, its = _spread(
            search, mean, spread, half, by, shift, rows, local, dims, real, inside, key_rows, pairs, visited, N, M, P
        )
        curvature, length = no_sums(P), no_sums(P)
        for column in tl.range(0, D, P.columns, num_stages=1):
            place, there, _, product = _spread_at(column, mean, spread, rest, its, local, real, P)
            p = tl.load(search + place, mask=there, other=0.0)
            curvature += sums(p * (p - (1.0 - a) * b * product), P)
            length += sums(p * p, P)
        curvature, length = tl.sum(curvature, 1), tl.sum(length, 1)
        num_steps += active.to(tl.int32)
        # A NaN is not blocked: it goes on into the residual and is seen there.
        met = active & (curvature <= NOISE * EPS * length)
        blocked = blocked | met
        active = active & ~met
        rate = tl.where(active, square / curvature, 0.0)
        reached = no_sums(P)
        for column in tl.range(0, D, P.columns, num_stages=1):
            place, there, _, product = _spread_at(column, mean, spread, rest, its, local, real, P)
            p = tl.load(search + place, mask=there, other=0.0)
            value = tl.load(value_out + place, mask=there, other=0.0) + rate[:, None] * p
            r = tl.load(remainder + place, mask=there, other=0.0) - rate[:, None] * (p - (1.0 - a) * b * product)
            tl.debug_barrier()  # what one thread reads another may write
            reached += sums(r * r, P)
            tl.store(value_out + place, value, mask=there)
            tl.store(remainder + place, r, mask=there)
        tl.debug_barrier()  # what one thread has written another may read
        reached = tl.sum(reached, 1)
        again = tl.where(active, reached / square, 0.0)
        for column in tl.range(0, D, P.columns, num_stages=1):
            place, exists = columns(column, local, P)
            there = real[:, None] & exists
            p = tl.load(search + place, mask=there, other=0.0)
            r = tl.load(remainder + place, mask=there, other=0.0)
            tl.debug_barrier()  # what one thread reads another may write
            tl.store(search + place, r + again[:, None] * p, mask=there)
        square = reached
        active = active & (square > limit) & (num_steps < max_steps)
        running = tl.max(active.to(tl.int32), 0) > 0

    # The same product gives the residual of u and its gradients.
    rest, its = _spread(
        value_out, mean, spread, half, by, shift, rows, local, dims, real, inside, key_rows, pairs, visited, N, M, P
    )
    left, by_beta, peak = no_sums(P), no_sums(P), tl.zeros([ROWS], tl.float32)
    for column in tl.range(0, D, P.columns, num_stages=1):
        place, there, _, product = _spread_at(column, mean, spread, rest, its, local, real, P)
        value = tl.load(value_out + place, mask=there, other=0.0)
        g = tl.load(cotangent + place, mask=there, other=0.0) * lift[:, None] / unit[:, None]
        r = g - (value - (1.0 - a) * b * product)
        left += sums(r * r, P)
        by_beta += sums(tl.load(state + place, mask=there, other=0.0) * product, P)
        peak = tl.maximum(peak, tl.max(tl.abs(value), 1))
    left, by_beta = tl.sum(left, 1), (1.0 - a) * tl.sum(by_beta, 1)
    # A row without a cotangent adds nothing, even if it is not finite.
    idle = size == 0.0
    answer = tl.where(idle, 0.0, tl.sqrt(left))
    finite = answer < float("inf")
    solved = finite & (answer <= SLACK * tolerance) & ~blocked
    stalled = finite & ~solved & (blocked | (num_steps < max_steps))
    status = tl.where(stalled, STALLED, UNFINISHED)
    status = tl.where(solved, CONVERGED, tl.where(finite, status, NONFINITE))
    dropped = stalled | idle
    answer = tl.where(stalled, size, answer)
    tl.store(status_out + at, status.to(tl.int8), mask=real)
    tl.store(residual_out + at, answer * unit / lift, mask=real)
    tl.store(tolerance_out + at, tolerance * unit / lift, mask=real)
    tl.store(num_steps_out + at, num_steps, mask=real)
    tl.store(negative_out + at, blocked.to(tl.uint8), mask=real)
    tl.store(by_beta_out + at, tl.where(dropped, 0.0, by_beta) * unit / lift, mask=real)

    tl.debug_barrier()  # every thread has read the solution
    # What the kernel for the keys reads: z and u' = (1 - anchor) u, rounded, and <mean, u'>. A query that adds nothing
    # has probabilities exp2(-inf), even if it is not finite.
    tl.store(state_scale_out + at, scale, mask=real)
    tl.store(shift_out + at, tl.where(dropped, float("inf"), shift), mask=real)
    u_scale = tl.full([ROWS], 1.0, tl.float32)
    if P.dtype == "fp16":
        u_scale = power_of_two(tl.where(dropped | ~finite, 0.0, (1.0 - a) * peak))
        tl.store(value_scale_out + at, u_scale * unit / lift, mask=real)
    centre = no_sums(P)
    for column in tl.range(0, D, P.columns, num_stages=1):
        place, exists = columns(column, local, P)
        there = real[:, None] & exists
        # A row that is not finite gives NaN.
        value = tl.where(finite[:, None], tl.load(value_out + place, mask=there, other=0.0), float("nan"))
        tl.debug_barrier()  # what one thread reads another may write
        value = tl.where(dropped[:, None], 0.0, value)
        tl.store(value_out + place, value * unit[:, None] / lift[:, None], mask=there)
        z = tl.where(dropped[:, None], 0.0, tl.load(state + place, mask=there, other=0.0))
        z_half = narrow(z * (1.0 / scale)[:, None], P)
        tl.store(state_half_out + start + place, z_half.to(state_half_out.dtype.element_ty), mask=there)
        value = (1.0 - a) * value
        if P.dtype == "fp16":
            u_half = narrow(value * (1.0 / u_scale)[:, None], P)
        else:
            u_half = narrow(value * unit[:, None] / lift[:, None], P)
        tl.store(value_half_out + start + place, u_half.to(value_half_out.dtype.element_ty), mask=there)
        centre += sums(tl.load(mean + place, mask=there, other=0.0) * u_half.to(tl.float32), P)
    tl.store(centre_out + at, tl.where(dropped, 0.0, tl.sum(centre, 1)), mask=real)
