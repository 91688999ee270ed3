"""The kernel over the keys: a tile of queries, in registers, meets the keys tile by tile.

It evaluates states, or multiplies vectors by the covariance of the keys. Scores are in units of log 2, as exp2 is what
the hardware has. Operands of products have the dtype of the keys, sums are float32. A state z is rounded to that dtype,
z ~ half * scale; what that changes in the log-sum-exp is made good to first order by beta <mean, z - half * scale>.

No number of a query depends on the queries in its tile, which change from one evaluation to the next.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..problem import Attention
from .layout import ADDED as _ADDED
from .layout import ALIGNMENT as _ALIGNMENT
from .layout import BOOLEAN as _BOOLEAN
from .layout import NO_MASK as _NO_MASK
from .layout import UNFINISHED as _UNFINISHED
from .layout import KernelLayout, Left, launch, offset_of, placed, tiles

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NO_MASK = tl.constexpr(_NO_MASK)
BOOLEAN = tl.constexpr(_BOOLEAN)
ADDED = tl.constexpr(_ADDED)
ALIGNMENT = tl.constexpr(_ALIGNMENT)
UNFINISHED = tl.constexpr(_UNFINISHED)
# Biases below this, but for -inf, would become -inf in units of log 2.
LOWEST_BIAS = tl.constexpr(-2.0e38)
EXPONENT_BITS = tl.constexpr(0x7F800000)
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)
# A float16 product of a vector with entries up to 2 and a key overflows only beyond 65504 times this.
HEADROOM = tl.constexpr(16.0)
# What scores are shifted by, and what their exponentials are multiplied with.
RUNNING, SHIFTED, CENTRED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Sums of exponentials of shifted scores that have lost nothing, neither to underflow nor to overflow.
LEAST_TOTAL, MOST_TOTAL = tl.constexpr(2.0**-60), tl.constexpr(2.0**60)


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
def query_tile(N, status, order, counts, P: tl.constexpr):
    """The tile of queries of this program: entry of the batch (int64), number, first row, indices, which are left.

    They are listed, or stand side by side, and a status says which are left.
    """
    ROWS: tl.constexpr = P.rows
    DIMS: tl.constexpr = P.dims
    per_batch = tl.cdiv(N, ROWS)
    batch = (tl.program_id(0) // per_batch).to(tl.int64)
    tile = tl.program_id(0) % per_batch
    if P.causal:
        tile = per_batch - 1 - tile  # those with the most keys first
    first = tile * ROWS
    local, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    if P.picked:
        real = first + local < tl.load(counts + batch)
        local = tl.load(order + batch * N + first + local, mask=real, other=0)
        first = 0
    else:
        real = first + local < N
        real = real & (tl.load(status + batch * N + first + local, mask=real, other=0) == UNFINISHED)
    return batch, tile, first, local, dims, real, real[:, None] & (dims < P.dim)[None, :]


@triton.jit
def any_of(truth):
    """Whether one of them is true."""
    return tl.max(truth.to(tl.int32), 0) > 0


@triton.jit
def key_tile(keys, start, begin, M, P: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr):
    """Rows from `start` on and columns from `begin` on of the keys (pointer, strides), zeros beyond the ends."""
    pointer, stride_m, stride_d = keys
    KEYS: tl.constexpr = P.keys
    local, dims = tl.arange(0, KEYS), begin + tl.arange(0, WIDTH)
    at = pointer + tl.cast(start, tl.int64) * stride_m + local[:, None] * stride_m + dims[None, :] * stride_d
    if TAIL:
        return tl.load(at, mask=(start + local < M)[:, None] & (dims < P.dim)[None, :], other=0.0)
    elif P.dim < P.dims:
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
def meets(left, right, P: tl.constexpr):
    """The product left @ right.T."""
    if P.precision == "widen":
        return tl.dot(left.to(tl.float32), tl.trans(right.to(tl.float32)), input_precision="ieee")
    else:
        return tl.dot(left, tl.trans(right), input_precision=P.precision)


@triton.jit
def scores_of(rows, k, keys, start, M, P: tl.constexpr, TAIL: tl.constexpr, TURNED: tl.constexpr):
    """The products rows @ k.T of rows with a tile k of keys, which begins at `start`; k @ rows.T if TURNED.

    rows: in the dtype of products; and in memory, as pointer, offsets, and which there are.
    """
    whole, pointer, offsets, real = rows
    if P.part == P.dims:
        return meets(k, whole, P) if TURNED else meets(whole, k, P)
    else:
        # Registers have no room for whole rows as the three parts of products: they are read again.
        scores = tl.zeros([k.shape[0], whole.shape[0]] if TURNED else [whole.shape[0], k.shape[0]], tl.float32)
        for begin in range(0, P.dims, P.part):
            dims = begin + tl.arange(0, P.part)
            inside = real[:, None] & (dims < P.dim)[None, :]
            some = tl.load(pointer + offsets[:, None] + dims[None, :], mask=inside, other=0.0)
            others = key_tile(keys, start, begin, M, P, P.part, TAIL)
            left, right = (others, some) if TURNED else (some, others)
            scores = product(left, tl.trans(right), scores, P)
        return scores


@triton.jit
def added(rows, cols, pairs, N, M, P: tl.constexpr):
    """The bias of pairs of rows and columns that broadcast, -inf where the row does not attend to the key.

    pairs: the `matrix` of the mask, the number of the first row among the columns.
    """
    of_mask, offset = pairs
    mask, stride_n, stride_m = of_mask
    inside = cols < M
    allowed = inside
    if P.causal:
        allowed = allowed & (cols <= rows + offset)
    bias = 0.0
    if P.mask != NO_MASK:
        offsets = cols.to(tl.int64) * stride_m
        if P.mask_rows:
            offsets = offsets + rows.to(tl.int64) * stride_n
            inside = inside & (rows < N)
        if P.mask == BOOLEAN:
            allowed = allowed & (tl.load(mask + offsets, mask=inside, other=0) != 0)
        else:
            given = tl.load(mask + offsets, mask=inside, other=0.0).to(tl.float32)
            bias = tl.where(given < LOWEST_BIAS, LOWEST_BIAS, given) * LOG2E
            allowed = allowed & (given != float("-inf"))
    return tl.where(allowed, bias, float("-inf"))


@triton.jit
def exponents(scores, by, bias, shift):
    """by * scores + bias - shift, -inf where the bias is, whatever the score."""
    return tl.where(bias == float("-inf"), bias, tl.fma(scores, by, bias - shift))


@triton.jit
def one(M):
    """1.0, in a way that the compiler cannot fold.

    A sum that a loop only adds to stays under way in the tensor cores from one turn to the next, and the assembler then
    runs all products of the loop one after the other. Scaling the sum makes it arrive before they begin.
    """
    return tl.where(M > 0, 1.0, 0.0)


# The loop.


@triton.jit
def over_keys(z, by, shift, v, centre, rows, keys, pairs, visited, N, M, P: tl.constexpr, KIND: tl.constexpr):
    """Shift (ROWS,), sum_j w_j (ROWS,) and sum_j w_j k_j (ROWS, DIMS) of weights w_j = exp2(by <z, k_j> - shift).

    z, v: rows as `scores_of` takes them. KIND: RUNNING takes the largest score for the shift. SHIFTED takes the given
    one. CENTRED takes that too, and multiplies the weights by <v, k_j> - centre; in float16 in units of `HEADROOM`.
    """
    ROWS: tl.constexpr = P.rows
    DIMS: tl.constexpr = P.dims
    if KIND == RUNNING:
        shift = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIMS], tl.float32)
    listed, whole, end = visited
    STEP: tl.constexpr = P.keys if P.mask == NO_MASK else 1
    given = (keys, pairs, rows, N, M)
    for place in range(0, whole, STEP):
        start = key_start(place, listed, P)
        shift, total, sums = _met(z, by, shift, v, centre, total, sums, start, given, P, KIND, False)
    for place in range(whole, end, STEP):
        start = key_start(place, listed, P)
        shift, total, sums = _met(z, by, shift, v, centre, total, sums, start, given, P, KIND, True)
    return shift, total, sums


@triton.jit
def _met(z, by, shift, v, centre, total, sums, start, given, P: tl.constexpr, KIND: tl.constexpr, TAIL: tl.constexpr):
    KEYS: tl.constexpr = P.keys
    keys, pairs, rows, N, M = given
    k = key_tile(keys, start, 0, M, P, P.dims, TAIL)
    scores = scores_of(z, k, keys, start, M, P, TAIL, False)
    bias = 0.0
    if TAIL:
        bias = added(rows[:, None], (start + tl.arange(0, KEYS))[None, :], pairs, N, M, P)
    if KIND == RUNNING:
        before = shift
        if TAIL:
            shift = tl.maximum(shift, tl.max(exponents(scores, by[:, None], bias, 0.0), 1))
            level = tl.where(shift == float("-inf"), 0.0, shift)
        else:
            # beta > 0, so that the largest score is the scaled largest product.
            shift = tl.maximum(shift, tl.max(scores, 1) * by)
            level = shift
        shrink = tl.exp2(before - level)
        total, sums = total * shrink, sums * shrink[:, None]
    else:
        level = shift
        sums = sums * one(M)
    if TAIL:
        weights = tl.exp2(exponents(scores, by[:, None], bias, level[:, None]))
    else:
        weights = tl.exp2(tl.fma(scores, by[:, None], -level[:, None]))
    if KIND == CENTRED:
        # Centred before they are rounded.
        weights = weights * (scores_of(v, k, keys, start, M, P, TAIL, False) - centre[:, None])
        if P.dtype == "fp16":
            weights = weights * (1.0 / HEADROOM)
    return shift, total + tl.sum(weights, 1), product(narrow(weights, P), k, sums, P)


# The kernel.


class OverKeys:
    """The kernel of a problem, which is `in_memory`: `evaluate` and `product` write for the queries that are left."""

    def __init__(self, problem: Attention, layout: KernelLayout, kind: str) -> None:
        from .mask_tiles import MaskTiles

        self.problem, self.chosen, self.kind = problem, tiles(kind, problem), kind
        self.programs = problem.query.shape[:-2].numel() * triton.cdiv(problem.query.shape[-2], self.chosen.rows)
        listed = MaskTiles.of(problem, layout, self.chosen, by_keys=False)
        sizes = (*layout.sizes[1:], *problem.query.shape[-2:-1], problem.keys.shape[-2], offset_of(problem))
        self.placed = placed(problem, layout), (*listed.placed(), *sizes)

    def __call__(self, left: Left, state: Tensor, mean: Tensor, logsumexp: Tensor, *vectors: Tensor) -> None:
        """Write the means and log-sum-exps of the states; or of `vectors` the products of the first to the second.

        The log-sum-exps before are those by which scores are shifted, if they are numbers and near enough.
        """
        vector, out = vectors or (state, mean)
        keys, rest = self.placed
        given = state, mean, logsumexp, vector, out, *keys, *left.placed(), *rest
        launch(_attend_kernel, self.programs, self.chosen, self.problem, *given, picked=left.listed, kind=self.kind)


@kernel
def _attend_kernel(
    state,
    mean,
    logsumexp,
    vector,
    out,
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
    mask,
    mask_0: tl.int64,
    mask_1: tl.int64,
    mask_2: tl.int64,
    mask_row: tl.int64,
    mask_column: tl.int64,
    status,
    order,
    counts,
    next_order,
    next_counts,
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
    P: tl.constexpr,
):
    batch, tile, first, local, dims, real, inside = query_tile(N, status, order, counts, P)
    if tile == 0:
        tl.store(next_counts + batch, 0)
    if not any_of(real):
        return
    at, start = batch * N + first + local, (batch * N + first) * P.dim
    state, mean, vector, out = state + start, mean + start, vector + start, out + start
    whole = local[:, None] * P.dim + dims[None, :]

    sizes = (middle, inner)
    b = tl.load(beta + batch_offset(batch, sizes, (beta_0, beta_1, beta_2)))
    key_rows = matrix(keys, batch, sizes, (keys_0, keys_1, keys_2, keys_row, keys_column), P, False)
    pairs = (matrix(mask, batch, sizes, (mask_0, mask_1, mask_2, mask_row, mask_column), P, True), offset)
    tiles = (listed, listed_counts, (listed_0, listed_1, listed_2))
    visited = visited_tiles(batch, tile, first, local, real, offset, tiles, sizes, N, M, P)
    rows = first + local

    z = tl.load(state + whole, mask=inside, other=0.0)
    half, scale = rounded(z, P)
    by = scale * (b * LOG2E)
    z_rows = (half, state, local * P.dim, real)
    level = tl.load(logsumexp + at, mask=real, other=float("nan"))
    if P.centred:
        m = tl.load(mean + whole, mask=inside, other=0.0)
        v, unit = rounded(tl.load(vector + whole, mask=inside, other=0.0), P)
        centre = tl.sum(m * v.to(tl.float32), 1)
        # Of the scores of the rounded z: with it probabilities sum to 1.
        level = (level - lost(m, z, scale, b, P)) * LOG2E
        v_rows = (v, vector, local * P.dim, real)
        _, rest, total = over_keys(z_rows, by, level, v_rows, centre, rows, key_rows, pairs, visited, N, M, P, CENTRED)
        if P.dtype == "fp16":
            unit = unit * HEADROOM
        # The weights sum to 0 but for the rounding of z and v, which what the keys have in common would amplify.
        m = tl.load(mean + whole, mask=inside, other=0.0)
        tl.store(out + whole, (total - rest[:, None] * m) * unit[:, None], mask=inside)
    else:
        fresh = real
        if P.dtype == "fp32":
            # The first time there is no number to shift by. Half precision has more digits for weights relative to 1.
            level = level * LOG2E
            known = level == level
            if any_of(known):
                _, total, sums = over_keys(
                    z_rows, by, level, z_rows, by, rows, key_rows, pairs, visited, N, M, P, SHIFTED
                )
                known = known & (total > LEAST_TOTAL) & (total < MOST_TOTAL)
                _write(sums, total, level, known, state, scale, b, mean, logsumexp, at, whole, dims, P)
            fresh = real & ~known
        if any_of(fresh):
            level, total, sums = over_keys(z_rows, by, by, z_rows, by, rows, key_rows, pairs, visited, N, M, P, RUNNING)
            _write(sums, total, level, fresh, state, scale, b, mean, logsumexp, at, whole, dims, P)


@triton.jit
def lost(mean, z, scale, b, P: tl.constexpr):
    """By how much the rounding of z lowers the log-sum-exp, to first order."""
    if P.dtype == "fp32":
        return 0.0
    else:
        return b * tl.sum(mean * (z - scaled_back(z, scale, P)), 1)


@triton.jit
def _write(sums, total, level, rows, state, scale, b, mean, logsumexp, at, whole, dims, P: tl.constexpr):
    """Write mean and log-sum-exp of these rows; 0 for those that attend to no key."""
    inside = rows[:, None] & (dims < P.dim)[None, :]
    # Where scores overflow a fused product and sum makes weights of 0 of them.
    share = tl.where(level < float("inf"), 1.0 / tl.where(total == 0.0, 1.0, total), float("nan"))
    found = sums * share[:, None]
    tl.store(mean + whole, found, mask=inside)
    level = tl.where(total == 0.0, 0.0, (level + tl.log2(total)) * LN2)
    if P.dtype != "fp32":
        # Read once more: in registers it would be in the way of the loop.
        level += lost(found, tl.load(state + whole, mask=inside, other=0.0), scale, b, P)
    tl.store(logsumexp + at, level, mask=rows)
