"""What a run of the puzzles looks like in print, and the figure of exact answers against size."""

from __future__ import annotations

import statistics
import textwrap
from pathlib import Path
from typing import Any

from implicit_attention.plotting.style import COLORS, DASHES, MARKERS, new_figure

from ..report import Table
from ..targets import Row
from .checks import PUZZLES
from .contenders import Plan, values, verdict


def tables(plan: Plan, rows: list[Row]) -> list[Table]:
    """Exact answers by set; what it took; the same block by every solver."""
    entries = [row for row in rows if "contender" in row]
    if not entries:
        return []
    return [_exact(plan, entries), _details(plan, entries), *_solvers(plan, entries), *_checks(plan, entries)]


def times(rows: list[Row]) -> list[Table]:
    """Time and memory of the contenders of every plan that was timed."""
    made = []
    for row in rows:
        seconds, lines = row["seconds"], []
        for name in (each for each in seconds if each.endswith(" training")):
            contender = name.removesuffix(" training")
            ways = [each.removeprefix(f"{contender}, ") for each in seconds if each.startswith(f"{contender}, ")]
            answers = ", ".join(f"{way} {milliseconds(row, f'{contender}, {way}')}" for way in ways)
            peak = f"{row['peak_memory_bytes'][name] / 1e6:.1f}"
            lines.append([contender, milliseconds(row, name), peak, answers or "-"])
        header = ["contender", "ms training step", "peak MB of it", "ms answer"]
        task = row["name"].split(":")[0].upper()
        intro = f"{task}: a training step, and the answer to {row['batch']} puzzles of {row['set']}:"
        made.append(Table(row["name"], intro, header, lines))
    return made


def _ways(entries: list[Row]) -> list[tuple[Row, str, str]]:
    """Every row with each of its ways and what to call the pair."""
    return [(row, way, label(row, way)) for row in entries for way in row["runs"][0]["ways"]]


def label(row: Row, way: str) -> str:
    return row["contender"] if way in ("guess", row["contender"]) else f"{row['contender']}; {way}"


def _exact(plan: Plan, entries: list[Row]) -> Table:
    """Shares of puzzles that are wholly right, with the verdicts of the leader at one set."""
    ours = [run for row in entries if row["contender"] == plan.leader[0] for run in row["runs"]]
    lines = []
    for row, way, name in _ways(entries):
        cells = [percent(values(row["runs"], way, each)) for each in plan.sets]
        theirs = values(row["runs"], way, plan.costs)
        same = (row["contender"], way) == plan.leader
        known = bool(theirs) and bool(ours) and not same
        mine = values(ours, plan.leader[1], plan.costs) if ours else []
        lines.append([name, *cells, verdict(mine, theirs, row["puzzles"]) if known and mine else "-"])
    header = ["contender; way", *plan.sets, f"{plan.leader[1]} against it at {plan.costs}"]
    count = entries[0]["puzzles"]
    intro = f"{plan.metric}: {plan.told} Exact, in %, of {count} held-out puzzles of every set:"
    return Table(f"{plan.metric.lower()}: exact", intro, header, lines)


def _details(plan: Plan, entries: list[Row]) -> Table:
    """Evaluations, certificates and FLOPs, at one set."""
    header = ["contender; way", "cells %", "evaluations mean/p99/max", "converged %", "exact % given converged", "not"]
    header += ["parameters", "MFLOP", "training s of processor"]
    lines = []
    for row, way, name in _ways(entries):
        found = [run["ways"][way].get(plan.costs) for run in row["runs"]]
        if None in found:
            continue
        settles = way != "guess" and row["tied"]
        most = max(each["evaluations_max"] for each in found)
        mean, late = (statistics.mean(e[f"evaluations_{k}"] for e in found) for k in ("mean", "p99"))
        trained = [run["training"]["seconds"] for run in row["runs"] if run["training"] is not None]
        lines.append(
            [
                name,
                percent([each["cells"] for each in found]),
                "-" if way == "guess" else f"{mean:.0f}/{late:.0f}/{most}",
                percent([each["converged"] for each in found]) if settles else "-",
                *(
                    percent(values(row["runs"], way, plan.costs, f"exact_{which}")) if settles else "-"
                    for which in ("converged", "unconverged")
                ),
                str(row["parameters"]),
                f"{row['flops'][way][plan.costs] / 1e6:.1f}" if way in row["flops"] else "-",
                f"{statistics.mean(trained):.0f}" if trained else "-",
            ]
        )
    return Table(f"{plan.metric.lower()}: details", f"What it took, at {plan.costs}:", header, lines)


def _solvers(plan: Plan, entries: list[Row]) -> list[Table]:
    """The solvers on the blocks that are compared by them."""
    made = []
    for row in entries:
        runs = [run["solvers"] for run in row["runs"] if "solvers" in run]
        if not runs:
            continue
        lines = []
        for name in runs[0]:
            if name == "distinct":
                continue
            found = [run[name] for run in runs]
            lines.append(
                [
                    name,
                    percent([each["exact"] for each in found]),
                    "/".join(f"{statistics.mean(e[f'evaluations_{k}'] for e in found):.0f}" for k in ("mean", "p99"))
                    + f"/{max(each['evaluations_max'] for each in found)}",
                    percent([1 - each["converged"] for each in found]),
                    *(percent([e[k] for e in found if e[k] is not None]) for k in ("exact_converged",)),
                    percent([e["exact_unconverged"] for e in found if e["exact_unconverged"] is not None]),
                    percent([e["elsewhere"] for e in found if e.get("elsewhere") is not None]),
                    f"{statistics.mean(each['process_seconds'] for each in found):.1f}",
                ]
            )
        most = max(run["distinct"]["max"] for run in runs)
        mean = statistics.mean(run["distinct"]["mean"] for run in runs)
        count = runs[0]["Picard"]["puzzles"]
        intro = (
            f"`{row['contender']}`: the same trained block by every solver, {count} puzzles of {plan.solver_set}; over "
            f"all of these a puzzle has {mean:.2f} fixed points in the mean, {most} at most:"
        )
        header = ["solver", "exact %", "evaluations mean/p99/max", "failed %", "exact % given converged", "not"]
        header += ["elsewhere %", "s"]
        made.append(Table(f"{plan.metric.lower()}: solvers", intro, header, lines))
    return made


def _checks(plan: Plan, entries: list[Row]) -> list[Table]:
    """Checks beside the residual, over all seeds of the contenders that are checked."""
    lines = []
    for row in entries:
        runs = [run["checks"] for run in row["runs"] if "checks" in run]
        for name in [each for each in plan.sets if runs and each in runs[0]]:
            plain = percent([c["exact_settled"] for run in runs for c in list(run[name].values())[:1] if c["settled"]])
            for check in runs[0][name]:
                found = [run[name][check] for run in runs]
                shares = (
                    percent([each[key] for each in found if each[key] is not None])
                    for key in ("passed", "exact_passed", "exact_refused")
                )
                cost = statistics.mean(each["evaluations_ratio"] for each in found)
                lines.append([row["contender"], name, check, plain, *shares, f"{cost:.1f}"])
    if not lines:
        return []
    header = ["contender", "set", "check", "exact % given settled", "passed %", "exact % given passed", "not"]
    header += ["further evaluations / those of the solve"]
    intro = f"Settled answers among {PUZZLES} puzzles of each set, and a second check of each:"
    return [Table(f"{plan.metric.lower()}: checks", intro, header, lines)]


def percent(found: list[float]) -> str:
    """Mean +- standard deviation over seeds, in %."""
    if not found:
        return "-"
    text = f"{100 * statistics.mean(found):.1f}"
    return text if len(found) == 1 else f"{text} +- {100 * statistics.stdev(found):.1f}"


def milliseconds(row: Row, name: str) -> str:
    return f"{1000 * row['seconds'][name]['median']:.0f}"


def figure(plan: Plan, run: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    """Exact answers against the set, for the contenders that the plan draws; nothing without them."""
    entries = [row for row in run["rows"] if row["metric"] == plan.metric and "contender" in row]
    drawn = [(row, way, name) for row, way, name in _ways(entries) if (row["contender"], way) in plan.drawn]
    if not drawn:
        return []
    made = new_figure(7, 3.4, textwrap.fill(f"{plan.metric.lower()}: {plan.told}", 90))
    axes = made.subplots()
    for index, (row, way, name) in enumerate(drawn):
        points = [(place, values(row["runs"], way, each)) for place, each in enumerate(plan.sets)]
        points = [(place, found) for place, found in points if found]
        middle = [statistics.mean(found) for _, found in points]
        reach = [
            [m - min(f) for m, (_, f) in zip(middle, points, strict=True)],
            [max(f) - m for m, (_, f) in zip(middle, points, strict=True)],
        ]
        style = {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}
        style["ls"] = DASHES[index % len(DASHES)]
        axes.errorbar([p for p, _ in points], middle, yerr=reach, label=name, lw=1.6, ms=5, capsize=2, **style)
    axes.set_xticks(range(len(plan.sets)), plan.sets, rotation=30, ha="right", fontsize=8)
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel("wholly right")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    made.legend(loc="outside right center", fontsize=7, frameon=False)
    file = f"puzzles_{plan.metric.lower()}.png"
    folder.mkdir(parents=True, exist_ok=True)
    # Without the version of the library that drew it, the same results make the same file.
    made.savefig(folder / file, metadata={"Software": None})
    return [(file, f"{plan.metric}: puzzles wholly right, by set; bars from the worst seed to the best")]
