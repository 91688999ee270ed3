"""The methods that `magnetize` puts side by side, and what each of them says of a system, as plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..linear import Eigenvalue, extreme_eigenvalues
from ..potentials import AmosResponse
from ..solution import SolveReport
from ..spins import (
    Bethe,
    Enumeration,
    MeanField,
    SaddlePoint,
    SpinSystem,
    Thermodynamics,
    TransferMatrix,
    thermodynamics,
)
from ..spins.adaptive_tap import AdaTAP
from ..spins.approximation import Approximation
from ..spins.dynamics import DynamicalMethod, StationaryState, stationary_state
from ..spins.exact import LARGEST as LARGEST_CHAIN
from ..spins.exact import stationary_law
from ..spins.gaussian_closure import GaussianClosure
from ..spins.kinetic_plefka import KineticPlefka
from ..spins.sampling import Samples, heat_bath, synchronous
from ..spins.tap import TAP
from ..status import Status
from .measure import median_time

#: States that are added up for all samples together; more take minutes.
LARGEST_ENUMERATION = 2**22
#: Updates of a spin, by all chains and samples together, that the heat bath may spend; vectors cost several times more.
UPDATES, VECTOR_UPDATES, QUICK_UPDATES = 20_000, 5_000, 2_000
CHAINS = 100
#: Rows of a susceptibility that is computed as a matrix; a larger one is asked LANCZOS_STEPS times.
DENSE, LANCZOS_STEPS = 64, 30
CPU = torch.device("cpu")
NAMES = {int(status): status.name for status in Status}
SCALARS = ("free_energy", "internal_energy", "entropy", "heat_capacity")

#: What a method says of a system: a row of plain numbers, and magnetizations (*batch, N, D) or None.
Answer = tuple[dict[str, Any], Tensor | None]


class Entry(NamedTuple):
    """A method by the name that `--methods` knows; `vectors`: it says something of its own only for D > 1."""

    name: str
    method: Approximation
    vectors: bool = False


def equilibrium_methods() -> list[Entry]:
    return [
        Entry("mean-field", MeanField()),
        Entry("mean-field-amos", MeanField(response=AmosResponse()), vectors=True),
        Entry("tap-2", TAP(order=2)),
        Entry("tap-3", TAP(order=3)),
        Entry("saddle-point", SaddlePoint()),
        Entry("one-loop", SaddlePoint(one_loop=True)),
        Entry("spherical", SaddlePoint(shared=True)),
        Entry("adatap", AdaTAP()),
        Entry("bethe", Bethe()),
        Entry("enumeration", Enumeration()),
        Entry("transfer-matrix", TransferMatrix()),
    ]


def dynamical_methods() -> list[Entry]:
    return [
        Entry("plefka-1", KineticPlefka(order=1)),
        Entry("plefka-2", KineticPlefka(order=2)),
        Entry("gaussian-field", GaussianClosure()),
    ]


#: What is not a `Approximation`: Monte Carlo, and the exact law of a small chain.
SAMPLER, SYNCHRONOUS, CHAIN = "heat-bath", "synchronous", "markov-chain"
#: Exact ones first: the first that is there is what magnetizations are compared with.
REFERENCES = ("enumeration", "transfer-matrix", CHAIN, SAMPLER, SYNCHRONOUS)


def names() -> list[str]:
    return [e.name for e in (*equilibrium_methods(), *dynamical_methods())] + [SAMPLER, SYNCHRONOUS, CHAIN]


def warm_up(system: SpinSystem) -> None:
    """Solve two spins, so that what torch loads on its first call is in no method's time."""
    two = SpinSystem(system.couplings.new_zeros(2, 2), system.field.new_ones(2, system.dim), radius=system.radius)
    thermodynamics(two, MeanField(), on_failure="ignore")


def in_equilibrium(system: SpinSystem) -> bool:
    """Whether couplings are symmetric, so that there is a free energy."""
    try:
        system.check_symmetric("a free energy")
    except ValueError:
        return False
    return True


def applicable(entries: list[Entry], system: SpinSystem) -> tuple[list[Entry], dict[str, str]]:
    """The methods that hold for the system, and for the others why they do not."""
    fitting, refused = [], {}
    for entry in entries:
        if entry.vectors and system.dim == 1:
            continue
        try:
            entry.method.check(system)
            samples = system.batch.numel()
            if isinstance(entry.method, Enumeration) and samples * 2**system.num_sites > LARGEST_ENUMERATION:
                raise ValueError(
                    f"{samples} samples of 2^{system.num_sites} states are more than 2^22, which take minutes"
                )
        except ValueError as error:
            refused[entry.name] = str(error)
        else:
            fitting.append(entry)
    return fitting, refused


def evaluate(entry: Entry, system: SpinSystem, *, max_seconds: float) -> Answer:
    """Thermodynamics by one method, or the stationary state of synchronous dynamics."""

    def measured() -> Answer:
        found, numbers = _solved(entry, system)
        row = {name: number.tolist() for name, number in numbers.items()}
        return row | evidence_of(found.report) | size_of(found.magnetization, system), found.magnetization

    return _timed(entry.name, measured, max_seconds)


def _solved(entry: Entry, system: SpinSystem) -> tuple[Thermodynamics | StationaryState, dict[str, Tensor]]:
    """What the method found, and its numbers (*batch)."""
    if isinstance(entry.method, DynamicalMethod):
        state = stationary_state(system, entry.method, check="stability", on_failure="ignore")
        return state, {"entropy_production": state.entropy_production}
    found = thermodynamics(system, entry.method, on_failure="ignore")
    return found, {name: getattr(found, name) for name in SCALARS}


def chain_reason(system: SpinSystem) -> str | None:
    """Why the exact chain is not there."""
    if system.dim > 1 or system.num_sites > LARGEST_CHAIN:
        received = f"N = {system.num_sites}, D = {system.dim}"
        return f"the exact chain is for at most {LARGEST_CHAIN} spins of dimension 1, got {received}"
    return None


def evaluate_chain(system: SpinSystem, *, max_seconds: float) -> Answer:
    """The exact stationary law of synchronous Ising dynamics, sample by sample."""

    def measured() -> Answer:
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
        m = m.reshape(*system.batch, n, 1)
        return row | size_of(m, system), m

    return _timed(CHAIN, measured, max_seconds)


def _known(name: str, known: Tensor) -> dict[str, int]:
    """Counts by status of what needs no solve: `name`, but for samples whose numbers are not finite."""
    counts = {name: int(known.sum()), Status.NONFINITE.name: int((~known).sum())}
    return {name: count for name, count in counts.items() if count}


def evaluate_sampler(
    system: SpinSystem,
    *,
    equilibrium: bool,
    seed: int,
    quick: bool,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, Any], Samples | None]:
    """Averages, with standard errors, of sequential heat bath or of synchronous dynamics; and the samples."""
    updates = QUICK_UPDATES if quick else UPDATES if system.dim == 1 else VECTOR_UPDATES
    sweeps = max(20, updates // max(1, system.num_sites))
    held: dict[str, Samples] = {}
    pairs = [("heat_capacity", "heat_capacity"), ("energy", "internal_energy")]
    numbers = pairs if equilibrium else [("entropy_production", "entropy_production")]

    def measured() -> Answer:
        held["samples"] = found = (heat_bath if equilibrium else synchronous)(
            system,
            chains=CHAINS,
            burn_in=sweeps // 2,
            sweeps=sweeps,
            generator=torch.Generator().manual_seed(seed),
            progress=progress,
        )
        known = found.magnetization.isfinite().flatten(-2).all(-1)
        row: dict[str, Any] = {"chains": CHAINS, "sweeps": sweeps, "status": _known("SAMPLED", known)}
        for theirs, ours in numbers:
            for end in ("", "_error"):
                row[ours + end] = getattr(found, theirs + end).tolist()
        row["magnetization_error"] = found.magnetization_error.tolist()
        row["effective_samples"] = found.effective_samples.tolist()
        return row | size_of(found.magnetization, system), found.magnetization

    row, _ = _timed(SAMPLER if equilibrium else SYNCHRONOUS, measured, max_seconds=0.0)
    return row, held.get("samples")


def sweep(entry: Entry, system: SpinSystem, betas: Tensor) -> dict[str, Any]:
    """Everything against beta, lists of (K, *batch), from one batch of all temperatures; NaN where a solve failed
    or ended on a saddle."""
    many = at_all(system, betas)

    def measured() -> Answer:
        found, numbers = _solved(entry, many)
        numbers["mean_length"] = mean_length(found.magnetization, system.radius)
        if isinstance(found, Thermodynamics):
            largest = largest_susceptibility(found)
            numbers |= {
                "largest_susceptibility": largest.value,
                "largest_susceptibility_error": largest.error_bound,
            }
        # Read after the susceptibility, whose linear solves are evidence as well.
        evidence = evidence_of(found.report)
        # What is no minimum, or does not come back, is a solution but no state of the system.
        failed = torch.as_tensor(evidence["failed"]) | (found.report.status == Status.UNSTABLE)
        row = {"status": evidence["status"], "failed": failed.tolist()}
        return row | {name: value.masked_fill(failed, torch.nan).tolist() for name, value in numbers.items()}, None

    return _timed(entry.name, measured, max_seconds=0.0)[0]


def largest_susceptibility(found: Thermodynamics) -> Eigenvalue:
    """The largest eigenvalue of chi, (*batch): of the matrix if it is small, else by Lanczos on its products."""
    shape = found.magnetization.shape
    size = shape[-2] * shape[-1]
    if size <= DENSE:
        chi = found.susceptibility().detach().reshape(*shape[:-2], size, size)
        known = chi.isfinite().all(-1).all(-1)
        values = torch.linalg.eigvalsh(torch.where(known[..., None, None], chi, 0.0))[..., -1]
        return Eigenvalue(values.masked_fill(~known, torch.nan), torch.zeros_like(values))
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(size, generator=generator, dtype=torch.float64).to(found.magnetization)

    def product(v: Tensor) -> Tensor:
        return found.susceptibility_product(v.reshape(shape)).detach().reshape(v.shape)

    return extreme_eigenvalues(product, start.expand(*shape[:-2], -1), LANCZOS_STEPS)[1]


def at_all(system: SpinSystem, betas: Tensor) -> SpinSystem:
    """The system at every one of K temperatures: a batch (K, *batch)."""
    shape = (len(betas), *system.field.shape)
    beta = betas.reshape(-1, *(1,) * len(system.batch)).expand(len(betas), *system.batch)
    return system.at(system.field.expand(shape), system.couplings, beta)


def mean_length(m: Tensor, radius: float) -> Tensor:
    """The mean over sites of |m_i|/R, (*batch)."""
    lengths: Tensor = torch.linalg.vector_norm(m, dim=-1)
    return lengths.mean(-1) / radius


def size_of(m: Tensor, system: SpinSystem) -> dict[str, Any]:
    return {"mean_length": mean_length(m, system.radius).tolist()}


def failed_of(evidence: SolveReport) -> Tensor:
    """(*batch), True where the solve failed, or a linear solve behind one of its derivatives did."""
    response = evidence.adjoint.failed
    return evidence.failed if response is None else evidence.failed | response.reshape(evidence.failed.shape)


def evidence_of(evidence: SolveReport) -> dict[str, Any]:
    """Counts by status, the largest residual that is a number, the median and the largest number of steps."""
    codes = Counter(evidence.status.flatten().tolist())
    residual = evidence.residual[evidence.residual.isfinite()]
    steps = evidence.num_steps.flatten()
    return {
        "status": {NAMES[code]: count for code, count in sorted(codes.items())},
        "failed": failed_of(evidence).tolist(),
        "residual_max": float(residual.max()) if residual.numel() else None,
        "steps_median": float(steps.double().median()) if steps.numel() else None,
        "steps_max": int(steps.max()) if steps.numel() else None,
    }


def _timed(name: str, measured: Callable[[], Answer], max_seconds: float) -> Answer:
    """The answer with its time; a method that raises keeps its row, with the error in it."""
    held: dict[str, Answer] = {}

    def run() -> None:
        held["answer"] = measured()

    row: dict[str, Any] = {"method": name}
    try:
        warmup = 1 if max_seconds > 0 else 0
        seconds = median_time(run, CPU, repeats=3 if warmup else 1, warmup=warmup, max_seconds=max_seconds)
    except Exception as error:
        text = str(error).strip().splitlines()
        return row | {"error": type(error).__name__, "message": text[0] if text else ""}, None
    found, m = held["answer"]
    return row | found | {"seconds": seconds}, None if m is None else m.detach()
