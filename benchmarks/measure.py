"""Times of contenders, measured in turns, with medians and spread."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent

#: A turn repeats a quick function for this long, so that one call does not pay for the caches of its neighbour.
TURN_SECONDS = 0.05


def rows_of(
    settings: Iterable[Any],
    metrics: Iterable[str],
    measured: Callable[[Any], dict[str, Any]],
    progress: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Measure every setting of these metrics, with its wall time; `progress` is called with each finished row."""
    wanted, rows = set(metrics), []
    for setting in settings:
        if setting.metric in wanted:
            begin = time.perf_counter()
            row = measured(setting)
            rows.append({**row, "wall_seconds": time.perf_counter() - begin})
            progress(rows[-1])
    return rows


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
    device: str = "cpu",
    turn_seconds: float = TURN_SECONDS,
) -> dict[str, Timing]:
    """Time every function once per round, round after round, so that a change of the machine meets all of them alike.

    Args:
        functions: what to call.
        first: seconds of a call made before, which served as the warm-up.
        repeats: rounds.
        max_seconds: a function that has used up this time takes no further turn. If its first call nearly did, that
            is its one measurement.
        device: whose clock: `perf_counter` on a CPU, events of the current stream on a GPU.
        turn_seconds: how long a quick function is repeated in a turn.
    """
    turn = TURNS[torch.device(device).type]
    turns: dict[str, list[float]] = {name: [] for name in functions}
    spent = {name: first[name] for name in functions}
    for name in functions:
        if first[name] > max_seconds / 2:
            turns[name].append(first[name])
    for _ in range(repeats):
        for name, function in functions.items():
            if turns[name] and spent[name] + turns[name][-1] > max_seconds:
                continue
            seconds = turn(function, turn_seconds)
            turns[name].append(seconds)
            spent[name] += max(seconds, turn_seconds)
    return {name: summary(seconds) for name, seconds in turns.items()}


def interleaved_clocks(
    functions: Mapping[str, Callable[[], Any]], *, rounds: int, max_seconds: float = 4.0, turn_seconds: float = 0.01
) -> tuple[dict[str, Timing], dict[str, Timing]]:
    """Process time and wall time per call, for calls so short that reading a clock between them would count.

    A turn of a function is a number of calls that is fixed beforehand, in all at least one and about `turn_seconds`.
    Process time, of all threads together, leaves out what other processes take of the core. Of so many turns `low` and
    `high` are the quartiles: single ones are interrupted.
    """
    calls, turns = {}, {}
    for name, function in functions.items():
        calls[name] = math.ceil(turn_seconds / _turn_cpu(function, turn_seconds))
        turns[name] = [_turn_clocks(function, calls[name])]
    for _ in range(rounds - 1):
        for name, function in functions.items():
            if sum(wall for _, wall in turns[name]) * calls[name] < max_seconds:
                turns[name].append(_turn_clocks(function, calls[name]))
    process, wall = ({name: quartiles([turn[i] for turn in turns[name]]) for name in functions} for i in (0, 1))
    return process, wall


def once(function: Callable[[], Any], device: str = "cpu") -> tuple[Any, float]:
    """The result of one call and its seconds, to the end of what it started.

    On a GPU of the second call: the first compiles kernels.
    """
    on_card = torch.device(device).type == "cuda"
    if on_card:
        function()
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    result = function()
    if on_card:
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - begin


def _turn_cpu(function: Callable[[], Any], at_least: float) -> float:
    begin = now = time.perf_counter()
    calls = 0
    while calls == 0 or now - begin < at_least:
        function()
        calls += 1
        now = time.perf_counter()
    return (now - begin) / calls


def _turn_clocks(function: Callable[[], Any], calls: int) -> tuple[float, float]:
    wall, process = time.perf_counter(), time.process_time()
    for _ in range(calls):
        function()
    return (time.process_time() - process) / calls, (time.perf_counter() - wall) / calls


def _turn_cuda(function: Callable[[], Any], at_least: float) -> float:
    seconds = _between_events(function, 1)
    calls = math.ceil(at_least / max(seconds, 1e-6))
    return seconds if calls == 1 else _between_events(function, calls)


def _between_events(function: Callable[[], Any], calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / calls


#: Seconds per call over a turn, by the clock of the device.
TURNS: dict[str, Callable[[Callable[[], Any], float], float]] = {"cpu": _turn_cpu, "cuda": _turn_cuda}


def summary(seconds: list[float]) -> Timing:
    return Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


def quartiles(seconds: list[float]) -> Timing:
    """Median, with the quartiles as smallest and largest."""
    if len(seconds) == 1:
        return summary(seconds)
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(median, low, high, len(seconds))


def apart(module: str, *arguments: str, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what `python -m MODULE ARGUMENTS` prints as JSON, with these environment variables, or its error."""
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, **(variables or {})}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return {"error": f"exit status {done.returncode}: {lines[-1] if lines else 'killed'}"[:300]}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def import_times(modules: tuple[str, ...], *, repeats: int) -> dict[str, Timing]:
    """Time until each of the modules is imported, one after the other, in a fresh process, once caches are filled.

    In one process, as two of them differ by more than what the package adds. Bytecode is cached, as it is once a
    package is installed, in a folder that is thrown away.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"`modules` must be importable, got {module!r}")
    seconds: dict[str, list[float]] = {module: [] for module in modules}
    lines = ["import time", "start = time.perf_counter()"]
    for module in modules:
        lines += [f"import {module}", "print(time.perf_counter() - start)"]
    command = [sys.executable, "-c", "\n".join(lines)]
    with tempfile.TemporaryDirectory() as folder:
        where = {**os.environ, "PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        for index in range(repeats + 1):
            out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=where)
            if index:
                for module, line in zip(modules, out.stdout.splitlines(), strict=True):
                    seconds[module].append(float(line))
    return {module: summary(values) for module, values in seconds.items()}
