"""Calls of a block whose states are tokens: tokens that do not exist, that are lost, or that a cache holds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _validate
from .._torch import is_fake, transforms_active, uncompiled
from ..problem import PerSample
from ..solution import Record, SolveReport
from .block import Equilibrium
from .causal_tokens import Lost
from .slots import Slots, check_cache_of, first_column, slots_of, without_gradient


class StepTokens(NamedTuple):
    """The tokens of an evaluation: which exist, of which samples they are, and where their keys go.

    Attributes:
        absent: (B, N), those whose state is 0, and stays 0; None for none.
        rows: (B,), the numbers of the samples, of which an evaluation may have fewer; None without a cache.
        slots: the cache, as the block may write to it; None without one.
    """

    absent: Any = None
    rows: Any = None
    slots: Slots | None = None

    def enter(self, state: Any) -> None:
        """Begin an evaluation at this state."""
        if self.slots is not None:
            self.slots.enter(state, self.rows)

    def leave(self, state: Any) -> Any:
        """The next state, which is 0 at absent tokens."""
        return state if self.absent is None else _at(self.absent, state)


#: All tokens exist, and no cache holds any.
EVERY = StepTokens()


def _at(tokens: Tensor, states: Any, value: float = 0.0) -> Any:
    """States, (B, N, D) each, with this value at these tokens (B, N)."""
    return pytree.tree_map(lambda z: z.masked_fill(tokens[..., None], value), states)


def injection(dim: int, like: Tensor) -> nn.Linear:
    """W, by which a step reads its input, 0 at first, on the device and in the dtype of `like`."""
    linear = nn.Linear(dim, dim, bias=False, device=like.device, dtype=like.dtype)
    nn.init.zeros_(linear.weight)
    return linear


def _may_hold(tokens: Tensor) -> bool:
    """Whether any token may be one of these. The host looks, as a solve makes it wait in any case."""
    if torch.compiler.is_compiling() or transforms_active() or is_fake(tokens):
        return True
    return bool(tokens.any())


@dataclasses.dataclass(frozen=True)
class TiedCall:
    """A call of tied layers.

    Attributes:
        cache: of transformers, or None.
        absent: (B, N), tokens that do not exist, or None.
        passes: how often an evaluation writes to each slot.
    """

    cache: Any = None
    absent: Tensor | None = None
    passes: int = 1


class TokenEquilibrium(Equilibrium):
    """An `Equilibrium` of tokens (B, N, D), which may write to a cache. Not for blocks of other states.

    Its block takes (z, x, *args, tokens), calls `tokens.enter(z)` at first, and returns `tokens.leave(...)`.

    Attributes:
        causal: whether no token reads later ones.
    """

    def __init__(self, block: Any, *, causal: bool, **options: Any) -> None:
        super().__init__(block, event_ndim=2, start="input", causal=causal, **options)
        self._lost: Tensor | None = None

    def settled(self, x: Any, call: TiedCall, args: Callable[[Any], tuple[Any, ...]]) -> Any:
        """The state that the block settles in; the cache holds its keys then.

        Args:
            x: (B, N, D), or a tuple of such tensors, where the state starts.
            call: what belongs to this call.
            args: the further arguments of the block, given what stands in the place of the cache.
        """
        if call.cache is None:
            return self._on_tokens(x, call, args, None)
        return self._beside_cache(x, call, args)

    @uncompiled
    def _beside_cache(self, x: Any, call: TiedCall, args: Callable[[Any], tuple[Any, ...]]) -> Any:
        cache, of_block = call.cache, slots_of(self.block)
        check_cache_of(cache, of_block)
        first: Tensor = pytree.tree_leaves(x)[0]
        slots = Slots(cache, min(of_block, default=0), first.shape[0])
        steps = self.steps if isinstance(self.steps, int) or self.training else None
        # One step of one pass reads what an evaluation of all tokens reads: keys of the states where they start.
        once = steps == 1 and call.passes == 1
        required = "be empty for layers that make some steps: each would read earlier tokens as they were at that step"
        remedy = "solve (steps=None), take one step, or pass use_cache=False"
        fits = slots.held == 0 or steps is None or once
        _validate.require(fits, "past_key_values", required, f"{slots.held} tokens beside steps={steps}", remedy)
        try:
            state = self._on_tokens(x, call, args, slots, at_start=once)
        except Exception:
            slots.undo(first.shape[1], of_block)
            raise
        if slots.held and torch.is_grad_enabled():
            return pytree.tree_map(lambda z: without_gradient(z) if z.requires_grad else z, state)
        return state

    def _on_tokens(
        self,
        x: Any,
        call: TiedCall,
        args: Callable[[Any], tuple[Any, ...]],
        slots: Slots | None,
        at_start: bool = False,
    ) -> Any:
        absent, lost = call.absent, None
        if absent is not None:
            x = _at(absent, x)
        own = functools.reduce(torch.logical_or, (~t.detach().isfinite().all(-1) for t in pytree.tree_leaves(x)))
        if _may_hold(own):
            # In products with weights 0 such a token would spoil those before it.
            x, lost = _at(own, x), self._behind(own, absent)
            absent = own if absent is None else own | absent
        rows = None if slots is None else torch.arange(own.shape[0], device=own.device)
        own_of = [None if t is None else PerSample(t) for t in (absent, rows)]
        wrapped = StepTokens(own_of[0], own_of[1], slots)
        self._lost = lost
        try:
            state = self(x, *args(slots), wrapped)
        finally:
            self._lost = None
        if slots is not None:
            goal = x if at_start else state
            if not slots.evaluated_at(goal):
                self._evaluate(goal, x, args(slots), StepTokens(absent, rows, slots))
            slots.install(lost)
        return state if lost is None else _at(lost, state, torch.nan)

    @torch.no_grad()
    def _evaluate(self, state: Any, x: Any, args: tuple[Any, ...], tokens: StepTokens) -> None:
        """Evaluate the block once, for the keys that it writes."""
        # Dropout must not move the generators that the next call draws from.
        device: torch.device = pytree.tree_leaves(x)[0].device
        devices, kind = ([], "cuda") if device.type == "cpu" else ([device], device.type)
        with torch.random.fork_rng(devices, enabled=self.training, device_type=kind):
            self.block(state, x, *args, tokens)

    def _behind(self, own: Tensor, absent: Tensor | None) -> Tensor:
        """The tokens that are not finite, and those that may read them."""
        lost = own.cumsum(-1) > 0 if self.causal else own.any(-1, keepdim=True).expand_as(own)
        return lost if absent is None else lost & ~absent

    def _remember(self, report: SolveReport | Record | None, *, eager: bool = False) -> None:
        if self._lost is not None and isinstance(report, SolveReport):
            # A problem is a token, or a sample.
            lost = Lost(self._lost[..., None] if report.status.ndim == 2 else self._lost)
            report = lost.report(report, self._on_failure(self.options), "a solve of tied layers")
        super()._remember(report, eager=eager)


def absent_tokens(mask: Any, x: Tensor, cache: Any, block: nn.Module) -> Tensor | None:
    """The tokens of x, (B, N), that do not exist by a mask of transformers: they do not read themselves.

    Args:
        mask: (B, H, N, M), boolean (True: reads) or added to scores; (B, M), which tokens exist; or another object,
            which says nothing.
        x: (B, N, D).
        cache: of transformers, or None.
        block: whose layers write to the cache.
    """
    batch, length = x.shape[:2]
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4) or mask.shape[-1] < length:
        return None
    if mask.ndim == 2:
        return None if mask.is_floating_point() else (mask[:, -length:] == 0).expand(batch, length)
    own = mask[..., (begin := first_column(cache, block, length)) : begin + length]
    if own.shape[-1] != length or own.shape[-2] not in (1, length):
        return None
    own = own.diagonal(dim1=-2, dim2=-1) if own.shape[-2] == length else own[..., 0, :]
    absent = own <= torch.finfo(own.dtype).min / 2 if own.is_floating_point() else own == 0
    return absent.all(1).expand(batch, length)
