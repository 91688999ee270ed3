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

from .. import Solution
from ..layers.temperature import separating_beta
from ..ops import native_status
from .contenders import contenders
from .data import DataSample, draw, load_digits, noise_of
from .errors import InputError
from .evaluate import evaluate, prepare
from .files import load_patterns
from .potentials import SIMILARITIES, choice, inverse_temperature
from .progress import Progress
from .retrieval import FACTORS, Rates, examples, sweep
from .settings import AUTO, CompareSettings

DRAWS = 8
#: Pairs of a pattern and a query from which on several threads are used.
SHARED_FROM = 100_000


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Everything that `compare` measured.

    Attributes:
        settings: the options.
        noise: standard deviation of the noise.
        rows: for every solver, plain numbers.
        retrieval: rates for every task, state and beta.
        sample: the draw on which solvers are compared.
        states: of its queries, by name, to look at.
        solutions: by solver, for all that did not raise.
        unusable: how many patterns hold NaN or infinity.
        untrusted: how many queries have no exact fixed point.
        threads: of torch.
        native: the instruction set of the native operations, if any.
        seconds: of everything.
        auto: whether beta was found from the patterns.
    """

    settings: CompareSettings
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
    seconds: float
    auto: bool


def check(settings: CompareSettings) -> None:
    """Raise `InputError` for the first option that cannot be used."""
    choice(settings.potential_name)
    if settings.suite == "distribution":
        _refuse_unused(settings)
    _check_beta(settings)
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


def _check_beta(settings: CompareSettings) -> None:
    if settings.beta == AUTO:
        names = " or ".join(SIMILARITIES)
        if settings.suite != "solvers" or settings.potential_name not in SIMILARITIES:
            what = settings.potential_name if settings.suite == "solvers" else f"--suite {settings.suite}"
            raise InputError(f"`--beta` must be a number for {what}, got auto; auto is for solvers and {names}")
        return
    try:
        beta = inverse_temperature(settings)
    except ValueError:
        raise InputError(f"`--beta` must be a number > 0 or auto, got {settings.beta!r}; try auto") from None
    if not (beta > 0 and math.isfinite(beta)):
        raise InputError(f"`--beta` must be > 0 and finite, got {beta:g}; it is an inverse temperature, try 8")


def _refuse_unused(settings: CompareSettings) -> None:
    """Raise `InputError` for an option that `--suite distribution` would ignore."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name not in ("suite", "seed", "out", "quick") and value != field.default:
            required = "be left out in --suite distribution, which draws its own tokens in float64"
            raise InputError(f"`--{field.name}` must {required}, got {value}; only --seed, --out and --quick are used")


def load(settings: CompareSettings) -> tuple[CompareSettings, Tensor]:
    """All patterns that can be drawn from, (count, D) float64, and the options with the number of those to store."""
    data = load_digits() if settings.data is None else load_patterns(settings.data)
    if settings.patterns is None:
        # Without any the message is that of a number that is too large.
        settings = dataclasses.replace(settings, patterns=max(min(settings.stored, len(data)), 1))
    if len(data) < settings.stored:
        source = "the digits" if settings.data is None else f"`--data` {settings.data.name}"
        required = f"<= {len(data)}, the rows of {source}"
        raise InputError(f"`--patterns` must be {required}, got {settings.patterns}; lower --patterns")
    return settings, data


@contextmanager
def _threads(settings: CompareSettings) -> Iterator[int]:
    """One thread for problems too small to share, for which threads mostly wait for each other on a busy machine."""
    before = torch.get_num_threads()
    if settings.stored * settings.queries <= SHARED_FROM and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def run(settings: CompareSettings, progress: Progress) -> Comparison:
    """Compare all solvers."""
    begin = time.perf_counter()
    settings, data = load(settings)
    noise = noise_of(None if settings.data is None else data)
    count, device = min(settings.stored, 200), torch.device(settings.device)
    drawn = draw(data, patterns=settings.stored, queries=count, noise=noise, draws=DRAWS, seed=settings.seed)
    # The betas of the potentials are for the scale of the digits.
    unsaid = settings.data is not None and settings.beta is None and settings.potential_name in SIMILARITIES
    auto = unsaid or settings.beta == AUTO
    if auto:
        known, similarity = drawn.keys[0][drawn.usable[0]], SIMILARITIES[settings.potential_name]
        # A number read from its text is the same number. Without any pattern there is no scale.
        found = repr(float(separating_beta(known, similarity))) if len(known) else None
        settings = dataclasses.replace(settings, beta=found)
        auto = found is not None
    drawn = drawn.to(device, getattr(torch, settings.dtype))
    sample = drawn.first(settings.queries)
    name, beta = settings.potential_name, inverse_temperature(settings)
    rows, solutions = [], {}
    with _threads(settings) as threads:
        methods = contenders(settings.descents)
        if settings.other_potential:
            methods = [dataclasses.replace(m, name=m.name.replace("one-step softmax", "one step")) for m in methods]
        steps = len(methods) + 1
        progress.begin("reference in float64", 0, steps)
        try:
            task = prepare(sample, beta=beta, anchor=settings.anchor, potential=name, seed=settings.seed)
        except ValueError as error:
            remedy = "--suite retrieval tries a potential at every beta, and says at which it is refused"
            raise InputError(f"`--potential {name}` at beta {beta:g} is refused: {error}; {remedy}") from None
        for index, method in enumerate(methods):
            progress.begin(method.name, index + 1, steps)
            row, solution = evaluate(method, task, repeats=settings.repeats, max_seconds=settings.max_seconds)
            progress.end(method.name, row)
            rows.append(row)
            if solution is not None:
                solutions[method.name] = solution
        progress.begin(f"retrieval at {len(FACTORS)} betas, {DRAWS} draws")
        rates = sweep(drawn, settings, progress.part)
        shown = examples(sample, rates, settings)
    unusable = int((~sample.usable).sum())
    untrusted = int((sample.finite & (task.weights == 0).all(-1)).sum())
    seconds = time.perf_counter() - begin
    own = (unusable, untrusted, threads, native_status().isa, seconds, auto)
    return Comparison(settings, noise, rows, rates, sample, shown, solutions, *own)
