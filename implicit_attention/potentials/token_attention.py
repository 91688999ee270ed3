"""The attention of the Energy Transformer: a potential of all tokens, with learned queries and keys per head."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .. import _validate
from .._autograd import sum_to_shape
from ._query_side import QuerySide
from ._read import check_masks, check_masks_fit, restricted_to
from .base import CovarianceMap, Potential
from .self_attention import softmax_tangent


class TokenAttention(Potential):
    """Phi(g) = sum_h (1/beta_h) sum_C log sum_B exp(beta_h <k_hB, q_hC>) of all tokens g of a sample together.

    With q_h = g W_query_h^T, k_h = g W_key_h^T and P_h the softmax of the scores over B,
    mean(g) = sum_h (P_h k_h) W_query_h + (P_h^T q_h) W_key_h: a token is moved by the tokens that it attends to, and by
    those that attend to it. -Phi is the attention energy of the Energy Transformer. There are no values.

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

    def __init__(
        self,
        w_query: Float[Tensor, "H Y D"],
        w_key: Float[Tensor, "H Y D"],
        beta: float | Float[Tensor, "#H"],
        *,
        mask: Bool[Tensor, "..."] | None = None,
        exclude_self: bool = False,
    ) -> None:
        for name, weight in (("w_query", w_query), ("w_key", w_key)):
            _validate.check_float_tensor(name, weight)
            _validate.require(weight.ndim == 3, name, "have three axes, (H, Y, D)", f"shape {tuple(weight.shape)}")
        _validate.require(
            w_key.shape == w_query.shape, "w_key", f"have the shape {tuple(w_query.shape)} of `w_query`", tuple(w_key.shape)
        )
        _validate.check_same_kind([("w_query", w_query), ("w_key", w_key)])
        remedy = "parametrise it, for example as an exponential"
        self.w_query, self.w_key = w_query, w_key
        self.beta: float | Tensor = _validate.check_per_batch("beta", beta, low=0.0, open_low=True, remedy=remedy)
        if isinstance(beta, Tensor):
            _validate.check_same_kind([("w_query", w_query), ("beta", beta)])
            _validate.check_broadcast("beta", beta.shape, w_query.shape[:1], "the heads (H,)")
        check_masks(mask, None)
        self.mask = mask
        if not isinstance(exclude_self, bool):
            raise TypeError(_validate.message("exclude_self", "be True or False", repr(exclude_self)))
        self.exclude_self = exclude_self

    def check_state(self, argument: str, z: Tensor) -> None:
        _validate.check_float_tensor(argument, z, min_ndim=2)
        width = self.w_query.shape[-1]
        required = f"have the width {width} of `w_query` on its last axis"
        _validate.require(z.shape[-1] == width, argument, required, f"shape {tuple(z.shape)}")
        _validate.check_same_kind([(argument, z), ("w_query", self.w_query)])
        check_masks_fit(self.mask, None, argument, z, z.shape[-2], "(*batch, N, N)")

    def value(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch"]:
        """Phi(g), (*batch, N, D) -> (*batch)."""
        return self._value(self._read(z))

    def mean(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N D"]:
        """sum_h (P_h k_h) W_query_h + (P_h^T q_h) W_key_h."""
        read = self._read(z)
        return self._pull(read, _weights(read))

    def covariance_product(
        self, z: Float[Tensor, "*batch N D"], v: Float[Tensor, "*batch N D"]
    ) -> Float[Tensor, "*batch N D"]:
        """Hess Phi(g) v."""
        read = self._read(z)
        return self._curvature(read, _weights(read), v)

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        read = self._read(z)
        return self._value(read), self._pull(read, _weights(read))

    def probabilities(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch H N N"]:
        """P(g): row C of a head says how token C attends to all tokens; zeros where it may attend to none."""
        return _weights(self._read(z))

    def linearize(self, z: Tensor) -> CovarianceMap | None:
        if not self._has_only("w_query", "w_key", "beta", "mask", "exclude_self"):
            return None
        read = self._read(z)
        p = _weights(read)

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            q, k = read.q, read.k
            by_q, by_k = self._heads(u, self.w_query), self._heads(u, self.w_key)
            tangent = softmax_tangent(p, by_q @ k.mT + q @ by_k.mT)
            scaled = self._scale * tangent
            gradients: list[Tensor | None] = [
                self._by_weight(scaled @ k + p @ by_k, z, p @ k, u),
                self._by_weight(scaled.mT @ q + p.mT @ by_q, z, p.mT @ q, u),
            ]
            if isinstance(self.beta, Tensor):
                per_head = (tangent * (q @ k.mT)).sum((-1, -2))
                gradients.append(sum_to_shape(per_head, self.beta.shape))
            if self.mask is not None:
                gradients.append(None)
            return tuple(gradients)

        return CovarianceMap(lambda v: self._curvature(read, p, v), pullback)

    def query_pull(
        self, z: Float[Tensor, "*batch N D"], keys: Float[Tensor, "*batch H M Y"] | None = None
    ) -> Float[Tensor, "*batch N D"]:
        """sum_h (P_h k_h) W_query_h, the query side of `mean` alone, over given keys and those of z, causally.

        keys: of M earlier tokens, to which all of z attend. Token C of z attends to the tokens of z up to itself (with
        `exclude_self` before itself). The mask is then of the pairs (*batch, N, M + N). Of many tokens no (H, N, N)
        tensor is held, neither here nor for a backward pass outside of torch.func.
        """
        return QuerySide(self, z, keys).pull()

    def keys_of(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch H N Y"]:
        """k_h = g W_key_h^T."""
        return self._heads(z, self.w_key)

    # Parts.

    @property
    def _scale(self) -> float | Tensor:
        """Beta, shaped to multiply scores or the queries of all heads."""
        if not isinstance(self.beta, Tensor):
            return self.beta
        return _validate.inside(self.beta, low=0.0, open_low=True)[..., None, None]

    def _heads(self, z: Tensor, weight: Tensor) -> Tensor:
        """z W_h^T, (*batch, H, N, Y)."""
        return (z @ weight.flatten(0, 1).mT).unflatten(-1, weight.shape[:2]).transpose(-2, -3)

    def _joined(self, heads: Tensor, weight: Tensor) -> Tensor:
        """sum_h heads_h W_h."""
        return heads.transpose(-2, -3).flatten(-2) @ weight.flatten(0, 1)

    def _by_weight(self, left: Tensor, z: Tensor, right: Tensor, u: Tensor) -> Tensor:
        """left^T z + right^T u, summed over the batch, (H, Y, D)."""
        total = left.mT @ z.unsqueeze(-3) + right.mT @ u.unsqueeze(-3)
        return sum_to_shape(total, self.w_query.shape)

    def _read(self, z: Tensor) -> _Read:
        q, k = self._heads(z, self.w_query), self._heads(z, self.w_key)
        allowed = None if self.mask is None else _per_head(self.mask)
        if self.exclude_self:
            others = ~torch.eye(z.shape[-2], dtype=torch.bool, device=z.device)
            allowed = others if allowed is None else allowed & others
        empty = None if allowed is None else ~allowed.any(-1)
        scores = restricted_to(self._scale * q @ k.mT, allowed, empty)
        return _Read(q, k, scores, empty)

    def _value(self, read: _Read) -> Tensor:
        per_token = read.scores.logsumexp(-1)
        per_token = per_token if read.empty is None else per_token.masked_fill(read.empty, 0.0)
        scale = self._scale
        return (per_token / (scale[..., 0] if isinstance(scale, Tensor) else scale)).sum((-1, -2))

    def _pull(self, read: _Read, p: Tensor) -> Tensor:
        return self._joined(p @ read.k, self.w_query) + self._joined(p.mT @ read.q, self.w_key)

    def _curvature(self, read: _Read, p: Tensor, v: Tensor) -> Tensor:
        q, k = read.q, read.k
        dq, dk = self._heads(v, self.w_query), self._heads(v, self.w_key)
        tangent = self._scale * softmax_tangent(p, dq @ k.mT + q @ dk.mT)
        by_query = self._joined(tangent @ k + p @ dk, self.w_query)
        return by_query + self._joined(tangent.mT @ q + p.mT @ dq, self.w_key)


class _Read(NamedTuple):
    """Queries and keys (*batch, H, N, Y), the scores between them, and the rows that attend to nothing."""

    q: Tensor
    k: Tensor
    scores: Tensor
    empty: Tensor | None


def _per_head(mask: Tensor) -> Tensor:
    return mask if mask.ndim < 3 else mask.unsqueeze(-3)


def _weights(read: _Read) -> Tensor:
    p = read.scores.softmax(-1)
    return p if read.empty is None else p.masked_fill(read.empty[..., None], 0.0)
