"""Times of things that are compared: in turns, with medians and spread."""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

#: A turn repeats a quick function for this long, so that one call does not pay for the caches of its neighbour.
TURN_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call: median, smallest and largest over the turns."""

    median: float
    low: float
    high: float
    turns: int


def interleaved(
    functions: Mapping[str, Callable[[], Any]],
    first: Mapping[str, float],
    *,
    repeats: int = 5,
    max_seconds: float = 4.0,
) -> dict[str, Timing]:
    """Time every function once per round, round after round, so that a change of the machine meets all of them alike.

    Args:
        functions: what to call.
        first: seconds of a call made before, which served as the warm-up.
        repeats: rounds.
        max_seconds: a function that has used up this time takes no further turn. If its first call nearly did, that
            is its one measurement.
    """
    turns: dict[str, list[float]] = {name: [] for name in functions}
    spent = {name: first[name] for name in functions}
    for name in functions:
        if first[name] > max_seconds / 2:
            turns[name].append(first[name])
    for _ in range(repeats):
        for name, function in functions.items():
            if turns[name] and spent[name] + turns[name][-1] > max_seconds:
                continue
            seconds = _turn(function, TURN_SECONDS)
            turns[name].append(seconds)
            spent[name] += max(seconds, TURN_SECONDS)
    return {name: summary(seconds) for name, seconds in turns.items()}


def _turn(function: Callable[[], Any], at_least: float) -> float:
    begin = now = time.perf_counter()
    calls = 0
    while calls == 0 or now - begin < at_least:
        function()
        calls += 1
        now = time.perf_counter()
    return (now - begin) / calls


def summary(seconds: list[float]) -> Timing:
    return Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


def import_times(modules: tuple[str, ...], *, repeats: int) -> dict[str, Timing]:
    """Time to import each module in a fresh process, in turns, after one round that fills the file cache."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"`modules` must be importable, got {module!r}")
    seconds: dict[str, list[float]] = {module: [] for module in modules}
    for index in range(repeats + 1):
        for module in modules:
            code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
            out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
            if index:
                seconds[module].append(float(out.stdout))
    return {module: summary(values) for module, values in seconds.items()}
