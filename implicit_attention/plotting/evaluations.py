"""Figures of the evaluations that each problem took, solver by solver."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import _validate
from ..solution import Solution, SolveReport
from .style import BAD, GOOD, Figure, new_figure

#: Heights of the longest bar, where rows are 1 apart, and of the shortest, so that a single problem is seen.
TALLEST, SHORTEST = 0.8, 0.05
#: Largest number of evaluations up to which the axis is linear.
LINEAR = 30


def evaluations_figure(
    solutions: Mapping[str, Solution | SolveReport], *, title: str = "Evaluations of each problem"
) -> Figure:
    """Draw a histogram of evaluations for each solver, below each other, with a bar for each number that occurs.

    Problems without an answer are counted at what they spent, in bars of another colour with a cross. On the right
    stand the median, the number that 99 of 100 problems stay within, and the share that failed.

    Not for the course of a solve: use `convergence_figure`.

    Args:
        solutions: by the name of the solver, the result of `solve`, or the `last_solve` of a layer.
        title: above the bars.

    Raises:
        ValueError: no solutions.
        TypeError: an object that is no solution.

    Examples:
        >>> import torch
        >>> from implicit_attention import Anderson, AnchoredEnergy, LogSumExp, Picard, solve
        >>> from implicit_attention.plotting import evaluations_figure
        >>> queries = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
        >>> energy = AnchoredEnergy(LogSumExp(torch.eye(5), 1.0), queries, 0.5)
        >>> solutions = {"Picard": solve(energy, queries, solver=Picard()), "Anderson": solve(energy, queries)}
        >>> figure = evaluations_figure(solutions)
        >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
        ['Picard', 'Anderson']
    """
    _validate.require(len(solutions) > 0, "solutions", "hold at least one solution", "none")
    spent = {name: _spent(name, solution) for name, solution in solutions.items()}
    most = max((int(counts.max()) for counts, _ in spent.values() if counts.numel()), default=1)
    figure = new_figure(8.0, 1.2 + 0.62 * len(spent), title, fontsize=10)
    from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullFormatter

    axes: Any = figure.subplots()
    wide = 0.8 if most <= LINEAR else 0.0
    lost = False
    for row, (counts, failed) in enumerate(spent.values()):
        base = len(spent) - 1 - row
        lost |= bool(failed.any())
        _draw(axes, base, counts, failed, wide)
        axes.axhline(base, color="0.7", lw=0.6, zorder=0)
        place = {"transform": axes.get_yaxis_transform(), "fontsize": 7.5, "va": "center"}
        axes.text(1.02, base + 0.3, _summary(counts, failed), **place)
    axes.set_yticks([len(spent) - 1 - row + 0.3 for row in range(len(spent))], list(spent), fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_ylim(-0.15, len(spent))
    axes.set_xlabel("map evaluations of a problem (height: share of the problems)", fontsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    if most <= LINEAR:
        axes.set_xlim(0, most + 1)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    else:
        axes.set_xscale("log")
        axes.set_xlim(0.9, 1.2 * most)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FormatStrFormatter("%d"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    if lost:
        axes.plot([], [], color=BAD, lw=2, marker="x", ms=5, label="no answer")
        figure.legend(loc="outside lower right", fontsize=8, frameon=False)
    return figure


def _spent(name: str, solution: Any) -> tuple[Tensor, Tensor]:
    """Return the evaluations of each problem, and whether it failed."""
    required = "be what solve returned, or the last_solve of a layer"
    _validate.check_instance(f"solutions[{name!r}]", solution, (Solution, SolveReport), required)
    return solution.num_evals.detach().cpu().flatten(), solution.failed.detach().cpu().flatten()


def _draw(axes: Any, base: int, counts: Tensor, failed: Tensor, wide: float) -> None:
    """Draw the bars of one solver, of the width `wide` on a linear axis, as lines on a logarithmic one."""
    different: Tensor = torch.unique(counts)
    right, wrong = ((counts[where, None] == different).sum(0) / max(len(counts), 1) for where in (~failed, failed))
    scale = TALLEST / float((right + wrong).max()) if len(different) else 1.0
    for at, answered, lost in zip(different.tolist(), right.tolist(), wrong.tolist(), strict=True):
        low: float = base
        for share, tone in ((answered, GOOD), (lost, BAD)):
            if share == 0:
                continue
            height = max(scale * share, SHORTEST)
            if wide:
                axes.bar(at, height, wide, bottom=low, color=tone, lw=0)
            else:
                axes.vlines(at, low, low + height, color=tone, lw=2.5)
            low += height
        if lost:
            axes.plot(at, low + 0.06, marker="x", ms=4, color=BAD, clip_on=False)


def _summary(counts: Tensor, failed: Tensor) -> str:
    if counts.numel() == 0:
        return "no problems"
    ordered = counts.sort().values
    median, most = (int(ordered[math.ceil(share * len(ordered)) - 1]) for share in (0.5, 0.99))
    lost = float(failed.double().mean())
    return f"median {median}, 99 % within {most}" + (f"\n{100 * lost:.3g} % without answer" if lost else "")
