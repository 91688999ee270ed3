"""Keys and values of the tokens so far, for decoding token by token."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _validate
from .masks import check_key_mask


class Held(NamedTuple):
    """Keys (*batch, Hkv, M, D), values (*batch, Hkv, M, E) or None, and which of them exist, (*batch, M) or None."""

    keys: Tensor
    values: Tensor | None
    key_mask: Tensor | None


class KeyValueCache:
    """Keys and values that one layer has computed; made by `ImplicitAttention.new_cache`.

    A cache grows with every call of its layer that it is passed to; one made with a context holds that context's keys
    and stays as it is. A call that raises leaves it unchanged.

    Args:
        owner: what identifies the layer that it belongs to.
        context: what a cache that does not grow holds.
        warm_start: start every token's solve at the equilibrium of the token before instead of at its query.

    Attributes:
        held: keys, values and which of them exist, or None while empty.
        num_queries: how many tokens have asked so far.
        state: equilibrium of the last token, (*batch, H, 1, D), or None.
        num_evals: evaluations of the map spent so far, (*batch, H), or None before the first solve.
    """

    def __init__(self, owner: object, *, context: Held | None = None, warm_start: bool = False) -> None:
        self.owner = owner
        self.fixed = context is not None
        self.warm_start = warm_start
        self.held = context
        self.num_queries = 0
        self.state: Tensor | None = None
        self.num_evals: Tensor | None = None

    @property
    def length(self) -> int:
        """The number of tokens held."""
        return 0 if self.held is None else self.held.keys.shape[-2]

    def check_batch(self, batch: tuple[int, ...]) -> None:
        """Raise unless x of leading axes `batch` can ask this cache."""
        if self.held is None:
            return
        own = tuple(self.held.keys.shape[:-3])
        remedy = "make a new one, or reorder this one with cache.select_batch(index)"
        asked = own if self.num_evals is None else tuple(self.num_evals.shape[:-1])
        fits = own == batch if not self.fixed else asked == batch or self.num_evals is None
        _validate.require(fits, "cache", f"be used with the batch that it holds, {asked}", batch, remedy)
        if self.fixed:
            _validate.check_broadcast("context", own, batch, "the leading axes of x")

    def with_new(self, keys: Tensor, values: Tensor | None, key_mask: Tensor | None) -> Held:
        """What will be held with the keys and values of new tokens; `key_mask` is of these, or of all."""
        rows, batch = keys.shape[-2], tuple(keys.shape[:-3])
        if self.held is None:
            if key_mask is not None:
                check_key_mask(key_mask, batch, rows)
                key_mask = key_mask.expand(*batch, rows)
            return Held(keys, values, key_mask)
        old = self.held
        keys = torch.cat([old.keys, keys], dim=-2)
        if values is not None and old.values is not None:
            values = torch.cat([old.values, values], dim=-2)
        if key_mask is not None and key_mask.shape[-1:] == keys.shape[-2:-1]:
            check_key_mask(key_mask, batch, keys.shape[-2])
            return Held(keys, values, key_mask.expand(*batch, keys.shape[-2]))
        if key_mask is None and old.key_mask is None:
            return Held(keys, values, None)
        if key_mask is not None:
            check_key_mask(key_mask, batch, rows)
        exists = [
            torch.ones(*batch, count, dtype=torch.bool, device=keys.device)
            if part is None
            else part.expand(*batch, count)
            for part, count in ((old.key_mask, self.length), (key_mask, rows))
        ]
        return Held(keys, values, torch.cat(exists, dim=-1))

    def commit(self, held: Held, state: Tensor, num_evals: Tensor) -> None:
        """Keep what was attended to, the last token's equilibrium, and the evaluations (*batch, H, N) spent."""
        if not self.fixed:
            self.held = held
        self.num_queries += state.shape[-2]
        spent = num_evals.sum(-1)
        self.num_evals = spent if self.num_evals is None else self.num_evals + spent
        if state.shape[-2] > 0:
            self.state = state[..., -1:, :].detach()

    def start(self, query: Tensor) -> Tensor | None:
        """Where the solves of new tokens begin, or None for their queries."""
        if not self.warm_start or self.state is None:
            return None
        state = self.state.to(query.dtype).expand(query.shape)
        return torch.where(state.isfinite().all(-1, keepdim=True), state, query.detach())

    def select_batch(self, index: Tensor) -> None:
        """Keep the sequences `index` of the first axis, in that order, as beam search does."""
        if self.held is None:
            return
        _validate.require(self.held.keys.ndim > 3, "cache", "hold a batch to select from", "one sequence")
        index = torch.as_tensor(index, device=self.held.keys.device)
        if not (self.fixed and self.held.keys.shape[0] == 1):
            keys, values, key_mask = (None if t is None else t[index] for t in self.held)
            assert keys is not None
            self.held = Held(keys, values, key_mask)
        self.state, self.num_evals = (None if t is None else t[index] for t in (self.state, self.num_evals))

    def __deepcopy__(self, memo: dict[int, Any]) -> KeyValueCache:
        """A cache with tensors of its own, through which gradients flow as through this one's."""
        clone = memo[id(self)] = copy.copy(self)
        for tensor in self.held or ():
            # Of what is computed with a graph torch copies nothing by itself.
            if tensor is not None and not tensor.is_leaf:
                memo[id(tensor)] = tensor.clone()
        clone.__dict__.update(copy.deepcopy(vars(self), memo))
        return clone

    def __repr__(self) -> str:
        kind = "fixed" if self.fixed else "growing"
        return f"KeyValueCache({kind}, length={self.length}, warm_start={self.warm_start})"


def check_cache(cache: object, owner: object) -> None:
    """Raise unless `cache` was made by the layer that `owner` identifies."""
    if not isinstance(cache, KeyValueCache):
        raise TypeError(
            _validate.message("cache", "be None or a KeyValueCache", type(cache).__name__, "from layer.new_cache()")
        )
    _validate.require(
        cache.owner is owner,
        "cache",
        "be one that this layer made",
        "the cache of another layer",
        "give every layer its own, from layer.new_cache()",
    )
