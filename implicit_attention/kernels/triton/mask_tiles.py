"""The tiles of pairs that kernels visit under a mask: those with no masked pair, then those with some.

A tile whose pairs are all masked is not visited, and in one with no pair masked the mask is not read.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import trust
from ..problem import Attention
from .attend import added, kernel, matrix
from .layout import KernelLayout, Tiles, alike, contiguous, launch, offset_of, readable_mask

# What the pairs of a tile are.
ALL_MASKED, SOME, NONE_MASKED = (tl.constexpr(kind) for kind in range(3))


class MaskTiles(NamedTuple):
    """For each tile along one axis, the numbers of the tiles along the other that are visited.

    visited: (entries, tiles, tiles of the other axis) int32; those without masked pairs, then those with some, then
        the others.
    counts: (entries, tiles, 2) int32: how many have no masked pair, and how many are visited.
    strides: of an entry, in entries, along the leading axes of a `KernelLayout`.
    """

    visited: Tensor | None
    counts: Tensor | None
    strides: tuple[int, ...]

    def placed(self) -> tuple[object, ...]:
        """The three as kernels take them."""
        return self.visited, self.counts, *self.strides

    @classmethod
    def of(cls, problem: Attention, layout: KernelLayout, chosen: Tiles, *, by_keys: bool) -> MaskTiles:
        """The tiles of keys of each tile of queries (or those of queries of each tile of keys); nothing without a mask.

        Sets of queries that share a mask share its entry; queries that attend to the same keys have one tile there.
        """
        keys = problem.keys
        if problem.pairs is None:
            return cls(None, None, (0,) * len(layout.sizes))
        rows, count = problem.query.shape[-2], keys.shape[-2]
        row_tiles = triton.cdiv(rows, chosen.rows)
        shape = (math.prod(layout.masks), 1 if alike(problem) else row_tiles, triton.cdiv(count, chosen.keys))
        kinds = trust.empty(shape, dtype=torch.int8, device=keys.device)
        if kinds.numel():
            given = (kinds, readable_mask(problem), *layout.mask, *layout.masks[1:], rows, count, offset_of(problem))
            launch(_kinds_kernel, kinds.numel(), chosen._replace(registers=None), problem, *given)
        if by_keys:
            kinds = kinds.expand(-1, row_tiles, -1).mT.contiguous()
        whole, some = ((kinds == kind.value).sum(-1, dtype=torch.int32) for kind in (NONE_MASKED, SOME))
        order = kinds.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
        return cls(order, torch.stack([whole, whole + some], -1), contiguous(layout.masks))


@kernel
def _kinds_kernel(
    kinds,
    mask,
    mask_0: tl.int64,
    mask_1: tl.int64,
    mask_2: tl.int64,
    mask_row: tl.int64,
    mask_column: tl.int64,
    middle: tl.int32,
    inner: tl.int32,
    N: tl.int32,
    M: tl.int32,
    offset: tl.int32,
    P: tl.constexpr,
):
    """Write what the pairs of one tile are."""
    ROWS: tl.constexpr = P.rows
    KEYS: tl.constexpr = P.keys
    number = tl.program_id(0)
    key_tiles = tl.cdiv(M, KEYS)
    row_tiles = 1
    if P.mask_rows or P.causal:
        row_tiles = tl.cdiv(N, ROWS)
    entry = (number // key_tiles // row_tiles).to(tl.int64)
    rows = number // key_tiles % row_tiles * ROWS + tl.arange(0, ROWS)
    real = rows < N
    cols = number % key_tiles * KEYS + tl.arange(0, KEYS)
    strides = (mask_0, mask_1, mask_2, mask_row, mask_column)
    pairs = (matrix(mask, entry, (middle, inner), strides, P, True), offset)
    bias = tl.zeros([ROWS, KEYS], tl.float32) + added(rows[:, None], cols[None, :], pairs, N, M, P)
    # Rows that do not exist have no say. Keys that do not exist are masked: what loads them must know.
    some = real[:, None] & (bias != float("-inf"))
    whole = ~real[:, None] | (bias == 0.0)
    visited = tl.max(tl.max(some.to(tl.int32), 1), 0)
    unmasked = tl.min(tl.min(whole.to(tl.int32), 1), 0)
    tl.store(kinds + number, (visited * (1 + unmasked)).to(tl.int8))
