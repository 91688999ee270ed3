"""Perfect mazes as graphs: cells are tokens, passages are edges, the one path from corner to corner is the answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

#: The four ways out of a cell, as (rows, columns): up, down, left, right.
WAYS = ((-1, 0), (1, 0), (0, -1), (0, 1))
#: The features of a token: whether it is the start, the goal, a wall.
FEATURES = 3
#: This fills up a list of edges.
NONE = -1
#: Targets with this number have no loss.
IGNORED = -100

Parents = list[int]
Generator = Callable[[int, random.Random], Parents]


class Mazes(NamedTuple):
    """Mazes of one size: N tokens are the cells, row by row, and behind them four walls, one for each side.

    inputs: (B, N, FEATURES), the features of every token.
    edges: (B, N, 4), the tokens that a token attends to. A cell attends on each of its sides (the `WAYS`) to the cell
        beside it or to the wall: always four, so that their mean counts the ways out. A wall attends to itself, and its
        other places are `NONE`.
    targets: (B, N), 1 on the path, 0 beside it, `IGNORED` for walls.
    """

    inputs: Tensor
    edges: Tensor
    targets: Tensor

    @property
    def cells(self) -> int:
        """Return the number of tokens that are cells."""
        return self.targets.shape[-1] - len(WAYS)

    @property
    def ways(self) -> Tensor:
        """Return which ways out of a cell are open, (B, cells, 4) bool."""
        return self.edges[..., : self.cells, :] < self.cells

    @property
    def mask(self) -> Tensor:
        """Return which tokens a token attends to, (B, N, N) bool."""
        return mask_of(self.edges)


def mask_of(lists: Tensor) -> Tensor:
    """Return the mask (B, N, N) of lists of edges (B, N, K), which are filled up with `NONE`."""
    tokens = lists.shape[-2]
    # `NONE` is written into a column that is cut off.
    places = torch.where(lists == NONE, tokens, lists)
    mask = torch.zeros(*lists.shape[:-1], tokens + 1, dtype=torch.bool, device=lists.device)
    return mask.scatter_(-1, places, True)[..., :tokens]


def around(cell: int, size: int) -> list[int]:
    """Return the cells beside one in the grid, with and without a wall between."""
    row, column = divmod(cell, size)
    return [
        (row + down) * size + column + right
        for down, right in WAYS
        if 0 <= row + down < size and 0 <= column + right < size
    ]


def _root(size: int, draw: random.Random) -> tuple[int, Parents]:
    """Draw the root of a tree, whose parent is itself; the other cells have none yet."""
    root, parent = draw.randrange(size * size), [-1] * size**2
    parent[root] = root
    return root, parent


def depth_first(size: int, draw: random.Random) -> Parents:
    """Walk to a new cell as long as there is one, then back: long winding ways with few branches."""
    root, parent = _root(size, draw)
    way = [root]
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
    """Open a random wall around the reached cells, again and again: short ways with many branches."""
    root, parent = _root(size, draw)
    walls = [(root, cell) for cell in around(root, size)]
    while walls:
        index = draw.randrange(len(walls))
        walls[index], walls[-1] = walls[-1], walls[index]
        known, cell = walls.pop()
        if parent[cell] < 0:
            parent[cell] = known
            walls += [(cell, other) for other in around(cell, size) if parent[other] < 0]
    return parent


def wilson(size: int, draw: random.Random) -> Parents:
    """Join random walks without their loops from every cell to a reached one: every spanning tree is as likely."""
    _, parent = _root(size, draw)
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
GENERATORS: dict[str, Generator] = {"depth-first": depth_first, "Prim": prim, "Wilson": wilson}


def path(parent: Parents, start: int, goal: int) -> list[int]:
    """Return the cells from start to goal: up from both to where their ways meet."""
    up = [start]
    while parent[up[-1]] != up[-1]:
        up.append(parent[up[-1]])
    places, down = {cell: index for index, cell in enumerate(up)}, [goal]
    while down[-1] not in places:
        down.append(parent[down[-1]])
    return up[: places[down[-1]]] + down[::-1]


def has_crossing(parent: Parents) -> bool:
    """Return whether some cell has four ways out: to its parent, and to children."""
    ways = [int(cell != above) for cell, above in enumerate(parent)]
    for cell, above in enumerate(parent):
        ways[above] += cell != above
    return max(ways) == len(WAYS)


def tree(generator: str, size: int, draw: random.Random, *, crossed: bool = False) -> Parents:
    """Draw the passages of a maze of size x size cells, with a crossing if `crossed`."""
    parent = GENERATORS[generator](size, draw)
    while crossed and not has_crossing(parent):
        parent = GENERATORS[generator](size, draw)
    return parent


def mazes(generator: str, size: int, count: int, seed: str, *, crossed: bool = False) -> Mazes:
    """Draw `count` mazes of size x size cells, from the first corner to the opposite one.

    With `crossed` all of them have a crossing. The first mazes of a larger count are those of a smaller one.
    """
    draw, cells, sides = random.Random(f"{generator}, {size} x {size}, {seed}"), size * size, len(WAYS)
    inputs, edges = torch.zeros(count, cells + sides, FEATURES), torch.full((count, cells + sides, sides), NONE)
    walls = torch.arange(cells, cells + sides)
    inputs[:, 0, 0] = inputs[:, cells - 1, 1] = 1
    inputs[:, cells:, 2] = 1
    edges[:, :cells], edges[:, cells:, 0] = walls, walls
    targets = torch.zeros(count, cells + sides, dtype=torch.long)
    targets[:, cells:] = IGNORED
    side = {down * size + right: place for place, (down, right) in enumerate(WAYS)}
    for index in range(count):
        parent = tree(generator, size, draw, crossed=crossed)
        passages = [(cell, other) for cell, other in enumerate(parent) if cell != other]
        both = passages + [(other, cell) for cell, other in passages]
        begins, ends = (list(cells) for cells in zip(*both, strict=True))
        edges[index, begins, [side[other - cell] for cell, other in both]] = torch.tensor(ends)
        targets[index, path(parent, 0, cells - 1)] = 1
    return Mazes(inputs, edges, targets)
