"""Patterns on disk: appended in pieces, read in pieces, by rows, or as the part of one process."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from .. import _validate
from .lock_step import LockStep

_INDEX, _LOCK, _FORMAT, _VERSION = "index.json", "index.lock", "implicit_attention.patterns", 2
_DTYPES = ("float16", "bfloat16", "float32", "float64")
# Rows of about so many bytes have a checksum of their own, so that a few rows are checked without reading a whole file.
_BLOCK = 2**18
_ANEW = "copy the whole folder again, or write its patterns anew"


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
    (memory-mapped), the requested rows alone, and compared with the checksums of these rows. `append` writes a new
    file, then replaces the index. After a crash in between, the old patterns are read; the new file stays unread beside
    them.

    Any number of objects and processes may append to one folder: they wait for each other (`index.lock`), and each
    begins behind the patterns of the others. An object knows the patterns that existed when it was made or appended
    last.

    Args:
        folder: made by the first `append` if it does not exist.
        check: read all patterns now and compare them with their checksums. Otherwise `load` compares the rows it reads.

    Attributes:
        dim, value_dim: D, and E or None; None while nothing is stored.
        dtype: of the stored numbers; None while nothing is stored.

    Raises:
        ValueError: a folder that is not as it was written, in this call or in `load`: the error names the file.
            Also `check` for files of versions of this library that wrote no checksums; they are read without.
        ImportError: without safetensors (`pip install safetensors`).

    Not for memories that fit, which `MemoryLookup` learns or holds.

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

    def __init__(self, folder: str | os.PathLike[str], *, check: bool = False) -> None:
        self.folder = Path(folder)
        self.dim: int | None = None
        self.value_dim: int | None = None
        self.dtype: torch.dtype | None = None
        self._files: list[dict[str, Any]] = []
        self._read_index()
        if check:
            required, remedy = "be False for files without checksums", "append their patterns to a new folder"
            _validate.require(not self._unchecked(), "check", required, self._unchecked(), remedy)
            for file in self._files:
                for first in range(0, file["rows"], file["block"]):
                    self._rows(file, first, min(first + file["block"], file["rows"]))

    def __len__(self) -> int:
        return sum(file["rows"] for file in self._files)

    def __repr__(self) -> str:
        values = "" if self.value_dim is None else f", values of {self.value_dim}"
        files = f"{len(self._files)} files" + (f" ({len(old)} without checksums)" if (old := self._unchecked()) else "")
        return f"StoredPatterns({len(self)} of dimension {self.dim}{values}, {files} in {self.folder})"

    def append(self, keys: Tensor, values: Tensor | None = None) -> None:
        """Write more patterns behind those that are stored.

        Args:
            keys: (M, D).
            values: (M, E), one for each key; for all appended patterns or for none.

        Raises:
            TypeError, ValueError: no tensors of two axes; other sizes or another dtype than the stored patterns; a
                folder that is damaged, or no longer holds the files that this object knows.
        """
        from filelock import FileLock
        from safetensors.torch import save_file

        self._check(keys, values)
        parts = {"keys": keys} if values is None else {"keys": keys, "values": values}
        parts = {part: tensor.detach().cpu().contiguous() for part, tensor in parts.items()}
        rows, tensors = len(keys), list(parts.values())
        block = max(1, _BLOCK // max(1, sum(tensor[:1].nbytes for tensor in tensors)))
        checksums = [_checksum([tensor[i : i + block] for tensor in tensors]) for i in range(0, rows, block)]
        width, dtype = None if values is None else values.shape[-1], str(keys.dtype).removeprefix("torch.")
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / _LOCK).acquire(poll_interval=0.01):
            now, known = StoredPatterns(self.folder), self._files
            required = f"still hold the {len(known)} files that were found there"
            remedy = "make a new StoredPatterns if others are wanted"
            _validate.require(now._files[: len(known)] == known, "folder", required, f"others in {_INDEX}", remedy)
            now._check(keys, values)
            if not (self.folder / _INDEX).exists():
                # Patterns without an index are damage, not an append that ended early.
                self._write_index([], dim=None, value_dim=None, dtype=None)
            name = f"patterns-{self._next():05d}.safetensors"
            beside = self.folder / f"{name}.part"
            save_file(parts, beside)
            _settle(beside, self.folder / name)
            size = (self.folder / name).stat().st_size
            file = {"name": name, "rows": rows, "bytes": size, "block": block, "checksums": checksums}
            files = [*now._files, file]
            self._take(self._write_index(files, dim=keys.shape[-1], value_dim=width, dtype=dtype))

    def load(
        self, rows: slice = slice(None), *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> Patterns:
        """Some of the patterns; of the others only the nearest, up to 256 kB, are read, which share their checksum.

        Args:
            rows: the rows, without a step.
            device: of the tensors.
            dtype: of the tensors; None as they are stored.

        Raises:
            ValueError: the rows are not as they were written, or there are no patterns.
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
        lock = LockStep(group)
        count = len(self)
        return self.load(slice(lock.rank * count // lock.size, (lock.rank + 1) * count // lock.size), **options)

    # Parts.

    def _pieces(self, start: int, stop: int) -> Iterator[list[Tensor | None]]:
        received = f"{self.folder}, where none are"
        _validate.require(self.dim is not None, "folder", "hold patterns", received, "append some")
        begin = 0
        for file in self._files:
            first, last = max(start - begin, 0), min(stop - begin, file["rows"])
            begin += file["rows"]
            if first < last:
                yield self._rows(file, first, last)

    def _rows(self, file: dict[str, Any], first: int, last: int) -> list[Tensor | None]:
        """Keys and values (or None) of rows of a file; raise if their checksums are not those that were written."""
        if "checksums" not in file:
            return self._read(file, first, last)
        size = file["block"]
        low, high = first // size * size, min(-(-last // size) * size, file["rows"])
        parts = self._read(file, low, high)
        for begin in range(low, high, size):
            block = [part[begin - low : begin - low + size] for part in parts if part is not None]
            same = _checksum(block) == file["checksums"][begin // size]
            received = f"rows {begin} to {begin + len(block[0]) - 1} of another checksum"
            _validate.require(same, "folder", f"hold {file['name']} as it was written", received, _ANEW)
        return [None if part is None else part[first - low : last - low] for part in parts]

    def _read(self, file: dict[str, Any], first: int, last: int) -> list[Tensor | None]:
        """Keys and values of rows of a file, of which only sizes and dtypes are checked."""
        from safetensors import safe_open

        sizes = {"keys": self.dim, "values": self.value_dim}
        wanted = {name: ([file["rows"], size], self.dtype) for name, size in sizes.items() if size is not None}
        try:
            with safe_open(self.folder / file["name"], "pt") as opened:
                parts = {name: opened.get_slice(name) for name in set(opened.keys())}
                written = {name: (part.get_shape(), part[:0].dtype) for name, part in parts.items()}
                rows = {name: part[first:last] for name, part in parts.items()} if written == wanted else {}
        except Exception as error:  # a damaged file may raise any error
            required = f"hold {file['name']} as it was written"
            received = f"one that cannot be read ({type(error).__name__}: {error})"
            raise ValueError(_validate.message("folder", required, received, _ANEW)) from error
        _validate.require(written == wanted, "folder", f"hold {file['name']} of {wanted}", written, _ANEW)
        return [rows.get(name) for name in sizes]

    def _joined(self, parts: list[Tensor | None], size: int | None) -> Tensor | None:
        if size is None:
            return None
        return torch.cat([torch.empty(0, size, dtype=self.dtype), *(part for part in parts if part is not None)])

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
        added = (keys.shape[-1], None if values is None else values.shape[-1], keys.dtype)
        for name, old, new in zip(("keys", "values", "keys"), stored, added, strict=True):
            required = f"be like what is stored (dimension {self.dim}, values of {self.value_dim}, {self.dtype})"
            _validate.require(old == new, name, required, new)

    def _unchecked(self) -> list[str]:
        return [file["name"] for file in self._files if "checksums" not in file]

    def _next(self) -> int:
        """A number that no file has, in the index or beside it."""
        names = (re.fullmatch(r"patterns-(\d+)\.safetensors", path.name) for path in self.folder.iterdir())
        return 1 + max((int(name[1]) for name in names if name), default=-1)

    def _read_index(self) -> None:
        path = self.folder / _INDEX
        # Listed first: an index is written before the first patterns are.
        patterns = sorted(file.name for file in self.folder.glob("patterns-*.safetensors"))
        required = f"hold an {_INDEX} of format {_FORMAT!r}, version 1 or {_VERSION}"
        if not path.exists():
            _validate.require(not patterns, "folder", required, f"{patterns[:1]} without one in {self.folder}", _ANEW)
            return
        written = path.read_bytes()
        try:
            index = json.loads(written)
            known = _is_index(index)
        except Exception:  # a damaged file may raise any error
            known = False
        remedy = f"name a folder of its own, or {_ANEW}"
        _validate.require(known, "folder", required, f"{path}, which is another or damaged", remedy)
        for file in index["files"]:
            path = self.folder / file["name"]
            size = path.stat().st_size if path.exists() else None
            required = f"hold {file['name']} of {file['bytes']} bytes"
            received = "no such file" if size is None else f"one of {size} bytes"
            _validate.require(size == file["bytes"], "folder", required, received, _ANEW)
        self._take(index)
        if index["version"] == 1:
            # Such an index has no checksum: its sizes are compared with those in the files.
            for file in self._files:
                self._read(file, 0, 0)

    def _write_index(self, files: list[dict[str, Any]], **contents: int | str | None) -> dict[str, Any]:
        """Write `dim`, `value_dim` and `dtype` of the contents, and the files; return the index."""
        index: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, **contents, "files": files}
        index["checksum"] = _checksum_of(index)
        beside = self.folder / f"{_INDEX}.part"
        beside.write_text(json.dumps(index, indent=1))
        _settle(beside, self.folder / _INDEX)
        return index

    def _take(self, index: dict[str, Any]) -> None:
        self.dim, self.value_dim, self._files = index["dim"], index["value_dim"], index["files"]
        self.dtype = getattr(torch, index["dtype"]) if self._files else None


def _is_index(index: Any) -> bool:
    """Whether an index is whole; any error that this raises says that it is not."""
    rest, files = {name: value for name, value in index.items() if name != "checksum"}, index["files"]
    if rest.keys() != {"format", "version", "dim", "value_dim", "dtype", "files"} or index["format"] != _FORMAT:
        return False
    if index["version"] == _VERSION:
        return bool(index["checksum"] == _checksum_of(rest))
    sizes = [index["dim"], *(file[part] for file in files for part in ("rows", "bytes"))]
    sizes += [] if index["value_dim"] is None else [index["value_dim"]]
    whole = all(type(size) is int and size >= 0 for size in sizes) and index["dtype"] in _DTYPES
    return index["version"] == 1 and "checksum" not in index and whole and len({f["name"] for f in files}) == len(files)


def _checksum_of(index: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(index, sort_keys=True).encode())


def _checksum(tensors: list[Tensor]) -> int:
    """Return the checksum of the bits of tensors on the CPU."""
    total = 0
    for tensor in tensors:
        total = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data, total)
    return total


def _settle(written: Path, name: Path) -> None:
    """Give a file its name once it is on the disk."""
    with written.open("rb") as file:
        os.fsync(file.fileno())
    written.replace(name)
    if os.name == "posix":
        # The new name is on the disk once its folder is.
        folder = os.open(name.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
