"""Tokens as samples of a law under repeated attention, and score matrices beside the inverse covariance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import _validate
from .style import COLORS, MARKERS, Figure, finish, new_figure


def distribution_figure(
    rows: Sequence[Mapping[str, Any]],
    slopes: Sequence[Mapping[str, Any]],
    matrices: Sequence[Mapping[str, Any]],
    *,
    title: str = "Tokens as samples",
) -> Figure:
    """Draw entropy by step for every law, errors of one step by number of tokens, and cosines of score matrices.

    Not for single trajectories of tokens: only moments are drawn.

    Args:
        rows: with `law`, `way`, `tokens`, `step`, `entropy` (nats), `closed_entropy`, `covariance_error`, `moved`, and
            `NAME_std` of all but the second.
        slopes: with `law`, `way`, `quantity` (the name of an error in `rows`) and `slope`, its exponent.
        matrices: with `matrix` (its name), `alignment`, `whitened_alignment` (cosines) and their `NAME_std`.
        title: above all.

    Raises:
        ValueError: no rows.

    Examples:
        >>> from implicit_attention.plotting import distribution_figure
        >>> start = {"law": "a law", "way": "attention", "tokens": 100, "step": 0, "entropy": 2.0, "entropy_std": 0.1}
        >>> after = start | {"step": 1, "entropy": 1.0}
        >>> figure = distribution_figure([row | {"closed_entropy": row["entropy"]} for row in (start, after)], [], [])
        >>> [axes.get_title() for axes in figure.axes][0]
        'a law'
    """
    _validate.require(len(rows) > 0, "rows", "hold at least one row", "none")
    laws = list(dict.fromkeys(row["law"] for row in rows))
    figure = new_figure(max(5.2 * len(laws), 10.4), 8.4, title, fontsize=11)
    parts: Any = figure.subfigures(2, 1)
    upper, lower = parts
    for index, (axes, law) in enumerate(zip(upper.subplots(1, len(laws), squeeze=False)[0], laws, strict=True)):
        _entropy(axes, [row for row in rows if row["law"] == law], law, legend=index == 0)
    left, right = lower.subplots(1, 2)
    _errors(left, rows, slopes)
    _cosines(right, matrices)
    return figure


def _entropy(axes: Any, rows: Sequence[Mapping[str, Any]], law: str, *, legend: bool) -> None:
    counts = sorted({row["tokens"] for row in rows})
    shown = list(dict.fromkeys((counts[-1], counts[0])))
    for index, way in enumerate(dict.fromkeys(row["way"] for row in rows)):
        for which, count in enumerate(shown):
            mine = [row for row in rows if (row["way"], row["tokens"]) == (way, count)]
            # Marks stand beside each other, so that none hides another.
            steps = [row["step"] + 0.07 * (index - 1) + 0.02 * which for row in mine]
            values, errors = [row["entropy"] for row in mine], [row["entropy_std"] for row in mine]
            color, label = COLORS[index], f"{way}, {count} tokens"
            look = {"color": color, "mfc": "white" if which else color, "marker": MARKERS[index], "ms": 6, "lw": 0}
            axes.errorbar(steps, values, errors, label=label, elinewidth=1.2, capsize=2, **look)
        closed = [row for row in rows if (row["way"], row["tokens"]) == (way, shown[0])]
        line = [row["step"] for row in closed], [row["closed_entropy"] for row in closed]
        axes.plot(*line, color=COLORS[index], ls="--", lw=1.3, zorder=1)
    axes.set_yscale("symlog", linthresh=5, linscale=1.5)
    ticks = [-100, -30, -10, -5, -2.5, 0, 2.5, 5, 10, 30]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    lowest, highest = min(row["entropy"] for row in rows), max(row["entropy"] for row in rows)
    axes.set_ylim(lowest - 2 - abs(lowest) / 2, highest + 2 + abs(highest) / 2)
    axes.set_xticks(sorted({row["step"] for row in rows}))
    axes.set_title(law, fontsize=10)
    finish(axes, "steps of attention", "entropy 1/2 log det(2 pi e C), nats", size=9, frame=False)
    if legend:
        axes.legend(fontsize=8, frameon=False, loc="lower left")


def _errors(axes: Any, rows: Sequence[Mapping[str, Any]], slopes: Sequence[Mapping[str, Any]]) -> None:
    for index, entry in enumerate(slopes):
        name, place = entry["quantity"], (entry["law"], entry["way"], 1)
        mine = [row for row in rows if (row["law"], row["way"], row["step"]) == place]
        counts, values = [row["tokens"] for row in mine], [row[name] for row in mine]
        errors = [row[f"{name}_std"] for row in mine]
        what = "distance moved / width" if name == "moved" else "error of C"
        label = f"{entry['law'].split(',')[0]}, {entry['way']}: {what}, slope {entry['slope']:.2f}"
        style = {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)], "ms": 5, "capsize": 2}
        axes.errorbar(counts, values, errors, label=label, lw=1.2, **style)
    if slopes:
        axes.plot(counts, [(counts[0] / n) ** 0.5 for n in counts], color="black", ls="--", lw=1.5, label="slope -1/2")
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(counts, [str(n) for n in counts])
        axes.minorticks_off()
        axes.set_ylim(bottom=axes.get_ylim()[0] / 12)
        axes.legend(fontsize=7.5, frameon=False, loc="lower left")
    axes.set_title("How far is a finite sample off after one step?", fontsize=10)
    finish(axes, "number of tokens N", "relative error", size=9, frame=False)


def _cosines(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    labels = {"alignment": "as they are", "whitened_alignment": "tokens whitened (all directions count)"}
    for index, (name, label) in enumerate(labels.items()):
        places = [place + 0.18 * (2 * index - 1) for place in range(len(rows))]
        values, errors = [row[name] for row in rows], [row[f"{name}_std"] for row in rows]
        axes.bar(places, values, 0.34, yerr=errors, color=COLORS[index], alpha=0.75, capsize=3, label=label)
    axes.set_xticks(range(len(rows)), [row["matrix"].replace(" ", "\n", 1) for row in rows])
    axes.axhline(0, color="0.3", lw=0.8)
    axes.set_ylim(-0.3, 1.05)
    axes.axhline(1, color="black", ls="--", lw=1.3, label="the inverse covariance itself")
    axes.set_title("Is W_q^T W_k, trained on digits, the inverse covariance?", fontsize=10)
    finish(axes, y="cosine with the inverse covariance", size=9, frame=False)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, 0.95))
