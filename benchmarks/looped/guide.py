"""The tables of docs/recurrent_depth.md, from the newest run of LOOPED."""

from __future__ import annotations

from pathlib import Path

from .. import report
from ..targets import Row
from . import tables
from .suite import METRIC

PAGE = report.HERE.parent / "docs" / "recurrent_depth.md"
BEGIN, END = "<!-- {}: python -m benchmarks report -->", "<!-- end of {} -->"
#: Rows that the guide leaves out, and those that it shows.
LEFT_OUT = (
    *(f"2 tied layers, {way}" for way in ("1 step", "2 steps", "8", "16", "solved, Anderson")),
    *("frequencies", "counts, 2"),
)
EXITS = ("solved, Picard", "change 0.3", "mean 3", "read-out 0.1 nats")
DECODING = ("stack", "one slot, 4", "one slot, 16", "a slot for every step, 16")
CHUNKS = ("chunks of 16", "chunks of 256")


def rewrite(page: Path = PAGE, folder: Path = report.RESULTS) -> None:
    """Put what the newest run says between the markers of the page."""
    found = report.newest_by_metric("usefulness", (METRIC,), folder)
    made = {} if not found else parts(found[0][1]["rows"])
    for name in ("contenders", "exits", "decoding", "chunks"):
        content = "Not run yet."
        if name in made:
            content = f"{made[name]}\n\nFrom `benchmarks/results/{found[0][0].name}`."
        report.between(page, BEGIN.format(name), END.format(name), content)


def parts(rows: list[Row]) -> dict[str, str]:
    """Tables and a sentence by their names."""
    first, ended, _, cut, *timed = tables.tables(rows, lambda ours, theirs: "")
    lines = [line[:-1] for line in first.lines if not line[0].startswith(LEFT_OUT)]
    made = {"contenders": report.markdown_table(first.header[:-1], lines)}
    # The most evaluations of a token are those of the solver, or few.
    shown = [ended.header, *(line for line in ended.lines if line[0] in EXITS)]
    header, *lines = ([*cells[:3], cells[4]] for cells in shown)
    made["exits"] = report.markdown_table(header, lines)
    work = "; ".join(f"{name} {', '.join(ratios.split())}" for name, _, ratios, _ in cut.lines if name in CHUNKS)
    made["chunks"] = f"Evaluations over those of all at once, by seed: {work}."
    if timed:
        shown = [timed[0].header, *(line for line in timed[0].lines if line[0].startswith(DECODING))]
        header, *lines = ([name, held, *cells] for name, held, _, *cells in shown)
        made["decoding"] = report.markdown_table(header, lines)
    return made
