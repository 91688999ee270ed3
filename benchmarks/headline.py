"""The part of the top-level README that tells what has been measured: one figure, and every target with its verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import report
from .environment import warning
from .figures import OPEN
from .targets import ATTENTION, SOLVE, SPINS, TRAIN, Target

README = report.HERE.parent / "README.md"
BEGIN = "<!-- headline benchmarks: python -m benchmarks report -->"
END = "<!-- end of headline benchmarks -->"

SUITES: dict[str, tuple[Target, ...]] = {"solve": SOLVE, "attention": ATTENTION, "train": TRAIN, "spins": SPINS}
FIGURE = "attention.png"


def content(folder: Path = report.RESULTS) -> str:
    """The text between the markers, from the newest complete run of every suite on each device."""
    runs = {
        (suite, device): latest
        for suite in SUITES
        for device in report.DEVICES
        if (latest := report.newest(suite, folder, device)) is not None
    }
    lines = [line(target, runs.get((suite, target.device))) for suite, targets in SUITES.items() for target in targets]
    lines = sorted((line for line in lines if line[0][0] in "CG"), key=lambda line: line[0])
    header = ["id", "ratio", "statistic", "target", "measured", "verdict"]
    sources = ", ".join(f"`{path.name}`" for path, _ in runs.values())
    parts = [report.markdown_table(header, lines)]
    if ("attention", "cpu") in runs:
        caption = f"Time against sequence length, time and memory against evaluations; {OPEN}"
        parts.insert(0, f"![{caption}](benchmarks/figures/{FIGURE})")
    parts.append(f"From {sources or 'no run'} in `benchmarks/results/`, written by `python -m benchmarks report`.")
    busy = [suite for (suite, _), (_, run) in runs.items() if warning(run["environment"]) is not None]
    if busy:
        parts.append(f"Other work shared the cores during {', '.join(busy)}: those ratios are not reliable.")
    return "\n\n".join(parts)


def line(target: Target, latest: tuple[Path, dict[str, Any]] | None) -> list[str]:
    """A target as it was judged in a run, or on nothing."""
    found = target.judge([])
    for judged in latest[1]["targets"] if latest is not None else []:
        if all(judged[key] == found[key] for key in ("id", "claim", "statistic", "bound")):
            found = judged
    of = {0: found["statistic"], 1: "-"}.get(found["rows"], f"{found['statistic']} of {found['rows']}")
    return [found["id"], found["claim"], of, report.bound(found), report.measured(found), found["verdict"]]


def rewrite(readme: Path = README, folder: Path = report.RESULTS) -> None:
    """Put it between its markers."""
    report.between(readme, BEGIN, END, content(folder))
