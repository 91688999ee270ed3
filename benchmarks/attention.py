"""The suite `attention`: time by sequence length and by evaluations, and memory (C4)."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from . import baselines, guard, memory
from .attention_tables import tables
from .baselines import BACKENDS, OURS, picard_counts
from .compare import CONVERGED, compared, ratios
from .environment import default_device
from .figures import attention_figures as figures
from .measure import interleaved, once, rows_of
from .problems import Setting, Shape, draw
from .targets import ATTENTION as TARGETS
from .targets import Row

__all__ = ["METRICS", "NOTES", "TARGETS", "figures", "run", "settings_of", "tables"]

METRICS = ("LENGTH", "STEPS", "C4")

SOLVERS = {
    "ours": "ours_forward",
    "Picard": "picard",
    "torchdeq fpi": "torchdeq_fixed_point_iter",
    "torchdeq anderson": "torchdeq_anderson",
}
#: Evaluations at which memory is compared; C4 is the growth from the first to the last.
MEMORY_STEPS = (5, 10, 20)
#: Runs of what decides C4, each in a process of its own.
MEMORY_RUNS = 3

NOTES = (
    "LENGTH: all solve the same problem for every query; torchdeq with stop_mode='rel', a row per query, at most 100 "
    "evaluations; Picard, written with SDPA, makes as many as its slowest query needs. Ratios are to the fastest "
    "of torch's SDPA kernels that run here.",
    "STEPS: time of fixed numbers of evaluations, tolerances 0; `per evaluation` is what one more costs, in SDPA "
    "forwards. A query at rest to the last bit stops: the evaluations are counted.",
    "C4: resident set of a fresh process per contender at its highest during one training step, above what it held "
    "with inputs and after a warm-up; on a GPU the allocator's count. N evaluations: converged or not.",
    "`converged %`: in float64 within the tolerance, with nothing added. Before 2026-11-29 2 % were added in float32, "
    "four tolerances in bfloat16.",
    "Nothing is timed whose tests fail, nor an answer of ours that is wrong.",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """The metric of one row, and its problem."""

    metric: str
    problem: Setting
    steps: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        shape = self.problem.shape
        where = f"N {shape.length}, D {shape.dim}, {self.problem.dtype} on {self.problem.device}"
        return f"{self.metric}: {self.problem.name}, {where}"


def settings_of(quick: bool, device: str | None = None) -> tuple[Case, ...]:
    """The rows of a run, on the GPU if there is one."""
    device = default_device() if device is None else device
    if device == "cpu":
        lengths = (64, 128) if quick else (16, 64, 128, 256, 512, 1024, 2048, 4096)
        dtypes: tuple[tuple[str, float], ...] = (("float32", 1e-4),)
        longest, steps = Shape(2, 8, 128 if quick else 4096), Shape(2, 8, 128 if quick else 512)
    else:
        lengths = (1024, 2048) if quick else (1024, 2048, 4096, 8192, 16384)
        dtypes = (("bfloat16", 1e-3), ("float32", 1e-4))
        longest = steps = Shape(2, 8, 1024 if quick else 4096)
    problems = (("gaussian", 2.0, 0.0),) if quick else (("gaussian", 2.0, 0.0), ("clustered", 2.0, 0.5))
    budgets = (1, 4) if quick else (1, 2, 4, 8, 16)
    return (
        *(
            Case("LENGTH", Setting(*problem, Shape(1, 4, length), dtype=dtype, device=device, rtol=rtol))  # type: ignore[arg-type]
            for dtype, rtol in dtypes
            for problem in problems
            for length in lengths
        ),
        Case("STEPS", Setting("gaussian", 2.0, 0.0, steps, device=device), budgets),
        Case("C4", Setting("gaussian", 2.0, 0.0, longest, device=device), (2, 4) if quick else MEMORY_STEPS),
    )


def run(
    settings: Iterable[Case],
    *,
    metrics: Iterable[str] = METRICS,
    repeats: int = 5,
    max_seconds: float = 4.0,
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Measure every setting of these metrics; `progress` is called with each finished row."""

    def measured(case: Case) -> Row:
        row: Row = {"name": case.name, "metric": case.metric, **dataclasses.asdict(case.problem)}
        return row | MEASURES[case.metric](case, repeats=repeats, max_seconds=max_seconds)

    return rows_of(settings, metrics, measured, progress)


def by_length(case: Case, *, repeats: int, max_seconds: float) -> Row:
    """Every SDPA kernel, and every solver to the same residual."""
    data = draw(case.problem)
    counts = picard_counts(data)
    kernels_of_torch = [f"sdpa_{label}" for label in BACKENDS]
    names = [*kernels_of_torch, *SOLVERS.values()]
    found, times = compared(names, data, counts, repeats=repeats, max_seconds=max_seconds)
    best = min((name for name in kernels_of_torch if name in times), key=lambda name: times[name].median)
    wanted = {label: (name, best) for label, name in SOLVERS.items()}
    return {
        "picard": counts._asdict(),
        "best_sdpa": best,
        "evidence": found,
        "seconds": {name: dataclasses.asdict(timing) for name, timing in times.items()},
        "ratios": ratios(wanted, times),
    }


def by_steps(case: Case, *, repeats: int, max_seconds: float) -> Row:
    """Ours and plain repetition with fixed numbers of evaluations."""
    data, device = draw(case.problem), case.problem.device
    found: dict[str, Any] = {}
    functions: dict[str, Callable[[], Any]] = {"sdpa": baselines.picard(data, 1)}
    functions |= {f"picard {steps}": baselines.picard(data, steps) for steps in case.steps}
    if (reason := guard.red(OURS)) is None:
        functions |= {f"ours {steps}": baselines.limited(data, steps, training=False) for steps in case.steps}
    else:
        found["ours"] = {"error": reason}
    first = {}
    for name, function in functions.items():
        result, first[name] = once(function, device)
        found[name] = {"evaluations_mean": float(result.evaluations.double().mean())}
    times = interleaved(functions, first, repeats=repeats, max_seconds=max_seconds, device=device)
    few, many = min(case.steps), max(case.steps)
    made: dict[str, float | None] = {"per evaluation": None, "ours / Picard": None}
    if f"ours {many}" in times:
        more = found[f"ours {many}"]["evaluations_mean"] - found[f"ours {few}"]["evaluations_mean"]
        slope = (times[f"ours {many}"].median - times[f"ours {few}"].median) / more
        made["per evaluation"] = slope / times["sdpa"].median
        made["ours / Picard"] = times[f"ours {many}"].median / times[f"picard {many}"].median
    return {
        "steps": list(case.steps),
        "evidence": found,
        "seconds": {name: dataclasses.asdict(timing) for name, timing in times.items()},
        "ratios": made,
    }


def by_memory(case: Case, *, repeats: int, max_seconds: float) -> Row:
    """C4: ours and SDPA, and both ours and unrolled autograd against the number of evaluations."""
    few, many = min(case.steps), max(case.steps)
    limited = [f"{kind} {steps}" for kind in ("ours", "unrolled") for steps in case.steps]
    reason = guard.red(OURS)
    found: dict[str, Any] = {}
    for name in ("sdpa", "ours", *limited):
        if reason is not None and name.startswith("ours"):
            found[name] = {"error": reason}
            continue
        decides = name in ("sdpa", "ours", f"ours {few}", f"ours {many}")
        turns = MEMORY_RUNS if decides and repeats >= MEMORY_RUNS else 1
        runs = [memory.peak_of(case.problem, name) for _ in range(turns)]
        # The first run's evidence, and the median of the peaks unless one of the processes broke off.
        failed = next((run for run in runs if "error" in run), None)
        peaks = [run.get("peak_bytes", 0) for run in runs]
        found[name] = failed or {**runs[0], "peak_bytes": statistics.median(peaks), "runs": peaks}
    if found["ours"].get("converged", 1.0) < CONVERGED:
        found["ours"]["error"] = "not counted, the answer is wrong: see residuals"

    def ratio(above: str, below: str) -> float | None:
        if any("error" in found[name] for name in (above, below)):
            return None
        value: float = found[above]["peak_bytes"] / found[below]["peak_bytes"]
        return value

    return {
        "steps": list(case.steps),
        "evidence": found,
        "seconds": {},
        "ratios": {
            "C4": ratio("ours", "sdpa"),
            "C4 growth": ratio(f"ours {many}", f"ours {few}"),
            "unrolled": ratio(f"unrolled {many}", "sdpa"),
            "unrolled growth": ratio(f"unrolled {many}", f"unrolled {few}"),
        },
    }


MEASURES: dict[str, Callable[..., Row]] = {"LENGTH": by_length, "STEPS": by_steps, "C4": by_memory}
