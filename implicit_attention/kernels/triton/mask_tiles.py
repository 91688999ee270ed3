"""The tiles of pairs that kernels visit under a mask: those with no masked pair, then those with some.

A tile whose pairs are all masked is not visited, and in one with no pair masked the mask is not read.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import trust
from .layout import InMemory, Tiles, alike
from .tile import added, kernel, matrix

# What the pairs of a tile are.
ALL_MASKED, SOME, NONE_MASKED = (tl.constexpr(kind) for kind in range(3))


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
    ROWS: tl.constexpr = P.rows
    KEYS: tl.constexpr = P.keys
    number = tl.program_id(0)
    key_tiles = tl.cdiv(M, KEYS)
    row_tiles = 1
    if P.mask_rows or P.causal:
        row_tiles = tl.cdiv(N, ROWS)
    rows = number // key_tiles % row_tiles * ROWS + tl.arange(0, ROWS)
    real = rows < N
    cols = number % key_tiles * KEYS + tl.arange(0, KEYS)
    pairs = (matrix(mask, mask_row, number // key_tiles // row_tiles), offset)
    bias = tl.zeros([ROWS, KEYS], tl.float32) + added(rows[:, None], cols[None, :], pairs, N, M, P)
    # Rows that do not exist have no say. Keys that do not exist are masked: what loads them must know.
    some = real[:, None] & (bias != float("-inf"))
    whole = ~real[:, None] | (bias == 0.0)
    visited = tl.max(tl.max(some.to(tl.int32), 1), 0)
    unmasked = tl.min(tl.min(whole.to(tl.int32), 1), 0)
    tl.store(kinds + number, (visited * (1 + unmasked)).to(tl.int8))
