"""The tables of a run of the suite `scale`, beside the model, and the page about scale."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from implicit_attention.plotting.style import COLORS, DASHES, MARKERS, new_figure
from implicit_attention.potentials._attention import row_block

from .environment import warning
from .report import HERE, RESULTS, Table, between, markdown_table, newest, number, spread
from .scale_model import (
    ASSUMED,
    Algorithm,
    Cluster,
    Seconds,
    Work,
    all_reduce_seconds,
    fitted,
    local_seconds,
    simulated,
)
from .targets import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = HERE.parent / "docs" / "scale.md"
FIGURE = "scale/processes.png"
#: The simulated problem: more keys than one process could hold.
LARGE = Work(queries=64, keys=10**9, dim=64)
SHOWN = (10, 100, 1000)
DRAWN = tuple(2**power for power in range(12))
ALGORITHMS: tuple[Algorithm, ...] = ("ring", "doubling")

#: Each number in the figure and the table is simulated once.
simulation = functools.cache(simulated)


def machine_of(run: dict[str, Any]) -> Cluster | None:
    """The parameters of the machine of a run, or None if it lacks what tells them."""
    alone = [(work_of(row), seconds_of(row, "1")) for row in timed(run, "EVALUATION")]
    messages = [
        (row["evidence"]["bytes"], int(size), timing["median"])
        for row in timed(run, "COLLECTIVE")
        for size, timing in row["seconds"].items()
        if int(size) <= row["cores"]
    ]
    if len({work.flops for work, _ in alone}) < 2 or len({size for size, _, _ in messages}) < 2:
        return None
    return fitted(alone, messages, "measured: one core a process, gloo over loopback")


def clusters_of(run: dict[str, Any] | None) -> tuple[Cluster, ...]:
    """Return the clusters to simulate: the assumed ones, and the machine of a run with as many cores as needed."""
    machine = None if run is None else machine_of(run)
    return ASSUMED if machine is None else (*ASSUMED, machine)


def timed(run: dict[str, Any], *metrics: str) -> list[Row]:
    return [row for row in run["rows"] if row["metric"] in metrics and row["seconds"]]


def work_of(row: Row) -> Work:
    """The local work of an evaluation, for which queries are filled up to blocks."""
    shape = row["shape"]
    block = row_block(shape["dim"], 1, torch.float32)
    return Work(-(-shape["length"] // block) * block, shape["num_keys"], shape["dim"])


def seconds_of(row: Row, name: str, kind: str = "seconds") -> float:
    """Return the seconds of one evaluation, in the mean over its solve."""
    evaluations: int = row["evidence"]["1" if name == "fused" else name]["evaluations"]
    return float(row[kind][name]["median"]) / evaluations


def expected(row: Row, machine: Cluster, processes: int) -> Seconds:
    """Predict an evaluation by the model, with the counted messages; processes beyond the cores share."""
    found = row["evidence"][f"{processes}"]
    # Two processes swap all their numbers at once, which is doubling.
    algorithm: Algorithm = "doubling" if processes == 2 else "ring"
    one = all_reduce_seconds(algorithm, found["sent"] / found["calls"], processes, machine)
    local = local_seconds(work_of(row), machine, processes) * max(1.0, processes / row["cores"])
    return Seconds(local, one * found["calls"] / found["evaluations"])


def tables(run: dict[str, Any]) -> list[Table]:
    """Evaluations beside the model, solves and training steps, all-reduces, as far as they were measured."""
    machine = machine_of(run)
    made = [
        (timed(run, "EVALUATION"), _evaluations),
        (timed(run, "SOLVE", "TRAINING"), _solves),
        (timed(run, "COLLECTIVE"), _collectives),
    ]
    return [make(rows, machine) for rows, make in made if rows]


def _evaluations(rows: list[Row], machine: Cluster | None) -> Table:
    lines = []
    for row in rows:
        for size in _processes(row):
            model = None if machine is None else expected(row, machine, size)
            lines.append(
                [
                    *_sizes(row),
                    str(size),
                    *_split(row, size),
                    "-" if model is None else f"{1e3 * model.total:.2f}",
                    "-" if model is None else number(seconds_of(row, f"{size}") / model.total),
                    _efficiency(row, size),
                    number(row["ratios"]["sharded / fused"]) if size == 1 else "-",
                    f"{row['evidence'][f'{size}']['collectives']:g}",
                    f"{row['evidence'][f'{size}']['bytes']:g}",
                ]
            )
    header = ["queries", "keys", "processes", "ms", "local", "collective", "model, ms", "measured / model"]
    header += ["efficiency", "sharded / fused", "collectives", "bytes a query"]
    told = "" if machine is None else f" {describe(machine)}"
    return Table("evaluations", f"EVALUATION: one evaluation of all queries, D 64.{told}", header, lines)


def describe(machine: Cluster) -> str:
    """The fitted parameters of a machine."""
    return (
        f"The model is fitted to one process and to all-reduces by processes with a core each: "
        f"{machine.flops / 1e9:.0f} Gflop/s and {1e3 * machine.fixed:.2f} ms an evaluation, "
        f"{1e6 * machine.latency:.0f} us and {machine.bandwidth / 1e9:.2f} GB/s a message of the ring."
    )


def _solves(rows: list[Row], machine: Cluster | None) -> Table:
    lines = []
    for row in rows:
        for size in _processes(row):
            found = row["evidence"][f"{size}"]
            lines.append(
                [
                    row["metric"],
                    row["keys"],
                    *_sizes(row),
                    str(size),
                    f"{1e3 * row['seconds'][f'{size}']['median']:.1f}",
                    *_split(row, size),
                    _efficiency(row, size),
                    number(row["ratios"]["sharded / fused"]) if size == 1 else "-",
                    str(found["evaluations"]),
                    str(found["calls"]),
                    *_backward(found, row["shape"]["length"]),
                    f"{found['apart']:.0e}",
                    spread({f"{size}": row["seconds"][f"{size}"]}),
                ]
            )
    header = ["metric", "drawn", "queries", "keys", "processes", "ms", "ms / evaluation", "local", "collective"]
    header += ["efficiency", "sharded / fused", "evaluations", "collectives"]
    header += ["backward: collectives", "bytes a query", "from fused", "spread"]
    intro = "SOLVE and TRAINING, all queries CONVERGED, all processes with the same bits:"
    return Table("solves", intro, header, lines)


def _backward(found: dict[str, Any], queries: int) -> list[str]:
    """Collectives of the backward pass, and the bytes of a query in each."""
    calls, size = found["backward calls"], found["backward bytes"]
    return [str(calls), f"{size / calls / queries:g}"] if calls else ["-", "-"]


def _collectives(rows: list[Row], machine: Cluster | None) -> Table:
    lines = []
    for row in rows:
        size = row["evidence"]["bytes"]
        for count, timing in row["seconds"].items():
            by_ring = None if machine is None else 1e6 * all_reduce_seconds("ring", size, int(count), machine)
            lines.append(
                [
                    f"{size}",
                    count,
                    f"{1e6 * timing['median']:.0f}",
                    "-" if by_ring is None else f"{by_ring:.0f}",
                    spread({count: timing}),
                ]
            )
    header = ["bytes", "processes", "us", "model, us", "spread"]
    return Table("all-reduces", "COLLECTIVE: one all-reduce by itself.", header, lines)


def _processes(row: Row) -> list[int]:
    return [int(name) for name in row["seconds"] if name.isdecimal()]


def _sizes(row: Row) -> list[str]:
    return [str(row["shape"]["length"]), f"{row['shape']['num_keys']:,}"]


def _split(row: Row, size: int) -> list[str]:
    """Milliseconds of an evaluation: in all, local, collective."""
    seconds, local = (seconds_of(row, f"{size}", kind) for kind in ("seconds", "local_seconds"))
    return [f"{1e3 * seconds:.2f}", f"{1e3 * local:.2f}", f"{1e3 * max(seconds - local, 0):.2f}"]


def _efficiency(row: Row, size: int) -> str:
    """Write the efficiency of `size` processes, and whether they share cores."""
    if size == 1:
        return "-"
    found = row["seconds"]["1"]["median"] / (size * row["seconds"][f"{size}"]["median"])
    return number(found) if size <= row["cores"] else f"{found:.2f} ({size} on {row['cores']} cores)"


def measured_table(run: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of one process beside two, a line for each problem; `tables` has more processes and columns."""
    lines = []
    for row in timed(run, "EVALUATION", "SOLVE", "TRAINING"):
        name = {"EVALUATION": "one evaluation", "SOLVE": "solve", "TRAINING": "training step"}[row["metric"]]
        count = 1 if row["metric"] == "EVALUATION" else row["evidence"]["2"]["evaluations"]
        one, two = (1e3 * count * seconds_of(row, size) for size in "12")
        messages = max(two - 1e3 * count * seconds_of(row, "2", "local_seconds"), 0)
        cells = [f"{name}, {row['keys']}", *_sizes(row), str(count), *(f"{part:.1f}" for part in (one, two, messages))]
        lines.append([*cells, _efficiency(row, 2), number(row["ratios"]["sharded / fused"])])
    header = ["problem", "queries", "keys", "evaluations", "ms, one process", "two", "of it messages", "efficiency"]
    return [*header, "one process / `LogSumExp`"], lines


def simulated_table(work: Work = LARGE, clusters: Iterable[Cluster] = ASSUMED) -> tuple[list[str], list[list[str]]]:
    """Header and lines of what a cluster is expected to take for an evaluation."""
    lines = []
    for cluster in clusters:
        alone = simulation(work, cluster, 1, "ring").total
        for count in SHOWN:
            found = {algorithm: simulation(work, cluster, count, algorithm) for algorithm in ALGORITHMS}
            lines.append(
                [
                    cluster.name.partition(",")[0],
                    f"{count:,}",
                    milliseconds(found["ring"].local),
                    *(milliseconds(found[algorithm].collective) for algorithm in ALGORITHMS),
                    *(f"{alone / count / found[algorithm].total:.2f}" for algorithm in ALGORITHMS),
                ]
            )
    header = ["cluster", "processes", "local, ms"]
    header += [f"collective, ms, {algorithm}" for algorithm in ALGORITHMS]
    return [*header, *(f"efficiency, {algorithm}" for algorithm in ALGORITHMS)], lines


def milliseconds(seconds: float) -> str:
    """With three digits, but no exponent."""
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def assumptions(clusters: Iterable[Cluster] = ASSUMED) -> tuple[list[str], list[list[str]]]:
    """Header and lines of what each cluster is taken to do."""
    lines = [
        [
            cluster.name,
            f"{cluster.flops / 1e12:.3g}",
            f"{cluster.memory / 1e9:.4g}",
            f"{1e6 * cluster.latency:.3g}",
            f"{cluster.bandwidth / 1e9:.3g}",
            f"{1e3 * cluster.fixed:.3g}",
            f"{100 * cluster.spread:g}",
            f"{100 * cluster.jitter:g}",
        ]
        for cluster in clusters
    ]
    header = ["cluster", "Tflop/s", "memory, GB/s", "latency, us", "network, GB/s", "fixed, ms"]
    return [*header, "spread, %", "jitter, %"], lines


def draw(run: dict[str, Any] | None, path: Path) -> None:
    """Measured points with the line of the model, where there is a run, and what is simulated of clusters."""
    machine = None if run is None else machine_of(run)
    figure = new_figure(10 if machine else 6, 4.8, "")
    panels = list(figure.subplots(1, 2 if machine else 1, squeeze=False)[0])
    if run is not None and machine is not None:
        _measured(panels[0], run, machine)
    _simulated(panels[-1], clusters_of(run))
    for axes in panels:
        axes.set_xlabel("processes")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        # Below, where it hides no line.
        axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    panels[0].set_ylabel("one evaluation, ms")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the version of the library that drew it, the same results make the same file.
    figure.savefig(path, metadata={"Software": None})


def _measured(axes: Axes, run: dict[str, Any], machine: Cluster) -> None:
    rows = timed(run, "EVALUATION")
    counts = sorted({size for row in rows for size in _processes(row)})
    _logarithmic(axes, counts, subs=(1, 2, 5))
    for row, color, marker in zip(rows, COLORS, MARKERS, strict=False):
        queries, keys = _sizes(row)
        label = f"{queries} {'query' if queries == '1' else 'queries'}, {keys} keys"
        for size in _processes(row):
            face = color if size <= row["cores"] else "white"
            point: dict[str, Any] = {"ls": "", "marker": marker, "ms": 6, "mec": color, "mfc": face}
            axes.plot(size, 1e3 * seconds_of(row, f"{size}"), label=label if size == 1 else None, **point)
        model = [1e3 * expected(row, machine, size).total for size in counts]
        axes.plot(counts, model, color=color, ls="--", lw=1.2)
    axes.plot([], [], color="black", ls="--", lw=1.2, label="the model, by one process and all-reduces")
    axes.set_title("measured on one machine\nopen: processes share cores", fontsize=9)


def _simulated(axes: Axes, clusters: Iterable[Cluster], work: Work = LARGE) -> None:
    _logarithmic(axes, DRAWN[::2], subs=(1,))
    for cluster, color in zip(clusters, COLORS[3:], strict=False):
        for algorithm, dashes in zip(ALGORITHMS, DASHES, strict=False):
            totals = [1e3 * simulation(work, cluster, count, algorithm).total for count in DRAWN]
            axes.plot(DRAWN, totals, color=color, ls=dashes, lw=1.6)
        local = [1e3 * simulation(work, cluster, count, "ring").local for count in DRAWN]
        axes.plot(DRAWN, local, color=color, ls=":", lw=1.2)
        axes.plot([], [], color=color, lw=4, label=cluster.name)
    names = [*(f"all-reduce by {algorithm}" for algorithm in ALGORITHMS), "local work alone"]
    for name, dashes in zip(names, ("-", "--", ":"), strict=True):
        axes.plot([], [], color="black", ls=dashes, lw=1.4, label=name)
    axes.set_title(f"simulated, no cluster was measured\n{work.queries} queries, {work.keys:,} keys", fontsize=9)


def _logarithmic(axes: Axes, counts: Sequence[int], subs: tuple[int, ...]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [f"{count}" for count in counts])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def rewrite(page: Path = PAGE, folder: Path = RESULTS) -> None:
    """Put the newest complete run, and what is simulated, into the page about scale, and draw its figure."""
    content, run = "Not run yet.", None
    if (found := newest("scale", folder, "cpu")) is not None:
        path, run = found
        told = [markdown_table(*measured_table(run))]
        if (busy := warning(run["environment"])) is not None:
            told.append(busy)
        source = f"From `{path.name}`; [the benchmarks](../benchmarks/README.md#results-scale) have more of it."
        content = "\n\n".join([*told, source])
    between(page, "<!-- measured: python -m benchmarks report -->", "<!-- end of measured -->", content)
    clusters = clusters_of(run)
    simulated_text = f"{markdown_table(*assumptions(clusters))}\n\n{markdown_table(*simulated_table(LARGE, clusters))}"
    between(page, "<!-- simulated: python -m benchmarks report -->", "<!-- end of simulated -->", simulated_text)
    draw(run, page.parent / FIGURE)
