"""Figures of the residual over the evaluations spent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import _validate
from ..solution import Trace
from .style import COLORS, Figure, finish, legend_below, name_columns, new_figure

#: Residuals below this part of the tolerance are drawn as one.
BELOW = 1e-2
#: Panels side by side.
WRAP = 4
#: The grey of the other methods, behind the one that a panel is about.
BEHIND = "0.8"


def convergence_figure(
    traces: Mapping[str, Trace | None],
    *,
    tolerance: float | None = None,
    title: str = "Residual against map evaluations",
) -> Figure:
    """Draw the residual against evaluations, a panel for each method: median problem, quartiles, and the worst one.

    All panels have the same axes, and the worst problems of the other methods are drawn behind, in grey. With a
    tolerance, a panel says from which number of evaluations on the median and the worst residual are at or below it.

    Not for how a training run converges: use `training_figure`.

    Args:
        traces: by the name of the method, `Solution.trace` of `solve(..., trace=True)`. Problems whose residual is
            not finite are left out.
        tolerance: drawn as a horizontal line.
        title: above the panels.

    Raises:
        TypeError: a trace is None.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp, Picard, solve
        >>> from implicit_attention.plotting import convergence_figure
        >>> queries = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
        >>> energy = AnchoredEnergy(LogSumExp(torch.eye(5), 1.0), queries, 0.5)
        >>> traces = {"Picard": solve(energy, queries, solver=Picard(), trace=True).trace}
        >>> figure = convergence_figure(traces, tolerance=1e-5)
        >>> [axes.get_title(loc="left") for axes in figure.axes]
        ['Picard']
    """
    curves = {}
    for name, trace in traces.items():
        if trace is None:
            remedy = "call solve(..., trace=True)"
            raise TypeError(_validate.message(f"traces[{name!r}]", "be a Trace", "None", remedy))
        if len((curve := quartiles(trace))[0]):
            curves[name] = curve
    columns, rows = min(len(curves), WRAP), math.ceil(len(curves) / WRAP)
    figure = new_figure(1.0 + 2.5 * max(columns, 2), 1.4 + 2.3 * max(rows, 1), title, fontsize=10)
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    if not curves:
        figure.text(0.5, 0.5, "no finite residual", ha="center")
        return figure
    grid: Any = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    floor, top = _limits([values for _, *quarters in curves.values() for values in quarters], tolerance)
    for axes in list(grid.flat)[len(curves) :]:
        axes.set_axis_off()
    for index, (axes, (name, curve)) in enumerate(zip(grid.flat, curves.items(), strict=False)):
        evaluations, low, middle, high, worst = (values.clamp(min=floor).numpy() for values in curve)
        color = COLORS[index % len(COLORS)]
        for other, (x, *_, behind) in curves.items():
            if other != name:
                axes.plot(x.numpy(), behind.clamp(min=floor).numpy(), color=BEHIND, lw=0.8, zorder=1, label="_behind")
        axes.fill_between(evaluations, low, high, alpha=0.3, lw=0, color=color, label="quartiles")
        end = {"markevery": [-1], "ms": 5, "clip_on": False, "color": color}
        axes.plot(evaluations, middle, lw=1.8, marker="o", label="median problem", **end)
        axes.plot(evaluations, worst, lw=1.5, ls="--", marker="s", label="worst problem", **end)
        axes.set_title(name, fontsize=9, loc="left", pad=6 if tolerance is None else 24)
        if tolerance is not None:
            axes.axhline(tolerance, color="0.2", lw=1, ls=(0, (1, 2)), label="tolerance")
            # Above the frame, where no curve is; the name stands above both lines.
            above = {"xycoords": "axes fraction", "xytext": (0, 3), "textcoords": "offset points", "va": "bottom"}
            axes.annotate(_solved(curve, tolerance), (0, 1), fontsize=7, annotation_clip=False, **above)
        axes.set(xscale="log", yscale="log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FormatStrFormatter("%d"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        finish(axes, y="" if index % columns else "residual |f(z) - z|")
    name_columns(grid, "map evaluations per problem")
    grid[0, 0].set_ylim(floor, top)
    grid[0, 0].set_xlim(left=1)
    handles: list[Any] = list(grid[0, 0].get_legend_handles_labels()[0])
    if len(curves) > 1:
        handles.append(Line2D([], [], color=BEHIND, lw=0.8, label="worst of the other methods"))
    legend_below(figure, handles, len(handles))
    return figure


def _solved(curve: tuple[Tensor, ...], tolerance: float) -> str:
    """Return the words on how many evaluations bring the median and the worst residual below the tolerance for good."""
    evaluations, _, middle, _, worst = curve
    words = []
    for name, values in (("median", middle), ("worst", worst)):
        above = int((values > tolerance).nonzero().max()) + 1 if bool((values > tolerance).any()) else 0
        words.append(f"{name} {int(evaluations[above])}" if above < len(values) else f"{name} never")
    return "evaluations to the tolerance\n" + ", ".join(words)


def quartiles(trace: Trace) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (evaluations 1..n, lower quartile, median, upper quartile, largest) of the residual over the problems.

    A problem's residual at e evaluations is the last one recorded by then; a finished problem keeps its own.
    """
    residual = trace.residual.detach().double().cpu().flatten(1)
    spent = trace.num_evals.detach().cpu().flatten(1)
    finite = residual.isfinite().all(0)
    residual, spent = residual[:, finite].T.contiguous(), spent[:, finite].T.contiguous()
    if residual.numel() == 0:
        return (torch.zeros(0, dtype=torch.float64),) * 5
    grid = torch.arange(1, int(spent.max()) + 1)
    last = torch.searchsorted(spent, grid.expand(len(spent), -1).contiguous().to(spent.dtype), right=True) - 1
    at = residual.gather(1, last.clamp(min=0))
    low, middle, high, worst = torch.quantile(at, torch.tensor([0.25, 0.5, 0.75, 1.0], dtype=at.dtype), dim=0)
    return grid, low, middle, high, worst


def _limits(curves: list[Tensor], tolerance: float | None) -> tuple[float, float]:
    """Return the lowest and the highest residual to show; one far below the tolerance is drawn at the lower edge."""
    shown = torch.cat([torch.ones(0, dtype=torch.float64), *curves])
    shown = shown[shown > 0]
    low, high = (float(shown.min()), float(shown.max())) if len(shown) else (1e-8, 1.0)
    if tolerance is not None:
        low, high = max(low, tolerance * BELOW), max(high, tolerance)
    return low / 2, max(2 * high, 10 * low)
