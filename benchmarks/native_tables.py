"""What a run of the suite `native` looks like in print."""

from __future__ import annotations

from typing import Any

from .report import Table, number, spread
from .targets import Row

#: What the ratios of a row are.
THREADS = {
    "THREADS": "speed-up by a second thread",
    "CONTENDED": "two threads on one core / one thread there",
    "NEIGHBOUR": "two threads beside a busy neighbour / without it",
}


def tables(run: dict[str, Any]) -> list[Table]:
    """Tables of short calls, layers, threads and neighbours, and instruction sets, as far as they were run."""
    short, sets = ([row for row in run["rows"] if row["metric"] == metric] for metric in ("SHORT", "SETS"))
    threads = [row for row in run["rows"] if row["metric"] in THREADS]
    layers = [row for row in run["rows"] if row["metric"] == "LAYER"]
    made = [(short, _short), (layers, _layers), (threads, _threads), (sets, _sets)]
    return [make(rows) for rows, make in made if rows]


def costs(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the short calls in SDPA calls."""
    columns = {
        "explicit": "`max_steps=0`",
        "forward": "forward",
        "training": "training step",
        "solution": "with its solution / without",
    }
    lines = [[sizes(row), *(number(row["ratios"].get(name)) for name in columns)] for row in rows]
    return ["case", *columns.values()], lines


def sizes(row: Row) -> str:
    shape = row["shape"]
    if shape["num_keys"] is None:
        return f"H {shape['heads']}, N = M = {shape['length']}"
    return f"H {shape['heads']}, N {shape['length']}, M {shape['num_keys']}"


def _short(rows: list[Row]) -> Table:
    header, lines = costs(rows)
    for row, line in zip(rows, lines, strict=True):
        found, times, by_clock = row["evidence"]["ours"], row.get("process_seconds", {}), row.get("wall_ratios", {})
        wrong = found.get("error")
        line += [number(by_clock.get(name)) for name in ("explicit", "forward", "training")]
        line += [
            wrong or f"{found['evaluations_mean']:.1f}/{found['evaluations_max']}",
            "-" if wrong else f"{100 * found['converged']:.4g}",
            "/".join(f"{1e6 * times[n]['median']:.0f}" for n in ("sdpa_forward", "sdpa_training") if n in times) or "-",
            spread(times),
        ]
    header += [f"{name}, wall" for name in ("`max_steps=0`", "forward", "training step")]
    header += ["our evals mean/max", "converged %", "SDPA, us, forward/training", "spread"]
    intro = (
        "SHORT: `equilibrium_attention` in calls of SDPA, one thread, process time and, where it says so, wall time:"
    )
    return Table("short calls", intro, header, lines)


def _layers(rows: list[Row]) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
    lines = []
    for row in rows:
        times, shape = row.get("process_seconds", {}), row["shape"]
        plain = "/".join(f"{1e6 * times[n]['median']:.0f}" for n in ("plain", "plain training") if n in times) or "-"
        name = f"H {shape['heads']}, N {shape['length']}, width {shape['heads'] * shape['dim']}"
        lines.append([name, *(number(row["ratios"].get(name)) for name in columns), plain, _spread(row)])
    intro = "LAYER: `ImplicitAttention` in calls of the same layer of SDPA, one thread, process time:"
    return Table("layers", intro, ["layer", *columns, "SDPA layer, us, forward/training", "spread"], lines)


def _threads(rows: list[Row]) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
    lines = [
        [THREADS[row["metric"]], sizes(row), *(number(row["ratios"].get(name)) for name in columns), _spread(row)]
        for row in rows
    ]
    intro = "THREADS (larger is better), CONTENDED, NEIGHBOUR (smaller is better):"
    return Table("threads and neighbours", intro, ["ratio of times", "sizes", *columns, "spread"], lines)


def _sets(rows: list[Row]) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
    lines = [[row["native"], *(number(row["ratios"].get(name)) for name in columns), _spread(row)] for row in rows]
    return Table("instruction sets", "SETS, over SDPA, one thread:", ["library", *columns, "spread"], lines)


def _spread(row: Row) -> str:
    """The spread of the times, or why there are none."""
    reason = next((found["error"] for found in row["evidence"].values() if "error" in found), None)
    return spread(row["seconds"]) if row["seconds"] else reason or "-"
