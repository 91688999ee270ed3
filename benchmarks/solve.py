"""The suite `solve`: C1, C2, C3, C5 and C7, one row per setting and one for the import."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from implicit_attention.cli.measure import peak_memory

from .baselines import CONTENDERS, Contender, PicardCounts, Run, picard_counts, unrolled
from .measure import Timing, import_times, interleaved
from .problems import ATOL, FULL, QUICK, RTOL, Data, Setting, draw, evidence, gradient_error
from .targets import SOLVE as TARGETS
from .targets import Row

__all__ = ["METRICS", "NOTES", "TARGETS", "run", "settings_of"]

#: The ratios of a metric: numerator and denominator among the contenders.
RATIOS = {
    "C1": {"C1": ("ours_forward", "sdpa_forward")},
    "C2": {
        "C2 anderson": ("torchdeq_anderson", "ours_forward"),
        "C2 fpi": ("torchdeq_fixed_point_iter", "ours_forward"),
        "C2 anderson entry": ("torchdeq_anderson_entry", "ours_forward"),
        "C2 fpi entry": ("torchdeq_fixed_point_iter_entry", "ours_forward"),
    },
    "C3": {"C3": ("ours_training", "sdpa_training")},
    "C5": {"C5": ("unrolled", "ours_training")},
}
METRICS = (*RATIOS, "C7")
#: The peak memory of C5 is measured where beta * sqrt(D) is this, with this many unrolled steps.
MEMORY_SHARPNESS, MEMORY_STEPS = 2.0, 32
#: The library is timed only where so large a part of the queries is solved, and with so small a gradient error.
CONVERGED, GRADIENT_ERROR = 0.999, 1e-2

NOTES = (
    "`solve()` runs with its default solver and adjoint; every query must reach |f(z) - z| <= 1e-8 + 1e-4 |f(z)|.",
    "torchdeq: get_solver(name) with stop_mode='rel', the same tolerance and max_iter 100; a run that does not stop is "
    "timed at its cap. `entry`: as its users call it, heads and queries of a batch entry are one vector, whose norm "
    "decides; single queries then end above the tolerance. Otherwise: a row per query, the same residual for each.",
    "Picard's evaluations are counted by hand over all queries (cap 1000).",
    "Unrolled autograd (C5) makes as many steps as Picard's slowest query needs evaluations, at most 200: the same "
    "residual for every query. Its memory is compared at 32 steps, where beta*sqrt(D) = 2.",
    "An answer of ours that is wrong (float64 residuals, dense float64 gradient) has no ratio and misses its targets.",
)


def settings_of(quick: bool) -> tuple[Setting, ...]:
    return QUICK if quick else FULL


def run(
    settings: Iterable[Setting],
    *,
    metrics: Iterable[str] = METRICS,
    repeats: int = 5,
    max_seconds: float = 4.0,
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Measure every setting, then the import; `progress` is called with each finished row."""
    metrics = list(metrics)
    rows = []
    if any(metric in RATIOS for metric in metrics):
        for setting in settings:
            rows.append(measured(setting, metrics, repeats, max_seconds))
            progress(rows[-1])
    if "C7" in metrics:
        rows.append(imports(repeats))
        progress(rows[-1])
    return rows


def measured(setting: Setting, metrics: list[str], repeats: int, max_seconds: float) -> Row:
    """The row of one setting: evidence first, then times in turns, then ratios."""
    begin = time.perf_counter()
    data = draw(setting)
    counts = picard_counts(data)
    wanted = {name: pair for metric in metrics for name, pair in RATIOS.get(metric, {}).items()}
    names = {n: CONTENDERS[n] for n in CONTENDERS if any(n in pair for pair in wanted.values())}
    functions, found, first = {}, {}, {}
    for name, contender in names.items():
        functions[name] = contender.make(data, counts)
        start = time.perf_counter()
        result, found[name] = attempt(contender, functions[name])
        first[name] = time.perf_counter() - start
        if result is not None and contender.solves:
            found[name] |= checked(name, data, result)
    timed = {name: function for name, function in functions.items() if "error" not in found[name]}
    times = interleaved(timed, first, repeats=repeats, max_seconds=max_seconds)
    # A rival that breaks off has no ratio at all; ours without an answer has the ratio None and misses its targets.
    ratios = {
        name: _ratio(name, pair, times, counts)
        for name, pair in wanted.items()
        if all(contender in times or contender.startswith("ours") for contender in pair)
    }
    row: Row = {
        "name": setting.name,
        **dataclasses.asdict(setting),
        "beta": setting.beta,
        "dtype": str(data.queries.dtype).removeprefix("torch."),
        "tolerance": {"rtol": RTOL, "atol": ATOL},
        "picard": counts._asdict(),
        "evidence": found,
        "seconds": {name: dataclasses.asdict(timing) for name, timing in times.items()},
        "ratios": ratios,
    }
    if "C5" in metrics and setting.sharpness == MEMORY_SHARPNESS:
        row["peak_memory_bytes"] = memory = memories(data, counts)
        ratios["C5 memory"] = memory["unrolled"] / memory["ours_training"] if "ours_training" in timed else None
    return {**row, "wall_seconds": time.perf_counter() - begin}


def attempt(contender: Contender, function: Callable[[], Run]) -> tuple[Run | None, dict[str, Any]]:
    """One run, and the evaluations it took or the error it raised."""
    try:
        result = function()
    except (RuntimeError, ValueError) as error:
        return None, {"label": contender.label, "error": f"{type(error).__name__}: {error}"}
    evaluations = result.evaluations.double()
    return result, {
        "label": contender.label,
        "evaluations_mean": float(evaluations.mean()),
        "evaluations_max": int(evaluations.max()),
    }


def checked(name: str, data: Data, result: Run) -> dict[str, Any]:
    """The evidence for an answer; a wrong one of the library gets an `error` and is not timed."""
    found = evidence(data, result.state)
    if result.gradients is not None:
        found["gradient_error"] = gradient_error(data, result.state, *result.gradients)
    wrong = found["converged"] < CONVERGED or not found.get("gradient_error", 0.0) <= GRADIENT_ERROR
    if wrong and name.startswith("ours"):
        found["error"] = "the answer is wrong: see residuals and gradient error"
    return found


def memories(data: Data, counts: PicardCounts) -> dict[str, int]:
    """Peak bytes of a training step beyond the inputs."""
    functions = {
        "ours_training": CONTENDERS["ours_training"].make(data, counts),
        "sdpa_training": CONTENDERS["sdpa_training"].make(data, counts),
        "unrolled": unrolled(data, MEMORY_STEPS),
    }
    return {name: peak_memory(function, torch.device("cpu")) for name, function in functions.items()}


def _ratio(name: str, pair: tuple[str, str], times: dict[str, Timing], counts: PicardCounts) -> float | None:
    if not all(contender in times for contender in pair):
        return None
    value = times[pair[0]].median / times[pair[1]].median
    return value / counts.mean if name == "C1" else value


def imports(repeats: int) -> Row:
    """The row of C7."""
    begin = time.perf_counter()
    times = import_times(("torch", "implicit_attention"), repeats=repeats)
    return {
        "name": "import",
        "keys": None,
        "anchor": None,
        "seconds": {name: dataclasses.asdict(timing) for name, timing in times.items()},
        "ratios": {"C7": times["implicit_attention"].median / times["torch"].median},
        "wall_seconds": time.perf_counter() - begin,
    }
