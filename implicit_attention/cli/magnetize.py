"""`implicit-attention magnetize`: every method that holds for a spin system, side by side."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from typer import Argument, Option

from ..studies.errors import InputError, printable
from . import table
from .command import Command, Files, seed_option
from .table import (
    MISSING,
    Column,
    Row,
    cut_tables,
    exact_milliseconds,
    method_tables,
    short,
    six_digits,
    status,
    tenths,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ..spins import SpinSystem
    from ..studies.magnetization import Magnetization
    from .progress import Progress

#: Digits of a number in a list with one for every spin, so that a file of many spins stays small.
DIGITS = 8
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
#: What F and S are relative to, as systems that a program makes are usually relative to the other measure for D = 1.
MEASURES = {
    "counting": "F and S count states: two per spin. SpinSystem(...) of a program counts them with measure='counting' "
    "alone; else its F is higher by N log(2)/beta, and its S lower by N log 2",
    "uniform": "F and S are relative to the uniform measure, as those of SpinSystem(...): S <= 0, and 0 at beta = 0",
}


@dataclasses.dataclass(frozen=True)
class Magnetize(Command):
    """Ask every method for the free energy and the magnetizations of a spin system, side by side, with evidence.

    Free energy, energy, entropy, heat capacity, magnetizations; for asymmetric couplings magnetizations and entropy
    production of the synchronous dynamics. Without a file: Ising systems that are fitted to scikit-learn's digits, or,
    with --lattice, a square lattice.
    """

    name: ClassVar[str] = "magnetize"

    file: Annotated[
        Path | None,
        Argument(
            metavar="[FILE]",
            help="An .npz file with the arrays J, (N, N), (B, N, N) or (N, N, D, D); h, (N,), (N, D) or (B, N, D); "
            "beta, a number or (B,). E = -1/2 sum_ij s_i J_ij s_j - sum_i h_i s_i.",
        ),
    ] = None
    sweep: Annotated[
        str | None, Option(help="beta=LOW:HIGH:COUNT, draws the phase diagram; the file's beta is not used there.")
    ] = None
    drive: Annotated[
        Path | None,
        Option(
            help="An .npy or .npz file with fields (T, N, D), one for every step of synchronous dynamics from m = 0, "
            "asked of plefka-1 and gaussian-field; FILE's h is not used there.",
            show_default=False,
        ),
    ] = None
    radius: Annotated[str, Option(help="Length of a spin: sqrt_dim, bessel or a number.")] = "sqrt_dim"
    measure: Annotated[
        Literal["uniform", "counting"] | None,
        Option(help="Uniform, or counting of states, which is usual for D = 1.", show_default=False),
    ] = None
    methods: Annotated[str | None, Option(help="Comma-separated names, such as bethe,adatap; else all that apply.")] = (
        None
    )
    dtype: Annotated[Literal["float64", "float32"], Option(help="Type of all numbers.")] = "float64"
    seed: Annotated[int, seed_option("the samples")] = 0
    out: Annotated[Path, Option(help="Folder for thermodynamics.json and the pictures.")] = Path("magnetize")
    quick: Annotated[bool, Option("--quick", help="Fewer samples and repeats.")] = False
    lattice: Annotated[
        bool,
        Option(
            "--lattice",
            help="Instead: Ising spins on a square lattice against temperature, Onsager's exact magnetization beside "
            "mean-field, bethe and heat-bath.",
        ),
    ] = False
    size: Annotated[
        int, Option(min=3, help="Sites along an edge of --lattice; 64 take half a minute, 1000 an hour.")
    ] = 64

    @property
    def modules(self) -> tuple[str, ...]:
        return ("matplotlib", "sklearn") if self.file is None and not self.lattice else ("matplotlib",)

    @property
    def source(self) -> str:
        return "Ising systems fitted to scikit-learn's digits" if self.file is None else self.file.name

    @property
    def lattice_title(self) -> str:
        return f"Magnetization of Ising spins on a square lattice, {self.size} x {self.size}"

    @property
    def max_seconds(self) -> float:
        """After this time no further timed run of a method begins."""
        return 0.1 if self.quick else 1.0

    @property
    def chosen(self) -> list[str] | None:
        """The names that `--methods` lists, or None for all."""
        return None if self.methods is None else [name.strip() for name in self.methods.split(",")]

    def check(self) -> None:
        from ..studies.spin_methods import DRIVEN, ENTRIES
        from .files import load_fields, parse_radius, parse_sweep

        if self.sweep is not None:
            parse_sweep(self.sweep)
        parse_radius(self.radius)
        if not self.lattice and self.size != Magnetize.size:
            raise InputError(f"`--size` must come with --lattice, got {self.size}; add it, or leave the size out")
        for option, given in (("FILE", self.file), ("--sweep", self.sweep), ("--methods", self.methods)):
            if self.lattice and given is not None:
                raise InputError(f"`--lattice` must come without {option}, got {str(given)!r}; leave one of them out")
        names = [entry.name for entry in ENTRIES]
        for name in self.chosen or []:
            if name not in names:
                raise InputError(f"`--methods` must list some of {', '.join(names)}, got {name!r}; try bethe")
        if self.drive is not None and self.chosen is not None and not set(self.chosen) & set(DRIVEN):
            required = f"list {' or '.join(DRIVEN)} beside --drive"
            raise InputError(f"`--methods` must {required}, got {self.methods!r}; add one, or leave it out")
        if self.file is not None:
            if self.drive is not None:
                load_fields(self.drive, self.system)
            _ = self.system
            return
        for option, value, usual in (
            ("radius", self.radius, "sqrt_dim"),
            ("measure", self.measure, None),
            ("drive", self.drive and str(self.drive), None),
        ):
            if value != usual:
                raise InputError(f"`--{option}` must come with a FILE, got {value!r}; the digits are Ising spins")

    @functools.cached_property
    def system(self) -> SpinSystem:
        """The system in the file."""
        from ..studies.magnetization import not_finite
        from .files import load_system

        assert self.file is not None
        system = load_system(self.file, radius=self.radius, measure=self.measure, dtype=self.dtype)
        names, lost = not_finite(system)
        if names and bool(lost.all()):
            where = f"{names} of every system" if lost.ndim else names
            raise InputError(
                f"`FILE` {self.file.name} must hold finite numbers, got NaN or infinity in {where}; check the program "
                "that wrote it"
            )
        return system

    def line(self, row: Row) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in row["status"].items())
        return f"{counts}, {exact_milliseconds(row['seconds'])} ms"

    def run(self, progress: Progress) -> Any:
        """Ask all methods that hold for the system."""
        import torch

        from ..studies import digits, lattice, spin_methods
        from ..studies.magnetization import ask
        from .files import load_fields, parse_sweep

        if self.lattice:
            return lattice.magnetizations(self.size, progress, seed=self.seed, quick=self.quick)
        images = None
        if self.file is None:
            progress.begin("fitting the digits")
            images = digits.load(seed=self.seed, dtype=getattr(torch, self.dtype))
        system = self.system if images is None else images.system
        equilibrium = spin_methods.in_equilibrium(system)
        entries, chosen = spin_methods.ENTRIES, self.chosen
        usual = [entry.name for entry in entries if (entry.equilibrium if equilibrium else entry.dynamics)]
        driven = [name for name in spin_methods.DRIVEN if chosen is None or name in chosen]
        return ask(
            system,
            [entry for entry in entries if entry.name in (usual if chosen is None else chosen)],
            progress,
            images=images,
            betas=None if self.sweep is None else parse_sweep(self.sweep).to(system.field.dtype),
            driven=[entry for entry in entries if entry.name in driven],
            fields=None if self.drive is None else load_fields(self.drive, system),
            max_seconds=self.max_seconds,
            seed=self.seed,
            quick=self.quick,
        )

    def files(self, result: Any) -> Files:
        """Build the report: all results, and their figures."""
        import torch

        from ..studies import lattice
        from ..studies.magnetization_figures import figures
        from .report import options_of

        if self.lattice:
            settings = {"size": self.size, "seed": self.seed, "quick": self.quick, "field": lattice.FIELD}
            content = {"settings": settings, "rows": result}
            return "lattice.json", content, {"lattice.png": lattice.figure(result, self.lattice_title)}
        system, drive = result.system, "" if self.drive is None else self.drive.name
        content = {
            "settings": options_of(self, "file", "drive")
            | {
                "source": self.source,
                "sites": system.num_sites,
                "dimensions": system.dim,
                "batch": system.batch,
                "radius": system.radius,
                "measure": system.measure,
                "beta": torch.as_tensor(system.beta, dtype=torch.float64),
                "equilibrium": result.equilibrium,
            },
            "rows": [_with_magnetization(row, result) for row in result.rows],
            "reference": result.reference,
            "refused": result.refused,
        }
        if result.betas is not None:
            content["sweep"] = {"beta": result.betas, "rows": result.sweep}
        if drive:
            content["drive"] = {"source": drive, "rows": result.driven}
        if result.digits is not None and result.completions is not None:
            tried = {"completed": len(result.completions.truth), "completions": result.completions.rows}
            content["digits"] = result.digits.summary | tried
        return "thermodynamics.json", content, figures(result, self.source, drive)

    def show(self, result: Any, console: Console) -> None:
        """Print the numbers of all methods, and what is to be known of them."""
        import torch

        from ..studies.lattice import NOTES

        if self.lattice:
            cells = [[f"{row['beta']:.2f}", *(f"{row[name]:.4f}" for name in list(row)[1:])] for row in result]
            tables = cut_tables(self.lattice_title, list(result[0]), cells, console.width)
            return table.show(console, tables, [*NOTES])
        system, samples = result.system, result.system.batch.numel()
        beta = torch.as_tensor(system.beta, dtype=torch.float64).flatten()
        betas = f"beta {float(beta.min()):g}" + (f" to {float(beta.max()):g}" if beta.min() < beta.max() else "")
        title = (
            f"{self.source}: {f'{samples} systems of ' if samples != 1 else ''}{system.num_sites} spins "
            f"in {system.dim} dimension{'s' * (system.dim > 1)}, R = {system.radius:g}, {betas}, "
            + (f"{system.measure} measure" if result.equilibrium else "asymmetric couplings, synchronous dynamics")
            + f", {self.dtype}"
        )
        columns = magnetization_columns(result.rows, result.reference)
        notes = table.meanings(columns)
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
        notes += table.failures(result.rows)
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
        # One line each; the file has the remedies as well.
        refused = [f"{name} does not apply: {reason.split('; ')[0]}" for name, reason in result.refused.items()]
        table.show(console, method_tables(title, columns, result.rows, console.width), notes, refused)
        if result.driven:
            self._show_driven(result, console)

    def _show_driven(self, result: Magnetization, console: Console) -> None:
        """Print the steps of every method that was driven: means over samples that have the number."""
        import torch

        assert self.drive is not None
        source, tables, notes = printable(self.drive.name), [], table.meanings(DRIVEN)
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
        table.show(console, tables, list(dict.fromkeys(notes)))


def _with_magnetization(row: dict[str, Any], result: Magnetization) -> dict[str, Any]:
    m = result.magnetizations.get(row["method"])
    numbers = row if m is None else row | {"magnetization": m.tolist()}
    long = ("magnetization", "magnetization_error")
    return numbers | {name: _rounded(numbers[name]) for name in long if name in numbers}


def _rounded(value: Any) -> Any:
    return [_rounded(item) for item in value] if isinstance(value, list) else float(f"{value:.{DIGITS}g}")


def magnetization_columns(rows: list[Row], reference: str | None) -> list[Column]:
    """Those in which some method has something to say."""
    kept = [c for c in MAGNETIZATION if c.header == "status" or any(c.text(row) != MISSING for row in rows)]
    return [column._replace(note=column.note.format(reference=reference)) for column in kept]
