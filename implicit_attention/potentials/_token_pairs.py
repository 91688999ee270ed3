"""The pairs of token attention: values, pulls and their derivatives, in tiles of query rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .._autograd import is_plain, sum_to_shape, transforms_active
from ._read import restricted_to
from ._token_heads import TokenHeads
from .self_attention import softmax_tangent

#: Up to so many tokens all pairs are held at once; of more, tiles of query rows with as many pairs.
DENSE_TOKENS = 512


class TokenPairs:
    """Queries and keys of the tokens z (*batch, N, D), and what their pairs give.

    Not differentiated, nothing is kept but queries, keys, and up to `DENSE_TOKENS` tokens the weights P. Recorded, the
    weights of more tokens are computed again in a backward pass.
    """

    def __init__(self, attention: TokenHeads, z: Tensor) -> None:
        self.attention, self.z = attention, z
        self.q, self.k = attention._heads(z, attention.w_query), attention._heads(z, attention.w_key)
        self._held: Tensor | None = None

    def value(self) -> Tensor:
        """Phi (*batch)."""
        parts = [self._recorded(self._weights)(rows)[1] for rows in self._tiles()]
        return self._summed(_joined(parts, -1))

    def mean(self) -> Tensor:
        """The gradient of Phi (*batch, N, D)."""
        return self._pull(*zip(*(self._recorded(self._read)(rows) for rows in self._tiles()), strict=True))

    def evaluate(self) -> tuple[Tensor, Tensor]:
        """Phi (*batch) and its gradient (*batch, N, D)."""
        parts = [self._recorded(self._attended)(rows) for rows in self._tiles()]
        logsumexp, by_query, by_key = zip(*parts, strict=True)
        return self._summed(_joined(logsumexp, -1)), self._pull(by_query, by_key)

    def probabilities(self) -> Tensor:
        """P, (*batch, H, N, N)."""
        return _joined([self._softmax(*self._scores(rows)) for rows in self._tiles()], -2)

    def curvature(self, v: Tensor) -> Tensor:
        """Hess Phi v."""
        attention = self.attention
        dq, dk = attention._heads(v, attention.w_query), attention._heads(v, attention.w_key)

        def changed(rows: slice) -> tuple[Tensor, Tensor]:
            p, q, moved = self._probabilities(rows), self.q[..., rows, :], dq[..., rows, :]
            tangent = attention._scale * softmax_tangent(p, moved @ self.k.mT + q @ dk.mT)
            return tangent @ self.k + p @ dk, tangent.mT @ q + p.mT @ moved

        return self._pull(*zip(*(self._recorded(changed)(rows) for rows in self._tiles()), strict=True))

    def vjp_tensors(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(d mean/dt)^T u for the weights of queries and of keys, and for one beta a head."""
        attention = self.attention
        uq, uk = attention._heads(u, attention.w_query), attention._heads(u, attention.w_key)
        # <u, mean> is sum P * (uq k^T + q uk^T) with uq, uk as constants beside q and k, by which the scores change.
        by_q, read, by_k, read_back, by_beta = [], [], [], [], []
        for rows in self._tiles():
            p, q, moved = self._probabilities(rows), self.q[..., rows, :], uq[..., rows, :]
            tangent = softmax_tangent(p, moved @ self.k.mT + q @ uk.mT)
            towards = tangent @ self.k
            by_beta.append((towards * q).sum((-1, -2)))
            by_q.append(attention._scale * towards + p @ uk)
            by_k.append((attention._scale * tangent).mT @ q + p.mT @ moved)
            read.append(p @ self.k)
            read_back.append(p.mT @ q)
        return (
            self._by_weight(_joined(by_q, -2), _joined(read, -2), u),
            self._by_weight(_total(by_k), _total(read_back), u),
            sum_to_shape(_total(by_beta), attention.w_query.shape[:1]),
        )

    # Parts.

    def _tiles(self) -> Iterator[slice]:
        count = self.q.shape[-2]
        size = count if count <= DENSE_TOKENS else max(DENSE_TOKENS**2 // count, 1)
        return (slice(start, min(start + size, count)) for start in range(0, max(count, 1), max(size, 1)))

    def _recorded(self, function: Callable[[slice], Any]) -> Callable[[slice], Any]:
        """The function, computed again in a backward pass where it has more than one tile."""
        if self.q.shape[-2] <= DENSE_TOKENS or self._plain or transforms_active():
            return function
        return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)

    @property
    def _plain(self) -> bool:
        """Whether nothing of it can be differentiated."""
        beta = self.attention.beta
        return is_plain(self.q, self.k, *([beta] if isinstance(beta, Tensor) else []))

    def _scores(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """The scores (*batch, H, n, N) of these queries, and which of them attend to nothing."""
        attention, count = self.attention, self.k.shape[-2]
        allowed = None
        if attention.mask is not None:
            mask = attention.mask.expand(*attention.mask.shape[:-2], count, count)[..., rows, :]
            allowed = mask.unsqueeze(-3) if mask.ndim > 2 else mask
        if attention.exclude_self:
            index = torch.arange(count, device=self.q.device)
            others = index[rows, None] != index
            allowed = others if allowed is None else allowed & others
        empty = None if allowed is None else ~allowed.any(-1)
        return restricted_to((attention._scale * self.q[..., rows, :]) @ self.k.mT, allowed, empty), empty

    def _weights(self, rows: slice) -> tuple[Tensor, Tensor]:
        """P of these rows, and the logarithms of the sums that it was divided by."""
        scores, empty = self._scores(rows)
        if not self._plain or not scores.shape[-1]:
            total = scores.logsumexp(-1)
            p = self._softmax(scores, empty)
        else:
            # The largest weight of a row is exp(its score - log sum exp): no second pass of exponentials.
            highest = scores.amax(-1)
            p = self._softmax(scores, None)
            total = highest - p.amax(-1).log()
            p = p if empty is None else p.masked_fill_(empty[..., None], 0.0)
        return p, total if empty is None else total.masked_fill(empty, 0.0)

    def _softmax(self, scores: Tensor, empty: Tensor | None) -> Tensor:
        """P, in the place of the scores where nothing is recorded."""
        p = torch.softmax(scores, -1, out=scores) if self._plain else scores.softmax(-1)
        return p if empty is None else p.masked_fill(empty[..., None], 0.0)

    def _probabilities(self, rows: slice) -> Tensor:
        """P of these rows; kept where they are all."""
        if self._held is not None:
            return self._held
        p = self._softmax(*self._scores(rows))
        if self.q.shape[-2] <= DENSE_TOKENS:
            self._held = p
        return p

    def _attended(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """log sum exp of these rows, P k, and what they add to P^T q."""
        p, total = self._weights(rows)
        return total, p @ self.k, p.mT @ self.q[..., rows, :]

    def _read(self, rows: slice) -> tuple[Tensor, Tensor]:
        """P k of these rows, and what they add to P^T q."""
        p = self._softmax(*self._scores(rows))
        return p @ self.k, p.mT @ self.q[..., rows, :]

    def _pull(self, by_query: Sequence[Tensor], by_key: Sequence[Tensor]) -> Tensor:
        """sum_h of what tiles give to the queries of their rows and to all keys, through the weights."""
        attention = self.attention
        pulled = attention._joined(_joined(by_query, -2), attention.w_query)
        return pulled + attention._joined(_total(by_key), attention.w_key)

    def _summed(self, logsumexp: Tensor) -> Tensor:
        """sum_h (1/beta_h) sum over tokens, from (*batch, H, N)."""
        scale = self.attention._scale
        return (logsumexp / (scale[..., 0] if isinstance(scale, Tensor) else scale)).sum((-1, -2))

    def _by_weight(self, left: Tensor, right: Tensor, u: Tensor) -> Tensor:
        """left^T z + right^T u, summed over the batch, (H, Y, D)."""
        total = left.mT @ self.z.unsqueeze(-3) + right.mT @ u.unsqueeze(-3)
        return sum_to_shape(total, self.attention.w_query.shape)


def _joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=axis)


def _total(parts: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, parts)
