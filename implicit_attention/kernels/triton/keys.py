"""(df/dK)^T u as one kernel over tiles of keys, which no two programs share: its sums have a fixed order."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import trust
from .layout import InMemory, tiles
from .mask_tiles import MaskTiles
from .tile import (
    INVERSE_PEAK,
    LOG2E,
    PEAK,
    added,
    exponents,
    kernel,
    key_tile,
    matrix,
    narrow,
    one,
    product,
    scores_of,
)

# Programs that keep a large device busy: where there are fewer tiles of keys, queries are split among several.
PROGRAMS = 264
MOST_SPLITS = 16


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
