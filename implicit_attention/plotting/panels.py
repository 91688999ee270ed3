"""Energies over a plane, side by side: contours, minima, and where an energy has no lower bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .. import _validate
from .style import BAD, Figure, add_bar, finish, legend_below, new_figure

#: Heights of contours above the floor of a panel, near to each other where minima are shallow.
HEIGHTS = (0.0, *(0.015 * 1.45**step for step in range(15)))
#: Contours of an energy without lower bound, below that of z = 0.
DEPTHS = tuple(-(2.0**step) for step in range(12, -3, -1))
SAND = "#F6D5A8"


def panels_figure(
    panels: Mapping[str, tuple[Tensor, Tensor | None]],
    keys: Tensor,
    *,
    reach: float = 2.0,
    columns: int = 4,
    title: str = "Energy landscapes",
) -> Figure:
    """Energies over a square of the plane, one panel each, with common axes and heights, keys and minima.

    An energy with a lower bound is drawn from its smallest value in the square. An energy without one is drawn from its
    value in the middle, at z = 0; what lies below that has a colour of its own.

    Not for states of more than two dimensions: use `retrieval_figure` for images.

    Args:
        panels: by name the energies (S, S), S odd, entry (i, j) at the state (x_j, y_i), both in equal steps from
            -reach to reach; and the minima (K, 2), or None where the energy has no lower bound.
        keys: (M, 2), the same in all panels.
        reach: half the side of the square.
        columns: panels in a row.
        title: above the panels.

    Raises:
        ValueError: no panels; energies, keys or minima of another shape; energies that are not finite; columns < 1,
            reach <= 0.

    Examples:
        >>> import torch
        >>> from implicit_attention.plotting import panels_figure
        >>> line = torch.linspace(-2, 2, 21)
        >>> bowl = (line**2 + line[:, None] ** 2) / 2
        >>> panels = {"bowl": (bowl, torch.zeros(1, 2)), "hill": (-bowl, None)}
        >>> [axes.get_title() for axes in panels_figure(panels, torch.eye(2)).axes[:2]]
        ['bowl', 'hill']
    """
    _validate.require(bool(panels), "panels", "hold at least one energy", "none")
    _validate.check_integer("columns", columns, low=1)
    _validate.check_number("reach", reach, low=0.0, open_low=True)
    _check_points("keys", keys)
    rows, columns = math.ceil(len(panels) / columns), min(columns, len(panels))
    figure = new_figure(2.0 * columns + 0.9, 2.15 * rows + 0.5, title, fontsize=10)
    grid: Any = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    drawn: Any = None
    for index, (axes, (name, (energies, minima))) in enumerate(zip(grid.flat, panels.items(), strict=False)):
        drawn = _draw(axes, name, energies, minima, reach)
        axes.plot(*keys.detach().double().cpu().T, ls="", marker="o", ms=8, mfc="none", mec="k", mew=1.1, label="key")
        axes.set_title(name, fontsize=8, pad=12 if minima is None else 6)
        axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
        finish(axes, "$z_1$" if index >= columns * (rows - 1) else "", "" if index % columns else "$z_2$", grid=0)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    meaning = "energy above the smallest in the panel\n(no lower bound: above that of z = 0, sand below)"
    add_bar(figure, drawn, meaning, ax=grid, shrink=0.6, aspect=30, pad=0.01, ticks=HEIGHTS[::2], format="%.2g")
    handles = {handle.get_label(): handle for axes in grid.flat for handle in axes.get_legend_handles_labels()[0]}
    legend_below(figure, list(handles.values()), 2)
    return figure


def _draw(axes: Any, name: str, energies: Tensor, minima: Tensor | None, reach: float) -> Any:
    """Draw the contours of one energy."""
    from matplotlib.colors import BoundaryNorm

    square = energies.ndim == 2 and energies.shape[0] == energies.shape[1] >= 3 and energies.shape[0] % 2 == 1
    required = "be a square (S, S) of energies, S odd and at least 3"
    _validate.require(square, f"panels[{name!r}]", required, f"shape {tuple(energies.shape)}")
    exact = energies.detach().double().cpu()
    _validate.require(bool(exact.isfinite().all()), f"panels[{name!r}]", "hold finite energies", "others")
    side = len(exact)
    floor = exact[side // 2, side // 2] if minima is None else exact.min()
    heights = (exact - floor).numpy()
    line = [reach * (2 * step / (side - 1) - 1) for step in range(side)]
    look = {"cmap": "Blues_r", "norm": BoundaryNorm(HEIGHTS, 256), "extend": "max"}
    drawn = axes.contourf(line, line, heights, levels=HEIGHTS, **look)
    axes.contour(line, line, heights, levels=HEIGHTS, colors="k", linewidths=0.3, alpha=0.5)
    if minima is None:
        lowest = heights.min()
        if lowest < 0:
            axes.contourf(line, line, heights, levels=(lowest, 0.0), colors=[SAND])
        if depths := [depth for depth in DEPTHS if depth > lowest]:
            axes.contour(line, line, heights, levels=depths, colors=BAD, linewidths=0.6, linestyles="-")
        above = {"xycoords": "axes fraction", "xytext": (0, 2), "textcoords": "offset points", "va": "bottom"}
        axes.annotate("no lower bound", (0.5, 1), fontsize=7, ha="center", annotation_clip=False, **above)
    else:
        _check_points(f"minima of {name!r}", minima)
        look = {"ls": "", "marker": "o", "ms": 4, "mfc": BAD, "mec": "w", "mew": 0.5, "zorder": 3}
        axes.plot(*minima.detach().double().cpu().T, label="minimum", **look)
    return drawn


def _check_points(argument: str, points: Tensor) -> None:
    required = "be points of the plane, shape (K, 2)"
    _validate.require(points.ndim == 2 and points.shape[-1] == 2, argument, required, f"shape {tuple(points.shape)}")
