"""The tables of docs/equilibrium_blocks.md: who solves larger puzzles, and which recipe makes fixed points right.

README has one of them in short.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .. import report
from . import arithmetic, mazes, mazes_image, paths, prefix, recipes, two_streams
from .contenders import Plan, values
from .tables import label, percent

README = report.HERE.parent / "README.md"
PAGE = README.parent / "docs" / "equilibrium_blocks.md"
#: Plans of blocks that learn small puzzles and are asked larger ones.
LARGER = (prefix.PLAN, arithmetic.PLAN, paths.PLAN, mazes_image.PLAN, two_streams.PLAN)
PICARD, ANDERSON = "solved", "solved, Anderson(1)"
#: Of README: the plan, its task and its block in words, its smallest set and its largest one, and how it is solved.
SHORT = (
    (mazes.PLAN, "mazes of cells", "attention", "5 x 5", "17 x 17", PICARD),
    (paths.PLAN, "path lengths in graphs, modulo 3", "messages along edges", "16 nodes", "128 nodes", PICARD),
    (prefix.PLAN, "parities of bit strings", "convolutions", "32 bits", "512 bits", PICARD),
    (arithmetic.PLAN, "sums with long carries", "convolutions", "8 digits", "128 digits", PICARD),
    (mazes_image.PLAN, "mazes of pixels", "convolutions", "9 x 9", "33 x 33", PICARD),
    (mazes_image.PLAN, "the same, `Anderson(history=1)`", "convolutions", "9 x 9", "33 x 33", ANDERSON),
    (two_streams.PLAN, "Sudoku of 9 x 9", "two streams of attention", "36 to 54 givens", "32 givens", PICARD),
)
#: Sets whose names are longer than what README calls them.
SETS = {"17 x 17": mazes.SHOWN[-1]}
#: Plans whose settled answers are checked a second time.
CHECKED = (paths.PLAN, arithmetic.PLAN, mazes_image.PLAN)
NOT_RUN = "Not run yet."
BEGIN, END = "<!-- {}: python -m benchmarks report -->", "<!-- end of {} -->"


def rewrite(page: Path = PAGE, readme: Path = README, folder: Path = report.RESULTS) -> None:
    """Put what the newest runs say between the markers of both."""
    report.between(readme, BEGIN.format("settled"), END.format("settled"), _short(folder))
    of_mazes = {f"{size} x {size}": name for size, name in zip(mazes.SIZES, mazes.SHOWN, strict=True)}
    tables: dict[str, Callable[..., Any]] = {
        "MAZES": partial(_exact, mazes.PLAN, of_mazes | {"13 x 13 by Prim": "Prim 13"}),
        **{plan.metric: partial(_exact, plan, {name: name for name in plan.sets}) for plan in LARGER},
        "RECIPES": _recipes,
    }
    for metric, table in tables.items():
        found = report.newest_by_metric("usefulness", (metric,), folder)
        content = _told(table(found[0][1]["rows"]), [found[0][0]]) if found else NOT_RUN
        report.between(page, BEGIN.format(metric.lower()), END.format(metric.lower()), content)
    found = report.newest_by_metric("usefulness", tuple(plan.metric for plan in CHECKED), folder)
    checked: dict[str, list[dict[str, Any]]] = {}
    for row in (row for _, run in found for row in run["rows"]):
        checked.setdefault(row["metric"], []).append(row)
    content = _told(_checks(checked), [path for path, _ in found]) if found else NOT_RUN
    report.between(page, BEGIN.format("checks"), END.format("checks"), content)


def _told(table: tuple[list[str], list[list[str]]], paths: list[Path]) -> str:
    names = " and ".join(f"`benchmarks/results/{path.name}`" for path in paths)
    return f"{report.markdown_table(*table)}\n\nFrom {names}; all of it is in `benchmarks/README.md`."


def _exact(plan: Plan, sets: dict[str, str], rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Share of puzzles that are wholly right, by set, for those who are drawn and for stacks."""
    lines = []
    for row in rows:
        for way in row["runs"][0]["ways"]:
            if (row["contender"], way) in plan.drawn or row["contender"].startswith("stack"):
                found = [percent(values(row["runs"], way, each)) for each in sets.values()]
                lines.append([label(row, way), str(row["parameters"]), *found])
    return ["exact, in %", "parameters", *sets], lines


def _short(folder: Path) -> str:
    """Blocks that settle beside the loops that they were trained as, a line a task."""
    lines = []
    for plan, task, block, learnt, asked, way in SHORT:
        found = report.newest_by_metric("usefulness", (plan.metric,), folder)
        if not found:
            lines.append([task, block, learnt, asked, *(["not run"] * 4)])
            continue
        (_, run), (_, loop) = found[0], plan.drawn[1]
        (runs,) = (row["runs"] for row in run["rows"] if row.get("contender") == plan.leader[0])
        get = partial(values, runs, way, SETS.get(asked, asked))
        settled, right = (percent(get(field)) for field in ("converged", "exact"))
        evaluations = f"{statistics.mean(get('evaluations_mean')):.0f}"
        looped = f"{percent(values(runs, loop, SETS.get(asked, asked)))} ({loop})"
        lines.append([task, block, learnt, asked, right, settled, evaluations, looped])
    header = ["task", "block", "learnt", "asked", "solved: right, %", "settled, %", "evaluations"]
    return report.markdown_table([*header, "as a loop: right, %"], lines)


def _checks(by_metric: dict[str, list[dict[str, Any]]]) -> tuple[list[str], list[list[str]]]:
    """Of all settled answers that were checked: which pass, among the right and among the wrong ones."""
    suites = {
        metric: [each for row in rows for run in row["runs"] for each in run.get("checks", {}).values()]
        for metric, rows in by_metric.items()
    }
    totals, lines = dict[str, tuple[float, float]](), []
    # Runs need not hold the checks in the same order.
    for check in next(iter(suites.values()))[0]:
        line, costs = [check], list[float]()
        for metric, sets in suites.items():
            found = [each[check] for each in sets if each[check]["settled"]]
            right = sum(each["settled"] * each["exact_settled"] for each in found)
            wrong = sum(each["settled"] for each in found) - right
            passed = sum(each["settled"] * each["passed"] for each in found)
            # A share of none is None.
            kept = sum(each["settled"] * each["passed"] * (each["exact_passed"] or 0.0) for each in found)
            parts = (kept, right), (passed - kept, wrong)
            line.append(" / ".join(f"{100 * part / whole:.1f}" if whole else "-" for part, whole in parts))
            costs += [each["evaluations_ratio"] for each in found]
            totals[metric] = right, wrong
        lines.append([*line, f"{min(costs):.1f} to {max(costs):.1f}"])
    heads = [f"{name}: of {right:.0f} / {wrong:.0f}, in %" for name, (right, wrong) in totals.items()]
    return ["check", *heads, "further evaluations / those of the solve"], lines


def _recipes(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Of 4 x 4 Sudoku with 4 givens: converged by Picard, and exact; then by other solvers."""
    lines, others = [], [way.name for way in recipes.WAYS[1:]]
    for row in rows:
        runs, hard = row["runs"], recipes.HARD
        found = [
            percent(values(runs, "solved", hard, field))
            for field in ("converged", "exact", "exact_converged", "exact_unconverged")
        ]
        found += [
            " / ".join(percent(values(runs, way, hard, field)).split(" ")[0] for field in ("converged", "exact"))
            for way in others
        ]
        lines.append([row["contender"], *found])
    header = ["recipe", "converged %", "exact %", "exact % given converged", "not"]
    return [*header, *(f"{way}: converged / exact" for way in others)], lines
