"""Handwritten digits, their eight rows as tokens, classified by one block of equilibrium attention.

python docs/examples/digits.py
python docs/examples/digits.py --quick --monitor DIR  # writes DIR/watch.csv and DIR/training.png
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from _common import SOLVE, Data, Plan, arguments, compare
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from implicit_attention import ImplicitAttention

DIM, HEADS = 32, 2


class Classifier(nn.Module):
    """Rows, one pre-norm transformer block, and a linear head over all of them."""

    def __init__(self, max_steps: int | None) -> None:
        super().__init__()
        self.embed = nn.Linear(8, DIM)
        self.positions = nn.Parameter(torch.randn(8, DIM) / 10)
        self.attention = ImplicitAttention(DIM, HEADS, max_steps=max_steps, **SOLVE)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(3))
        self.head = nn.Linear(8 * DIM, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images) + self.positions
        x = x + self.attention(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        return self.head(self.norms[2](x).flatten(1))


def data(seed: int) -> Data:
    """Three quarters of the 1797 images of 8 x 8 pixels to learn from, the rest to test."""
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images / 16).float().unflatten(1, (8, 8))
    labels = torch.from_numpy(labels)
    train, test = train_test_split(torch.arange(len(labels)), test_size=0.25, random_state=seed, stratify=labels)
    return Data((images[train],), labels[train], (images[test],), labels[test])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    given = arguments(__doc__, argv, monitor=True)
    plan = Plan(epochs=4 if given.quick else 12)
    title = "digits: one block over the rows of an image"
    return compare(title, data, Classifier, plan, given.seeds, monitor=given.monitor)


if __name__ == "__main__":
    main()
