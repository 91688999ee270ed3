"""Additions with carries: a convolutional block learns short numbers and settles on long ones."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .larger import Larger
from .models import Examples, Shape
from .prefix import Convolutional
from .training import Loop, Recipe

#: Digits of numbers to learn from, and those by which they are told from numbers to test with.
LENGTH = TOLD_BY = 8
#: So many places of an addition decide, in the mean, whether there is a carry; digits of the others add up to nine and
#: hand on what comes. So carries run far in long numbers too, which they hardly do in numbers drawn at random.
DECIDING = 4
#: Residual parts of a step: with the convolution before it a step carries news three places far.
DEPTH = 1
#: Most evaluations of an addition: several times as many as a carry takes through all places, and as settled ones took.
MOST = 300


def held_out(digits: Tensor) -> Tensor:
    """(B,): pairs of numbers (B, 2, length) to test with, a seventh of all, by their last digits, which come first."""
    first, second = (digits[:, :, :TOLD_BY] * 10 ** torch.arange(TOLD_BY)).sum(-1).unbind(1)
    return (first + 2 * second) % 7 == 0


def pairs(count: int, length: int, generator: torch.Generator) -> Tensor:
    """(count, 2, length): the digits of two numbers, the last one first."""
    digits = torch.randint(10, (count, 2, length), generator=generator)
    handed_on = torch.rand(count, length, generator=generator) >= DECIDING / length
    digits[:, 1] = torch.where(handed_on, 9 - digits[:, 0], digits[:, 1])
    return digits


def added(digits: Tensor) -> Tensor:
    """(B, length + 1): the digits of the sums of pairs (B, 2, length), the last one first."""
    both = F.pad(digits.sum(1), (0, 1))
    places, carry = [], torch.zeros_like(both[:, 0])
    for place in both.unbind(1):
        places.append((place + carry) % 10)
        carry = (place + carry) // 10
    return torch.stack(places, 1)


class Arithmetic:
    """The sum of two numbers, a token a place, the last digits first.

    A token is told both digits, and whether it is the first; one more place, with two zeros, is for the last carry.
    """

    shape = Shape(features=21, classes=10)

    def draw(self, count: int, generator: torch.Generator) -> Examples:
        return self.additions(count, LENGTH, generator, test=False)

    def test(self, name: str, count: int) -> Examples:
        """Of the set `k digits`."""
        length = int(name.split()[0])
        return self.additions(count, length, torch.Generator().manual_seed(2**31 + length), test=True)

    def additions(self, count: int, length: int, generator: torch.Generator, *, test: bool) -> Examples:
        digits = pairs((12 if test else 2) * count + 128, length, generator)
        digits = digits[held_out(digits) == test][:count]
        places = F.one_hot(F.pad(digits, (0, 1)), 10).transpose(1, 2).flatten(2)
        first = (torch.arange(length + 1) == 0).expand(count, -1)[..., None]
        edges = torch.ones(length + 1, length + 1, dtype=torch.bool).tril().expand(count, -1, -1)
        return Examples(torch.cat([places, first], -1).float(), edges, added(digits))


def no_carries(examples: Examples) -> Tensor:
    """Digits added place by place."""
    first, second = examples.inputs[..., :20].unflatten(-1, (2, 10)).argmax(-1).unbind(-1)
    return (first + second) % 10


#: Three steps carry news over the numbers to learn from.
STEPS = range(6, 13)
MODEL = partial(Convolutional, depth=DEPTH)
LARGER = Larger(
    "ARITHMETIC",
    Arithmetic(),
    f"what is the sum of two numbers? Carries run far; trained on {LENGTH} digits.",
    "convolutions",
    MODEL,
    narrow=11,
    steps=STEPS,
    # With half of that weight, and of the updates three quarters, settled answers to 8 digits were wrong in 6 of 100.
    recipe=Recipe(Loop(STEPS, half=True, settle=1.0), updates=4000, batch=128, rate=2e-3),
    sets=("8 digits", "16 digits", "32 digits", "64 digits", "128 digits"),
    most=MOST,
    trivial=("digits added without carries", no_carries),
)

PLAN = LARGER.plan(
    claims=(
        ("solved", "64 digits", ">=", 0.95, "exact"),
        ("9 steps", "128 digits", "<=", 0.6, "exact"),
        ("solved", "64 digits", ">=", 0.95, "converged"),
    ),
    notes=(
        f"Additions: last digits come first; {DECIDING} places of a sum, in the mean, decide whether there is a carry, "
        f"and digits of the others add up to nine. Pairs are told from those to learn from by their last {TOLD_BY} "
        "digits. A step of convolutions is PREFIX's with one residual part: 12 d^2 weights, 24 d^2 FLOPs a place.",
    ),
)
