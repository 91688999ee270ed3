"""The picture of docs/index.md: `python docs/idea/idea.py` writes idea.png beside this file."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from matplotlib.figure import Figure

from implicit_attention import AnchoredEnergy, LogSumExp, Picard, solve
from implicit_attention.plotting.style import BAD, DPI, GOOD

PATTERNS = torch.tensor(
    [[1.2, 0.3], [-0.8, 1.1], [-0.4, -1.3], [0.9, -0.9], [-1.3, -0.1], [0.2, 0.6]], dtype=torch.float64
)
BETA, QUERY = 2 * math.sqrt(2), torch.tensor([[1.5, 1.5]], dtype=torch.float64)
LEFT, RIGHT, LOW, HIGH, SIDE = -1.9, 2.1, -1.8, 1.7, 241


def path() -> torch.Tensor:
    """The states of plain steps from the query, (steps + 1, 2): the query first, the solution last."""
    energy = AnchoredEnergy(LogSumExp(PATTERNS, BETA), QUERY, anchor=0.0)
    solution = solve(energy, QUERY, solver=Picard(max_steps=1000, rtol=1e-10), trace=True)
    assert solution.trace is not None
    return solution.trace.value[:, 0]


def figure() -> Figure:
    states = path()
    x, y = torch.linspace(LEFT, RIGHT, SIDE), torch.linspace(LOW, HIGH, SIDE)
    grid = torch.cartesian_prod(x, y).double()
    energy = AnchoredEnergy(LogSumExp(PATTERNS, BETA), grid, anchor=0.0).energy(grid).reshape(SIDE, SIDE).T
    drawn = Figure(figsize=(5.4, 5.4), dpi=DPI, layout="constrained")
    axes = drawn.subplots()
    # Close to each other at the bottom, where the energy is flat.
    levels = (energy.min() + 1.7 * torch.linspace(0.0, 1.0, 19) ** 2).tolist()
    axes.contourf(x, y, energy, levels=levels, cmap="Greys_r", alpha=0.55, extend="max")
    axes.contour(x, y, energy, levels=levels, colors="0.45", linewidths=0.5, linestyles="-")
    axes.plot(*PATTERNS.T, "o", mfc="white", mec="black", ms=8, label="stored patterns (keys)")
    axes.plot(*states[1:].T, ".-", color=GOOD, ms=7, lw=1.2, label="steps that follow")
    arrow = {"arrowstyle": "-|>", "color": BAD, "lw": 2.4, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", states[1].tolist(), states[0].tolist(), arrowprops=arrow)
    axes.plot(*states[0], "s", color=BAD, ms=8, label="query: one step is softmax attention")
    axes.plot(*states[-1], "*", color=GOOD, mec="black", ms=17, label="where the steps end: the equilibrium")
    axes.set(xlim=(LEFT, RIGHT), ylim=(LOW, HIGH), xlabel="$z_1$", ylabel="$z_2$", aspect="equal")
    drawn.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return drawn


if __name__ == "__main__":
    figure().savefig(Path(__file__).with_suffix(".png"))
