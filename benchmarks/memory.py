"""C4: the peak memory of one training step, each in a fresh process: `python -m benchmarks.memory SETTING STEP`."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import baselines
from .baselines import CONTENDERS, PicardCounts, Run
from .measure import apart, once
from .problems import Data, Setting, Shape, draw, evidence, setting_of

#: A step of the same kind on this much loads what is loaded once: threads, kernels, autograd.
WARM_UP = Shape(batch=1, heads=1, length=64)
STATUS = Path("/proc/self/status")


def step_of(name: str, data: Data) -> Callable[[], Run]:
    """The training step `sdpa`, `ours`, `ours K` or `unrolled K`, with K evaluations of f for every query."""
    kind, _, number = name.partition(" ")
    if kind == "unrolled":
        return baselines.unrolled(data, int(number))
    if number:
        return baselines.limited(data, int(number), training=True)
    return CONTENDERS[f"{kind}_training"].make(data, NOT_COUNTED)


#: `sdpa` and `ours` ask for no counts.
NOT_COUNTED = PicardCounts(0.0, 0, 0, 0.0)


def peak_of(setting: Setting, name: str) -> dict[str, Any]:
    """Peak bytes of the step above the inputs; or the error that it ended with."""
    return found_apart("benchmarks.memory", setting, name, needed)


def found_apart(module: str, setting: Any, name: str, needed: Callable[[Any, str], dict[str, Any]]) -> dict[str, Any]:
    """What the module finds for a setting, in a process of its own: a resident set is that of a whole process.

    On a GPU the allocator counts, and needed(setting, name) finds the same here.
    """
    if torch.device(setting.device).type != "cuda":
        return apart(module, json.dumps(dataclasses.asdict(setting)), name)
    try:
        return needed(setting, name)
    except torch.OutOfMemoryError as error:
        return {"error": f"OutOfMemoryError: {error}"[:300]}


def needed(setting: Setting, name: str) -> dict[str, Any]:
    """Warm up, take the step once, and return what it needed."""
    step_of(name, draw(dataclasses.replace(setting, shape=WARM_UP)))()
    data = draw(setting)
    run = step_of(name, data)
    before = begin(setting.device)
    result, seconds = once(run, setting.device)
    found = {"peak_bytes": peak(setting.device) - before, "baseline_bytes": before, "seconds": seconds}
    found["evaluations_mean"] = float(result.evaluations.double().mean())
    if name == "ours":
        found |= evidence(data, result.state)
    return found


def begin(device: str) -> int:
    """Bytes held now, from where the high-water mark is counted."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    if not STATUS.exists():
        return peak(device)
    # Memory that the warm-up freed and the allocator kept would be used again unseen.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _kibibytes("VmRSS")


def peak(device: str) -> int:
    """The high-water mark in bytes: the allocator's on a GPU, the resident set of the process on a CPU.

    Not `ru_maxrss` where there is a choice: on Linux a process inherits that from the one that started it.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    if STATUS.exists():
        return _kibibytes("VmHWM")
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _kibibytes(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    print(json.dumps(needed(setting_of(sys.argv[1]), sys.argv[2])))
