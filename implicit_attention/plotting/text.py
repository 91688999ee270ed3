"""Figures of text, with a number for every character."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _validate
from .style import Figure, add_bar, hide_ticks, new_figure

#: Inches of a character, and the size of its letters in points.
WIDE, HIGH, LETTERS = 0.085, 0.18, 8.5
#: The largest number of colours; more numbers of evaluations share them.
COLORS = 16


def text_figure(
    text: str,
    evaluations: Tensor,
    *,
    columns: int = 72,
    label: str = "evaluations of the character",
    title: str = "Text by evaluations",
) -> Figure:
    """Draw text with a colour for the evaluations that every character took, as those of a causal layer's tokens.

    A line ends with its line feed, or after `columns` characters.

    Not for means over many texts: draw those with `evaluations_figure`.

    Args:
        text: at least one character.
        evaluations: a number for every character, (N,).
        columns: the largest number of characters in a line.
        label: of the colours.
        title: above the text.

    Raises:
        ValueError: no text; not as many numbers as characters.

    Examples:
        >>> import torch
        >>> from implicit_attention.plotting import text_figure
        >>> figure = text_figure("two\\nlines", torch.tensor([4, 2, 2, 1, 5, 3, 2, 2, 2]))
        >>> [int(tick) for tick in figure.axes[1].get_yticks()]
        [1, 2, 3, 4, 5]
    """
    _validate.check_integer("columns", columns, low=1)
    _validate.require(len(text) > 0, "text", "hold at least one character", "none")
    numbers = torch.as_tensor(evaluations).detach().double().cpu()
    required = f"have shape ({len(text)},), a number for every character"
    _validate.require(numbers.shape == (len(text),), "evaluations", required, tuple(numbers.shape))
    places = _places(text, columns)
    rows, width = places[-1][0] + 1, max(column for _, column in places) + 1
    cells = torch.full((rows, width), torch.nan, dtype=torch.float64)
    for (row, column), number in zip(places, numbers.tolist(), strict=True):
        cells[row, column] = number
    # The bar needs room, and so does the title of a short text.
    figure = new_figure(max(WIDE * width + 1.2, 4.0), max(HIGH * rows + 0.6, 1.8), title)
    axes: Any = figure.subplots()
    colors, norm, ticks = _colors(float(numbers.min()), float(numbers.max()))
    image = axes.imshow(cells.numpy(), cmap=colors, norm=norm, aspect=HIGH / WIDE, interpolation="nearest")
    for (row, column), number, letter in zip(places, numbers.tolist(), text, strict=True):
        if letter.isprintable() and not letter.isspace():
            ink = "black" if _is_light(colors(norm(number))) else "white"
            place = {"ha": "center", "va": "center_baseline", "family": "monospace", "fontsize": LETTERS}
            # A dollar alone would begin a formula.
            axes.text(column, row, letter, color=ink, parse_math=False, **place)
    hide_ticks(axes)
    axes.spines[:].set_visible(False)
    add_bar(figure, image, label, ax=axes, ticks=ticks, fraction=0.05, aspect=25, shrink=0.9)
    return figure


def _places(text: str, columns: int) -> list[tuple[int, int]]:
    """Row and column of every character."""
    row = column = 0
    places = []
    for letter in text:
        if column == columns:
            row, column = row + 1, 0
        places.append((row, column))
        column += 1
        if letter == "\n":
            row, column = row + 1, 0
    return places


def _colors(low: float, high: float) -> tuple[Any, Any, list[float]]:
    """Colours, what maps numbers to them, and the numbers that are named: a colour for each, if they are few."""
    from matplotlib import colormaps
    from matplotlib.colors import BoundaryNorm

    first, last = round(low), max(round(high), round(low) + 1)
    step = -(-(last - first + 1) // COLORS)
    count = -(-(last - first + 1) // step)
    bounds = [first - 0.5 + step * i for i in range(count + 1)]
    colors = colormaps["YlGnBu"].resampled(count)
    return colors, BoundaryNorm(bounds, count), [bound + step / 2 for bound in bounds[:-1]]


def _is_light(color: tuple[float, ...]) -> bool:
    red, green, blue = color[:3]
    return 0.299 * red + 0.587 * green + 0.114 * blue > 0.55
