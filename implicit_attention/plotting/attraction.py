"""Basins of plain steps in the plane, and for every solver where it ends and what it costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .. import _validate
from .._solve import solve
from ..diagnostics import StationaryPoints, stationary_points
from ..diagnostics.stationary import copies, doubled
from ..problem import Problem
from ..solvers import Anderson, Picard, Solver
from .landscape import Window, check_plane, has_one_energy, mark_points
from .style import BAD, COLORS, Figure, add_bar, finish, legend_below, new_figure

#: These stand in place of the index of an attractor.
UNSOLVED, SADDLE = -1, -2
#: The colours and names of starts that led to no minimum.
LOST = ((SADDLE, BAD, "ends on a saddle or a maximum"), (UNSOLVED, "k", "does not converge"))
HATCH = "/////"
#: An end nearer than this to a stationary point has reached it: the last steps may be slow.
NEAR = 1e-3
#: Newton steps start from so many states along one side of the plane.
NEWTON = 41


@dataclasses.dataclass(frozen=True)
class Basins:
    """The attractors to which the states of a grid lead.

    Not for many dimensions, which have no grid.

    Attributes:
        starts: (G, G, 2); entry (i, j) is the state (x_j, y_i).
        index: (G, G), the row of `attractors` at which plain steps end; -1 where they did not come near any stationary
            point, -2 where they ended on a saddle or a maximum.
        attractors: (K, 2), the minima that were reached, most starts first.
        counts: (K,), the number of starts that end at each attractor.
        energies: (K,), the energies of the attractors.
        points: all known stationary points, reached or not.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp
        >>> from implicit_attention.plotting import basins
        >>> keys = torch.tensor([[1.0, 0.2], [-1.0, 0.0]])
        >>> result = basins(AnchoredEnergy(LogSumExp(keys, beta=4.0), keys), grid=11)
        >>> type(result).__name__, result.index.shape, len(result.attractors)
        ('Basins', torch.Size([11, 11]), 2)
    """

    starts: Float[Tensor, "G G 2"]
    index: Int[Tensor, "G G"]
    attractors: Float[Tensor, "K 2"]
    counts: Int[Tensor, "K"]
    energies: Float[Tensor, "K"]
    points: StationaryPoints


def basins(energy: Problem, *, grid: int = 81, reach: float = 2.0, steps: int = 200) -> Basins:
    """Follow plain steps z <- f(z) from a grid of the plane, and count where they end.

    Not for which solver is best: use `basins_figure`, or `solve` with each.

    Args:
        energy: an energy of two-dimensional states, one problem per row; its first row is taken for all.
        grid: states along a side, >= 2.
        reach: half the side of the square around 0.
        steps: plain steps from every state at most.

    Returns:
        `Basins`, in float64.

    Raises:
        TypeError, ValueError: as `landscape_figure`; steps below 1.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp
        >>> from implicit_attention.plotting import basins
        >>> keys = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> result = basins(AnchoredEnergy(LogSumExp(keys, beta=4.0), keys), grid=10)
        >>> result.counts.tolist(), result.attractors.abs().round(decimals=4).tolist()
        ([50, 50], [[0.9993, 0.0], [0.9993, 0.0]])
    """
    rows, starts = _rows(energy, grid, reach)
    steps = _validate.check_integer("steps", steps, low=1)
    # A state that does not reach this tolerance makes all steps.
    plain = Picard(atol=1e-10, rtol=1e-10, max_steps=steps)
    ends = solve(rows, starts, solver=plain, on_failure="ignore").value
    points = _known(rows, starts, ends)
    index, attractors, energies = _assigned(points, ends)
    counts = torch.bincount(index[index >= 0], minlength=len(attractors))
    reached = torch.argsort(counts, descending=True, stable=True)[: int((counts > 0).sum())]
    place = torch.full((len(counts) + 2,), UNSOLVED)
    place[reached], place[SADDLE] = torch.arange(len(reached)), SADDLE
    minima = attractors[reached], counts[reached], energies[reached]
    return Basins(starts.view(grid, grid, -1), place[index].view(grid, grid), *minima, points)


def basins_figure(
    energy: Problem,
    *,
    solvers: Mapping[str, Solver] | None = None,
    grid: int = 81,
    reach: float = 2.0,
    steps: int = 200,
    title: str = "Basins of attraction",
) -> Figure:
    """Colour the plane by the minimum that plain steps reach, and for every solver by the evaluations of each start.

    Starts from which a solver ends on a saddle or a maximum, and those where it did not converge, have colours of their
    own: an accelerated solver without its guard ends on saddles.

    Not for states of more than two dimensions: count solutions by `distinct_fixed_points`.

    Args:
        energy: an energy of two-dimensional states, one problem per row; its first row is taken for all.
        solvers: by the name of each; None takes plain steps, Anderson with its guard, and without.
        grid: states along a side, >= 2.
        reach: half the side of the square around 0.
        steps: plain steps from every state at most.
        title: above the panels.

    Returns:
        A matplotlib `Figure`; save it with `figure.savefig(path)`. `basins` has the numbers of its left panel.

    Raises:
        TypeError, ValueError: as `landscape_figure`; no solver; steps below 1.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp, Picard
        >>> from implicit_attention.plotting import basins_figure
        >>> keys = torch.tensor([[1.0, 0.2], [-1.0, 0.0]])
        >>> energy = AnchoredEnergy(LogSumExp(keys, beta=4.0), keys)
        >>> figure = basins_figure(energy, solvers={"plain steps": Picard()}, grid=11)
        >>> figure.axes[0].get_title(), figure.axes[1].get_title().splitlines()[0]
        ('where plain steps end', 'plain steps')
    """
    if solvers is None:
        solvers = {"plain steps": Picard(), "Anderson": Anderson(), "Anderson, no guard": Anderson(guard="none")}
    _validate.require(bool(solvers), "solvers", "hold at least one solver", "none")
    result = basins(energy, grid=grid, reach=reach, steps=steps)
    rows, starts = _rows(energy, grid, reach)
    figure = new_figure(3.3 * (1 + len(solvers)) + 0.9, 4.3, title, fontsize=11)
    panels: Any = figure.subplots(1, 1 + len(solvers), sharex=True, sharey=True, squeeze=False)[0]
    _draw_basins(panels[0], result, reach)
    whose = "" if has_one_energy(energy, getattr(energy, "field", starts)) else "\n(energy of query 0)"
    panels[0].set_title(f"where plain steps end{whose}", fontsize=9)
    runs = {name: solve(rows, starts, solver=solver, on_failure="ignore") for name, solver in solvers.items()}
    most = max(int(run.num_evals.max()) for run in runs.values())
    drawn: Any = None
    for axes, (name, run) in zip(panels[1:], runs.items(), strict=True):
        index, *_ = _assigned(result.points, run.value.where(run.converged[:, None], torch.nan))
        drawn = _draw_evaluations(axes, name, run.num_evals, index, grid, reach, most)
    # Round numbers, a factor of about two apart.
    ticks = [step * 10**power for power in range(6) for step in (1, 2, 5) if 2 <= step * 10**power <= most]
    bar: dict[str, Any] = {"ax": list(panels), "shrink": 0.7, "aspect": 24, "pad": 0.01}
    add_bar(figure, drawn, "evaluations of f", ticks=ticks, format="%d", **bar).minorticks_off()
    for column, axes in enumerate(panels):
        mark_points(axes, result.points, scale=0.7, mew=0.7, zorder=5)
        axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
        finish(axes, "$z_1$ of the start", "" if column else "$z_2$ of the start", grid=0)
    _add_legend(figure, panels[0])
    return figure


def _rows(energy: Problem, grid: int, reach: float) -> tuple[Problem, Tensor]:
    """Return the first row of an energy once for each state of a grid, and the states (G G, 2), in float64."""
    grid = _validate.check_integer("grid", grid, low=2, remedy="81 shows most basins")
    reach = _validate.check_number("reach", reach, low=0.0, open_low=True)
    starts = Window(torch.zeros(2, dtype=torch.float64), reach).states(grid).flatten(0, 1)
    check_plane(energy, getattr(energy, "field", starts), "energy.field")
    return copies(doubled(energy), 0, starts), starts


def _known(rows: Problem, starts: Tensor, ends: Tensor) -> StationaryPoints:
    """Find stationary points from a coarser grid of starts, and from where plain steps ended."""
    side = round(len(starts) ** 0.5)
    coarse = starts.view(side, side, 2)[:: max(side // NEWTON, 1), :: max(side // NEWTON, 1)].flatten(0, 1)
    fine = ends[ends.isfinite().all(-1)]
    around = torch.unique((fine / NEAR).round(), dim=0) * NEAR
    near = torch.cat([coarse, around[:: max(len(around) // 1000, 1)]])
    return stationary_points(copies(rows, 0, near), near)


def _assigned(points: StationaryPoints, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each end the number of its minimum, or its failure; the minima; their energies."""
    minimum = torch.tensor([kind == "minimum" for kind in points.kind], dtype=torch.bool)
    if not len(minimum):
        return torch.full(ends.shape[:1], UNSOLVED), points.value, points.energy
    apart, nearest = torch.cdist(ends, points.value).min(-1)
    number = torch.where(minimum, minimum.cumsum(0) - 1, SADDLE)
    reached = apart <= NEAR * (1 + ends.norm(dim=-1))
    return number[nearest].where(reached, UNSOLVED), points.value[minimum], points.energy[minimum]


def _draw_basins(axes: Any, result: Basins, reach: float) -> None:
    from matplotlib.colors import ListedColormap, to_rgb

    count = len(result.attractors)
    # Pale colours, so that marks and numbers can be read, each of a lightness of its own.
    tints: Any = [[0.45 + 0.55 * part for part in to_rgb(COLORS[k % len(COLORS)])] for k in range(count)]
    classes = result.index.where(result.index >= 0, count).numpy()
    _paint(axes, classes, reach, cmap=ListedColormap([*tints, "w"]), vmin=-0.5, vmax=count + 0.5)
    _cover(axes, result.index, reach)
    line = torch.linspace(-reach, reach, len(classes)).numpy()
    for k in range(count):
        axes.contour(line, line, (classes == k).astype(float), levels=[0.5], colors="k", linewidths=0.7)
    share = result.counts.double() / result.index.numel()
    for (x, y), part in zip(result.attractors.tolist(), share.tolist(), strict=True):
        place = {"xytext": (0, -16 if y > 0.8 * reach else 9), "textcoords": "offset points", "ha": "center"}
        box = {"facecolor": "w", "edgecolor": "none", "pad": 1, "alpha": 0.75}
        axes.annotate(f"{part:.0%}", (x, y), fontsize=7, bbox=box, zorder=6, **place)


def _paint(axes: Any, values: Any, reach: float, **look: Any) -> Any:
    """Draw one number for each state of the grid, from the lower left corner on."""
    extent = (-reach, reach, -reach, reach)
    return axes.imshow(values, origin="lower", interpolation="nearest", extent=extent, **look)


def _draw_evaluations(axes: Any, name: str, spent: Tensor, index: Tensor, grid: int, reach: float, most: int) -> Any:
    from matplotlib.colors import LogNorm

    drawn = _paint(axes, spent.view(grid, grid).cpu().numpy(), reach, cmap="Blues", norm=LogNorm(2, max(most, 3)))
    _cover(axes, index.view(grid, grid), reach)
    saddles, unsolved = (float((index == code).double().mean()) for code in (SADDLE, UNSOLVED))
    lost = [f"{saddles:.1%} on saddles"] if saddles else []
    lost += [f"{unsolved:.1%} not converged"] if unsolved else []
    lines = [name, f"median {int(spent.median())} evaluations", *([", ".join(lost)] if lost else [])]
    axes.set_title("\n".join(lines), fontsize=8)
    return drawn


def _cover(axes: Any, index: Tensor, reach: float) -> None:
    """Draw the starts that led to no minimum; hatches tell saddles apart without colour."""
    from matplotlib.colors import ListedColormap

    for code, color, _ in LOST:
        covered = (index == code).double()
        if bool(covered.any()):
            _paint(axes, covered.where(covered > 0, torch.nan).numpy(), reach, cmap=ListedColormap([color]))
            if code == SADDLE:
                line = torch.linspace(-reach, reach, len(index)).numpy()
                axes.contourf(line, line, covered.numpy(), levels=[0.5, 1.5], colors="none", hatches=[HATCH])


def _add_legend(figure: Figure, axes: Any) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=color, edgecolor="k", hatch=HATCH if code == SADDLE else None, label=label)
        for code, color, label in LOST
    ]
    legend_below(figure, [*axes.get_legend_handles_labels()[0], *patches], 5)
