"""Multiple-instance learning: does a bag of digit images hold a nine? Only the bag has a label.

python docs/examples/mil_digits.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from _common import SOLVE, Data, Plan, arguments, compare
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from implicit_attention import AttentionPooling

DIM, HEADS, LARGEST, WANTED = 32, 2, 12, 9


class BagClassifier(nn.Module):
    """Features of every image, pooled by a learned query that settles among them."""

    def __init__(self, max_steps: int | None) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, DIM), nn.LayerNorm(DIM))
        self.pool = AttentionPooling(DIM, HEADS, max_steps=max_steps, **SOLVE)
        self.head = nn.Linear(DIM, 2)

    def forward(self, bags: Tensor, exists: Tensor) -> Tensor:
        return self.head(self.pool(self.features(bags), key_mask=exists).squeeze(-2))


def make_bags(count: int, images: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Bags (count, LARGEST, 64) of 4 to LARGEST images, which exist, and the label: every other bag holds one nine."""
    nines, others = images[labels == WANTED], images[labels != WANTED]
    bags = others[torch.randint(len(others), (count, LARGEST), generator=generator)]
    bags[::2, 0] = nines[torch.randint(len(nines), (len(bags[::2]),), generator=generator)]
    sizes = torch.randint(4, LARGEST + 1, (count, 1), generator=generator)
    exists = torch.arange(LARGEST) < sizes
    return torch.where(exists[..., None], bags, 0.0), exists, torch.arange(count) % 2 == 0


def make_data(seed: int, train: int, test: int = 400) -> Data:
    """Bags to learn from and bags to test, of different images."""
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    halves = train_test_split(torch.arange(len(labels)), test_size=0.5, random_state=seed, stratify=labels)
    generator = torch.Generator().manual_seed(seed)
    made = []
    for count, half in zip((train, test), halves, strict=True):
        *bags, positive = make_bags(count, images[half].float() / 16, labels[half], generator)
        made += [tuple(bags), positive.long()]
    return Data(*made)


@torch.no_grad()
def more(model: nn.Module, data: Data) -> dict[str, float]:
    """AUC, and how often the image without which a positive bag looks least positive is the nine."""
    bags, exists = data.test
    logits = model(bags, exists)
    scores = logits[:, 1] - logits[:, 0]
    without = []
    for place in range(LARGEST):
        left = exists & (torch.arange(LARGEST) != place)
        logits = model(bags, left)
        without.append(torch.where(exists[:, place], logits[:, 1] - logits[:, 0], torch.inf))
    blamed = torch.stack(without, dim=-1).argmin(-1)
    positive = data.test_labels == 1
    return {
        "AUC": float(roc_auc_score(data.test_labels, scores)),
        "finds the nine": float((blamed == 0)[positive].double().mean()),
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    given = arguments(__doc__, argv)
    train, plan = (300, Plan(epochs=10, lr=1e-2, batch=32)) if given.quick else (1500, Plan(epochs=12))
    title = f"mil_digits: is there a {WANTED} among 4 to {LARGEST} digits?"
    return compare(title, lambda seed: make_data(seed, train), BagClassifier, plan, given.seeds, more)


if __name__ == "__main__":
    main()
