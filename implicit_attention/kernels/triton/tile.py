"""The common parts of the Triton kernels: a tile of queries, in registers, and a tile of keys.

Scores are in units of log 2, as exp2 is what the hardware has. Sums are float32, and so are operands of products with
keys in float32. With keys in half precision operands are float16: a coarse product rounds z ~ high * scale, which moves
the log-sum-exp, to first order, by beta <mean, z - high * scale>; a fine one takes a second operand for the rest.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from . import layout

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
ALIGNMENT, PART, UNFINISHED = map(tl.constexpr, (layout.ALIGNMENT, layout.PART, layout.UNFINISHED))
# Biases below this, but for -inf, would become -inf in units of log 2.
LOWEST_BIAS = tl.constexpr(-2.0e38)
EXPONENT_BITS = tl.constexpr(0x7F800000)
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)
# The largest weight in float16 is 2^PEAK: those down to 2^-26 times that have all digits.
PEAK = tl.constexpr(12.0)
INVERSE_PEAK = tl.constexpr(2.0**-12)


def kernel(function: Any) -> Any:
    """Return the kernel; its machine code depends on constants and dtypes alone, so that one check is for all of it.

    Numbers have annotations: Triton would compile anew for those that are 1, multiples of 16 or large, and in tuples
    nothing keeps it from that. Tensors begin at multiples of 16 bytes.
    """
    numbers = [name for name, kind in function.__annotations__.items() if kind != "tl.constexpr"]
    return triton.jit(function, do_not_specialize=numbers)


# Addresses.


@triton.jit
def read(at, there):
    """The numbers at these places, and 0 where there are none."""
    return tl.load(at, mask=there, other=0)


@triton.jit
def write(at, numbers, there):
    """Write the numbers at these places, where there are such, in the dtype of what is there."""
    tl.store(at, numbers, mask=there)


@triton.jit
def part_of_row(n):
    """The row (int64) and the part of it that this program works off: its number, its indices, and which there are."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    local = part * PART + tl.arange(0, PART)
    return row, part, local, local < n


@triton.jit
def matrix(given, row, number):
    """The matrix of this number: a pointer, and the step from row to row, with what the compiler is to know of both."""
    # It sees that products have this factor; `tl.multiple_of` does not outlast the inlining of functions.
    UNIT: tl.constexpr = ALIGNMENT * 8 // given.memory.dtype.element_ty.primitive_bitwidth
    return given.memory + tl.load(given.starts + number) // UNIT * UNIT, row.to(tl.int32) // UNIT * UNIT


@triton.jit
def query_tile(N, left, P: tl.constexpr):
    """The tile of queries of this program.

    Entry of the batch (int64), number, first row, indices, dimensions, and which queries are left: they are listed, or
    stand side by side, and a status says it. Then where numbers of queries are, where rows of numbers, and which count.
    """
    per_batch = tl.cdiv(N, P.rows)
    if P.picked:
        per_batch += 1  # as a tile has queries of one part of the list
    batch = (tl.program_id(0) // per_batch).to(tl.int64)
    tile = tl.program_id(0) % per_batch
    if P.causal:
        tile = per_batch - 1 - tile  # those with the most keys first
    first = tile * P.rows
    local, dims = tl.arange(0, P.rows), tl.arange(0, P.dims)
    if P.picked:
        some, others = tl.load(left.counts + 2 * batch), tl.load(left.counts + 2 * batch + 1)
        behind = first - tl.cdiv(some, P.rows) * P.rows  # among those that are listed from the end
        real = tl.where(behind < 0, first + local < some, behind + local < others)
        place = tl.where(behind < 0, first + local, N - 1 - behind - local)
        local = read(left.order + batch * N + place, real)
        first = 0
    else:
        real = first + local < N
        real = real & (read(left.status + batch * N + first + local, real) == UNFINISHED)
    at, whole = batch * N + first + local, (batch * N + first) * P.dim + local[:, None] * P.dim + dims[None, :]
    return batch, tile, first, local, dims, real, at, whole, real[:, None] & (dims < P.dim)[None, :]


@triton.jit
def taken(x, here):
    """The number of a vector, or the row of a matrix, at the one place where `here` is true; 0 if there is none."""
    return tl.sum(tl.where(here, x, 0), 0)


@triton.jit
def any_of(truth):
    """Whether one of them is true."""
    return tl.max(truth.to(tl.int32), 0) > 0


@triton.jit
def key_tile(keys, start, begin, M, P: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr):
    """Rows from `start` on and columns from `begin` on of the `matrix` of keys, zeros beyond the ends."""
    pointer, row = keys
    local, dims = tl.arange(0, P.keys), begin + tl.arange(0, WIDTH)
    at = pointer + tl.cast(start, tl.int64) * row + local[:, None] * row + dims[None, :]
    if TAIL:
        return read(at, (start + local < M)[:, None] & (dims < P.dim)[None, :])
    elif P.dim < P.dims:
        return read(at, (dims < P.dim)[None, :])
    else:
        return tl.load(at)


# Numbers.


@triton.jit
def power_of_two(x):
    """The largest power of two up to x > 0; 1 where there is none."""
    below = (x.to(tl.int32, bitcast=True) & EXPONENT_BITS).to(tl.float32, bitcast=True)
    return tl.where(x >= SMALLEST_NORMAL, below, 1.0)


@triton.jit
def narrow(x, P: tl.constexpr):
    """x in the dtype of products."""
    return x.to(tl.float16) if P.half else x


@triton.jit
def rest_of(x, high):
    """The part of x that `narrow` lost, in the dtype of products."""
    return (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def scaled(x, P: tl.constexpr):
    """(y, scale) with x = y * scale: in half precision scales are powers of two, rows of y have lengths from 1 to 2."""
    if P.half:
        scale = power_of_two(tl.max(tl.abs(x), 1))
        y = x * (1.0 / scale)[:, None]
        more = power_of_two(tl.sqrt(tl.sum(y * y, 1)))
        return y * (1.0 / more)[:, None], scale * more
    else:
        return x, tl.full([P.rows], 1.0, tl.float32)


@triton.jit
def lost(mean, z, scale, b, P: tl.constexpr):
    """By how much the rounding of z / scale lowers the log-sum-exp, to first order."""
    if P.half:
        return b * tl.sum(mean * (z - narrow(z * (1.0 / scale)[:, None], P).to(tl.float32) * scale[:, None]), 1)
    else:
        return 0.0


@triton.jit
def product(left, right, total, P: tl.constexpr):
    """The sum total + left @ right, in float32."""
    # Three products of 11 bits each have the accuracy of one of float32, on tensor cores.
    return tl.dot(left, right, total, input_precision="ieee" if P.half else "tf32x3")


@triton.jit
def scores_of(rows, k, keys, start, M, P: tl.constexpr, TAIL: tl.constexpr, TURNED: tl.constexpr):
    """The products rows @ k.T of rows with a tile k of keys, which begins at `start`; k @ rows.T if TURNED.

    rows: in the dtype of products; and in memory, as pointer, offsets, and which there are.
    """
    whole, pointer, offsets, real = rows
    scores = tl.zeros([k.shape[0], whole.shape[0]] if TURNED else [whole.shape[0], k.shape[0]], tl.float32)
    if P.part == P.dims:
        left, right = (k, whole) if TURNED else (whole, k)
        return product(left, tl.trans(right), scores, P)
    else:
        # Registers have no room for whole rows as the three parts of products: they are read again.
        for begin in range(0, P.dims, P.part):
            dims = begin + tl.arange(0, P.part)
            inside = real[:, None] & (dims < P.dim)[None, :]
            some = read(pointer + offsets[:, None] + dims[None, :], inside)
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
    mask, row = of_mask
    inside = cols < M
    allowed = inside
    if P.causal:
        allowed = allowed & (cols <= rows + offset)
    bias = 0.0
    if P.mask != "none":
        offsets = cols
        if P.mask_rows:
            offsets = cols + rows.to(tl.int64) * row
            inside = inside & (rows < N)
        if P.mask == "boolean":
            allowed = allowed & (read(mask + offsets, inside) != 0)
        else:
            given = read(mask + offsets, inside).to(tl.float32)
            bias = tl.where(given < LOWEST_BIAS, LOWEST_BIAS, given) * LOG2E
            allowed = allowed & (given != -INF)
    return tl.where(allowed, bias, -INF)


@triton.jit
def exponents(scores, by, bias, shift):
    """by * scores + bias - shift, -inf where the bias is, whatever the score."""
    return tl.where(bias == -INF, bias, tl.fma(scores, by, bias - shift))


@triton.jit
def one(M):
    """1.0, in a way that the compiler cannot fold.

    A sum that a loop only adds to stays under way in the tensor cores from one turn to the next, and the assembler then
    runs all products of the loop one after the other. Scaling the sum makes it arrive before they begin.
    """
    return tl.where(M > 0, 1.0, 0.0)
