"""The tables of docs/equilibrium_blocks.md: who solves larger puzzles, and which recipe makes fixed points right.

README has one of them in short.
"""

from __future__ import annotations

import re
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from .. import report
from . import arithmetic, mazes, mazes_image, paths, prefix, recipes, two_streams
from .contenders import values
from .tables import percent

README = report.HERE.parent / "README.md"
PAGE = README.parent / "docs" / "equilibrium_blocks.md"
PICARD, ANDERSON = "solved", "solved, Anderson(1)"
#: The plan, its task and its block in words, its smallest set and its largest one, and how it is solved.
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
#: Plans whose settled answers are checked a second time, and the checks that the page shows.
CHECKED = (paths.PLAN, arithmetic.PLAN, mazes_image.PLAN)
CHECKS = (
    "solved on, to a tenth of the tolerance",
    "steps damped by half",
    "2 starts beside the answer, noise 0.1",
    "every probability >= 0.9",
)
#: Recipes that the page leaves out: variants of others, which say the same.
LEFT_OUT = ("loop, drawn, noise", "segments, random", "two streams, the same segments", "implicit gradient, ")
#: Exact answers, in %: beside stacks, then at the largest size that was asked.
HEADER = ["task, block; learnt", "asked", "solved", "loop", "best stack (weights)"]
HEADER += ["largest", "solved", "8 loops"]
NOT_RUN = "Not run yet."
BEGIN, END = "<!-- {}: python -m benchmarks report -->", "<!-- end of {} -->"


def rewrite(page: Path = PAGE, readme: Path = README, folder: Path = report.RESULTS) -> None:
    """Put what the newest runs say between the markers of both."""
    report.between(readme, BEGIN.format("settled"), END.format("settled"), _short(folder))
    lines, paths = _larger(folder)
    content = _told((HEADER, lines), paths) if lines else NOT_RUN
    report.between(page, BEGIN.format("larger"), END.format("larger"), content)
    found = report.newest_by_metric("usefulness", ("RECIPES",), folder)
    content = _told(_recipes(found[0][1]["rows"]), [found[0][0]]) if found else NOT_RUN
    report.between(page, BEGIN.format("recipes"), END.format("recipes"), content)
    found = report.newest_by_metric("usefulness", tuple(plan.metric for plan in CHECKED), folder)
    checked: dict[str, list[dict[str, Any]]] = {}
    for row in (row for _, run in found for row in run["rows"]):
        checked.setdefault(row["metric"], []).append(row)
    content = NOT_RUN
    if found:
        header, lines = _checks(checked)
        content = _told((header, [line for line in lines if line[0] in CHECKS]), [path for path, _ in found])
    report.between(page, BEGIN.format("checks"), END.format("checks"), content)


def _told(table: tuple[list[str], list[list[str]]], paths: list[Path]) -> str:
    names = ", ".join(f"`{path.name}`" for path in paths)
    return f"{report.markdown_table(*table)}\n\nFrom {names} in `benchmarks/results/`."


def _larger(folder: Path) -> tuple[list[list[str]], list[Path]]:
    """Lines of the blocks that are asked larger puzzles, and the runs that they are from."""
    lines, paths = [], []
    for plan, task, block, learnt, largest, way in SHORT:
        found = report.newest_by_metric("usefulness", (plan.metric,), folder)
        if not found or way != PICARD:
            continue
        path, run = found[0]
        rows = {row["contender"]: row for row in run["rows"] if "contender" in row}
        ours, asked = rows[plan.leader[0]], plan.costs
        # A stack is run in one way, with as many steps as it has layers.
        stacks = [
            (values(row["runs"], next(iter(row["runs"][0]["ways"])), asked), row["parameters"] / ours["parameters"])
            for name, row in rows.items()
            if name.startswith("stack")
        ]
        stack, size = max(stacks, key=lambda each: statistics.mean(each[0]))
        cells = [
            *(percent(values(ours["runs"], how, asked)) for how in (way, plan.drawn[1][1])),
            f"{percent(stack)} ({size:.0f} x)",
        ]
        beyond = [percent(values(ours["runs"], how, SETS.get(largest, largest))) for how in (way, plan.drawn[2][1])]
        shown = re.sub(r"^depth-first (\d+)$", r"\1 x \1", asked)
        lines.append([f"{task}, by {block}; {learnt}", shown, *cells, largest, *beyond])
        paths.append(path)
    return lines, paths


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
    """Of 4 x 4 Sudoku with 4 givens: converged by Picard, exact, and exact where it did not converge."""
    fields = ("converged", "exact", "exact_unconverged")
    lines = [
        [row["contender"], *(percent(values(row["runs"], "solved", recipes.HARD, field)) for field in fields)]
        for row in rows
        if not row["contender"].startswith(LEFT_OUT)
    ]
    return ["recipe", "converged %", "exact %", "exact % where not converged"], lines
