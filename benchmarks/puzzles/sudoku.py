"""Sudoku of 4 x 4, 6 x 6 and 9 x 9: cells are tokens, a cell is told its given digit, the grid is the answer.

Puzzles of 4 x 4 have one solution by comparison with all 288 grids. Those of 6 x 6 and 9 x 9 are dug: a digit leaves a
grid only where those that stay force it at once (its cell has no other digit, or its digit no other cell of a row,
column or box). Put back in turn they prove that there is one solution, which naked and hidden singles find.

No digit has a meaning of its own: two grids that differ by their names alone are one here, and puzzles of the grids to
test with are never learnt from (4 x 4, whose 288 grids are 12 up to names: no such *puzzle*).
"""

from __future__ import annotations

import dataclasses
import functools
import random
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from implicit_attention.adjoints import OneStep
from implicit_attention.solvers import TorchDEQ
from implicit_attention.studies.thinking.grids import Puzzles, drawn

from .contenders import Claim, Contender, Plan
from .mazes import Repeated
from .models import Examples, Model, Shape, mask_of
from .training import CAP, RTOL, Fixed, Loop, Recipe, Settled, Solved, TorchDEQLayer


class Board(NamedTuple):
    """A grid of side x side cells in boxes of `height` x `width`, side = height width."""

    height: int
    width: int

    @property
    def side(self) -> int:
        return self.height * self.width

    @property
    def cells(self) -> int:
        return self.side**2

    def units(self) -> Tensor:
        """(3, cells): which row, column and box a cell is in."""
        row, column = torch.arange(self.cells) // self.side, torch.arange(self.cells) % self.side
        return torch.stack([row, column, row // self.height * self.height + column // self.width])

    def together(self) -> Tensor:
        """(3, cells, cells): which cells share a row, a column, a box; each shares all with itself."""
        units = self.units()
        return units[:, :, None] == units[:, None]

    def peers(self) -> Tensor:
        """(cells, cells): which cells must differ."""
        return self.together().any(0) & ~torch.eye(self.cells, dtype=torch.bool)


SMALL, MIDDLE, LARGE = Board(2, 2), Board(2, 3), Board(3, 3)


# ------------------------------------------------------------------ grids


def filled(board: Board, draw: random.Random) -> list[int]:
    """A complete grid, by search: the cell with fewest digits left, which are tried in a random order."""
    units = [[int(u) for u in row] for row in board.units()]
    left = [[(1 << board.side) - 1] * board.side for _ in units]
    grid = [-1] * board.cells

    def search() -> bool:
        best, free = -1, 0
        for cell in range(board.cells):
            if grid[cell] < 0:
                bits = left[0][units[0][cell]] & left[1][units[1][cell]] & left[2][units[2][cell]]
                if best < 0 or bits.bit_count() < free.bit_count():
                    best, free = cell, bits
                if free.bit_count() <= 1:
                    break
        if best < 0:
            return True
        digits = [digit for digit in range(board.side) if free >> digit & 1]
        draw.shuffle(digits)
        for digit in digits:
            for kind, unit in zip(left, units, strict=True):
                kind[unit[best]] ^= 1 << digit
            grid[best] = digit
            if search():
                return True
            grid[best] = -1
            for kind, unit in zip(left, units, strict=True):
                kind[unit[best]] ^= 1 << digit
        return False

    search()
    return grid


def renamed(grids: Tensor) -> Tensor:
    """Grids (B, cells) with digits named so that the first row is 0, 1, 2, ..."""
    side = round(grids.shape[-1] ** 0.5)
    return grids[:, :side].argsort(-1).gather(-1, grids)


def held_out(grids: Tensor) -> Tensor:
    """(B,): which grids are to test with, a fifth of all; the same for all names of the digits."""
    weights = torch.randint(1, 2**20, grids.shape[-1:], generator=torch.Generator().manual_seed(0))
    return (renamed(grids) * weights).sum(-1) % 1009 % 5 == 0


def rearranged(board: Board, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random symmetries: where each cell of a new grid comes from, (B, cells), and new names, (B, side).

    Rows within their band, bands, columns within their stack, stacks, names; and transposition where boxes are square.
    """

    def lines(groups: int, size: int) -> Tensor:
        order = torch.rand(count, groups, generator=generator).argsort(-1)
        within = torch.rand(count, groups, size, generator=generator).argsort(-1)
        return (order[..., None] * size + within).flatten(1)

    rows = lines(board.side // board.height, board.height)
    columns = lines(board.side // board.width, board.width)
    source = (rows[:, :, None] * board.side + columns[:, None]).flatten(1)
    if board.height == board.width:
        turned = source.view(count, board.side, board.side).transpose(1, 2).flatten(1)
        source = torch.where(torch.rand(count, 1, generator=generator) < 0.5, turned, source)
    return source, torch.rand(count, board.side, generator=generator).argsort(-1)


# ------------------------------------------------------------------ puzzles


def forced(board: Board, known: Tensor, *, hidden: bool = True) -> Tensor:
    """(B, cells, side): digits that known ones (B, cells, side; nothing or one digit each) force at empty cells.

    A cell has no other digit (a naked single), or, with `hidden`, a digit no other cell of a row, column or box.
    """
    empty = known.sum(-1, keepdim=True) == 0
    possible = (board.peers().float() @ known == 0) & empty
    found = possible & (possible.sum(-1, keepdim=True) == 1)
    for together in board.together().float() if hidden else ():
        found |= possible & (together @ possible.float() == 1)
    return found


def dug(board: Board, grids: Tensor, generator: torch.Generator) -> Tensor:
    """(B, cells): when a digit leaves a grid; cells if it has to stay."""
    count = len(grids)
    known = F.one_hot(grids, board.side).float()
    order, every = torch.rand(count, board.cells, generator=generator).argsort(-1), torch.arange(count)
    when, gone = torch.full_like(grids, board.cells), torch.zeros(count, dtype=torch.long)
    for cell in order.unbind(-1):
        before = known[every, cell]
        known[every, cell] = 0
        proved = forced(board, known)[every, cell][every, grids[every, cell]]
        when[every, cell] = torch.where(proved, gone, board.cells)
        known[every, cell] = torch.where(proved[:, None], 0, before)
        gone += proved
    return when


def givens(examples: Examples) -> Tensor:
    """The givens, and the first digit wherever there is none."""
    side = round(examples.inputs.shape[1] ** 0.5)
    return examples.inputs[..., 1 : side + 1].argmax(-1)


def singles(examples: Examples) -> Tensor:
    """What naked singles find, in turn, from the givens; a first digit elsewhere."""
    side = round(examples.inputs.shape[1] ** 0.5)
    board = next(board for board in (SMALL, MIDDLE, LARGE) if board.side == side)
    known = examples.inputs[..., 1 : side + 1].clone()
    while (new := forced(board, known, hidden=False)).any():
        known += new
    return known.argmax(-1)


#: Grids that are dug, from which symmetries make all others; the last fifth to test with.
POOL = 1000


class Sudoku:
    """Puzzles of one board.

    givens: how many digits are given in puzzles to learn from, drawn for every batch. A set to test with is called
        `k givens`.
    """

    def __init__(self, board: Board, givens: tuple[int, ...], *, dim: int = 32, heads: int = 4) -> None:
        self.board, self.givens = board, givens
        self.name = f"sudoku{'' if board == SMALL else board.side}"
        features = self.known_of_cells.shape[-1] + board.side + 1
        self.shape = Shape(features=features, classes=board.side, dim=dim, heads=heads)

    @functools.cached_property
    def known_of_cells(self) -> Tensor:
        """(cells, features): which cell it is; on larger boards which row, column and box it is in."""
        if self.board == SMALL:
            return torch.eye(self.board.cells)
        return F.one_hot(self.board.units().T, self.board.side).flatten(1).float()

    @functools.cached_property
    def edges(self) -> Tensor:
        """(cells, K): the cells that one attends to: all of 4 x 4; itself and those that must differ of larger ones."""
        cells = torch.arange(self.board.cells)
        if self.board == SMALL:
            return cells.expand(16, 16)
        seen = self.board.peers() | (cells[:, None] == cells)
        return seen.nonzero()[:, 1].view(len(cells), -1)

    @functools.cached_property
    def pool(self) -> tuple[Tensor, Tensor]:
        """Dug grids and when their digits left them."""
        draw = random.Random(f"{self.board}")
        grids = torch.tensor([filled(self.board, draw) for _ in range(POOL)])
        return grids, dug(self.board, grids, torch.Generator().manual_seed(0))

    def puzzles(self, givens: int, count: int, generator: torch.Generator, *, test: bool) -> Puzzles:
        """Random ones to learn from or to test with."""
        if self.board == SMALL:
            return drawn(givens, count, generator, test=test)
        grids, when = self.pool
        deep = (when < self.board.cells).sum(-1) >= self.board.cells - givens
        deep &= (torch.arange(POOL) >= POOL * 4 // 5) == test
        # A fifth of the grids are to test with.
        some = (8 if test else 2) * count + 64
        index = deep.nonzero()[:, 0][torch.randint(int(deep.sum()), (some,), generator=generator)]
        source, names = rearranged(self.board, some, generator)
        grids = names.gather(1, grids[index].gather(1, source))
        given = when[index].gather(1, source) >= self.board.cells - givens
        wanted = held_out(grids) == test
        return Puzzles(grids[wanted][:count], given[wanted][:count])

    def examples(self, puzzles: Puzzles) -> Examples:
        count = len(puzzles.grids)
        digits = F.one_hot(torch.where(puzzles.given, puzzles.grids + 1, 0), self.board.side + 1).float()
        cells = self.known_of_cells.expand(count, -1, -1)
        return Examples(torch.cat([digits, cells], -1), self.edges.expand(count, -1, -1), puzzles.grids)

    def draw(self, count: int, generator: torch.Generator) -> Examples:
        givens = self.givens[int(torch.randint(len(self.givens), (), generator=generator))]
        learnt = self.examples(self.puzzles(givens, count, generator, test=False))
        return learnt._replace(edges=mask_of(self.edges).expand(count, -1, -1))

    @functools.cache  # noqa: B019 (there is one task, for as long as its process)
    def test(self, name: str, count: int) -> Examples:
        """Of the set `k givens`."""
        givens = int(name.split()[0])
        return self.examples(self.puzzles(givens, count, torch.Generator().manual_seed(2**31 + givens), test=True))


# ------------------------------------------------------------------ who competes

#: Updates of the weights, and steps of the loop in training, whose numbers are drawn: that makes states settle.
UPDATES, STEPS, MEAN = 1000, range(4, 17), 10
#: Blocks of the stack that costs what solving costs.
DEEP = 28
TORCHDEQ = Solved(TorchDEQ("anderson", rtol=RTOL, max_steps=CAP), "solved by torchdeq's anderson")
TIED = "tied, 4 to 16 steps drawn"
NAKED = Contender("naked singles", None, guess=singles)
GIVENS = Contender("givens, and the first digit", None, guess=givens)


def repeating(recipe: Recipe, deep: int, *, solvers: bool = False) -> tuple[Contender, ...]:
    """Tied blocks, with drawn and with fixed numbers of steps; stacks of the FLOPs of training, and of solving."""
    ways = (Solved(), Fixed(MEAN), Fixed(8 * MEAN))
    fixed = dataclasses.replace(recipe, training=Loop(MEAN))
    return (
        Contender(TIED, recipe, ways, solvers=solvers),
        Contender(f"tied, {MEAN} steps", fixed, ways),
        Contender(f"stack of {MEAN}", fixed, (Fixed(MEAN),), make=partial(Model, blocks=MEAN)),
        Contender(
            f"stack of {deep}",
            dataclasses.replace(recipe, training=Loop(deep)),
            (Fixed(deep),),
            make=partial(Model, blocks=deep),
        ),
    )


TASK = Sudoku(SMALL, (6, 7, 8))
SETS = ("4 givens", "5 givens", "7 givens")
RECIPE = Recipe(Loop(STEPS), UPDATES)

PLAN = Plan(
    "SUDOKU",
    TASK,
    "4 x 4 grids whose cells know their place and attend to all others; trained with 6 to 8 givens.",
    (
        *repeating(RECIPE, DEEP, solvers=True),
        Contender("tied, one-step gradient", dataclasses.replace(RECIPE, training=Settled(OneStep())), (Solved(),)),
        Contender(
            "torchdeq's layer, implicit",
            dataclasses.replace(RECIPE, training=TorchDEQLayer()),
            (TORCHDEQ, Solved()),
        ),
        Contender("RepeatedSelfAttention", RECIPE, (Solved(),), make=Repeated),
        GIVENS,
        NAKED,
    ),
    SETS,
    costs=SETS[0],
    solver_set=SETS[0],
    leader=(TIED, "solved"),
    drawn=((TIED, "solved"), (TIED, f"{MEAN} steps"), (f"stack of {MEAN}", f"{MEAN} steps")),
    claims=(
        Claim(TIED, "solved", SETS[0], ">=", 0.87),
        Claim(TIED, "solved", SETS[0], ">=", 0.93, "exact_converged"),
        Claim(TIED, "solved", SETS[0], "<=", 0.1, "exact_unconverged"),
    ),
    notes=(
        "Sudoku: every puzzle has one solution: of 4 x 4 by comparison with all 288 grids, of 6 x 6 and 9 x 9 as a "
        "digit is taken away only where naked or hidden singles force it at once. Puzzles to test with are not learnt "
        "from, nor are (6 x 6, 9 x 9) their grids, whatever their digits are called. Naked singles solve all of them: "
        "what is asked is whether a block finds the rule.",
    ),
)


def larger(task: Sudoku, told: str, recipe: Recipe, deep: int, sets: tuple[str, ...], seeds: tuple[int, ...]) -> Plan:
    """Of boards whose cells attend to those that must differ."""
    told = f"{told}, whose cells know their row, column and box and attend to cells that must differ."
    contenders = (*repeating(recipe, deep), GIVENS, NAKED)
    metric, leader = task.name.upper(), (TIED, "solved")
    return Plan(metric, task, told, contenders, sets, sets[0], sets[0], leader, seeds=seeds, puzzles=300)


PLANS = (
    PLAN,
    larger(
        Sudoku(MIDDLE, (16, 18, 20, 24)),
        "6 x 6 grids, trained with 16 to 24 givens",
        dataclasses.replace(RECIPE, updates=800),
        25,
        ("12 givens", "14 givens", "18 givens"),
        (0, 1, 2),
    ),
    larger(
        Sudoku(LARGE, (36, 40, 44, 48, 54)),
        "9 x 9 grids, trained with 36 to 54 givens",
        dataclasses.replace(RECIPE, updates=1200, batch=32),
        25,
        ("34 givens", "40 givens", "50 givens"),
        (0, 1),
    ),
)
