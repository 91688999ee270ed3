"""Checkpoints of transformers' Trainer: which of them are whole, after a process was killed while it wrote one."""

from __future__ import annotations

import json
import os
import re
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

from ... import _validate

#: The Trainer writes this file last.
STATE = "trainer_state.json"
#: The ends of the names of weights, and of files by torch.save.
WEIGHTS, SAVED = (".safetensors",), (".pt", ".pth", ".bin")


def last_whole_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint of a Trainer that was written to its end, for `trainer.train(resume_from_checkpoint=...)`.

    The Trainer writes the files of a checkpoint in place, one after the other. A process that is killed, or a disk that
    is full, leaves an incomplete one, and `transformers.trainer_utils.get_last_checkpoint` would choose it. This
    function chooses a checkpoint if its `trainer_state.json`, which is written last, can be read; if there are weights,
    and all that their index names; and if every file of tensors is as long as its own table says. The numbers in the
    files are not read: a byte that has changed is not found.

    Args:
        folder: the Trainer's `output_dir`, which holds `checkpoint-...`. It need not exist.

    Returns:
        The path of the checkpoint, or None: begin.

    Warns: of every checkpoint that is passed over, and why. Nothing is deleted.

    Examples:
        >>> import tempfile
        >>> from implicit_attention.integrations.transformers import last_whole_checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(last_whole_checkpoint(folder))
        None

    Not for checkpoints by `implicit_attention.models.save_checkpoint`, which are whole or missing.
    """
    folders = [path for path in Path(folder).glob("checkpoint-*") if path.is_dir()]
    checkpoints = [(int(match[1]), path) for path in folders if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))]
    for _, path in sorted(checkpoints, reverse=True):
        damage = _damage(path)
        if damage is None:
            return str(path)
        remedy = "the one before is used, if there is any"
        warnings.warn(_validate.message(path.name, "be a whole checkpoint", damage, remedy), stacklevel=2)
    return None


def _damage(path: Path) -> str | None:
    """Describe what is missing from a checkpoint; None if nothing is."""
    if _json(path / STATE) is None:
        return f"no whole {STATE}, which is written last"
    names = {file.name for file in path.iterdir()}
    weights = {name for name in names if name.endswith(WEIGHTS)}
    if not weights:
        return "no weights (*.safetensors)"
    for name in sorted(name for name in names if name.endswith(".index.json")):
        index = _json(path / name)
        if missing := {name} if index is None else set(index.get("weight_map", {}).values()) - names:
            return f"no whole {min(missing)}"
    for name in sorted(names):
        ends = _is_whole_safetensors if name in weights else zipfile.is_zipfile if name.endswith(SAVED) else None
        if ends is not None and not ends(path / name):
            return f"a truncated {name}"
    return None


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _is_whole_safetensors(path: Path) -> bool:
    """Whether a file is as long as the table at its begin says: its length in eight bytes, then names and places."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        if len(first) < 8 or (length := struct.unpack("<Q", first)[0]) > size - 8:
            return False
        try:
            table = json.loads(file.read(length))
        except ValueError:
            return False
    ends = [entry["data_offsets"][1] for name, entry in table.items() if name != "__metadata__"]
    return bool(size == 8 + length + max(ends, default=0))
