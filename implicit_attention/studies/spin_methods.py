"""The methods that `magnetize` puts side by side, and the answer of each to a system, as plain numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import spins
from ..solution import SolveReport, Status, status_counts
from ..spins import (
    Approximation,
    DrivenPath,
    SpinSystem,
    drive,
    thermodynamics,
)
from ..spins.dynamics import DynamicalMethod
from ..spins.exact import LARGEST as LARGEST_CHAIN
from ..spins.exact import stationary_law
from ..spins.methods import METHODS
from ..spins.sampling import Samples, heat_bath, synchronous
from ..spins.sweep import SCALARS as SCALARS
from ..spins.sweep import at_all as at_all
from ..spins.sweep import failed_of, mean_length, solved
from .measure import error_row, median_times

#: Names of methods that are no approximations: Monte Carlo, and the exact law of a small chain.
SAMPLER, SYNCHRONOUS, CHAIN = "heat-bath", "synchronous", "markov-chain"
#: Names of the methods for fields that change.
DRIVEN = tuple(row.name for row in METHODS if row.name and row.driven)
#: Magnetizations are compared with those of the first of these that has an answer.
REFERENCES = (*(row.name for row in METHODS if row.name and row.kind.exact), CHAIN, SAMPLER, SYNCHRONOUS)
#: States that are added up for all samples together; more take minutes.
LARGEST_ENUMERATION = 2**22
#: Updates of a spin, by all chains and samples together, that the heat bath may spend; vectors cost several times more.
UPDATES, VECTOR_UPDATES, QUICK_UPDATES = 20_000, 5_000, 2_000
CHAINS = 100
CPU = torch.device("cpu")
Parts: TypeAlias = Callable[[int, int], None]


class MethodAnswer(NamedTuple):
    """A method's results for a system: plain numbers, magnetizations (*batch, N, D), and samples if it draws them."""

    row: dict[str, Any]
    magnetization: Tensor | None = None
    samples: Samples | None = None


@dataclasses.dataclass(frozen=True)
class Chain:
    """The exact stationary law of synchronous Ising dynamics, sample by sample."""

    def check(self, system: SpinSystem) -> None:
        """Raise where there are too many states."""
        if system.dim > 1 or system.num_sites > LARGEST_CHAIN:
            received = f"N = {system.num_sites}, D = {system.dim}"
            raise ValueError(f"the exact chain is for at most {LARGEST_CHAIN} spins of dimension 1, got {received}")

    def answer(self, system: SpinSystem) -> MethodAnswer:
        n, radius = system.num_sites, system.radius
        pairs = system.couplings[..., 0, 0] if system.block else system.couplings
        couplings = (radius**2 * pairs).expand(*system.batch, n, n).reshape(-1, n, n).double()
        field = (radius * system.field).reshape(-1, n).double()
        betas = torch.as_tensor(system.beta, dtype=torch.float64).expand(system.batch).flatten()
        m, production = torch.full_like(field, torch.nan), torch.full_like(betas, torch.nan)
        known = couplings.isfinite().flatten(1).all(-1) & field.isfinite().all(-1) & betas.isfinite()
        for index in torch.nonzero(known).flatten().tolist():
            law = stationary_law(couplings[index], field[index], float(betas[index]))
            m[index], production[index] = radius * law.magnetization, law.entropy_production
        row = {"entropy_production": production.reshape(system.batch).tolist(), "status": _known("EXACT", known)}
        return MethodAnswer(row, m.reshape(*system.batch, n, 1))


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Averages, with standard errors, over states of the sequential heat bath, or of the synchronous dynamics."""

    equilibrium: bool

    def check(self, system: SpinSystem) -> None:
        """Raise where the heat bath does not draw from Boltzmann's law."""
        if self.equilibrium and not in_equilibrium(system):
            raise ValueError("couplings must be symmetric for the heat bath to have Boltzmann's law")

    def answer(self, system: SpinSystem, seed: int, quick: bool, progress: Parts | None) -> MethodAnswer:
        updates = QUICK_UPDATES if quick else UPDATES if system.dim == 1 else VECTOR_UPDATES
        sweeps = max(20, updates // max(1, system.num_sites))
        draw = heat_bath if self.equilibrium else synchronous
        generator = torch.Generator().manual_seed(seed)
        drawn = draw(system, chains=CHAINS, burn_in=sweeps // 2, sweeps=sweeps, generator=generator, progress=progress)
        known = drawn.magnetization.isfinite().flatten(-2).all(-1)
        row: dict[str, Any] = {"chains": CHAINS, "sweeps": sweeps, "status": _known("SAMPLED", known)}
        numbers = {
            "heat_capacity": (drawn.heat_capacity, drawn.heat_capacity_error),
            "internal_energy": (drawn.energy, drawn.energy_error) if self.equilibrium else (None, None),
            "entropy_production": (drawn.entropy_production, drawn.entropy_production_error),
        }
        for name, (value, error) in numbers.items():
            if value is not None and error is not None:
                row |= {name: value.tolist(), f"{name}_error": error.tolist()}
        row["magnetization_error"] = drawn.magnetization_error.tolist()
        row["effective_samples"] = drawn.effective_samples.tolist()
        return MethodAnswer(row, drawn.magnetization, drawn)


def _known(name: str, known: Tensor) -> dict[str, int]:
    """Counts by status of samples that need no solve: `name`, or NONFINITE."""
    counts = {name: int(known.sum()), Status.NONFINITE.name: int((~known).sum())}
    return {name: count for name, count in counts.items() if count}


class Entry(NamedTuple):
    """A method by the name that `--methods` knows.

    Attributes:
        name: on the command line and in all tables.
        method: an approximation, a sampler, or the exact law of a chain.
        equilibrium: whether it runs without `--methods` where couplings are symmetric.
        dynamics: whether it runs without `--methods` where they are not.
        vectors: whether it runs for D > 1 only.
    """

    name: str
    method: Approximation | Chain | Sampler
    equilibrium: bool = True
    dynamics: bool = True
    vectors: bool = False


#: In the order of the tables. Of equilibrium methods asymmetric couplings get the reason why they do not apply.
ENTRIES = (
    *(
        Entry(row.name, row.method, equilibrium=not issubclass(row.kind, DynamicalMethod), vectors=row.vectors)
        for row in METHODS
        if row.name
    ),
    Entry(CHAIN, Chain(), equilibrium=False),
    Entry(SAMPLER, Sampler(equilibrium=True), dynamics=False),
    Entry(SYNCHRONOUS, Sampler(equilibrium=False), equilibrium=False),
)


def warm_up(system: SpinSystem) -> None:
    """Solve two spins, so that no method's time includes the first call of torch."""
    two = SpinSystem(system.couplings.new_zeros(2, 2), system.field.new_ones(2, system.dim), radius=system.radius)
    thermodynamics(two, spins.MeanField(), on_failure="ignore")


def in_equilibrium(system: SpinSystem) -> bool:
    """Whether couplings are symmetric, so that there is a free energy."""
    try:
        system.check_symmetric("a free energy")
    except ValueError:
        return False
    return True


def applicable(entries: Iterable[Entry], system: SpinSystem) -> tuple[list[Entry], dict[str, str]]:
    """The methods that hold for the system, and for the others why they do not."""
    fitting, refused = [], {}
    for entry in entries:
        if entry.vectors and system.dim == 1:
            continue
        try:
            entry.method.check(system)
            count, states = system.batch.numel(), 2**system.num_sites
            if isinstance(entry.method, spins.Enumeration) and count * states > LARGEST_ENUMERATION:
                what = f"{count} samples of 2^{system.num_sites} states"
                raise ValueError(f"{what} are more than 2^22, which take minutes")
        except ValueError as error:
            refused[entry.name] = str(error)
        else:
            fitting.append(entry)
    return fitting, refused


def evaluate(
    entry: Entry,
    system: SpinSystem,
    *,
    max_seconds: float = 0.0,
    seed: int = 0,
    quick: bool = False,
    progress: Parts | None = None,
) -> MethodAnswer:
    """Return a method's results for a system, with its time.

    Args:
        entry: the method. One that raises keeps its row, with the error in it.
        system: all samples of it.
        max_seconds: no further timed run is begun after so long; 0 for one run that is not repeated.
        seed: of the samples.
        quick: with fewer samples.
        progress: gets the numbers of sweeps done and of all sweeps.
    """

    def answer() -> MethodAnswer:
        if isinstance(entry.method, Chain):
            own = entry.method.answer(system)
        elif isinstance(entry.method, Sampler):
            own = entry.method.answer(system, seed, quick, progress)
        else:
            state, numbers = solved(entry.method, system)
            row = {name: number.tolist() for name, number in numbers.items()}
            own = MethodAnswer(row | evidence_of(state.report), state.magnetization.detach())
        m = own.magnetization
        return own if m is None else own._replace(row=own.row | {"mean_length": mean_length(m, system).tolist()})

    return _timed(entry.name, answer, 0.0 if isinstance(entry.method, Sampler) else max_seconds)


def sweep(entry: Entry, system: SpinSystem, betas: Tensor) -> dict[str, Any]:
    """Return the results of `spins.sweep` for one method, lists of (K, *batch)."""

    def answer() -> MethodAnswer:
        assert isinstance(entry.method, Approximation)
        results = spins.sweep(system, {entry.name: entry.method}, beta=betas)
        numbers = {quantity: values.tolist() for quantity, values in results.curves[entry.name].items()}
        status = status_counts(results.reports[entry.name].status)
        return MethodAnswer({"status": status, "failed": results.failed[entry.name].tolist()} | numbers)

    return _timed(entry.name, answer, max_seconds=0.0).row


def driven(entry: Entry, system: SpinSystem, fields: Tensor) -> tuple[dict[str, Any], DrivenPath | None]:
    """The path of the system's spins in fields (T, *batch, N, D), and its numbers by step, lists of (T, *batch).

    Parts of the entropy production, and all that concerns stationary states, are NaN where a solve failed.
    """
    path: DrivenPath | None = None

    def answer() -> MethodAnswer:
        nonlocal path
        assert isinstance(entry.method, DynamicalMethod)
        options: dict[str, Any] = {"beta": system.beta, "radius": system.radius, "on_failure": "ignore"}
        path = drive(entry.method, system.couplings, fields, **options)
        assert path.report is not None
        evidence = evidence_of(path.report)
        failed = torch.as_tensor(evidence["failed"])
        stationary = ("housekeeping", "field_change", "mismatch", "relaxation_time")
        path = dataclasses.replace(
            path, **{name: getattr(path, name).masked_fill(failed, torch.nan) for name in stationary}
        )
        numbers = {name: getattr(path, name) for name in ("entropy_production", *stationary)}
        numbers["mean_length"] = mean_length(path.states[1:], system)
        lists = {name: value.tolist() for name, value in numbers.items()}
        return MethodAnswer(lists | {"status": evidence["status"], "failed": evidence["failed"]})

    return _timed(entry.name, answer, max_seconds=0.0).row, path


def evidence_of(report: SolveReport) -> dict[str, Any]:
    """Counts by status, which samples failed, the largest residual that is a number, and the numbers of steps.

    A sample failed where its solve did, or a linear solve behind one of its derivatives.
    """
    residual, steps = report.residual[report.residual.isfinite()], report.num_steps.flatten()
    return {
        "status": status_counts(report.status),
        "failed": failed_of(report).tolist(),
        "residual_max": float(residual.max()) if residual.numel() else None,
        "steps_median": float(steps.double().median()) if steps.numel() else None,
        "steps_max": int(steps.max()) if steps.numel() else None,
    }


def _timed(name: str, answer: Callable[[], MethodAnswer], max_seconds: float) -> MethodAnswer:
    """The answer with its name and time; that of a method that raises has the error instead."""
    answers: list[MethodAnswer] = []

    def run() -> None:
        answers[:] = [answer()]

    repeats, warmup = (3, 1) if max_seconds > 0 else (1, 0)
    try:
        (seconds,) = median_times(run, device=CPU, repeats=repeats, warmup=warmup, max_seconds=max_seconds)
    except Exception as error:
        return MethodAnswer({"method": name} | error_row(error))
    return answers[0]._replace(row={"method": name} | answers[0].row | {"seconds": seconds})
