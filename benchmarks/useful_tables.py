"""The tables of a run of the suite `usefulness`: a summary, and one for every task."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from . import inpainting_tables
from .looped import tables as looped_tables
from .puzzles import suite as puzzles
from .puzzles import tables as puzzle_tables
from .report import Table
from .targets import Row


def figures(run: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    """One of every puzzle that was run."""
    return [drawn for plan in puzzles.PLANS for drawn in puzzle_tables.figure(plan, run, folder)]


def tables(run: dict[str, Any]) -> list[Table]:
    """The puzzles; then the comparison at equal FLOPs, and all models of every other task."""
    models = [row for row in run["rows"] if "model" in row]
    costs = {row["metric"]: row for row in run["rows"] if "seconds" in row and row["metric"] != "LOOPED"}
    made = []
    for plan in puzzles.PLANS:
        made += puzzle_tables.tables(plan, [row for row in run["rows"] if row["metric"] == plan.metric])
    timed = [row for row in run["rows"] if row["metric"] == puzzles.Costs.metric and "seconds" in row]
    made += puzzle_tables.times(timed)
    made += [_summary(models)] if models else []
    for metric in dict.fromkeys(row["metric"] for row in models):
        made.append(_task([row for row in models if row["metric"] == metric], costs.get(metric)))
    made += inpainting_tables.tables([row for row in run["rows"] if row["metric"] == "INPAINT"], verdict)
    made += looped_tables.tables([row for row in run["rows"] if row["metric"] == "LOOPED"], verdict)
    return made


def _summary(rows: list[Row]) -> Table:
    header = ["task, k", "1 step", "k steps, own weights", "k steps, shared weights", "equilibrium", "evaluations"]
    lines = []
    for metric in dict.fromkeys(row["metric"] for row in rows):
        of_task = [row for row in rows if row["metric"] == metric]
        floor = next(row for row in of_task if row["model"]["group"] == 1)
        for group in sorted({row["model"]["group"] for row in of_task} - {0, 1}):
            own, shared, *budgets = [row for row in of_task if row["model"]["group"] == group]
            budgets = [row for row in budgets if row["model"]["kind"] == "budget"]
            equal = min(budgets, key=lambda row: abs(row["forward_flops"] - shared["forward_flops"]))
            beside = [score(row) for row in (floor, own, shared, equal)]
            verdicts = [verdict(equal, other) for other in (own, shared, floor)]
            task = f"{metric.lower()} ({'accuracy' if own['score'] == 'accuracy' else 'bits per character'}), {group}"
            lines.append([task, *beside, str(equal["model"]["count"]), *verdicts])
    header += ["against own weights", "against shared weights", "against 1 step"]
    intro = (
        "At equal FLOPs: k explicit steps, and one equilibrium whose evaluations cost as much. `better`, `worse`: by "
        "more than two standard errors, of the seeds or of the test examples, whichever are larger:"
    )
    return Table("equal FLOPs", intro, header, lines)


def verdict(ours: Row, theirs: Row) -> str:
    """Say whether the equilibrium is better, if seeds and tests can tell."""
    scores = [[run["score"] for run in row["runs"]] for row in (ours, theirs)]
    gains = [a - b for a, b in zip(*scores, strict=True)]
    if len(gains) < 2:
        return "one seed decides nothing"
    error = statistics.stdev(gains) / math.sqrt(len(gains))
    gain = statistics.mean(gains) * (1 if ours["score"] == "accuracy" else -1)
    if ours["score"] == "accuracy":
        share = statistics.mean(scores[0] + scores[1])
        # The same examples are asked of all seeds: more seeds make their number no larger.
        error = max(error, math.sqrt(2 * share * (1 - share) / ours["data"]["test"]))
    if abs(gain) <= 2 * error:
        return "as good"
    return "better" if gain > 0 else "worse"


def _task(rows: list[Row], costs: Row | None) -> Table:
    accuracy = rows[0]["score"] == "accuracy"
    header = [
        "model",
        "accuracy %" if accuracy else "bits per character",
        "rate",
        "parameters",
        "MFLOP forward",
        "counted",
        "evaluations mean/max",
        "converged %",
        "training s",
        "ms forward",
        "ms training step",
        "peak MB",
    ]
    lines = []
    for row in rows:
        found, name = row["evidence"], row["model"]["name"]
        explicit = row["model"]["kind"] in ("stack", "shared")
        lines.append(
            [
                name,
                score(row),
                f"{row['learning_rate']:g}",
                str(row["parameters"]),
                f"{row['forward_flops'] / 1e6:.2f}",
                f"{row['flops_of_one_batch']['counted'] / 1e6:.2f}",
                "-" if explicit else f"{found['evaluations_mean']:.1f}/{found['evaluations_max']}",
                "-" if explicit else f"{100 * found['converged']:.4g}",
                f"{found['training_seconds']:.1f}",
                *(_milliseconds(costs, f"{name} {what}") for what in ("forward", "training")),
                "-" if costs is None else f"{costs['peak_memory_bytes'][f'{name} training'] / 1e6:.1f}",
            ]
        )
    shape, data = rows[0]["shape"], rows[0]["data"]
    chance = f"{100 * rows[0]['chance']:.3g} %" if accuracy else f"{rows[0]['chance']:.2f}"
    intro = (
        f"{rows[0]['metric'].capitalize()}: {shape['length']} tokens, {data['test']} "
        f"{'windows' if data['source'].startswith('pydoc') else 'examples'} to test; guessing gives {chance}"
    )
    intro += f"; {data['source']}" + (f", sha256 `{data['sha256'][:16]}`:" if "sha256" in data else ":")
    return Table(rows[0]["metric"].lower(), intro, header, lines)


def score(row: Row) -> str:
    """Mean +- standard deviation over seeds."""
    factor, digits = (100, 1) if row["score"] == "accuracy" else (1, 3)
    found = row["evidence"]
    text = f"{factor * found['score']:.{digits}f}"
    return text if found["score_std"] is None else f"{text} +- {factor * found['score_std']:.{digits}f}"


def _milliseconds(costs: Row | None, name: str) -> str:
    return "-" if costs is None else f"{1000 * costs['seconds'][name]['median']:.1f}"
