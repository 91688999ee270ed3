"""`implicit-attention compare`: every solver on the same retrieval task."""

from __future__ import annotations

import dataclasses
import os
import platform
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import Solution
from ..kernels import native_status
from ..layers.temperature import separating_beta
from ..plotting import convergence_figure, rates_figure, retrieval_figure
from ..studies import retrieval
from ..studies.contenders import STEP_SIZE, STOP, contenders
from ..studies.data import TASKS, DataSample, draw, noise_of
from ..studies.errors import InputError, printable
from ..studies.evaluate import SUCCESS, evaluate, prepare
from ..studies.measure import one_thread
from ..studies.potentials import SIMILARITIES
from ..studies.retrieval import EQUILIBRIUM, NEAREST, ONE, TWO, Rates
from . import table
from .command import Console, Files, Progress
from .compare import AUTO, Compare
from .report import options_of
from .table import MISSING, Column, Row, evaluations, mebibytes, milliseconds, percent, short, status

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

DRAWS = 8
#: Above this number of pairs of a pattern and a query several threads are used.
SHARED_FROM = 100_000
#: So many queries of a task are drawn.
SHOWN_QUERIES = 5
MASKED, NOISY = (f"tasks/{task}/retrieval_rate" for task in TASKS)
COMPARISON = (
    Column("evals\nmed/max", "evaluations of the map per query; the last one measures the residual", "", evaluations),
    Column("resid.\nmax", "largest |f(z) - z| over the queries (where it is a finite number)", "residual_max", short),
    Column("conv\n%", "queries whose residual reached the tolerance", "converged", percent),
    Column("sad-\ndles", "converged where the energy curves downwards", "saddles", str),
    Column("pts", "distinct fixed points among the converged states", "distinct_fixed_points", str),
    Column("retr.\nerror", "mean relative distance of the state from the pattern", "retrieval_error_mean", short),
    Column("half\n%", "half-masked queries retrieved (relative error < 1e-2), at this beta", MASKED, percent),
    Column("noisy\n%", "noisy queries retrieved", NOISY, percent),
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


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The measurements of `compare`.

    Attributes:
        settings: the options.
        noise: standard deviation of the noise.
        rows: for every solver, plain numbers.
        retrieval: rates for every task, state and beta.
        sample: the draw on which solvers are compared.
        states: of its queries by name, for the picture.
        solutions: by solver, for all that did not raise.
        unusable: how many patterns hold NaN or infinity.
        untrusted: how many queries have no exact fixed point.
        threads: of torch.
        native: the instruction set of the native operations, if any.
        auto: whether beta was found from the patterns.
    """

    settings: Compare
    noise: float
    rows: list[dict[str, Any]]
    retrieval: Rates
    sample: DataSample
    states: dict[str, Tensor]
    solutions: dict[str, Solution]
    unusable: int
    untrusted: int
    threads: int
    native: str | None
    auto: bool


def run(settings: Compare, progress: Progress) -> Comparison:
    """Compare all solvers."""
    settings, data = settings.load()
    noise = noise_of(None if settings.data is None else data)
    count, device = min(settings.stored, 200), torch.device(settings.device)
    drawn = draw(data, patterns=settings.stored, queries=count, noise=noise, draws=DRAWS, seed=settings.seed)
    # The betas of the potentials are for the scale of the digits.
    unsaid = settings.data is not None and settings.beta is None and settings.potential_name in SIMILARITIES
    auto = unsaid or settings.beta == AUTO
    if auto:
        known, similarity = drawn.keys[0][drawn.usable[0]], SIMILARITIES[settings.potential_name]
        # `repr` keeps every bit of a number. Without any pattern there is no scale.
        scale = repr(float(separating_beta(known, similarity))) if len(known) else None
        settings, auto = dataclasses.replace(settings, beta=scale), scale is not None
    drawn = drawn.to(device, getattr(torch, settings.dtype))
    sample = drawn.first(settings.queries)
    name, beta, anchor = settings.potential_name, settings.inverse_temperature, settings.anchor
    rows, solutions = [], {}
    few = settings.stored * settings.queries <= SHARED_FROM and "OMP_NUM_THREADS" not in os.environ
    # Threads of small problems mostly wait for each other.
    with one_thread(few) as threads:
        methods = contenders((5, 20) if settings.quick else (5, 20, 50))
        if settings.other_potential:
            methods = [dataclasses.replace(m, name=m.name.replace("one-step softmax", "one step")) for m in methods]
        steps = len(methods) + 1
        progress.begin("reference in float64", 0, steps)
        try:
            task = prepare(sample, beta=beta, anchor=anchor, potential=name, seed=settings.seed)
        except ValueError as error:
            remedy = "--suite retrieval tries a potential at every beta, and says at which it is refused"
            raise InputError(f"`--potential {name}` at beta {beta:g} is refused: {error}; {remedy}") from None
        for index, method in enumerate(methods):
            progress.begin(method.name, index + 1, steps)
            row, solution = evaluate(method, task, repeats=settings.repeats, max_seconds=0.3 if settings.quick else 1.0)
            progress.end(method.name, row)
            rows.append(row)
            if solution is not None:
                solutions[method.name] = solution
        progress.begin(f"retrieval at {len(retrieval.FACTORS)} betas, {DRAWS} draws")
        energy: dict[str, Any] = {"beta": beta, "anchor": anchor, "potential": name}
        rates = retrieval.sweep(drawn, progress.part, reference=settings.has_reference, **energy)
        shown = retrieval.examples(sample, rates, **energy)
    unusable = int((~sample.usable).sum())
    untrusted = int((sample.finite & (task.weights == 0).all(-1)).sum())
    own = (unusable, untrusted, threads, native_status().isa, auto)
    return Comparison(settings, noise, rows, rates, sample, shown, solutions, *own)


def line(row: Row) -> str:
    """Return the line that is printed when a solver has finished."""
    seconds = milliseconds(row["forward_seconds"]) if "forward_seconds" in row else MISSING
    residual = MISSING if row["residual_max"] is None else short(row["residual_max"])
    return f"{evaluations(row)} evaluations, residual {residual}, {percent(row['converged'])} % converged, {seconds} ms"


def solver_tables(comparison: Comparison, width: int) -> list[Table]:
    """Return the table of all solvers, cut into as many as the width requires."""
    settings = comparison.settings
    source = "scikit-learn's digits" if settings.data is None else printable(settings.data.name)
    threads = f"; {comparison.threads} thread{'s' * (comparison.threads > 1)}" if settings.device == "cpu" else ""
    if threads and comparison.native:
        threads += f", native {comparison.native}"
    title = (
        f"{source}: {settings.stored} patterns, {settings.queries} half-masked + {settings.queries} noisy "
        f"queries, beta {settings.inverse_temperature:g}, anchor {settings.anchor:g}, {settings.dtype} "
        f"on {settings.device}\n"
        f"{settings.other_potential}one tolerance for all: |f(z) - z| <= {STOP['atol']:g} + {STOP['rtol']:g} |f(z)|, "
        f"at most {STOP['max_steps']} steps{threads}"
    )
    return table.method_tables(title, COMPARISON, comparison.rows, width)


def retrieval_tables(entries: Rates, width: int) -> list[Table]:
    """Return the rates of every method at every beta and at its best, in as many tables as the width requires."""
    betas = retrieval.betas_of(entries)
    rows = []
    for task, state in dict.fromkeys((e["task"], e["state"]) for e in entries):
        rates = {e["beta"]: f"{e['mean']:.3f}".removeprefix("0") for e in retrieval.of(entries, task, state)}
        top = retrieval.best(entries, task, state)
        own = MISSING if top["beta"] is None else f"{top['beta']:.3g}"
        rows.append([task, state, f"{top['mean']:.3f} +- {top['std']:.3f}", own, *(rates.get(b, "") for b in betas)])
    headers = ["queries", "state", "best +- std", "at beta", *(f"{beta:.3g}" for beta in betas)]
    title = f"retrieval rate over {len(entries[0]['rates'])} draws: best, and at each beta"
    return table.cut_tables(title, headers, rows, width)


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


def show(comparison: Comparison, console: Console) -> None:
    """Print all measurements."""
    descent = f"unrolled GD, n: n steps z - {STEP_SIZE} grad E, differentiated step by step; BUDGET: so many as asked"
    notes = [descent, *table.meanings(COMPARISON), *table.failures(comparison.rows)]
    if comparison.auto:
        beta = comparison.settings.inverse_temperature
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
    table.show(console, solver_tables(comparison, console.width), notes)
    entries, beta = comparison.retrieval, comparison.settings.inverse_temperature
    table.show(console, retrieval_tables(entries, console.width), retrieval_notes(entries))
    console.print(retrieval.summary(entries, beta), style="bold", markup=False)
    console.print()


def files(comparison: Comparison) -> Files:
    """Return all measurements, and three figures."""
    settings, device = comparison.settings, torch.device(comparison.settings.device)
    content = {
        "settings": options_of(settings)
        | {
            "potential": settings.potential_name,
            "beta": settings.inverse_temperature,
            "beta_auto": comparison.auto,
            "queries_per_task": settings.queries,
            "data": "scikit-learn digits" if settings.data is None else settings.data.name,
            "noise": comparison.noise,
            "success": SUCCESS,
            "draws": DRAWS,
            **STOP,
            "descent_step_size": STEP_SIZE,
            "repeats": settings.repeats,
        },
        "device": {
            "type": device.type,
            "name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "threads": comparison.threads,
            "native": comparison.native,
        },
        "rows": comparison.rows,
        "retrieval": comparison.retrieval,
        "summary": retrieval.summary(comparison.retrieval, settings.inverse_temperature),
        "status_counts": {row["method"]: row.get("status", {"ERROR": 1}) for row in comparison.rows},
        "unusable_patterns": comparison.unusable,
        "queries_without_exact_gradient": comparison.untrusted,
    }
    beta, anchor = settings.inverse_temperature, settings.anchor
    what = f"{settings.stored} patterns, {settings.other_potential}beta {beta:g}, anchor {anchor:g}, {settings.dtype}"
    figures = {
        "convergence.png": _convergence(comparison, what),
        "rates.png": _rates(comparison),
        "retrieval.png": _retrieval(comparison, what),
    }
    return "compare.json", content, figures


def _convergence(comparison: Comparison, what: str) -> Figure:
    traces = {name: s.trace for name, s in comparison.solutions.items() if s.trace is not None}
    length = float(comparison.sample.targets.double().norm(dim=-1).nanmedian())
    tolerance = STOP["rtol"] * length + STOP["atol"]
    return convergence_figure(traces, tolerance=tolerance, title=f"Residual against map evaluations\n{what}")


def _retrieval(comparison: Comparison, what: str) -> Figure:
    """Draw queries, what methods make of them, and the truth."""
    sample = comparison.sample
    right = {name: retrieval.retrieved(z, sample) for name, z in comparison.states.items()}
    rows = []
    for part in sample.parts:
        candidates = torch.arange(len(sample.queries), device=sample.queries.device)[part]
        rows += _choose(candidates[sample.targets[candidates].isfinite().all(-1)], list(right.values()))
    grid: list[tuple[str, Tensor, Tensor | None]] = [("query", sample.queries[rows], None)]
    grid += [(name, z[rows], right[name][rows]) for name, z in comparison.states.items()]
    grid.append(("truth", sample.targets[rows], None))
    columns = [TASKS[row in range(len(sample.queries))[sample.parts[1]]] for row in rows]
    return retrieval_figure(grid, columns=columns, title=f"Retrieval: {what}\nqueries chosen to show every outcome")


def _rates(comparison: Comparison) -> Figure:
    """Draw the rates of the sweep."""
    entries, settings = comparison.retrieval, comparison.settings

    def rates(task: str, state: str) -> Tensor:
        return torch.tensor([entry["rates"] for entry in retrieval.of(entries, task, state)], dtype=torch.float64)

    curves = {task: {state: rates(task, state) for state in (ONE, TWO, EQUILIBRIUM)} for task in TASKS}
    levels = {task: {state: rates(task, state)[0] for state in NEAREST} for task in TASKS}
    source = "scikit-learn's digits" if settings.data is None else settings.data.name
    what = f"Retrieval of {settings.stored} patterns ({source})"
    title = f"{what}; {settings.other_potential}stars: each method's own best beta"
    return rates_figure(torch.tensor(retrieval.betas_of(entries)), curves, levels, title=title)


def _choose(rows: Tensor, right: list[Tensor]) -> list[int]:
    """Choose a few rows that show every outcome which occurs; rows with the same outcome take turns."""
    groups: dict[tuple[bool, ...], list[int]] = {}
    for row in rows.tolist():
        groups.setdefault(tuple(bool(hit[row]) for hit in right), []).append(row)
    in_turn = [group[i] for i in range(SHOWN_QUERIES) for group in groups.values() if i < len(group)]
    return sorted(in_turn[:SHOWN_QUERIES])
