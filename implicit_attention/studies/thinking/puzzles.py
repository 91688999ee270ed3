"""The table of the puzzles."""

from __future__ import annotations

from .pixels import PixelMaze
from .prefix import Prefix
from .puzzle import Puzzle
from .sudoku import Sudoku

#: By name. To add one: its file in this folder, its line here, and its weights by `implicit-attention think --train`.
PUZZLES: dict[str, Puzzle] = {puzzle.name: puzzle for puzzle in (PixelMaze(), Prefix(), Sudoku())}
