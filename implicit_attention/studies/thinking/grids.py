"""All 288 grids of a Sudoku of 4 x 4, and all its puzzles with one solution, by comparison."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

SIDE, CELLS = 4, 16


@functools.cache
def every_grid() -> Tensor:
    """(288, 16): all grids, in the order of their digits 0 to 3."""
    rows = list(itertools.permutations(range(SIDE)))
    bands = [(*a, *b) for a, b in itertools.product(rows, repeat=2) if {*a[:2], *b[:2]} == {*a[2:], *b[2:]} == {*a}]
    return torch.tensor([[*a, *b] for a, b in itertools.product(bands, repeat=2) if _fit(a, b)])


def _fit(upper: tuple[int, ...], lower: tuple[int, ...]) -> bool:
    """Return whether the columns of two bands have four digits."""
    return all(len({*upper[column::SIDE], *lower[column::SIDE]}) == SIDE for column in range(SIDE))


#: The grids of `every_grid` whose first row is 0, 1, 2, 3: it is sorted.
NAMED = slice(0, 12)


@functools.cache
def unique() -> Tensor:
    """(12, 65536): for the grids up to names, in the order of `every_grid`, which sets of givens, as bits, tell it."""
    grids, bits = every_grid(), 2 ** torch.arange(CELLS)
    named = grids[NAMED]
    agree = ((named[:, None] == grids) * bits).sum(-1)
    agree = agree[agree != 2**CELLS - 1].view(len(named), -1)
    two = torch.zeros(len(named), 2**CELLS, dtype=torch.bool).scatter_(1, agree, True)
    # What two grids agree on they agree on in part.
    for bit in range(CELLS):
        without = two.view(len(named), -1, 2, 2**bit)
        without[:, :, 0] |= without[:, :, 1].clone()
    return ~two


class Puzzles(NamedTuple):
    """Grids (B, cells) and which of their digits are given (B, cells)."""

    grids: Tensor
    given: Tensor

    @property
    def shown(self) -> Tensor:
        """(B, cells): the digit of a cell + 1 where it is given, and 0 elsewhere."""
        return torch.where(self.given, self.grids + 1, 0)


@functools.cache
def puzzles_of(givens: int, test: bool) -> Puzzles:
    """All puzzles up to names; a fifth is to test with."""
    which = torch.arange(2**CELLS)
    which = which[sum(which >> bit & 1 for bit in range(CELLS)) == givens]
    grid, chosen = unique()[:, which].nonzero().T
    order = torch.randperm(len(grid), generator=torch.Generator().manual_seed(givens))
    order = order[: len(order) // 5] if test else order[len(order) // 5 :]
    given = which[chosen[order], None] >> torch.arange(CELLS) & 1
    return Puzzles(every_grid()[NAMED][grid[order]], given == 1)


def drawn(givens: int, count: int, generator: torch.Generator, *, test: bool) -> Puzzles:
    """Random puzzles to learn from or to test with, with random names of the digits."""
    grids, given = puzzles_of(givens, test)
    index = torch.randint(len(grids), (count,), generator=generator)
    names = torch.rand(count, SIDE, generator=generator).argsort(-1)
    return Puzzles(names.gather(1, grids[index]), given[index])


def solutions(shown: Tensor) -> Tensor:
    """Return all grids (n, cells) that agree with what is shown (cells,): a digit + 1, or 0 for an empty cell."""
    grids = every_grid()
    return grids[((grids + 1 == shown) | (shown == 0)).all(-1)]
