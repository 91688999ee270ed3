"""The two tables of docs/equilibrium_blocks.md: who solves mazes, and which recipe makes fixed points right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import report
from . import mazes, recipes
from .contenders import values
from .tables import label, percent

PAGE = report.HERE.parent / "docs" / "equilibrium_blocks.md"
BEGIN, END = "<!-- {}: python -m benchmarks report -->", "<!-- end of {} -->"


def rewrite(page: Path = PAGE, folder: Path = report.RESULTS) -> None:
    """Put what the newest runs of MAZES and RECIPES say between its markers."""
    for metric, table in (("MAZES", _mazes), ("RECIPES", _recipes)):
        found = report.newest_by_metric("usefulness", (metric,), folder)
        content = "Not run yet."
        if found:
            path, run = found[0]
            content = report.markdown_table(*table(run["rows"]))
            content += f"\n\nFrom `benchmarks/results/{path.name}`; all of it is in `benchmarks/README.md`."
        name = metric.lower()
        report.between(page, BEGIN.format(name), END.format(name), content)


def _mazes(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Share of mazes whose whole path is right, by size, for those who lead and for the trivial guess."""
    lines = []
    for row in rows:
        for way in row["runs"][0]["ways"]:
            if (row["contender"], way) in mazes.PLAN.drawn or row["contender"].startswith("stack"):
                found = [percent(values(row["runs"], way, each)) for each in (*mazes.SHOWN, "Prim 13")]
                lines.append([label(row, way), str(row["parameters"]), *found])
    sizes = [f"{size} x {size}" for size in mazes.SIZES]
    return ["exact, in %", "parameters", *sizes, "13 x 13 by Prim"], lines


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
