"""The tables of docs/equilibrium_blocks.md: who solves larger puzzles, and which recipe makes fixed points right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .. import report
from . import arithmetic, mazes, paths, prefix, recipes
from .contenders import Plan, values
from .tables import label, percent

PAGE = report.HERE.parent / "docs" / "equilibrium_blocks.md"
#: Plans of blocks that learn small puzzles and are asked larger ones.
LARGER = (prefix.PLAN, arithmetic.PLAN, paths.PLAN)
BEGIN, END = "<!-- {}: python -m benchmarks report -->", "<!-- end of {} -->"


def rewrite(page: Path = PAGE, folder: Path = report.RESULTS) -> None:
    """Put what the newest runs say between its markers."""
    of_mazes = {f"{size} x {size}": name for size, name in zip(mazes.SIZES, mazes.SHOWN, strict=True)}
    tables: dict[str, Callable[..., Any]] = {
        "MAZES": partial(_exact, mazes.PLAN, of_mazes | {"13 x 13 by Prim": "Prim 13"}),
        **{plan.metric: partial(_exact, plan, {name: name for name in plan.sets}) for plan in LARGER},
        "RECIPES": _recipes,
    }
    # Checks are told of PATHS, where some trainings settle on wrong answers.
    told = [(metric.lower(), metric, table) for metric, table in tables.items()] + [("checks", "PATHS", _checks)]
    for name, metric, table in told:
        found = report.newest_by_metric("usefulness", (metric,), folder)
        content = "Not run yet."
        if found:
            path, run = found[0]
            content = report.markdown_table(*table(run["rows"]))
            content += f"\n\nFrom `benchmarks/results/{path.name}`; all of it is in `benchmarks/README.md`."
        report.between(page, BEGIN.format(name), END.format(name), content)


def _exact(plan: Plan, sets: dict[str, str], rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Share of puzzles that are wholly right, by set, for those who are drawn and for stacks."""
    lines = []
    for row in rows:
        for way in row["runs"][0]["ways"]:
            if (row["contender"], way) in plan.drawn or row["contender"].startswith("stack"):
                found = [percent(values(row["runs"], way, each)) for each in sets.values()]
                lines.append([label(row, way), str(row["parameters"]), *found])
    return ["exact, in %", "parameters", *sets], lines


def _checks(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Of all settled answers that were checked: which pass, among the right and among the wrong ones."""
    runs = [run for row in rows for run in row["runs"] if "checks" in run]
    sets = [each for run in runs for each in run["checks"].values()]
    lines = []
    for check in sets[0]:
        found = [each[check] for each in sets if each[check]["settled"]]
        right = [each["settled"] * each["exact_settled"] for each in found]
        passed = [each["settled"] * each["passed"] for each in found]
        # A share of none is None.
        kept = [count * (each["exact_passed"] or 0.0) for count, each in zip(passed, found, strict=True)]
        wrong = sum(each["settled"] for each in found) - sum(right)
        costs = [each["evaluations_ratio"] for each in found]
        shares = sum(kept) / sum(right), (sum(passed) - sum(kept)) / wrong
        lines.append([check, *(f"{100 * share:.1f}" for share in shares), f"{min(costs):.1f} to {max(costs):.1f}"])
    header = ["check", f"right answers that pass, in % of {sum(right):.0f}", f"wrong ones, in % of {wrong:.0f}"]
    return [*header, "further evaluations / those of the solve"], lines


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
