"""The models of LOOPED: two layers that are repeated, stacks with weights of their own, and how they decode."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor, nn

from implicit_attention import EquilibriumTransformer, Picard
from implicit_attention.layers import Rotary
from implicit_attention.layers.transformer import SoftmaxAttention, TransformerLayer

from ..past_by_hand import PastByHand

WIDTH, HEADS, RATIO = 96, 4, 3.0
RTOL, CAP = 1e-3, 64

Kind = Literal["tied", "stack"]
#: Post-norm layers, in which a state is bounded after every step, or pre-norm ones.
Norm = Literal["post", "pre"]
#: Norms and rates of which the best one is taken: those that came near the best in trials of each kind.
SETTINGS: dict[Kind, tuple[tuple[Norm, float], ...]] = {
    "tied": (("post", 2e-3), ("post", 4e-3)),
    "stack": (("post", 2e-3), ("post", 4e-3), ("pre", 4e-3)),
}


@dataclasses.dataclass(frozen=True)
class Contender:
    """A model that is trained; `layers` with weights of their own, which a tied one repeats."""

    kind: Kind
    layers: int

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.layers} layers"


class Stack(nn.Module):
    """Causal layers with weights of their own, one after the other."""

    def __init__(self, layers: int, norm: Norm) -> None:
        super().__init__()
        attentions = [SoftmaxAttention(WIDTH, HEADS, causal=True, rotary=Rotary()) for _ in range(layers)]
        inner = int(RATIO * WIDTH)
        self.layers = nn.ModuleList(TransformerLayer(WIDTH, each, norm, inner, 0.0) for each in attentions)
        self.norm = nn.LayerNorm(WIDTH) if norm == "pre" else nn.Identity()

    def forward(self, x: Tensor, past: Any = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, past=past)
        normed: Tensor = self.norm(x)
        return normed


class Reader(nn.Module):
    """Characters (B, N) to scores of the next one (B, N, size)."""

    def __init__(self, contender: Contender, size: int, norm: Norm = "post") -> None:
        super().__init__()
        self.loops = contender.kind == "tied"
        self.embed, self.head = nn.Embedding(size, WIDTH), nn.Linear(WIDTH, size)
        self.body = (
            Stack(contender.layers, norm)
            if contender.kind == "stack"
            else EquilibriumTransformer(
                WIDTH,
                HEADS,
                contender.layers,
                norm=norm,
                causal=True,
                rotary=Rotary(),
                mlp_ratio=RATIO,
                solver=Picard(rtol=RTOL, max_steps=CAP),
                on_failure="ignore",
            )
        )

    def forward(self, tokens: Tensor, **options: Any) -> Tensor:
        scores: Tensor = self.head(self.body(self.embed(tokens), **options))
        return scores

    @property
    def repeated(self) -> EquilibriumTransformer:
        """The tied layers."""
        assert isinstance(self.body, EquilibriumTransformer)
        return self.body


class Slots(PastByHand):
    """Decoding by hand: a slot of keys and values for every attention of every step, which later tokens read.

    So token t reads at step j what the tokens before it held at step j, as in a loop over all tokens at once.
    """

    def __init__(self, reader: Reader, capacity: int, steps: int = 1) -> None:
        super().__init__()
        self.reader, self.capacity, self.steps = reader, capacity, steps
        self.slots: list[tuple[Tensor, Tensor]] = []
        self.length = 0

    def __call__(self, token: Tensor) -> Tensor:
        """Scores (B, 1, size) behind the next token (B, 1)."""
        x = self.reader.embed(token)
        self.begin(self.length)
        if self.reader.loops:
            z, block = torch.zeros_like(x), self.reader.repeated.block
            for _ in range(self.steps):
                z = block(z, x, past=self)
        else:
            z = self.reader.body(x, past=self)
        self.length += 1
        scores: Tensor = self.reader.head(z)
        return scores

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of this attention at this step, with those of the token behind them."""
        if self.called == len(self.slots):
            shape = (*keys.shape[:-2], self.capacity, keys.shape[-1])
            self.slots.append((keys.new_zeros(shape), values.new_zeros(shape)))
        held = self.slots[self.called]
        self.called += 1
        for memory, new in zip(held, (keys, values), strict=True):
            memory[..., self.length : self.length + 1, :] = new
        return held[0][..., : self.length + 1, :], held[1][..., : self.length + 1, :]

    @property
    def num_bytes(self) -> int:
        """The bytes of keys and values of the tokens so far."""
        return sum(t[..., : self.length, :].numel() * t.element_size() for pair in self.slots for t in pair)


class OneSlot:
    """Decoding by the library: one slot for every attention, whatever the number of evaluations."""

    def __init__(self, reader: Reader, *, warm_start: bool = False, **options: Any) -> None:
        self.reader, self.options = reader, options
        self.cache = reader.repeated.new_cache(warm_start=warm_start)

    def __call__(self, token: Tensor) -> Tensor:
        scores: Tensor = self.reader(token, cache=self.cache, **self.options)
        return scores

    @property
    def num_bytes(self) -> int:
        return self.cache.num_bytes
