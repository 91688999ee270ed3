"""The attention of the Energy Transformer: a potential of all tokens, with learned queries and keys per head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import _validate
from .._torch import is_plain, sum_to_shape, transforms_active
from ._query_side import QuerySide, concatenated
from ._read import check_masks, check_masks_fit, restricted_to
from ._shapes import Mask, States, per_state
from .base import CovarianceMap, Potential
from .self_attention import softmax_tangent

#: Up to so many tokens all pairs are in memory at once; more tokens are split into tiles of query rows.
DENSE_TOKENS = 512


class TokenAttention(Potential):
    r"""The potential of all tokens g of a sample together, with queries and keys of several heads.

    ```math
    \Phi(g) = \sum_h \frac1{\beta_h} \sum_C \log \sum_B e^{\beta_h \langle k_{hB}, q_{hC} \rangle}
    ```

    With q_h = g W_query_h^T, k_h = g W_key_h^T and P_h the softmax of the scores over B,
    mean(g) = sum_h (P_h k_h) W_query_h + (P_h^T q_h) W_key_h: a token is moved by the tokens that it attends to, and by
    those that attend to it. -Phi is the attention energy of the Energy Transformer. There are no values. Of more than
    512 tokens no (H, N, N) tensor is stored, neither for an evaluation nor (outside of torch.func) for its gradient.

    Args:
        w_query: (H, Y, D), for H heads of width Y.
        w_key: (H, Y, D).
        beta: inverse temperature > 0, a float or a tensor, (H,) or ().
        mask: boolean, broadcasts to (*batch, N, N); True = token C (the row) attends to token B.
        exclude_self: no token attends to itself.

    A token that attends to none adds nothing to Phi: with `exclude_self` a single token has Phi 0 and no pull. A sample
    is one problem (`event_ndim` 2): a NaN in it reaches all of its tokens, but no other sample. Not convex.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit, beta <= 0.

    Gradients: with respect to g, w_query, w_key and beta, to any order.

    Reference: Hoover et al. (2023), Energy Transformer.

    Not for causal attention: P^T q moves a token by those after it; use `CausalTokens`, which keeps the query side.
    Not for tokens that are queries and keys as they are: use `SelfAttention`.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import TokenAttention
        >>> phi = TokenAttention(torch.ones(2, 3, 4), torch.ones(2, 3, 4), beta=0.5)
        >>> tokens = torch.linspace(-1, 1, 40).view(2, 5, 4)
        >>> phi.value(tokens).shape, phi.mean(tokens).shape
        (torch.Size([2]), torch.Size([2, 5, 4]))
    """

    event_ndim = 2
    declares_all = True
    #: Beta, shaped to multiply scores or the queries of all heads.
    _scale: float | Tensor = per_state("beta")

    def __init__(
        self,
        w_query: Float[Tensor, "H Y D"],
        w_key: Float[Tensor, "H Y D"],
        beta: float | Float[Tensor, "#H"],
        *,
        mask: Mask = None,
        exclude_self: bool = False,
    ) -> None:
        for name, weight in (("w_query", w_query), ("w_key", w_key)):
            _validate.check_float_tensor(name, weight)
            _validate.require(weight.ndim == 3, name, "have three axes, (H, Y, D)", f"shape {tuple(weight.shape)}")
        required = f"have the shape {tuple(w_query.shape)} of `w_query`"
        _validate.require(w_key.shape == w_query.shape, "w_key", required, tuple(w_key.shape))
        _validate.check_same_kind([("w_query", w_query), ("w_key", w_key)])
        remedy = "parametrise it, for example as an exponential"
        self.w_query, self.w_key = w_query, w_key
        self.beta: float | Tensor = _validate.check_per_batch("beta", beta, low=0.0, open_low=True, remedy=remedy)
        if isinstance(beta, Tensor):
            _validate.check_same_kind([("w_query", w_query), ("beta", beta)])
            _validate.check_broadcast("beta", beta.shape, w_query.shape[:1], "the heads (H,)")
        check_masks(mask, None)
        self.mask = mask
        _validate.check_flag("exclude_self", exclude_self)
        self.exclude_self = exclude_self

    def _check_width(self, argument: str, z: Tensor) -> None:
        """Raise unless tokens have the width of the weights."""
        width = self.w_query.shape[-1]
        required = f"have the width {width} of `w_query` on its last axis"
        _validate.require(z.shape[-1] == width, argument, required, f"shape {tuple(z.shape)}")
        _validate.check_same_kind([(argument, z), ("w_query", self.w_query)])

    def check_state(self, argument: str, z: Tensor) -> None:
        _validate.check_float_tensor(argument, z, min_ndim=2)
        self._check_width(argument, z)
        check_masks_fit(self.mask, None, argument, z, z.shape[-2], "(*batch, N, N)")

    def value(self, z: States) -> Float[Tensor, "*batch"]:
        """Phi(g), (*batch, N, D) -> (*batch)."""
        return TokenPairs(self, z).value()

    def mean(self, z: States) -> States:
        """sum_h (P_h k_h) W_query_h + (P_h^T q_h) W_key_h."""
        return TokenPairs(self, z).mean()

    def covariance_product(self, z: States, v: States) -> States:
        """Hess Phi(g) v."""
        return TokenPairs(self, z).curvature(v)

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return TokenPairs(self, z).evaluate()

    def probabilities(self, z: States) -> Float[Tensor, "*batch H N N"]:
        """P(g): row C of a head says how token C attends to all tokens; zeros where it may attend to none."""
        return TokenPairs(self, z).probabilities()

    def linearize(self, z: Tensor) -> CovarianceMap | None:
        if not self._has_only("w_query", "w_key", "beta", "mask", "exclude_self"):
            return None
        pairs = TokenPairs(self, z)

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            by_query, by_key, by_beta = pairs.vjp_tensors(u)
            own = [sum_to_shape(by_beta, self.beta.shape)] if isinstance(self.beta, Tensor) else []
            return by_query, by_key, *own, *([] if self.mask is None else [None])

        return CovarianceMap(pairs.curvature, pullback)

    def query_pull(self, z: States, keys: Float[Tensor, "*batch H M Y"] | None = None) -> States:
        """sum_h (P_h k_h) W_query_h, the query side of `mean` alone, over `keys` and those of z, causally.

        keys: of M earlier tokens, to which all of z attend. Token C of z attends to the tokens of z up to itself (with
        `exclude_self` before itself). The mask is then of the pairs (*batch, N, M + N). For many tokens no (H, N, N)
        tensor is stored, neither for the pull nor for a backward pass outside of torch.func.
        """
        return QuerySide(self, z, keys).pull()

    # The heads.

    def keys_of(self, z: States) -> Float[Tensor, "*batch H N Y"]:
        """k_h = g W_key_h^T."""
        return self._heads(z, self.w_key)

    def _heads(self, z: Tensor, weight: Tensor) -> Tensor:
        """z W_h^T, (*batch, H, N, Y)."""
        flat = z @ weight.flatten(0, 1).mT
        return flat.reshape(*flat.shape[:-1], *weight.shape[:2]).transpose(-2, -3)

    def _joined(self, heads: Tensor, weight: Tensor) -> Tensor:
        """sum_h heads_h W_h."""
        return heads.transpose(-2, -3).flatten(-2) @ weight.flatten(0, 1)


class TokenPairs:
    """Queries and keys of the tokens z (*batch, N, D), and the potential and its derivatives over their pairs.

    Queries and keys are kept, and for up to `DENSE_TOKENS` tokens the weights P. Where gradients are recorded, the
    weights of more tokens are computed again in a backward pass.
    """

    def __init__(self, attention: TokenAttention, z: Tensor) -> None:
        self.attention, self.z = attention, z
        self.q, self.k = attention._heads(z, attention.w_query), attention._heads(z, attention.w_key)
        self._cached: Tensor | None = None

    def value(self) -> Tensor:
        """Phi (*batch)."""
        parts = [self._recorded(self._weights)(rows)[1] for rows in self._tiles()]
        return self._summed(concatenated(parts, -1))

    def mean(self) -> Tensor:
        """The gradient of Phi (*batch, N, D)."""
        return self._pull(*zip(*(self._recorded(self._read)(rows) for rows in self._tiles()), strict=True))

    def evaluate(self) -> tuple[Tensor, Tensor]:
        """Phi (*batch) and its gradient (*batch, N, D)."""
        parts = [self._recorded(self._attended)(rows) for rows in self._tiles()]
        logsumexp, by_query, by_key = zip(*parts, strict=True)
        return self._summed(concatenated(logsumexp, -1)), self._pull(by_query, by_key)

    def probabilities(self) -> Tensor:
        """P, (*batch, H, N, N)."""
        return concatenated([self._softmax(*self._scores(rows)) for rows in self._tiles()], -2)

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
            self._by_weight(concatenated(by_q, -2), concatenated(read, -2), u),
            self._by_weight(_total(by_k), _total(read_back), u),
            sum_to_shape(_total(by_beta), attention.w_query.shape[:1]),
        )

    # Parts.

    def _tiles(self) -> Iterator[slice]:
        count = self.q.shape[-2]
        size = count if count <= DENSE_TOKENS else max(DENSE_TOKENS**2 // count, 1)
        return (slice(start, min(start + size, count)) for start in range(0, max(count, 1), max(size, 1)))

    def _recorded(self, function: Callable[[slice], Any]) -> Callable[[slice], Any]:
        """Return the function, which a backward pass computes again where there is more than one tile."""
        if self.q.shape[-2] <= DENSE_TOKENS or self._plain or transforms_active():
            return function
        return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)

    @property
    def _plain(self) -> bool:
        """Whether no gradient is recorded."""
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
        """Return P of these rows, and the logarithms of its normalisers."""
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
        """Return P, which overwrites the scores where no gradient is recorded."""
        p = torch.softmax(scores, -1, out=scores) if self._plain else scores.softmax(-1)
        return p if empty is None else p.masked_fill(empty[..., None], 0.0)

    def _probabilities(self, rows: slice) -> Tensor:
        """P of these rows; cached where one tile has all rows."""
        if self._cached is not None:
            return self._cached
        p = self._softmax(*self._scores(rows))
        if self.q.shape[-2] <= DENSE_TOKENS:
            self._cached = p
        return p

    def _attended(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log-sum-exp of these rows, P k, and their part of P^T q."""
        p, total = self._weights(rows)
        return total, p @ self.k, p.mT @ self.q[..., rows, :]

    def _read(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return P k of these rows, and their part of P^T q."""
        p = self._softmax(*self._scores(rows))
        return p @ self.k, p.mT @ self.q[..., rows, :]

    def _pull(self, by_query: Sequence[Tensor], by_key: Sequence[Tensor]) -> Tensor:
        """Sum over the heads: the tiles' pull on their queries and on all keys, through the weights."""
        attention = self.attention
        pulled = attention._joined(concatenated(by_query, -2), attention.w_query)
        return pulled + attention._joined(_total(by_key), attention.w_key)

    def _summed(self, logsumexp: Tensor) -> Tensor:
        """sum_h (1/beta_h) sum over tokens, from (*batch, H, N)."""
        scale = self.attention._scale
        return (logsumexp / (scale[..., 0] if isinstance(scale, Tensor) else scale)).sum((-1, -2))

    def _by_weight(self, left: Tensor, right: Tensor, u: Tensor) -> Tensor:
        """left^T z + right^T u, summed over the batch, (H, Y, D)."""
        total = left.mT @ self.z.unsqueeze(-3) + right.mT @ u.unsqueeze(-3)
        return sum_to_shape(total, self.attention.w_query.shape)


def _total(parts: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, parts)
