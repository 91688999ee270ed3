"""One experiment of the demonstration: a picture, numbers with their evidence, and the code for them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One experiment, and what the page shows of it.

    Attributes:
        name: of its section and of its picture.
        title: a heading.
        text: sentences on what was done and what came out.
        picture: a figure, or the bytes of a GIF.
        ending: of the name of that file.
        description: the picture in words.
        headers: of the table.
        rows: of the table, in words; the first cell names the row.
        notes: lines on the evidence.
        code: Python code that computes the same with the public library.
        further: commands that show more.
        numbers: for the JSON file.
    """

    name: str
    title: str
    text: str
    picture: bytes | Figure
    ending: str
    description: str
    headers: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: tuple[str, ...]
    code: str
    further: tuple[str, ...]
    numbers: dict[str, Any]
