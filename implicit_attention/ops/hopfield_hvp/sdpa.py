"""The product tile by tile: no (N, M) matrix beyond a tile."""

from __future__ import annotations

import torch
from torch import Tensor

from .._rows import Rows
from ..hopfield_cg.sdpa import TILE, Tile, tiles
from ..problem import Hopfield


@torch.no_grad()
def hessian_product(problem: Hopfield, state: Tensor, vector: Tensor, *, size: int = TILE) -> Tensor:
    """A v = v - (1 - anchor) beta Cov(z) v, (*batch, N, D)."""
    rows = Rows(problem.to(state.dtype), fused=False).without_common()
    z, v = (rows.laid(t).flatten(0, 1) for t in (state, vector))
    product = torch.empty_like(v)
    for part, _ in tiles(rows, size):
        tile = Tile.of(part, z.index_select(0, part.ids))
        product.index_copy_(0, part.ids, tile.product(v.index_select(0, part.ids)))
    return rows.restored(product[:, : rows.dim])
