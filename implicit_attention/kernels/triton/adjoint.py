"""The adjoint solve of every query: products with the Hessian, between two of them a step of conjugate gradients."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
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
    rest_of,
    scaled,
    scores_of,
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
    operands = KernelOperands.allocated(empty, state.shape, placed.keys.memory.dtype)
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
    g = tl.load(cotangent + whole, mask=inside, other=0.0)
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
    D: tl.constexpr = P.dim
    batch, _, first, local, dims, real, inside = query_tile(N, left, P)
    if not any_of(real):
        return
    at, whole = batch * N + first + local, (batch * N + first) * D + local[:, None] * D + dims[None, :]
    begun = real & (local * 0 + step > 0)
    known = inside & begun[:, None]
    by_cov = (1.0 - tl.load(anchor + batch)) * tl.load(beta + batch)
    p = tl.load(course.search + whole, mask=known, other=0.0)
    moved = p - by_cov * tl.load(course.spread + whole, mask=known, other=0.0)
    g, _, _ = scaled_cotangent(course.cotangent, whole, inside & ~known)
    r = g + tl.load(course.remainder + whole, mask=known, other=0.0)
    value = tl.load(answer.value + whole, mask=known, other=0.0)
    square = tl.load(course.square + at, mask=begun, other=1.0)
    tolerance = tl.load(answer.tolerance + at, mask=begun, other=0.0)
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
    tl.store(answer.value + whole, value, mask=inside)
    tl.store(course.remainder + whole, r, mask=inside)
    tl.store(course.search + whole, r + (reached / square)[:, None] * p, mask=inside)
    tl.store(course.square + at, reached, mask=real)
    tl.store(answer.tolerance + at, tolerance, mask=real)
    tl.store(answer.num_steps + at, local * 0 + step, mask=real)
    tl.store(answer.negative_curvature + at, blocked.to(tl.uint8), mask=real)
    tl.store(left.status + at, tl.where(still, UNFINISHED, MAX_STEPS).to(tl.int8), mask=real)
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
    D: tl.constexpr = P.dim
    batch, _, first, local, dims, real, inside = query_tile(N, left, P)
    at, whole = batch * N + first + local, (batch * N + first) * D + local[:, None] * D + dims[None, :]
    b, rest = tl.load(beta + batch), 1.0 - tl.load(anchor + batch)
    g, unit, lift = scaled_cotangent(course.cotangent, whole, inside)
    value = tl.load(answer.value + whole, mask=inside, other=0.0)
    z = tl.load(course.state + whole, mask=inside, other=0.0)
    m = tl.load(course.mean + whole, mask=inside, other=0.0)
    spread = tl.load(course.spread + whole, mask=inside, other=0.0)
    tolerance = tl.load(answer.tolerance + at, mask=real, other=0.0)
    blocked = tl.load(answer.negative_curvature + at, mask=real, other=0) != 0
    steps = tl.load(answer.num_steps + at, mask=real, other=0)
    tl.debug_barrier()  # every thread has read what another may write
    r = g - (value - rest * b * spread)
    size = tl.sqrt(tl.sum(g * g, 1))
    # A row without a cotangent adds nothing, even if it is not finite.
    idle = size == 0.0
    residual = tl.where(idle, 0.0, tl.sqrt(tl.sum(r * r, 1)))
    finite = residual < float("inf")
    solved = finite & (residual <= SLACK * tolerance) & ~blocked
    stalled = finite & ~solved & (blocked | (steps < max_steps))
    end = tl.where(solved, CONVERGED, tl.where(stalled, STALLED, tl.where(finite, MAX_STEPS, NONFINITE)))
    dropped = stalled | idle
    by_beta = tl.where(dropped, 0.0, rest * tl.sum(z * spread, 1))
    tl.store(left.status + at, end.to(tl.int8), mask=real)
    tl.store(answer.residual + at, tl.where(stalled, size, residual) * unit / lift, mask=real)
    tl.store(answer.tolerance + at, tolerance * unit / lift, mask=real)
    tl.store(answer.by_beta + at, by_beta * unit / lift, mask=real)
    # A row that is not finite gives NaN.
    value = tl.where(dropped[:, None], 0.0, tl.where(finite[:, None], value, float("nan")))
    tl.store(answer.value + whole, value * unit[:, None] / lift[:, None], mask=inside)
    # z and u' = (1 - anchor) u as operands, and <mean, u'>. A query that adds nothing has probabilities exp2(-inf),
    # even if it is not finite.
    y, scale = scaled(tl.where(dropped[:, None], 0.0, z), P)
    high = narrow(y, P)
    tl.store(operands.state + whole, high, mask=inside)
    if P.half:
        tl.store(operands.state_rest + whole, rest_of(y, high), mask=inside)
    level = tl.load(course.logsumexp + at, mask=real, other=0.0) * LOG2E
    tl.store(operands.state_scale + at, scale, mask=real)
    tl.store(operands.shift + at, tl.where(dropped, float("inf"), level), mask=real)
    value = rest * value
    if P.half:
        _, u_scale = scaled(tl.where(finite[:, None], value, 0.0), P)
        u = narrow(value * (1.0 / u_scale)[:, None], P)
        # Products of a tile are in units of its largest scale.
        tl.store(operands.value_scale + at, tl.where(dropped, 0.0, u_scale * unit / lift), mask=real)
    else:
        u = value * unit[:, None] / lift[:, None]
    tl.store(operands.value + whole, u, mask=inside)
    centre = tl.sum(m * u.to(tl.float32), 1)
    tl.store(operands.centre + at, tl.where(dropped, 0.0, centre), mask=real)


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

    @classmethod
    def allocated(cls, empty: Callable[..., Tensor], shape: torch.Size, dtype: torch.dtype) -> KernelOperands:
        """Tensors made by `empty(size, dtype=)` for states of that shape and operands of that dtype."""
        state, rest, value = (empty(shape, dtype=dtype) for _ in range(3))
        scale, shift, value_scale, centre = (empty(shape[:-1], dtype=torch.float32) for _ in range(4))
        return cls(state, rest, scale, shift, value, value_scale, centre)


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


@triton.jit
def _visited_tiles(mask_number, number, listed, offset, N, M, P: tl.constexpr):
    """The tiles of queries that a tile of keys visits: their numbers, how many have no masked pair, how many there are.

    Without a mask the first tile of either kind stands for their numbers.
    """
    KEYS: tl.constexpr = P.keys
    ROWS: tl.constexpr = P.rows
    if P.mask != "none":
        tile = mask_number.to(tl.int64) * tl.cdiv(M, KEYS) + number
        visited = listed.visited + tile * tl.cdiv(N, ROWS)
        return (visited, 0), tl.load(listed.counts + 2 * tile), tl.load(listed.counts + 2 * tile + 1)
    else:
        row_tiles = tl.cdiv(N, ROWS)
        some, whole = 0, 0
        if P.causal:
            # Rows that end before the first key do not attend to it, rows from the last one on attend to all.
            first = number * KEYS - offset
            some = tl.minimum(tl.maximum(first, 0) // ROWS, row_tiles)
            whole = tl.minimum(tl.cdiv(tl.maximum(first + KEYS - 1, 0), ROWS), row_tiles)
        return (whole, some), row_tiles - whole, row_tiles - some


@triton.jit
def _row_start(number, whole, visited, P: tl.constexpr, TAIL: tl.constexpr):
    """The first row of the tile that is visited as the given one."""
    if P.mask != "none":
        return tl.load(visited[0] + number) * P.rows
    elif TAIL:
        return (visited[1] + number - whole) * P.rows
    else:
        return (visited[0] + number) * P.rows


@triton.jit
def _keys_tile(gradient, largest, start, given, P: tl.constexpr, TAIL: tl.constexpr):
    """The gradient with the part of the tile of queries from row `start` on."""
    ROWS: tl.constexpr = P.rows
    DIMS: tl.constexpr = P.dims
    D: tl.constexpr = P.dim
    k, key_rows, first, cols, entry, b, unit, most, operands, pairs, N, M = given
    local, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    if not P.half:
        gradient = gradient * one(M)
    real = start + local < N
    inside = real[:, None] & (dims < D)[None, :]
    at = entry * N + start + local
    begin, places = (entry * N + start) * D, local[:, None] * D + dims[None, :]
    z = tl.load(operands.state + begin + places, mask=inside, other=0.0)
    u = tl.load(operands.value + begin + places, mask=inside, other=0.0)
    # Rows beyond the last have z = u = 0 and add nothing; nor by a bias of their keys that is large.
    level = tl.load(operands.shift + at, mask=real, other=0.0)
    middle = tl.load(operands.centre + at, mask=real, other=0.0)
    by = tl.zeros([ROWS], tl.float32) + b * LOG2E * unit
    if P.half:
        z_scale = tl.load(operands.state_scale + at, mask=real, other=0.0)
        u_scale = tl.load(operands.value_scale + at, mask=real, other=0.0)
        by, middle, level = by * z_scale, middle / unit, level - PEAK
    bias = 0.0
    if TAIL:
        bias = tl.where(real[None, :], added((start + local)[None, :], cols[:, None], pairs, N, M, P), float("-inf"))
    z_rows, u_rows = (z, operands.state + begin, local * D, real), (u, operands.value + begin, local * D, real)
    scores = scores_of(z_rows, k, key_rows, first, M, P, True, True)
    if P.half:
        # Large scores would lose digits to the rounding of z.
        rest = tl.load(operands.state_rest + begin + places, mask=inside, other=0.0)
        scores = product(k, tl.trans(rest), scores, P)
    p = tl.exp2(exponents(scores, by[None, :], bias, level[None, :]))
    centred = scores_of(u_rows, k, key_rows, first, M, P, True, True) - middle[None, :]
    if P.half:
        # Relative to the largest scales of the tile, and to the most that is centred, so that no operand overflows.
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
    return gradient, largest


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
    KEYS: tl.constexpr = P.keys
    DIMS: tl.constexpr = P.dims
    D: tl.constexpr = P.dim
    split = tl.program_id(0) % splits
    number = tl.program_id(0) // splits
    per_batch = tl.cdiv(M, KEYS)
    batch = (number // per_batch).to(tl.int64)
    first = (number % per_batch) * KEYS
    key_rows = matrix(keys, key_row, batch)
    unit, most = 1.0, 1.0
    if P.half:
        unit, most = tl.load(keys.unit + batch), tl.load(keys.most + batch)
    k = key_tile(key_rows, first, 0, M, P, P.dims, True)

    cols, dims = first + tl.arange(0, KEYS), tl.arange(0, DIMS)
    gradient = tl.zeros([KEYS, DIMS], tl.float32)
    largest = 0.0
    for reader in range(count):
        entry = tl.load(readers + batch * count + reader).to(tl.int64)
        b, of_mask = tl.load(beta + entry), tl.load(mask.numbers + entry)
        pairs = (matrix(mask, mask_row, of_mask), offset)
        visited, whole, end = _visited_tiles(of_mask, number % per_batch, listed, offset, N, M, P)
        given = (k, key_rows, first, cols, entry, b, unit, most, operands, pairs, N, M)
        for TAIL in tl.static_range(2):
            # Other splits are the first to have a tile of the next reader.
            begin = (split + reader) % splits
            for place in range(begin + whole if TAIL else begin, end if TAIL else whole, splits):
                start = _row_start(place, whole, visited, P, TAIL)
                gradient, largest = _keys_tile(gradient, largest, start, given, P, TAIL)
    if P.half:
        gradient = gradient * (largest * INVERSE_PEAK)
    out += split.to(tl.int64) * total + (batch * M + first) * D
    where = tl.arange(0, KEYS)[:, None] * D + dims[None, :]
    tl.store(out + where, gradient, mask=(cols < M)[:, None] & (dims < D)[None, :])
