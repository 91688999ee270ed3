"""Figures of mazes: how an answer spreads through them, and how often it is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _validate
from .courses import GOAL, START, animate, check_frames, shaded
from .style import COLORS, DASHES, MARKERS, Figure, hide_ticks, new_figure


def maze_figure(
    panels: Sequence[tuple[str, Tensor]],
    ways: Tensor,
    *,
    start: int,
    goal: int,
    columns: int | None = None,
    title: str = "Solving a maze",
) -> Figure:
    """Draw one maze several times, with a number in [0, 1] for every cell: how sure it is to be on the path.

    Not for graphs that are no square grid of cells.

    Args:
        panels: (heading, values (N,)), N = size * size.
        ways: (N, 4) bool, whether the way out of a cell is open: up, down, left, right.
        start: number of the cell where a way begins.
        goal: number of the cell where it ends.
        columns: panels in a row; all by default.
        title: above the panels.

    Examples:
        >>> import torch
        >>> from implicit_attention.plotting import maze_figure
        >>> ways = torch.tensor([[0, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0]]).bool()
        >>> figure = maze_figure([("truth", torch.tensor([1.0, 1.0, 0.0, 1.0]))], ways, start=0, goal=3)
        >>> [axes.get_title() for axes in figure.axes]
        ['truth']
    """
    _validate.require(len(panels) > 0, "panels", "hold at least one panel", "none")
    columns = len(panels) if columns is None else columns
    rows = -(-len(panels) // columns)
    figure = new_figure(2.5 * columns, 2.65 * rows + 0.5, title, fontsize=11)
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (heading, values) in zip(grid.flat, panels, strict=False):
        _draw(axes, values, ways, start, goal)
        axes.set_title(heading, fontsize=9)
    return figure


def save_maze_gif(
    path: Path | str,
    frames: Sequence[Tensor],
    ways: Tensor,
    *,
    start: int,
    goal: int,
    residuals: Sequence[float],
    tolerance: float,
    title: str = "Solving a maze",
    fps: int = 12,
    every: int = 1,
) -> None:
    """Write an animated GIF of an answer that spreads through a maze, beside the residual by which it ends.

    Not for one state: draw it with `maze_figure`.

    Args:
        path: of the file.
        frames: values (N,) after 1, 2, ... evaluations, as in `maze_figure`.
        ways: of the maze, as in `maze_figure`.
        start: as in `maze_figure`.
        goal: as in `maze_figure`.
        residuals: relative residual after each evaluation, > 0.
        tolerance: at which the answer counts as settled.
        title: above the maze.
        fps: frames in a second. The last one stays for two seconds.
        every: how many evaluations lie between two frames; the last evaluation is always drawn.

    Examples:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from implicit_attention.plotting import save_maze_gif
        >>> ways = torch.tensor([[0, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0]]).bool()
        >>> frames = [torch.tensor([1.0, 0.5, 0.0, 1.0]), torch.tensor([1.0, 1.0, 0.0, 1.0])]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "maze.gif"
        ...     save_maze_gif(file, frames, ways, start=0, goal=3, residuals=[0.5, 1e-4], tolerance=1e-3)
        ...     file.read_bytes()[:3]
        b'GIF'
    """
    check_frames(frames, residuals)

    def draw(axes: Any) -> Callable[[int], None]:
        image = _draw(axes, frames[0], ways, start, goal)
        return lambda index: image.set_data(_pixels(frames[index], ways))

    animate(path, draw, residuals, tolerance=tolerance, title=title, fps=fps, every=every)


def sizes_figure(
    curves: Mapping[str, Sequence[tuple[float, float, float]]],
    *,
    trained: float | None = None,
    what: str = "mazes whole right",
    title: str = "Right answers against size",
) -> Figure:
    """Draw the share of puzzles that are wholly right against their size, a curve for every way to answer.

    Not for losses or times: draw them with your own tools.

    Args:
        curves: by name, points (size, share in [0, 1], its standard error).
        trained: the size that was trained on, marked.
        what: label of the shares.
        title: above the axes.

    Examples:
        >>> from implicit_attention.plotting import sizes_figure
        >>> figure = sizes_figure({"solved": [(5, 1.0, 0.0), (9, 0.98, 0.01)], "loop": [(5, 0.8, 0.0), (9, 0.1, 0.0)]})
        >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        ['solved', 'loop']
    """
    _validate.require(len(curves) > 0, "curves", "hold at least one curve", "none")
    figure = new_figure(6.4, 4.2, title, fontsize=11)
    axes = figure.subplots()
    for index, (name, points) in enumerate(curves.items()):
        sizes, shares, errors = zip(*points, strict=True)
        color = COLORS[index % len(COLORS)]
        look: dict[str, Any] = {"ls": DASHES[index % len(DASHES)], "marker": MARKERS[index % len(MARKERS)]}
        axes.errorbar(sizes, shares, errors, color=color, lw=2, ms=5, capsize=3, label=name, **look)
    if trained is not None:
        axes.axvline(trained, color="0.85", lw=8, zorder=0, label="trained on")
    axes.legend(fontsize=9, frameon=False)
    ticks = sorted({size for points in curves.values() for size, _, _ in points})
    axes.set_xticks(ticks, [f"{tick:g} x {tick:g}" for tick in ticks], fontsize=8)
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel(what, fontsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


# ------------------------------------------------------------------ one maze

#: Pixels of a cell, and of the wall between two cells.
CELL, BETWEEN = 7, 2


def _draw(axes: Any, values: Tensor, ways: Tensor, start: int, goal: int) -> Any:
    """Draw a maze with two marks, and return the image; walls and passages are pixels."""
    image = axes.imshow(_pixels(values, ways), interpolation="nearest")
    hide_ticks(axes)
    axes.spines[:].set_visible(False)
    size, step = round(len(ways) ** 0.5), CELL + BETWEEN
    for cell, color, text in ((start, START, "S"), (goal, GOAL, "G")):
        y, x = (BETWEEN + (CELL - 1) / 2 + step * place for place in divmod(cell, size))
        points = 190 / size
        axes.plot(x, y, "o", color=color, ms=0.85 * points, mec="white", mew=0.6)
        axes.text(x, y, text, color="white", fontsize=0.55 * points, ha="center", va="center_baseline", weight="bold")
    return image


def _pixels(values: Tensor, ways: Tensor) -> Any:
    """Return (height, width, 3) in [0, 1]: cells in their shade, open ways in the fainter shade of their two cells."""
    count = len(ways)
    size = round(count**0.5)
    fits = size * size == count and ways.shape == (count, 4)
    _validate.require(fits, "ways", "have shape (size * size, 4)", tuple(ways.shape))
    _validate.require(values.shape == (count,), "values", f"have shape ({count},)", tuple(values.shape))
    sides = torch.tensor([BETWEEN, *[CELL, BETWEEN] * size])
    return shaded(maze_levels(values, ways).repeat_interleave(sides, 0).repeat_interleave(sides, 1))


def maze_levels(values: Tensor, ways: Tensor) -> Tensor:
    """Return (2 size + 1)^2 numbers in [0, 1]: cells, open ways with the fainter of their two cells, NaN for walls."""
    size = round(len(ways) ** 0.5)
    cells, down, right = (x.detach().float().cpu().view(size, size) for x in (values, ways[:, 1], ways[:, 3]))
    cells = cells.nan_to_num().clamp(0, 1)
    pixels = torch.full((2 * size + 1, 2 * size + 1), torch.nan)
    pixels[1::2, 1::2] = cells
    pixels[2:-1:2, 1::2] = cells[:-1].minimum(cells[1:]).where(down[:-1] > 0, torch.nan)
    pixels[1::2, 2:-1:2] = cells[:, :-1].minimum(cells[:, 1:]).where(right[:, :-1] > 0, torch.nan)
    return pixels
