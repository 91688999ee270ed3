"""Latch: one early symbol of a long sequence decides its class, and has to be known at the end.

python docs/examples/latch.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from _common import SOLVE, Data, Plan, arguments, compare
from torch import Tensor, nn

from implicit_attention import ImplicitAttention

LENGTH, CLASSES, DISTRACTORS, DIM = 100, 4, 8, 32
LAST = CLASSES + DISTRACTORS  # the symbol that asks for the answer


class Latch(nn.Module):
    """The last symbol asks all that came before."""

    def __init__(self, max_steps: int | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(LAST + 1, DIM)
        self.attention = ImplicitAttention(DIM, 4, max_steps=max_steps, **SOLVE)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.embed(symbols)
        return self.head(self.attention(x[:, -1:], x).squeeze(1))


def draw(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences (count, length) of distractors with one informative symbol in the first tenth, and its class."""
    symbols = torch.randint(CLASSES, LAST, (count, length), generator=generator)
    classes = torch.arange(count) % CLASSES
    places = torch.randint(length // 10, (count,), generator=generator)
    symbols[torch.arange(count), places] = classes
    symbols[:, -1] = LAST
    return symbols, classes


def make_data(seed: int, train: int) -> Data:
    generator = torch.Generator().manual_seed(seed)
    (symbols, labels), (held, held_labels) = draw(train, LENGTH, generator), draw(1000, LENGTH, generator)
    return Data((symbols,), labels, (held,), held_labels)


@torch.no_grad()
def more(model: nn.Module, data: Data) -> dict[str, float]:
    """Accuracy on sequences ten times as long as those that the model has learned from."""
    symbols, labels = draw(200, 10 * LENGTH, torch.Generator().manual_seed(1000))
    return {"ten times as long": float((model(symbols).argmax(-1) == labels).double().mean())}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    given = arguments(__doc__, argv)
    train, plan = (600, Plan(epochs=6, lr=1e-2)) if given.quick else (1000, Plan(epochs=10, lr=1e-2))
    title = f"latch: one of {CLASSES} symbols in the first tenth of {LENGTH}"
    return compare(title, lambda seed: make_data(seed, train), Latch, plan, given.seeds, more)


if __name__ == "__main__":
    main()
