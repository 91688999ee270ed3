"""Run every example in full with three seeds and write `docs/examples.md`: `python docs/examples/run_all.py`.

The numbers go to `results.json` beside this file; `--check` only compares the tables of the page with them.
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
import latch
import mil_digits
import sklearn
import torch
from _common import EXTRAS, MODELS, mean_and_std, numbers, verdict

import implicit_attention

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "results.json", HERE.parent / "examples.md"
START, END = "<!-- tables: python docs/examples/run_all.py -->\n", "<!-- end of tables -->"
EXAMPLES = (digits, mil_digits, bit_pattern, latch)
SEEDS = (0, 1, 2)


def run_all() -> dict[str, Any]:
    versions = {
        "implicit_attention": implicit_attention.__version__,
        "torch": torch.__version__,
        "scikit-learn": sklearn.__version__,
        "python": platform.python_version(),
    }
    argv = ["--seeds", *map(str, SEEDS)]
    return {"versions": versions, "examples": {module.__name__: module.main(argv) for module in EXAMPLES}}


def tables(results: dict[str, Any]) -> str:
    """Accuracies and costs, in Markdown."""
    shares = [("example", "measure", *(f"{name}, %" for name in MODELS), "what the seeds say")]
    costs = [
        ("example", "seconds to train", "one step", "evaluations a query", "at most", "converged", "failed solves")
    ]
    for example, result in results["examples"].items():
        runs = result["runs"]
        for key in ("accuracy", *EXTRAS):
            if key in runs[0]:
                found = (mean_and_std(numbers(runs, model, key)) for model in MODELS)
                shares.append((f"`{example}.py`", key, *found, verdict(runs, key)))
        ours = [run for run in runs if run["model"] == "equilibrium"]
        seconds = (f"{statistics.mean(numbers(runs, model, 'seconds')):.1f}" for model in MODELS)
        evals = f"{statistics.mean(run['evaluations'] for run in ours):.1f}"
        most = max(run["most evaluations"] for run in ours)
        converged = f"{100 * min(run['converged'] for run in ours):.4g} %"
        costs.append(
            (f"`{example}.py`", *seconds, evals, str(most), converged, str(sum(run["failed"] for run in ours)))
        )
    return f"{_markdown(shares)}\n\n{_markdown(costs)}\n"


def _markdown(rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def updated(page: str, content: str) -> str:
    before, rest = page.split(START)
    return f"{before}{START}\n{content}\n{END}{rest.split(END)[1]}"


def main() -> int:
    check = "--check" in sys.argv
    if not check:
        RESULTS.write_text(json.dumps(run_all(), indent=1) + "\n")
    page = PAGE.read_text()
    new = updated(page, tables(json.loads(RESULTS.read_text())))
    if check:
        return int(new != page)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
