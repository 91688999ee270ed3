"""The control: parities of the beginnings of a bit string. Blocks settle on longer strings too, and settle wrong."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .contenders import Contender, Plan
from .models import Examples, Model, Shape
from .training import Fixed, Loop, Recipe, Solved

#: Bits of strings to learn from.
LENGTH = 16


def held_out(bits: Tensor) -> Tensor:
    """(B,): strings (B, length) to test with, a fifth of all, by their first bits."""
    return (bits[:, :LENGTH] * 2 ** torch.arange(LENGTH)).sum(-1) % 5 == 0


class Prefix:
    """Is the number of ones up to here odd? A bit sees itself and all before it, and is told which is the first."""

    shape = Shape(features=2, classes=2)

    def draw(self, count: int, generator: torch.Generator) -> Examples:
        return self.strings(count, LENGTH, generator, test=False)

    def test(self, name: str, count: int) -> Examples:
        """Of the set `k bits`."""
        length = int(name.split()[0])
        return self.strings(count, length, torch.Generator().manual_seed(2**31 + length), test=True)

    def strings(self, count: int, length: int, generator: torch.Generator, *, test: bool) -> Examples:
        bits = torch.randint(2, ((8 if test else 2) * count + 64, length), generator=generator)
        bits = bits[held_out(bits) == test][:count]
        edges = torch.ones(length, length, dtype=torch.bool).tril().expand(count, -1, -1)
        inputs = torch.stack([bits, torch.arange(length).expand_as(bits) == 0], -1).float()
        return Examples(inputs, edges, bits.cumsum(-1) % 2)


def even(examples: Examples) -> Tensor:
    """Always the same class."""
    return torch.zeros_like(examples.targets)


STEPS, MEAN = range(8, 25), 16
TIED = "tied, 8 to 24 steps drawn"
SETS = ("16 bits", "32 bits", "64 bits")
WAYS = (Solved(), Fixed(MEAN), Fixed(8 * MEAN))

CONTENDERS = (
    Contender(TIED, Recipe(Loop(STEPS), updates=400), WAYS),
    Contender("tied, 16 steps", Recipe(Loop(MEAN), updates=400), WAYS),
    Contender(f"stack of {MEAN}", Recipe(Loop(MEAN), updates=400), (Fixed(MEAN),), make=partial(Model, blocks=MEAN)),
    Contender("always even", None, guess=even),
)

PLAN = Plan(
    "PREFIX",
    Prefix(),
    "is the number of ones up to here odd? Trained on 16 bits: the control, at which all of them fail.",
    CONTENDERS,
    SETS,
    costs=SETS[2],
    solver_set=SETS[0],
    leader=(TIED, "solved"),
    notes=("Prefix: strings are told from those to learn from by their first 16 bits.",),
)
