"""The tokens of a causal block as problems of a solve: all of a call, or those of a window beside settled ones."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import Self

from .. import _validate
from .._torch import along, transforms_active
from ..problem import PerSample, Problem, Shared, TokenOrder, Tokens, counted, picked, writes_to
from .block_map import BlockProblem, stay_where
from .exits import Exits
from .past import KeyValueMemory, Past, rows_at


class Reads(NamedTuple):
    """Which tokens read which, beside causality: masks broadcast to (*batch, heads, N, N).

    Attributes:
        pairs: boolean, True = read; None for all before.
        bias: added to scores.
        exists: which tokens exist, (*batch, N) of a call, or (*batch, M + N) behind M tokens of a cache.
    """

    pairs: Tensor | None = None
    bias: Tensor | None = None
    exists: Tensor | None = None

    def all_pairs(self) -> Tensor | None:
        """Which tokens read which in any head, (*#batch, N, N); None for all before."""
        pairs = self.pairs
        if self.bias is not None:
            finite = self.bias.detach() > -torch.inf
            pairs = finite if pairs is None else pairs & finite
        if pairs is None or pairs.ndim < 2 or pairs.shape[-2] == 1:
            return None
        return pairs.any(-3) if pairs.ndim > 2 else pairs


def takes_past(module: nn.Module) -> bool:
    """Whether a block, or an attention, reads settled tokens by a keyword argument `past`."""
    forward = module.forward
    return _names_past(getattr(forward, "__func__", forward)) and bool(getattr(module, "takes_past", True))


@functools.lru_cache(maxsize=256)
def _names_past(forward: Callable[..., Any]) -> bool:
    try:
        return "past" in inspect.signature(forward).parameters
    except (TypeError, ValueError):  # a forward that is not written in Python
        return False


class CausalProblem(BlockProblem):
    """The fixed points of a causal block on all tokens at once; the state of a token that does not exist is 0."""

    exists: Tensor | None = None
    #: Which tokens exist by a mask: others have an answer at once. Tokens that are lost end with those before them, as
    #: bits depend on how many tokens are left.
    in_mask: Tensor | None = None
    #: Which of the inputs have an entry for each token, on the axis after those of samples.
    of_tokens: tuple[bool, ...] = ()

    # Those of the base, which hold for this map too.
    row_block = 1

    def select(self, index: Tensor) -> Self | None:
        part = BlockProblem.select(self, index)
        if part is not None and self.exists is not None:
            part.exists = picked(self.exists, index, index.ndim - 1)
        if part is not None and self.in_mask is not None:
            part.in_mask = picked(self.in_mask, index, index.ndim - 1)
        return part

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return only_existing(super().fixed_point_map(z), self.exists)

    @torch.no_grad()
    def check_causal(self, z: Tensor) -> None:
        """Raise where an earlier token reads the last one: its state changes, or its part of the input."""
        event = z.ndim - (self.event_ndim - 1)
        count = z.shape[event - 1]
        key = (self.mode, "causal")
        if key in self.checked or transforms_active() or count < 2 or z.numel() == 0:
            return
        last = (torch.arange(count, device=z.device) == count - 1).expand(z.shape[:event])
        others = TokensTogether(self.apart())
        mapped = others.fixed_point_map(z)
        changed = [own and t.is_floating_point() for t, own in zip(self.inputs, self.of_tokens, strict=True)]
        again = copy.copy(self)
        again.inputs = tuple(
            torch.cat([t.narrow(event - 1, 0, count - 1), t.narrow(event - 1, count - 1, 1) + 1.0], event - 1)
            if own
            else t
            for t, own in zip(self.inputs, changed, strict=True)
        )
        for problem in (others, TokensTogether(again.apart())):
            if not stay_where(problem, last, ~last, z, mapped):
                required = "let token t read tokens <= t alone with causal=True"
                received = f"{self._name()}, in which the last token changes earlier ones"
                remedy = "mask later tokens, wrap arguments of whole samples in PerSample, or use causal=False"
                raise ValueError(_validate.message("block", required, received, remedy))
        self.checked.add(key)


class TokensTogether(Tokens):
    """The tokens of a causal problem, all of which stay in the work."""

    #: Which of them rules have ended.
    exits: Exits | None = None
    #: Which of them exist by a mask, (*batch, K); None for all.
    exists: Tensor | None = None
    #: The places of the tokens that are left, (*batch, K); None for all.
    index: Tensor | None = None

    def __init__(self, problem: Problem, exits: Exits | None = None) -> None:
        self.inner, self.exits, self.exists = problem, exits, getattr(problem, "in_mask", None)
        self.event_ndim, self.mixes = problem.event_ndim - 1, problem.mixes
        self.token_order = problem.token_order or TokenOrder()

    def settled_of(
        self, active: Tensor, converged: Tensor | None, broken: Tensor, point: Any
    ) -> tuple[Tensor | None, Tensor]:
        if self.exists is not None and converged is not None:
            # Tokens that do not exist have an answer at once, and keep nobody waiting.
            absent = active & ~self.exists
            settled, broken = self._settled_of(
                active & self.exists, converged & self.exists, broken & self.exists, point
            )
            return absent if settled is None else settled | absent, broken & self.exists
        return self._settled_of(active, converged, broken, point)

    def _settled_of(
        self, active: Tensor, converged: Tensor | None, broken: Tensor, point: Any
    ) -> tuple[Tensor | None, Tensor]:
        if self.exits is None:
            return super().settled_of(active, converged, broken, point)
        broken = active & self.behind(broken)
        # A rule ends a token whatever its past does.
        ended, small = self.exits.end(active & ~broken, converged, point, self.index)
        settled = small & ~self.behind(active & ~(small | ended))
        self.exits.mark_behind(settled, self.behind(self.exits.ended_at(self.index)), self.index)
        return (ended | settled) & ~broken, broken

    def behind(self, tokens: Tensor) -> Tensor:
        return self.token_order.behind(tokens)


class TokenWindow:
    """Some tokens of a call, evaluated beside the keys and values of all tokens before them.

    Args:
        problem: of all tokens of the call.
        start: the states of all tokens of the call, (*batch, N, *event).
        reads: which tokens read which.
        memory: for keys and values.
        before: the number of tokens before those of the call.
        begin, end: the tokens of the call.
        index: some of them, (*batch, K), counted from `begin`; None for all.
    """

    def __init__(
        self,
        problem: CausalProblem,
        start: Tensor,
        reads: Reads | None,
        memory: KeyValueMemory,
        before: int,
        begin: int,
        end: int,
        index: Tensor | None = None,
    ) -> None:
        self.problem = problem
        self.made_of = (problem, start, reads, memory, before, begin, end)
        batch = start.shape[: start.ndim - problem.event_ndim]
        self.index = index
        self.function = problem.function
        device = self.function.layout.device
        own = torch.arange(begin, end, device=device) if index is None else begin + index

        def rows(tensor: Tensor, axis: int) -> Tensor:
            if index is None:
                return tensor.narrow(axis, begin, end - begin)
            return rows_at(tensor, own, axis)

        parts = zip(problem.inputs, problem.of_tokens, strict=True)
        arguments = [counted(rows(t, len(batch) - t.ndim)) if of_tokens else t for t, of_tokens in parts]
        filled = self.function.frame.filled(tuple(arguments))
        # The masks of `reads` are those of the past.
        self.arguments = filled if reads is None else filled[:1]
        self.tensors = [leaf for leaf in pytree.tree_leaves(self.arguments) if isinstance(leaf, Tensor)]
        given = (problem.exists, problem.in_mask)
        self.exists, self.in_mask = (None if t is None else rows(t, -1) for t in given)
        positions, mask, is_causal = own + before if before else own, None, False
        plain = index is None and (reads is None or all(part is None for part in reads))
        if plain and before + begin == 0 and end > 1:
            is_causal = True
        elif not (plain and end - begin == 1):
            mask = additive_mask(reads or Reads(), own, positions, before + end, start.dtype)
        first = before + begin if index is None else None
        self.past = Past(memory, positions, before + end, mask, is_causal=is_causal, first=first)
        self.block = functools.partial(self.function.block, past=self.past)

    def at(self, index: Tensor) -> TokenWindow:
        """The window of some of its tokens, (*batch, K)."""
        return TokenWindow(*self.made_of, index)

    def __call__(self, z: Tensor) -> Tensor:
        """f of the states (*batch, K, *event) of these tokens."""
        function = self.function
        state = function.layout.unpack(z)
        self.past.begin()
        written = [writes_to(tensor) for tensor in self.tensors]
        with function.precision():
            result = function.draws.evaluate(self.block, state, *self.arguments)
        self.past.end()
        if written != [writes_to(tensor) for tensor in self.tensors]:
            function._refuse_writes([False])
        cast = function.autocast is not None
        mapped = function.layout.pack(function.layout.check_output(function.__name__, result, state, cast=cast))
        return only_existing(mapped, self.exists)


class TokensInWindow(TokensTogether):
    """The tokens of a window; those that have ended leave the work, and others read their keys."""

    row_block = 1

    def __init__(self, window: TokenWindow, order: TokenOrder, event_ndim: int, exits: Exits | None = None) -> None:
        self.window, self.token_order, self.event_ndim = window, order, event_ndim
        self.mixes = window.problem.mixes
        self.exits, self.index, self.exists = exits, window.index, window.in_mask

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return self.window(z)

    def check_undeclared(self, z: Tensor) -> None:
        """Nothing is differentiated here."""

    def select(self, index: Tensor) -> Self:
        order = self.token_order.restricted(index)
        return type(self)(self.window.at(index), order, self.event_ndim, self.exits)


class OneToken(Problem):
    """The next token of every sample."""

    separates = False

    def __init__(self, window: TokenWindow, event_ndim: int) -> None:
        self.window, self.event_ndim = window, event_ndim

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return self.window(z)


def only_existing(z: Tensor, exists: Tensor | None) -> Tensor:
    """States (*batch, N, *event), 0 for tokens that do not exist."""
    if exists is None:
        return z
    return torch.where(along(exists, z), z, 0.0)


def kinds_of(x: Any, args: tuple[Any, ...], batch: torch.Size, count: int) -> list[bool | None]:
    """Which tensors among the arguments of a block, in their order, have an entry for each token; None: unclear.

    Tensors of x have where their shapes say so, other arguments where they are not wrapped. With as many samples as
    tokens, or without an axis of samples, the shapes of others say nothing.
    """
    kinds: list[bool | None] = []
    for place, argument in enumerate((x, *args)):
        wrapped = pytree.tree_leaves(argument, is_leaf=lambda part: isinstance(part, PerSample | Shared))
        for leaf in wrapped:
            if isinstance(leaf, PerSample | Shared):
                kinds += [False for part in pytree.tree_leaves(leaf.value) if isinstance(part, Tensor)]
            elif isinstance(leaf, Tensor):
                fits = per_token(leaf, batch, count)
                unclear = place > 0 and fits and (not batch or batch[-1] == count)
                kinds.append(None if unclear else fits)
    return kinds


def per_token(tensor: Tensor, batch: torch.Size, count: int) -> bool:
    """Whether a tensor has an entry for each token, (*batch, N, ...)."""
    return tensor.ndim > len(batch) and tensor.shape[: len(batch) + 1] == (*batch, count)


def additive_mask(reads: Reads, own: Tensor, positions: Tensor, total: int, dtype: torch.dtype) -> Tensor:
    """The mask of tokens at `positions`, the numbers `own` of a call, for all keys up to `total`: 0 or -inf.

    A token that does not exist reads itself, so that it gives numbers that nobody reads, and no NaN.
    """
    keys = torch.arange(total, device=own.device)
    before, itself = keys <= positions[..., None], keys == positions[..., None]
    if own.ndim > 1:
        before, itself = before.unsqueeze(-3), itself.unsqueeze(-3)
    if reads.pairs is not None:
        before = before & rows_of_pairs(reads.pairs, own)[..., :total]
    if reads.exists is not None:
        absent = ~rows_at(reads.exists, positions, -1)[..., None, :, None]
        before = before & reads.exists[..., None, None, :total] | itself & absent
    mask = torch.zeros(before.shape, dtype=dtype, device=own.device).masked_fill(~before, -torch.inf)
    return mask if reads.bias is None else mask + rows_of_pairs(reads.bias, own)[..., :total].to(dtype)


def rows_of_pairs(pairs: Tensor, own: Tensor) -> Tensor:
    """The rows `own` of masks that broadcast to (*batch, heads, N, N)."""
    if pairs.ndim < 2 or pairs.shape[-2] == 1:
        return pairs
    if own.ndim == 1:
        return pairs.index_select(-2, own)
    return rows_at(pairs.reshape((1,) * (own.ndim + 2 - pairs.ndim) + pairs.shape), own, -2)
