"""The tables of docs/recurrent_depth.md, from the newest run of LOOPED."""

from __future__ import annotations

from pathlib import Path

from .. import report
from ..targets import Row
from . import tables
from .suite import METRIC

PAGE = report.HERE.parent / "docs" / "recurrent_depth.md"
BEGIN, END = "<!-- {}: python -m benchmarks report -->", "<!-- end of {} -->"
#: Contenders that the guide leaves out, and exits that it shows.
LEFT_OUT = ("2 tied layers, 16", "2 tied layers, solved, Anderson", "counts, 2")
EXITS = (
    "change 0.3",
    "change 0.1",
    "4 evaluations",
    "mean 3",
    "read-out 0.1 nats",
    "read-out 0.01 nats",
    "solved, Picard",
)


def rewrite(page: Path = PAGE, folder: Path = report.RESULTS) -> None:
    """Put what the newest run says between the markers of the page."""
    found = report.newest_by_metric("usefulness", (METRIC,), folder)
    made = {} if not found else parts(found[0][1]["rows"])
    for name in ("contenders", "exits", "decoding", "chunks"):
        content = "Not run yet."
        if name in made:
            content = report.markdown_table(*made[name])
            content += f"\n\nFrom `benchmarks/results/{found[0][0].name}`; all of it is in `benchmarks/README.md`."
        report.between(page, BEGIN.format(name), END.format(name), content)


def parts(rows: list[Row]) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Header and lines by the name of a table."""
    first, ended, _, cut, *timed = tables.tables(rows, lambda ours, theirs: "")
    lines = [line[:-1] for line in first.lines if not line[0].startswith(LEFT_OUT)]
    made = {"contenders": (first.header[:-1], lines)}
    made["exits"] = ended.header, [line for line in ended.lines if line[0] in EXITS]
    made["chunks"] = cut.header, cut.lines
    if timed:
        made["decoding"] = timed[0].header, timed[0].lines
    return made
