"""Pooling: learned queries that read a set."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import _validate
from ..solution import SolveReport
from .attention import ImplicitAttention


class AttentionPooling(nn.Module):
    """A set of any size pooled by learned queries that settle into it: (*batch, M, dim) -> (*batch, queries, dim).

    The head of multiple-instance learning: one instance among many may make a bag positive.

    Args:
        dim: width of the output, and of the instances unless `context_dim` is given.
        heads: number of heads.
        queries: number of learned queries.
        **attention: all other arguments of `ImplicitAttention`, except `causal` and `rotary`.

    Raises:
        ValueError: anchor=0 with a solve, where the learned queries would never get a gradient; causal or rotary, as a
            set has no order.

    Examples:
        >>> import torch
        >>> from implicit_attention import AttentionPooling
        >>> pool, bags = AttentionPooling(16, heads=2, queries=3), torch.randn(4, 7, 16)
        >>> pool(bags, key_mask=torch.arange(7) < 5).shape
        torch.Size([4, 3, 16])

    Not for sequences whose order matters: use `ImplicitAttention`.
    """

    def __init__(self, dim: int, heads: int, *, queries: int = 1, **attention: Any) -> None:
        super().__init__()
        queries = _validate.check_integer("queries", queries, low=1)
        _check_no_order(attention.get("causal"))
        rotary = attention.get("rotary")
        _validate.require(rotary is None, "rotary", "be None in pooling: a set has no positions", rotary)
        self.attention = ImplicitAttention(dim, heads, **attention)
        required = "be > 0 or 'learned' with learned queries, which get no gradient at 0"
        _validate.require(attention.get("anchor") != 0 or self.attention.options.explicit, "anchor", required, 0)
        place = {name: attention.get(name) for name in ("device", "dtype")}
        self.queries = nn.Parameter(torch.randn(queries, dim, **place))

    @property
    def last_solve(self) -> SolveReport | None:
        """The `SolveReport` of the last call, as in `ImplicitAttention`."""
        return self.attention.last_solve

    def forward(self, x: Tensor, **call: Any) -> Any:
        """Pool the instances x (*batch, M, dim) to (*batch, queries, dim).

        Args:
            x: the instances.
            **call: arguments of `ImplicitAttention.forward`, except `context` (which is x), `positions`, `cache` and
                `causal`. `key_mask` (*batch, M) says which instances exist.
        """
        _check_no_order(call.get("causal"))
        _validate.check_float_tensor("x", x, min_ndim=2)
        return self.attention(self.queries.expand(*x.shape[:-2], -1, -1), x, **call)


def _check_no_order(causal: bool | None) -> None:
    reason = "be False in pooling: a set has no order, and the first learned query would see one instance only"
    _validate.require(not causal, "causal", reason, causal)
