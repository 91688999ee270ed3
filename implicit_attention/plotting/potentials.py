"""Figures of the capacity of potentials: patterns that they store and find, beside the bounds for log-sum-exp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import _validate
from .style import COLORS, MARKERS, Figure, finish, new_figure

#: The names in the legend of measured lengths over their bounds.
BOUNDS = {
    "step": "step: |f(z) - k| (theorem 5)",
    "contraction": "step: |f(z) - k*|/|z - k*| (theorem 4)",
    "pattern": "fixed point: |k* - k| (theorem 5)",
}
SEPARATION = "separation of the pattern / threshold"
PROVED: dict[str, Any] = {"color": "black", "lw": 1.5, "ls": "--"}


def potentials_figure(
    panels: Mapping[str, Sequence[Mapping[str, Any]]], bounds: Mapping[str, Any], *, title: str = "Retrieval"
) -> Figure:
    """Draw retrieval rates as grids, a row per potential and a column per point of the curve; below them the bounds.

    Not for one potential at many temperatures: use `rates_figure`.

    Args:
        panels: by title, rows with `method`, `at` (the point), `mean` (the rate, in [0, 1]) and perhaps `refused`.
        bounds: `near_threshold`, rows with `ratio` and for every bound `worst` and `median`; `capacity`, rows with
            `beta`, `K`, `dim`, `p`, `promised` (None: nothing is proved) and `shares` of `count` and `all_stored`.
        title: above the grids.

    Examples:
        >>> from implicit_attention.plotting import potentials_figure
        >>> rows = [{"method": "entmax", "at": n, "mean": rate} for n, rate in ((10, 1.0), (100, 0.5))]
        >>> figure = potentials_figure({"digits": rows}, {"near_threshold": [], "capacity": []})
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['1', '.50']
    """
    _validate.require(len(panels) > 0, "panels", "hold at least one grid", "none")
    methods = list(dict.fromkeys(row["method"] for rows in panels.values() for row in rows))
    height = 0.9 + 0.24 * len(methods)
    figure = new_figure(max(3.6 * len(panels), 12), height + 5.3, title, fontsize=11)
    parts: Any = figure.subfigures(2, 1, height_ratios=[height, 4.7])
    upper, lower = parts
    grids: Any = upper.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (name, rows) in zip(grids, panels.items(), strict=True):
        _grid(axes, name, rows, methods)
    grids[0].set_yticks(range(len(methods)), methods, fontsize=9)
    left, middle, right = lower.subplots(1, 3)
    _fixed_points(left, bounds["near_threshold"])
    _steps(middle, bounds["near_threshold"])
    _capacity(right, bounds["capacity"])
    return figure


def _grid(axes: Any, name: str, rows: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> None:
    points = list(dict.fromkeys(row["at"] for row in rows))
    shown = {(row["method"], row["at"]): row for row in rows}
    rates = [[float(shown[m, at]["mean"]) if (m, at) in shown else float("nan") for at in points] for m in methods]
    axes.imshow(rates, cmap="Blues", vmin=0, vmax=1.15, aspect="auto")
    for i, method in enumerate(methods):
        for j, at in enumerate(points):
            if row := shown.get((method, at)):
                color = "white" if row["mean"] > 0.6 else "0.25" if row["mean"] > 0 else "0.45"
                axes.text(j, i, _cell(row), ha="center", va="center", fontsize=8, color=color)
    axes.set_title(name, fontsize=9)
    axes.set_xticks(range(len(points)), [f"{at:g}" for at in points], fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _cell(row: Mapping[str, Any]) -> str:
    """Return the rate; where nothing is retrieved, also how many states point at the right pattern."""
    if "refused" in row:
        return "refused"
    if row["mean"] > 0 or "named" not in row:
        return _share(row["mean"])
    return f"0 ({_share(row['named'])}){' x' * bool(row.get('failed'))}"


def _share(value: float) -> str:
    return f"{value:.0f}" if f"{value:.2f}" in ("0.00", "1.00") else f"{value:.2f}".removeprefix("0")


def _describe(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=9)
    finish(axes, x, y, size=9, frame=False)
    if axes.get_legend_handles_labels()[0]:
        # Below the panel: within, every corner of some panel has a curve.
        axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13))


def _fixed_points(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    kinds = ("worst", "median")
    _draw_ratios(axes, rows, {f"{which} pattern": [row["fixed_point"][which] for row in rows] for which in kinds})
    if rows:
        axes.plot([1, max(row["ratio"] for row in rows)], [1, 1], label="proved: below this", **PROVED)
        axes.axvline(1, color="0.5", lw=0.8)
    _describe(axes, "Is the fixed point at the pattern?", SEPARATION, "distance / the allowed 1/(beta N M)")


def _steps(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    worst = {label: [row[key]["worst"] or float("nan") for row in rows] for key, label in BOUNDS.items()}
    _draw_ratios(axes, rows, worst)
    if rows:
        axes.axhline(1, label="proved: below this", **PROVED)
        axes.axvline(1, color="0.5", lw=0.8)
    _describe(axes, "How loose are the error bounds?", SEPARATION, "worst measured / bound")


def _draw_ratios(axes: Any, rows: Sequence[Mapping[str, Any]], curves: Mapping[str, list[float]]) -> None:
    """Draw curves against the separation, on a logarithmic axis."""
    for index, (label, values) in enumerate(curves.items()):
        look = {"color": COLORS[index], "marker": MARKERS[index], "ms": 4}
        axes.plot([row["ratio"] for row in rows], values, label=label, **look)
    if rows:
        axes.set_yscale("log")


def _capacity(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for index, row in enumerate(rows):
        counts, shares = [s["count"] for s in row["shares"]], [s["all_stored"] for s in row["shares"]]
        color, what = COLORS[index], f"d {row['dim']}, K {row['K']:g}"
        axes.plot(counts, shares, color=color, marker=MARKERS[index], ms=4, label=what)
        if row["promised"] is not None:
            axes.axvline(row["promised"], color=color, ls="--", lw=1.3)
    if rows:
        axes.set_xscale("log")
        axes.set_ylim(-0.03, 1.05)
    title = "Random patterns, beta 1; dashed: N of theorem 3"
    _describe(axes, title, "number of patterns N", "share of sets with all N stored")
