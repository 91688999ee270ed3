"""Keys and values of the tokens so far, for decoding token by token."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _validate
from ..attention.masks import check_key_mask


class CachedKeys(NamedTuple):
    """Keys (*batch, Hkv, M, D), values (*batch, Hkv, M, E) or None, and which of them exist, (*batch, M) or None."""

    keys: Tensor
    values: Tensor | None
    key_mask: Tensor | None


class KeyValueCache:
    """Keys and values that one layer has computed; made by `ImplicitAttention.new_cache`.

    A cache grows with every call of its layer that it is passed to; one made with a context holds that context's keys
    and stays as it is. A call that raises leaves it unchanged.

    Args:
        owner: the object that identifies its layer.
        warm_start: start every token's solve at the equilibrium of the token before instead of at its query.

    Attributes:
        held: keys, values and which of them exist, or None while empty.
        fixed: whether it holds a context, and does not grow.
        num_queries: how many tokens have attended so far.
        state: equilibrium of the last token, (*batch, H, 1, D), or None.
        num_evals: evaluations of the map spent so far, (*batch, H), or None before the first solve.

    Examples:
        >>> import torch
        >>> from implicit_attention import ImplicitAttention
        >>> layer, x = ImplicitAttention(8, heads=2, causal=True), torch.randn(3, 4, 8)
        >>> cache = layer.new_cache()
        >>> tokens = [layer(x[:, i : i + 1], cache=cache) for i in range(4)]
        >>> cache.length
        4
        >>> torch.allclose(torch.cat(tokens, dim=1), layer(x), atol=1e-4)
        True

    Not for training, where all tokens are known: one call with causal=True does the same at once.
    """

    def __init__(self, owner: object, *, warm_start: bool = False) -> None:
        self.owner, self.fixed, self.warm_start = owner, False, warm_start
        self.held: CachedKeys | None = None
        self.num_queries = 0
        self.state: Tensor | None = None
        self.num_evals: Tensor | None = None

    @property
    def length(self) -> int:
        """The number of tokens in the cache."""
        return 0 if self.held is None else self.held.keys.shape[-2]

    def with_new(self, keys: Tensor, values: Tensor | None, key_mask: Tensor | None) -> CachedKeys:
        """Return the contents with new tokens added; `key_mask` says which of these, or of all tokens, exist."""
        old, batch = self.held, tuple(keys.shape[:-3])
        exist = joined_key_mask(None if old is None else old.key_mask, key_mask, batch, self.length, keys.shape[-2])
        if old is not None:
            keys = torch.cat([old.keys, keys], dim=-2)
            values = values if values is None or old.values is None else torch.cat([old.values, values], dim=-2)
        return CachedKeys(keys, values, exist)

    def commit(self, held: CachedKeys, state: Tensor, num_evals: Tensor) -> None:
        """Keep what was attended to, the last token's equilibrium, and the evaluations (*batch, H, N) spent."""
        if not self.fixed:
            self.held = held
        self.num_queries += state.shape[-2]
        spent = num_evals.sum(-1)
        self.num_evals = spent if self.num_evals is None else self.num_evals + spent
        if state.shape[-2] > 0:
            self.state = state[..., -1:, :].detach()

    def start(self, query: Tensor) -> Tensor | None:
        """Return the start of the solves of new tokens, or None for their queries."""
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
            self.held = CachedKeys(keys, values, key_mask)
        self.state, self.num_evals = (None if t is None else t[index] for t in (self.state, self.num_evals))

    def __deepcopy__(self, memo: dict[int, Any]) -> KeyValueCache:
        """A cache with tensors of its own, through which gradients flow as through this one's."""
        clone = memo[id(self)] = copy.copy(self)
        for tensor in self.held or ():
            # `copy.deepcopy` refuses tensors that have a graph.
            if tensor is not None and not tensor.is_leaf:
                memo[id(tensor)] = tensor.clone()
        clone.__dict__.update(copy.deepcopy(vars(self), memo))
        return clone

    def __repr__(self) -> str:
        kind = "fixed" if self.fixed else "growing"
        return f"KeyValueCache({kind}, length={self.length}, warm_start={self.warm_start})"


def joined_key_mask(held: Tensor | None, new: Any, batch: tuple[int, ...], length: int, count: int) -> Tensor | None:
    """Which of `length` tokens of a cache and `count` new ones exist, (*batch, length + count); None for all.

    held: which tokens of the cache exist; new: the user's `key_mask`, of the new tokens or of all.
    """
    if held is None and new is None:
        return None
    total = length + count
    if isinstance(new, Tensor) and new.shape[-1:] == (total,):
        check_key_mask(new, batch, total)
        return new.expand(*batch, total)
    if new is not None:
        check_key_mask(new, batch, count)
    device = next(mask.device for mask in (held, new) if mask is not None)
    every = torch.ones((), dtype=torch.bool, device=device)
    parts = ((held, length), (new, count))
    return torch.cat([(every if mask is None else mask).expand(*batch, n) for mask, n in parts], dim=-1)


def check_cache(cache: Any, owner: object, batch: tuple[int, ...]) -> None:
    """Raise unless the layer `owner` made the cache, and x with leading axes `batch` can attend to what it holds."""
    check_owned(cache, KeyValueCache, owner, batch)
    if cache.fixed and cache.held is not None:
        _validate.check_broadcast("context", cache.held.keys.shape[:-3], batch, "the leading axes of x")


def check_owned(cache: Any, kind: type[Any], owner: object, batch: tuple[int, ...]) -> None:
    """Raise unless the layer `owner` made the cache of this kind, and samples (*batch) can go on with its tokens."""
    if not isinstance(cache, kind):
        received = f"the class {cache.__name__}" if isinstance(cache, type) else type(cache).__name__
        required = f"be None or a {kind.__name__}"
        raise TypeError(_validate.message("cache", required, received, "from layer.new_cache()"))
    remedy = "give every layer its own, from layer.new_cache()"
    _validate.require(
        cache.owner is owner, "cache", "be one that this layer made", "the cache of another layer", remedy
    )
    if cache.num_evals is not None:
        asked = tuple(cache.num_evals.shape[:-1])
        remedy = "make a new one, or reorder this one with cache.select_batch(index)"
        _validate.require(asked == batch, "cache", f"be used with the batch that it holds, {asked}", batch, remedy)
