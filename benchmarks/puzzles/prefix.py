"""Parities of the beginnings of a bit string: a convolutional block learns short strings and settles on long ones."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from implicit_attention.models.reasoners import ConvolutionalReasoner
from implicit_attention.studies.thinking.prefix import LENGTH, TOLD_BY, strings

from .contenders import Contender
from .larger import Larger
from .models import Examples, Model, Shape
from .training import Fixed, Loop, Progressive, Recipe, Solved

#: Residual parts of a step: with the convolution before them a step carries news five bits far.
DEPTH = 2
#: Most evaluations of a string: several times as many as news take through 512 bits, and as settled ones took.
MOST = 600


class Prefix:
    """Is the number of ones up to here odd? A bit is told which is the first; attention sees it and all before it."""

    shape = Shape(features=2, classes=2)

    def draw(self, count: int, generator: torch.Generator) -> Examples:
        return self.examples(count, LENGTH, generator, test=False)

    def test(self, name: str, count: int) -> Examples:
        """Of the set `k bits`."""
        length = int(name.split()[0])
        return self.examples(count, length, torch.Generator().manual_seed(2**31 + length), test=True)

    def examples(self, count: int, length: int, generator: torch.Generator, *, test: bool) -> Examples:
        bits = strings(count, length, generator, test=test)
        edges = torch.ones(length, length, dtype=torch.bool).tril().expand(count, -1, -1)
        inputs = torch.stack([bits, torch.arange(length).expand_as(bits) == 0], -1).float()
        return Examples(inputs, edges, bits.cumsum(-1) % 2)


class Convolutions(nn.Module):
    """The block of `ConvolutionalReasoner` on tokens (B, N, dim); it needs no edges."""

    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.block = ConvolutionalReasoner(dim, axes=1, depth=depth).block

    def forward(self, z: Tensor, x: Tensor, edges: Tensor) -> Tensor:
        out: Tensor = self.block(z.mT, x.mT).mT
        return out


class Convolutional(Model):
    """Embedding, blocks of convolutions in turn (one is tied), and a linear head."""

    def __init__(self, shape: Shape, blocks: int = 1, dim: int | None = None, depth: int = DEPTH) -> None:
        shape = dataclasses.replace(shape, dim=dim or shape.dim)
        super().__init__(shape, blocks=0)
        self.depth = depth
        self.blocks.extend(Convolutions(shape.dim, depth) for _ in range(blocks))

    def flops(self, tokens: int, edges: int, steps: float) -> float:
        shape = self.shape
        step = 2 * 3 * shape.dim**2 * (2 + 2 * self.depth)
        return tokens * (steps * step + 2 * shape.dim * (shape.features + shape.classes))


def even(examples: Examples) -> Tensor:
    """Always the same class."""
    return torch.zeros_like(examples.targets)


#: Seven steps carry news over the strings to learn from.
STEPS = range(8, 17)
LARGER = Larger(
    "PREFIX",
    Prefix(),
    f"is the number of ones up to here odd? Trained on {LENGTH} bits.",
    "convolutions",
    Convolutional,
    narrow=9,
    steps=STEPS,
    recipe=Recipe(Loop(STEPS, half=True, settle=0.5), updates=1000, batch=128, rate=1e-3),
    sets=("32 bits", "64 bits", "128 bits", "256 bits", "512 bits"),
    most=MOST,
    trivial=("always even", even),
)
ATTENTION = Recipe(Loop(range(8, 25)), updates=400)

PLAN = LARGER.plan(
    LARGER.repeated("the same, half of it", Progressive(STEPS[-1], share=0.5)),
    Contender("attention, tied, 8 to 24 steps drawn", ATTENTION, (Solved(), Fixed(16)), LARGER.few),
    claims=(
        ("solved", "512 bits", ">=", 0.95, "exact"),
        ("12 steps", "512 bits", "<=", 0.0, "exact"),
        ("solved", "512 bits", ">=", 0.95, "converged"),
    ),
    notes=(
        f"Prefix: strings are told from those to learn from by their first {TOLD_BY} bits. A step of convolutions is "
        "`ConvolutionalReasoner`'s, with 18 d^2 weights and 36 d^2 FLOPs a bit; those of attention are in `attention`.",
    ),
)
