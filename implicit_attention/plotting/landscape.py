"""An energy over the plane: contours or a surface, patterns, ways down, stationary points, and the values read out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from ..diagnostics import StationaryPoints, stationary_points
from ..diagnostics.stationary import check_energy, copies, doubled, same_energies
from ..energies.base import Energy
from ..potentials import ReadsOut
from ..potentials.masked_keys import in_double
from ..problem import Problem
from ..solution import Trace
from .style import BAD, COLORS, Figure, add_bar, finish, legend_below, new_figure

#: The number of contours, nearer to each other at the bottom, where valleys are shallow.
LEVELS = 22
#: All marks lie within this part of the picture.
FILLED = 0.84
#: Newton steps start from so many states along one side of the picture.
NEWTON = 21
PATH, VALUE = BAD, COLORS[2]
#: Marker, size and face of stationary points, by kind.
KINDS: dict[str, tuple[str, float, str]] = {
    "minimum": ("*", 13, "#FFD92F"),
    "saddle": ("X", 8, "w"),
    "maximum": ("^", 8, "w"),
}


class Window(NamedTuple):
    """A square of the plane."""

    center: Tensor
    reach: float

    def lines(self, side: int) -> tuple[Tensor, Tensor]:
        """Coordinates along both axes, (side,) each."""
        steps = torch.linspace(-self.reach, self.reach, side, dtype=torch.float64)
        return steps + self.center[0], steps + self.center[1]

    def states(self, side: int) -> Float[Tensor, "side side 2"]:
        """States on a grid; entry (i, j) is (x_j, y_i)."""
        x, y = self.lines(side)
        return torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)


class Scene(NamedTuple):
    """The marks that are drawn over an energy, in float64 on the CPU."""

    patterns: Tensor
    paths: Tensor
    moved: bool
    read: Tensor
    #: The queries whose energies have an anchor, (K, 2).
    queries: Tensor
    #: The energy of states (K, 2) that is drawn.
    height: Callable[[Tensor], Tensor]


def landscape_figure(
    energy: Problem,
    states: Float[Tensor, "N 2"],
    *,
    trace: Trace | None = None,
    fixed_points: StationaryPoints | None = None,
    values: Float[Tensor, "M 2"] | None = None,
    patterns: Float[Tensor, "M 2"] | None = None,
    grid: int = 101,
    reach: float | None = None,
    kind: Literal["contour", "surface"] = "contour",
    query: int = 0,
    title: str = "Energy landscape",
) -> Figure:
    """Draw an energy over the plane of its states, with patterns, the way of every query, and stationary points.

    With an anchor above 0 every query has an energy of its own. Then the picture is that of one, `query`, with its way
    alone, and says whose it is.

    Not for states of more than two dimensions: use `principal_figure`. Not for energies that were computed before: use
    `panels_figure`.

    Args:
        energy: an energy of two-dimensional states, one problem per row: `AnchoredEnergy`, `EnergyFunction`.
        states: (N, 2), where the queries start.
        trace: of `solve(energy, states, trace=True)`; the ways are those of its states.
        fixed_points: of `stationary_points`; None finds them by Newton steps from a grid.
        values: (M, 2), one per key. Arrows lead from the last states to what they read out, softmax(beta z K^T) V of an
            energy over `LogSumExp`.
        patterns: (M, 2), drawn as open circles; None takes `energy.potential.keys`, if there are keys.
        grid: states along a side of the picture, >= 2.
        reach: half the side of a square around 0; None chooses a square that holds all that is drawn.
        kind: "contour" or "surface".
        query: the row of an energy that is different for every row.
        title: above the picture.

    Raises:
        TypeError, ValueError: a problem without an energy; states of other than two dimensions; coupled tokens;
            patterns or values of another width or with NaN; a trace of another shape; a grid below 2.
        ModuleNotFoundError: matplotlib is not installed.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp, solve
        >>> from implicit_attention.plotting import landscape_figure
        >>> keys, queries = torch.tensor([[1.0, 0.0], [-1.0, 0.5]]), torch.tensor([[0.2, 1.0], [0.1, -1.0]])
        >>> energy = AnchoredEnergy(LogSumExp(keys, beta=3.0), queries)
        >>> solution = solve(energy, queries, trace=True)
        >>> figure = landscape_figure(energy, queries, trace=solution.trace, grid=41)
        >>> len(figure.axes)  # the plane, and the bar of its colours
        2
    """
    check_plane(energy, states)
    grid = _validate.check_integer("grid", grid, low=2, remedy="101 makes smooth contours")
    _validate.check_choice("kind", kind, ("contour", "surface"))
    if reach is not None:
        reach = _validate.check_number("reach", reach, low=0.0, open_low=True)
    query = _validate.check_integer("query", query, low=0)
    _validate.require(query < len(states), "query", f"number one of the {len(states)} rows", query)
    energy.check_state(states)
    shared = has_one_energy(energy, states)
    scene = _scene(energy, states, None if shared else query, trace, values, patterns)
    if fixed_points is None:
        everywhere = window_around([scene.patterns, scene.paths.flatten(0, 1)], reach)
        starts = everywhere.states(NEWTON).flatten(0, 1)
        fixed_points = stationary_points(copies(doubled(energy), query, starts), starts)
    shown = [scene.patterns, scene.paths.flatten(0, 1), scene.read, scene.queries, in_double(fixed_points.value).cpu()]
    window = window_around(shown, reach)
    heights = energies_over(energy, query, window, grid)
    figure = new_figure(6.4, 5.9, title, fontsize=11)
    axes = (_contours if kind == "contour" else _surface)(figure, scene, fixed_points, window, heights)
    if not shared:
        anchor = getattr(energy, "anchor", None)
        weight = "" if anchor is None else f" (anchor {float(anchor):.3g})"
        axes.set_title(f"energy of query {query}{weight} alone: each query has its own", fontsize=9)
    legend_below(figure, axes.get_legend_handles_labels()[0], 4)
    return figure


def check_plane(energy: Problem, states: Tensor, name: str = "states") -> None:
    """Raise unless `energy` is one of single states and `states` lie in the plane, (N, 2)."""
    check_energy("energy", energy)
    _validate.check_float_tensor(name, states)
    flat = states.ndim == 2 and states.shape[-1] == 2 and len(states) > 0
    remedy = "draw states of more dimensions by principal_figure(keys, path)"
    _validate.require(flat, name, "be states of the plane, shape (N, 2)", f"shape {tuple(states.shape)}", remedy)
    _validate.require(bool(states.isfinite().all()), name, "hold finite numbers", "others")


def energies_over(energy: Problem, query: int, window: Window, side: int) -> Float[Tensor, "side side"]:
    """Return E of one row on a grid, in float64; entry (i, j) is that at (x_j, y_i)."""
    heights = energy_of_row(energy, query, window.states(side).flatten(0, 1)).view(side, side)
    received = "none that is: the energy holds NaN, or has no state in the picture"
    _validate.require(bool(heights.isfinite().any()), "energy", "be finite somewhere in the picture", received)
    return heights


def energy_of_row(energy: Problem, query: int, states: Float[Tensor, "K 2"]) -> Float[Tensor, "K"]:
    """Return E of one row at any states, in float64."""
    rows = copies(doubled(energy), query, states)
    assert isinstance(rows, Energy)
    with torch.no_grad():
        return rows.energy(states).cpu()


def window_around(shown: list[Tensor], reach: float | None) -> Window:
    """Return a square that holds all points (K, 2) of `shown`, or the one of this reach around 0."""
    if reach is not None:
        return Window(torch.zeros(2, dtype=torch.float64), reach)
    points = torch.cat([torch.zeros(1, 2, dtype=torch.float64), *shown])
    points = points[points.isfinite().all(-1)]
    low, high = points.amin(0), points.amax(0)
    half = float((high - low).max()) / 2 / FILLED
    return Window((low + high) / 2, half or 1.0)


def has_one_energy(energy: Problem, states: Tensor) -> bool:
    """Return whether all rows have one energy."""
    with torch.no_grad():
        return same_energies(doubled(energy), in_double(states))


def _scene(
    energy: Problem,
    states: Tensor,
    only: int | None,
    trace: Trace | None,
    values: Tensor | None,
    patterns: Tensor | None,
) -> Scene:
    """Gather the marks, with the ways of all queries or of the one whose energy is drawn."""
    name = "patterns" if patterns is not None else "energy.potential.keys"
    potential: Any = getattr(energy, "potential", None)
    stored = getattr(potential, "keys", None) if patterns is None else patterns
    nothing = torch.zeros(0, 2, dtype=torch.float64)
    paths = in_double(states).cpu()[None]
    if trace is not None:
        shape, required = trace.value.shape[1:], f"be of states of shape {tuple(states.shape)}"
        _validate.require(shape == states.shape, "trace", required, f"shape {tuple(shape)} of its states")
        paths = torch.cat([paths, in_double(trace.value).cpu()])
    read = queries = nothing
    if values is not None:
        required, received = "be given for an energy whose potential reads out values", type(potential).__name__
        _validate.require(isinstance(potential, ReadsOut), "values", required, received, "LogSumExp does")
        _points("values", values)
        count = len(potential.keys) if hasattr(potential, "keys") else len(values)
        _validate.require(len(values) == count, "values", f"be one per key, shape ({count}, 2)", tuple(values.shape))
        with torch.no_grad():
            exact: Any = doubled(energy)
            read = exact.potential.readout(paths[-1].to(values.device), in_double(values)).cpu()
    if only is not None:
        paths, read = paths[:, only : only + 1], read[only : only + 1]
        field = getattr(energy, "field", None)
        queries = nothing if field is None else in_double(field[only : only + 1]).cpu()
    marked = nothing if stored is None else _points(name, stored)
    return Scene(marked, paths, trace is not None, read, queries, lambda z: energy_of_row(energy, only or 0, z))


def _points(name: str, points: Tensor) -> Tensor:
    _validate.check_float_tensor(name, points)
    required = "be points of the plane, shape (M, 2)"
    _validate.require(points.ndim == 2 and points.shape[-1] == 2, name, required, f"shape {tuple(points.shape)}")
    remedy = "leave out the rows that hold NaN or inf"
    _validate.require(bool(points.isfinite().all()), name, "hold finite numbers", "others", remedy)
    return in_double(points).cpu()


def _levels(heights: Tensor) -> Tensor:
    """Return the heights of contours, between the lowest and the highest energy in the picture."""
    finite = heights[heights.isfinite()]
    low, high = finite.min(), finite.max()
    span = torch.where(high > low, high - low, torch.ones_like(low))
    return low + span * torch.linspace(0, 1, LEVELS, dtype=torch.float64) ** 2


def _short(number: float, _: Any = None) -> str:
    return f"{number:.3g}".replace("-", "\N{MINUS SIGN}")


def _light() -> Any:
    """Return blues, darkest at the bottom, and light enough for black marks; lightness alone tells heights."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap([colormaps["Blues_r"](0.46 + 0.52 * step / 255) for step in range(256)])


def _contours(figure: Figure, scene: Scene, points: StationaryPoints, window: Window, heights: Tensor) -> Any:
    from matplotlib.colors import BoundaryNorm
    from numpy.ma import masked_invalid

    axes: Any = figure.subplots()
    x, y = (line.numpy() for line in window.lines(len(heights)))
    levels = _levels(heights).tolist()
    shown = masked_invalid(heights.numpy())
    drawn = axes.contourf(x, y, shown, levels=levels, cmap=_light(), norm=BoundaryNorm(levels, 256))
    axes.contour(x, y, shown, levels=levels[1:-1], colors="k", linewidths=0.35, linestyles="-", alpha=0.45)
    place: dict[str, Any] = {"ax": axes, "shrink": 0.85, "aspect": 28, "pad": 0.015}
    bar = add_bar(figure, drawn, "energy $E(z)$", size=9, format=_short, ticks=levels[:: LEVELS // 7], **place)
    bar.minorticks_off()
    mark(axes, scene, points)
    axes.set(xlim=(x[0], x[-1]), ylim=(y[0], y[-1]), aspect="equal")
    finish(axes, "$z_1$", "$z_2$", size=10, grid=0)
    axes.tick_params(labelsize=8)
    return axes


def mark(axes: Any, scene: Scene, points: StationaryPoints) -> None:
    """Draw patterns, ways, stationary points and values in the plane."""
    from matplotlib.patheffects import Normal, Stroke

    # A white edge sets lines apart from the contours without colour.
    cased = [Stroke(linewidth=3, foreground="w"), Normal()]
    if len(scene.patterns):
        look = {"ls": "", "marker": "o", "ms": 10, "mfc": "none", "mec": "k", "mew": 1.4, "zorder": 4}
        axes.plot(*scene.patterns.T.numpy(), label="stored pattern", **look)
    starts, ends = scene.paths[0], scene.paths[-1]
    for index, way in enumerate(scene.paths.transpose(0, 1) if scene.moved else ()):
        look = {"color": PATH, "lw": 1.3, "marker": ".", "ms": 4, "path_effects": cased}
        axes.plot(*way.T.numpy(), label=None if index else "way of a query", zorder=5, **look)
    look = {"ls": "", "color": PATH, "mec": "w", "mew": 0.6}
    axes.plot(*starts.T.numpy(), marker="s", ms=5, label="its start" if scene.moved else "start", zorder=6, **look)
    if scene.moved:
        axes.plot(*ends.T.numpy(), marker="D", ms=5.5, label="its end", zorder=8, **look)
    if len(scene.queries) and not torch.equal(scene.queries, starts):
        axes.plot(*scene.queries.T.numpy(), ls="", marker="x", ms=7, mew=2, color="k", label="query $x$", zorder=6)
    for end, read in zip(ends, scene.read, strict=False):
        if isinstance(axes, _Lifted):
            axes.plot(*torch.stack([end, read]).T.numpy(), color=VALUE, lw=1.2, zorder=7)
            continue
        arrow = {"arrowstyle": "-|>", "color": VALUE, "lw": 1.4, "shrinkA": 3, "shrinkB": 4, "path_effects": cased}
        axes.annotate("", read.tolist(), end.tolist(), arrowprops=arrow, zorder=7)
    if len(scene.read):
        look = {"ls": "", "marker": "P", "ms": 8, "color": VALUE, "mec": "w", "mew": 0.8, "zorder": 8}
        axes.plot(*scene.read.T.numpy(), label="value read out", **look)
    mark_points(axes, points, scale=1.0, mew=0.8, zorder=7)


def mark_points(axes: Any, points: StationaryPoints, *, scale: float, **look: Any) -> None:
    """Mark the stationary points of each kind, `scale` times as large as `KINDS` says."""
    for kind, (marker, size, face) in KINDS.items():
        chosen = [own == kind for own in points.kind]
        if any(chosen):
            places = in_double(points.value).cpu()[chosen].T.numpy()
            axes.plot(*places, ls="", marker=marker, ms=scale * size, mfc=face, mec="k", label=kind, **look)


def _surface(figure: Figure, scene: Scene, points: StationaryPoints, window: Window, heights: Tensor) -> Any:
    from numpy.ma import masked_invalid

    # Marks are drawn over the surface, which would hide parts of ways.
    axes: Any = figure.add_subplot(projection="3d", computed_zorder=False)
    levels = _levels(heights)
    low, high = float(levels[0]), float(levels[-1])
    x, y = torch.meshgrid(*window.lines(len(heights)), indexing="xy")
    # Walls above all marks would press the valleys flat.
    drawn = torch.cat([scene.patterns, scene.paths.flatten(0, 1), scene.read])
    top = max([low + 0.35 * (high - low), *scene.height(drawn).tolist()])
    shown = masked_invalid(heights.where(heights <= top, torch.nan).numpy())
    look = {"cmap": _light(), "rcount": 80, "ccount": 80, "linewidth": 0, "antialiased": True, "alpha": 0.9}
    axes.plot_surface(x.numpy(), y.numpy(), shown, zorder=1, **look)
    look = {"colors": "k", "linewidths": 0.4, "linestyles": "-", "zorder": 2}
    axes.contour(x.numpy(), y.numpy(), shown, levels=levels.tolist(), **look)
    mark(_Lifted(axes, scene.height), scene, points)
    axes.set(xlabel="$z_1$", ylabel="$z_2$", zlabel="energy $E(z)$")
    axes.tick_params(labelsize=7)
    axes.view_init(elev=48, azim=-62)
    return axes


class _Lifted(NamedTuple):
    """Axes of three dimensions on which points of the plane are drawn at their energy."""

    axes: Any
    height: Callable[[Tensor], Tensor]

    def plot(self, x: Any, y: Any, **look: Any) -> None:
        points = torch.stack([torch.as_tensor(x), torch.as_tensor(y)], -1)
        self.axes.plot(x, y, self.height(points).numpy(), **look)
