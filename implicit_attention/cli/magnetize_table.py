"""What the terminal shows while `magnetize` runs and when it is done."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .digits import DATA
from .magnetize import Magnetization
from .table import MISSING, Column, Progress, _short, _status, _table, _width


class SpinProgress(Progress):
    """A line per finished method on stderr, and a bar below them where stderr is a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(total=1, console=console)
        self.bar.update(self.task, total=None)
        self.name = ""

    def update(self, name: str, row: dict[str, Any] | None) -> None:
        if row is None:
            self.name = name
            self.bar.update(self.task, description=name, completed=0, total=None)
            return
        self.console.print(f"{name:<20} {_line(row)}", markup=False)

    def part(self, done: int, total: int) -> None:
        self.bar.update(self.task, completed=done, total=total)


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"failed: {row['error']}: {row['message']}"
    counts = ", ".join(f"{count} {name}" for name, count in row["status"].items())
    return f"{counts}, {_milliseconds(row)} ms"


def answered(row: dict[str, Any], name: str) -> float | None:
    """The mean of a quantity over the samples that all rows are averaged over."""
    if row.get(name) is None:
        return None
    values = torch.tensor(row[name], dtype=torch.float64).flatten()
    failed = torch.tensor(row.get("failed", False)).flatten().expand(values.shape)
    compared = torch.tensor(row.get("averaged", True)).flatten().expand(values.shape)
    values = values[compared & ~failed & values.isfinite()]
    return float(values.mean()) if len(values) else None


def _number(name: str) -> Any:
    def text(row: dict[str, Any]) -> str:
        value = answered(row, name)
        return MISSING if value is None else f"{value:.6g}"

    return text


def _milliseconds(row: dict[str, Any]) -> str:
    seconds = row.get("seconds")
    return MISSING if seconds is None else f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def _percent(name: str) -> Any:
    def text(row: dict[str, Any]) -> str:
        return MISSING if row.get(name) is None else f"{100 * row[name]:.1f}"

    return text


def _maximum(name: str) -> Any:
    def text(row: dict[str, Any]) -> str:
        return MISSING if row.get(name) is None else str(row[name])

    return text


def _verdict(row: dict[str, Any]) -> str:
    unsure = sum(torch.tensor(row.get("failed", False)).flatten().tolist())
    solved = sum(
        count for name, count in row["status"].items() if name in ("CONVERGED", "UNSTABLE", "EXACT", "SAMPLED")
    )
    total = sum(row["status"].values())
    # A solve that converged, and a derivative of it that did not.
    return _status(row) + ("\n" + f"{unsure - (total - solved)} RESPONSE" if unsure > total - solved else "")


COLUMNS = (
    Column("F", "free energy, relative to the measure", _number("free_energy")),
    Column("U", "internal energy", _number("internal_energy")),
    Column("S", "entropy", _number("entropy")),
    Column("C", "heat capacity", _number("heat_capacity")),
    Column("sigma", "entropy production per step of the synchronous dynamics", _number("entropy_production")),
    Column("|m|", "mean over sites of |m_i|/R", _number("mean_length")),
    Column("|dm|", "", lambda row: _short(answered(row, "distance"))),
    Column("named\n%", "held-out images whose own digit has the largest log p = -E - log Z", _percent("named")),
    Column("lower\n%", "pixels of lower halves that are right, given the upper halves", _percent("completed")),
    Column("steps\nmax", "of the solver", _maximum("steps_max")),
    Column("resid.\nmax", "largest residual", lambda row: _short(row.get("residual_max"))),
    Column("time\nms", "of all these derivatives of F together, once", _milliseconds),
    Column("status", "with counts where samples differ; the others are CONVERGED", _verdict),
)


def columns_of(result: Magnetization) -> list[Column]:
    """Those in which some method has something to say."""
    kept = [c for c in COLUMNS if c.header == "status" or any(_text(c, row) != MISSING for row in result.rows)]
    note = f"root mean square distance of m/R from {result.reference}'s"
    return [c._replace(note=note) if c.header == "|dm|" else c for c in kept]


def _text(column: Column, row: dict[str, Any]) -> str:
    return MISSING if "error" in row else column.text(row)


def tables(result: Magnetization, width: int) -> list[Table]:
    """The table of all methods, cut into as many as the width asks for."""
    system = result.system
    samples = system.batch.numel()
    beta = torch.as_tensor(system.beta, dtype=torch.float64).flatten()
    betas = f"beta {float(beta.min()):g}" + (f" to {float(beta.max()):g}" if beta.min() < beta.max() else "")
    kind = f"{samples} systems of " if samples != 1 else ""
    title = (
        f"{result.settings.source}: {kind}{system.num_sites} spins in {system.dim} dimension{'s' * (system.dim > 1)}, "
        f"R = {system.radius:g}, {betas}, "
        + (f"{system.measure} measure" if result.equilibrium else "asymmetric couplings, synchronous dynamics")
        + f", {result.settings.dtype}"
    )
    found: list[Table] = []
    columns = columns_of(result)
    while columns:
        count = len(columns)
        while count > 1 and _width(_table(None, columns[:count], result.rows)) > width:
            count -= 1
        found.append(_table(None if found else title, columns[:count], result.rows))
        columns = columns[count:]
    return found


def show(result: Magnetization, console: Console, out: Path, written: list[str]) -> None:
    """Print everything."""
    for table in tables(result, console.width):
        console.print(table)
        console.print()
    for line in notes(result):
        console.print(line, style="dim", markup=False)
    for name, reason in result.refused.items():
        # One line each; what to use instead stands in the table, and all of it in the file.
        line = f"  {name} does not apply: {reason.split('; ')[0]}"
        console.print(line, style="dim", markup=False, no_wrap=True, overflow="ellipsis")
    console.print()
    files = f"{', '.join(written[:-1])} and {written[-1]}"
    console.print(f"{files} written to {out} after {result.seconds:.1f} s", markup=False)


def notes(result: Magnetization) -> list[str]:
    """What the columns mean, and what the reader must know of this run."""
    lines = [f"  {c.header.replace(chr(10), ' ')}: {c.note}" for c in columns_of(result)]
    if result.system.batch.numel() > 1:
        averaged = next((torch.tensor(row["averaged"]) for row in result.rows if "averaged" in row), torch.zeros(0))
        which = (
            f"the {int(averaged.sum())} of {result.system.batch.numel()} samples to which all methods have an answer"
        )
        lines.append(f"  numbers are means over {which}; thermodynamics.json has every sample")
    if result.completions is not None:
        rates = {row["method"]: row["right"] for row in result.completions.rows}
        lines.append(f"  lower %, without any physics: {100 * rates[DATA]:.1f} by the {DATA}")
    for row in result.rows:
        if "error" in row:
            lines.append(f"  {row['method']} failed with {row['error']}: {row['message']}")
        # So few, and the chains have hardly left where they were after the burn-in.
        fewest = min(torch.tensor(row.get("effective_samples", [math.inf])).flatten().tolist(), default=math.inf)
        if fewest < 2 * row.get("chains", 0):
            lines.append(f"  {row['method']} is not to be trusted: its {row['chains']} chains hardly moved")
    lines += [line for row in result.sweep if (line := _gap(row, result))]
    return lines


def _gap(row: dict[str, Any], result: Magnetization) -> str | None:
    """What the phase diagram leaves out of a method."""
    if "error" in row:
        return f"  {row['method']} is not in the sweep: {row['message']}"
    failed = torch.tensor(row["failed"]).flatten()
    if not bool(failed.any()):
        return None
    return f"  {row['method']} has no answer at {int(failed.sum())} of {len(failed)} points of the sweep, crosses there"
