"""A causal Energy Transformer on the help texts that come with Python, beside counts of characters."""

from __future__ import annotations

import hashlib
import math
import platform
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers import EnergyTransformer
from .training import Loss

DIM, HEADS, HEAD_DIM, MEMORIES = 64, 4, 16, 128
STEPS, STEP_SIZE = 6, 0.3
#: Characters of a window, windows of a batch, peak learning rate, updates between two checkpoints.
LENGTH, BATCH, RATE, EPOCH = 64, 16, 3e-3, 100
#: This last part of the text is held out, and so many windows of it are predicted.
HELD_OUT, WINDOWS, QUICK_WINDOWS = 0.1, 200, 20
UNIGRAM, BIGRAM, MODEL = "frequencies of characters", "frequencies of pairs", "causal Energy Transformer"


class Text(NamedTuple):
    """Characters as numbers, and what identifies them.

    Attributes:
        train, held_out: the first nine tenths and the last one.
        size: of the alphabet.
        source: for the results. The text changes with the version of Python, so its hash is there.
    """

    train: Tensor
    held_out: Tensor
    size: int
    source: dict[str, Any]


def load() -> Text:
    """Load `pydoc_data.topics`, all help texts in the order of their names."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet = sorted(set(text))
    numbers = {character: index for index, character in enumerate(alphabet)}
    codes = torch.tensor([numbers[character] for character in text])
    train, held_out = codes.tensor_split([round((1 - HELD_OUT) * len(codes))])
    source = {
        "source": "pydoc_data.topics",
        "python": platform.python_version(),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "characters": len(text),
        "alphabet": len(alphabet),
        "held_out": len(held_out),
    }
    return Text(train, held_out, len(alphabet), source)


def windows(codes: Tensor, count: int) -> Tensor:
    """Take windows (count, LENGTH + 1) at equal distances."""
    begin = torch.linspace(0, len(codes) - LENGTH - 1, count).long()
    return codes[begin[:, None] + torch.arange(LENGTH + 1)]


def baselines(text: Text, shown: Tensor) -> dict[str, float]:
    """Measure the bits per character of windows, by counts of the text to train on, each count plus one."""
    counts = torch.bincount(text.train, minlength=text.size).double() + 1
    pairs = torch.bincount(text.train[:-1] * text.size + text.train[1:], minlength=text.size**2).double() + 1
    likely = pairs.view(text.size, text.size)
    before, after = shown[:, :-1], shown[:, 1:]
    unigram = (counts / counts.sum())[after]
    bigram = (likely / likely.sum(-1, keepdim=True))[before, after]
    return {UNIGRAM: float(-unigram.log2().mean()), BIGRAM: float(-bigram.log2().mean())}


class CharacterModel(nn.Module):
    """Embedding and positions, a causal block, its layer norm, a linear head."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(size, DIM)
        self.positions = nn.Parameter(torch.empty(LENGTH, DIM))
        dynamics: dict[str, Any] = {"mode": "published", "steps": STEPS, "step_size": STEP_SIZE}
        self.block = EnergyTransformer(DIM, HEADS, HEAD_DIM, MEMORIES, causal=True, on_failure="ignore", **dynamics)
        self.head = nn.Linear(DIM, size)
        nn.init.normal_(self.positions, std=0.5)
        for weight in (self.block.w_query, self.block.w_key, self.block.memories):
            nn.init.normal_(weight, std=0.1)

    def forward(self, codes: Tensor) -> Tensor:
        """Return logits (count, N, size) of the next character after codes (count, N), N <= LENGTH."""
        tokens = self.embed(codes) + self.positions[: codes.shape[-1]]
        logits: Tensor = self.head(self.block.norm(self.block(tokens)))
        return logits


def bits(model: nn.Module, shown: Tensor) -> Tensor:
    """Return the bits per character of a model on windows (count, N + 1)."""
    return F.cross_entropy(model(shown[:, :-1]).flatten(0, 1), shown[:, 1:].flatten()) / math.log(2)


def training_loss(text: Text) -> Loss:
    """Return the loss: bits per character of a batch of windows that begin anywhere in the text to train on."""

    def loss_of(model: nn.Module, generator: torch.Generator) -> Tensor:
        starts = torch.randint(len(text.train) - LENGTH, (BATCH, 1), generator=generator)
        return bits(model, text.train[starts + torch.arange(LENGTH + 1)])

    return loss_of


@torch.no_grad()
def measured(text: Text, model: nn.Module, count: int) -> dict[str, float]:
    """Measure the bits per character of so many windows of the held-out text, by counts and by the model."""
    shown = windows(text.held_out, count)
    return baselines(text, shown) | {MODEL: float(bits(model, shown))}
