"""The query side of token attention, in which no token reads a later one: the pull and its derivatives, in tiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .._autograd import sum_to_shape, transforms_active
from ._read import restricted_to
from .self_attention import softmax_tangent

if TYPE_CHECKING:
    from .token_attention import TokenAttention

#: At most so many pairs of tokens are held at once, per sample and head.
PAIRS = 512 * 512


class Tile(NamedTuple):
    """The tokens `rows`, which read the first `reach` keys, those that `allowed` says (None: all); `empty` read none."""

    rows: slice
    reach: int
    allowed: Tensor | None
    empty: Tensor | None


class ByTensors(NamedTuple):
    """What a cotangent u of the pull gives: (d pull/dt)^T u."""

    z: Tensor
    w_query: Tensor
    w_key: Tensor
    beta: Tensor
    earlier: Tensor


class QuerySide:
    """sum_h (P_h k_h) W_query_h of the tokens z over earlier keys and their own, causally.

    Args:
        attention: weights, inverse temperature and mask; the mask is of the pairs (*batch, N, M + N).
        z: (*batch, N, D).
        earlier: keys (*batch, H, M, Y) that all tokens of z may read, or None.
    """

    def __init__(self, attention: TokenAttention, z: Tensor, earlier: Tensor | None) -> None:
        own = attention.keys_of(z)
        self.attention, self.z, self.q = attention, z, attention._heads(z, attention.w_query)
        self.k = own if earlier is None else torch.cat([earlier, own], dim=-2)
        self.before = self.k.shape[-2] - own.shape[-2]

    def pull(self) -> Tensor:
        """(*batch, N, D). Of more than one tile the weights are computed again in a backward pass, not kept."""
        tiles, attend = list(self._tiles()), partial(_attended, self.attention._scale)
        if len(tiles) > 1 and torch.is_grad_enabled() and not transforms_active():
            attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
        heads = [attend(self.q[..., t.rows, :], self.k[..., : t.reach, :], t.allowed, t.empty) for t in tiles]
        return self._joined(heads, self.attention.w_query)

    def jvp(self, v: Tensor) -> Tensor:
        """The change of the pull with z along v, at fixed earlier keys."""
        by_query, by_key = self.attention._heads(v, self.attention.w_query), self.attention.keys_of(v)
        by_key = F.pad(by_key, (0, 0, self.before, 0))
        heads = []
        for tile, p in self._weighted():
            q, k = self.q[..., tile.rows, :], self.k[..., : tile.reach, :]
            dq, dk = by_query[..., tile.rows, :], by_key[..., : tile.reach, :]
            tangent = self.attention._scale * softmax_tangent(p, dq @ k.mT + q @ dk.mT)
            heads.append(tangent @ k + p @ dk)
        return self._joined(heads, self.attention.w_query)

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

    def _tiles(self) -> Iterator[Tile]:
        count, total, attention = self.q.shape[-2], self.k.shape[-2], self.attention
        size, mask = max(PAIRS // max(total, 1), 1), attention.mask
        if mask is not None:
            mask = mask.broadcast_to(*mask.shape[:-2], count, total)
            mask = mask.unsqueeze(-3) if mask.ndim > 2 else mask
        for start in range(0, count, size):
            rows = slice(start, min(start + size, count))
            reach, last = self.before + rows.stop, self.before + start - attention.exclude_self
            allowed = None
            if rows.stop - start > 1 or attention.exclude_self:
                allowed = torch.ones(rows.stop - start, reach, dtype=torch.bool, device=self.z.device).tril(last)
            if mask is not None:
                within = mask[..., rows, :reach]
                allowed = within if allowed is None else allowed & within
            reads_own = mask is None and not attention.exclude_self
            yield Tile(rows, reach, allowed, None if reads_own or allowed is None else ~allowed.any(-1))

    def _weighted(self) -> Iterator[tuple[Tile, Tensor]]:
        """The tiles, and what attends to what in each, which is held only where one tile is all."""
        held: list[tuple[Tile, Tensor]] | None = getattr(self, "_held", None)
        if held is not None:
            yield from held
            return
        tiles = list(self._tiles())
        for tile in tiles:
            q, k = self.q[..., tile.rows, :], self.k[..., : tile.reach, :]
            p = _weights(self.attention._scale, q, k, tile.allowed, tile.empty)
            if len(tiles) == 1:
                self._held = [(tile, p)]
            yield tile, p

    def _pulled(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """By the queries (less the factor beta), by all keys, and P k: (*batch, H, N or M + N, Y)."""
        by_heads, total = self.attention._heads(u, self.attention.w_query), self.k.shape[-2]
        by_q, read, by_k = [], [], torch.zeros_like(self.k)
        for tile, p in self._weighted():
            q, k, a = self.q[..., tile.rows, :], self.k[..., : tile.reach, :], by_heads[..., tile.rows, :]
            tangent = softmax_tangent(p, a @ k.mT)
            by_q.append(tangent @ k)
            read.append(p @ k)
            changed = (self.attention._scale * tangent).mT @ q + p.mT @ a
            by_k = by_k + F.pad(changed, (0, 0, 0, total - tile.reach))
        return _concatenated(by_q, self.q), by_k, _concatenated(read, self.q)

    def _by_z(self, by_q: Tensor, by_k: Tensor) -> Tensor:
        attention = self.attention
        by_query = attention._joined(attention._scale * by_q, attention.w_query)
        return by_query + attention._joined(by_k[..., self.before :, :], attention.w_key)

    def _joined(self, heads: list[Tensor], weight: Tensor) -> Tensor:
        return self.attention._joined(_concatenated(heads, self.q), weight)


def _concatenated(parts: list[Tensor], like: Tensor) -> Tensor:
    if not parts:
        return torch.zeros_like(like)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


def _attended(scale: Any, q: Tensor, k: Tensor, allowed: Tensor | None, empty: Tensor | None) -> Tensor:
    return _weights(scale, q, k, allowed, empty) @ k


def _weights(scale: Any, q: Tensor, k: Tensor, allowed: Tensor | None, empty: Tensor | None) -> Tensor:
    p = restricted_to((scale * q) @ k.mT, allowed, empty).softmax(-1)
    return p if empty is None else p.masked_fill(empty[..., None], 0.0)
