"""The tasks of `usefulness`: digits, associative retrieval and text, each with parts to train, validate and test."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .useful_models import Shape

#: Targets with this number are not asked for.
IGNORED = -100


class Examples(NamedTuple):
    """Inputs (count, N, ...) and targets (count,) or (count, N)."""

    inputs: Tensor
    targets: Tensor


@dataclasses.dataclass(frozen=True)
class Task:
    """A task with its data.

    score: what is reported: the part of the targets that is hit, or bits per character.
    chance: the score of guessing.
    draw: (count, generator) -> a batch to learn from; the same generator gives every model the same batches.
    data: what identifies the data in the results.
    """

    name: str
    shape: Shape
    score: Literal["accuracy", "bits"]
    chance: float
    draw: Callable[[int, torch.Generator], Examples]
    validation: Examples
    test: Examples
    data: dict[str, Any]


# Digits.

TRAIN_DIGITS, VALIDATION_DIGITS = 1097, 350


def digits(*, validation: int | None = None, test: int | None = None) -> Task:
    """scikit-learn's 1797 handwritten digits of 8 x 8 pixels; the tokens are its patches of 2 x 2."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    data = {"source": "sklearn.datasets.load_digits", "sha256": _sha256(images.tobytes() + labels.tobytes())}
    images, labels = patches(torch.from_numpy(images / 16).float()), torch.from_numpy(labels)
    parts = digit_split(len(labels))
    train, *held = (Examples(images[part], labels[part]) for part in parts)

    def draw(count: int, generator: torch.Generator) -> Examples:
        index = torch.randint(len(train.targets), (count,), generator=generator)
        return Examples(train.inputs[index], train.targets[index])

    shape = Shape(length=16, inputs=4, classes=10, discrete=False, causal=False, per_token=False)
    return Task("digits", shape, "accuracy", 0.1, draw, *map(first, held, (validation, test)), data)


def patches(images: Tensor) -> Tensor:
    """Images (count, 64) as tokens (count, 16, 4)."""
    return images.reshape(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)


def digit_split(count: int) -> tuple[Tensor, ...]:
    """Indices of the three parts, the same for every seed of the training."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return order.tensor_split((TRAIN_DIGITS, TRAIN_DIGITS + VALIDATION_DIGITS))


# Associative retrieval.

LENGTH, PAIRS, KEYS, VALUES = 32, 4, 32, 16
HELD = 1024
_HELD_SEEDS = (2**31, 2**31 + 1)


def retrieval(*, validation: int | None = None, test: int | None = None) -> Task:
    """Multi-query associative recall: key value key value ..., then keys whose values are asked for.

    A sequence begins with `PAIRS` different keys, each followed by its value; every later token is one of these keys,
    drawn anew, and the target there is its value. Key and value are neighbours, not one token: to find the value, a
    model has to know what came before it.

    Reference: Arora et al. (2023), Zoology; smaller, and with a query at every place behind the pairs.
    """
    sizes = zip((validation, test), _HELD_SEEDS, strict=True)
    held = [recall(size or HELD, torch.Generator().manual_seed(seed)) for size, seed in sizes]
    shape = Shape(length=LENGTH, inputs=KEYS + VALUES, classes=VALUES, discrete=True, causal=True, per_token=True)
    data = {"source": "generated", "pairs": PAIRS, "keys": KEYS, "values": VALUES}
    return Task("retrieval", shape, "accuracy", 1 / VALUES, recall, *held, data)


def recall(count: int, generator: torch.Generator) -> Examples:
    """Sequences (count, LENGTH) of tokens, keys first, then values; targets are classes of values."""
    keys = torch.rand(count, KEYS, generator=generator).argsort(-1)[:, :PAIRS]
    values = torch.randint(VALUES, (count, PAIRS), generator=generator)
    which = torch.randint(PAIRS, (count, LENGTH - 2 * PAIRS), generator=generator)
    pairs = torch.stack([keys, KEYS + values], dim=-1).flatten(1)
    inputs = torch.cat([pairs, keys.gather(-1, which)], dim=-1)
    unasked = torch.full((count, 2 * PAIRS), IGNORED)
    return Examples(inputs, torch.cat([unasked, values.gather(-1, which)], dim=-1))


# Text.


def text(*, validation: int | None = None, test: int | None = None) -> Task:
    """The next character of the help texts that come with Python (`pydoc_data.topics`), of up to 64 before it."""
    given, data = help_texts(), described_texts()
    size = len(given.alphabet)
    shape = Shape(length=LENGTH, inputs=size, classes=size, discrete=True, causal=True, per_token=True)
    data["parts"] = text_split(data["characters"])
    held = (windows(given.validation, LENGTH, validation), windows(given.test, LENGTH, test))
    draw = functools.partial(drawn_windows, given.train, LENGTH)
    return Task("text", shape, "bits", torch.tensor(size).log2().item(), draw, *held, data)


class Text(NamedTuple):
    """Characters as numbers, to train, validate and test."""

    alphabet: str
    train: Tensor
    validation: Tensor
    test: Tensor


@functools.cache
def help_texts() -> Text:
    """The help texts that come with Python."""
    written = topics()
    alphabet = "".join(sorted(set(written)))
    numbers = {character: index for index, character in enumerate(alphabet)}
    codes = torch.tensor([numbers[character] for character in written])
    return Text(alphabet, *(codes[begin:end] for begin, end in text_split(len(codes))))


def described_texts() -> dict[str, Any]:
    """What identifies the help texts in the results."""
    written = topics()
    return {
        "source": "pydoc_data.topics",
        "characters": len(written),
        "alphabet": len(help_texts().alphabet),
        "sha256": _sha256(written.encode()),
    }


def topics() -> str:
    """All help texts, by the names of their topics."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def text_split(count: int) -> list[tuple[int, int]]:
    """The first eight tenths, the next and the last one."""
    ends = [0, count * 8 // 10, count * 9 // 10, count]
    return list(itertools.pairwise(ends))


def windows(codes: Tensor, length: int, count: int | None) -> Examples:
    """So many windows of a text at equal distances, of all that do not overlap."""
    most = (len(codes) - 1) // length
    inputs, targets = (codes[i : most * length + i].unflatten(0, (most, length)) for i in (0, 1))
    return first(Examples(inputs, targets), count)


def drawn_windows(codes: Tensor, length: int, count: int, generator: torch.Generator) -> Examples:
    begin = torch.randint(len(codes) - length, (count, 1), generator=generator)
    drawn = codes[begin + torch.arange(length + 1)]
    return Examples(drawn[:, :-1], drawn[:, 1:])


def first(examples: Examples, count: int | None) -> Examples:
    """`count` examples at equal distances, all of them for None."""
    if count is None:
        return examples
    index = torch.linspace(0, len(examples.inputs) - 1, count).long()
    return Examples(examples.inputs[index], examples.targets[index])


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


#: (validation=, test=) -> Task, with so many held-out examples, or all there are.
TASKS: dict[str, Callable[..., Task]] = {"digits": digits, "retrieval": retrieval, "text": text}
