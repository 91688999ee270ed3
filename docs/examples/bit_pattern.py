"""Bit patterns: a bag of random bit vectors is positive if one of them is one of four secret patterns.

python docs/examples/bit_pattern.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from _common import SOLVE, Data, Plan, arguments, compare
from torch import Tensor, nn

from implicit_attention import AttentionPooling

BITS, INSTANCES, SECRETS, DIM = 16, 16, 4, 32


class BagClassifier(nn.Module):
    """Features of every vector, pooled by learned queries that settle among them."""

    def __init__(self, max_steps: int | None) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(BITS, 64), nn.GELU(), nn.Linear(64, DIM))
        self.pool = AttentionPooling(DIM, 2, queries=SECRETS, max_steps=max_steps, **SOLVE)
        self.head = nn.Linear(SECRETS * DIM, 2)

    def forward(self, bags: Tensor) -> Tensor:
        return self.head(self.pool(self.features(bags)).flatten(1))


def make_data(seed: int, train: int, test: int = 1000) -> Data:
    """Bags (count, INSTANCES, BITS) of +-1; every other one holds a secret pattern, at a random place."""
    generator = torch.Generator().manual_seed(seed)
    powers = 2 ** torch.arange(BITS)
    # Every vector is a number: the secret ones are drawn first, and the others never are one of them.
    numbers = torch.randperm(2**BITS, generator=generator)
    secrets, others = numbers[:SECRETS], numbers[SECRETS:]

    def draw(count: int) -> tuple[Tensor, Tensor]:
        bags = others[torch.randint(len(others), (count, INSTANCES), generator=generator)]
        positive = torch.arange(count) % 2
        place = torch.randint(INSTANCES, (count,), generator=generator)
        secret = secrets[torch.randint(SECRETS, (count,), generator=generator)]
        rows = torch.arange(count)
        bags[rows, place] = torch.where(positive == 1, secret, bags[rows, place])
        return ((bags[..., None] & powers) > 0).float() * 2 - 1, positive

    (bags, labels), (test_bags, test_labels) = draw(train), draw(test)
    return Data((bags,), labels, (test_bags,), test_labels)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    given = arguments(__doc__, argv)
    train, plan = (1000, Plan(epochs=6)) if given.quick else (2000, Plan(epochs=10))
    title = f"bit_pattern: is one of {SECRETS} secret patterns among {INSTANCES} vectors of {BITS} bits?"
    return compare(title, lambda seed: make_data(seed, train), BagClassifier, plan, given.seeds)


if __name__ == "__main__":
    main()
