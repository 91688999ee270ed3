"""The suite `solve`: C1, C2, C3, C5 and C7, one row per setting and one for the import."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable

import torch

from implicit_attention.studies.measure import peak_memory

from . import guard
from .baselines import CONTENDERS, PicardCounts, picard_counts, unrolled
from .compare import compared, ratios
from .measure import import_times
from .problems import ATOL, FULL, QUICK, RTOL, Data, Setting, draw
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
IMPORT_TESTS = ("tests/test_imports.py",)

NOTES = (
    "`solve()` runs with its default solver, adjoint and implementation (the line of the machine says which that is); "
    "every query must be CONVERGED, and 99.9 % reach |f(z) - z| <= 1e-8 + 1e-4 |f(z)| in float64 (before 2026-11-29 "
    "all, with 2 % added).",
    "torchdeq: get_solver(name) with stop_mode='rel', the same tolerance and max_iter 100; a run that does not stop is "
    "timed at its cap. `entry`: as its users call it, heads and queries of a batch entry are one vector, whose norm "
    "decides; single queries then end above the tolerance. Otherwise: a row per query, the same residual for each.",
    "Picard's evaluations are counted by hand over all queries (cap 1000).",
    "Unrolled autograd (C5) makes as many steps as Picard's slowest query needs evaluations, at most 200: the same "
    "residual for every query. Its memory is compared at 32 steps, where beta*sqrt(D) = 2.",
    "C5's memory is largest where conjugate gradients leave single queries (saddles), which are solved again, with "
    "copies of the keys that they read.",
    "C7 is the time until torch and then the package are imported, over that until torch is, in one process: "
    "the package loads its operations, everything else when it is asked for.",
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
    names = [n for n in CONTENDERS if any(n in pair for pair in wanted.values())]
    found, times = compared(names, data, counts, repeats=repeats, max_seconds=max_seconds)
    made = ratios(wanted, times)
    if (forward := made.get("C1")) is not None:
        made["C1"] = forward / counts.mean
    row: Row = {
        "name": setting.name,
        **dataclasses.asdict(setting),
        "beta": setting.beta,
        "dtype": str(data.queries.dtype).removeprefix("torch."),
        "tolerance": {"rtol": RTOL, "atol": ATOL},
        "picard": counts._asdict(),
        "evidence": found,
        "seconds": {name: dataclasses.asdict(timing) for name, timing in times.items()},
        "ratios": made,
    }
    if "C5" in metrics and setting.sharpness == MEMORY_SHARPNESS:
        row["peak_memory_bytes"] = memory = memories(data, counts)
        made["C5 memory"] = memory["unrolled"] / memory["ours_training"] if "ours_training" in times else None
    return {**row, "wall_seconds": time.perf_counter() - begin}


def memories(data: Data, counts: PicardCounts) -> dict[str, int]:
    """Peak bytes of a training step beyond the inputs."""
    functions = {
        "ours_training": CONTENDERS["ours_training"].make(data, counts),
        "sdpa_training": CONTENDERS["sdpa_training"].make(data, counts),
        "unrolled": unrolled(data, MEMORY_STEPS),
    }
    return {name: peak_memory(function, torch.device("cpu")) for name, function in functions.items()}


def imports(repeats: int) -> Row:
    """The row of C7."""
    begin = time.perf_counter()
    row: Row = {"name": "import", "keys": None, "anchor": None}
    if (reason := guard.red(IMPORT_TESTS)) is not None:
        return {**row, "error": reason, "seconds": {}, "ratios": {"C7": None}, "wall_seconds": 0.0}
    times = import_times(("torch", "implicit_attention"), repeats=repeats)
    return {
        **row,
        "seconds": {name: dataclasses.asdict(timing) for name, timing in times.items()},
        "ratios": {"C7": times["implicit_attention"].median / times["torch"].median},
        "wall_seconds": time.perf_counter() - begin,
    }
