"""The query side of token attention, where no token reads a later one: the pull and its derivatives, in tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .._torch import sum_to_shape, transforms_active
from ._read import restricted_to
from .self_attention import softmax_tangent

#: The largest number of pairs of tokens in memory at a time, per sample and head.
PAIRS = 512 * 512


class PairTile(NamedTuple):
    """The tokens `rows`, which read no key beyond the first `reach`."""

    rows: slice
    reach: int


class ByTensors(NamedTuple):
    """The pullback of a cotangent u of the pull: (d pull/dt)^T u."""

    z: Tensor
    w_query: Tensor
    w_key: Tensor
    beta: Tensor
    earlier: Tensor


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
        self._cached: Tensor | None = None

    def pull(self) -> Tensor:
        """The pull, (*batch, N, D). The weights of several tiles are computed again in a backward pass, not kept."""
        tiles, attend = self._tiles(), self._attended
        if len(tiles) > 1 and torch.is_grad_enabled() and not transforms_active():
            attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
        return self._by_rows([attend(tile, *self._of(tile)) for tile in tiles])

    def jvp(self, v: Tensor) -> Tensor:
        """The change of the pull with z along v, at fixed earlier keys."""
        by_query, by_key = self.attention._heads(v, self.attention.w_query), self.attention.keys_of(v)
        by_key = F.pad(by_key, (0, 0, self.before, 0))
        heads = []
        for tile, p in self._weighted():
            q, k = self._of(tile)
            dq, dk = by_query[..., tile.rows, :], by_key[..., : tile.reach, :]
            tangent = self.attention._scale * softmax_tangent(p, dq @ k.mT + q @ dk.mT)
            heads.append(tangent @ k + p @ dk)
        return self._by_rows(heads)

    def vjp(self, u: Tensor) -> Tensor:
        """The transpose of `jvp`."""
        return self._by_z(*self._pulled(u)[:2])

    def vjp_tensors(self, u: Tensor) -> ByTensors:
        """(d pull/dt)^T u for z, the tensors of the attention, and the earlier keys."""
        by_q, by_k, read = self._pulled(u)
        scaled, shape, z = self.attention._scale * by_q, self.attention.w_query.shape, self.z.unsqueeze(-3)
        own = by_k[..., self.before :, :]
        return ByTensors(
            self._by_z(by_q, by_k),
            sum_to_shape(scaled.mT @ z + read.mT @ u.unsqueeze(-3), shape),
            sum_to_shape(own.mT @ z, shape),
            sum_to_shape((by_q * self.q).sum((-1, -2)), shape[:1]),
            by_k[..., : self.before, :],
        )

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

    def _weighted(self) -> Iterator[tuple[PairTile, Tensor]]:
        """Yield the tiles with their attention weights; the weights of a single tile are cached."""
        tiles = self._tiles()
        for tile in tiles:
            p = self._weights(tile, *self._of(tile)) if self._cached is None else self._cached
            if len(tiles) == 1:
                self._cached = p
            yield tile, p

    def _pulled(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients by queries (less the factor beta) and keys, and P k: (*batch, H, N or M + N, Y)."""
        by_heads, total = self.attention._heads(u, self.attention.w_query), self.k.shape[-2]
        by_q, read, by_k = [], [], torch.zeros_like(self.k)
        for tile, p in self._weighted():
            (q, k), a = self._of(tile), by_heads[..., tile.rows, :]
            tangent = softmax_tangent(p, a @ k.mT)
            by_q.append(tangent @ k)
            read.append(p @ k)
            changed = (self.attention._scale * tangent).mT @ q + p.mT @ a
            by_k = by_k + F.pad(changed, (0, 0, 0, total - tile.reach))
        return concatenated(by_q, -2), by_k, concatenated(read, -2)

    def _by_z(self, by_q: Tensor, by_k: Tensor) -> Tensor:
        attention = self.attention
        by_z: Tensor = attention._joined(attention._scale * by_q, attention.w_query)
        by_z = by_z + attention._joined(by_k[..., self.before :, :], attention.w_key)
        return by_z

    def _by_rows(self, heads: list[Tensor]) -> Tensor:
        """Join the parts of the tiles and sum over the heads."""
        joined: Tensor = self.attention._joined(concatenated(heads, -2), self.attention.w_query)
        return joined


def concatenated(parts: Sequence[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=axis)
