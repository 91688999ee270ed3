"""An answer that grows in the terminal, evaluation by evaluation, and the pictures of it in colours and characters."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from ..studies.errors import InputError
from .errors import writable

if TYPE_CHECKING:
    from rich.console import Console

#: Colours of the view: from "not on the path" to "on the path", and those of walls, start and goal.
OFF, ON, WALL, START, GOAL = (238, 240, 242), (0, 114, 178), (27, 39, 51), (0, 158, 115), (213, 94, 0)
#: Numbers of pixels that are no shade.
WALL_LEVEL, START_LEVEL, GOAL_LEVEL = -1.0, -2.0, -3.0
#: Lines that the view needs beside the picture, and the most frames of a GIF.
BESIDE, FRAMES = 5, 150

Colour = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Watched:
    """A solve to watch.

    Attributes:
        title: above it.
        evaluations: how many there are.
        line: what is said after an evaluation, given its number from 0.
        view: the picture of that answer.
        drawn: the last answer in plain characters.
        verdict: the outcome.
        size: columns and lines of the picture.
    """

    title: str
    evaluations: int
    line: Callable[[int], str]
    view: Callable[[int], Text]
    drawn: list[str]
    verdict: str
    size: tuple[int, int]


def show(console: Console, watched: Watched, speed: float) -> None:
    """Show a solve, `speed` evaluations in a second, on a large enough terminal with colours, else as text."""
    from rich.console import Group
    from rich.live import Live

    columns, lines = watched.size[0], watched.size[1] + BESIDE
    if not shows_colours(console):
        console.print(watched.title, markup=False)
        for line in (*progress_lines(watched), *watched.drawn):
            console.print(line, markup=False)
    elif columns > console.width or lines > console.height:
        needed = f"{columns} columns and {lines} lines, this one has {console.width} and {console.height}"
        advice = f"to watch it a terminal needs {needed}; enlarge it, or choose a smaller --size"
        console.print(f"{watched.title}: {advice}", markup=False)
        for line in progress_lines(watched):
            console.print(line, markup=False)
    else:
        with Live(console=console, auto_refresh=False) as live:
            for index in range(watched.evaluations):
                parts = Text(watched.title), watched.view(index), Text(watched.line(index))
                live.update(Group(*parts), refresh=True)
                time.sleep(1 / speed)
    console.print(watched.verdict, style="bold", markup=False)
    console.print()


def shows_colours(console: Console) -> bool:
    """Return whether a picture in colours can be seen there and drawn over."""
    return console.is_interactive and console.color_system is not None and not console.no_color


def progress_lines(watched: Watched) -> Iterator[str]:
    """Describe the states after 1, 2, 4, ... evaluations and the last one."""
    last = watched.evaluations - 1
    for index in (*(2**power - 1 for power in range(last.bit_length())), last):
        yield watched.line(index)


def pixels(levels: list[list[float]]) -> Text:
    """Return levels in colours: every character is two pixels, one above the other."""
    text = Text(no_wrap=True)
    for upper, lower in zip(levels[::2], [*levels[1::2], None][: len(levels[::2])], strict=True):
        for index, value in enumerate(upper):
            style = f"rgb({rgb(value)})"
            text.append("▀", f"{style} on rgb({rgb(lower[index])})" if lower else style)
        text.append("\n")
    text.right_crop(1)
    return text


def tiles(levels: list[list[float]], cells: list[list[str]]) -> Text:
    """Return characters, each on the colour of its level."""
    text = Text(no_wrap=True)
    for row, words in zip(levels, cells, strict=True):
        for value, word in zip(row, words, strict=True):
            light = value < 0 or value > 0.5
            text.append(word, f"rgb({','.join(map(str, OFF if light else WALL))}) on rgb({rgb(value)})")
        text.append("\n")
    text.right_crop(1)
    return text


def rgb(value: float) -> str:
    """Return the colour of a level."""
    marks: dict[float, Colour] = {WALL_LEVEL: WALL, START_LEVEL: START, GOAL_LEVEL: GOAL}
    mixed = (round(off + (on - off) * max(value, 0.0)) for off, on in zip(OFF, ON, strict=True))
    return ",".join(map(str, marks.get(value, tuple(mixed))))


def check_file(option: str, file: Path | None, ending: str) -> None:
    """Raise `InputError` unless a file with this ending can be made there."""
    if file is None:
        return
    if file.suffix.lower() != ending:
        raise InputError(f"`{option}` must end in {ending}, got {file.name!r}; try {option} {file.stem}{ending}")
    if file.is_dir():
        raise InputError(f"`{option}` must be a file, got the folder {str(file)!r}; choose another name")
    if not file.absolute().parent.is_dir():
        folder = str(file.parent)
        raise InputError(f"`{option}` must lie in a folder that exists, got {folder!r}; make it, or choose another")
    with writable(option, file):
        new = not os.path.lexists(file)
        file.open("ab").close()
        if new:
            file.unlink()
