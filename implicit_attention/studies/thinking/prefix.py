"""Prefix sums: is the number of ones up to here odd? Learnt from strings of 32 bits, asked of longer ones."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ... import Picard
from ...models.reasoners import ConvolutionalReasoner
from ..errors import InputError
from .puzzle import RTOL, Asked, LoopRecipe, Problems, Puzzle, Thinker, View
from .reading import text_of

CHANNELS = 32
#: Bits of strings to learn from, and those by which they are told from strings to test with.
LENGTH, TOLD_BY = 32, 16
SMALLEST, LARGEST = 2, 512
#: Most evaluations of a string: several times as many as news take through 512 bits, and as settled ones took.
MOST = 600
#: Bits in a row of the picture, of short and of long strings.
ROW, LONG_ROW = 32, 64


def held_out(bits: Tensor) -> Tensor:
    """(B,): strings (B, length) to test with, a fifth of all, by their first bits."""
    return (bits[:, :TOLD_BY] * 2 ** torch.arange(TOLD_BY)).sum(-1) % 5 == 0


def strings(count: int, length: int, generator: torch.Generator, *, test: bool) -> Tensor:
    """(B, length): random bits to learn from, or to test with where the string is long enough to be told by."""
    bits = torch.randint(2, ((8 if test else 2) * count + 64, length), generator=generator)
    wanted = held_out(bits) == test if length >= TOLD_BY else torch.ones(len(bits), dtype=torch.bool)
    return bits[wanted][:count]


class Prefix(Puzzle):
    """Strings of bits; the class of a bit is the parity of all up to it."""

    name, places, sized = "prefix", "bits", "{} bits"
    kind, learnt = "bits above their prefix parities", f"strings of {LENGTH} bits"
    size, sizes, count = 128, (32, 64, 128), 50
    lettered, judge = True, "cumulative sums"
    usage = f"a number of bits from {SMALLEST} to {LARGEST}"
    recipe = LoopRecipe(updates=1000, batch=128, rate=1e-3, steps=range(8, 17))

    def fits(self, size: int) -> bool:
        return SMALLEST <= size <= LARGEST

    def model(self) -> Thinker:
        layer = ConvolutionalReasoner(CHANNELS, axes=1, solver=Picard(rtol=RTOL, max_steps=MOST))
        # Two inputs: the bit, and whether it is the first.
        return Thinker(nn.Conv1d(2, CHANNELS, 1), layer, nn.Conv1d(CHANNELS, 2, 1), axis=1)

    def learn(self, count: int, generator: torch.Generator) -> Problems:
        return problems(strings(count, LENGTH, generator, test=False))

    def ask(self, size: int, count: int, seed: int) -> Problems:
        return problems(strings(count, size, torch.Generator().manual_seed(seed), test=True))

    def read(self, file: Path, **places: Any) -> Asked:
        text = "".join(text_of(file, "bits").split())
        if other := sorted(set(text) - {"0", "1"}):
            raise InputError(f"`--file` must hold bits, 0 and 1, got {other[0]!r}; take other characters out")
        if not self.fits(len(text)):
            raise InputError(f"`--file` must hold {SMALLEST} to {LARGEST} bits, got {len(text)}; take a part of them")
        return Asked(problems(torch.tensor([[int(bit) for bit in text]])), f"{len(text)} bits, {file.name}")

    def wrong(self, problem: Problems, classes: Tensor) -> int:
        bits: list[int] = problem.inputs[0, 0].int().tolist()
        sums = itertools.accumulate(bits)
        return sum(total % 2 != found for total, found in zip(sums, classes.tolist(), strict=True))

    def view(self, problem: Problems, answer: Tensor) -> View:
        """Rows of bits, each above the row of its answers, with an empty row between two pairs."""
        bits, odd = problem.inputs[0, 0], answer[..., 1]
        rows, cells = [], []
        row = ROW if len(bits) <= 4 * ROW else LONG_ROW
        for begin in range(0, len(bits), row):
            part = slice(begin, begin + row)
            for values in (bits[part], odd[part], torch.full_like(bits[part], torch.nan)):
                rows.append(torch.cat([values, values.new_full((min(row, len(bits)) - len(values),), torch.nan)]))
                cells.append([" " if value != value else "01"[value > 0.5] for value in rows[-1].tolist()])
        return View(torch.stack(rows[:-1]), cells[:-1])


def problems(bits: Tensor) -> Problems:
    """Return strings (B, length) with what is asked of them."""
    first = torch.zeros_like(bits)
    first[:, 0] = 1
    return Problems(torch.stack([bits, first], 1).float(), bits.cumsum(-1) % 2)
