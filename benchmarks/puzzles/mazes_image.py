"""Mazes as images, a pixel a square: convolutions learn small ones and settle on large ones."""

from __future__ import annotations

import dataclasses
import functools
import random

import torch
from torch import Tensor, nn

from implicit_attention.models.reasoners import ConvolutionalReasoner
from implicit_attention.studies.mazes import depth_first, has_crossing
from implicit_attention.studies.thinking.pixels import free_of, maze_of, problems

from .larger import Larger
from .models import Examples, Model, Shape
from .training import Loop, Recipe

#: Pixels of a side of mazes to learn from; how many are drawn, and so many of them have a crossing, a cell with four
#: ways out. Without those one small maze in a hundred has one, and one large maze in three.
SIDE, LEARNT, CROSSED = 9, 6000, 500
#: The part of a batch that is drawn from those with a crossing.
SHARE = 1 / 3
#: Residual parts of a step: with the convolution before them a step carries news five pixels far.
DEPTH = 2
#: Most evaluations of a maze: several times as many as news take along a path, and as settled ones took.
MOST = 400


def held_out(free: list[list[bool]]) -> bool:
    """Whether a maze with these free pixels is to test with, as a fifth of all are.

    It is told by how far they are from the middle, so that a maze that is turned or mirrored stays what it was.
    """
    middle, squares = len(free) // 2, [(r, c) for r, row in enumerate(free) for c, pixel in enumerate(row) if pixel]
    return sum((row - middle) ** 2 + (column - middle) ** 2 for row, column in squares) % 5 == 0


def images(side: int, count: int, seed: str, *, test: bool, crossed: int = 0) -> Examples:
    """`count` mazes of side x side pixels: cells at even places, and between them walls and ways.

    Start and goal are two cells, drawn; class 1 is the path between them. Squares beyond the border are walls, of which
    an image has none. `crossed`: so many, the first ones, have a crossing.
    """
    draw, drawn = random.Random(f"{side} x {side}, {seed}"), []
    while len(drawn) < count:
        parent = depth_first((side + 1) // 2, draw)
        if len(drawn) < crossed and not has_crossing(parent):
            continue
        if held_out(free_of(parent)) == test:
            drawn.append(maze_of(parent, draw))
    inputs, targets = (part.flatten(-2) for part in problems(*zip(*drawn, strict=True)))
    return Examples(inputs.mT.contiguous(), inputs.mT[..., :1] > 0, targets)


@functools.cache
def learnt() -> Examples:
    return images(SIDE, LEARNT, "to learn from", test=False, crossed=CROSSED)


@functools.cache
def asked(side: int, count: int) -> Examples:
    return images(side, count, "to test with", test=True)


class MazesImage:
    """Which pixels are on the path from start to goal? A pixel is told whether it is free, the start, or the goal.

    `edges` (B, N, 1) tell the same as the first feature: which pixels are free.
    """

    shape = Shape(features=3, classes=2, dim=24)

    def draw(self, count: int, generator: torch.Generator) -> Examples:
        """Of the mazes to learn from, a whole batch turned and mirrored in one of eight ways."""
        crossed = int(count * SHARE)
        index = torch.randint(CROSSED, (count,), generator=generator)
        index[crossed:] = torch.randint(CROSSED, LEARNT, (count - crossed,), generator=generator)
        way = int(torch.randint(8, (), generator=generator))
        return Examples(*(turned(part, way) for part in learnt().at(index)))

    def test(self, name: str, count: int) -> Examples:
        """Of the set `k x k`."""
        return asked(int(name.split()[0]), count)


def turned(pixels: Tensor, way: int) -> Tensor:
    """Pixels (B, N, ...) of square images, turned `way` times by a right angle and mirrored from 4 on."""
    image = square(pixels).rot90(way, (1, 2))
    return (image.flip(1) if way >= 4 else image).flatten(1, 2)


def square(pixels: Tensor) -> Tensor:
    """(B, N, ...) as (B, side, side, ...)."""
    side = round(pixels.shape[1] ** 0.5)
    return pixels.unflatten(1, (side, side))


class Convolutions(nn.Module):
    """The block of `ConvolutionalReasoner` on pixels (B, N, dim), `edges` of which (B, N, 1) are free.

    The state of a wall is zero, as beyond the border: so what is deep within a large maze looks like what is near the
    border of a small one.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.block = ConvolutionalReasoner(dim, axes=2, depth=DEPTH).block.to(memory_format=torch.channels_last)

    def forward(self, z: Tensor, x: Tensor, edges: Tensor) -> Tensor:
        z, x = (square(part).permute(0, 3, 1, 2) for part in (z, x))
        out: Tensor = self.block(z, x, square(edges[..., 0]))
        return out.flatten(2).mT


class Convolutional(Model):
    """Embedding, blocks of convolutions in turn (one is tied), and a linear head.

    The embedding has no bias: what is told of a wall is told of what lies beyond the border.
    """

    def __init__(self, shape: Shape, blocks: int = 1, dim: int | None = None) -> None:
        shape = dataclasses.replace(shape, dim=dim or shape.dim)
        super().__init__(shape, blocks=0)
        self.embed = nn.Linear(shape.features, shape.dim, bias=False)
        self.blocks.extend(Convolutions(shape.dim) for _ in range(blocks))

    def flops(self, tokens: int, edges: int, steps: float) -> float:
        shape = self.shape
        step = 2 * 9 * shape.dim**2 * (2 + 2 * DEPTH)
        return tokens * (steps * step + 2 * shape.dim * (shape.features + shape.classes))


def all_free(examples: Examples) -> Tensor:
    """All pixels that are no wall."""
    return examples.edges[..., 0].long()


#: More steps than news take through a maze to learn from. With 8 to 16 some trainings learnt that what is not on the
#: path by then is not at all, and settled on no path in larger mazes; with 10 to 20 one of two settled on wrong paths
#: in half of the mazes of 33 x 33, and with a small weight of the last change (.1) too.
STEPS = range(12, 25)
LARGER = Larger(
    "MAZES_IMAGE",
    MazesImage(),
    f"which pixels are on the path from start to goal? Depth-first mazes, trained on {SIDE} x {SIDE} pixels.",
    "convolutions",
    Convolutional,
    narrow=6,
    steps=STEPS,
    recipe=Recipe(Loop(STEPS, half=True, settle=0.5), updates=1300, batch=32, rate=2e-3),
    sets=("9 x 9", "13 x 13", "17 x 17", "25 x 25", "33 x 33"),
    most=MOST,
    trivial=("all free pixels", all_free),
)

PLAN = LARGER.plan(
    claims=(
        ("solved", "33 x 33", ">=", 0.9, "exact"),
        ("solved, Anderson(1)", "33 x 33", ">=", 0.9, "exact"),
        (f"{LARGER.mean} steps", "33 x 33", "<=", 0.1, "exact"),
        ("solved", "33 x 33", ">=", 0.9, "converged"),
    ),
    notes=(
        "Images of mazes: a cell, a wall and a way between two cells are a pixel each; start and goal are cells. A "
        "step of convolutions is `ConvolutionalReasoner`'s, with 54 d^2 weights and 108 d^2 FLOPs a pixel, walls too.",
    ),
    puzzles=250,
)
