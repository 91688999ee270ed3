"""Keys and values of settled tokens: what a causal block reads beside its own tokens, and what decoding keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _validate
from ..solution import Status

#: A cache that is full grows by this factor.
GROWTH = 2


class KeysAndValues(NamedTuple):
    """Memory for the keys and values of one attention, (*batch, heads, capacity, D) each."""

    keys: Tensor
    values: Tensor


class Past:
    """The tokens of one evaluation of a causal block, with the keys and values of those that have settled before.

    A block takes it as the keyword argument `past`, which is None where the block gets all tokens at once. Each
    attention of the block then calls `update` once, at every evaluation in the same order, and reads what it returns.

    The first call of a layer with two tokens or more that uses `past` tries whether each half of the tokens has the
    same image beside a memory of those before as among all, and raises ValueError if not. Tokens may leave each other
    alone: such a block need not call `update`, and is to be called with two tokens first. Nothing is tried where calls
    have one token, where the block draws random numbers, and in transforms; weights of 0 hide what they multiply, and
    so does rounding (0.5 % of an image in float32, 20 % in bfloat16).

    Attributes:
        positions: of the tokens of this evaluation, (n,) or (*batch, n).
        mask: additive, broadcasts to (*batch, heads, n, M); None where `is_causal` says it all.
        is_causal: whether the tokens are all there are, so that each reads those before it and itself.

    Examples:
        >>> import torch
        >>> import torch.nn.functional as F
        >>> from torch import nn
        >>> from implicit_attention import Equilibrium
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.read, self.norm = nn.Linear(8, 24), nn.LayerNorm(8)
        ...     def forward(self, z, x, past=None):
        ...         query, key, value = self.read(z + x).unsqueeze(-3).chunk(3, -1)
        ...         how = {"is_causal": True}
        ...         if past is not None:
        ...             key, value = past.update(key, value)
        ...             how = {"attn_mask": past.mask, "is_causal": past.is_causal}
        ...         h = F.scaled_dot_product_attention(query, key, value, **how)
        ...         return self.norm(x + 0.3 * h.squeeze(-3))
        >>> layer, x = Equilibrium(Block(), causal=True), torch.randn(2, 5, 8)
        >>> cache = layer.new_cache()
        >>> tokens = [layer(x[:, i : i + 1], cache=cache) for i in range(5)]
        >>> torch.allclose(torch.cat(tokens, dim=1), layer(x), atol=1e-2)
        True

    Not for blocks that read earlier tokens otherwise, such as convolutions: those are solved on all tokens at once.
    """

    def __init__(
        self,
        memory: KeyValueMemory,
        index: Tensor,
        end: int,
        mask: Tensor | None,
        *,
        is_causal: bool,
        first: int | None,
    ) -> None:
        self.positions, self.mask, self.is_causal = index, mask, is_causal
        self._memory, self._end = memory, end
        #: Where the tokens begin, if they follow each other and are the same ones in all samples.
        self._first = first
        self._called = 0
        #: For each attention the memory that is written, and that which is read.
        self._places: list[tuple[KeysAndValues, KeysAndValues]] = []
        self._once: dict[Any, Any] = {}

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the result of the first call of `make` for this key, for numbers that all evaluations share."""
        if key not in self._once:
            self._once[key] = make()
        return self._once[key]

    def begin(self) -> None:
        """Begin an evaluation, in which the first attention is to call `update` first."""
        self._called = 0

    def end(self) -> None:
        """End an evaluation; raise where `update` was called more or less often than at the first one."""
        memory, called = self._memory, self._called
        if memory.attentions is None:
            memory.attentions = called
        elif called != memory.attentions:
            required = f"call `past.update` as often at every evaluation, {memory.attentions} times"
            remedy = "let every attention of the block call it once, in the same order"
            raise ValueError(_validate.message("block", required, f"{called} calls", remedy))

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all tokens up to the last one, with those of these tokens in their places.

        Args:
            keys: (*batch, heads, n, D).
            values: (*batch, heads, n, E).

        Returns:
            (*batch, heads, M, D) and (*batch, heads, M, E).
        """
        number = self._called
        self._called += 1
        if number == len(self._places):
            self._places.append(self._place(self._memory.of(number, keys, values), keys, values))
        places, every = self._places[number]
        if self._first is not None and places.keys.shape == keys.shape and places.values.shape == values.shape:
            places.keys.copy_(keys)
            places.values.copy_(values)
            return every
        self._memory.of(number, keys, values)
        for name, place, new in zip(("keys", "values"), places, (keys, values), strict=True):
            count, required = self.positions.shape[-1], "have an entry for each token of the evaluation"
            _validate.require(new.shape[-2] == count, name, f"{required}, {count}", f"shape {tuple(new.shape)}")
            place.scatter_(-2, self.positions[..., None, :, None].expand(new.shape), new)
        return every

    def _place(self, held: KeysAndValues, keys: Tensor, values: Tensor) -> tuple[KeysAndValues, KeysAndValues]:
        """The memory that these tokens write to, and that of all tokens up to the last of them."""
        every = KeysAndValues(*(memory.narrow(-2, 0, self._end) for memory in held))
        if self._first is None:
            return held, every
        return KeysAndValues(*(memory.narrow(-2, self._first, keys.shape[-2]) for memory in held)), every


class KeyValueMemory:
    """Memory for the keys and values of all attentions of a block, made as they are first written.

    Args:
        capacity: number of tokens.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: list[KeysAndValues] = []
        #: How many attentions have called `update` at the first evaluation; None before it.
        self.attentions: int | None = None

    def of(self, attention: int, keys: Tensor, values: Tensor) -> KeysAndValues:
        """The memory of an attention, by its number within an evaluation, for such keys and values."""
        if attention == len(self.held):
            self.held.append(KeysAndValues(*(self._made(t, self.capacity) for t in (keys, values))))
        held = self.held[attention]
        for name, memory, new in zip(("keys", "values"), held, (keys, values), strict=True):
            kind = (*memory.shape[:-2], memory.shape[-1], memory.dtype, memory.device)
            received = (*new.shape[:-2], new.shape[-1], new.dtype, new.device)
            required = f"be of one kind at every evaluation: (*batch, heads, D), dtype and device {kind}"
            remedy = "let every attention of the block call past.update once, in the same order"
            _validate.require(kind == received, name, required, received, remedy)
        return held

    def grow(self, count: int) -> None:
        """Make room for `count` tokens."""
        if count <= self.capacity:
            return
        old, self.capacity = self.capacity, max(count, GROWTH * self.capacity)
        for i, held in enumerate(self.held):
            grown = KeysAndValues(*(self._made(t, self.capacity) for t in held))
            for new, before in zip(grown, held, strict=True):
                new.narrow(-2, 0, old).copy_(before)
            self.held[i] = grown

    @staticmethod
    def _made(like: Tensor, capacity: int) -> Tensor:
        # Memory of inference mode could not be written to outside of it. Zeros, as 0 * NaN is NaN.
        with torch.inference_mode(False):
            return torch.zeros((*like.shape[:-2], capacity, like.shape[-1]), dtype=like.dtype, device=like.device)

    def select_batch(self, index: Tensor) -> None:
        with torch.inference_mode(False):
            self.held = [KeysAndValues(*(t[index] for t in held)) for held in self.held]

    def __deepcopy__(self, memo: dict[int, Any]) -> KeyValueMemory:
        clone = memo[id(self)] = KeyValueMemory(self.capacity)
        clone.attentions = self.attentions
        with torch.inference_mode(False):
            clone.held = [KeysAndValues(*(t.clone() for t in held)) for held in self.held]
        return clone


class BlockCache:
    """Keys and values of settled tokens, one set for each attention of a block; made by `Equilibrium.new_cache`.

    However many evaluations a token takes, its keys and values are kept once, those of the state that it settled in. A
    cache grows with every call of its layer that it is passed to. A call that raises leaves it unchanged.

    Args:
        owner: the object that identifies its layer.
        warm_start: start the tokens of a call at the last state of the cache.

    Attributes:
        length: the number of tokens in the cache.
        exists: which of them exist, (*batch, length), or None for all.
        status: codes of `Status`, (*batch, length); a token after one that has not settled does not count as settled.
        num_evals: evaluations of the block for each token, (*batch, length).

    Examples:
        >>> import torch
        >>> from implicit_attention import EquilibriumTransformer
        >>> model, x = EquilibriumTransformer(16, heads=2, causal=True).eval(), torch.randn(2, 6, 16)
        >>> cache = model.new_cache()
        >>> first, rest = model(x[:, :4], cache=cache, on_failure="ignore"), cache.length
        >>> token = model(x[:, 4:5], cache=cache, on_failure="ignore")
        >>> token.shape, rest, cache.length
        (torch.Size([2, 1, 16]), 4, 5)
        >>> cache.rewind(4)
        >>> cache.length
        4

    Not for training: the states of calls with a cache have no gradient.
    """

    def __init__(self, owner: object, *, warm_start: bool = False) -> None:
        _validate.check_instance("warm_start", warm_start, bool, "be True or False")
        self.owner, self.warm_start = owner, warm_start
        self.memory = KeyValueMemory(0)
        self.length = 0
        self.exists: Tensor | None = None
        self.status: Tensor | None = None
        self.num_evals: Tensor | None = None
        #: Whether no token is known to have failed.
        self._all_well = True
        #: The state of the last token, (*batch, 1, n), as one tensor.
        self.state: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes of keys and values of the tokens in the cache."""
        held = (t for pair in self.memory.held for t in pair)
        return sum(t.narrow(-2, 0, self.length).numel() * t.element_size() for t in held)

    @property
    def failed(self) -> Tensor | None:
        """The worst status of the tokens so far, (*batch, 1), where one has failed; None where none has."""
        if self._all_well or self.status is None or self.length == 0:
            return None
        return self.status.amax(-1, keepdim=True)

    def commit(self, exists: Tensor | None, status: Tensor, num_evals: Tensor, value: Tensor) -> None:
        """Keep new tokens, whose keys and values are in the memory, with their evidence (*batch, n) and states."""
        self.length += status.shape[-1]
        self._all_well = self._all_well and not bool((status > Status.UNSTABLE).any())
        self.exists = exists
        self.status = status if self.status is None else torch.cat([self.status, status], dim=-1)
        self.num_evals = num_evals if self.num_evals is None else torch.cat([self.num_evals, num_evals], dim=-1)
        if value.shape[-2]:
            self.state = value[..., -1:, :].detach()

    def rewind(self, length: int) -> None:
        """Forget all tokens but the first `length`; the next token then starts as the layer says."""
        _validate.check_integer("length", length, low=0)
        _validate.require(length <= self.length, "length", f"be at most {self.length}, the cache's", length)
        if length == self.length:
            return
        self.length, self.state = length, None
        if length == 0:
            # The next call may have another batch.
            self.exists = self.status = self.num_evals = None
            self._all_well = True
            return
        self.exists, self.status, self.num_evals = (
            None if t is None else t[..., :length] for t in (self.exists, self.status, self.num_evals)
        )

    def select_batch(self, index: Tensor) -> None:
        """Keep the sequences `index` of the first axis, in that order, as beam search does."""
        if self.status is None:
            return
        _validate.require(self.status.ndim > 1, "cache", "hold a batch to select from", "one sequence")
        index = torch.as_tensor(index, device=self.status.device)
        _validate.require(index.ndim == 1, "index", "have one axis", f"shape {tuple(index.shape)}")
        self.memory.select_batch(index)
        self.exists, self.status, self.num_evals, self.state = (
            None if t is None else t[index] for t in (self.exists, self.status, self.num_evals, self.state)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockCache:
        """A cache of the same layer with memory of its own."""
        clone = memo[id(self)] = copy.copy(self)
        clone.__dict__.update({k: v if k == "owner" else copy.deepcopy(v, memo) for k, v in vars(self).items()})
        return clone

    def __repr__(self) -> str:
        return f"BlockCache(length={self.length}, attentions={len(self.memory.held)}, warm_start={self.warm_start})"


def rows_at(tensor: Tensor, index: Tensor, axis: int) -> Tensor:
    """The entries `index`, (n,) or (*batch, n), of an axis < 0 of a tensor (..., N, ...)."""
    if index.ndim == 1:
        return tensor.index_select(axis, index)
    trailing, lead = -1 - axis, index.shape[:-1]
    if tensor.ndim + axis < len(lead):
        tensor = tensor.expand(*lead, *tensor.shape[axis:])
    between = tensor.ndim - trailing - 1 - len(lead)
    shaped = index.reshape(*lead, *(1,) * between, index.shape[-1], *(1,) * trailing)
    shape = list(tensor.shape)
    shape[: len(lead)], shape[axis] = lead, index.shape[-1]
    return tensor.expand(*lead, *tensor.shape[len(lead) :]).gather(axis, shaped.expand(shape))
