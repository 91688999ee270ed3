"""Mazes: a block learns 5 x 5 mazes in a loop, and solves larger ones by iterating until its answer has settled.

python docs/examples/mazes.py
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from _puzzles import arguments, compare, train
from torch import Tensor, nn

from implicit_attention import Equilibrium, Picard

DIM, HEADS = 32, 4
TRAINED, SIZES = 5, (5, 9, 13, 17)
WAYS = ((-1, 0), (1, 0), (0, -1), (0, 1))  # up, down, left, right: the opposite of i is i ^ 1


class Mazes(NamedTuple):
    """N cells: what they know (B, N, 6), which are open to each other (B, N, N), and which are on the path (B, N)."""

    cells: Tensor
    open: Tensor
    path: Tensor


def maze(size: int, draw: random.Random) -> tuple[np.ndarray, ...]:
    """Walk at random to new cells; where there is none, go back. Any two cells then have one way between them."""
    cells, open_ = np.zeros((size, size, 2 + len(WAYS)), np.float32), np.zeros((size,) * 4, bool)
    came_from, trail = {(0, 0): (0, 0)}, [(0, 0)]
    while trail:
        here = row, column = trail[-1]
        beside = [(way, (row + down, column + right)) for way, (down, right) in enumerate(WAYS)]
        new = [(way, cell) for way, cell in beside if cell not in came_from and 0 <= min(cell) <= max(cell) < size]
        if not new:
            trail.pop()
            continue
        way, there = draw.choice(new)
        came_from[there] = here
        trail.append(there)
        cells[here][2 + way] = cells[there][2 + (way ^ 1)] = 1
        open_[here][there] = open_[there][here] = True

    def to_the_corner(cell: tuple[int, int]) -> list[tuple[int, int]]:
        found = [cell]
        while found[-1] != (0, 0):
            found.append(came_from[found[-1]])
        return found

    start, goal = draw.sample(list(came_from), 2)
    cells[start][0] = cells[goal][1] = 1
    one, other = to_the_corner(start), to_the_corner(goal)
    path = np.zeros((size, size), np.int64)
    for cell in {*one} ^ {*other} | {next(cell for cell in one if cell in other)}:
        path[cell] = 1
    return cells.reshape(size**2, -1), open_.reshape(size**2, size**2), path.reshape(-1)


def mazes(size: int, count: int, seed: str) -> Mazes:
    draw = random.Random(seed)
    return Mazes(
        *(torch.from_numpy(np.stack(part)) for part in zip(*(maze(size, draw) for _ in range(count)), strict=True))
    )


class Block(nn.Module):
    """One step z -> block(z, x, open): attention to the cells beside, then a small network, a norm behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.norms = nn.ModuleList([nn.LayerNorm(DIM), nn.LayerNorm(DIM)])

    def forward(self, z: Tensor, x: Tensor, open_: Tensor) -> Tensor:
        walls = ~open_.repeat_interleave(HEADS, 0)
        read, _ = self.attention(z, z, z, attn_mask=walls, need_weights=False)
        z = self.norms[0](z + x + read)
        return self.norms[1](z + self.mlp(z))


class Solver(nn.Module):
    """What is known of the cells goes in at every step; what the state has settled in is read at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(2 + len(WAYS), DIM), nn.Linear(DIM, 2)
        # While training a loop of as many steps as are drawn; then Picard's iteration, to its end.
        self.layer = Equilibrium(Block(), steps=range(12, 25), solver=Picard(rtol=1e-3, max_steps=500))

    def forward(self, cells: Tensor, open_: Tensor, steps: int | None = None) -> Tensor:
        return self.head(self.layer(self.embed(cells), open_, steps=steps))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    given = arguments(__doc__, argv)
    torch.manual_seed(given.seed)
    learnt = mazes(TRAINED, 100 if given.quick else 5000, f"to train {given.seed}")

    def batch() -> tuple[tuple[Tensor, Tensor], Tensor]:
        some = torch.randint(len(learnt.path), (64,))
        return (learnt.cells[some], learnt.open[some]), learnt.path[some]

    solver = Solver()
    seconds = train(solver, batch, updates=5 if given.quick else 500)
    tests = {
        f"{size} x {size}": mazes(size, 8 if given.quick else 100, "to test")
        for size in SIZES[: 2 if given.quick else None]
    }
    sets = {name: ((test.cells, test.open), test.path) for name, test in tests.items()}
    return {"seconds": seconds} | compare("mazes", solver, sets, loop=18)


if __name__ == "__main__":
    main()
