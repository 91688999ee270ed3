"""Spins drawn as what they are, and what a system of them does against temperature."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _validate
from .style import COLORS, DASHES, add_legend, hide_ticks, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Without the black of what is exact.
LINES = (*COLORS[:-1], "#7B4B2A", "#8A8A8A")
#: Inches, for the colour bar.
MARGIN_RIGHT = 0.7
#: Panels side by side where every row is one state.
WRAP = 5
#: Where there is no number: a colour of no palette.
NOTHING = "#F3DDC7"
NEGATIVE_TO_POSITIVE = "RdBu_r"
#: Smaller numbers are drawn as the zeros that solvers have made them of.
ROUNDING = 1e-9
#: Of arrows, which have to be seen whatever their third component.
UNDER_TO_OVER = "viridis"


def configuration_figure(
    rows: Sequence[tuple[str, Tensor]],
    *,
    radius: float = 1.0,
    columns: Sequence[str] = (),
    notes: Mapping[str, Sequence[str]] | None = None,
    palette: str = NEGATIVE_TO_POSITIVE,
    title: str = "Spins",
) -> Figure:
    """Configurations or magnetizations, sites in reading order on a grid that is as square as their number allows.

    D = 1 is an image; D = 2 and D = 3 are arrows, the third component as their colour; of more dimensions the two are
    drawn in which all states together vary most. NaN is sand-coloured, or without an arrow.

    Not for patterns that were retrieved from a memory: use `retrieval_figure`, which marks success.

    Args:
        rows: (name, states (count, N, D)), one row each; states of count 1 are put side by side.
        radius: length of a spin, for the scale of colours and arrows.
        columns: a heading for every column.
        notes: by the name of a row, a line under each of its states.
        palette: of matplotlib, for D = 1.
        title: above the grid.

    Returns:
        A matplotlib `Figure`; save it with `figure.savefig(path)`.

    Examples:
        >>> import torch
        >>> from implicit_attention.plotting import configuration_figure
        >>> states = torch.tensor([1.0, -1.0, 0.5, 0.0])[None, :, None]
        >>> figure = configuration_figure([("m", states), ("-m", -states)], title="Four Ising spins")
        >>> [axes.get_title() for axes in figure.axes[:2]], figure.axes[0].images[0].get_array().shape
        (['m', '-m'], (2, 2))
    """
    _validate.require(len(rows) > 0, "rows", "hold at least one row", "none")
    shape = rows[0][1].shape
    for name, states in rows:
        required = f"have states of one shape (count, N, D) = {tuple(shape)}"
        _validate.require(states.ndim == 3 and states.shape == shape, "rows", required, (name, states.shape))
    count, sites, dim = shape
    _validate.require(min(sites, dim) > 0, "rows", "have at least one spin of at least one dimension", tuple(shape))
    stacked = torch.stack([states.detach().double().cpu() for _, states in rows]) / radius
    if dim > 3:
        stacked, explained = _principal(stacked)
        title = f"{title}\n{dim} dimensions; drawn are the two that hold {100 * explained:.0f} % of the squares"
    single = count == 1
    wide, high = (min(len(rows), WRAP), -(-len(rows) // WRAP)) if single else (count, len(rows))
    figure, grid = _grid(wide, high, title, single=single, notes=bool(notes))
    if count == 0:
        return figure
    # All panels in reading order: one for each row, or for each state of each row.
    panels = list(grid.flat)
    drawn = None
    for index, (axes, state) in enumerate(zip(panels, stacked.flatten(0, 1), strict=False)):
        name, column = rows[index // count][0], index % count
        drawn = _draw(axes, state, palette) or drawn
        if notes and name in notes:
            axes.set_xlabel(notes[name][column], fontsize=6, labelpad=1)
        if single:
            axes.set_title(name, fontsize=8)
        elif column == 0:
            axes.set_ylabel(name, fontsize=7, rotation=0, ha="right", va="center")
    for axes in panels[len(rows) * count :]:
        axes.set_axis_off()
    for axes, heading in zip(panels[:wide], columns, strict=False):
        axes.set_title(heading, fontsize=8)
    if drawn is not None:
        edge = 1 - MARGIN_RIGHT / figure.get_figwidth()
        width, height = 0.1 / figure.get_figwidth(), min(0.8, 2.5 / figure.get_figheight())
        place = figure.add_axes((edge + width, 0.5 - height / 2, width, height), label="<colorbar>")
        bar = figure.colorbar(drawn, cax=place)
        bar.ax.tick_params(labelsize=6)
        bar.set_label("s/R" if dim == 1 else "third component/R", fontsize=7)
    return figure


def _grid(wide: int, high: int, title: str, *, single: bool, notes: bool) -> tuple[Figure, Any]:
    """A figure with so many panels, by margins in inches: to measure the texts of hundreds of panels takes seconds."""
    side = 1.5 if single else 0.8
    gap = 0.3 if single else 0.16 if notes else 0.06
    left = 0.1 if single else 1.3
    top = 0.35 + 0.16 * (1 + title.count("\n"))
    width = left + max(wide, 4) * (side + 0.06) + MARGIN_RIGHT
    height = top + high * (side + gap)
    figure = new_figure(width, height, title, constrained=False, y=1 - 0.08 / height)
    if wide == 0:
        return figure, None
    figure.subplots_adjust(
        left=left / width,
        right=(left + wide * (side + 0.06)) / width,
        top=1 - top / height,
        bottom=gap / height,
        wspace=0.06 / side,
        hspace=gap / side,
    )
    return figure, figure.subplots(high, wide, squeeze=False)


def _draw(axes: Any, state: Tensor, palette: str) -> Any:
    """One state (N, D) in units of R; what a colour bar can be made of, if there are colours."""
    sites, dim = state.shape
    side = math.ceil(math.sqrt(sites))
    lines = -(-sites // side)
    hide_ticks(axes)
    known = state.isfinite().all(-1)
    if dim == 1 or not bool(known.all()):
        axes.set_facecolor(NOTHING)
    if dim == 1:
        image = torch.full((lines * side,), torch.nan, dtype=state.dtype)
        image[:sites] = state[:, 0]
        return axes.imshow(image.reshape(lines, side).numpy(), cmap=palette, vmin=-1, vmax=1)
    place, state = torch.arange(sites)[known], state[known]
    x, y = (place % side).numpy(), (place // side).numpy()
    axes.set_xlim(-0.6, side - 0.4)
    axes.set_ylim(lines - 0.4, -0.6)
    axes.set_aspect("equal")
    options = {"pivot": "mid", "angles": "xy", "scale_units": "xy", "scale": 1.1, "width": 0.1 / (side + 0.5)}
    # Rows are counted downwards, and an arrow with s_y > 0 points up.
    arrows = (x, y, state[:, 0].numpy(), -state[:, 1].numpy())
    if dim == 2:
        axes.quiver(*arrows, color=COLORS[0], **options)
        return None
    drawn = axes.quiver(*arrows, state[:, 2].numpy(), cmap=UNDER_TO_OVER, **options)
    drawn.set_clim(-1, 1)
    return drawn


def _principal(states: Tensor) -> tuple[Tensor, float]:
    """The two components along which the squares of all spins add up to most, and their share."""
    spins = states.nan_to_num().flatten(0, -2)
    values, vectors = torch.linalg.eigh(spins.mT @ spins)
    total = float(values.sum())
    return states @ vectors[:, -2:].flip(-1), float(values[-2:].sum()) / total if total else 1.0


def phase_figure(
    betas: Tensor,
    curves: Mapping[str, Mapping[str, Tensor]],
    *,
    panels: Mapping[str, str],
    failed: Mapping[str, Tensor] | None = None,
    exact: Collection[str] = (),
    title: str = "Against temperature",
) -> Figure:
    """Quantities against inverse temperature, one panel each, with a line for every method.

    Not for one temperature: print the numbers, or draw the states with `configuration_figure`.

    Args:
        betas: (K,).
        curves: by method, then by quantity, (K,). NaN is a gap, what is below 1e-9 a zero.
        panels: the axis label by quantity, in order; a method may lack some.
        exact: methods that are drawn as broad black lines, under the others.
        failed: by method, (K,) bool: a cross at the lower edge says where there is no answer.
        title: above the panels.

    Returns:
        A matplotlib `Figure`; save it with `figure.savefig(path)`.

    Examples:
        >>> import torch
        >>> from implicit_attention.plotting import phase_figure
        >>> betas = torch.linspace(0.1, 1.0, 5)
        >>> figure = phase_figure(betas, {"a lone spin": {"m": torch.tanh(betas)}}, panels={"m": "magnetization"})
        >>> [axes.get_ylabel() for axes in figure.axes]
        ['magnetization']
    """
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    _validate.require(len(panels) > 0, "panels", "name at least one quantity", "none")
    figure = new_figure(1.8 + 3.1 * len(panels), 3.6, title)
    grid: Any = figure.subplots(1, len(panels), squeeze=False)[0]
    others = [name for name in curves if name not in exact]
    looks: dict[str, dict[str, Any]] = {name: {"color": "0.0", "lw": 3.5, "alpha": 0.35} for name in exact}
    for index, name in enumerate(others):
        dashes = DASHES[(index + index // len(LINES)) % len(DASHES)]
        looks[name] = {"color": LINES[index % len(LINES)], "ls": dashes, "lw": 1.5}
    x = betas.detach().double().cpu()
    for axes, (quantity, label) in zip(grid, panels.items(), strict=True):
        finite = []
        for index, (name, values) in enumerate(curves.items()):
            if quantity not in values:
                continue
            y = values[quantity].detach().double().cpu()
            y = y.masked_fill(y.abs() < ROUNDING, 0.0)
            _validate.require(y.shape == x.shape, "curves", f"have K = {len(x)} points", (name, tuple(y.shape)))
            finite.append(y[y.isfinite()])
            drawn = y.masked_fill(~y.isfinite(), torch.nan).numpy()
            # Markers show a point between two gaps, which has no line.
            axes.plot(x.numpy(), drawn, marker=".", ms=3, label=name, **looks[name])
            lost = None if failed is None else failed.get(name)
            if lost is not None and bool(lost.any()):
                # Crosses of several methods stand above each other, so that none hides another.
                height = [0.02 + 0.025 * index] * int(lost.sum())
                mark = {"color": looks[name]["color"], "ls": "", "marker": "x", "ms": 4}
                axes.plot(x[lost].numpy(), height, transform=axes.get_xaxis_transform(), **mark)
        _scale(axes, torch.cat([torch.zeros(0, dtype=torch.float64), *finite]))
        axes.set_xlabel("beta", fontsize=8)
        axes.set_ylabel(label, fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
    crosses: tuple[Any, ...] = ()
    if failed is not None and any(bool(lost.any()) for lost in failed.values()):
        crosses = (Line2D([], [], color="0.4", ls="", marker="x", ms=4, label="no answer"),)
    add_legend(figure, grid[0], 7, crosses)
    return figure


def _scale(axes: Any, values: Tensor) -> None:
    """Logarithmic where a peak would flatten everything else."""
    positive = values[values > 0]
    if len(positive) and len(positive) == len(values) and float(values.max()) > 30 * float(values.median()):
        axes.set_yscale("log")
