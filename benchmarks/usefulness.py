"""The suite `usefulness`: puzzles for a block that is repeated until it settles, and tasks where nothing is gained.

The puzzles are in `puzzles`, and a language model in `looped`. Digits, retrieval and text are here: explicit attention
repeated k times against one equilibrium of the same cost.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import torch

from implicit_attention.studies.measure import one_thread, peak_memory

from . import guard, inpainting
from .looped import suite as looped
from .measure import interleaved, once
from .puzzles import suite as puzzles
from .targets import Row
from .useful_models import CAP, RTOL, Block, Model, models
from .useful_tables import figures, tables
from .useful_tasks import TASKS, Examples, Task
from .useful_training import Plan, first_batch, learned, loss, restored

__all__ = ["METRICS", "NOTES", "TARGETS", "figures", "run", "settings_of", "tables"]

METRICS = (*puzzles.METRICS, "DIGITS", "RETRIEVAL", "TEXT", inpainting.METRIC, looped.METRIC)
#: The targets of the puzzles and of looped layers; the other tasks have none.
TARGETS = (*puzzles.TARGETS, *looped.TARGETS)
#: The metrics take long: each is run, and its newest run reported, on its own.
COMPOSED = True
#: The tests that must pass before anything is trained.
TESTS = (
    "tests/layers/test_attention.py",
    "tests/layers/test_equilibrium.py",
    "tests/layers/test_energy_transformer.py",
)

#: The numbers of explicit steps that equilibria are held against.
GROUPS = (2, 4)
PLANS = {
    "digits": Plan(steps=800, batch=32, rates=(3e-3, 1e-2)),
    "retrieval": Plan(steps=600, batch=32, rates=(3e-3, 1e-2)),
    "text": Plan(steps=600, batch=32, rates=(1e-2, 3e-2)),
}
#: Tasks in which spins stand beside attention.
SPINS = ("digits", "retrieval")
#: Trainings run side by side, each in a process with one thread; fewer optimiser steps are not worth the start of one.
WORKERS, WORTH_A_PROCESS = 2, 2000

NOTES = (
    *puzzles.NOTES,
    "Digits, retrieval and text: a model is an embedding, learned positions, pre-norm attention with a residual "
    "connection (once or repeatedly), one feed-forward part (GELU, width 2 d) and a linear head, at every token or "
    "over their mean; only the attention differs. d = 32, 2 heads; beta is learned per head, and for equilibria the "
    "anchor. With the same seed all begin with the same weights.",
    "`explicit, k steps`: x <- x + attention(norm(x)), k times. `equilibrium, k evaluations`: k of its map "
    "(Picard's iteration, differentiated through its steps), the last of which only tells the residual, then the "
    "values are read out. The budget of k evaluations is followed by the one that costs the FLOPs of k explicit "
    f"steps. `at most`: stops at the relative residual {RTOL:g}, by Anderson() with the gradient of Implicit(), also "
    f"of what has not got there. `solved`: the same, with a cap of {CAP} evaluations.",
    f"`spins`: SpinAttention with KineticPlefka(order=1) and AmosResponse, m = response(norm(W h) + J m) with J by "
    f"softmax of the field, one step from m without couplings, or solved to {RTOL:g}. `no attention`: no token reads "
    "another.",
    "FLOPs of one sample of N tokens: projections x 8 N d^2 + passes x 4 N^2 d + embedding, feed-forward part and "
    "head, the same for all. k explicit steps have k of both; an equilibrium has one set of projections, and a pass "
    "for each evaluation and for the read-out; spins have half of these, and of a pass. Masked pairs count; norms, "
    "softmax and Anderson's algebra do not. `counted`: by torch.utils.flop_counter over one batch, in the written-out "
    "implementation, where a mask widens the products, and finished queries wait for others of their block of rows.",
    "Digits: scikit-learn's 1797 images, patches of 2 x 2 as 16 tokens, 1097 to train, 350 to validate, 350 to "
    "test. Retrieval: multi-query associative recall, 4 pairs of a key token and a value token, then 24 keys whose "
    "values are asked for; 32 keys, 16 values. Text: the next character of pydoc_data.topics in windows of 32 that "
    "do not overlap (no context reaches back over their beginning); the first eight tenths to train, the next to "
    "validate, the last to test.",
    "All models of a task see as many batches of 32, the same ones in the same order: AdamW (weight decay 0.01, "
    "gradients clipped at norm 1), one cycle of the learning rate. Of two rates (digits and retrieval 3e-3, 1e-2; "
    "text 1e-2, 3e-2), the one that is better on the validation part with the first seed is used for all seeds.",
    "Scores are means +- standard deviations over three seeds, which is a rough spread. `converged`: the part of "
    f"the test's queries within the tolerance {RTOL:g} when the evaluations are used up.",
    "`training s`: one training, two of them side by side. `ms`: forward, and training step (forward and backward), "
    "of a batch of 32, all models in turns in one process. One thread each. `peak MB`: of a training step, beyond "
    "weights and batch.",
    *inpainting.NOTES,
    *looped.NOTES,
)


@dataclasses.dataclass(frozen=True)
class Learned:
    """One model that is trained for one task."""

    task: str
    model: Model
    plan: Plan

    @property
    def metric(self) -> str:
        return self.task.upper()

    @property
    def name(self) -> str:
        return f"{self.task}: {self.model.name}"


@dataclasses.dataclass(frozen=True)
class Costs:
    """Time and memory of all trained models of a task."""

    task: str
    plan: Plan

    @property
    def metric(self) -> str:
        return self.task.upper()

    @property
    def name(self) -> str:
        return f"{self.task}: costs"


Setting = Learned | Costs | puzzles.Setting | inpainting.Setting | looped.Setting
#: What makes the row of a setting, by the class of the setting.
RowsByKind: TypeAlias = dict[type, Callable[[Any], Row]]


def settings_of(quick: bool) -> tuple[Setting, ...]:
    groups = GROUPS[:1] if quick else GROUPS
    plans = {task: plan.quick() for task, plan in PLANS.items()} if quick else PLANS
    compared = [
        Learned(task, model, plans[task])
        for task in TASKS
        for model in models(load(task, None).shape, groups, spins=task in SPINS)
    ]
    costs = (Costs(task, plans[task]) for task in TASKS)
    return (*puzzles.settings_of(quick), *compared, *costs, *inpainting.settings_of(quick), *looped.settings_of(quick))


def run(
    settings: Iterable[Setting],
    *,
    metrics: Iterable[str] = METRICS,
    repeats: int = 5,
    max_seconds: float = 4.0,
    progress: Callable[[Row], None] = lambda row: None,
    keep: Path | None = None,
) -> list[Row]:
    """Train every model of these metrics, then time those of a task in turns; `progress` gets each finished row.

    Trainings on puzzles and of looped models are kept in the folder `keep`.
    """
    settings = [setting for setting in settings if setting.metric in set(metrics)]
    if settings and (reason := guard.red(TESTS)) is not None:
        return [_refused(setting, reason, progress) for setting in settings]
    trained: dict[str, dict[Model, bytes]] = {name: {} for name in TASKS}
    # At these sizes threads wait for each other longer than they work; and one thread repeats a sum exactly.
    with one_thread():
        asked = [setting for setting in settings if isinstance(setting, puzzles.Setting)]
        rows = puzzles.run(asked, repeats=repeats, max_seconds=max_seconds, progress=progress, keep=keep)
        compared = [setting for setting in settings if isinstance(setting, Learned)]
        steps = [s.plan.steps * (len(s.plan.rates) + len(s.plan.seeds) - 1) for s in compared]
        for setting, (row, weights) in zip(compared, _in_processes(trained_row, compared, sum(steps)), strict=True):
            trained[setting.task][setting.model] = weights
            rows.append(row)
            progress(row)
        for setting in settings:
            if isinstance(setting, Costs):
                rows.append(costs(setting, trained[setting.task], repeats, max_seconds))
                progress(rows[-1])
        rows += _inpainted(settings, repeats, max_seconds, progress)
        rows += _looped(settings, repeats, max_seconds, progress, keep)
    return rows


def _looped(
    settings: list[Setting], repeats: int, max_seconds: float, progress: Callable[[Row], None], keep: Path | None
) -> Iterator[Row]:
    learning = [setting for setting in settings if isinstance(setting, looped.Trained)]
    made = _in_processes(functools.partial(looped.trained_row, keep=keep), learning, looped.updates_of(learning))
    rows_by_kind: RowsByKind = {
        looped.Trained: lambda setting: next(made),
        looped.Counted: looped.counted_row,
        looped.Decoding: lambda setting: looped.decoding_row(setting, repeats, max_seconds),
    }
    return _told(settings, rows_by_kind, progress)


def _inpainted(
    settings: list[Setting], repeats: int, max_seconds: float, progress: Callable[[Row], None]
) -> Iterator[Row]:
    learning = [setting for setting in settings if isinstance(setting, inpainting.Trained)]
    updates = sum(setting.plan.updates * len(setting.plan.seeds) for setting in learning)
    made = _in_processes(inpainting.trained_row, learning, updates)
    rows_by_kind: RowsByKind = {
        inpainting.Trained: lambda setting: next(made),
        inpainting.Untrained: inpainting.untrained_row,
        inpainting.Costs: lambda setting: inpainting.costs_row(setting, repeats, max_seconds),
    }
    return _told(settings, rows_by_kind, progress)


def _told(settings: list[Setting], rows_by_kind: RowsByKind, progress: Callable[[Row], None]) -> Iterator[Row]:
    """The rows of settings of these kinds, each told as soon as it is there."""
    for setting in settings:
        if type(setting) in rows_by_kind:
            row = rows_by_kind[type(setting)](setting)
            progress(row)
            yield row


def _refused(setting: Setting, reason: str, progress: Callable[[Row], None]) -> Row:
    row = {"name": setting.name, "metric": setting.metric, "error": reason, "evidence": {}, "ratios": {}}
    row["wall_seconds"] = 0.0
    progress(row)
    return row


@functools.cache
def load(task: str, held: int | None) -> Task:
    """A task with so many held-out examples in each part, or all there are."""
    return TASKS[task](validation=held, test=held)


def _in_processes(function: Callable[[Any], Any], settings: list[Any], steps: int) -> Iterator[Any]:
    """function(setting) in the order of the settings, of which all together make so many steps."""
    if steps < WORTH_A_PROCESS:
        yield from map(function, settings)
        return
    workers = min(WORKERS, os.cpu_count() or 1)
    # A forked child could wait forever for a thread of torch that it does not have.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.map(function, settings)


def trained_row(setting: Learned) -> tuple[Row, bytes]:
    """The row of a model with its trainings, and the weights of its first seed."""
    begin = time.perf_counter()
    task = load(setting.task, setting.plan.held)
    found, weights = learned(task, setting.model, setting.plan)
    row = {
        "name": setting.name,
        "metric": setting.metric,
        "threads": torch.get_num_threads(),
        "shape": dataclasses.asdict(task.shape),
        "data": task.data | {"validation": len(task.validation.inputs), "test": len(task.test.inputs)},
        "score": task.score,
        "chance": task.chance,
        "plan": dataclasses.asdict(setting.plan),
        **found,
    }
    return {**row, "wall_seconds": time.perf_counter() - begin}, weights


def costs(setting: Costs, trained: dict[Model, bytes], repeats: int, max_seconds: float) -> Row:
    """Forward and training step of a batch, of all trained models in turns, and their peak memory."""
    begin = time.perf_counter()
    task = load(setting.task, setting.plan.held)
    batch = first_batch(task, setting.plan)
    functions: dict[str, Callable[[], Any]] = {}
    for model, weights in trained.items():
        block = restored(model, task, weights)
        functions[f"{model.name} forward"] = functools.partial(forward, block, batch)
        functions[f"{model.name} training"] = functools.partial(training_step, block, batch)
    memory = {name: peak_memory(function, torch.device("cpu")) for name, function in functions.items()}
    first = {name: once(function)[1] for name, function in functions.items()}
    times = interleaved(functions, first, repeats=repeats, max_seconds=max_seconds)
    floor = next(model for model in trained if model.group == 1)
    ratios = {
        f"{model.name}, training step": times[f"{model.name} training"].median / times[f"{floor.name} training"].median
        for model in trained
        if model.kind in ("budget", "solved", "spins")
    }
    return {
        "name": setting.name,
        "metric": setting.metric,
        "threads": torch.get_num_threads(),
        "batch": len(batch.inputs),
        "evidence": {},
        "seconds": {name: dataclasses.asdict(timing) for name, timing in times.items()},
        "peak_memory_bytes": memory,
        "ratios": ratios,
        "wall_seconds": time.perf_counter() - begin,
    }


@torch.no_grad()
def forward(block: Block, batch: Examples) -> None:
    block(batch.inputs)


def training_step(block: Block, batch: Examples) -> None:
    block.zero_grad()
    loss(block, batch).backward()
