"""Sudoku of 4 x 4: cells know their row, column and box and attend to all; learnt with 6 to 8 givens, asked with 4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import EquilibriumTransformer, Picard
from ..errors import InputError
from .grids import CELLS, SIDE, drawn, solutions
from .puzzle import RTOL, Asked, LoopRecipe, Problems, Puzzle, Thinker, View
from .reading import text_of

DIM, HEADS = 32, 4
GIVENS = (6, 7, 8)
#: The fewest givens of a puzzle with one solution, and the most that leave something to find.
SMALLEST, LARGEST = 4, 15
MOST = 300


class Sudoku(Puzzle):
    """Puzzles; the class of a cell is its digit - 1."""

    name, places, sized = "sudoku", "cells", "{} givens"
    kind, learnt = "Sudoku of 4 x 4", f"ones with {GIVENS[0]} to {GIVENS[-1]} givens"
    size, sizes, count = 4, (4, 5, 7), 200
    lettered, judge = True, "comparison with all 288 grids"
    usage = f"a number of givens from {SMALLEST} to {LARGEST}"
    recipe = LoopRecipe(updates=1000, batch=64, rate=3e-3, steps=range(4, 17))

    def fits(self, size: int) -> bool:
        return SMALLEST <= size <= LARGEST

    def model(self) -> Thinker:
        layer = EquilibriumTransformer(DIM, HEADS, solver=Picard(rtol=RTOL, max_steps=MOST))
        return Thinker(nn.Linear(4 * SIDE + 1, DIM), layer, nn.Linear(DIM, SIDE), axis=-1)

    def learn(self, count: int, generator: torch.Generator) -> Problems:
        givens = GIVENS[int(torch.randint(len(GIVENS), (), generator=generator))]
        puzzles = drawn(givens, count, generator, test=False)
        return Problems(told(puzzles.shown), puzzles.grids)

    def ask(self, size: int, count: int, seed: int) -> Problems:
        puzzles = drawn(size, count, torch.Generator().manual_seed(seed), test=True)
        return Problems(told(puzzles.shown), puzzles.grids)

    def read(self, file: Path, **places: Any) -> Asked:
        text = "".join(text_of(file, "16 digits").split()).replace(".", "0")
        if len(text) != CELLS or set(text) - set("01234"):
            required = f"hold {CELLS} characters, digits 1 to {SIDE} and 0 or . for an empty cell"
            received = repr(text) if len(text) <= 2 * CELLS else f"{len(text)} characters that begin {text[:CELLS]!r}"
            raise InputError(f"`--file` must {required}, got {received}; write the grid row by row")
        shown = torch.tensor([int(digit) for digit in text])
        grids = solutions(shown)
        if not len(grids):
            raise InputError("`--file` must hold a puzzle that has a solution, got one that none of all 288 grids fits")
        givens, notes = int((shown > 0).sum()), list[str]()
        if len(grids) > 1:
            known = "the model was trained on puzzles with one"
            notes.append(f"{len(grids)} grids fit these givens ({known}); an answer is right if it is one of them")
        return Asked(Problems(told(shown[None]), grids[:1]), f"{self.sized.format(givens)}, {file.name}", tuple(notes))

    def wrong(self, problem: Problems, classes: Tensor) -> int:
        return int((solutions(shown_in(problem)) != classes).sum(-1).min())

    def view(self, problem: Problems, answer: Tensor) -> View:
        """Four rows of digits, those that are given in brackets; the shade of others is how sure they are."""
        shown = shown_in(problem)
        sure, digits = answer.max(-1)
        both = zip(shown.tolist(), digits.tolist(), strict=True)
        cells = [f"[{given}]" if given else f" {found + 1} " for given, found in both]
        levels = torch.where(shown > 0, torch.nan, sure).view(SIDE, SIDE)
        return View(levels, [cells[begin : begin + SIDE] for begin in range(0, CELLS, SIDE)])


def told(shown: Tensor) -> Tensor:
    """Return what cells know, (B, 16, 17): their digit or that it is not given, their row, column and box."""
    row, column = torch.arange(CELLS) // SIDE, torch.arange(CELLS) % SIDE
    units = torch.stack([row, column, row // 2 * 2 + column // 2], -1)
    where = F.one_hot(units, SIDE).flatten(1).expand(len(shown), -1, -1)
    return torch.cat([F.one_hot(shown, SIDE + 1), where], -1).float()


def shown_in(problem: Problems) -> Tensor:
    """Return the givens of one problem, (16,): a digit, or 0."""
    return problem.inputs[0, :, : SIDE + 1].argmax(-1)
