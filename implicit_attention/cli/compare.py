"""`implicit-attention compare`: every solver on the same retrieval task, with evidence."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .. import Solution, solve
from ..solvers import Anderson
from .contenders import STOP, contenders
from .data import TASKS, Sample, draw, load_digits, noise_of
from .errors import InputError
from .evaluate import SUCCESS, energy_of, evaluate, prepare, relative_error
from .files import load_patterns
from .progress import Progress
from .settings import CompareSettings

DRAWS = 8
#: Pairs of a pattern and a query from which on several threads are used.
SHARED_FROM = 100_000
#: Multiples of `--beta` at which retrieval is tried again: what a larger inverse temperature does in one step.
SHARPER = (4, 16)
#: Retrieval rates of digits measured independently of this command: log-sum-exp, beta 8, 200 patterns, anchor 0,
#: mean and standard deviation over 8 draws.
REFERENCE = {
    ("half-masked", "one step"): (0.701, 0.015),
    ("half-masked", "equilibrium"): (0.854, 0.028),
    ("noisy", "one step"): (0.895, 0.019),
    ("noisy", "equilibrium"): (0.916, 0.021),
}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Everything that `compare` measured.

    Attributes:
        settings: the options.
        noise: standard deviation of the noise.
        rows: for every solver, plain numbers.
        retrieval: rates for every task, state and beta.
        sample: the draw on which solvers are compared.
        states: (one step, equilibrium) of its queries.
        solutions: by solver, for all that did not raise.
        unusable: how many patterns hold NaN or infinity.
        untrusted: how many queries have no exact fixed point.
        threads: of torch.
        seconds: of everything.
    """

    settings: CompareSettings
    noise: float
    rows: list[dict[str, Any]]
    retrieval: list[dict[str, Any]]
    sample: Sample
    states: tuple[Tensor, Tensor]
    solutions: dict[str, Solution]
    unusable: int
    untrusted: int
    threads: int
    seconds: float


def check(settings: CompareSettings) -> None:
    """Raise `InputError` for the first option that cannot be used."""
    if not (settings.beta > 0 and math.isfinite(settings.beta)):
        raise InputError(f"`--beta` must be > 0 and finite, got {settings.beta:g}; it is an inverse temperature, try 8")
    if not 0 <= settings.anchor <= 1:
        raise InputError(f"`--anchor` must be in [0, 1], got {settings.anchor:g}; 0 is retrieval")
    remedy = "use cpu, cuda or cuda:N"
    try:
        device = torch.device(settings.device)
    except RuntimeError:
        raise InputError(f"`--device` must name a device, got {settings.device!r}; {remedy}") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"`--device` must be cpu or cuda, got {settings.device!r}; {remedy}")
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= count:
        received = f"{settings.device!r} with {count} CUDA devices here"
        raise InputError(f"`--device` must be present, got {received}; use --device cpu")


def load(settings: CompareSettings) -> Tensor:
    """All patterns that can be drawn from, (count, D) float64."""
    data = load_digits() if settings.data is None else load_patterns(settings.data)
    if len(data) < settings.patterns:
        source = "the digits" if settings.data is None else f"`--data` {settings.data.name}"
        required = f"<= {len(data)}, the rows of {source}"
        raise InputError(f"`--patterns` must be {required}, got {settings.patterns}; lower --patterns")
    return data


@contextmanager
def _threads(settings: CompareSettings) -> Iterator[int]:
    """One thread for problems too small to share, for which threads mostly wait for each other on a busy machine."""
    before = torch.get_num_threads()
    if settings.patterns * settings.queries <= SHARED_FROM and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def run(settings: CompareSettings, progress: Progress) -> Comparison:
    """Compare all solvers."""
    begin = time.perf_counter()
    data = load(settings)
    noise = noise_of(None if settings.data is None else data)
    count, device = min(settings.patterns, 200), torch.device(settings.device)
    drawn = draw(data, patterns=settings.patterns, queries=count, noise=noise, draws=DRAWS, seed=settings.seed)
    drawn = drawn.to(device, getattr(torch, settings.dtype))
    sample = drawn.first(settings.queries)
    rows, solutions = [], {}
    with _threads(settings) as threads:
        methods = contenders(settings.descents)
        steps = len(methods) + 3
        progress.begin("reference in float64", 0, steps)
        task = prepare(sample, beta=settings.beta, anchor=settings.anchor, seed=settings.seed)
        for index, method in enumerate(methods):
            progress.begin(method.name, index + 1, steps)
            row, solution = evaluate(method, task, repeats=settings.repeats, max_seconds=settings.max_seconds)
            progress.end(method.name, row)
            rows.append(row)
            if solution is not None:
                solutions[method.name] = solution
        progress.begin(f"retrieval over {DRAWS} draws", steps - 2, steps)
        rates = retrieval(drawn, settings)
        shown = states(sample, beta=settings.beta, anchor=settings.anchor)
    unusable = int((~sample.usable).sum())
    untrusted = int((sample.finite & (task.weights == 0).all(-1)).sum())
    seconds = time.perf_counter() - begin
    return Comparison(settings, noise, rows, rates, sample, shown, solutions, unusable, untrusted, threads, seconds)


def states(sample: Sample, *, beta: float, anchor: float) -> tuple[Tensor, Tensor]:
    """(one step, equilibrium) of all queries."""
    energy = energy_of(sample.keys, sample.queries, sample.usable, beta=beta, anchor=anchor)
    with torch.no_grad():
        solution = solve(energy, sample.queries, solver=Anderson(**STOP), on_failure="ignore")
        return energy.fixed_point_map(sample.queries), solution.value


def retrieval(drawn: Sample, settings: CompareSettings) -> list[dict[str, Any]]:
    """Retrieval rates, mean and standard deviation over the draws.

    One step against the equilibrium, at `--beta` and at multiples of it, and the pattern with the largest score.
    """
    found: list[tuple[str, float | None, Tensor]] = []
    for beta in (settings.beta, *(factor * settings.beta for factor in SHARPER)):
        one, equilibrium = states(drawn, beta=beta, anchor=settings.anchor)
        found += [("one step", beta, one), ("equilibrium", beta, equilibrium)]
    # Draw by draw: the scores of all at once are large.
    best = [_best(*row) for row in zip(drawn.keys, drawn.queries, drawn.usable, strict=True)]
    found.append(("largest score", None, torch.stack(best)))
    hits = [(name, beta, relative_error(z, drawn.targets) < SUCCESS) for name, beta, z in found]
    block = []
    for task, part in zip(TASKS, drawn.parts, strict=True):
        for name, sharpness, hit in hits:
            rates = hit[..., part].double().mean(-1)
            mean, std = float(rates.mean()), float(rates.std())
            entry = {"task": task, "state": name, "beta": sharpness, "rates": rates.tolist(), "mean": mean, "std": std}
            if settings.has_reference and sharpness == settings.beta:
                expected, deviation = REFERENCE[task, name]
                deviations = (mean - expected) / deviation
                entry |= {"reference_mean": expected, "reference_std": deviation}
                entry |= {"deviations": deviations, "within_three": abs(deviations) <= 3}
            block.append(entry)
    return block


def _best(keys: Tensor, queries: Tensor, usable: Tensor) -> Tensor:
    """The usable pattern with the largest score <pattern, query>, for each query of one draw."""
    scores = (queries @ keys.mT).masked_fill(~usable, -torch.inf)
    return keys[scores.argmax(-1)]
