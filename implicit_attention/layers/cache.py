"""Keys and values of the tokens so far, for decoding token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _validate


class KeyValueCache:
    """Keys and values that one layer has computed; made by `ImplicitAttention.new_cache`.

    A cache grows with every call of its layer that it is passed to; one made with a context holds that context's keys
    and stays as it is.

    Args:
        layer: the layer that it belongs to.
        fixed: never grow.
        warm_start: start every token's solve at the equilibrium of the token before instead of at its query.

    Attributes:
        keys, values: (*batch, Hkv, M, D) and (*batch, Hkv, M, E), or None while empty; values is None where the layer
            reads out its state.
        state: equilibrium of the last token, (*batch, H, 1, D), or None.
        num_evals: evaluations of the map spent so far, (*batch, H), or None before the first solve.
    """

    def __init__(self, layer: object, *, fixed: bool = False, warm_start: bool = False) -> None:
        self.owner = id(layer)
        self.fixed = fixed
        self.warm_start = warm_start
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.state: Tensor | None = None
        self.num_evals: Tensor | None = None

    @property
    def length(self) -> int:
        """The number of tokens held."""
        return 0 if self.keys is None else self.keys.shape[-2]

    def append(self, keys: Tensor, values: Tensor | None) -> None:
        """Add the keys and values of new tokens."""
        if self.keys is not None:
            _validate.require(
                keys.shape[:-2] == self.keys.shape[:-2],
                "cache",
                f"be used with the batch that it holds, leading axes {tuple(self.keys.shape[:-3])}",
                tuple(keys.shape[:-3]),
                "make a new one, or reorder this one with cache.select_batch(index)",
            )
            keys = torch.cat([self.keys, keys], dim=-2)
            values = None if values is None or self.values is None else torch.cat([self.values, values], dim=-2)
        self.keys, self.values = keys, values

    def record(self, state: Tensor, num_evals: Tensor) -> None:
        """Keep the last token's equilibrium and count the evaluations (*batch, H, N) spent on the new tokens."""
        spent = num_evals.sum(-1)
        self.num_evals = spent if self.num_evals is None else self.num_evals + spent
        self.state = state[..., -1:, :].detach()

    def select_batch(self, index: Tensor) -> None:
        """Keep the sequences `index` of the first axis, in that order, as beam search does."""
        for name in ("keys", "values", "state", "num_evals"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, index))

    def __repr__(self) -> str:
        kind = "fixed" if self.fixed else "growing"
        return f"KeyValueCache({kind}, length={self.length}, warm_start={self.warm_start})"


def check_cache(cache: object, layer: object) -> None:
    """Raise unless `cache` was made by `layer`."""
    if not isinstance(cache, KeyValueCache):
        raise TypeError(
            _validate.message("cache", "be None or a KeyValueCache", type(cache).__name__, "from layer.new_cache()")
        )
    _validate.require(
        cache.owner == id(layer),
        "cache",
        "be one that this layer made",
        "the cache of another layer",
        "give every layer its own, from layer.new_cache()",
    )
