"""The files that the commands write: everything as JSON, and pictures."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..kernels import native_status

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PACKAGES = ("implicit_attention", "torch", "numpy", "torchdeq", "scikit-learn")


def write(out: Path, name: str, content: dict[str, Any], others: Mapping[str, Figure | bytes]) -> list[str]:
    """Write everything into the folder `out`, and return the names of the files."""
    versions = {"python": platform.python_version(), **{package: _version(package) for package in PACKAGES}}
    ran = {"versions": versions, "native": str(native_status()), "threads": torch.get_num_threads()}
    text = json.dumps(_plain(content | ran), indent=1, allow_nan=False)
    # A list of numbers or of vectors takes one line: there can be one for every spin.
    text = re.sub(r"\[(?:[^][{}\"]|\[[^][{}\"]*\])*\]", lambda match: " ".join(match[0].split()), text)
    (out / name).write_text(text + "\n", encoding="utf-8")
    for file, other in others.items():
        if isinstance(other, bytes):
            (out / file).write_bytes(other)
        else:
            other.savefig(out / file)
    return [name, *others]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _plain(value: Any) -> Any:
    """Return lists for tensors and tuples, and None for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def options_of(settings: Any, *without: str) -> dict[str, Any]:
    """Return the options of a command without its folders, which files must not name."""
    return {name: value for name, value in dataclasses.asdict(settings).items() if name not in ("out", *without)}
