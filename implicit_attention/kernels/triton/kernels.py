"""The common parts of the Triton kernels: a tile of queries, in registers, meets the keys tile by tile.

Scores are in units of log 2, as exp2 is what the hardware has. Operands of products have the dtype of the keys, sums
are float32. A state z is rounded to that dtype, z ~ half * scale; what that changes in the log-sum-exp is made good to
first order by beta <mean, z - half * scale>.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .layout import ADDED as _ADDED
from .layout import ALIGNMENT as _ALIGNMENT
from .layout import BOOLEAN as _BOOLEAN
from .layout import NO_MASK as _NO_MASK

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NO_MASK = tl.constexpr(_NO_MASK)
BOOLEAN = tl.constexpr(_BOOLEAN)
ADDED = tl.constexpr(_ADDED)
ALIGNMENT = tl.constexpr(_ALIGNMENT)
# Biases below this, but for -inf, would become -inf in units of log 2.
LOWEST_BIAS = tl.constexpr(-2.0e38)
EXPONENT_BITS = tl.constexpr(0x7F800000)
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)
# A float16 product of a vector with entries up to 2 and a key overflows only beyond 65504 times this.
HEADROOM = tl.constexpr(16.0)


def kernel(function: Any) -> Any:
    """Return the kernel; its machine code depends on constants and dtypes alone, so that one check is for all of it.

    Numbers have annotations: Triton would compile anew for those that are 1, multiples of 16 or large, and in tuples
    nothing keeps it from that. Betas and anchors begin anywhere, keys and masks as their orders in `KernelPlan` say,
    all other tensors at multiples of 16 bytes.
    """
    numbers = [name for name, kind in function.__annotations__.items() if kind != "tl.constexpr"]
    return triton.jit(function, do_not_specialize=[*numbers, "beta", "anchor"])


# Addresses.


@triton.jit
def batch_offset(batch, sizes, strides):
    """Offset of the entry with the flat number `batch`, for the sizes of the last two of its axes (int64)."""
    middle, inner = sizes
    batch = batch.to(tl.int32)  # as numbers of programs are
    outer = batch // inner
    return (outer // middle) * strides[0] + (outer % middle) * strides[1] + (batch % inner) * strides[2]


@triton.jit
def matrix(tensor, batch, sizes, strides, P: tl.constexpr, OF_MASK: tl.constexpr):
    """The keys or the mask of an entry: pointer, strides by row and by column, with what their order tells."""
    ORDER: tl.constexpr = P.mask_order if OF_MASK else P.key_order
    offset, row, column = batch_offset(batch, sizes, strides), strides[3], strides[4]
    # The compiler sees that products have this factor; `tl.multiple_of` does not outlast the inlining of functions.
    UNIT: tl.constexpr = ALIGNMENT * 8 // tensor.dtype.element_ty.primitive_bitwidth
    if ORDER == "rows":
        return tensor + offset // UNIT * UNIT, row.to(tl.int32) // UNIT * UNIT, 1
    elif ORDER == "columns":
        return tensor + offset // UNIT * UNIT, 1, column.to(tl.int32) // UNIT * UNIT
    else:
        return tensor + offset, row.to(tl.int64), column.to(tl.int64)


@triton.jit
def query_tile(N, order, counts, P: tl.constexpr):
    """The tile of queries of this program: entry of the batch (int64), number, first row, indices, which are real."""
    ROWS: tl.constexpr = P.rows
    DIMS: tl.constexpr = P.dims
    per_batch = tl.cdiv(N, ROWS)
    batch = (tl.program_id(0) // per_batch).to(tl.int64)
    tile = tl.program_id(0) % per_batch
    if P.causal:
        tile = per_batch - 1 - tile  # those with the most keys first
    first = tile * ROWS
    local, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    real = first + local < N
    if P.picked:
        real = first + local < tl.load(counts + batch)
        local = tl.load(order + batch * N + first + local, mask=real, other=0)
        first = 0
    return batch, tile, first, local, dims, real, real[:, None] & (dims < P.dim)[None, :]


@triton.jit
def columns(column, local, P: tl.constexpr):
    """Some columns of a tile from `column` on: offsets in memory of the rows `local`, and which columns there are.

    Stores of them may belong to other threads than loads: where one sweep over columns reads or writes what another has
    written or read, a barrier stands between them.
    """
    D: tl.constexpr = P.dim
    cols = column + tl.arange(0, P.columns)
    return local[:, None] * D + cols[None, :], (cols < D)[None, :]


@triton.jit
def sums(x, P: tl.constexpr):
    """Sums over columns that one thread has, (ROWS, columns / 4): those of threads meet when all columns were seen."""
    return tl.sum(tl.reshape(x, [P.rows, P.columns // 4, 4]), 2)


@triton.jit
def no_sums(P: tl.constexpr):
    """The `sums` of no columns."""
    ROWS: tl.constexpr = P.rows
    PARTS: tl.constexpr = P.columns // 4
    return tl.zeros([ROWS, PARTS], tl.float32)


@triton.jit
def key_tile(keys, start, M, P: tl.constexpr, TAIL: tl.constexpr):
    """Rows start, start + 1, ... of the keys (pointer, strides), zeros beyond the ends."""
    pointer, stride_m, stride_d = keys
    DIMS: tl.constexpr = P.dims
    KEYS: tl.constexpr = P.keys
    local, dims = tl.arange(0, KEYS), tl.arange(0, DIMS)
    at = pointer + tl.cast(start, tl.int64) * stride_m + local[:, None] * stride_m + dims[None, :] * stride_d
    if TAIL:
        return tl.load(at, mask=(start + local < M)[:, None] & (dims < P.dim)[None, :], other=0.0)
    elif P.dim < DIMS:
        return tl.load(at, mask=(dims < P.dim)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def visited_tiles(batch, tile, first, local, real, offset, listed, sizes, N, M, P: tl.constexpr):
    """The tiles of keys that a tile of queries visits: their numbers, how many have no masked pair, how many there are.

    Without a mask these are the first ones, and both are counted in keys. listed: (visited, counts, strides) as in
    `MaskTiles`.
    """
    KEYS: tl.constexpr = P.keys
    ROWS: tl.constexpr = P.rows
    visited, counts, strides = listed
    if P.mask != NO_MASK:
        entry = batch_offset(batch, sizes, strides)
        if P.mask_rows or P.causal:
            entry = entry * tl.cdiv(N, ROWS) + tile
        whole = tl.load(counts + 2 * entry)
        end = tl.load(counts + 2 * entry + 1)
        visited += entry * tl.cdiv(M, KEYS)
    else:
        visited = 0  # Triton before 3.7 returns no None in a tuple
        whole = (M // KEYS) * KEYS
        end = M
        if P.causal:
            lowest, highest = first, tl.minimum(first + ROWS, N) - 1
            if P.picked:
                lowest, highest = tl.min(tl.where(real, local, N), 0), tl.max(tl.where(real, local, -1), 0)
            whole = tl.minimum(whole, ((lowest + offset + 1) // KEYS) * KEYS)
            end = tl.minimum(end, highest + offset + 1)
    return visited, whole, end


@triton.jit
def key_start(place, visited, P: tl.constexpr):
    """The first key of the tile that is visited at this place."""
    if P.mask != NO_MASK:
        return tl.load(visited + place) * P.keys
    else:
        return place


# Numbers.


@triton.jit
def power_of_two(x):
    """The largest power of two up to x > 0; 1 where there is none."""
    below = (x.to(tl.int32, bitcast=True) & EXPONENT_BITS).to(tl.float32, bitcast=True)
    return tl.where(x >= SMALLEST_NORMAL, below, 1.0)


@triton.jit
def narrow(x, P: tl.constexpr):
    """x in the dtype of products."""
    if P.precision == "widen":
        # The interpreter multiplies bfloat16 as if its bits were integers, and cuts instead of rounding.
        bits = x.to(tl.uint32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(x == x, even.to(tl.float32, bitcast=True), x)
    elif P.dtype == "bf16":
        return x.to(tl.bfloat16)
    elif P.dtype == "fp16":
        return x.to(tl.float16)
    else:
        return x


@triton.jit
def rounded(x, P: tl.constexpr):
    """(half, scale) with x ~ half * scale, half in the dtype of products, scale per row."""
    ROWS: tl.constexpr = P.rows
    if P.dtype == "fp16":
        scale = power_of_two(tl.max(tl.abs(x), 1))
        return narrow(x * (1.0 / scale)[:, None], P), scale
    else:
        return narrow(x, P), tl.full([ROWS], 1.0, tl.float32)


@triton.jit
def scaled_back(x, scale, P: tl.constexpr):
    """The numbers that `rounded` makes of x, which may be some of its columns, as float32."""
    return narrow(x * (1.0 / scale)[:, None], P).to(tl.float32) * scale[:, None]


@triton.jit
def product(left, right, total, P: tl.constexpr):
    """The sum total + left @ right, in float32."""
    if P.precision == "widen":
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(left, right, total, input_precision=P.precision)


@triton.jit
def scores_of(left, right, P: tl.constexpr):
    """The product left @ right.T."""
    if P.precision == "widen":
        return tl.dot(left.to(tl.float32), tl.trans(right.to(tl.float32)), input_precision="ieee")
    else:
        return tl.dot(left, tl.trans(right), input_precision=P.precision)


@triton.jit
def restricted(scores, rows, cols, pairs, N, M, P: tl.constexpr):
    """Scores of rows and columns that broadcast to them, -inf where the row does not attend to the key.

    pairs: the `matrix` of the mask, the number of the first row among the columns.
    """
    of_mask, offset = pairs
    mask, stride_n, stride_m = of_mask
    inside = cols < M
    allowed = inside
    if P.causal:
        allowed = allowed & (cols <= rows + offset)
    if P.mask != NO_MASK:
        offsets = cols.to(tl.int64) * stride_m
        if P.mask_rows:
            offsets = offsets + rows.to(tl.int64) * stride_n
            inside = inside & (rows < N)
        if P.mask == BOOLEAN:
            allowed = allowed & (tl.load(mask + offsets, mask=inside, other=0) != 0)
        else:
            bias = tl.load(mask + offsets, mask=inside, other=0.0).to(tl.float32)
            finite = tl.where(bias < LOWEST_BIAS, LOWEST_BIAS, bias) * LOG2E
            scores = scores + tl.where(bias == float("-inf"), bias, finite)
    return tl.where(allowed, scores, float("-inf"))


@triton.jit
def one(M):
    """1.0, in a way that the compiler cannot fold.

    A sum that a loop only adds to stays under way in the tensor cores from one turn to the next, and the assembler then
    runs all products of the loop one after the other. Scaling the sum makes it arrive before they begin.
    """
    return tl.where(M > 0, 1.0, 0.0)


# Softmax attention of a tile.


@triton.jit
def attend(half, by, rows, keys, pairs, tiles, N, M, P: tl.constexpr):
    """Mean (ROWS, DIMS) and log-sum-exp (ROWS,) of the scores by <half, k>; 0 for rows that attend to no key."""
    ROWS: tl.constexpr = P.rows
    DIMS: tl.constexpr = P.dims
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, DIMS], tl.float32)
    visited, whole, end = tiles
    STEP: tl.constexpr = P.keys if P.mask == NO_MASK else 1
    for place in range(0, whole, STEP):
        start = key_start(place, visited, P)
        peak, total, mean = _attend_tile(half, by, peak, total, mean, rows, start, keys, pairs, N, M, P, False)
    for place in range(whole, end, STEP):
        start = key_start(place, visited, P)
        peak, total, mean = _attend_tile(half, by, peak, total, mean, rows, start, keys, pairs, N, M, P, True)
    mean = mean * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    return mean, tl.where(total == 0.0, 0.0, (peak + tl.log2(total)) * LN2)


@triton.jit
def _attend_tile(half, by, peak, total, mean, rows, start, keys, pairs, N, M, P: tl.constexpr, TAIL: tl.constexpr):
    KEYS: tl.constexpr = P.keys
    k = key_tile(keys, start, M, P, TAIL)
    scores = scores_of(half, k, P)
    if TAIL:
        cols = start + tl.arange(0, KEYS)
        scores = restricted(scores * by[:, None], rows[:, None], cols[None, :], pairs, N, M, P)
        highest = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        p = tl.exp2(scores - shift[:, None])
    else:
        # beta > 0, so that the largest score is the scaled largest product.
        highest = tl.maximum(peak, tl.max(scores, 1) * by)
        shift = highest
        p = tl.exp2(scores * by[:, None] - shift[:, None])
    shrink = tl.exp2(peak - shift)
    mean = product(narrow(p, P), k, mean * shrink[:, None], P)
    return highest, total * shrink + tl.sum(p, 1), mean


# Products with the covariance of the keys.


@triton.jit
def weighted_keys(half, by, shift, v_half, centre, rows, keys, pairs, tiles, N, M, P: tl.constexpr):
    """sum_j w_j k_j and sum_j w_j per row, w_j = p_j (<v_half, k_j> - centre) and p_j = exp2(by <half, k_j> - shift).

    The covariance of the keys times v is the first less the second times their mean: the weights sum to 0 but for the
    rounding of z and v, which what the keys have in common would amplify. In float16 both are in units of `HEADROOM`.
    """
    ROWS: tl.constexpr = P.rows
    DIMS: tl.constexpr = P.dims
    total = tl.zeros([ROWS, DIMS], tl.float32)
    rest = tl.zeros([ROWS], tl.float32)
    visited, whole, end = tiles
    STEP: tl.constexpr = P.keys if P.mask == NO_MASK else 1
    for place in range(0, whole, STEP):
        start = key_start(place, visited, P)
        total, rest = _covariance_tile(
            half, by, shift, v_half, centre, total, rest, rows, start, keys, pairs, N, M, P, False
        )
    for place in range(whole, end, STEP):
        start = key_start(place, visited, P)
        total, rest = _covariance_tile(
            half, by, shift, v_half, centre, total, rest, rows, start, keys, pairs, N, M, P, True
        )
    return total, rest


@triton.jit
def _covariance_tile(
    half, by, shift, v_half, centre, total, rest, rows, start, keys, pairs, N, M, P: tl.constexpr, TAIL: tl.constexpr
):
    KEYS: tl.constexpr = P.keys
    total = total * one(M)
    k = key_tile(keys, start, M, P, TAIL)
    scores = scores_of(half, k, P) * by[:, None]
    if TAIL:
        cols = start + tl.arange(0, KEYS)
        scores = restricted(scores, rows[:, None], cols[None, :], pairs, N, M, P)
    # Centred before they are rounded.
    weights = tl.exp2(scores - shift[:, None]) * (scores_of(v_half, k, P) - centre[:, None])
    if P.dtype == "fp16":
        weights = weights * (1.0 / HEADROOM)
    return product(narrow(weights, P), k, total, P), rest + tl.sum(weights, 1)
