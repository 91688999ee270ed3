"""What a run of the suite `spins` looks like in print."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .report import Table, spread
from .targets import Row

#: Statuses that are answers; the others are failures and named.
ANSWERS = ("CONVERGED", "EXPLICIT", "BUDGET")
#: Ratios of C6 in the order of the table.
SMALL_RATIOS = ("by hand", "by hand, evidence", "published", "published, evidence")
GRAPH_RATIOS = (
    "plain seconds",
    "sweep / numpy",
    "gradient / forward",
    "GB",
    "forward / products",
    "batch / one by one",
    "sweep / pgmax",
)
COMPARED = ("C6", "C6 same start", "C6 constant", "C6 forward", "C6 matrices")


def tables(run: dict[str, Any]) -> list[Table]:
    """One table for every metric that was measured."""
    made = []
    for metric, make in TABLES.items():
        rows = [row for row in run["rows"] if row["metric"] == metric and "error" not in row]
        if rows:
            made.append(make(rows))
    return made


def _timed(rows: list[Row]) -> Table:
    header = [
        "beta, dtype",
        "steps ours/rival",
        "evaluations ours/rival",
        "error of lengths",
        "error of the gradient",
        "C6",
        "same start",
        "constant",
        "forward",
        "matrices",
        "ms ours/rival",
        "spread",
    ]
    lines = []
    for row in rows:
        ours, rival = row["evidence"]["ours"], row["evidence"]["inverses"]
        times = [row["seconds"].get(name, {}).get("median") for name in ("ours", "inverses")]
        lines.append(
            [
                f"{row['beta']:g}, {row['dtype']}",
                f"{max(ours['steps'])}/{rival['steps']}",
                f"{max(ours['evaluations'])}/{rival['trials']}",
                f"{ours['residual_max']:.0e}",
                f"{ours['gradient_error']:.0e}",
                *(_number(row["ratios"].get(name)) for name in COMPARED),
                "/".join("-" if t is None else f"{1000 * t:.0f}" for t in times),
                spread(row["seconds"]),
            ]
        )
    return Table("C6", f"C6: B {rows[0]['batch']}, N {rows[0]['sites']}, D {rows[0]['dim']}", header, lines)


def _sized(rows: list[Row]) -> Table:
    sizes = sorted({point["sites"] for row in rows for point in row["evidence"]["points"]})
    header = ["method, D", *(f"N {size}" for size in sizes), "exponent", "evaluations", "status"]
    lines = []
    for row in rows:
        points = {point["sites"]: point for point in row["evidence"]["points"]}
        counts: dict[str, int] = {}
        for point in points.values():
            for name, count in point["status"].items():
                counts[name] = counts.get(name, 0) + count
        evaluations = [point["evaluations"] for point in points.values()]
        lines.append(
            [
                f"{row['method']}, {row['dim']}" + (", chain" if row["chain"] else ""),
                *(_seconds(row, points.get(size), size) for size in sizes),
                _number(row["ratios"]["exponent"]),
                f"{min(evaluations)} to {max(evaluations)}",
                _counts(counts),
            ]
        )
    cap = rows[0]["cap_seconds"]
    return Table(
        "scaling", f"Scaling: seconds for one sample; `>{cap:g}` was left out, `-` is not for it:", header, lines
    )


def _many(rows: list[Row]) -> Table:
    header = [
        "method",
        "systems",
        "failed",
        "wrong",
        "steps median/max",
        "evaluations median/max",
        "status",
        "ms per system",
        "refused",
        "left out",
    ]
    lines = []
    for row in rows:
        found = row["evidence"]
        measured = found["systems"] > 0
        lines.append(
            [
                row["method"],
                str(found["systems"]),
                f"{found['failed']} ({100 * found['failed'] / found['systems']:.1f} %)" if measured else "-",
                str(found.get("wrong", "-")),
                f"{found['steps_median']:g}/{found['steps_max']}" if measured else "-",
                f"{found['evaluations_median']:g}/{found['evaluations_max']}" if measured else "-",
                _counts(found["status"]),
                f"{1000 * row['seconds_per_system']:.1f}",
                str(found["refused"]),
                str(found["skipped"]),
            ]
        )
    return Table("random systems", "Random systems:", header, lines)


def _small(rows: list[Row]) -> Table:
    header = [
        "method",
        "B, N, D",
        *SMALL_RATIOS,
        "evaluations ours/plain/Anderson",
        "residual",
        "ms",
        "spread",
    ]
    lines = []
    for row in rows:
        found, seconds = row["evidence"]["ours"], row["seconds"].get("ours")
        counts = (found.get(name, "-") for name in ("evaluations", "plain evaluations", "anderson evaluations"))
        lines.append(
            [
                row["method"],
                f"{row['batch']}, {row['sites']}, {row['dim']}",
                *(_number(row["ratios"].get(f"forward / {name}")) for name in SMALL_RATIOS),
                "/".join(map(str, counts)),
                f"{found['residual']:.0e}",
                "-" if seconds is None else f"{1000 * seconds['median']:.1f}",
                spread(row["seconds"]),
            ]
        )
    return Table("small", "Small systems: a forward over loops by hand at equal residual.", header, lines)


def _frames(rows: list[Row]) -> Table:
    lines = []
    for row in rows:
        (count,) = row["ratios"].values()
        seconds = row["seconds"]["ours"]
        lines.append(
            [f"{row['sites']}, {row['dim']}", f"{count:.0f}", f"{1000 * seconds['median']:.0f}", spread(row["seconds"])]
        )
    return Table("frames", "`thermodynamics` of one sample by `AdaTAP()`:", ["N, D", "frames", "ms", "spread"], lines)


def _graphs(rows: list[Row]) -> Table:
    header = ["setting", "seconds", *GRAPH_RATIOS, "evaluations", "plain", "residual", "status"]
    lines = []
    for row in rows:
        found, first = row["evidence"], next(iter(row["seconds"].values()), None)
        lines.append(
            [
                row["name"],
                "-" if first is None else f"{first['median']:.2g}",
                *(_number(row["ratios"].get(name)) for name in GRAPH_RATIOS),
                *(str(found.get(name, "-")) for name in ("evaluations", "plain evaluations")),
                f"{found['residual']:.0e}" if "residual" in found else "-",
                _counts(found["status"]) if "status" in found else "-",
            ]
        )
    return Table("graphs", "Graphs:", header, lines)


TABLES: dict[str, Callable[[list[Row]], Table]] = {
    "C6": _timed,
    "SCALING": _sized,
    "RANDOM": _many,
    "SMALL": _small,
    "FRAMES": _frames,
    "GRAPHS": _graphs,
}


def _seconds(row: Row, point: dict[str, Any] | None, size: int) -> str:
    if point is not None:
        return f"{point['seconds']:.2g}"
    return f">{row['cap_seconds']:g}" if str(size) in row["evidence"]["left_out"] else "-"


def _counts(counts: dict[str, int]) -> str:
    """All converged, or how many ended otherwise."""
    others = {name: count for name, count in counts.items() if name not in ANSWERS}
    return ", ".join(f"{count} {name}" for name, count in others.items()) or ("converged" if counts else "-")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
