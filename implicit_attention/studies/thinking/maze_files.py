"""Mazes of one's own, as text or as an image, and what is known of them without a network."""

from __future__ import annotations

import collections
import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import InputError
from .reading import text_of

Square = tuple[int, int]

#: Characters of a text; dots are free squares too, so that an answer may be read again.
WALL, FREE, START, GOAL = "#", " .", "S", "G"
#: By how much green or red must stand out in a pixel, and the brightness of the lightest wall.
STANDS_OUT, DARK = 60, 127
#: Sides of a maze, in squares without its frame.
SMALLEST, LARGEST = 2, 65


class Squares(NamedTuple):
    """A maze: which squares are free, row by row, and two of them."""

    free: list[list[bool]]
    start: Square
    goal: Square

    def ways(self, square: Square) -> list[Square]:
        """Return the free squares beside one."""
        row, column = square
        beside = ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1))
        height, width = len(self.free), len(self.free[0])
        return [(r, c) for r, c in beside if 0 <= r < height and 0 <= c < width and self.free[r][c]]

    def reached(self) -> dict[Square, Square]:
        """Return by which square each one is reached first from the start, by breadth-first search."""
        before, waiting = {self.start: self.start}, collections.deque([self.start])
        while waiting:
            here = waiting.popleft()
            for there in self.ways(here):
                if there not in before:
                    before[there] = here
                    waiting.append(there)
        return before

    def shortest(self) -> list[Square]:
        """Return a shortest path from the goal to the start; empty if there is none."""
        before = self.reached()
        path = [self.goal] if self.goal in before else []
        while path and path[-1] != self.start:
            path.append(before[path[-1]])
        return path

    def has_loops(self) -> bool:
        """Return whether two paths lead to some square that can be reached."""
        squares = self.reached()
        return sum(len(self.ways(square)) for square in squares) // 2 >= len(squares)

    def is_narrow(self) -> bool:
        """Return whether all ways are one square wide: no four free squares make a larger one."""
        pairs = [[a and b for a, b in itertools.pairwise(row)] for row in self.free]
        return not any(a and b for rows in itertools.pairwise(pairs) for a, b in zip(*rows, strict=True))


def squares_of(file: Path, start: Square | None = None, goal: Square | None = None) -> Squares:
    """Read a maze, an image if the name ends in .png; `start` and `goal` are rows and columns that it does not mark."""
    free, starts, goals = _image(file) if file.suffix.lower() == ".png" else _text(file)
    height, width = len(free), len(free[0])
    for option, place, marked in (("--start", start, starts), ("--goal", goal, goals)):
        if place is None:
            continue
        row, column = place
        if not (row < height and column < width and free[row][column]):
            where = f"{row},{column}" + (", a wall" if row < height and column < width else "")
            required = f"be a free square, rows 0 to {height - 1} and columns 0 to {width - 1}"
            raise InputError(f"`{option}` must {required}, got {where}; choose another")
        marked.append(place)
    for word, letter, color, found in (("start", START, "green", starts), ("goal", GOAL, "red", goals)):
        if len(found) != 1:
            received = "none" if not found else f"{len(found)}"
            remedy = f"mark one square with {letter}, a pixel of an image in {color}, or pass --{word} ROW,COLUMN"
            raise InputError(f"`--file` must have one {word}, got {received}; {remedy}")
    if starts == goals:
        raise InputError(f"`--file` must have a start and a goal apart, got {starts[0]} for both; move one")
    drawing = _without_frame(Squares(free, starts[0], goals[0]))
    sides = len(drawing.free), len(drawing.free[0])
    if not (min(sides) >= SMALLEST and max(sides) <= LARGEST):
        required = f"have sides of {SMALLEST} to {LARGEST} squares without its frame"
        raise InputError(f"`--file` must {required}, got {sides[0]} x {sides[1]}; choose another maze")
    if not drawing.shortest():
        raise InputError("`--file` must have a path from start to goal, got walls between them; open one")
    return drawing


def _text(file: Path) -> tuple[list[list[bool]], list[Square], list[Square]]:
    lines = text_of(file, "a maze (save an image as .png)").strip("\r\n").splitlines()
    if widths := sorted({len(line) for line in lines})[1:]:
        shortest = min(map(len, lines))
        remedy = "fill up short lines with # for walls, or dots for free squares"
        raise InputError(f"`--file` must have lines of one length, got {shortest} and {widths[-1]}; {remedy}")
    if not lines:
        raise InputError(f"`--file` must hold a maze, got an empty file: {file.name!r}; draw walls with #")
    for row, line in enumerate(lines):
        for column, letter in enumerate(line):
            if letter not in WALL + FREE + START + GOAL:
                required = "hold # for walls, spaces or dots for free squares, S and G"
                raise InputError(f"`--file` must {required}, got {letter!r} in row {row}, column {column}; replace it")
    return [[letter != WALL for letter in line] for line in lines], _found(lines, START), _found(lines, GOAL)


def _found(lines: Sequence[str], letter: str) -> list[Square]:
    return [(row, column) for row, line in enumerate(lines) for column, one in enumerate(line) if one == letter]


def _image(file: Path) -> tuple[list[list[bool]], list[Square], list[Square]]:
    from PIL import Image

    try:
        with warnings.catch_warnings():
            # How large it may be is said below.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(file)
        with image:
            width, height = image.size
            if max(width, height) > LARGEST + 2:
                required = f"have one pixel for each square, and at most {LARGEST + 2} a side"
                raise InputError(f"`--file` must {required}, got {width} x {height}; shrink the image")
            # What is transparent is white.
            pixels = image.convert("RGBA")
            drawn = Image.alpha_composite(Image.new("RGBA", pixels.size, "white"), pixels)
    except Image.DecompressionBombError:
        required = f"have one pixel for each square, and at most {LARGEST + 2} a side"
        raise InputError(f"`--file` must {required}, got far more: {file.name!r}; shrink the image") from None
    except (OSError, SyntaxError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a PNG image"
        raise InputError(f"`--file` must be an image that can be read, got {file.name!r} ({reason})") from None
    raw = drawn.tobytes()
    lines = [
        "".join(_letter(*raw[4 * k : 4 * k + 3]) for k in range(r * width, (r + 1) * width)) for r in range(height)
    ]
    return [[letter != WALL for letter in line] for line in lines], _found(lines, START), _found(lines, GOAL)


def _letter(red: int, green: int, blue: int) -> str:
    """Return the square that a pixel is."""
    if green > max(red, blue) + STANDS_OUT:
        return START
    if red > max(green, blue) + STANDS_OUT:
        return GOAL
    return WALL if (red + green + blue) / 3 <= DARK else FREE[0]


def _without_frame(drawing: Squares) -> Squares:
    """Return the maze without walls all around it, which it has anyway."""
    free = drawing.free
    if any(map(any, (free[0], free[-1], [row[0] for row in free], [row[-1] for row in free]))):
        return drawing
    start, goal = ((row - 1, column - 1) for row, column in drawing[1:])
    return Squares([row[1:-1] for row in free[1:-1]], start, goal)
