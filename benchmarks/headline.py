"""The part of the top-level README that tells what a solve costs, in five lines; all targets are in the README here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import report
from .environment import warning
from .targets import ATTENTION, NATIVE, SOLVE, TRAIN, Target

README = report.HERE.parent / "README.md"
BEGIN = "<!-- headline benchmarks: python -m benchmarks report -->"
END = "<!-- end of headline benchmarks -->"

SUITES: dict[str, tuple[Target, ...]] = {
    "solve": SOLVE,
    "native": NATIVE,
    "attention": ATTENTION,
    "train": TRAIN,
}

#: Lines of the README: a name for each number, and the ratio whose measured value it is.
Ratios = dict[str, tuple[str, str]]
C1 = "forward solve / (Picard's mean evaluations x one SDPA forward)"
C2 = "torchdeq's Anderson / ours, forward, a row per "
C3 = "training step with the exact gradient / explicit SDPA training step, "
C4 = "peak memory of a training step at N = M = 4096 above its inputs"
C5 = "unrolled autograd / ours, training step, time, all queries converged"
C8 = "equilibrium_attention, one thread, forward / SDPA's, H 8, N = M = "
BLOCK = "training step of a block as a fixed point / torchdeq's faster solver at equal measured residuals"
LLAMA = "converted Llama, anchor .9, 1024 tokens: "
LINES: tuple[tuple[str, Ratios], ...] = (
    (
        "**x one SDPA forward**: {short} in a call of 8 heads with 64 tokens, {long} with 256; a solve to 1e-4 costs "
        "{mean} x its evaluations (worst {worst}). `max_steps=0`, one step, costs {explicit} in a converted Llama.",
        {
            "short": (C8 + "64", "worst"),
            "long": (C8 + "256", "worst"),
            "mean": (C1, "geometric mean"),
            "worst": (C1, "worst"),
            "explicit": (LLAMA + "max_steps=0 / torch's attention", "worst"),
        },
    ),
    (
        "**x a training step of explicit attention**: {gaussian} on Gaussian and {clustered} on clustered keys (worst "
        "{worst}); {llama} for a whole converted Llama at anchor .9.",
        {
            "gaussian": (C3 + "Gaussian", "geometric mean"),
            "clustered": (C3 + "clustered", "geometric mean"),
            "worst": (C3 + "clustered", "worst"),
            "llama": (LLAMA + "training step / torch's attention", "worst"),
        },
    ),
    (
        "**Memory** of a training step at 4,096 tokens: {sdpa} x SDPA's, and {evaluations} x as much for 20 "
        "evaluations as for 5.",
        {"sdpa": (C4 + " / SDPA's", "worst"), "evaluations": (C4 + ", 20 evaluations / 5", "worst")},
    ),
    (
        "**torchdeq's Anderson** takes {query} x our time with a row per query, {batch} x with a row per batch entry; "
        "unrolled autograd {unrolled} x. A whole block trained as a fixed point takes {block} x the time of torchdeq's "
        "faster solver.",
        {
            "query": (C2 + "query", "geometric mean"),
            "batch": (C2 + "batch entry", "geometric mean"),
            "unrolled": (C5, "geometric mean"),
            "block": (BLOCK, "worst"),
        },
    ),
)


def content(folder: Path = report.RESULTS) -> str:
    """The text between the markers, from the newest complete run of every suite on each device."""
    runs = {
        (suite, device): latest
        for suite in SUITES
        for device in report.DEVICES
        if (latest := report.newest(suite, folder, device)) is not None
    }
    judged = [found for suite, targets in SUITES.items() for found in verdicts(suite, targets, runs)]
    values = {(found["claim"], found["statistic"]): report.measured(found) for found in judged}
    lines = [text.format(**{name: values[key] for name, key in ratios.items()}) for text, ratios in LINES]
    count = sum(found["id"].startswith("G") and found["measured"] is None for found in judged)
    if count:
        lines.append(f"**Never measured**: a GPU. All {count} ratios that are aimed at there are open.")
    sources = ", ".join(source(*latest) for latest in runs.values())
    parts = ["\n".join(f"- {line}" for line in lines)]
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


def rewrite(readme: Path = README, folder: Path = report.RESULTS) -> None:
    """Put it between its markers."""
    report.between(readme, BEGIN, END, content(folder))
