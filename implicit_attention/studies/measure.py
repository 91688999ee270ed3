"""Time, memory and threads of a computation, measured and set the same way everywhere."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def median_times(
    first: Callable[[], Any],
    *then: Callable[[Any], Any],
    device: torch.device,
    repeats: int = 5,
    warmup: int = 1,
    max_seconds: float = 10.0,
) -> list[float]:
    """Measure the median seconds of every stage of a chain, each stage fed with the result of the one before.

    Args:
        first: the first stage, for example a forward pass.
        *then: further stages, for example the backward pass.
        device: synchronised before and after every stage where it is an accelerator.
        repeats: measured runs of the chain, >= 1.
        warmup: runs before them that do not count.
        max_seconds: after this time no further run begins, so that a slow method costs one.
    """
    begin = time.perf_counter()
    runs: list[list[float]] = []
    for index in range(warmup + repeats):
        marks = [_now(device)]
        result = first()
        marks.append(_now(device))
        for stage in then:
            result = stage(result)
            marks.append(_now(device))
        late = marks[-1] - begin > max_seconds
        if index >= warmup or late:
            runs.append([after - before for before, after in itertools.pairwise(marks)])
        if late:
            break
    return [statistics.median(stage) for stage in zip(*runs, strict=True)]


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[int]:
    """Use one thread for problems too small to share, if it is `wanted`, and yield the number of threads."""
    before = torch.get_num_threads()
    if wanted:
        torch.set_num_threads(1)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def peak_memory(function: Callable[[], Any], device: torch.device) -> int:
    """Measure the largest number of bytes in use by torch during `function()`, less those in use before.

    On CUDA the allocator counts. On a CPU the profiler's allocations and frees are added up in order of time, which
    unlike the size of the process is the same on every run.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    level = "KINETO_LOG_LEVEL"
    usual = os.environ.get(level)
    # Keeps the profiler's lines about its start and stop off stderr.
    os.environ.setdefault(level, "99")
    try:
        with torch.autograd.profiler.profile(profile_memory=True) as profiler:
            function()
    finally:
        if usual is None:
            del os.environ[level]
    results = profiler.kineto_results
    if results is None:
        raise RuntimeError("the profiler recorded nothing; is another one running?")
    changes = sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda event: event.start_ns())
    in_use: list[int] = list(itertools.accumulate((event.nbytes() for event in changes), initial=0))
    return max(in_use)


def error_row(error: Exception) -> dict[str, Any]:
    """Return the row of a method that raised: the kind of error and the first line of its message."""
    text = str(error).strip().splitlines()
    return {"error": type(error).__name__, "message": text[0] if text else ""}
