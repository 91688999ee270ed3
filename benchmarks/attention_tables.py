"""The tables of a run of the suite `attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .report import Table, number, spread
from .targets import Row


def tables(run: dict[str, Any]) -> list[Table]:
    """One table for every metric that was measured."""
    made = []
    for metric, make in TABLES.items():
        rows = [row for row in run["rows"] if row["metric"] == metric]
        if rows:
            made.append(make(rows))
    return made


def problem(row: Row) -> str:
    """Keys, beta*sqrt(D), anchor, and the dtype where it is not the usual one."""
    dtype = "" if row["dtype"] == "float32" else f", {row['dtype']}"
    return f"{row['keys']}, {row['sharpness']:g}, {row['anchor']:g}{dtype}"


def evaluations(found: dict[str, Any]) -> list[str]:
    """Evaluations, worst residual and converged part; or why there is no time."""
    if "evaluations_mean" not in found:
        return [found.get("error", "-"), "-", "-"]
    return [
        f"{found['evaluations_mean']:.1f}/{found['evaluations_max']}",
        f"{found['residual_max']:.0e}" if "residual_max" in found else "-",
        f"{100 * found['converged']:.4g}" if "converged" in found else "-",
    ]


def _lengths(rows: list[Row]) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
    header = [
        "keys, beta*sqrt(D), anchor",
        "N = M",
        "best SDPA",
        "Picard evals mean/max",
        "our evals mean/max",
        "max residual",
        "converged %",
        *(f"{name} / SDPA" for name in columns),
        "spread",
    ]
    lines = [
        [
            problem(row),
            str(row["shape"]["length"]),
            row["best_sdpa"].removeprefix("sdpa_"),
            f"{row['picard']['mean']:.1f}/{row['picard']['most']}",
            *evaluations(row["evidence"]["ours_forward"]),
            *(number(row["ratios"].get(name)) for name in columns),
            spread(row["seconds"]),
        ]
        for row in rows
    ]
    shape = rows[0]["shape"]
    intro = f"LENGTH: forward solves to the same residual, B {shape['batch']}, H {shape['heads']}, D {shape['dim']}:"
    return Table("time against sequence length", intro, header, lines)


def _steps(rows: list[Row]) -> Table:
    header = ["keys, beta*sqrt(D), anchor", "evaluations", "ours / SDPA", "Picard / SDPA", "per evaluation", "spread"]
    lines = []
    for row in rows:
        seconds = row["seconds"]
        one = seconds["sdpa"]["median"]
        for steps in row["steps"]:
            parts = [seconds.get(f"{kind} {steps}") for kind in ("ours", "picard")]
            last = steps == max(row["steps"])
            lines.append(
                [
                    problem(row),
                    str(steps),
                    *("-" if part is None else number(part["median"] / one) for part in parts),
                    number(row["ratios"]["per evaluation"]) if last else "",
                    spread(seconds) if last else "",
                ]
            )
    shape = rows[0]["shape"]
    intro = f"STEPS: fixed numbers of evaluations, B {shape['batch']}, H {shape['heads']}, N = M = {shape['length']}:"
    return Table("time against evaluations", intro, header, lines)


def _memory(rows: list[Row]) -> Table:
    header = ["training step", "evaluations", "peak MiB", "/ SDPA's", "runs"]
    lines = []
    for row in rows:
        base = row["evidence"]["sdpa"].get("peak_bytes")
        for name, found in row["evidence"].items():
            if "error" in found:
                lines.append([name, found["error"], "-", "-", "-"])
                continue
            peak = found["peak_bytes"]
            lines.append(
                [
                    name,
                    f"{found['evaluations_mean']:.1f}",
                    f"{peak / 2**20:.1f}",
                    number(peak / base if base else None),
                    str(len(found["runs"])),
                ]
            )
    shape = rows[0]["shape"]
    sizes = f"B {shape['batch']}, H {shape['heads']}, N = M = {shape['length']}, D {shape['dim']}"
    return Table("memory of a training step", f"C4: peak memory above the inputs, {sizes}:", header, lines)


TABLES: dict[str, Callable[[list[Row]], Table]] = {"LENGTH": _lengths, "STEPS": _steps, "C4": _memory}
