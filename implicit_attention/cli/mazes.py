"""Perfect mazes as graphs: cells are tokens, passages are edges, the one path from start to goal is the answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

#: The four ways out of a cell, as (rows, columns): up, down, left, right.
WAYS = ((-1, 0), (1, 0), (0, -1), (0, 1))
#: What is known of a cell: whether it is the start, the goal, and which of the four ways out of it are open.
FEATURES = 2 + len(WAYS)
#: A place of a list of edges that holds none.
NONE = -1

Parents = list[int]


class Mazes(NamedTuple):
    """Mazes of one size, N cells each.

    inputs: (B, N, FEATURES), what is known of every cell.
    edges: (B, N, 4), the cells that a cell is open to by each of the `WAYS`, or `NONE`.
    targets: (B, N), 1 on the path and 0 elsewhere.
    """

    inputs: Tensor
    edges: Tensor
    targets: Tensor

    @property
    def mask(self) -> Tensor:
        """(B, N, N) bool, which cells are open to each other; none is to itself."""
        cells = self.edges.shape[-2]
        # What holds no edge is written into a column that is cut off.
        places = torch.where(self.edges == NONE, cells, self.edges)
        mask = torch.zeros(*self.edges.shape[:-1], cells + 1, dtype=torch.bool)
        return mask.scatter_(-1, places, True)[..., :cells]


def around(cell: int, size: int) -> list[int]:
    """The cells beside one in the grid, walls or not."""
    row, column = divmod(cell, size)
    return [
        (row + down) * size + column + right
        for down, right in WAYS
        if 0 <= row + down < size and 0 <= column + right < size
    ]


def depth_first(size: int, draw: random.Random) -> Parents:
    """Walk to a cell not seen before until there is none, then back: long winding ways with few branches."""
    first = draw.randrange(size * size)
    parent, way = [-1] * size**2, [first]
    parent[first] = first
    while way:
        free = [cell for cell in around(way[-1], size) if parent[cell] < 0]
        if not free:
            way.pop()
            continue
        cell = draw.choice(free)
        parent[cell] = way[-1]
        way.append(cell)
    return parent


def prim(size: int, draw: random.Random) -> Parents:
    """Open a wall drawn from all that border what is reached, again and again: short ways with many branches."""
    first = draw.randrange(size * size)
    parent = [-1] * size**2
    parent[first] = first
    walls = [(first, cell) for cell in around(first, size)]
    while walls:
        index = draw.randrange(len(walls))
        walls[index], walls[-1] = walls[-1], walls[index]
        known, cell = walls.pop()
        if parent[cell] < 0:
            parent[cell] = known
            walls += [(cell, other) for other in around(cell, size) if parent[other] < 0]
    return parent


def wilson(size: int, draw: random.Random) -> Parents:
    """Random walks without their loops, from every cell to what is reached: every spanning tree is as likely."""
    parent = [-1] * size**2
    first = draw.randrange(size * size)
    parent[first] = first
    for begin in range(size * size):
        cell, last = begin, {}
        while parent[cell] < 0:
            last[cell] = draw.choice(around(cell, size))
            cell = last[cell]
        cell = begin
        while parent[cell] < 0:
            parent[cell] = last[cell]
            cell = last[cell]
    return parent


#: Each draws a spanning tree of the grid, as the parent of every cell (the root is its own).
GENERATORS: dict[str, Callable[[int, random.Random], Parents]] = {
    "depth-first": depth_first,
    "Prim": prim,
    "Wilson": wilson,
}


def path(parent: Parents, start: int, goal: int) -> list[int]:
    """The cells from start to goal: up from both to where their ways meet."""
    up = [start]
    while parent[up[-1]] != up[-1]:
        up.append(parent[up[-1]])
    places, down = {cell: index for index, cell in enumerate(up)}, [goal]
    while down[-1] not in places:
        down.append(parent[down[-1]])
    return up[: places[down[-1]]] + down[::-1]


def mazes(generator: str, size: int, count: int, seed: str, *, far: bool = False) -> Mazes:
    """`count` mazes of size x size cells with start and goal drawn from them, or (`far`) in opposite corners.

    The first mazes of a larger count are those of a smaller one.
    """
    draw, cells = random.Random(f"{generator}, {size} x {size}, {seed}"), size * size
    inputs, edges = torch.zeros(count, cells, FEATURES), torch.full((count, cells, len(WAYS)), NONE)
    targets = torch.zeros(count, cells, dtype=torch.long)
    ways = {down * size + right: index for index, (down, right) in enumerate(WAYS)}
    for index in range(count):
        parent = GENERATORS[generator](size, draw)
        start, goal = (0, cells - 1) if far else draw.sample(range(cells), 2)
        passages = [(cell, other) for cell, other in enumerate(parent) if cell != other]
        both = passages + [(other, cell) for cell, other in passages]
        here, there = (list(ends) for ends in zip(*both, strict=True))
        way = [ways[other - cell] for cell, other in both]
        edges[index, here, way] = torch.tensor(there)
        inputs[index, here, [2 + number for number in way]] = 1
        inputs[index, start, 0] = inputs[index, goal, 1] = 1
        targets[index, path(parent, start, goal)] = 1
    return Mazes(inputs, edges, targets)
