"""Time and memory of a computation, measured the same way everywhere."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def median_time(
    function: Callable[[], Any], device: torch.device, *, repeats: int = 5, warmup: int = 1, max_seconds: float = 10.0
) -> float:
    """Median wall-clock seconds of `function()`; see `median_times`."""
    return median_times(function, device=device, repeats=repeats, warmup=warmup, max_seconds=max_seconds)[0]


def median_times(
    first: Callable[[], Any],
    *then: Callable[[Any], Any],
    device: torch.device,
    repeats: int = 5,
    warmup: int = 1,
    max_seconds: float = 10.0,
) -> list[float]:
    """Median wall-clock seconds of every stage of a chain, each stage fed with the result of the one before.

    Args:
        first: the first stage, for example a forward pass.
        *then: further stages, for example the backward pass.
        device: synchronised before and after every stage where it is an accelerator.
        repeats: measured runs of the chain, >= 1.
        warmup: runs before them that do not count.
        max_seconds: no further run is begun after this time, so that a slow method costs one.
    """
    begin = time.perf_counter()
    runs: list[list[float]] = []
    for index in range(warmup + repeats):
        if runs and time.perf_counter() - begin > max_seconds:
            break
        seconds = _timed_chain(first, then, device)
        if index >= warmup or time.perf_counter() - begin > max_seconds:
            runs.append(seconds)
    return [statistics.median(stage) for stage in zip(*runs, strict=True)]


def _timed_chain(first: Callable[[], Any], then: tuple[Callable[[Any], Any], ...], device: torch.device) -> list[float]:
    marks = [_now(device)]
    result = first()
    marks.append(_now(device))
    for stage in then:
        result = stage(result)
        marks.append(_now(device))
    return [after - before for before, after in itertools.pairwise(marks)]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def peak_memory(function: Callable[[], Any], device: torch.device) -> int:
    """Largest number of bytes that torch held at once during `function()`, beyond what it held before.

    On CUDA the allocator's own count. On a CPU the profiler's allocations and frees added up in order of time, which
    unlike the size of the process is the same on every run.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _quiet_profiler(), torch.autograd.profiler.profile(profile_memory=True) as profiler:
        function()
    results = profiler.kineto_results
    if results is None:
        raise RuntimeError("the profiler recorded nothing; is another one running?")
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        held += change
        peak = max(peak, held)
    return peak


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Keep the profiler's start and stop lines off stderr."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
