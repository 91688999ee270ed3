"""The puzzles as a part of the suite `usefulness`: their settings, runs side by side, targets and notes."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ..targets import Row
from . import arithmetic, mazes, mazes_image, paths, prefix, recipes, sudoku, two_streams
from .contenders import Contender, Costs, Entry, Plan, costs_row, entry_row, trial
from .training import CAP, RTOL

PLANS: tuple[Plan, ...] = (
    mazes.PLAN,
    *sudoku.PLANS,
    two_streams.PLAN,
    prefix.PLAN,
    paths.PLAN,
    mazes_image.PLAN,
    arithmetic.PLAN,
    recipes.PLAN,
)
METRICS = (*(plan.metric for plan in PLANS), Costs.metric)
TARGETS = tuple(claim.target(plan.metric) for plan in PLANS for claim in plan.claims)
#: Trainings run side by side, each in a process with one thread; a look is not worth the start of one.
WORKERS, WORTH_A_PROCESS = 2, 500

NOTES = (
    "Puzzles: x = embed(inputs); a block is z <- norm(z + x + attention(z)), z <- norm(z + mlp(z)) with softmax "
    "attention over a token's edges (width 32, feed-forward part twice as wide, no positions); a linear head reads the "
    "state of every token. `stack`: every step has a block with weights of its own; `tied`: one block for all steps. "
    "With the same seed all begin with the same embedding, head and first block, and see the same batches.",
    f"`solved`: Picard's iteration from zeros to the relative residual {RTOL:g}, at most {CAP} evaluations; puzzles "
    "that are done leave the work. `exact`: the part of the puzzles that are wholly "
    "right. Means +- standard deviations over three seeds; `better`, `worse`: by more than two standard errors, of the "
    "seeds or of the puzzles, whichever are larger.",
    "FLOPs of a puzzle of N tokens with K edges each: evaluations x N (8 d^2 + 4 w d^2 + 4 K d) + 2 N d (features + "
    "classes); missing edges count, norms, softmax and the solver's algebra do not. Where tokens are few, a mask over "
    "all pairs is faster, and its products are more.",
    "`fixed points`: settled states of one puzzle that differ by more than 100 tolerances of their size, over all "
    "solvers and Picard's iteration from three random states; `elsewhere`: settled puzzles whose state so differs from "
    "Picard's from zeros.",
    "TIMES: contenders in turns in one process, one thread, with the weights of the beginning: the first batch of the "
    "training, and fixed numbers of evaluations; a solve makes those that are told where it is asked. `peak MB`: of "
    "the training step, beyond the weights.",
    *(note for plan in PLANS for note in plan.notes),
)

Setting: TypeAlias = Entry | Costs
Job = tuple[Plan, Contender, int]


def settings_of(quick: bool) -> tuple[Setting, ...]:
    plans = [plan.quick() if quick else plan for plan in PLANS]
    return (*(Entry(p, contender) for p in plans for contender in p.contenders), *map(Costs, plans))


def run(
    settings: Iterable[Setting],
    *,
    repeats: int,
    max_seconds: float,
    progress: Callable[[Row], None],
    keep: Path | None = None,
) -> list[Row]:
    """Train and ask every contender with every seed; then time those of a plan in turns.

    Weights, and what they found, are kept in the folder `keep`: a run that was ended goes on where it was, and one that
    asks other questions trains nothing anew.
    """
    settings = list(settings)
    entries = [setting for setting in settings if isinstance(setting, Entry)]
    done = _trials([(entry.plan, entry.contender, seed) for entry in entries for seed in entry.plan.seeds], keep)
    rows: list[Row] = []
    for setting in settings:
        if isinstance(setting, Entry):
            rows.append(entry_row(setting, [next(done) for _ in setting.plan.seeds]))
        else:
            rows.append(costs_row(setting, repeats, max_seconds))
        progress(rows[-1])
    return rows


def _kept(keep: Path | None, plan: Plan, contender: Contender, seed: int) -> dict[str, Any]:
    """A trial, or what is kept of it if the same was asked."""
    if keep is None:
        return trial(plan, contender, seed)
    name = re.sub(r"[^a-z0-9]+", "-", f"{plan.metric} {contender.name} {seed}".lower())
    sets = contender.sets or plan.sets
    asked = repr(
        (
            contender.recipe,
            [way.name for way in contender.ways],
            sets,
            plan.puzzles,
            contender.solvers,
            contender.checks,
        )
    )
    path = keep / f"{name}.json"
    if path.exists() and (known := json.loads(path.read_text()))["asked"] == asked:
        return dict(known["found"])
    found = trial(plan, contender, seed, path.with_suffix(".pt"))
    keep.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"asked": asked, "found": found}) + "\n")
    return found


def _trials(jobs: list[Job], keep: Path | None = None) -> Iterator[dict[str, Any]]:
    """Runs in the order of the jobs."""
    updates = sum(contender.recipe.updates for _, contender, _ in jobs if contender.recipe is not None)
    if updates < WORTH_A_PROCESS:
        yield from (_kept(keep, *job) for job in jobs)
        return
    workers = min(WORKERS, os.cpu_count() or 1)
    # A forked child could wait forever for a thread of torch that it does not have.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from (future.result() for future in [pool.submit(_kept, keep, *job) for job in jobs])
