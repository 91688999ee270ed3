"""The part of the top-level README that tells what has been measured: one figure, and every target with its verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import native_tables, report
from .environment import warning
from .figures import OPEN
from .targets import ATTENTION, NATIVE, SOLVE, SPINS, TRAIN, Target

README = report.HERE.parent / "README.md"
BEGIN = "<!-- headline benchmarks: python -m benchmarks report -->"
END = "<!-- end of headline benchmarks -->"

SUITES: dict[str, tuple[Target, ...]] = {
    "solve": SOLVE,
    "native": NATIVE,
    "attention": ATTENTION,
    "train": TRAIN,
    "spins": SPINS,
}
FIGURE = "attention.png"


def content(folder: Path = report.RESULTS) -> str:
    """The text between the markers, from the newest complete run of every suite on each device."""
    runs = {
        (suite, device): latest
        for suite in SUITES
        for device in report.DEVICES
        if (latest := report.newest(suite, folder, device)) is not None
    }
    judged = [found for suite, targets in SUITES.items() for found in verdicts(suite, targets, runs)]
    lines = [line(found) for found in sorted(judged, key=lambda found: found["id"]) if found["id"][0] in "CG"]
    header = ["id", "ratio", "statistic", "target", "measured", "verdict"]
    sources = ", ".join(source(*latest) for latest in runs.values())
    parts = [report.markdown_table(header, lines)]
    if ("attention", "cpu") in runs:
        caption = f"Time against sequence length, time and memory against evaluations; {OPEN}"
        parts.insert(0, f"![{caption}](benchmarks/figures/{FIGURE})")
    if ("native", "cpu") in runs:
        parts += costs(runs["native", "cpu"][1])
    parts.append(f"From {sources or 'no run'} in `benchmarks/results/`, written by `python -m benchmarks report`.")
    busy = [suite for (suite, _), (_, run) in runs.items() if warning(run["environment"]) is not None]
    if busy:
        parts.append(f"Other work shared the cores during {', '.join(busy)}: those ratios are not reliable.")
    return "\n\n".join(parts)


def source(path: Path, run: dict[str, Any]) -> str:
    """Where numbers are from, and how busy the machine was before they were measured."""
    load = run["environment"]["load_average_at_start"]
    return f"`{path.name}`" if load is None else f"`{path.name}` (load {load[0]:.1f})"


def verdicts(
    suite: str, targets: tuple[Target, ...], runs: dict[tuple[str, str], tuple[Path, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Every target as the newest run has judged it, with the bound that held then; on nothing where there is no run."""
    told = [run["targets"] for (name, _), (_, run) in runs.items() if name == suite]
    if not told:
        return [target.judge([]) for target in targets]
    # A run on one device has no measurement of what is for the other.
    return [
        next((found for found in same if found["rows"]), same[0])
        for same in (
            [found for judged in told for found in judged if _name(found) == _name(first)] for first in told[0]
        )
    ]


def _name(judged: dict[str, Any]) -> tuple[str, str, str]:
    return judged["id"], judged["claim"], judged["statistic"]


def line(found: dict[str, Any]) -> list[str]:
    """A verdict as a line of the table."""
    of = {0: found["statistic"], 1: "-"}.get(found["rows"], f"{found['statistic']} of {found['rows']}")
    return [found["id"], found["claim"], of, report.bound(found), report.measured(found), found["verdict"]]


def costs(run: dict[str, Any]) -> list[str]:
    """What a call of attention costs at every size, in calls of SDPA, and which implementation answered."""
    rows = [row for row in run["rows"] if row["metric"] == "SHORT"]
    answers = run["environment"].get("native") or "native operations: none"
    intro = (
        "What `equilibrium_attention` costs, in calls of SDPA, one thread, anchor .5 "
        f"(`tiled`: impl='tiled', as without native operations; {answers}):"
    )
    return [intro, report.markdown_table(*native_tables.costs(rows))]


def rewrite(readme: Path = README, folder: Path = report.RESULTS) -> None:
    """Put it between its markers."""
    report.between(readme, BEGIN, END, content(folder))
