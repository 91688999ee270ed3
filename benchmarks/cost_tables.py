"""Short tables for the page about costs; those of the suites have every column."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .native_tables import sizes
from .report import number
from .targets import Row
from .train_tables import sizes_of_block

Lines = tuple[list[str], list[list[str]]]

BLOCKS = (
    "A training step of a transformer block or of two convolutions that are repeated to a residual of 1e-3; our time "
    "over that of torchdeq's faster solver, of the same methods in as few calls of torch as they need without a check "
    "(by hand), of a stack of as many untied blocks as ours makes evaluations, and of these evaluations and products "
    "alone (bare):"
)


def settings(rows: Iterable[Row]) -> Lines:
    """Header and lines of the solves of the suite `solve` and their training steps, by anchor, in those of SDPA."""
    by_keys: dict[str, dict[float, Row]] = {}
    for row in rows:
        if "evidence" in row:
            by_keys.setdefault(f"{row['keys']}, {row['sharpness']:g}", {})[row["anchor"]] = row
    header, lines = ["keys, beta*sqrt(D)"], [[keys] for keys in by_keys]
    anchors = sorted({anchor for found in by_keys.values() for anchor in found})
    for name, cell in SETTINGS.items():
        for anchor in anchors:
            header.append(f"{name}, anchor {anchor:g}" if anchor == anchors[0] else f"anchor {anchor:g}")
            for line, found in zip(lines, by_keys.values(), strict=True):
                line.append(cell(found[anchor]) if anchor in found else "-")
    return header, lines


def times(row: Row, way: str) -> float:
    """Return our seconds of a way, forward or training, in those of SDPA."""
    seconds = row["seconds"]
    return float(seconds[f"ours_{way}"]["median"] / seconds[f"sdpa_{way}"]["median"])


def _evaluations(row: Row) -> str:
    found = row["evidence"]["ours_forward"]
    return f"{found['evaluations_mean']:.1f}/{found['evaluations_max']}"


SETTINGS: dict[str, Callable[[Row], str]] = {
    "evaluations": _evaluations,
    "forward": lambda row: number(times(row, "forward")),
    "training step": lambda row: number(times(row, "training")),
}


def short_calls(rows: Iterable[Row]) -> Lines:
    """Header and lines of the short calls of a run of `native`, as functions and as layers, in those of SDPA."""
    named = {
        "SHORT": ("explicit", "forward", "training"),
        "LAYER": ("explicit", "solve", "training"),
    }
    lines = []
    for row in rows:
        if (names := named.get(row["metric"])) is not None:
            width = row["shape"]["heads"] * row["shape"]["dim"]
            call = sizes(row) if row["metric"] == "SHORT" else f"layer, {sizes(row)}, width {width}"
            lines.append([call, *(number(row["ratios"].get(name)) for name in names)])
    return ["call", "`max_steps=0`", "solve", "training step"], lines


def lengths(rows: Iterable[Row]) -> Lines:
    """Header and lines of forward solves by length, of all problems of that length in one cell, in forwards of SDPA."""
    names = {
        "ours": "ours",
        "Picard": "plain steps",
        "torchdeq fpi": "torchdeq, plain steps",
        "torchdeq anderson": "torchdeq, Anderson",
    }
    by_length: dict[int, list[Row]] = {}
    for row in rows:
        # Every other power of two.
        if row["metric"] == "LENGTH" and row["shape"]["length"].bit_length() % 2:
            by_length.setdefault(row["shape"]["length"], []).append(row)
    lines = [
        [str(length), *("/".join(_digits(row["ratios"].get(name)) for row in found) for name in names)]
        for length, found in by_length.items()
    ]
    return ["N = M", *names.values()], lines


def _digits(value: float | None) -> str:
    """Three digits, or as many as stand before the point."""
    return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def blocks(rows: Iterable[Row]) -> Lines:
    """Header and lines of the blocks as fixed points, one each: our time over others."""
    names = ("ours / torchdeq", "ours / by hand", "ours / stack", "ours / bare")
    lines = []
    for row in rows:
        if row["metric"] == "EQUILIBRIUM":
            block = sizes_of_block(row).removesuffix(", float32, to 0.001")
            lines.append([block, *(number(row["ratios"].get(name)) for name in names)])
    return ["block", *names], lines
