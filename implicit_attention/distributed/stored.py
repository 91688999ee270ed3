"""Patterns on disk: appended in pieces, read in pieces, by rows, or as the part of one process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from .. import _validate

_INDEX, _FORMAT, _VERSION = "index.json", "implicit_attention.patterns", 1


class Patterns(NamedTuple):
    """Keys (M, D) and values (M, E) or None.

    Not for making by hand: `StoredPatterns` reads them.

    Examples:
        >>> import torch
        >>> from implicit_attention.distributed import Patterns
        >>> Patterns(torch.eye(3), None).keys.shape
        torch.Size([3, 3])
    """

    keys: Tensor
    values: Tensor | None


class StoredPatterns:
    """Patterns in a folder: safetensors files of some rows each, and `index.json`, which says in which order.

    A file holds `keys` (rows, D) and, if there are any, `values` (rows, E). Files are read where they lie
    (memory-mapped), row by row as asked for. `append` writes a new file, then replaces the index. After a crash in
    between, what was there before is read, and the next `append` writes over the new file.

    Args:
        folder: made by the first `append` if it is not there.

    Attributes:
        dim, value_dim: D, and E or None; None while nothing is stored.
        dtype: of the stored numbers; None while nothing is stored.

    Raises:
        ValueError: an index that is not one, or files that are missing or of another size than was written.
        ImportError: without safetensors (`pip install safetensors`).

    Not for memories that fit, which `MemoryLookup` learns or holds. One process appends at a time.

    Examples:
        >>> import tempfile
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp, solve
        >>> from implicit_attention.distributed import StoredPatterns
        >>> folder = tempfile.mkdtemp()
        >>> for seed in range(3):  # as many pieces as it takes
        ...     rows = torch.randn(100, 8, generator=torch.Generator().manual_seed(seed))
        ...     StoredPatterns(folder).append(rows)
        >>> stored = StoredPatterns(folder)
        >>> len(stored), stored.dim, stored.load(slice(150, 250)).keys.shape
        (300, 8, torch.Size([100, 8]))
        >>> query = stored.load(slice(7, 9)).keys
        >>> z = solve(AnchoredEnergy(LogSumExp(stored.load().keys, beta=8.0), query, anchor=0.1), query).value
        >>> bool(torch.allclose(z, query, atol=1e-2))
        True
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.dim: int | None = None
        self.value_dim: int | None = None
        self.dtype: torch.dtype | None = None
        self._files: list[dict[str, Any]] = []
        if (self.folder / _INDEX).exists():
            self._read_index()

    def __len__(self) -> int:
        return sum(file["rows"] for file in self._files)

    def __repr__(self) -> str:
        values = "" if self.value_dim is None else f", values of {self.value_dim}"
        return f"StoredPatterns({len(self)} of dimension {self.dim}{values}, {len(self._files)} files in {self.folder})"

    def append(self, keys: Tensor, values: Tensor | None = None) -> None:
        """Write more patterns behind those that are stored.

        Args:
            keys: (M, D).
            values: (M, E), one for each key; for all appended patterns or for none.

        Raises:
            TypeError, ValueError: no tensors of two axes; other sizes or another dtype than what is stored.
        """
        from safetensors.torch import save_file

        self._check(keys, values)
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"patterns-{len(self._files):05d}.safetensors"
        parts = {"keys": keys} if values is None else {"keys": keys, "values": values}
        beside = self.folder / f"{name}.part"
        save_file({part: t.detach().cpu().contiguous() for part, t in parts.items()}, beside)
        _settle(beside, self.folder / name)
        file = {"name": name, "rows": len(keys), "bytes": (self.folder / name).stat().st_size}
        index = {
            "format": _FORMAT,
            "version": _VERSION,
            "dim": keys.shape[-1],
            "value_dim": None if values is None else values.shape[-1],
            "dtype": str(keys.dtype).removeprefix("torch."),
            "files": [*self._files, file],
        }
        beside = self.folder / f"{_INDEX}.part"
        beside.write_text(json.dumps(index, indent=1))
        _settle(beside, self.folder / _INDEX)
        self._take(index)

    def load(
        self, rows: slice = slice(None), *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> Patterns:
        """Some of the patterns, of which no others are read.

        Args:
            rows: which, without a step.
            device: where to.
            dtype: in which to hold them; None as they are stored.
        """
        _validate.require(rows.step in (None, 1), "rows", "be a slice without a step", rows)
        start, stop, _ = rows.indices(len(self))
        pieces = list(self._pieces(start, max(start, stop)))
        keys, values = (self._joined([p[i] for p in pieces], size) for i, size in enumerate((self.dim, self.value_dim)))
        assert keys is not None
        return Patterns(*(None if t is None else t.to(device, dtype) for t in (keys, values)))  # type: ignore[arg-type]

    def pieces(self, size: int, **options: Any) -> Iterator[Patterns]:
        """All patterns, at most so many at a time; `options` as in `load`."""
        _validate.check_integer("size", size, low=1)
        for start in range(0, len(self), size):
            yield self.load(slice(start, start + size), **options)

    def local(self, group: distributed.ProcessGroup | None = None, **options: Any) -> Patterns:
        """The part of this process, as even as can be, in the order of ranks; `options` as in `load`.

        For `ShardedLogSumExp`: no process reads the part of another.
        """
        from .lock_step import LockStep

        lock = LockStep(group)
        count = len(self)
        return self.load(slice(lock.rank * count // lock.size, (lock.rank + 1) * count // lock.size), **options)

    # Parts.

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        from safetensors import safe_open

        _validate.require(
            self.dim is not None, "folder", "hold patterns", f"{self.folder}, where none are", "append some"
        )
        begin = 0
        for file in self._files:
            first, last = max(start - begin, 0), min(stop - begin, file["rows"])
            begin += file["rows"]
            if first >= last:
                continue
            with safe_open(self.folder / file["name"], "pt") as opened:
                keys = opened.get_slice("keys")[first:last]
                yield keys, opened.get_slice("values")[first:last] if self.value_dim is not None else None

    def _joined(self, parts: list[Tensor | None], size: int | None) -> Tensor | None:
        if size is None:
            return None
        found = [part for part in parts if part is not None]
        return torch.cat(found) if found else torch.empty(0, size, dtype=self.dtype)

    def _check(self, keys: Tensor, values: Tensor | None) -> None:
        named = [("keys", keys)] if values is None else [("keys", keys), ("values", values)]
        for name, tensor in named:
            _validate.check_float_tensor(name, tensor, min_ndim=2)
            _validate.require(tensor.ndim == 2, name, "have two axes (M, D)", f"shape {tuple(tensor.shape)}")
        if values is not None:
            _validate.check_same_kind(named)
            required = f"have one row for each of the {len(keys)} keys"
            _validate.require(len(values) == len(keys), "values", required, f"{len(values)}")
        if self.dim is None:
            return
        stored = (self.dim, self.value_dim, self.dtype)
        given = (keys.shape[-1], None if values is None else values.shape[-1], keys.dtype)
        for name, held, new in zip(("keys", "values", "keys"), stored, given, strict=True):
            required = f"be like what is stored (dimension {self.dim}, values of {self.value_dim}, {self.dtype})"
            _validate.require(held == new, name, required, new)

    def _read_index(self) -> None:
        path = self.folder / _INDEX
        try:
            index = json.loads(path.read_text())
            known = index["format"] == _FORMAT and index["version"] == _VERSION
        except (ValueError, KeyError, TypeError):
            known = False
        required = f"hold an {_INDEX} of format {_FORMAT!r}, version {_VERSION}"
        _validate.require(known, "folder", required, f"{path}, which is another", "name a folder of its own")
        for file in index["files"]:
            there = self.folder / file["name"]
            size = there.stat().st_size if there.exists() else None
            required = f"hold {file['name']} of {file['bytes']} bytes"
            received = "no such file" if size is None else f"one of {size} bytes"
            _validate.require(size == file["bytes"], "folder", required, received, "copy the whole folder again")
        self._take(index)

    def _take(self, index: dict[str, Any]) -> None:
        self.dim, self.value_dim, self._files = index["dim"], index["value_dim"], index["files"]
        self.dtype = getattr(torch, index["dtype"])


def _settle(written: Path, name: Path) -> None:
    """Give a file its name once it is on the disk."""
    with written.open("rb") as file:
        os.fsync(file.fileno())
    written.replace(name)
