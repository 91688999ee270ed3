"""The environment of a run: everything that a reader needs to judge or repeat it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from implicit_attention import __version__
from implicit_attention.kernels import native_status

ROOT = Path(__file__).resolve().parent.parent
#: Recorded where they are installed; the package itself may be run from a checkout.
LIBRARIES = ("torch", "torchdeq", "scipy", "numpy", "einops", "triton")


def environment(device: str = "cpu") -> dict[str, Any]:
    """Device, driver, processor, cores, load, versions and the commit that was measured."""
    return {
        "device": device,
        "gpu": gpu(device),
        "cpu": cpu_model(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "native": str(native_status()),
        "load_average_at_start": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "system": platform.system(),
        "python": platform.python_version(),
        "libraries": libraries(),
        **commit(),
    }


def libraries() -> dict[str, str]:
    """Versions of the package and of what is installed."""
    found = {"implicit_attention": __version__}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def default_device() -> str:
    """Where the suites that have rows for a GPU run: on one, if there is one (CUDA_VISIBLE_DEVICES= hides it)."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def gpu(device: str) -> dict[str, Any] | None:
    """Name, capability, memory, driver and CUDA of the GPU that is measured; None on a CPU."""
    if torch.device(device).type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "memory_bytes": found.total_memory,
        "multiprocessors": found.multi_processor_count,
        "driver": driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def driver() -> str | None:
    """Version of the NVIDIA driver, by its own tool."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else None


def cpu_model() -> str:
    """The processor's own name, with what tells apart processors of one name."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor() or "unknown"
    lines = [line.split(":", 1) for line in path.read_text().split("\n\n", 1)[0].splitlines() if ":" in line]
    fields = {key.strip(): value.strip() for key, value in lines}
    name = fields.get("model name", "unknown")
    details = [f"{key} {fields[key]}" for key in ("cpu family", "model", "stepping") if key in fields]
    return f"{name} ({', '.join(details)})" if details else name


def warning(where: dict[str, Any]) -> str | None:
    """Return a warning if other work shared the machine."""
    load = where["load_average_at_start"]
    if load is None or load[0] < 0.5:
        return None
    return f"Load average {load[0]:.1f} before the run: other work shared the cores, the ratios are not reliable."


def commit() -> dict[str, Any]:
    """The commit of the working tree and whether the package has changes on top of it.

    Outside git the variable COMMIT says which it is, if anything does.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    changes = git("status", "--porcelain", "--", "implicit_attention")
    head = git("rev-parse", "HEAD") or os.environ.get("COMMIT")
    return {"commit": head, "uncommitted_changes": None if changes is None else bool(changes)}
