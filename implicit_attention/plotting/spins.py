"""Figures of spins: states as images, discs or arrows, and quantities of a system against temperature."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _validate
from .couplings import lattice_columns, site_places
from .style import COLORS, DASHES, MARKERS, Figure, add_bar, add_legend, finish, hide_ticks, new_figure

#: Colours of methods, without the black and the grey of exact ones.
LINES = (*COLORS[:-1], "#7B4B2A", "#4B2E83")
#: The number of markers on a line.
MARKED = 8
#: Up to so many sites stand on a circle; more are drawn in rows.
CIRCLE = 60
#: Inches for the colour bar.
MARGIN_RIGHT = 0.7
#: Panels side by side where every row is one state.
WRAP = 5
#: The colour of NaN, which no palette has.
NOTHING = "#F3DDC7"
NEGATIVE_TO_POSITIVE = "RdBu_r"
#: Smaller numbers are drawn as zeros, whose rounding they are.
ROUNDING = 1e-9
#: The palette of arrows, which have to be seen whatever their third component.
UNDER_TO_OVER = "viridis"


def configuration_figure(
    rows: Sequence[tuple[str, Tensor]],
    *,
    radius: float = 1.0,
    couplings: Tensor | None = None,
    columns: Sequence[str] = (),
    notes: Mapping[str, Sequence[str]] | None = None,
    palette: str = NEGATIVE_TO_POSITIVE,
    title: str = "Spins",
) -> Figure:
    """Draw configurations or magnetizations: images and arrows in rows, or on a circle where all are coupled to all.

    Sites are in reading order in rows that are as square as their number allows. With `couplings`, a lattice of several
    rows has its own, and up to 60 sites that make no lattice are on a circle, clockwise from the top, so that no two
    look like neighbours that are none. D = 1 is an image, or discs; D = 2 and D = 3 are arrows, the third component as
    their colour; of more dimensions the two are drawn in which all states together vary most. A dash marks negative
    numbers of up to 60 sites. NaN is sand-coloured, or without an arrow; a state of nothing else says "no answer".

    Not for patterns that were retrieved from a memory: use `retrieval_figure`, which marks success.

    Args:
        rows: (name, states (count, N, D)), one row each; states of count 1 are put side by side.
        radius: length of a spin, for the scale of colours and arrows.
        couplings: J, (N, N) or (N, N, D, D), of which only is read which are zero; None: sites are in rows.
        columns: a heading for every column.
        notes: by the name of a row, a line under each of its states.
        palette: of matplotlib, for D = 1.
        title: above the grid.

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
    places = _places(sites, couplings)
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
        drawn = _draw(axes, state, palette, places) or drawn
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
        add_bar(figure, drawn, "s/R" if dim == 1 else "third component/R", size=7, cax=place)
    return figure


def _grid(wide: int, high: int, title: str, *, single: bool, notes: bool) -> tuple[Figure, Any]:
    """Lay out so many panels by margins in inches: to measure the texts of hundreds of panels takes seconds."""
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


def _places(sites: int, couplings: Tensor | None) -> Tensor:
    """Return the places of the sites, (N, 2), y downwards; integers if they are in rows."""
    columns = None
    if couplings is not None:
        required = f"be those of the {sites} sites"
        _validate.require(len(couplings) == sites, "couplings", required, f"shape {tuple(couplings.shape)}")
        columns = lattice_columns(couplings)
        if columns is None and sites <= CIRCLE:
            return site_places(couplings) * torch.tensor([1, -1])
    # Sites without a lattice, and chains, which would be too long, are broken into lines like a text.
    columns = math.ceil(math.sqrt(sites)) if columns in (None, sites) else columns
    place = torch.arange(sites)
    return torch.stack([place % columns, place // columns], -1)


def _draw(axes: Any, state: Tensor, palette: str, places: Tensor) -> Any:
    """Draw one state (N, D) in units of R, and return the artist that a colour bar explains, if there is one."""
    sites, dim = state.shape
    in_rows = not places.is_floating_point()
    hide_ticks(axes)
    known = state.isfinite().all(-1)
    if not bool(known.any()):
        axes.text(0.5, 0.5, "no answer", transform=axes.transAxes, ha="center", va="center", fontsize=7)
    if (in_rows and dim == 1) or not bool(known.all()):
        axes.set_facecolor(NOTHING)
    if dim == 1 and sites <= CIRCLE and palette == NEGATIVE_TO_POSITIVE:
        _mark_negative(axes, state[:, 0], places)
    if in_rows and dim == 1:
        side, lines = (int(last) + 1 for last in places.amax(0))
        image = torch.full((lines * side,), torch.nan, dtype=state.dtype)
        image[:sites] = state[:, 0]
        return axes.imshow(image.reshape(lines, side).numpy(), cmap=palette, vmin=-1, vmax=1)
    low, high = places.amin(0).double(), places.amax(0).double()
    axes.set(xlim=(float(low[0]) - 0.6, float(high[0]) + 0.6), aspect="equal")
    axes.set_ylim(float(high[1]) + 0.6, float(low[1]) - 0.6)
    if dim == 1:
        return _discs(axes, state[:, 0], palette, places)
    place, state = places[known], state[known]
    x, y = place.T.numpy()
    width = 0.1 / (float(high[0] - low[0]) + 1.5)
    options = {"pivot": "mid", "angles": "xy", "scale_units": "xy", "scale": 1.1, "width": width}
    # Rows are counted downwards, and an arrow with s_y > 0 points up.
    arrows = (x, y, state[:, 0].numpy(), -state[:, 1].numpy())
    if dim == 2:
        axes.quiver(*arrows, color=COLORS[0], **options)
        return None
    drawn = axes.quiver(*arrows, state[:, 2].numpy(), cmap=UNDER_TO_OVER, **options)
    drawn.set_clim(-1, 1)
    return drawn


def _mark_negative(axes: Any, state: Tensor, places: Tensor) -> None:
    """Put a dash on negative numbers: without colours, the palette is as dark at both ends."""
    for color, where in (("w", state < -0.5), ("k", (state >= -0.5) & (state < -0.02))):
        size = {"ms": min(4.0, 24 / math.sqrt(len(state))), "mew": 0.9}
        axes.plot(*places[where].T.numpy(), ls="", marker="_", color=color, zorder=3, **size)


def _discs(axes: Any, state: Tensor, palette: str, places: Tensor) -> Any:
    """Draw numbers (N,) as discs, and no disc for NaN."""
    from matplotlib.collections import EllipseCollection

    known = state.isfinite()
    size = [0.9] * int(known.sum())
    look = {"units": "xy", "offsets": places[known].numpy(), "offset_transform": axes.transData}
    discs = EllipseCollection(size, size, [0.0] * len(size), cmap=palette, edgecolors="0.3", linewidths=0.4, **look)
    discs.set_array(state[known].numpy())
    discs.set_clim(-1, 1)
    return axes.add_collection(discs)


def _principal(states: Tensor) -> tuple[Tensor, float]:
    """Return the two components along which the squares of all spins add up to most, and their share."""
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
    """Draw quantities against inverse temperature, one panel each, with a line for every method.

    Methods differ in colour, dashes and marks, so that they are told apart in grey.

    Not for one temperature: print the numbers, or draw the states with `configuration_figure`.

    Args:
        betas: (K,).
        curves: by method, then by quantity, (K,). NaN is a gap, what is below 1e-9 a zero.
        panels: the axis label by quantity, in order; a method may lack some.
        exact: methods that are drawn as broad black lines, under the others.
        failed: by method, (K,) bool: a cross at the lower edge says where there is no answer.
        title: above the panels.

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
    # The marks of an exact method are seen only where a point between two gaps has no line.
    broad = {"color": "0.0", "lw": 3.5, "alpha": 0.35, "marker": ".", "ms": 2}
    looks: dict[str, dict[str, Any]] = {name: broad for name in exact}
    for index, name in enumerate(others):
        dashes = DASHES[(index + index // len(LINES)) % len(DASHES)]
        marker = MARKERS[index % len(MARKERS)]
        looks[name] = {"color": LINES[index % len(LINES)], "ls": dashes, "lw": 1.5, "marker": marker, "ms": 4}
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
            marked = {} if name in exact else {"markevery": _marked(y.isfinite(), index)}
            axes.plot(x.numpy(), drawn, label=name, **looks[name] | marked)
            lost = None if failed is None else failed.get(name)
            if lost is not None and bool(lost.any()):
                # Crosses of several methods stand above each other, so that none hides another.
                height = [0.02 + 0.025 * index] * int(lost.sum())
                mark = {"color": looks[name]["color"], "ls": "", "marker": "x", "ms": 4}
                axes.plot(x[lost].numpy(), height, transform=axes.get_xaxis_transform(), **mark)
        _scale(axes, torch.cat([torch.zeros(0, dtype=torch.float64), *finite]))
        axes.xaxis.set_major_locator(MaxNLocator(6))
        finish(axes, "beta", label, grid=0.3)
    crosses: tuple[Any, ...] = ()
    if failed is not None and any(bool(lost.any()) for lost in failed.values()):
        crosses = (Line2D([], [], color="0.4", ls="", marker="x", ms=4, label="no answer"),)
    add_legend(figure, grid[0], 7, crosses)
    return figure


def _marked(finite: Tensor, offset: int) -> list[int]:
    """Choose points to mark: some, other ones for every method, and each between two gaps, which has no line."""
    count = len(finite)
    stride = max(1, count // MARKED)
    padded = torch.nn.functional.pad(finite, (1, 1))
    alone = finite & ~padded[:-2] & ~padded[2:]
    return sorted({*range(2 * offset % stride, count, stride), *alone.nonzero().flatten().tolist()})


def _scale(axes: Any, values: Tensor) -> None:
    """Take a logarithmic axis where a peak would flatten everything else."""
    positive = values[values > 0]
    if len(positive) and len(positive) == len(values) and float(values.max()) > 30 * float(values.median()):
        axes.set_yscale("log")
