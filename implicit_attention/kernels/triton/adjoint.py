"""The adjoint solve of every query: products with the Hessian, between two of them a step of conjugate gradients."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...solution import Status
from .. import trust
from ..problem import AdjointAnswer, AdjointRule, Attention
from .attend import MaskTiles, OverKeys
from .layout import InMemory, Left, counted, in_order, step_tiles, tiles
from .solve import note
from .tile import (
    INF,
    INVERSE_PEAK,
    LOG2E,
    PEAK,
    UNFINISHED,
    added,
    any_of,
    exponents,
    kernel,
    key_tile,
    matrix,
    narrow,
    one,
    power_of_two,
    product,
    query_tile,
    read,
    rest_of,
    scaled,
    scores_of,
    write,
)

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
# In half precision coarse products carry no finer tolerance.
COARSE_RTOL = 1e-3
# Programs that keep a large device busy: where there are fewer tiles of keys, queries are split among several.
PROGRAMS = 264
MOST_SPLITS = 16


class Directions(NamedTuple):
    """The evaluation at a solution, its cotangent, a direction, the covariance of the keys times it, and residuals."""

    state: Tensor
    mean: Tensor
    logsumexp: Tensor
    cotangent: Tensor
    search: Tensor
    spread: Tensor
    remainder: Tensor
    square: Tensor


def solve_adjoint(
    problem: Attention, state: Tensor, cotangent: Tensor, mean: Tensor, logsumexp: Tensor, rule: AdjointRule
) -> AdjointAnswer:
    """Solve A u = cotangent (*batch, N, D) for every query; mean and logsumexp are those at the state. All is float32.

    Queries that stall, saddles above all, have u = 0 and add nothing to the gradients: they wait for another method.
    One that is not finite makes the gradient of all keys in its reach NaN.
    """
    keys, rows = problem.keys, state.shape[-2]
    empty = partial(trust.empty, device=keys.device)
    answer = AdjointAnswer.allocated(empty, state.shape, keys.shape, torch.float32)
    if state.numel() == 0:
        answer.by_keys.zero_()
        return answer
    placed = InMemory.of(problem)
    multiply, chosen = OverKeys(placed, "product"), step_tiles(problem)
    high, rest, value = (empty(state.shape, dtype=placed.keys.memory.dtype) for _ in range(3))
    scale, shift, value_scale, centre = (empty(state.shape[:-1], dtype=torch.float32) for _ in range(4))
    operands = KernelOperands(high, rest, scale, shift, value, value_scale, centre)
    there = map(in_order, (state, mean, logsumexp, cotangent))
    course = Directions(*there, *(empty(n, dtype=torch.float32) for n in (*[state.shape] * 3, state.shape[:-1])))
    # Kernels write truth values as numbers.
    written = answer._replace(negative_curvature=answer.negative_curvature.view(torch.uint8))
    steps = counted(rule.max_steps)

    def run(step: int, left: Left) -> None:
        given = course, written, operands, left.noted, placed.beta, placed.anchor, rows, rule.rtol, steps, step
        kernel = _conjugate_kernel if step <= steps else _end_kernel
        placed.launch(kernel, left.programs(chosen), chosen, *given, picked=left.listed)

    left = Left(problem, answer.status, multiply.chosen)
    for step in range(steps + 1):
        if step:
            if not left.next():
                break
            multiply(left, *course[:3], course.search, course.spread, fine=rule.rtol < COARSE_RTOL)
        run(step, left)
    left = Left(problem, answer.status, multiply.chosen)
    multiply(left, *course[:3], answer.value, course.spread, fine=True)
    run(steps + 1, left)
    if keys.numel():
        gradient_of_keys(placed, operands, answer.by_keys)
    return answer


@triton.jit
def scaled_cotangent(cotangent, whole, inside):
    """A cotangent in the units of the power of two that brings it to order one; that is the first over the second."""
    g = read(cotangent + whole, inside)
    peak = tl.max(tl.abs(g), 1)
    # Subnormal cotangents are lifted first, as the reciprocal of their power of two is no number.
    lift = tl.where(peak < SMALLEST_LARGE, LIFT, 1.0)
    unit = power_of_two(peak * lift)
    return g * lift[:, None] / unit[:, None], unit, lift


@kernel
def _conjugate_kernel(
    course,
    answer,
    operands,
    left,
    beta,
    anchor,
    N: tl.int32,
    rtol: tl.float32,
    max_steps: tl.int32,
    step: tl.int32,
    P: tl.constexpr,
):
    """A step of conjugate gradients, in units of the cotangent; the first, before any product, leads from 0 to 0."""
    batch, _, first, local, _, real, at, whole, inside = query_tile(N, left, P)
    if not any_of(real):
        return
    begun = real & (local * 0 + step > 0)
    known = inside & begun[:, None]
    by_cov = (1.0 - tl.load(anchor + batch)) * tl.load(beta + batch)
    p = read(course.search + whole, known)
    moved = p - by_cov * read(course.spread + whole, known)
    g, _, _ = scaled_cotangent(course.cotangent, whole, inside & ~known)
    r = g + read(course.remainder + whole, known)
    value = read(answer.value + whole, known)
    square = tl.load(course.square + at, mask=begun, other=1.0)
    tolerance = read(answer.tolerance + at, begun)
    tl.debug_barrier()  # every thread has read what another may write
    curvature = tl.sum(p * moved, 1)
    # A NaN is not blocked: it goes on into the residual and is seen there.
    blocked = begun & (curvature <= NOISE * EPS * tl.sum(p * p, 1))
    rate = tl.where(begun & ~blocked, square / curvature, 0.0)
    r -= rate[:, None] * moved
    reached = tl.sum(r * r, 1)
    tolerance = tl.where(begun, tolerance, rtol * tl.sqrt(reached))
    still = real & ~blocked & (reached > tolerance * tolerance) & (local * 0 + step < max_steps)
    value += rate[:, None] * p
    if P.half:
        # A = I - B with 0 <= B < 1 leaves B r of a residual r at u + r: one step more, for no product.
        value += tl.where(still[:, None], 0.0, r)
    write(answer.value + whole, value, inside)
    write(course.remainder + whole, r, inside)
    write(course.search + whole, r + (reached / square)[:, None] * p, inside)
    write(course.square + at, reached, real)
    write(answer.tolerance + at, tolerance, real)
    write(answer.num_steps + at, local * 0 + step, real)
    write(answer.negative_curvature + at, blocked, real)
    write(left.status + at, tl.where(still, UNFINISHED, MAX_STEPS), real)
    note(still, 0, local + first, batch, N, left, P)


@kernel
def _end_kernel(
    course,
    answer,
    operands,
    left,
    beta,
    anchor,
    N: tl.int32,
    rtol: tl.float32,
    max_steps: tl.int32,
    step: tl.int32,
    P: tl.constexpr,
):
    """The residual of u, its gradients, and what the kernel for the keys reads; `spread` is the product with u."""
    batch, _, _, _, _, real, at, whole, inside = query_tile(N, left, P)
    b, rest = tl.load(beta + batch), 1.0 - tl.load(anchor + batch)
    g, unit, lift = scaled_cotangent(course.cotangent, whole, inside)
    value = read(answer.value + whole, inside)
    z = read(course.state + whole, inside)
    m = read(course.mean + whole, inside)
    spread = read(course.spread + whole, inside)
    tolerance = read(answer.tolerance + at, real)
    blocked = read(answer.negative_curvature + at, real) != 0
    steps = read(answer.num_steps + at, real)
    tl.debug_barrier()  # every thread has read what another may write
    r = g - (value - rest * b * spread)
    size = tl.sqrt(tl.sum(g * g, 1))
    # A row without a cotangent adds nothing, even if it is not finite.
    idle = size == 0.0
    residual = tl.where(idle, 0.0, tl.sqrt(tl.sum(r * r, 1)))
    finite = residual < INF
    solved = finite & (residual <= SLACK * tolerance) & ~blocked
    stalled = finite & ~solved & (blocked | (steps < max_steps))
    end = tl.where(solved, CONVERGED, tl.where(stalled, STALLED, tl.where(finite, MAX_STEPS, NONFINITE)))
    dropped = stalled | idle
    by_beta = tl.where(dropped, 0.0, rest * tl.sum(z * spread, 1))
    write(left.status + at, end, real)
    write(answer.residual + at, tl.where(stalled, size, residual) * unit / lift, real)
    write(answer.tolerance + at, tolerance * unit / lift, real)
    write(answer.by_beta + at, by_beta * unit / lift, real)
    # A row that is not finite gives NaN.
    value = tl.where(dropped[:, None], 0.0, tl.where(finite[:, None], value, float("nan")))
    write(answer.value + whole, value * unit[:, None] / lift[:, None], inside)
    # z and u' = (1 - anchor) u as operands, and <mean, u'>. A query that adds nothing has probabilities exp2(-inf),
    # even if it is not finite.
    y, scale = scaled(tl.where(dropped[:, None], 0.0, z), P)
    high = narrow(y, P)
    write(operands.state + whole, high, inside)
    if P.half:
        write(operands.state_rest + whole, rest_of(y, high), inside)
    level = read(course.logsumexp + at, real) * LOG2E
    write(operands.state_scale + at, scale, real)
    write(operands.shift + at, tl.where(dropped, INF, level), real)
    value = rest * value
    if P.half:
        _, u_scale = scaled(tl.where(finite[:, None], value, 0.0), P)
        u = narrow(value * (1.0 / u_scale)[:, None], P)
        # Products of a tile are in units of its largest scale.
        write(operands.value_scale + at, tl.where(dropped, 0.0, u_scale * unit / lift), real)
    else:
        u = value * unit[:, None] / lift[:, None]
    write(operands.value + whole, u, inside)
    centre = tl.sum(m * u.to(tl.float32), 1)
    write(operands.centre + at, tl.where(dropped, 0.0, centre), real)


# (df/dK)^T u, by tiles of keys, which no two programs share: its sums have a fixed order.


class KernelOperands(NamedTuple):
    """Per query, as it enters products: z and u' = (1 - anchor) u as operands and their scales, in half precision what
    rounding cut off z, the log-sum-exp in units of log 2, <mean, u'> in units of the scale of u'."""

    state: Tensor
    state_rest: Tensor
    state_scale: Tensor
    shift: Tensor
    value: Tensor
    value_scale: Tensor
    centre: Tensor


def gradient_of_keys(placed: InMemory, operands: KernelOperands, out: Tensor) -> None:
    """Write sum_i [p_ij u'_i + beta p_ij (t_ij - <mean_i, u'_i>) z_i] with t = K u' to `out`, of the keys' shape."""
    chosen, (rows, count, offset) = tiles("keys", placed.problem), placed.sizes
    # The sets that read each matrix of keys.
    readers = placed.keys.numbers.argsort(stable=True).view(placed.keys.starts.numel(), -1).to(torch.int32)
    matrices, sets = readers.shape
    key_tiles, work = matrices * triton.cdiv(count, chosen.keys), sets * triton.cdiv(rows, chosen.rows)
    splits = max(min(PROGRAMS // key_tiles, work // 2, MOST_SPLITS), 1)
    parts = out if splits == 1 else trust.empty((splits, *out.shape), dtype=out.dtype, device=out.device)
    given = *placed.rows, operands, parts, readers, MaskTiles.of(placed, chosen, by_keys=True)
    sizes = rows, count, offset, sets, out.numel(), splits
    placed.launch(_keys_kernel, key_tiles * splits, chosen, *given, *sizes)
    if splits > 1:
        torch.sum(parts, 0, out=out)


@kernel
def _keys_kernel(
    keys,
    key_row: tl.int64,
    mask,
    mask_row: tl.int64,
    beta,
    operands,
    out,
    readers,
    listed,
    N: tl.int32,
    M: tl.int32,
    offset: tl.int32,
    count: tl.int32,
    total: tl.int64,
    splits: tl.int32,
    P: tl.constexpr,
):
    """`readers` are the `count` sets of queries that read each matrix of keys."""
    split = tl.program_id(0) % splits
    number = tl.program_id(0) // splits
    per_batch = tl.cdiv(M, P.keys)
    batch = (number // per_batch).to(tl.int64)
    first = (number % per_batch) * P.keys
    key_rows = matrix(keys, key_row, batch)
    unit, most = 1.0, 1.0
    if P.half:
        unit, most = tl.load(keys.unit + batch), tl.load(keys.most + batch)
    k = key_tile(key_rows, first, 0, M, P, P.dims, True)

    cols, dims, local = first + tl.arange(0, P.keys), tl.arange(0, P.dims), tl.arange(0, P.rows)
    gradient = tl.full([P.keys, P.dims], 0.0, tl.float32)
    largest = 0.0
    for reader in range(count):
        entry = tl.load(readers + batch * count + reader).to(tl.int64)
        b, of_mask = tl.load(beta + entry), tl.load(mask.numbers + entry)
        pairs = (matrix(mask, mask_row, of_mask), offset)
        # How many tiles of queries it visits have no masked pair, and how many there are.
        if P.mask != "none":
            tile = of_mask.to(tl.int64) * per_batch + number % per_batch
            visited = listed.visited + tile * tl.cdiv(N, P.rows)
            whole, end = tl.load(listed.counts + 2 * tile), tl.load(listed.counts + 2 * tile + 1)
        else:
            row_tiles = tl.cdiv(N, P.rows)
            some, full = 0, 0
            if P.causal:
                # Rows that end before the first key do not attend to it, rows from the last one on attend to all.
                some = tl.minimum(tl.maximum(first - offset, 0) // P.rows, row_tiles)
                full = tl.minimum(tl.cdiv(tl.maximum(first - offset + P.keys - 1, 0), P.rows), row_tiles)
            whole, end = row_tiles - full, row_tiles - some
        for TAIL in tl.static_range(2):
            # Other splits are the first to have a tile of the next reader.
            begin = (split + reader) % splits
            for place in range(begin + whole if TAIL else begin, end if TAIL else whole, splits):
                if P.mask != "none":
                    start = tl.load(visited + place) * P.rows
                else:
                    start = (some + place - whole if TAIL else full + place) * P.rows
                if not P.half:
                    gradient = gradient * one(M)
                real = start + local < N
                inside = real[:, None] & (dims < P.dim)[None, :]
                at = entry * N + start + local
                base, places = (entry * N + start) * P.dim, local[:, None] * P.dim + dims[None, :]
                z = read(operands.state + base + places, inside)
                u = read(operands.value + base + places, inside)
                # Rows beyond the last have z = u = 0 and add nothing; nor by a bias of their keys that is large.
                level = read(operands.shift + at, real)
                middle = read(operands.centre + at, real)
                by = tl.full([P.rows], 0.0, tl.float32) + b * LOG2E * unit
                if P.half:
                    z_scale = read(operands.state_scale + at, real)
                    u_scale = read(operands.value_scale + at, real)
                    by, middle, level = by * z_scale, middle / unit, level - PEAK
                bias = 0.0
                if TAIL:
                    bias = added((start + local)[None, :], cols[:, None], pairs, N, M, P)
                    bias = tl.where(real[None, :], bias, -INF)
                z_rows = (z, operands.state + base, local * P.dim, real)
                u_rows = (u, operands.value + base, local * P.dim, real)
                scores = scores_of(z_rows, k, key_rows, first, M, P, True, True)
                if P.half:
                    # Large scores would lose digits to the rounding of z.
                    rest = read(operands.state_rest + base + places, inside)
                    scores = product(k, tl.trans(rest), scores, P)
                p = tl.exp2(exponents(scores, by[None, :], bias, level[None, :]))
                centred = scores_of(u_rows, k, key_rows, first, M, P, True, True) - middle[None, :]
                if P.half:
                    # Relative to the largest scales of the tile, and to the most that is centred: no operand overflows.
                    both = u_scale * z_scale * (b * unit)
                    before = largest
                    largest = tl.maximum(before, tl.max(tl.maximum(u_scale, both * (0.5 * most)), 0))
                    share = 1.0 / tl.where(largest > 0.0, largest, 1.0)
                    gradient = gradient * (before * share)
                    p = p * (u_scale * share)[None, :]
                    weights = p * (z_scale * (b * unit))[None, :] * centred
                    gradient = product(narrow(p, P), u, gradient, P)
                    gradient = product(narrow(weights, P), z, gradient, P)
                else:
                    gradient = product(p, u, gradient, P)
                    gradient = product(p * (centred * b), z, gradient, P)
    if P.half:
        gradient = gradient * (largest * INVERSE_PEAK)
    out += split.to(tl.int64) * total + (batch * M + first) * P.dim
    where = tl.arange(0, P.keys)[:, None] * P.dim + dims[None, :]
    write(out + where, gradient, (cols < M)[:, None] & (dims < P.dim)[None, :])
