"""The table of INPAINT."""

from __future__ import annotations

from collections.abc import Callable

from .report import Table
from .targets import Row


def tables(rows: list[Row], verdict: Callable[[Row, Row], str]) -> list[Table]:
    """One of the contenders, each beside the equilibrium."""
    trained = [row for row in rows if "contender" in row]
    if not trained:
        return []
    costs = next((row for row in rows if "times" in row), None)
    bare = next((row for row in rows if "errors" in row), None)
    lines = []
    for one in dict.fromkeys(row["contender"]["name"] for row in trained):
        of = {row["aim"]: row for row in trained if row["contender"]["name"] == one}
        lines.append([*_scores(of, trained, verdict), *_costs(costs, one)])
    for name, error in [] if bare is None else bare["errors"].items():
        lines.append([name, f"{error:.3f}", *["-"] * 10])
    header = ["block", "error", "the equilibrium is", "accuracy %", "the equilibrium is", "solved: error, accuracy %"]
    header += ["parameters of block", "evaluations", "converged %", "ms forward", "ms training step", "peak MB"]
    intro = (
        "Hidden patches and labels of digits; whether the equilibrium is better or worse by more than two standard "
        "errors is told beside each:"
    )
    return [Table("inpainting", intro, header, lines)]


def _scores(of: dict[str, Row], trained: list[Row], verdict: Callable[[Row, Row], str]) -> list[str]:
    cells = [next(iter(of.values()))["contender"]["name"]]
    solved = []
    for aim in ("inpainting", "labels"):
        row = of.get(aim)
        ours = next((r for r in trained if r["aim"] == aim and r["contender"]["kind"] == "equilibrium"), None)
        cells += [
            "-" if row is None else _spread(row),
            "-" if row is None or ours is None or row is ours else verdict(ours, row),
        ]
        if row is not None and "solved" in row["evidence"]:
            solved.append(_number(row, row["evidence"]["solved"]))
    row = of.get("inpainting") or next(iter(of.values()))
    found, explicit = row["evidence"], row["contender"]["kind"] == "explicit"
    cells += [", ".join(solved) or "-", str(row["parameters_of_block"])]
    settles = row["contender"]["kind"] == "equilibrium"
    cells += ["-" if explicit else f"{found['evaluations']:.1f}", f"{100 * found['converged']:.4g}" if settles else "-"]
    return cells


def _number(row: Row, score: float) -> str:
    return f"{100 * score:.1f}" if row["score"] == "accuracy" else f"{score:.3f}"


def _spread(row: Row) -> str:
    found = row["evidence"]
    text = _number(row, found["score"])
    return text if found["score_std"] is None else f"{text} +- {_number(row, found['score_std'])}"


def _costs(costs: Row | None, name: str) -> list[str]:
    if costs is None:
        return ["-"] * 3
    milliseconds = [f"{1000 * costs['times'][f'{name} {what}']['median']:.1f}" for what in ("forward", "training")]
    return [*milliseconds, f"{costs['peak_memory_bytes'][f'{name} training'] / 1e6:.1f}"]
