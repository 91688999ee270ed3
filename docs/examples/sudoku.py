"""Sudoku, 4 x 4: a block learns puzzles with 6 to 8 givens in a loop, and solves those with 4 and 5 by iterating on.

python docs/examples/sudoku.py
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from _puzzles import Examples, arguments, compare, train
from torch import Tensor, nn

from implicit_attention import EquilibriumTransformer, Picard

DIM, HEADS, SIDE, CELLS = 32, 4, 4, 16
LEARNT, ASKED = (6, 7, 8), (4, 5)


def every_grid() -> Tensor:
    """(288, 16): all that put every digit once into each row, column and box."""
    rows = list(itertools.permutations(range(SIDE)))
    grids = torch.tensor([sum(four, ()) for four in itertools.product(rows, repeat=SIDE)]).view(-1, SIDE, SIDE)
    grids = grids[(grids.sort(1).values == torch.arange(SIDE)[:, None]).all((1, 2))]
    boxes = grids.view(-1, 2, 2, 2, 2).transpose(2, 3).reshape(-1, SIDE, SIDE)
    return grids[(boxes.sort(2).values == torch.arange(SIDE)).all((1, 2))].flatten(1)


def puzzles(grids: Tensor, givens: int, count: int, generator: torch.Generator) -> Examples:
    """Puzzles with one solution: what is known of each cell (B, 16, 21), and the digits (B, 16)."""
    found: list[Tensor] = []
    while sum(map(len, found)) < count:
        grid = grids[torch.randint(len(grids), (4 * count,), generator=generator)]
        given = torch.rand(4 * count, CELLS, generator=generator).argsort(-1) < givens
        fitting = ((grids == grid[:, None]) | ~given[:, None]).all(-1).sum(-1)
        found.append(torch.where(given, grid, grid + SIDE + 1)[fitting == 1])
    asked = torch.cat(found)[:count]
    # Which cell it is, and its digit or that it has none; a grid beyond the digits is one that is not given.
    shown = F.one_hot(asked.clamp(max=SIDE), SIDE + 1)
    cells = torch.cat([torch.eye(CELLS).expand(count, -1, -1), shown], -1)
    return (cells,), asked % (SIDE + 1)


class Solver(nn.Module):
    """One transformer block, repeated: each cell attends to all cells."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(CELLS + SIDE + 1, DIM), nn.Linear(DIM, SIDE)
        # While training a loop of as many steps as are drawn; then Picard's iteration, to its end.
        solver = Picard(rtol=1e-3, max_steps=300)
        options = {"solver": solver, "steps": range(4, 17), "on_failure": "ignore"}
        self.layer = EquilibriumTransformer(DIM, HEADS, injection="film", **options)

    def forward(self, cells: Tensor, steps: int | None = None) -> Tensor:
        return self.head(self.layer(self.embed(cells), steps=steps))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    given = arguments(__doc__, argv)
    torch.manual_seed(given.seed)
    grids, generator = every_grid(), torch.Generator().manual_seed(given.seed)

    def batch() -> Examples:
        index = int(torch.randint(len(LEARNT), (), generator=generator))
        return puzzles(grids, LEARNT[index], 64, generator)

    solver = Solver()
    seconds = train(solver, batch, updates=5 if given.quick else 1000)
    count, held_out = (16 if given.quick else 500), torch.Generator().manual_seed(1000)
    sets = {f"{givens} givens": puzzles(grids, givens, count, held_out) for givens in ASKED}
    return {"seconds": seconds} | compare("sudoku", solver, sets, loop=10)


if __name__ == "__main__":
    main()
