"""What the user sees while `compare` runs and when it is done."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from .errors import printable
from .methods import STEP_SIZE

if TYPE_CHECKING:
    from .compare import Comparison, Settings

WIDTH = 120
MISSING = "-"


def _console(stderr: bool) -> Console:
    """A console that is wide enough for the table where nobody has set a width (pipes, logs)."""
    stream = sys.stderr if stderr else sys.stdout
    fixed = WIDTH if not stream.isatty() and "COLUMNS" not in os.environ else None
    return Console(stderr=stderr, width=fixed, highlight=False, soft_wrap=False)


def output_console() -> Console:
    return _console(stderr=False)


class Progress:
    """A line per finished method on stderr, and a bar below them where stderr is a terminal."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        self.console = _console(stderr=True) if console is None else console
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self.bar = Bar(
            *columns,
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
            refresh_per_second=2,
        )
        self.task = self.bar.add_task("starting", total=total)
        self.begun = False

    def __enter__(self) -> Progress:
        self.bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.__exit__(kind, error, trace)

    def update(self, name: str, row: dict[str, Any] | None) -> None:
        """`name` begins (row None), or has ended with this row."""
        if row is None:
            self.bar.update(self.task, description=name, advance=1 if self.begun else 0)
            self.begun = True
            return
        self.console.print(f"{name:<20} {_line(row)}", markup=False)


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"failed: {row['error']}: {row['message']}"
    seconds = _milliseconds(row.get("forward_seconds"))
    return (
        f"{_evaluations(row)} evaluations, residual {_short(row['residual_max'])}, "
        f"{_percent(row['converged'])} % converged, {seconds} ms"
    )


class Column(NamedTuple):
    """Header, meaning in one line, and the text of a row."""

    header: str
    note: str
    text: Callable[[dict[str, Any]], str]


def _short(value: float | None) -> str:
    """Two digits in at most six characters."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0 or 1e-2 <= value < 100:
        return f"{value:.2g}"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def _percent(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{100 * value:.1f}".removesuffix(".0") if value < 1 else "100"


def _milliseconds(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{1e3 * value:.1f}" if value < 1e-2 else f"{1e3 * value:.0f}"


def _evaluations(row: dict[str, Any]) -> str:
    return f"{row['evaluations_median']:.0f}/{row['evaluations_max']:.0f}"


def _status(row: dict[str, Any]) -> str:
    counts: dict[str, int] = row["status"]
    if len(counts) == 1:
        return next(iter(counts))
    return "\n".join(f"{n} {name}" for name, n in counts.items() if name != "CONVERGED")


def _megabytes(row: dict[str, Any]) -> str:
    size = row.get("peak_memory_bytes")
    return MISSING if size is None else f"{size / 2**20:.1f}" if size < 10 * 2**20 else f"{size / 2**20:.0f}"


def _rate(task: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: _percent(row["tasks"][task]["retrieval_rate"])


COLUMNS = (
    Column(
        "evals\nmed/max",
        "evaluations of the map per query; the last one measures the residual of what is returned",
        _evaluations,
    ),
    Column(
        "resid.\nmax",
        "largest |f(z) - z| over the queries (where it is a finite number)",
        lambda r: _short(r["residual_max"]),
    ),
    Column("conv\n%", "queries whose residual reached the tolerance", lambda r: _percent(r["converged"])),
    Column("sad-\ndles", "converged where the energy curves downwards", lambda r: str(r["saddles"])),
    Column("pts", "distinct fixed points among the converged states", lambda r: str(r["distinct_fixed_points"])),
    Column(
        "retr.\nerror",
        "mean relative distance of the returned state from the stored pattern",
        lambda r: _short(r["retrieval_error_mean"]),
    ),
    Column("half\n%", "half-masked queries retrieved (relative error < 1e-2)", _rate("half-masked")),
    Column("noisy\n%", "noisy queries retrieved", _rate("noisy")),
    Column(
        "other\npoint",
        "converged, but to another fixed point than the float64 reference from the same query",
        lambda r: str(r["other_fixed_point"]),
    ),
    Column(
        "grad.\nerror",
        "relative error of the gradient for the patterns against float64 exact; other points count as errors",
        lambda r: _short(r.get("gradient_error")),
    ),
    Column("fwd\nms", "median time of the solve", lambda r: _milliseconds(r.get("forward_seconds"))),
    Column("bwd\nms", "median time of the gradient", lambda r: _milliseconds(r.get("backward_seconds"))),
    Column("peak\nMiB", "memory of both at once, beyond the inputs", _megabytes),
    Column("status", "with counts where the queries differ; the others are CONVERGED", _status),
)


def comparison_tables(comparison: Comparison, width: int) -> list[Table]:
    """The table of all methods, cut into as many as the width asks for."""
    from .compare import ATOL, MAX_STEPS, RTOL

    settings = comparison.settings
    title = (
        f"{_source(settings)}: {settings.patterns} patterns, {settings.queries} half-masked + {settings.queries} noisy "
        f"queries, beta {settings.beta:g}, anchor {settings.anchor:g}, {settings.dtype} on {settings.device}\n"
        f"one tolerance for all: |f(z) - z| <= {ATOL:g} + {RTOL:g} |f(z)|, at most {MAX_STEPS} steps"
        f"{_threads(comparison)}"
    )
    tables: list[Table] = []
    columns = list(COLUMNS)
    while columns:
        count = len(columns)
        while count > 1 and _width(_table(None, columns[:count], comparison.rows)) > width:
            count -= 1
        tables.append(_table(None if tables else title, columns[:count], comparison.rows))
        columns = columns[count:]
    return tables


def _width(table: Table) -> int:
    return Measurement.get(Console(width=1000), Console(width=1000).options, table).maximum


def _table(title: str | None, columns: list[Column], rows: list[dict[str, Any]]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("method", no_wrap=True)
    for column in columns:
        left = column.header == "status"
        table.add_column(column.header, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        table.add_row(row["method"], *(_cell(column, row) for column in columns))
    return table


def _cell(column: Column, row: dict[str, Any]) -> str:
    if "error" in row and "status" not in row:
        return "ERROR" if column.header == "status" else MISSING
    if "error" in row and column.header == "status":
        return f"{_status(row)}\nERROR"
    return column.text(row)


def retrieval_table(comparison: Comparison) -> Table:
    """Rates over the draws, a column for every beta, beside the reference where there is one."""
    with_reference = comparison.settings.has_reference
    entries = comparison.retrieval
    betas = sorted({e["beta"] for e in entries} - {None})
    table = Table(
        title=f"retrieval rate, mean +- std over {len(entries[0]['rates'])} draws",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    rates = [f"beta {beta:g}" for beta in betas]
    for header in ("queries", "state", *rates, *((f"reference, {rates[0]}", "verdict") if with_reference else ())):
        table.add_column(header, no_wrap=True)
    for task, state in dict.fromkeys((e["task"], e["state"]) for e in entries):
        # What has no beta is the same at each.
        row = [e for e in entries if (e["task"], e["state"]) == (task, state)]
        row = row * len(betas) if row[0]["beta"] is None else row
        cells = [task, state, *(f"{e['mean']:.3f} +- {e['std']:.3f}" for e in row)]
        if "reference_mean" in row[0]:
            first = row[0]
            verdict = "within 3 sd" if first["within_three"] else "NOT within 3 sd"
            reference = f"{first['reference_mean']:.3f} +- {first['reference_std']:.3f}"
            cells += [reference, f"{verdict} ({first['deviations']:+.1f})"]
        table.add_row(*cells)
    return table


def show(comparison: Comparison, console: Console, out: Path) -> None:
    """Print everything."""
    for table in comparison_tables(comparison, console.width):
        console.print(table)
        console.print()
    for line in notes(comparison):
        console.print(line, style="dim", markup=False)
    console.print()
    console.print(retrieval_table(comparison))
    console.print()
    written = "compare.json, convergence.png and retrieval.png"
    console.print(f"{written} written to {out} after {comparison.seconds:.1f} s", markup=False)


def notes(comparison: Comparison) -> list[str]:
    """What the columns mean, and what the reader must know of this run."""
    lines = [f"  {column.header.replace('-' + chr(10), '').replace(chr(10), ' ')}: {column.note}" for column in COLUMNS]
    lines.insert(
        0,
        f"  unrolled GD, n: n steps z - {STEP_SIZE} grad E, differentiated step by step; BUDGET: so many as asked",
    )
    for row in comparison.rows:
        if "error" in row:
            lines.append(f"  {row['method']} failed with {row['error']}: {row['message']}")
    if comparison.unusable:
        lines.append(
            f"  {comparison.unusable} of {comparison.settings.patterns} patterns hold NaN or infinity and are not "
            "stored; queries made from them are not retrieved, and times and gradients leave out the NaN ones"
        )
    if comparison.untrusted:
        lines.append(f"  {comparison.untrusted} queries left out of the gradient: no exact fixed point was found")
    return lines


def _threads(comparison: Comparison) -> str:
    count = comparison.threads
    return f"; {count} thread{'s' * (count > 1)}" if comparison.settings.device == "cpu" else ""


def _source(settings: Settings) -> str:
    return "scikit-learn's digits" if settings.data is None else printable(settings.data.name)
