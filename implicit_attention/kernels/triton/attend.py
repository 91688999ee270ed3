"""The kernel over the keys, which evaluates states or multiplies vectors by the covariance of the keys.

No number of a query depends on the queries in its tile, which change from one evaluation to the next. Under a mask a
tile of pairs that are all masked is not visited, and in one with no pair masked the mask is not read.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._torch import HALF
from .. import trust
from .layout import InMemory, Left, Tiles, alike, tiles
from .tile import (
    INF,
    INVERSE_PEAK,
    LN2,
    LOG2E,
    PEAK,
    added,
    any_of,
    exponents,
    kernel,
    key_tile,
    lost,
    matrix,
    narrow,
    one,
    product,
    query_tile,
    read,
    rest_of,
    scaled,
    scores_of,
    write,
)

# What scores are shifted by, and what their exponentials are multiplied with.
RUNNING, SHIFTED, CENTRED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Sums of exponentials of shifted scores that have lost nothing, neither to underflow nor to overflow.
LEAST_TOTAL, MOST_TOTAL = tl.constexpr(2.0**-60), tl.constexpr(2.0**60)
# Programs that keep a large device busy: where there are fewer tiles of keys, queries are split among several.
PROGRAMS = 264
MOST_SPLITS = 16
# What the pairs of a tile are.
ALL_MASKED, SOME, NONE_MASKED = (tl.constexpr(kind) for kind in range(3))


# The tiles of pairs that are visited under a mask.


class MaskTiles(NamedTuple):
    """For each mask and tile along one axis, the numbers of the tiles along the other that are visited.

    visited: (masks, tiles, tiles of the other axis) int32; those without masked pairs, then those with some, then the
        others.
    counts: (masks, tiles, 2) int32: how many have no masked pair, and how many are visited.
    """

    visited: Tensor | None
    counts: Tensor | None

    @classmethod
    def of(cls, placed: InMemory, chosen: Tiles, *, by_keys: bool) -> MaskTiles:
        """The tiles of keys of each tile of queries (or those of queries of each tile of keys); nothing without a mask.

        Queries that attend to the same keys have one tile there.
        """
        problem, mask = placed.problem, placed.mask
        if problem.pairs is None:
            return cls(None, None)
        rows, count, _ = placed.sizes
        row_tiles = triton.cdiv(rows, chosen.rows)
        shape = (mask.starts.numel(), 1 if alike(problem) else row_tiles, triton.cdiv(count, chosen.keys))
        kinds = trust.empty(shape, dtype=torch.int8, device=mask.starts.device)
        if kinds.numel():
            given = kinds, mask, mask.memory.stride(-2), *placed.sizes
            placed.launch(_kinds_kernel, kinds.numel(), chosen._replace(registers=None), *given)
        if by_keys:
            kinds = kinds.expand(-1, row_tiles, -1).mT.contiguous()
        whole, some = ((kinds == kind.value).sum(-1, dtype=torch.int32) for kind in (NONE_MASKED, SOME))
        order = kinds.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
        return cls(order, torch.stack([whole, whole + some], -1))


@kernel
def _kinds_kernel(kinds, mask, mask_row: tl.int64, N: tl.int32, M: tl.int32, offset: tl.int32, P: tl.constexpr):
    """Write what the pairs of one tile are."""
    number = tl.program_id(0)
    key_tiles = tl.cdiv(M, P.keys)
    row_tiles = 1
    if P.mask_rows or P.causal:
        row_tiles = tl.cdiv(N, P.rows)
    rows = number // key_tiles % row_tiles * P.rows + tl.arange(0, P.rows)
    real = rows < N
    cols = number % key_tiles * P.keys + tl.arange(0, P.keys)
    pairs = (matrix(mask, mask_row, number // key_tiles // row_tiles), offset)
    bias = tl.full([P.rows, P.keys], 0.0, tl.float32) + added(rows[:, None], cols[None, :], pairs, N, M, P)
    # Rows that do not exist have no say. Keys that do not exist are masked: what loads them must know.
    some = real[:, None] & (bias != -INF)
    whole = ~real[:, None] | (bias == 0.0)
    visited = tl.max(tl.max(some.to(tl.int32), 1), 0)
    unmasked = tl.min(tl.min(whole.to(tl.int32), 1), 0)
    tl.store(kinds + number, visited * (1 + unmasked))


# The kernel.


@triton.jit
def over_keys(
    z, by, shift, v, centre, rows, keys, pairs, visited, N, M, P: tl.constexpr, KIND: tl.constexpr, FINE: tl.constexpr
):
    """Shift (ROWS,), sum_j w_j (ROWS,) and sum_j w_j k_j (ROWS, DIMS) of weights w_j = exp2(by <z, k_j> - shift).

    z, v: rows as `scores_of` takes them, and if FINE the rest of each, by which the products have all digits.
    KIND: RUNNING takes the largest score for the shift, in half precision less `PEAK`. SHIFTED takes the given one.
        CENTRED takes that too, and multiplies the weights by <v, k_j> - centre.
    """
    if KIND == RUNNING:
        shift = tl.full([P.rows], -INF, tl.float32)
    # Not by `tl.zeros`, which takes no fields of P in an older compiler.
    total = tl.full([P.rows], 0.0, tl.float32)
    sums = tl.full([P.rows, P.dims], 0.0, tl.float32)
    listed, whole, end = visited
    STEP: tl.constexpr = P.keys if P.mask == "none" else 1
    for TAIL in tl.static_range(2):
        for place in range(whole if TAIL else 0, end if TAIL else whole, STEP):
            start = place
            if P.mask != "none":
                start = tl.load(listed + place) * P.keys
            sums = sums * one(M)
            k = key_tile(keys, start, 0, M, P, P.dims, TAIL)
            scores = _scores(z, k, keys, start, M, P, FINE, TAIL)
            bias = 0.0
            if TAIL:
                bias = added(rows[:, None], (start + tl.arange(0, P.keys))[None, :], pairs, N, M, P)
            level = shift
            if KIND == RUNNING:
                before = shift
                if TAIL:
                    shift = tl.maximum(shift, tl.max(exponents(scores, by[:, None], bias, 0.0), 1))
                    level = tl.where(shift == -INF, 0.0, shift)
                else:
                    # beta > 0, so that the largest score is the scaled largest product.
                    shift = tl.maximum(shift, tl.max(scores, 1) * by)
                    level = shift
                shrink = tl.exp2(before - level)
                total, sums = total * shrink, sums * shrink[:, None]
                if P.half:
                    level -= PEAK
            if TAIL:
                weights = tl.exp2(exponents(scores, by[:, None], bias, level[:, None]))
            else:
                weights = tl.exp2(tl.fma(scores, by[:, None], -level[:, None]))
            if KIND == CENTRED:
                # Centred before they are rounded.
                weights = weights * (_scores(v, k, keys, start, M, P, FINE, TAIL) - centre[:, None])
            high = narrow(weights, P)
            sums = product(high, k, sums, P)
            if FINE:
                sums = product(rest_of(weights, high), k, sums, P)
            total = total + tl.sum(weights, 1)
    return shift, total, sums


@triton.jit
def _scores(rows, k, keys, start, M, P: tl.constexpr, FINE: tl.constexpr, TAIL: tl.constexpr):
    of_rows, rest = rows
    scores = scores_of(of_rows, k, keys, start, M, P, TAIL, False)
    return product(rest, tl.trans(k), scores, P) if FINE else scores


class OverKeys:
    """The kernel of a problem: `evaluate` and `product` write for the queries that are left."""

    def __init__(self, placed: InMemory, kind: str) -> None:
        self.placed, self.chosen, self.centred = placed, tiles(kind, placed.problem), kind == "product"
        self.given = *placed.rows, MaskTiles.of(placed, self.chosen, by_keys=False), *placed.sizes

    def __call__(self, left: Left, queries: NamedTuple, fine: bool = False) -> None:
        """Write `mean` and `logsumexp` of the `state` of queries; or the product with their `search` to `spread`.

        The log-sum-exps before are those by which scores are shifted, if they are numbers and near enough. In half
        precision a product is coarse or `fine`.
        """
        fine = fine and self.placed.problem.keys.dtype in HALF
        # Operands with a rest need the registers of a third program.
        chosen = self.chosen._replace(registers=None) if fine else self.chosen
        options = {"picked": left.listed, "centred": self.centred, "fine": fine}
        self.placed.launch(_attend_kernel, left.programs(chosen), chosen, queries, left.noted, *self.given, **options)


@kernel
def _attend_kernel(
    queries,
    left,
    keys,
    key_row: tl.int64,
    mask,
    mask_row: tl.int64,
    numbers,
    listed,
    N: tl.int32,
    M: tl.int32,
    offset: tl.int32,
    P: tl.constexpr,
):
    batch, tile, first, local, dims, real, _, _, _ = query_tile(N, left, P)
    if tile == 0:
        tl.store(left.next_counts + 2 * batch + tl.arange(0, 2), 0)
    if not any_of(real):
        return
    number, of_keys = tl.load(mask.numbers + batch), tl.load(keys.numbers + batch)
    # The numbers of the tiles that are visited, how many of these have no masked pair, and how many they are; without a
    # mask they are the first ones, and both are counted in keys.
    if P.mask != "none":
        entry = number
        if P.mask_rows or P.causal:
            entry = entry * tl.cdiv(N, P.rows) + tile
        visited = listed.visited + entry.to(tl.int64) * tl.cdiv(M, P.keys)
        whole = tl.load(listed.counts + 2 * entry)
        end = tl.load(listed.counts + 2 * entry + 1)
    else:
        visited = 0  # Triton before 3.7 returns no None in a tuple
        whole = (M // P.keys) * P.keys
        end = M
        if P.causal:
            lowest, highest = first, tl.minimum(first + P.rows, N) - 1
            if P.picked:
                lowest, highest = tl.min(tl.where(real, local, N), 0), tl.max(tl.where(real, local, -1), 0)
            whole = tl.minimum(whole, ((lowest + offset + 1) // P.keys) * P.keys)
            end = tl.minimum(end, highest + offset + 1)
    pairs = (matrix(mask, mask_row, number), offset)
    over = (first + local, matrix(keys, key_row, of_keys), pairs, (visited, whole, end), N, M)
    unit, most = 1.0, 1.0
    if P.half:
        unit, most = tl.load(keys.unit + of_keys), tl.load(keys.most + of_keys)
    given = (batch * N + first, local, dims, real, tl.load(numbers + 2 * batch), unit, most, over)
    if P.half and not P.centred:
        fine = real & (read(left.fine + batch * N + first + local, real) != 0)
        if any_of(real & ~fine):
            _write(queries, real & ~fine, given, P, False)
        if any_of(fine):
            _write(queries, fine, given, P, True)
    else:
        _write(queries, real, given, P, P.fine)


@triton.jit
def _operands(x, offsets, pointer, real, P: tl.constexpr):
    """Rows of float32 as operands, those for the rest, and the scales of both."""
    y, scale = scaled(x, P)
    high = narrow(y, P)
    rows = (high, pointer, offsets, real)
    if P.half:
        return (rows, rest_of(y, high)), scale
    else:
        return (rows, high), scale


@triton.jit
def _write(queries, rows, given, P: tl.constexpr, FINE: tl.constexpr):
    """Write the evaluation or the product of some of the rows."""
    start, local, dims, real, b, unit, most, over = given
    at, start, offsets = start + local, start * P.dim, local * P.dim
    whole, inside = start + offsets[:, None] + dims[None, :], real[:, None] & (dims < P.dim)[None, :]
    z = read(queries.state + whole, inside)
    z_rows, scale = _operands(z, offsets, queries.state + start, real, P)
    by = scale * (b * LOG2E * unit)
    level = tl.load(queries.logsumexp + at, mask=real, other=float("nan"))
    if P.centred:
        m = read(queries.mean + whole, inside)
        v = read(queries.search + whole, inside)
        v_rows, size = _operands(v, offsets, queries.search + start, real, P)
        if FINE:
            centre = tl.sum(m * (v * (1.0 / size)[:, None]), 1) * (1.0 / unit)
            level = level * LOG2E
        else:
            centre = tl.sum(m * v_rows[0][0].to(tl.float32), 1) * (1.0 / unit)
            # Of the scores of the rounded z: with it probabilities sum to 1.
            level = (level - lost(m, z, scale, b, P)) * LOG2E
        if P.half:
            # |<v, k> - centre| is at most four times the longest row of keys.
            bound = most * (0.5 * INVERSE_PEAK)
            level += tl.log2(bound)
            size *= bound
        _, rest, total = over_keys(z_rows, by, level, v_rows, centre, *over, P, CENTRED, FINE)
        # The weights sum to 0 but for the rounding of z and v, which what the keys have in common would amplify.
        m = read(queries.mean + whole, inside)
        spread = (total * unit - rest[:, None] * m) * (size * unit)[:, None]
        write(queries.spread + whole, spread, inside & rows[:, None])
    else:
        fresh = rows
        if not P.half:
            # The first time there is no number to shift by. In half precision the peak of a row is one of its weights.
            level = level * LOG2E
            known = level == level
            if any_of(known):
                _, total, sums = over_keys(z_rows, by, level, z_rows, by, *over, P, SHIFTED, FINE)
                known = known & (total > LEAST_TOTAL) & (total < MOST_TOTAL)
                _store(sums, total, level, known, queries, scale, b, unit, at, whole, dims, P, FINE)
            fresh = rows & ~known
        if any_of(fresh):
            level, total, sums = over_keys(z_rows, by, by, z_rows, by, *over, P, RUNNING, FINE)
            if P.half:
                level -= PEAK
            _store(sums, total, level, fresh, queries, scale, b, unit, at, whole, dims, P, FINE)


@triton.jit
def _store(sums, total, level, rows, queries, scale, b, unit, at, whole, dims, P: tl.constexpr, FINE: tl.constexpr):
    """Write mean and log-sum-exp of these rows; 0 for those that attend to no key."""
    inside = rows[:, None] & (dims < P.dim)[None, :]
    # Where scores overflow a fused product and sum makes weights of 0 of them.
    share = tl.where(level < INF, unit / tl.where(total == 0.0, 1.0, total), float("nan"))
    found = sums * share[:, None]
    write(queries.mean + whole, found, inside)
    level = tl.where(total == 0.0, 0.0, (level + tl.log2(total)) * LN2)
    if P.half and not FINE:
        # Read once more: in registers it would be in the way of the loop.
        level += lost(found, read(queries.state + whole, inside), scale, b, P)
    write(queries.logsumexp + at, level, rows)


# (df/dK)^T u, by tiles of keys, which no two programs share: its sums have a fixed order.


class KernelOperands(NamedTuple):
    """Per query, as it enters products: z and u' = (1 - anchor) u as operands and their scales, in half precision what
    rounding cut off z, the log-sum-exp in units of log 2, <mean, u'> in units of the scale of u'."""

    state: Tensor
    state_rest: Tensor
    value: Tensor
    state_scale: Tensor
    shift: Tensor
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
    numbers,
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
        b, of_mask = tl.load(numbers + 2 * entry), tl.load(mask.numbers + entry)
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
