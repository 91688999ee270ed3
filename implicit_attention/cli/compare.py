"""`implicit-attention compare`: every solver on the same retrieval task, with evidence."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import Solution, solve
from ..solvers import Anderson
from .data import Sample, draw, load_digits, load_file, noise_of
from .errors import InputError, require_modules
from .evaluate import SUCCESS, energy_of, evaluate, prepare
from .methods import EQUILIBRIUM, EXPLICIT, methods

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
DRAWS = 8
SHARED_FROM = 100_000  # pairs of pattern and query from which several threads are used
RTOL, ATOL, MAX_STEPS = 1e-5, 1e-8, 200
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
class Settings:
    """The options of the command; checked by `checked`."""

    patterns: int = 200
    beta: float = 8.0
    anchor: float = 0.0
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0
    quick: bool = False
    data: Path | None = None

    @property
    def queries(self) -> int:
        """Queries of each task in the comparison of solvers."""
        return min(self.patterns, 50 if self.quick else 200)

    @property
    def descents(self) -> tuple[int, ...]:
        return (5, 20) if self.quick else (5, 20, 50)

    @property
    def repeats(self) -> int:
        return 2 if self.quick else 5

    @property
    def max_seconds(self) -> float:
        """No further timed run of a method is begun after so long."""
        return 0.3 if self.quick else 1.0

    @property
    def has_reference(self) -> bool:
        standard = Settings()
        return self.data is None and all(
            getattr(self, name) == getattr(standard, name) for name in ("patterns", "beta", "anchor")
        )

    def torch_device(self) -> torch.device:
        remedy = "use cpu, cuda or cuda:N"
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise InputError(f"`--device` must name a device, got {self.device!r}; {remedy}") from None
        if device.type not in ("cpu", "cuda"):
            raise InputError(f"`--device` must be cpu or cuda, got {self.device!r}; {remedy}")
        count = torch.cuda.device_count() if device.type == "cuda" else 1
        if (device.index or 0) >= count:
            raise InputError(
                f"`--device` must be present, got {self.device!r} with {count} CUDA devices here; use --device cpu"
            )
        return device

    def check(self) -> None:
        """Raise `InputError` for the first option that cannot be used."""
        if self.patterns < 1:
            raise InputError(f"`--patterns` must be >= 1, got {self.patterns}; store at least one pattern")
        if not (self.beta > 0 and math.isfinite(self.beta)):
            raise InputError(f"`--beta` must be > 0 and finite, got {self.beta:g}; it is an inverse temperature, try 8")
        if not 0 <= self.anchor <= 1:
            raise InputError(f"`--anchor` must be in [0, 1], got {self.anchor:g}; 0 is retrieval")
        if self.dtype not in DTYPES:
            raise InputError(f"`--dtype` must be one of {', '.join(DTYPES)}, got {self.dtype!r}; try float32")
        if not 0 <= self.seed < 2**63 - 1:
            raise InputError(f"`--seed` must be in [0, 2^63 - 1), got {self.seed}; try 0")
        self.torch_device()

    def load(self) -> Tensor:
        data = load_digits() if self.data is None else load_file(self.data)
        if len(data) < self.patterns:
            source = "the digits" if self.data is None else f"`--data` {self.data.name}"
            raise InputError(
                f"`--patterns` must be <= {len(data)}, the rows of {source}, got {self.patterns}; lower --patterns"
            )
        return data


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Everything that `compare` measured."""

    settings: Settings
    noise: float
    rows: list[dict[str, Any]]
    retrieval: list[dict[str, Any]]
    sample: Sample
    solutions: dict[str, Solution]
    unusable: int
    untrusted: int
    threads: int
    seconds: float


def compare(settings: Settings, progress: Callable[[str, dict[str, Any] | None], None]) -> Comparison:
    """Run all methods; `progress(name, row)` is called before (row None) and after each of them."""
    with _threads(settings):
        return _compare(settings, progress)


@contextmanager
def _threads(settings: Settings) -> Iterator[None]:
    """One thread for problems too small to share, for which threads mostly wait for each other on a busy machine."""
    before = torch.get_num_threads()
    if settings.patterns * settings.queries <= SHARED_FROM and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compare(settings: Settings, progress: Callable[[str, dict[str, Any] | None], None]) -> Comparison:
    begin = time.perf_counter()
    data = settings.load()
    noise = noise_of(None if settings.data is None else data)
    device, dtype = settings.torch_device(), DTYPES[settings.dtype]
    drawn = draw(
        data,
        patterns=settings.patterns,
        queries=min(settings.patterns, 200),
        noise=noise,
        draws=DRAWS,
        seed=settings.seed,
    ).to(device, dtype)
    sample = drawn.first().limited(settings.queries)
    progress("reference in float64", None)
    task = prepare(sample, beta=settings.beta, anchor=settings.anchor, rtol=RTOL, atol=ATOL, seed=settings.seed)
    rows, solutions = [], {}
    for method in methods(rtol=RTOL, atol=ATOL, max_steps=MAX_STEPS, descents=settings.descents):
        progress(method.name, None)
        row, solution = evaluate(method, task, repeats=settings.repeats, max_seconds=settings.max_seconds, trace=True)
        progress(method.name, row)
        rows.append(row)
        if solution is not None:
            solutions[method.name] = solution
    progress("retrieval over 8 draws", None)
    block = retrieval(drawn, settings)
    return Comparison(
        settings=settings,
        noise=noise,
        rows=rows,
        retrieval=block,
        sample=sample,
        solutions=solutions,
        unusable=int((~sample.usable).sum()),
        threads=torch.get_num_threads(),
        untrusted=int((sample.finite & (task.weights == 0).all(-1)).sum()),
        seconds=time.perf_counter() - begin,
    )


def retrieval(drawn: Sample, settings: Settings) -> list[dict[str, Any]]:
    """Retrieval rates, mean and standard deviation over the draws.

    One step against the equilibrium, at `--beta` and at multiples of it, and the pattern with the largest score.
    """
    solver = Anderson(rtol=RTOL, atol=ATOL, max_steps=MAX_STEPS)
    states: list[tuple[str, float | None, Tensor]] = []
    with torch.no_grad():
        for sharp in (settings.beta, *(factor * settings.beta for factor in SHARPER)):
            energy = energy_of(drawn.keys, drawn.queries, drawn.usable, beta=sharp, anchor=settings.anchor)
            solution = solve(energy, drawn.queries, solver=solver, on_failure="ignore")
            states.append(("one step", sharp, energy.fixed_point_map(drawn.queries)))
            states.append(("equilibrium", sharp, solution.value))
        best = [_best(*row) for row in zip(drawn.keys, drawn.queries, drawn.usable, strict=True)]
        states.append(("largest score", None, torch.stack(best)))
    half = drawn.queries.shape[-2] // 2
    targets = drawn.targets.double()
    lengths = targets.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    block = []
    for task, part in (("half-masked", slice(0, half)), ("noisy", slice(half, None))):
        for name, beta, z in states:
            hits = ((z.double() - targets).norm(dim=-1) / lengths)[..., part] < SUCCESS
            rates = hits.double().mean(-1)
            entry: dict[str, Any] = {
                "task": task,
                "state": name,
                "beta": beta,
                "rates": rates.tolist(),
                "mean": float(rates.mean()),
                "std": float(rates.std()),
            }
            if settings.has_reference and beta == settings.beta:
                mean, std = REFERENCE[task, name]
                deviations = (entry["mean"] - mean) / std
                entry |= {
                    "reference_mean": mean,
                    "reference_std": std,
                    "deviations": deviations,
                    "within_three": abs(deviations) <= 3,
                }
            block.append(entry)
    return block


def _best(keys: Tensor, queries: Tensor, usable: Tensor) -> Tensor:
    """The usable pattern with the largest score <pattern, query>, for each query of one draw."""
    scores = (queries @ keys.mT).masked_fill(~usable, -torch.inf)
    return keys[scores.argmax(-1)]


def compare_to_files(settings: Settings, out: Path) -> None:
    """Check the options, compare with progress, print the tables, write the three files into `out`."""
    require_modules("rich", "matplotlib", *(() if settings.data else ("sklearn",)))
    settings.check()
    with _writable(out):
        out.mkdir(parents=True, exist_ok=True)
    from .report import figures, write_json
    from .table import Progress, output_console, show

    with Progress(total=len(methods(rtol=RTOL, atol=ATOL, max_steps=1, descents=settings.descents)) + 3) as progress:
        comparison = compare(settings, progress.update)
        progress.update("figures", None)
        with _writable(out):
            write_json(comparison, out / "compare.json")
            figures(comparison, out)
    show(comparison, output_console(), out)


@contextmanager
def _writable(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(f"`--out` must be a writable folder, got {str(out)!r} ({reason}); choose another") from None


__all__ = ["EQUILIBRIUM", "EXPLICIT", "Comparison", "Settings", "compare", "compare_to_files", "retrieval"]
