"""`implicit-attention magnetize`: every method that holds for a spin system, side by side."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from torch import Tensor

from . import spin_methods as methods
from .compare import _writable
from .errors import InputError, require_modules
from .spin_file import Sweep, load_system, parse_radius, parse_sweep
from .spin_methods import CHAIN, REFERENCES, SAMPLER, SYNCHRONOUS, Entry

if TYPE_CHECKING:
    from ..spins import SpinSystem
    from .digits import Completions, Digits

DTYPES = {"float64": torch.float64, "float32": torch.float32}
BUILT_IN = "Ising systems fitted to scikit-learn's digits"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of the command; `check` looks at all that do not need the file."""

    file: Path | None = None
    sweep: str | None = None
    radius: str = "sqrt_dim"
    measure: str | None = None
    methods: str | None = None
    dtype: str = "float64"
    seed: int = 0
    quick: bool = False

    @property
    def source(self) -> str:
        return BUILT_IN if self.file is None else self.file.name

    @property
    def max_seconds(self) -> float:
        """No further timed run of a method is begun after so long."""
        return 0.1 if self.quick else 1.0

    @property
    def chosen(self) -> list[str] | None:
        """The names that `--methods` lists, or None for all."""
        return None if self.methods is None else [name.strip() for name in self.methods.split(",")]

    def points(self) -> Sweep | None:
        return None if self.sweep is None else parse_sweep(self.sweep)

    def check(self) -> None:
        """Raise `InputError` for the first option that cannot be used."""
        self.points()
        parse_radius(self.radius)
        if self.measure not in (None, "uniform", "counting"):
            raise InputError(
                f"`--measure` must be uniform or counting, got {self.measure!r}; leave it out for the usual"
            )
        if self.dtype not in DTYPES:
            raise InputError(f"`--dtype` must be one of {', '.join(DTYPES)}, got {self.dtype!r}; try float64")
        if not 0 <= self.seed < 2**63 - 1:
            raise InputError(f"`--seed` must be in [0, 2^63 - 1), got {self.seed}; try 0")
        for name in self.chosen or []:
            if name not in methods.names():
                raise InputError(f"`--methods` must list some of {', '.join(methods.names())}, got {name!r}; try bethe")
        if self.file is None:
            for option, value, usual in (("radius", self.radius, "sqrt_dim"), ("measure", self.measure, None)):
                if value != usual:
                    raise InputError(f"`--{option}` must come with a FILE, got {value!r}; the digits are Ising spins")

    def load(self) -> SpinSystem:
        if self.file is None:
            raise ValueError("the built-in case has no file")
        measure = cast('Literal["uniform", "counting"] | None', self.measure)
        return load_system(self.file, radius=parse_radius(self.radius), measure=measure, dtype=DTYPES[self.dtype])


class Progress(Protocol):
    """What is told while the command runs."""

    def update(self, name: str, row: dict[str, Any] | None) -> None:
        """`name` begins (row None), or has ended with this row."""

    def part(self, done: int, total: int) -> None:
        """So much of what has begun is done."""


@dataclasses.dataclass(frozen=True)
class Magnetization:
    """Everything that `magnetize` found.

    rows: of every method, plain numbers. magnetizations: (*batch, N, D) by method, NaN for samples without an answer.
    refused: why a method does not hold. sweep: rows against beta. samples: of the heat bath, if it ran.
    """

    settings: Settings
    system: SpinSystem
    equilibrium: bool
    rows: list[dict[str, Any]]
    magnetizations: dict[str, Tensor]
    refused: dict[str, str]
    sweep: list[dict[str, Any]]
    betas: Tensor | None
    samples: Any
    digits: Digits | None
    completions: Completions | None
    seconds: float

    @property
    def reference(self) -> str | None:
        """The method that the others' magnetizations are compared with."""
        return next((name for name in REFERENCES if name in self.magnetizations), None)


def magnetize(settings: Settings, progress: Progress) -> Magnetization:
    """Run all methods that hold for the system."""
    begin = time.perf_counter()
    digits, system = None, None
    if settings.file is None:
        from .digits import load

        progress.update("fitting the digits", None)
        digits = load(seed=settings.seed, dtype=DTYPES[settings.dtype])
        system = digits.system
    else:
        system = settings.load()
    methods.warm_up(system)
    equilibrium = methods.in_equilibrium(system)
    entries, refused = methods.applicable(_chosen(settings, equilibrium), system)
    rows: list[dict[str, Any]] = []
    found: dict[str, Tensor] = {}

    def add(name: str, answer: Callable[[], methods.Answer]) -> None:
        progress.update(name, None)
        row, m = answer()
        progress.update(name, row)
        rows.append(row)
        if m is not None:
            failed = torch.as_tensor(row.get("failed", False)).expand(system.batch)
            found[name] = m.masked_fill(failed[..., None, None], torch.nan)

    for entry in entries:
        add(entry.name, partial(methods.evaluate, entry, system, max_seconds=settings.max_seconds))
    samples: Any = None
    if _wanted(settings, CHAIN, not equilibrium):
        reason = methods.chain_reason(system)
        if reason is None:
            add(CHAIN, partial(methods.evaluate_chain, system, max_seconds=settings.max_seconds))
        else:
            refused[CHAIN] = reason
    for name, usual in ((SAMPLER, equilibrium), (SYNCHRONOUS, not equilibrium)):
        if not _wanted(settings, name, usual):
            continue
        if name == SAMPLER and not equilibrium:
            refused[name] = "couplings must be symmetric for the heat bath to have Boltzmann's law"
            continue

        def sampled(name: str = name) -> methods.Answer:
            nonlocal samples
            row, samples = methods.evaluate_sampler(
                system, equilibrium=name == SAMPLER, seed=settings.seed, quick=settings.quick, progress=progress.part
            )
            return row, None if samples is None else samples.magnetization

        add(name, sampled)
    if not rows:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise InputError(f"`--methods` must list one that holds for this system, got none ({reasons}); leave it out")
    _compare(rows, found, system)
    _average(rows, system)
    sweep, betas = _sweep(settings, entries, system, progress)
    completions = None
    if digits is not None:
        from .digits import complete

        progress.update("completing digits", None)
        completions = complete(digits, entries, seed=settings.seed, quick=settings.quick, progress=progress.part)
        _judge(rows, digits, completions)
    return Magnetization(
        settings=settings,
        system=system,
        equilibrium=equilibrium,
        rows=rows,
        magnetizations=found,
        refused=refused,
        sweep=sweep,
        betas=betas,
        samples=samples,
        digits=digits,
        completions=completions,
        seconds=time.perf_counter() - begin,
    )


def _chosen(settings: Settings, equilibrium: bool) -> list[Entry]:
    """Those that were asked for; else all, of dynamics only where there is no equilibrium."""
    static, moving = methods.equilibrium_methods(), methods.dynamical_methods()
    if settings.chosen is None:
        return static if equilibrium else [*static, *moving]
    return [e for e in (*static, *moving) if e.name in settings.chosen]


def _wanted(settings: Settings, name: str, usual: bool) -> bool:
    return usual if settings.chosen is None else name in settings.chosen


def _sweep(
    settings: Settings, entries: list[Entry], system: SpinSystem, progress: Progress
) -> tuple[list[dict[str, Any]], Tensor | None]:
    points = settings.points()
    if points is None:
        return [], None
    betas = points.betas(system.field.dtype)
    rows = []
    # What is too large for all temperatures at once is left out here, and said so.
    fitting, refused = methods.applicable(entries, methods.at_all(system, betas))
    for entry in fitting:
        progress.update(f"{entry.name} against beta", None)
        rows.append(methods.sweep(entry, system, betas))
    rows += [{"method": name, "error": "left out", "message": reason} for name, reason in refused.items()]
    return rows, betas


def _compare(rows: list[dict[str, Any]], found: dict[str, Tensor], system: SpinSystem) -> None:
    """The distance of magnetizations from the exact or sampled ones, root mean square over sites, in units of R."""
    name = next((name for name in REFERENCES if name in found), None)
    if name is None:
        return
    for row in rows:
        if row["method"] in found and row["method"] != name:
            apart = (found[row["method"]] - found[name]).square().sum(-1).mean(-1).sqrt() / system.radius
            row["distance"] = apart.tolist()
            row["distance_from"] = name


def _average(rows: list[dict[str, Any]], system: SpinSystem) -> None:
    """Mark the samples that means are over: those answered in every row, but for rows without any answer."""
    averaged = torch.ones(system.batch, dtype=torch.bool)
    answered = [row for row in rows if "mean_length" in row]
    for row in answered:
        known = ~torch.as_tensor(row.get("failed", False)).expand(system.batch)
        for name in (*methods.SCALARS, "entropy_production", "mean_length"):
            if row.get(name) is not None:
                known = known & torch.as_tensor(row[name], dtype=torch.float64).isfinite()
        if bool(known.any()):
            averaged = averaged & known
    for row in answered:
        row["averaged"] = averaged.tolist()


def _judge(rows: list[dict[str, Any]], digits: Digits, completions: Completions) -> None:
    """What the methods' log Z and magnetizations are good for."""
    from .digits import named

    completed = {row["method"]: row["right"] for row in completions.rows}
    for row in rows:
        if "free_energy" in row:
            log_partition = -torch.as_tensor(row["free_energy"], dtype=torch.float64)
            failed = torch.as_tensor(row["failed"])
            row["named"] = named(digits, log_partition.masked_fill(failed, torch.nan))
        if row["method"] in completed:
            row["completed"] = completed[row["method"]]


def magnetize_to_files(settings: Settings, out: Path) -> None:
    """Check the options, run with progress, print the tables, write the files into `out`."""
    require_modules("rich", "matplotlib", *(() if settings.file else ("sklearn",)))
    settings.check()
    if settings.file is not None:
        settings.load()
    with _writable(out):
        out.mkdir(parents=True, exist_ok=True)
    from .magnetize_report import figures, write_json
    from .magnetize_table import SpinProgress, show
    from .table import output_console

    progress = SpinProgress()
    with progress:
        result = magnetize(settings, progress)
        progress.update("figures", None)
        with _writable(out):
            written = ["thermodynamics.json", *figures(result, out)]
            write_json(result, out / "thermodynamics.json")
    show(result, output_console(), out, written)


__all__ = ["Magnetization", "Settings", "magnetize", "magnetize_to_files"]
