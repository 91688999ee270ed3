"""The suite `train`: training steps of ours, explicit attention, unrolled autograd and torchdeq, and G4 on a GPU."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable

from .baselines import picard_counts
from .block import BlockSetting, block_row
from .compare import compared, ratios
from .environment import default_device
from .figures import train_figures as figures
from .problems import Setting, Shape, draw
from .targets import TRAIN as TARGETS
from .targets import Row
from .train_tables import tables

__all__ = ["METRICS", "NOTES", "TARGETS", "figures", "run", "settings_of", "tables"]

METRICS = ("STEP", "LENGTH", "BLOCK", "G4")

RATIOS = {
    "ours / SDPA": ("ours_training", "sdpa_training"),
    "unrolled / ours": ("unrolled", "ours_training"),
    "torchdeq fpi / ours": ("torchdeq_training_fixed_point_iter", "ours_training"),
    "torchdeq anderson / ours": ("torchdeq_training_anderson", "ours_training"),
}

NOTES = (
    "A training step is the forward pass and the gradient of sum(c * state), c fixed, for queries and keys. All solve "
    "to the same residual for every query: unrolled autograd by as many steps as Picard's slowest query needs, at most "
    "200; torchdeq with stop_mode='rel', a row per query, forward and backward by the same solver to the same "
    "tolerance, at most 100 evaluations each.",
    "Gradient errors are those of one head against dense float64 solves. Rivals are timed whatever theirs is.",
    "BLOCK: training step of a pre-norm transformer block, width 256, 4 heads, causal, by ImplicitAttention with its "
    "defaults / with max_steps=0.",
    "Nothing is timed whose tests fail, nor an answer of ours that is wrong.",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """What one row measures: a metric, and the problem it is measured on."""

    metric: str
    problem: Setting | BlockSetting

    @property
    def name(self) -> str:
        return f"{self.metric}: {self.problem.name}"


def settings_of(quick: bool, device: str | None = None) -> tuple[Case, ...]:
    """The rows of a run, on the GPU if there is one."""
    device = default_device() if device is None else device
    where = {"device": device}
    chosen = (("gaussian", 2.0, 0.5), ("gaussian", 4.0, 0.0), ("clustered", 2.0, 0.5), ("clustered", 8.0, 0.0))
    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    shape, block = Shape(), BlockSetting(device=device)
    if quick:
        chosen, lengths = chosen[:1], (64, 128)
        shape, block = Shape(length=64), BlockSetting(length=64, batch=1, device=device)
    cases = [
        *(Case("STEP", Setting(*problem, shape, **where)) for problem in chosen),  # type: ignore[arg-type]
        *(Case("LENGTH", Setting("gaussian", 2.0, 0.5, Shape(1, 4, length), **where)) for length in lengths),  # type: ignore[arg-type]
        Case("BLOCK", block),
    ]
    if device != "cpu":
        half = {"dtype": "bfloat16", "rtol": 1e-3, **where}
        for dim in (64, 128):
            cases.append(Case("G4", Setting("gaussian", 2.0, 0.5, Shape(4, 16, 4096, dim), **half)))  # type: ignore[arg-type]
    return tuple(cases)


def run(
    settings: Iterable[Case],
    *,
    metrics: Iterable[str] = METRICS,
    repeats: int = 5,
    max_seconds: float = 4.0,
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Measure every setting of these metrics; `progress` is called with each finished row."""
    wanted, rows = set(metrics), []
    for case in settings:
        if case.metric in wanted:
            begin = time.perf_counter()
            row: Row = {"name": case.name, "metric": case.metric, **dataclasses.asdict(case.problem)}
            if isinstance(case.problem, BlockSetting):
                row |= block_row(case.problem, repeats=repeats, max_seconds=max_seconds)
            else:
                row |= step_row(case.metric, case.problem, repeats=repeats, max_seconds=max_seconds)
            rows.append({**row, "wall_seconds": time.perf_counter() - begin})
            progress(rows[-1])
    return rows


def step_row(metric: str, problem: Setting, *, repeats: int, max_seconds: float) -> Row:
    """All training steps on one problem; G4 is ours and SDPA's alone."""
    data = draw(problem)
    counts = picard_counts(data)
    wanted = {"G4": RATIOS["ours / SDPA"]} if metric == "G4" else RATIOS
    names = list(dict.fromkeys(name for pair in wanted.values() for name in pair))
    found, times = compared(names, data, counts, repeats=repeats, max_seconds=max_seconds)
    return {
        "picard": counts._asdict(),
        "evidence": found,
        "seconds": {name: dataclasses.asdict(timing) for name, timing in times.items()},
        "ratios": ratios(wanted, times),
    }
