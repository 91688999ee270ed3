"""The figures of the suites `attention` and `train`, drawn from raw results alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from implicit_attention.plotting.style import COLORS, DPI

from .compare import CONVERGED
from .targets import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Run = dict[str, Any]
Drawn = list[tuple[str, str]]


class Look(NamedTuple):
    """One contender looks the same in every panel."""

    label: str
    color: str
    marker: str
    dashes: str = "-"


SDPA = Look("one explicit attention (SDPA)", "black", "X", "--")
OURS = Look("equilibrium, ours", COLORS[0], "o")
PLAIN = Look("plain iteration (Picard, unrolled autograd)", COLORS[1], "s")
FPI = Look("torchdeq fixed_point_iter", COLORS[2], "^", "-.")
ANDERSON = Look("torchdeq anderson", COLORS[3], "D", "-.")
LOOKS = {
    "ours_forward": OURS,
    "picard": PLAIN,
    "torchdeq_fixed_point_iter": FPI,
    "torchdeq_anderson": ANDERSON,
    "sdpa_training": SDPA,
    "ours_training": OURS,
    "unrolled": PLAIN,
    "torchdeq_training_fixed_point_iter": FPI,
    "torchdeq_training_anderson": ANDERSON,
}
#: For the captions.
OPEN = "an open marker: queries were left above the tolerance"
#: Room above and below what is drawn on a logarithmic axis.
MARGIN = 1.4


def attention_figures(run: Run, folder: Path) -> Drawn:
    """Time against length, time and memory against evaluations, in one figure; all problems by length in another."""
    lengths = _grouped(_rows(run, "LENGTH"))
    if not lengths:
        return []
    drawn = [
        (
            _save(overview(run), folder, "attention", run),
            f"Time against sequence length, time against evaluations, memory against evaluations; {OPEN}",
        )
    ]
    if len(lengths) > 1:
        figure, panels = _panels(len(lengths), share=True)
        for axes, (title, rows) in zip(panels, lengths.items(), strict=True):
            _by_length(axes, rows, title)
        panels[0].set_ylabel("forward, ms")
        _legend(figure, panels)
        drawn.append(
            (
                _save(figure, folder, "attention_length", run),
                f"Forward time against sequence length, by problem; {OPEN}",
            )
        )
    return drawn


def overview(run: Run) -> Figure:
    """The figure that shows what an equilibrium costs."""
    title, rows = next(iter(_grouped(_rows(run, "LENGTH")).items()))
    steps, memory = _rows(run, "STEPS"), _rows(run, "C4")
    figure, panels = _panels(1 + bool(steps) + bool(memory))
    _by_length(panels[0], rows, f"same residual\n{title}")
    panels[0].set_ylabel("forward, ms")
    if steps:
        _by_steps(panels[1], steps[0])
    if memory:
        _by_memory(panels[-1], memory[0])
    _legend(figure, panels)
    return figure


def train_figures(run: Run, folder: Path) -> Drawn:
    """Training steps by length: their time, and in units of an explicit one."""
    rows = _rows(run, "LENGTH")
    if not rows:
        return []
    title, rows = next(iter(_grouped(rows).items()))
    figure, panels = _panels(2)
    for name in LOOKS:
        points = [row for row in rows if name in row["seconds"]]
        _draw(panels[0], points, name, [1e3] * len(points))
        _draw(panels[1], points, name, [1 / row["seconds"]["sdpa_training"]["median"] for row in points])
    _finish(panels[0], f"same residual\n{title}", "sequence length N = M", "training step, ms")
    units = "in units of an explicit step\n(one SDPA, forward and backward)"
    _finish(panels[1], units, "sequence length N = M", "time / SDPA's")
    _legend(figure, panels)
    return [(_save(figure, folder, "train", run), f"Time of a training step against sequence length; {OPEN}")]


# Panels.


def _by_length(axes: Axes, rows: list[Row], title: str) -> None:
    best = [(row["shape"]["length"], row["seconds"][row["best_sdpa"]]) for row in rows]
    _line(axes, [size for size, _ in best], [timing for _, timing in best], SDPA, [1e3] * len(best))
    for name in ("ours_forward", "picard", "torchdeq_fixed_point_iter", "torchdeq_anderson"):
        points = [row for row in rows if name in row["seconds"]]
        _draw(axes, points, name, [1e3] * len(points))
    _finish(axes, title, "sequence length N = M", None)


def _by_steps(axes: Axes, row: Row) -> None:
    for kind, look in (("ours", OURS), ("picard", PLAIN)):
        steps = [number for number in row["steps"] if f"{kind} {number}" in row["seconds"]]
        _line(axes, steps, [row["seconds"][f"{kind} {number}"] for number in steps], look, [1e3] * len(steps))
    axes.axhline(1e3 * row["seconds"]["sdpa"]["median"], color=SDPA.color, ls=SDPA.dashes, lw=1.4, label=SDPA.label)
    _finish(axes, f"fixed numbers of evaluations\n{_sizes(row)}", "evaluations", "forward, ms")


def _by_memory(axes: Axes, row: Row) -> None:
    found = row["evidence"]
    for kind, look in (("ours", OURS), ("unrolled", PLAIN)):
        steps = [number for number in row["steps"] if "peak_bytes" in found.get(f"{kind} {number}", {})]
        peaks = [found[f"{kind} {number}"] for number in steps]
        bars = [{"median": p["peak_bytes"], "low": min(p["runs"]), "high": max(p["runs"])} for p in peaks]
        _line(axes, steps, bars, look, [2.0**-20] * len(steps))
    if "peak_bytes" in found["sdpa"]:
        axes.axhline(found["sdpa"]["peak_bytes"] / 2**20, color=SDPA.color, ls=SDPA.dashes, lw=1.4, label=SDPA.label)
    title = f"memory of a training step\n{_sizes(row)}"
    _finish(axes, title, "evaluations", "peak above the inputs, MiB", logarithmic=False)


def _draw(axes: Axes, rows: list[Row], name: str, units: list[float]) -> None:
    """Times of a contender by length; its marker is open where queries were left unsolved."""
    sizes = [row["shape"]["length"] for row in rows]
    solved = [row["evidence"][name].get("converged", 1.0) >= CONVERGED for row in rows]
    _line(axes, sizes, [row["seconds"][name] for row in rows], LOOKS[name], units, solved)


def _line(
    axes: Axes,
    x: list[int],
    bars: list[dict[str, float]],
    look: Look,
    units: list[float],
    solved: list[bool] | None = None,
) -> None:
    """Medians with bars from the smallest to the largest."""
    if not x:
        return
    middle, low, high = ([b[key] * u for b, u in zip(bars, units, strict=True)] for key in ("median", "low", "high"))
    reach = [[m - a for m, a in zip(middle, low, strict=True)], [b - m for m, b in zip(middle, high, strict=True)]]
    style = {"color": look.color, "marker": look.marker, "ls": look.dashes}
    axes.errorbar(x, middle, yerr=reach, label=look.label, lw=1.6, ms=5.5, elinewidth=1, capsize=2, **style)
    left = [(size, value) for size, value, done in zip(x, middle, solved or [True] * len(x), strict=True) if not done]
    if left:
        face = {"mfc": "white", "mec": look.color, "ms": 5.5, "zorder": 4}
        axes.plot(*zip(*left, strict=True), ls="", marker=look.marker, **face)


def _finish(axes: Axes, title: str, x: str, y: str | None, *, logarithmic: bool = True) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    if y is not None:
        axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if not logarithmic:
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        return
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({float(value) for line in axes.get_lines() for value in line.get_xdata() if float(value) >= 1})
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size / 1024:g}k" if size >= 1024 else f"{size:g}"))
    low, high = axes.get_ylim()
    axes.set_ylim(low / MARGIN, high * MARGIN)
    # Over less than two decades a tick at every power of ten says too little.
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 200 else (1,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


# Figures.


def _panels(count: int, *, share: bool = False) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=DPI, layout="constrained")
    return figure, list(figure.subplots(1, count, sharey=share, squeeze=False)[0])


def _legend(figure: Figure, panels: list[Axes]) -> None:
    """One legend for all panels, below them."""
    shown: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=3, fontsize=9, frameon=False)


def _save(figure: Figure, folder: Path, name: str, run: Run) -> str:
    """Write the figure and return its file name, which says where it was measured unless that is a CPU."""
    device = run["environment"]["device"]
    file = f"{name}.png" if device == "cpu" else f"{name}_{device}.png"
    folder.mkdir(parents=True, exist_ok=True)
    # Without the version of the library that drew it, the same results make the same file.
    figure.savefig(folder / file, metadata={"Software": None})
    return file


def _rows(run: Run, metric: str) -> list[Row]:
    """Rows of a metric that have times, or, for memory, evidence."""
    return [row for row in run["rows"] if row["metric"] == metric and (row["seconds"] or metric == "C4")]


def _grouped(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows of one problem at all lengths, by what to call it."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        shape = row["shape"]
        title = f"{row['keys']} keys, beta*sqrt(D) {row['sharpness']:g}, anchor {row['anchor']:g}\n"
        title += f"B {shape['batch']}, H {shape['heads']}, D {shape['dim']}, {row['dtype']}"
        groups.setdefault(title, []).append(row)
    return groups


def _sizes(row: Row) -> str:
    shape = row["shape"]
    return f"B {shape['batch']}, H {shape['heads']}, N = M = {shape['length']}, D {shape['dim']}, {row['dtype']}"
