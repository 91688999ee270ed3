"""Figures of the solves of every layer over the steps of a training."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import _validate
from .style import BAD, COLORS, DASHES, MARKERS, Figure, finish, name_columns, new_figure

#: The columns that name a point; rows must have them, and those of the panels.
KEYS = ("step", "layer")
#: Up to so many layers have a name in the legend; of more layers, some.
NAMED = 14
#: The number of marks on a line.
MARKED = 7
TOTAL = "all"
#: The looks of the line of all layers, and of a limit.
ALL: dict[str, Any] = {"color": "0.0", "lw": 3.0, "alpha": 0.25, "zorder": 1}
LIMIT: dict[str, Any] = {"color": "0.2", "lw": 1.0, "ls": (0, (1, 2))}
#: Residuals below this part of the tolerance are drawn as one; a line that moves less than this share has a wider axis.
NEGLIGIBLE, FLAT = 1e-3, 0.02


class Panel(NamedTuple):
    """One panel: a title, and columns with a line each."""

    title: str
    label: str
    #: The first has a line in the style of its layer, the second a thin dashed one.
    columns: tuple[str, ...]
    #: The name of the dashed line.
    second: str = ""


PANELS = (
    Panel("Forward solves", "evaluations of a query", ("forward_mean", "forward_p99"), "99 of 100 within"),
    Panel("Backward solves", "products of a query", ("backward_mean", "backward_p99"), "99 of 100 within"),
    Panel("Worst residual", "residual / tolerance", ("forward_worst", "backward_worst"), "backward"),
    Panel("Failures", "% of the solves", ("forward_failed", "backward_failed"), "backward"),
    Panel("Anchor", "mean over heads", ("anchor",)),
    Panel("Inverse temperature beta", "mean over heads", ("beta",)),
    Panel("Spectral radius of df/dz", "largest |eigenvalue|", ("spectral_radius",)),
)
WORST, FAILURES, RADIUS = PANELS[2], PANELS[3], PANELS[6]

#: The rows of one layer by step.
Course = Mapping[float, Mapping[str, float]]


def training_figure(rows: str | os.PathLike[str] | Iterable[Any], *, title: str = "Solves of a training") -> Figure:
    """Draw the observations of `training.watch`: evaluations, residuals, failures, anchors, temperatures of layers.

    Every layer is a line; with several, "all" is a broad grey one. Panels of which nothing is known are left out.
    Residuals are in units of their tolerance, at most 1 where all converged; one that is not finite is a cross at the
    upper edge. Failures are shares of the problems of a look. Where a step was seen twice, as by a run that went on
    from a checkpoint, the later look counts; lines of a file that a killed run left unfinished are skipped.

    Not for losses: plot them with your own tools.

    Args:
        rows: the file of a `CSVFile` or of `JSONLines`; or the looks of `Watch.take()`; or their rows as dictionaries.
            Looks without a step are numbered.
        title: above the panels.

    Raises:
        OSError: a file that cannot be read.
        TypeError, ValueError: no rows; rows without the columns of `watch`, or with values that are no numbers.

    Examples:
        >>> import torch
        >>> from implicit_attention import ImplicitAttention
        >>> from implicit_attention.plotting import training_figure
        >>> from implicit_attention.training import watch
        >>> layer = ImplicitAttention(8, heads=2, anchor=0.5)
        >>> looks = []
        >>> with watch(layer) as seen:
        ...     for step in range(3):
        ...         layer(torch.randn(3, 5, 8)).sum().backward()
        ...         looks.append(seen.take(step))
        >>> [axes.get_title(loc="left") for axes in training_figure(looks).axes][:3]
        ['Forward solves', 'Backward solves', 'Worst residual']
    """
    layers = _courses(_read(Path(rows)) if isinstance(rows, str | os.PathLike) else _expanded(rows))
    if len(layers) == 2:
        # The line of all layers is that of the only one.
        layers.pop(TOTAL, None)
    panels = [panel for panel in PANELS if any(_known(course, panel) for course in layers.values())]
    if not panels:
        figure = new_figure(6, 2, title)
        figure.text(0.5, 0.5, "nothing was solved", ha="center")
        return figure
    count = math.ceil(len(panels) / 4)
    columns = math.ceil(len(panels) / count)
    figure = new_figure(1.6 + 3.0 * columns, 0.9 + 2.2 * count, title, fontsize=10)
    grid: Any = figure.subplots(count, columns, sharex=True, squeeze=False)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    looks = _looks([name for name in layers if name != TOTAL])
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw(axes, panel, layers, looks)
    name_columns(grid, "training step")
    _add_legend(figure, looks, TOTAL in layers)
    return figure


def _draw(axes: Any, panel: Panel, layers: Mapping[str, Course], looks: Mapping[str, dict[str, Any]]) -> None:
    axes.set_title(panel.title, fontsize=9, loc="left")
    finish(axes, y=panel.label, frame=False)
    drawn: list[float] = []
    lost: set[float] = set()
    for name, course in layers.items():
        for place, column in enumerate(panel.columns):
            values = [_value(row, column) for row in course.values()]
            finite = [value if math.isfinite(value) else math.nan for value in values]
            drawn += [value for value in finite if not math.isnan(value)]
            lost |= {step for step, value in zip(course, values, strict=True) if math.isinf(value)}
            look = dict(looks.get(name, ALL))
            if place:
                look |= {"lw": 0.4 * look["lw"] + 0.3, "ls": DASHES[1], "marker": None}
            axes.plot(list(course), finite, **look)
    if lost:
        mark = {"color": BAD, "ls": "", "marker": "x", "ms": 5, "clip_on": False}
        axes.plot(sorted(lost), [1.0] * len(lost), transform=axes.get_xaxis_transform(), **mark)
    if panel in (WORST, RADIUS):
        axes.axhline(1.0, **LIMIT)
    _scale(axes, panel, drawn)
    if panel.second:
        _explain(axes, panel, bool(lost))


def _scale(axes: Any, panel: Panel, drawn: Sequence[float]) -> None:
    low, high = (min(drawn), max(drawn)) if drawn else (0.0, 1.0)
    if panel is WORST and max(high, 1.0) > 30 * max(low, NEGLIGIBLE):
        axes.set_yscale("log")
        axes.set_ylim(max(low, NEGLIGIBLE) / 2, 2 * max(high, 1.0))
        return
    if panel in (WORST, RADIUS):
        axes.set_ylim(0, 1.1 * max(high, 1.0))
    elif panel is FAILURES:
        top = 1.1 * high or 1.0
        axes.set_ylim(-0.03 * top, top)
        if high == 0:
            axes.text(0.5, 0.5, "no failures", transform=axes.transAxes, ha="center", fontsize=8, color="0.3")
    elif high - low < FLAT * abs(high):
        # A line that hardly moves looks like it.
        axes.set_ylim(low - FLAT * abs(high), high + FLAT * abs(high))
    axes.ticklabel_format(axis="y", useOffset=False)


def _explain(axes: Any, panel: Panel, lost: bool) -> None:
    """Name the solid and the dashed lines of a panel."""
    from matplotlib.lines import Line2D

    first = "forward" if panel.second == "backward" else "mean"
    handles = [
        Line2D([], [], color="0.2", lw=1.5, label=first),
        Line2D([], [], color="0.2", lw=0.9, ls=DASHES[1], label=panel.second),
    ]
    if panel is WORST:
        handles.append(Line2D([], [], label="tolerance", **LIMIT))
    if lost:
        handles.append(Line2D([], [], color=BAD, ls="", marker="x", ms=5, label="not finite"))
    axes.legend(handles=handles, fontsize=6, framealpha=0.8, edgecolor="none", loc="best", handlelength=2.2)


def _looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Give few layers a colour and a mark each, and many the tones from dark, the first, to bright, the last."""
    if len(names) <= len(COLORS):
        return {
            name: {"color": COLORS[i], "lw": 1.6, "marker": MARKERS[i], "ms": 3.5, "markevery": 1 / MARKED}
            for i, name in enumerate(names)
        }
    from matplotlib import colormaps

    tones = colormaps["viridis"]
    return {name: {"color": tones(0.92 * i / (len(names) - 1)), "lw": 1.0} for i, name in enumerate(names)}


def _add_legend(figure: Figure, looks: Mapping[str, dict[str, Any]], with_total: bool) -> None:
    from matplotlib.lines import Line2D

    names = list(looks)
    stride = math.ceil(len(names) / NAMED)
    shown = sorted({*range(0, len(names), stride), *range(len(names) - 1, len(names))})
    handles = [Line2D([], [], label=names[i] or "(model)", **looks[names[i]]) for i in shown]
    if with_total:
        handles.append(Line2D([], [], label="all layers", **ALL))
    heading = "layer" if stride == 1 else f"some of {len(names)} layers"
    size = {"fontsize": 7, "title_fontsize": 7}
    figure.legend(handles=handles, loc="outside right upper", title=heading, frameon=False, **size)


def _known(course: Course, panel: Panel) -> bool:
    values = [_value(row, column) for row in course.values() for column in panel.columns]
    return any(not math.isnan(value) for value in values)


def _value(row: Mapping[str, float], column: str) -> float:
    """Return the number of a column as it is drawn: failures as a share, and NaN where nothing was solved."""
    value, side = row[column], column.partition("_")[0]
    if side not in ("forward", "backward"):
        return value
    problems = row[f"{side}_problems"]
    if not problems > 0:
        return math.nan
    if column.endswith("_failed"):
        return 100 * value / problems
    if column.endswith("_worst"):
        # 0 stands for solves without a tolerance, and null, in JSON lines, for a number that is not finite.
        return math.nan if value == 0 else math.inf if math.isnan(value) else value
    return value


def _columns() -> list[str]:
    sides = [f"{side}_problems" for side in ("forward", "backward")]
    return [*sides, *(column for panel in PANELS for column in panel.columns)]


def _read(path: Path) -> list[Any]:
    """Read the rows of a file of JSON lines or of a CSV file, without lines that were cut off."""
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("{"):
        rows = []
        for line in text.splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
        return rows
    head, *lines = list(csv.reader(text.splitlines())) or [[]]
    return [dict(zip(head, cells, strict=True)) for cells in lines if len(cells) == len(head)]


def _expanded(rows: Any) -> list[Any]:
    """Return the rows of looks; an object with a method `rows`, as an `Observed`, has several."""
    several = [rows] if isinstance(rows, Mapping) or hasattr(rows, "rows") else rows
    return [row for look in several for row in (look.rows() if hasattr(look, "rows") else [look])]


def _courses(rows: Sequence[Any]) -> dict[str, Course]:
    """Group rows by layer, in their order, sorted by step."""
    remedy = "pass the file of a CSVFile or of JSONLines, or what Watch.take() returned"
    _validate.require(len(rows) > 0, "rows", "hold at least one row", "none", remedy)
    layers: dict[str, dict[float, dict[str, float]]] = {}
    counted: dict[str, int] = {}
    for place, row in enumerate(rows):
        if not isinstance(row, Mapping):
            required = "hold what Watch.take() returned, or rows as dictionaries"
            raise TypeError(_validate.message("rows", required, f"{type(row).__name__} at {place}", remedy))
        wanted = [*KEYS, *_columns()]
        lacking = [name for name in wanted if name not in row]
        required = "have the columns that watch counts"
        _validate.require(not lacking, "rows", required, f"row {place} without {', '.join(lacking[:3])}", remedy)
        layer = str(row["layer"])
        counted[layer] = counted.get(layer, 0) + 1
        step = _number(row["step"], place, "step")
        step = counted[layer] - 1.0 if math.isnan(step) else step
        layers.setdefault(layer, {})[step] = {name: _number(row[name], place, name) for name in _columns()}
    return {layer: dict(sorted(course.items())) for layer, course in layers.items()}


def _number(value: Any, place: int, name: str) -> float:
    """Return the number in a cell; NaN for an empty cell, as of a missing step, and for null."""
    if value is None or value == "":
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(_validate.message("rows", "hold numbers", f"{value!r} in {name} of row {place}")) from None
