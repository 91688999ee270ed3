"""The tables in the terminal when a command is done: their columns, and what these mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from .contenders import STEP_SIZE, STOP
from .errors import printable
from .potentials import inverse_temperature
from .retrieval import EQUILIBRIUM, NEAREST, Rates, best, betas_of, of, summary

if TYPE_CHECKING:
    from .compare import Comparison
    from .magnetize import Magnetization

MISSING = "-"
#: Columns that say what a row is, and all that hold words.
ROW_NAMES = ("method", "queries", "state", "step")
WORDS = ("method", "queries", "state", "status")
Row = dict[str, Any]


class Column(NamedTuple):
    """A column of a table with a row for every method.

    Attributes:
        header: above it.
        note: its meaning in one line.
        key: of the number in a row, parts of nested rows separated by slashes; "" is the row itself.
        form: the text of the number.
        averaged: whether the number is a list with one for every sample, of which the mean is shown.
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
    """The mean of a number over the samples that all rows are averaged over."""
    if row.get(key) is None:
        return None
    values = torch.tensor(row[key], dtype=torch.float64).flatten()
    failed, averaged = (
        torch.tensor(row.get(name, usual)).flatten().expand(values.shape)
        for name, usual in (("failed", False), ("averaged", True))
    )
    values = values[averaged & ~failed & values.isfinite()]
    return float(values.mean()) if len(values) else None


def short(value: float) -> str:
    """Two digits in at most six characters."""
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
    """The one status of all problems, or the counts of those beside CONVERGED."""
    counts: dict[str, int] = row["status"]
    lines = list(counts) if len(counts) == 1 else [f"{n} {name}" for name, n in counts.items() if name != "CONVERGED"]
    # A solve that converged, and a derivative of it that did not.
    lost = sum(n for name, n in counts.items() if name not in ("CONVERGED", "UNSTABLE", "EXACT", "SAMPLED"))
    unsure = int(torch.tensor(row.get("failed", False)).sum())
    return "\n".join([*lines, *([f"{unsure - lost} RESPONSE"] if unsure > lost else [])])


RETRIEVED = "tasks/{}/retrieval_rate".format
COMPARISON = (
    Column("evals\nmed/max", "evaluations of the map per query; the last one measures the residual", "", evaluations),
    Column("resid.\nmax", "largest |f(z) - z| over the queries (where it is a finite number)", "residual_max", short),
    Column("conv\n%", "queries whose residual reached the tolerance", "converged", percent),
    Column("sad-\ndles", "converged where the energy curves downwards", "saddles", str),
    Column("pts", "distinct fixed points among the converged states", "distinct_fixed_points", str),
    Column("retr.\nerror", "mean relative distance of the state from the pattern", "retrieval_error_mean", short),
    Column(
        "half\n%",
        "half-masked queries retrieved (relative error < 1e-2), at this beta",
        RETRIEVED("half-masked"),
        percent,
    ),
    Column("noisy\n%", "noisy queries retrieved", RETRIEVED("noisy"), percent),
    Column("other\npoint", "converged, but not to the fixed point of the float64 reference", "other_fixed_point", str),
    Column("grad.\nerror", "relative error against float64; other points count as errors", "gradient_error", short),
    Column("fwd\nms", "median time of the solve", "forward_seconds", milliseconds),
    Column("bwd\nms", "median time of the gradient", "backward_seconds", milliseconds),
    Column("peak\nMiB", "memory of both at once, beyond the inputs", "peak_memory_bytes", mebibytes),
    Column("status", "with counts where the queries differ; the others are CONVERGED", "", status),
)
STATE_NOTES = {
    EQUILIBRIUM: "of every solver that converges; here Anderson's",
    NEAREST[-1]: "is told which entries were masked, as no other method is; noisy queries have none",
}
MAGNETIZATION = (
    Column("F", "free energy, relative to the measure", "free_energy", six_digits, averaged=True),
    Column("U", "internal energy", "internal_energy", six_digits, averaged=True),
    Column("S", "entropy", "entropy", six_digits, averaged=True),
    Column("C", "heat capacity", "heat_capacity", six_digits, averaged=True),
    Column("sigma", "entropy production per synchronous step", "entropy_production", six_digits, averaged=True),
    Column("|m|", "mean over sites of |m_i|/R", "mean_length", six_digits, averaged=True),
    Column("|dm|", "root mean square distance of m/R from {reference}'s", "distance", short, averaged=True),
    Column("named\n%", "held-out images whose own digit has the largest log p = -E - log Z", "named", tenths),
    Column("lower\n%", "pixels of lower halves that are right, given the upper halves", "completed", tenths),
    Column("steps\nmax", "of the solver", "steps_max", str),
    Column("resid.\nmax", "largest residual", "residual_max", short),
    Column("time\nms", "of all these derivatives of F together, once", "seconds", exact_milliseconds),
    Column("status", "with counts where samples differ; the others are CONVERGED", "", status),
)
DRIVEN = (
    Column("sigma", "entropy production per synchronous step", "entropy_production", six_digits),
    Column("housek.", "its part that keeps spins out of equilibrium", "housekeeping", six_digits),
    Column("change", "its part on the way to the stationary state of the momentary field", "field_change", six_digits),
    Column("mismatch", "relative entropy of the state to that state", "mismatch", six_digits),
    Column("relax.", "steps in which a small deviation from that state falls by 1/e", "relaxation_time", six_digits),
    Column("|m|", "mean over sites of |m_i|/R", "mean_length", six_digits),
)
#: Steps of a driven path that are shown.
SHOWN_STEPS = 24


def magnetization_columns(rows: list[Row], reference: str | None) -> list[Column]:
    """Those in which some method has something to say."""
    kept = [c for c in MAGNETIZATION if c.header == "status" or any(c.text(row) != MISSING for row in rows)]
    return [column._replace(note=column.note.format(reference=reference)) for column in kept]


def compare_line(row: Row) -> str:
    """Return the line that is printed when a solver has finished."""
    seconds = milliseconds(row["forward_seconds"]) if "forward_seconds" in row else MISSING
    residual = MISSING if row["residual_max"] is None else short(row["residual_max"])
    return f"{evaluations(row)} evaluations, residual {residual}, {percent(row['converged'])} % converged, {seconds} ms"


def magnetize_line(row: Row) -> str:
    """Return the line that is printed when a method has finished."""
    counts = ", ".join(f"{count} {name}" for name, count in row["status"].items())
    return f"{counts}, {exact_milliseconds(row['seconds'])} ms"


def plain_table(title: str | None, headers: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table without frame: words are aligned at the left, numbers at the right."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for header in headers:
        table.add_column(header, justify="left" if header in WORDS else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def cut_tables(title: str | None, headers: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[Table]:
    """A table cut into as many as the width asks for; columns that say what the row is stand in each of them."""
    wide = Console(width=1000)
    fixed = [index for index, header in enumerate(headers) if header in ROW_NAMES]
    rest = [index for index in range(len(headers)) if index not in fixed]

    def made(columns: Sequence[int], heading: str | None = None) -> Table:
        chosen = [*fixed, *columns]
        return plain_table(heading, [headers[i] for i in chosen], [[row[i] for i in chosen] for row in rows])

    tables: list[Table] = []
    while rest:
        fitting = (
            n for n in range(1, len(rest) + 1) if Measurement.get(wide, wide.options, made(rest[:n])).maximum <= width
        )
        count = max(fitting, default=1)
        tables.append(made(rest[:count], None if tables else title))
        rest = rest[count:]
    return tables


def method_tables(title: str | None, columns: Sequence[Column], rows: list[Row], width: int) -> list[Table]:
    """A row for every method, cut into as many tables as the width asks for."""
    cells = [[row["method"], *(column.text(row) for column in columns)] for row in rows]
    return cut_tables(title, ["method", *(column.header for column in columns)], cells, width)


def comparison_tables(comparison: Comparison, width: int) -> list[Table]:
    """The table of all solvers, cut into as many as the width asks for."""
    settings = comparison.settings
    source = "scikit-learn's digits" if settings.data is None else printable(settings.data.name)
    threads = f"; {comparison.threads} thread{'s' * (comparison.threads > 1)}" if settings.device == "cpu" else ""
    if threads and comparison.native:
        threads += f", native {comparison.native}"
    title = (
        f"{source}: {settings.stored} patterns, {settings.queries} half-masked + {settings.queries} noisy "
        f"queries, beta {inverse_temperature(settings):g}, anchor {settings.anchor:g}, {settings.dtype} "
        f"on {settings.device}\n"
        f"{settings.other_potential}one tolerance for all: |f(z) - z| <= {STOP['atol']:g} + {STOP['rtol']:g} |f(z)|, "
        f"at most {STOP['max_steps']} steps{threads}"
    )
    return method_tables(title, COMPARISON, comparison.rows, width)


def retrieval_tables(entries: Rates, width: int) -> list[Table]:
    """Rates of every method at every beta and at its own best one, cut into as many tables as the width asks for."""
    betas = betas_of(entries)
    rows = []
    for task, state in dict.fromkeys((e["task"], e["state"]) for e in entries):
        rates = {e["beta"]: f"{e['mean']:.3f}".removeprefix("0") for e in of(entries, task, state)}
        top = best(entries, task, state)
        own = MISSING if top["beta"] is None else f"{top['beta']:.3g}"
        rows.append([task, state, f"{top['mean']:.3f} +- {top['std']:.3f}", own, *(rates.get(b, "") for b in betas)])
    headers = ["queries", "state", "best +- std", "at beta", *(f"{beta:.3g}" for beta in betas)]
    title = f"retrieval rate over {len(entries[0]['rates'])} draws: best, and at each beta"
    return cut_tables(title, headers, rows, width)


def retrieval_notes(entries: Rates) -> list[str]:
    """Return the notes on the table of rates."""
    names = dict.fromkeys(e["state"] for e in entries)
    notes = [f"{name}: {STATE_NOTES[name]}" for name in names if name in STATE_NOTES]
    for e in entries:
        if "reference_mean" in e:
            measured = f"{e['state']}, {e['task']}, beta {e['beta']:g}: {e['mean']:.3f}"
            expected = f"{e['reference_mean']:.3f} +- {e['reference_std']:.3f} measured independently"
            within = "within 3 sd" if e["within_three"] else "NOT within 3 sd"
            notes.append(f"{measured}, {expected}: {within} ({e['deviations']:+.1f})")
    return notes


def show_comparison(comparison: Comparison, console: Console) -> None:
    """Print everything that `compare` measured."""
    descent = f"unrolled GD, n: n steps z - {STEP_SIZE} grad E, differentiated step by step; BUDGET: so many as asked"
    notes = [descent, *_meanings(COMPARISON), *_failures(comparison.rows)]
    if comparison.auto:
        beta = inverse_temperature(comparison.settings)
        notes.append(
            f"beta {beta:.4g} is auto: from the similarities of the stored patterns, as MemoryLookup finds it, so that "
            "rates do not depend on the unit of the data; --beta sets another"
        )
    if comparison.unusable:
        notes.append(
            f"{comparison.unusable} of {comparison.settings.stored} patterns hold NaN or infinity and are not "
            "stored; queries made from them are not retrieved, and times and gradients leave out the NaN ones"
        )
    if comparison.untrusted:
        notes.append(f"{comparison.untrusted} queries left out of the gradient: no exact fixed point was found")
    _show(console, comparison_tables(comparison, console.width), notes)
    entries, beta = comparison.retrieval, inverse_temperature(comparison.settings)
    _show(console, retrieval_tables(entries, console.width), retrieval_notes(entries))
    console.print(summary(entries, beta), style="bold", markup=False)
    console.print()


#: What F and S are relative to, as systems that a program makes are usually relative to the other measure for D = 1.
MEASURES = {
    "counting": "F and S count states: two per spin. SpinSystem(...) of a program counts them with measure='counting' "
    "alone; else its F is higher by N log(2)/beta, and its S lower by N log 2",
    "uniform": "F and S are relative to the uniform measure, as those of SpinSystem(...): S <= 0, and 0 at beta = 0",
}


def show_magnetization(result: Magnetization, console: Console) -> None:
    """Print everything that `magnetize` found."""
    system, samples = result.system, result.system.batch.numel()
    beta = torch.as_tensor(system.beta, dtype=torch.float64).flatten()
    betas = f"beta {float(beta.min()):g}" + (f" to {float(beta.max()):g}" if beta.min() < beta.max() else "")
    title = (
        f"{result.settings.source}: {f'{samples} systems of ' if samples != 1 else ''}{system.num_sites} spins "
        f"in {system.dim} dimension{'s' * (system.dim > 1)}, R = {system.radius:g}, {betas}, "
        + (f"{system.measure} measure" if result.equilibrium else "asymmetric couplings, synchronous dynamics")
        + f", {result.settings.dtype}"
    )
    columns = magnetization_columns(result.rows, result.reference)
    notes = _meanings(columns)
    if result.unreadable:
        notes.append(result.unreadable)
    if result.equilibrium:
        notes.append(MEASURES[system.measure])
    if samples > 1:
        averaged = next(
            (sum(torch.tensor(row["averaged"]).flatten().tolist()) for row in result.rows if "averaged" in row), 0
        )
        notes.append(
            f"numbers are means over the {averaged} of {samples} samples to which all methods have an answer; "
            "thermodynamics.json has every sample"
        )
    if result.completions is not None:
        plain = result.completions.rows[0]
        notes.append(f"lower %, without any physics: {tenths(plain['right'])} by the {plain['method']}")
    notes += _failures(result.rows)
    for row in result.rows:
        # So few, and the chains have hardly left where they were after the burn-in.
        fewest = min(torch.tensor(row.get("effective_samples", math.inf)).flatten().tolist(), default=math.inf)
        if fewest < 2 * row.get("chains", 0):
            notes.append(f"{row['method']} is not to be trusted: its {row['chains']} chains hardly moved")
    for row in result.sweep:
        failed = torch.tensor(row.get("failed", False)).flatten()
        if "error" in row:
            notes.append(f"{row['method']} is not in the sweep: {row['message']}")
        elif bool(failed.any()):
            missing = f"{int(failed.sum())} of {len(failed)} points of the sweep"
            notes.append(f"{row['method']} has no answer at {missing}, crosses there")
    # One line each; what to use instead stands in the table, and all of it in the file.
    refused = [f"{name} does not apply: {reason.split('; ')[0]}" for name, reason in result.refused.items()]
    _show(console, method_tables(title, columns, result.rows, console.width), notes, refused)
    if result.driven:
        _show_driven(result, console)


def _show_driven(result: Magnetization, console: Console) -> None:
    """Print the steps of every method that was driven: means over samples that have the number."""
    assert result.settings.drive is not None
    source, tables, notes = printable(result.settings.drive.name), [], _meanings(DRIVEN)
    for row in result.driven:
        if "error" in row:
            notes.append(f"{row['method']} is not driven: {row['message']}")
            continue
        steps = len(row["entropy_production"])
        shown = range(0, steps, -(-steps // SHOWN_STEPS))
        if len(shown) < steps:
            notes.append(f"{len(shown)} of {steps} steps are shown; thermodynamics.json has all")
        cells = []
        for step in shown:
            values = (torch.tensor(row[c.key][step], dtype=torch.float64).flatten() for c in DRIVEN)
            means = [float(known.mean()) if len(known := value[~value.isnan()]) else None for value in values]
            texts = (MISSING if v is None else c.form(v) for c, v in zip(DRIVEN, means, strict=True))
            cells.append([str(step + 1), *texts])
        headers = ["step", *(column.header for column in DRIVEN)]
        title = f"{row['method']} in the {steps} fields of {source}, from m = 0; stationary states: {status(row)}"
        tables += cut_tables(" ".join(title.split()), headers, cells, console.width)
    _show(console, tables, list(dict.fromkeys(notes)))


def _meanings(columns: Iterable[Column]) -> list[str]:
    return [f"{c.header.replace('-' + chr(10), '').replace(chr(10), ' ')}: {c.note}" for c in columns]


def _failures(rows: list[Row]) -> list[str]:
    return [f"{row['method']} failed with {row['error']}: {row['message']}" for row in rows if "error" in row]


def _show(console: Console, tables: list[Table], notes: list[str], cut: Sequence[str] = ()) -> None:
    """Print tables and the notes on them; lines of `cut` that are too long end with dots."""
    for table in tables:
        console.print(table)
        console.print()
    for line in notes:
        console.print(f"  {line}", style="dim", markup=False)
    for line in cut:
        console.print(f"  {line}", style="dim", markup=False, no_wrap=True, overflow="ellipsis")
    console.print()
