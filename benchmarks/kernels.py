"""G1, G2, G5 and G6: the fused operations on a GPU. On a machine without one there is nothing here to measure."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch

from . import guard
from .baselines import BACKENDS, CONTENDERS, Contender
from .compare import CONVERGED, attempt
from .measure import Timing, interleaved, once
from .memory import NOT_COUNTED
from .problems import Data, Setting, Shape, draw, evidence
from .targets import Row

METRICS = ("G1", "G2", "G5", "G6")
#: On a card the kernels are compiled; a test of them that ran in an interpreter says nothing of that.
OPS = ("tests/ops/test_triton.py",)
#: Evaluations in G1; queries that a kernel keeps on chip together (G2).
BUDGET, TILE = 8, 128
#: As in `Anderson()` on such a problem.
PLAIN_STEPS = 3
#: Lengths that G5 tries, until one does not fit, and from where on memory is fitted.
LENGTHS, FIT_LENGTH = tuple(2**power for power in range(14, 19)), 2**15


class Case(Protocol):
    """The problem of a row."""

    @property
    def metric(self) -> str: ...

    @property
    def problem(self) -> Setting: ...


def settings(*, quick: bool, device: str) -> tuple[tuple[str, Setting], ...]:
    """The problems of the G rows; none without a GPU."""
    if torch.device(device).type != "cuda":
        return ()
    length = 1024 if quick else 4096

    def problem(dim: int, sharpness: float = 2.0) -> Setting:
        shape = Shape(4, 16, length, dim)
        return Setting("gaussian", sharpness, 0.0, shape, dtype="bfloat16", device=device, rtol=1e-3)

    sharpnesses = (2.0,) if quick else (1.0, 2.0, 4.0, 8.0)
    return (
        *(("G1", problem(dim)) for dim in (64, 128)),
        *(("G2", problem(dim, sharpness)) for dim in (64, 128) for sharpness in sharpnesses),
        ("G5", dataclasses.replace(problem(64), shape=Shape(1, 1, LENGTHS[0], 64))),
        ("G6", problem(64)),
    )


# The fused solve as the rows use it: what changes in its signature changes here.


def anchored(data: Data) -> Any:
    """The problem as the operations take it: plain tensors, beta and anchor with as many axes as the keys."""
    from implicit_attention.ops.problem import Hopfield

    numbers = (
        torch.full((1, 1, 1, 1), value, device=data.keys.device) for value in (data.setting.beta, data.setting.anchor)
    )
    return Hopfield(data.queries, data.keys, *numbers)


def fused_solve(data: Data, *, rtol: float, max_steps: int) -> Any:
    """State, mean, log-sum-exp and evaluations per query of the fused solve; with rtol 0 exactly `max_steps` steps."""
    from implicit_attention._fused_rule import FusedRule
    from implicit_attention.ops.dispatch import solve

    rule = FusedRule(rtol=rtol, atol=0.0, max_steps=max_steps, plain_steps=PLAIN_STEPS)
    return solve(anchored(data), data.queries.float(), rule, "triton")


# Rows.


def measured(case: Case, *, repeats: int, max_seconds: float) -> Row:
    """One G row; without a time if the tests of the operations are red or one of them breaks off."""
    if (reason := guard.red(OPS, marker="gpu")) is not None:
        return refused(case.metric, reason)
    try:
        return MEASURES[case.metric](case.problem, repeats, max_seconds)
    except (RuntimeError, ValueError, ImportError, TypeError) as error:
        return refused(case.metric, f"{type(error).__name__}: {error}"[:300])


def refused(metric: str, reason: str) -> Row:
    """A row that misses its target, and why."""
    return {"evidence": {"fused": {"error": reason}}, "seconds": {}, "ratios": {metric: None}}


def per_evaluation(problem: Setting, repeats: int, max_seconds: float) -> Row:
    """G1: time of one evaluation of the fused kernel, from a fixed budget."""
    copies = rotation(problem)
    evaluations = float(fused_solve(copies[0], rtol=0.0, max_steps=BUDGET).num_evals.double().mean())
    fused = rotated(copies, lambda data: fused_solve(data, rtol=0.0, max_steps=BUDGET))
    times, best = against_sdpa(copies, fused, repeats, max_seconds)
    value = times["fused"].median / evaluations / times[best].median
    return row("G1", value, times, {"fused": {"evaluations_mean": evaluations}, "best": {"label": best}})


def forward(problem: Setting, repeats: int, max_seconds: float) -> Row:
    """G2: a whole solve in SDPA forwards, less what a tile that waits for its slowest query must cost."""
    copies = rotation(problem)
    solved = fused_solve(copies[0], rtol=problem.rtol, max_steps=100)
    found = evidence(copies[0], solved.state)
    if found["converged"] < CONVERGED:
        return refused("G2", f"the answer is wrong: {found}")
    evaluations = solved.num_evals.double()
    slowest = float(evaluations.unflatten(-1, (-1, TILE)).amax(-1).mean())
    fused = rotated(copies, lambda data: fused_solve(data, rtol=problem.rtol, max_steps=100))
    times, best = against_sdpa(copies, fused, repeats, max_seconds)
    found |= {"evaluations_mean": float(evaluations.mean()), "evaluations_mean_of_tile_maxima": slowest}
    value = times["fused"].median / times[best].median - slowest
    return row("G2", value, times, {"fused": found, "best": {"label": best}})


def longest(problem: Setting, repeats: int, max_seconds: float) -> Row:
    """G5: training steps at doubled lengths until one does not fit, and the exponent of their memory."""
    points: list[dict[str, float]] = []
    for length in LENGTHS:
        try:
            data = draw(dataclasses.replace(problem, shape=dataclasses.replace(problem.shape, length=length)))
            step = CONTENDERS["ours_training"].make(data, NOT_COUNTED)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            _, seconds = once(step, problem.device)
        except torch.OutOfMemoryError:
            break
        peak = torch.cuda.max_memory_allocated() - before
        points.append({"length": length, "peak_bytes": peak, "seconds": seconds})
        del data, step
        torch.cuda.empty_cache()
    fitted = [point for point in points if point["length"] >= FIT_LENGTH]
    exponent = None
    if len(fitted) > 1:
        growth = math.log(fitted[-1]["peak_bytes"] / fitted[0]["peak_bytes"])
        exponent = growth / math.log(fitted[-1]["length"] / fitted[0]["length"])
    largest = float(points[-1]["length"]) if points else None
    ratios = {"G5": largest, "G5 exponent": exponent}
    return {"evidence": {"fused": {"points": points}}, "seconds": {}, "ratios": ratios}


def waits(problem: Setting, repeats: int, max_seconds: float) -> Row:
    """G6: how often the host waits for the device in one fused forward."""
    data = draw(problem)

    def function() -> Any:
        return fused_solve(data, rtol=problem.rtol, max_steps=100)

    return row("G6", float(synchronisations(function)), {}, {"fused": {}})


MEASURES: dict[str, Callable[[Setting, int, float], Row]] = {
    "G1": per_evaluation,
    "G2": forward,
    "G5": longest,
    "G6": waits,
}


def row(metric: str, value: float, times: dict[str, Timing], found: dict[str, Any]) -> Row:
    seconds = {name: dataclasses.asdict(timing) for name, timing in times.items()}
    return {"evidence": found, "seconds": seconds, "ratios": {metric: value}}


# Inputs and clocks.


def rotation(problem: Setting) -> list[Data]:
    """Copies of a problem that differ in their numbers and together are too large for the L2 cache."""
    size = problem.shape
    bytes_each = 2 * 2 * size.batch * size.heads * size.length * size.dim
    cache = torch.cuda.get_device_properties(problem.device).L2_cache_size
    copies = 1 + math.ceil(2 * cache / bytes_each)
    alike = dataclasses.replace(problem, sharpness=1.0, anchor=0.0)
    return [_drawn(alike, seed)._replace(setting=dataclasses.replace(problem, seed=seed)) for seed in range(copies)]


@functools.lru_cache(maxsize=8)
def _drawn(problem: Setting, seed: int) -> Data:
    """Queries and keys, which depend on neither sharpness nor anchor, kept for the next row."""
    return draw(dataclasses.replace(problem, seed=seed))


def rotated(copies: list[Any], function: Callable[[Any], Any]) -> Callable[[], Any]:
    """The function on one copy after the other."""
    turns = itertools.cycle(copies)
    return lambda: function(next(turns))


def against_sdpa(
    copies: list[Data], fused: Callable[[], Any], repeats: int, max_seconds: float
) -> tuple[dict[str, Timing], str]:
    """Times of the fused function and of every SDPA kernel that runs, and which of those is the fastest."""
    device = copies[0].setting.device
    functions, first = {"fused": fused}, {"fused": once(fused, device)[1]}
    for label in BACKENDS:
        name = f"sdpa_{label}"
        contender: Contender = CONTENDERS[name]
        made = [contender.make(data, NOT_COUNTED) for data in copies]
        result, _, seconds = attempt(contender, made[0], device)
        if result is not None:
            turns = itertools.cycle(made)
            functions[name], first[name] = (lambda turns=turns: next(turns)()), seconds
    times = interleaved(functions, first, repeats=repeats, max_seconds=max_seconds, device=device)
    best = min((name for name in times if name != "fused"), key=lambda name: times[name].median)
    return times, best


def synchronisations(function: Callable[[], Any]) -> int:
    """Count how often torch waits for the device in a call that is not the first."""
    function()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # Turning the mode on warns, too.
    return sum("called a synchronizing" in str(warning.message) for warning in caught)
