"""The attention of the Energy Transformer: a potential of all tokens, with learned queries and keys per head."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from .. import _validate
from .._autograd import sum_to_shape
from ._query_side import QuerySide
from ._read import check_masks, check_masks_fit
from ._token_heads import TokenHeads
from ._token_pairs import TokenPairs
from .base import CovarianceMap, Potential


class TokenAttention(TokenHeads, Potential):
    r"""The potential of all tokens g of a sample together, with queries and keys of several heads.

    ```math
    \Phi(g) = \sum_h \frac1{\beta_h} \sum_C \log \sum_B e^{\beta_h \langle k_{hB}, q_{hC} \rangle}
    ```

    With q_h = g W_query_h^T, k_h = g W_key_h^T and P_h the softmax of the scores over B,
    mean(g) = sum_h (P_h k_h) W_query_h + (P_h^T q_h) W_key_h: a token is moved by the tokens that it attends to, and by
    those that attend to it. -Phi is the attention energy of the Energy Transformer. There are no values. Of more than
    512 tokens no (H, N, N) tensor is held, neither for an evaluation nor (outside of torch.func) for its gradient.

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
            w_key.shape == w_query.shape,
            "w_key",
            f"have the shape {tuple(w_query.shape)} of `w_query`",
            tuple(w_key.shape),
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
        return TokenPairs(self, z).value()

    def mean(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N D"]:
        """sum_h (P_h k_h) W_query_h + (P_h^T q_h) W_key_h."""
        return TokenPairs(self, z).mean()

    def covariance_product(
        self, z: Float[Tensor, "*batch N D"], v: Float[Tensor, "*batch N D"]
    ) -> Float[Tensor, "*batch N D"]:
        """Hess Phi(g) v."""
        return TokenPairs(self, z).curvature(v)

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return TokenPairs(self, z).evaluate()

    def probabilities(self, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch H N N"]:
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

    def query_pull(
        self, z: Float[Tensor, "*batch N D"], keys: Float[Tensor, "*batch H M Y"] | None = None
    ) -> Float[Tensor, "*batch N D"]:
        """sum_h (P_h k_h) W_query_h, the query side of `mean` alone, over given keys and those of z, causally.

        keys: of M earlier tokens, to which all of z attend. Token C of z attends to the tokens of z up to itself (with
        `exclude_self` before itself). The mask is then of the pairs (*batch, N, M + N). Of many tokens no (H, N, N)
        tensor is held, neither here nor for a backward pass outside of torch.func.
        """
        return QuerySide(self, z, keys).pull()
