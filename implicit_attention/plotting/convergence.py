"""How the residual falls with the evaluations spent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _validate
from ..solution import Trace
from .style import COLORS, DASHES, MARKERS, add_legend, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: How far below the tolerance residuals are told apart.
BELOW = 1e-3


def convergence_figure(
    traces: Mapping[str, Trace | None],
    *,
    tolerance: float | None = None,
    title: str = "Residual against map evaluations",
) -> Figure:
    """Residual against map evaluations for several methods: the median problem with its quartiles, and the worst one.

    Not for how a training run converges: plot losses and `SolveReport` fields with your own tools.

    Args:
        traces: by the name of the method, `Solution.trace` of `solve(..., trace=True)`. Problems whose residual is
            not finite are left out.
        tolerance: drawn as a horizontal line.
        title: above the axes.

    Returns:
        A matplotlib `Figure`; save it with `figure.savefig(path)`.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp, Picard, solve
        >>> from implicit_attention.plotting import convergence_figure
        >>> queries = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
        >>> energy = AnchoredEnergy(LogSumExp(torch.eye(5), 1.0), queries, 0.5)
        >>> traces = {"Picard": solve(energy, queries, solver=Picard(), trace=True).trace}
        >>> figure = convergence_figure(traces, tolerance=1e-5)
        >>> [axes.get_title() for axes in figure.axes]
        ['median query (band: quartiles)', 'worst query']
    """
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    figure = new_figure(10, 4.6, title, fontsize=10)
    curves = {}
    for name, trace in traces.items():
        if trace is None:
            remedy = "call solve(..., trace=True)"
            raise TypeError(_validate.message(f"traces[{name!r}]", "be a Trace", "None", remedy))
        if len((curve := quartiles(trace))[0]):
            curves[name] = curve
    if not curves:
        figure.text(0.5, 0.5, "no finite residual", ha="center")
        return figure
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    floor, top = _limits([values for _, *quarters in curves.values() for values in quarters], tolerance)
    for index, (name, (evaluations, low, middle, high, worst)) in enumerate(curves.items()):
        color = COLORS[index % len(COLORS)]
        x = evaluations.numpy()
        band = [t.clamp(min=floor).numpy() for t in (low, high)]
        panels[0].fill_between(x, *band, alpha=0.08, lw=0, color=color)
        for axes, values in zip(panels, (middle, worst), strict=True):
            y = values.clamp(min=floor).numpy()
            dashes, marker = DASHES[index % len(DASHES)], MARKERS[index % len(MARKERS)]
            axes.plot(x, y, dashes, lw=1.6, color=color, marker=marker, ms=5, markevery=[-1], label=name, clip_on=False)
    for axes, heading in zip(panels, ("median query (band: quartiles)", "worst query"), strict=True):
        axes.set_title(heading, fontsize=9)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("map evaluations per query")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FormatStrFormatter("%d"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
        if tolerance is not None:
            axes.axhline(tolerance, color="0.4", lw=1, ls=(0, (1, 2)), label="tolerance")
    panels[0].set_ylabel("residual |f(z) - z|")
    panels[0].set_ylim(floor, top)
    panels[0].set_xlim(left=1)
    add_legend(figure, panels[0], 8)
    return figure


def quartiles(trace: Trace) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(evaluations 1..n, lower quartile, median, upper quartile, largest) of the residual over the problems.

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
    """Lowest and highest residual to show. What is far below the tolerance, 0 included, is drawn at the lower edge."""
    shown = torch.cat([torch.ones(0, dtype=torch.float64), *curves])
    shown = shown[shown > 0]
    low, high = (float(shown.min()), float(shown.max())) if len(shown) else (1e-8, 1.0)
    if tolerance is not None:
        low, high = max(low, tolerance * BELOW), max(high, tolerance)
    return low / 2, max(2 * high, 10 * low)
