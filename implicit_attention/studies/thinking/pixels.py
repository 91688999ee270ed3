"""Mazes as pixels: convolutions find the path, learnt from 9 x 9 squares and asked of larger ones.

Walls do not exist for the block: its states are 0 there, as beyond the border, so that the inside of a maze looks as
its rim does. Without that, weights of one seed left a third of mazes of 33 x 33 unsettled, and two thirds wrong.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ... import Picard
from ...models.reasoners import ConvolutionalReasoner
from ..mazes import Parents, path, tree
from .maze_files import Square, Squares, squares_of
from .puzzle import RTOL, Asked, LoopRecipe, Problems, Puzzle, Thinker, View

CHANNELS = 24
#: Squares along a side of mazes to learn from, and of those to ask for.
LEARNT, SMALLEST, LARGEST = 9, 5, 65
#: Mazes to learn from, and so many more with a crossing, which is rare; how many of a batch have one: a third.
POOL, CROSSED, SHARE = 8000, 500, 3
MOST = 600


class Corridors(Thinker):
    """Walls do not exist for the block."""

    def told(self, inputs: Tensor) -> tuple[Tensor, ...]:
        return (self.embed(inputs), inputs[:, 0] > 0)


class PixelMaze(Puzzle):
    """Mazes without loops between two random squares; the class of a square is whether it is on the path."""

    name, places, sized = "maze", "squares", "{0} x {0}"
    kind, learnt = "maze of pixels", f"ones of {LEARNT} x {LEARNT}"
    size, sizes, count = 17, (9, 17, 25), 25
    lettered, judge = False, "breadth-first search"
    usage = f"an odd number of squares from {SMALLEST} to {LARGEST}"
    recipe = LoopRecipe(updates=1500, batch=32, rate=2e-3, steps=range(8, 17))

    def fits(self, size: int) -> bool:
        return size % 2 == 1 and SMALLEST <= size <= LARGEST

    def model(self) -> Thinker:
        layer = ConvolutionalReasoner(CHANNELS, solver=Picard(rtol=RTOL, max_steps=MOST))
        # On a CPU these convolutions take two thirds of the time with channels last.
        layer.block.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return Corridors(nn.Conv2d(3, CHANNELS, 1, bias=False), layer, nn.Conv2d(CHANNELS, 2, 1), axis=1)

    def learn(self, count: int, generator: torch.Generator) -> Problems:
        crossed = count // SHARE
        chosen = [
            pool[index]
            for pool, part in zip(pools(), (count - crossed, crossed), strict=True)
            for index in torch.randint(len(pool), (part,), generator=generator).tolist()
        ]
        # Start and goal are drawn anew, and one of the eight symmetries of the square.
        draw = random.Random(int(torch.randint(2**62, (), generator=generator)))
        images, target = problems(*zip(*(maze_of(parent, draw) for parent in chosen), strict=True))
        turns = draw.randrange(8)
        images, target = images.rot90(turns % 4, (-2, -1)), target.rot90(turns % 4, (-2, -1))
        return Problems(images, target) if turns < 4 else Problems(images.flip(-1), target.flip(-1))

    def ask(self, size: int, count: int, seed: int) -> Problems:
        return mazes(size, count, f"to ask, {seed}")

    def read(self, file: Path, **places: Any) -> Asked:
        drawing, notes = squares_of(file, **places), []
        sides = f"{len(drawing.free)} x {len(drawing.free[0])}"
        if drawing.has_loops():
            notes.append("it has loops, the model was trained on mazes without; any shortest path is right")
        if not drawing.is_narrow():
            notes.append("the model was trained on mazes whose ways are one square wide")
        return Asked(problems([drawing]), f"{sides}, {file.name}", tuple(notes))

    def wrong(self, problem: Problems, classes: Tensor) -> int:
        drawing, answer = squares_in(problem), {(row, column) for row, column in classes.nonzero().tolist()}
        way = drawing.shortest()
        free = [[square and (r, c) in answer for c, square in enumerate(row)] for r, row in enumerate(drawing.free)]
        # As many squares as a shortest path has, which lead from start to goal, are one.
        if drawing.start in answer and len(answer) == len(way) == len(drawing._replace(free=free).shortest()):
            return 0
        return len(answer ^ set(way))

    def view(self, problem: Problems, answer: Tensor) -> View:
        """Free squares have a shade; there is a frame of walls."""
        drawing = squares_in(problem)
        levels = torch.nn.functional.pad(
            torch.where(problem.inputs[0, 0] > 0, answer[..., 1], torch.nan), (1, 1, 1, 1), value=torch.nan
        )
        cells = [["#" if value != value else "." if value > 0.5 else " " for value in row] for row in levels.tolist()]
        marks = [(row + 1, column + 1) for row, column in (drawing.start, drawing.goal)]
        for (row, column), letter in zip(marks, "SG", strict=True):
            cells[row][column] = letter
        return View(levels, cells, tuple(marks))


@functools.cache
def pools() -> tuple[list[Parents], list[Parents]]:
    """Draw the mazes to learn from, and those of them with a crossing."""
    draw, cells = random.Random("to learn from"), (LEARNT + 1) // 2
    counts = (POOL, False), (CROSSED, True)
    plain, crossed = ([tree("depth-first", cells, draw, crossed=c) for _ in range(count)] for count, c in counts)
    return plain, crossed


def mazes(size: int, count: int, seed: str) -> Problems:
    """Draw mazes of size x size squares."""
    draw = random.Random(f"{size} x {size}, {seed}")
    drawn = [maze_of(tree("depth-first", (size + 1) // 2, draw), draw) for _ in range(count)]
    return problems(*zip(*drawn, strict=True))


def free_of(parent: Parents) -> list[list[bool]]:
    """Return which squares are free: cells, at even places, and the ways between them."""
    cells = math.isqrt(len(parent))
    size = 2 * cells - 1
    free = [[False] * size for _ in range(size)]
    for ends in enumerate(parent):
        for row, column in _between(ends, cells):
            free[row][column] = True
    return free


def maze_of(parent: Parents, draw: random.Random) -> tuple[Squares, list[Square]]:
    """Return a maze and the path between two random cells of it."""
    cells = math.isqrt(len(parent))
    start, goal = draw.sample(range(cells * cells), 2)
    way = [square for ends in itertools.pairwise(path(parent, start, goal)) for square in _between(ends, cells)]
    return Squares(free_of(parent), _place(start, cells), _place(goal, cells)), way


def _place(cell: int, cells: int) -> Square:
    return 2 * (cell // cells), 2 * (cell % cells)


def _between(ends: tuple[int, int], cells: int) -> list[Square]:
    """Return the squares of two cells, and the one between them."""
    (a, b), (c, d) = (_place(cell, cells) for cell in ends)
    return [(a, b), ((a + c) // 2, (b + d) // 2), (c, d)]


def problems(drawings: Sequence[Squares], ways: Sequence[list[Square]] | None = None) -> Problems:
    """Return mazes as images with the channels free, start and goal, and their paths, searched for unless known."""
    free = torch.tensor([drawing.free for drawing in drawings])
    inputs = torch.stack([free, torch.zeros_like(free), torch.zeros_like(free)], 1).float()
    target = torch.zeros(free.shape, dtype=torch.long)
    for index, drawing in enumerate(drawings):
        for channel, (row, column) in ((1, drawing.start), (2, drawing.goal)):
            inputs[index, channel, row, column] = 1
        rows, columns = zip(*(drawing.shortest() if ways is None else ways[index]), strict=True)
        target[index, list(rows), list(columns)] = 1
    return Problems(inputs, target)


def squares_in(problem: Problems) -> Squares:
    """Return the one maze of a batch."""
    free, *ends = problem.inputs[0]
    start, goal = (tuple(end.nonzero()[0].tolist()) for end in ends)
    return Squares((free > 0).tolist(), start, goal)
