"""Caches of transformers beside a block that is evaluated many times: one slot for the states that it settles in."""

from __future__ import annotations

import contextlib
import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _validate
from .._torch import host_may_look, refusing

#: Layers of a cache that can be read again and again.
KINDS = ("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer")
_WITHOUT = "pass use_cache=False: generation then computes all tokens anew, and is right"


class Slots:
    """An object in the place of a cache, inside a block: each evaluation reads the cache as it was before the call.

    `update` returns the keys of the cache with the new ones behind them, as transformers' own does, and leaves the
    cache as it is. `install` writes the new ones of the last evaluation to the cache. All else is the cache's.

    Args:
        cache: a cache of transformers.
        first: the number of the block's first slot.
        batch: the number of samples.
    """

    def __init__(self, cache: Any, first: int, batch: int) -> None:
        self._cache, self._first, self._batch = cache, first, batch
        #: How many tokens the block's slots hold before the call.
        self.held = int(cache.get_seq_length(first))
        #: The cache's layers as they are before the call; tensors that do not grow are copied when they are read.
        self._before = [copy.copy(layer) for layer in cache.layers]
        self._rows: Tensor | None = None
        #: Layers with buffers to write to in an evaluation without gradients, by slot.
        self._written: dict[tuple[int, torch.dtype], Any] = {}
        #: The state of the last evaluation of all samples, and the keys and values that it gave, by slot.
        self._at: list[Tensor] | None = None
        self._new: dict[int, tuple[Tensor, Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._cache, name)

    def enter(self, state: Any, rows: Tensor) -> None:
        """Begin an evaluation of the block at a state of the samples `rows`."""
        whole = rows.shape[0] == self._batch
        if whole and host_may_look(rows):
            whole = torch.equal(rows, torch.arange(self._batch))
        self._rows = None if whole else rows
        # A copy: solvers may write over their states.
        self._at = [t.detach().clone() for t in pytree.tree_leaves(state)] if whole else None
        self._new = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """The keys and values of the tokens in a slot and of the new ones."""
        self._new[layer_idx] = (keys, values)
        read: tuple[Tensor, Tensor] = self._copy(layer_idx, keys, values).update(keys, values, *args, **options)
        return read

    def _copy(self, index: int, keys: Tensor, values: Tensor) -> Any:
        """A layer to be written to, as it was before the call, for the samples and in the dtype of `keys`."""
        if index >= len(self._before):
            # A cache without layers makes them as they are asked for.
            return self._cache.layer_class_to_replicate()
        layer = copy.copy(self._before[index])
        check_layer(layer)
        empty = self.held == 0 or not layer.is_initialized
        if not hasattr(layer, "max_cache_len"):
            if empty:
                layer.keys, layer.values, layer.is_initialized = None, None, False
            else:
                layer.keys, layer.values = self._own(layer, (keys.dtype, values.dtype), copy=False)
            return layer
        # What an evaluation writes is written over by the next, except where a window moves, or a graph needs it.
        again = self._rows is None and not layer.is_sliding and not torch.is_grad_enabled()
        written = self._written.get((index, keys.dtype)) if again else None
        if written is None:
            written = layer
            if empty:
                written.is_initialized, written.cumulative_length = False, torch.zeros_like(layer.cumulative_length)
                written.lazy_initialization(keys, values)
            else:
                written.keys, written.values = self._own(layer, (keys.dtype, values.dtype), copy=True)
            if again:
                self._written[index, keys.dtype] = written
        layer = copy.copy(written)
        layer.cumulative_length = written.cumulative_length.clone()
        return layer

    def _own(self, layer: Any, dtypes: tuple[torch.dtype, torch.dtype], *, copy: bool) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, for the samples of this evaluation, without their graph."""
        rows = slice(None) if self._rows is None else self._rows
        held = zip((layer.keys, layer.values), dtypes, strict=True)
        keys, values = (t.detach()[rows].to(dtype, copy=copy) for t, dtype in held)
        return keys, values

    def evaluated_at(self, state: Any) -> bool:
        """Whether the last evaluation was of all samples, at this state and in its dtype."""
        leaves = pytree.tree_leaves(state)
        if self._at is None or not self._new:
            return False
        dtypes = {t.dtype for t in (*leaves, *self._at)}
        return len(dtypes) == 1 and all(map(torch.equal, self._at, leaves))

    @torch.no_grad()
    def install(self, lost: Tensor | None = None) -> None:
        """Write the keys and values of the last evaluation to the cache; NaN at tokens (B, N) that are lost."""
        new, self._new, self._at = self._new, {}, None
        self._written.clear()
        for index, pair in sorted(new.items()):
            keys, values = (t.detach() for t in pair)
            if lost is not None:
                keys, values = (t.masked_fill(lost[:, None, :, None], torch.nan) for t in (keys, values))
            self._cache.update(keys, values, index)

    @torch.no_grad()
    def undo(self, length: int, own: set[int]) -> None:
        """Take `length` new tokens back from the slots that are not the block's `own`, after a call that failed.

        A window that has moved past tokens cannot be moved back.
        """
        for index, layer in enumerate(self._cache.layers):
            written = index not in own and type(layer).__name__ in KINDS and layer.is_initialized
            if not written or int(layer.get_seq_length()) != self.held + length:
                continue
            if not hasattr(layer, "max_cache_len"):
                with contextlib.suppress(RuntimeError):
                    layer.crop(-length)
            elif not layer.is_sliding:
                # Numbers that are no tokens are read too, with weights 0.
                for buffer in (layer.keys, layer.values):
                    buffer[:, :, self.held : self.held + length] = 0
                layer.cumulative_length.sub_(length)


def find_cache(args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The cache of transformers among the arguments of a layer, or None."""
    caches = {id(value): value for value in (*args, *options.values()) if is_cache(value)}
    required = "be one cache"
    _validate.require(len(caches) <= 1, "past_key_values", required, f"{len(caches)} of them", _WITHOUT)
    return next(iter(caches.values()), None)


def is_cache(value: Any) -> bool:
    """Whether the value is a cache of transformers, which is not imported for that."""
    return any(k.__name__.endswith("Cache") and k.__module__.startswith("transformers.") for k in type(value).__mro__)


def check_cache_of(cache: Any, slots: set[int]) -> None:
    """Raise unless the block's slots of a cache of transformers can be read again and again."""
    utils: Any = sys.modules.get("transformers.cache_utils")
    own = getattr(utils, "Cache", None)
    required = "be a cache of one list of layers, such as DynamicCache or StaticCache, beside tied layers"
    plain = own is not None and getattr(type(cache), "update", None) is own.update and hasattr(cache, "layers")
    _validate.require(plain, "past_key_values", required, type(cache).__name__, _WITHOUT)
    required = "hold its keys on their device beside tied layers, which read them at every step"
    received, remedy = f"a {type(cache).__name__} that offloads them", "build it with offloading=False"
    _validate.require(not getattr(cache, "offloading", False), "past_key_values", required, received, remedy)
    for index in sorted(slots):
        if index < len(cache.layers):
            check_layer(cache.layers[index])
    needed = max(slots, default=-1) + 1
    fits = needed <= len(cache.layers) or cache.layer_class_to_replicate is not None
    required, remedy = f"have the {needed} layers that tied layers write to", "make it for the config of this model"
    _validate.require(fits, "past_key_values", required, f"{len(cache.layers)} of them", remedy)
    if not cache.layers:
        check_layer(cache.layer_class_to_replicate())


def check_layer(layer: Any) -> None:
    """Raise for a layer of a cache whose state cannot be read again and again."""
    kind = type(layer).__name__
    required = f"have layers of the kinds {', '.join(KINDS)} beside tied layers"
    _validate.require(kind in KINDS, "past_key_values", required, kind, _WITHOUT)


def slots_of(block: nn.Module) -> set[int]:
    """The numbers of the slots that the layers of a block write to."""
    own = getattr(block, "slots", None)
    if own is not None:
        return set(own)
    numbers = (getattr(module, "layer_idx", None) for module in block.modules())
    return {number for number in numbers if isinstance(number, int)}


def first_column(cache: Any, block: nn.Module, length: int) -> int:
    """The column of the first of `length` new tokens in a mask for the layers of a block."""
    if not is_cache(cache):
        return 0
    slot = min(slots_of(block), default=0)
    return int(cache.get_seq_length(slot)) - int(cache.get_mask_sizes(length, slot)[1])


def without_gradient(x: Tensor) -> Tensor:
    """x, whose backward pass raises an error."""
    required = "be empty before a call whose gradient is computed: none flows into the tokens that a cache holds"
    remedy = "call without a cache (use_cache=False), on all tokens"
    return refusing(x, ValueError, _validate.message("past_key_values", required, "a cache that holds tokens", remedy))
