"""The query side of token attention, where no token reads a later one: the pull, in tiles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .._torch import transforms_active
from ._read import restricted_to

#: The largest number of pairs of tokens in memory at a time, per sample and head.
PAIRS = 512 * 512


class PairTile(NamedTuple):
    """The tokens `rows`, which read no key beyond the first `reach`."""

    rows: slice
    reach: int


class QuerySide:
    """sum_h (P_h k_h) W_query_h of the tokens z over earlier keys and their own, causally.

    Args:
        attention: a `TokenAttention`, whose file imports this one; its mask is of the pairs (*batch, N, M + N).
        z: (*batch, N, D).
        earlier: keys (*batch, H, M, Y) that all tokens of z may read, or None.
    """

    def __init__(self, attention: Any, z: Tensor, earlier: Tensor | None) -> None:
        own = attention.keys_of(z)
        self.attention, self.z, self.q = attention, z, attention._heads(z, attention.w_query)
        self.k = own if earlier is None else torch.cat([earlier, own], dim=-2)
        self.before = self.k.shape[-2] - own.shape[-2]

    def pull(self) -> Tensor:
        """The pull, (*batch, N, D). The weights of several tiles are computed again in a backward pass, not kept."""
        tiles, attend = self._tiles(), self._attended
        if len(tiles) > 1 and torch.is_grad_enabled() and not transforms_active():
            attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
        return self._by_rows([attend(tile, *self._of(tile)) for tile in tiles])

    # Parts.

    def _tiles(self) -> list[PairTile]:
        count, size = self.q.shape[-2], max(PAIRS // max(self.k.shape[-2], 1), 1)
        rows = (slice(start, min(start + size, count)) for start in range(0, max(count, 1), size))
        return [PairTile(part, self.before + part.stop) for part in rows]

    def _of(self, tile: PairTile) -> tuple[Tensor, Tensor]:
        """Queries and keys of a tile."""
        return self.q[..., tile.rows, :], self.k[..., : tile.reach, :]

    def _weights(self, tile: PairTile, q: Tensor, k: Tensor) -> Tensor:
        """Return the attention weights, rows of zeros where a token may attend to nothing."""
        attention, rows = self.attention, tile.rows
        allowed = torch.ones(q.shape[-2], tile.reach, dtype=torch.bool, device=q.device)
        allowed = allowed.tril(self.before + rows.start - attention.exclude_self)
        if attention.mask is not None:
            mask = attention.mask.broadcast_to(*attention.mask.shape[:-2], self.q.shape[-2], self.k.shape[-2])
            mask = mask[..., rows, : tile.reach]
            allowed = allowed & (mask.unsqueeze(-3) if mask.ndim > 2 else mask)
        empty = ~allowed.any(-1) if attention.exclude_self or attention.mask is not None else None
        p = restricted_to((attention._scale * q) @ k.mT, allowed, empty).softmax(-1)
        return p if empty is None else p.masked_fill(empty[..., None], 0.0)

    def _attended(self, tile: PairTile, q: Tensor, k: Tensor) -> Tensor:
        return self._weights(tile, q, k) @ k

    def _by_rows(self, heads: list[Tensor]) -> Tensor:
        """Join the parts of the tiles and sum over the heads."""
        joined: Tensor = self.attention._joined(concatenated(heads, -2), self.attention.w_query)
        return joined


def concatenated(parts: Sequence[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=axis)
