"""Tables in the terminal: columns, their meanings, and the cut of a table for a narrow terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MISSING = "-"
#: Columns that name a row, and all columns of words.
ROW_NAMES = ("method", "problem", "queries", "state", "step")
WORDS = ("method", "problem", "queries", "state", "status")
Row = dict[str, Any]


class Column(NamedTuple):
    """A column of a table with a row for every method.

    Attributes:
        header: above it.
        note: its meaning in one line.
        key: of the number in a row, parts of nested rows separated by slashes; "" is the row itself.
        form: the text of the number.
        averaged: whether the number is a list, with one for every sample, whose mean is shown.
    """

    header: str
    note: str
    key: str
    form: Callable[[Any], str]
    averaged: bool = False

    def text(self, row: Row) -> str:
        """Return the cells of the row; a method that raised has no numbers but those from before."""
        if "error" in row and "status" not in row:
            return "ERROR" if self.header == "status" else MISSING
        value: Any = row
        for part in filter(None, self.key.split("/")):
            value = value.get(part)
        value = answered(row, self.key) if self.averaged else value
        text = MISSING if value is None else self.form(value)
        return f"{text}\nERROR" if "error" in row and self.header == "status" else text


def answered(row: Row, key: str) -> float | None:
    """Return the mean of a number over the samples that all rows are averaged over."""
    if row.get(key) is None:
        return None
    import torch

    values = torch.tensor(row[key], dtype=torch.float64).flatten()
    failed, averaged = (
        torch.tensor(row.get(name, usual)).flatten().expand(values.shape)
        for name, usual in (("failed", False), ("averaged", True))
    )
    values = values[averaged & ~failed & values.isfinite()]
    return float(values.mean()) if len(values) else None


def short(value: float) -> str:
    """Write two digits in at most six characters."""
    if not math.isfinite(value):
        return MISSING
    if value == 0 or 1e-2 <= value < 100:
        return f"{value:.2g}"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def percent(value: float) -> str:
    return f"{100 * value:.1f}".removesuffix(".0") if value < 1 else "100"


def tenths(value: float) -> str:
    return f"{100 * value:.1f}"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds < 1e-2 else f"{1e3 * seconds:.0f}"


def exact_milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def six_digits(value: float) -> str:
    return f"{value:.6g}"


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f}" if size < 10 * 2**20 else f"{size / 2**20:.0f}"


def evaluations(row: Row) -> str:
    return f"{row['evaluations_median']:.0f}/{row['evaluations_max']:.0f}"


def status(row: Row) -> str:
    """Return the one status of all problems, or the counts of those beside CONVERGED."""
    import torch

    counts: dict[str, int] = row["status"]
    lines = list(counts) if len(counts) == 1 else [f"{n} {name}" for name, n in counts.items() if name != "CONVERGED"]
    # Of a solve that converged, a derivative may have failed.
    lost = sum(n for name, n in counts.items() if name not in ("CONVERGED", "UNSTABLE", "EXACT", "SAMPLED"))
    unsure = int(torch.tensor(row.get("failed", False)).sum())
    return "\n".join([*lines, *([f"{unsure - lost} RESPONSE"] if unsure > lost else [])])


def plain_table(title: str | None, headers: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table without frame: words are aligned at the left, numbers at the right."""
    from rich import box
    from rich.table import Table

    heading: dict[str, Any] = {"title": title, "title_justify": "left", "title_style": "bold"}
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, **heading)
    for header in headers:
        table.add_column(header, justify="left" if header in WORDS else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def cut_tables(title: str | None, headers: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[Table]:
    """Cut a table into as many as the width requires; columns that name the row stand in each of them."""
    from rich.console import Console
    from rich.measure import Measurement

    # Without a height a terminal that is dumb would count as narrow.
    wide = Console(width=1000, height=1000)
    fixed = [index for index, header in enumerate(headers) if header in ROW_NAMES]
    rest = [index for index in range(len(headers)) if index not in fixed]

    def part(columns: Sequence[int], heading: str | None = None) -> Table:
        chosen = [*fixed, *columns]
        return plain_table(heading, [headers[i] for i in chosen], [[row[i] for i in chosen] for row in rows])

    tables: list[Table] = []
    while rest:
        widths = (Measurement.get(wide, wide.options, part(rest[: n + 1])).maximum for n in range(len(rest)))
        count = max((n for n, needed in enumerate(widths, 1) if needed <= width), default=1)
        tables.append(part(rest[:count], None if tables else title))
        rest = rest[count:]
    return tables


def method_tables(title: str | None, columns: Sequence[Column], rows: list[Row], width: int) -> list[Table]:
    """Return a table with a row for every method, cut into as many as the width requires."""
    cells = [[row["method"], *(column.text(row) for column in columns)] for row in rows]
    return cut_tables(title, ["method", *(column.header for column in columns)], cells, width)


def meanings(columns: Iterable[Column]) -> list[str]:
    return [f"{c.header.replace('-' + chr(10), '').replace(chr(10), ' ')}: {c.note}" for c in columns]


def failures(rows: list[Row]) -> list[str]:
    return [f"{row['method']} failed with {row['error']}: {row['message']}" for row in rows if "error" in row]


def print_tables(console: Console, tables: Iterable[Table]) -> None:
    """Print tables with an empty line behind each."""
    for table in tables:
        console.print(table)
        console.print()


def show(console: Console, tables: list[Table], notes: list[str], cut: Sequence[str] = ()) -> None:
    """Print tables and the notes on them; lines of `cut` that are too long end with dots."""
    print_tables(console, tables)
    for line in notes:
        console.print(f"  {line}", style="dim", markup=False)
    for line in cut:
        console.print(f"  {line}", style="dim", markup=False, no_wrap=True, overflow="ellipsis")
    console.print()
