"""Run every example in full with three seeds and write `docs/examples.md`: `python docs/examples/run_all.py`.

The numbers go to `results.json` beside this file; `--check` only compares the tables of the page with them. The puzzles
have one seed and a table of their own, from `puzzles.json`, which `--puzzles` writes, and the spin layer one from
`spins.json`, by `--spins`.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import bit_pattern
import digits
import digits_spins
import latch
import mazes
import mil_digits
import sklearn
import sudoku
import torch
from _common import EXTRAS, MODELS, mean_and_std, numbers

import implicit_attention

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "results.json", HERE.parent / "examples.md"
PUZZLES, SPINS = HERE / "puzzles.json", HERE / "spins.json"
START, END = "<!-- tables: python docs/examples/run_all.py -->\n", "<!-- end of tables -->"
PUZZLES_START = "<!-- puzzles: python docs/examples/run_all.py --puzzles -->\n"
PUZZLES_END = "<!-- end of puzzles -->"
SPINS_START = "<!-- spins: python docs/examples/run_all.py --spins -->\n"
SPINS_END = "<!-- end of spins -->"
EXAMPLES = (digits, mil_digits, bit_pattern, latch)
SEEDS = (0, 1, 2)


def versions() -> dict[str, str]:
    return {
        "implicit_attention": implicit_attention.__version__,
        "torch": torch.__version__,
        "scikit-learn": sklearn.__version__,
        "python": platform.python_version(),
    }


def run_puzzles() -> dict[str, Any]:
    return {"versions": versions(), "examples": {module.__name__: module.main([]) for module in (mazes, sudoku)}}


def run_spins() -> dict[str, Any]:
    return {"versions": versions(), **digits_spins.main(["--seeds", *map(str, SEEDS)])}


def run_all() -> dict[str, Any]:
    argv = ["--seeds", *map(str, SEEDS)]
    return {"versions": versions(), "examples": {module.__name__: module.main(argv) for module in EXAMPLES}}


def tables(results: dict[str, Any]) -> str:
    """Shares that are right and costs, in Markdown."""
    head = [f"{name}, %" for name in MODELS]
    table = [("example", "measure", *head, "seconds to train", "one step", "evaluations (at most)")]
    for example, result in results["examples"].items():
        runs = result["runs"]
        ours = [run for run in runs if run["model"] == "equilibrium"]
        seconds = (f"{statistics.mean(numbers(runs, model, 'seconds')):.1f}" for model in MODELS)
        most = max(run["most evaluations"] for run in ours)
        cost = (*seconds, f"{statistics.mean(run['evaluations'] for run in ours):.1f} ({most})")
        for key in ("accuracy", *EXTRAS):
            if key in runs[0]:
                found = (mean_and_std(numbers(runs, model, key)) for model in MODELS)
                # All measures of an example are of one training.
                table.append((f"`{example}.py`", key, *found, *(cost if key == "accuracy" else ("", "", ""))))
    return f"{_markdown(table)}\n"


def puzzle_table(results: dict[str, Any]) -> str:
    """Loop against fixed point, in Markdown; all converge."""
    table = [("example", "puzzles", "loop, %", "solved, %", "evaluations (at most)")]
    for example, result in results["examples"].items():
        for row in result["rows"]:
            shares = (f"{100 * row[name]:.1f}" for name in ("loop", "solved"))
            evals = f"{row['evaluations']:.0f} ({row['most evaluations']})"
            table.append((f"`{example}.py`", row["set"], *shares, evals))
    return f"{_markdown(table)}\n"


def _markdown(rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def updated(page: str, content: str, start: str = START, end: str = END) -> str:
    before, rest = page.split(start)
    return f"{before}{start}\n{content}\n{end}{rest.split(end)[1]}"


def main() -> int:
    check = "--check" in sys.argv
    if "--puzzles" in sys.argv:
        PUZZLES.write_text(json.dumps(run_puzzles(), indent=1) + "\n")
    elif "--spins" in sys.argv:
        SPINS.write_text(json.dumps(run_spins(), indent=1) + "\n")
    elif not check:
        RESULTS.write_text(json.dumps(run_all(), indent=1) + "\n")
    page = PAGE.read_text()
    new = updated(page, tables(json.loads(RESULTS.read_text())))
    new = updated(new, puzzle_table(json.loads(PUZZLES.read_text())), PUZZLES_START, PUZZLES_END)
    spins = _markdown(digits_spins.table(json.loads(SPINS.read_text())))
    new = updated(new, f"{spins}\n", SPINS_START, SPINS_END)
    if check:
        return int(new != page)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
