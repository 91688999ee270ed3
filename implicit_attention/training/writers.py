"""Writers of the observations of `watch`: to a CSV file, JSON lines, a TensorBoard writer, a line of a terminal."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, Protocol, TextIO

from .. import _validate
from .observed import Observed


class Writer(Protocol):
    """The protocol of a writer, which takes an `Observed` and stores it; subclassing is not needed.

    Examples:
        >>> from implicit_attention.training import Writer
        >>> class Printer:
        ...     def write(self, observed):
        ...         print(observed.line())
        >>> writer: Writer = Printer()

    Not for reading: any reader of CSV or JSON reads the files.
    """

    def write(self, observed: Observed) -> None:
        """Store an observation."""


class CSVFile:
    """One row for each layer and one of all ("all"), with the columns of `Observed.rows`; a file that exists goes on.

    Args:
        path: the file. Its rows from before a run was resumed stay.

    Raises:
        ValueError: the file has other columns.

    Examples:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from implicit_attention import ImplicitAttention
        >>> from implicit_attention.training import CSVFile, watch
        >>> layer = ImplicitAttention(8, heads=2)
        >>> seen = watch(layer)
        >>> output = layer(torch.randn(3, 5, 8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     CSVFile(f"{folder}/seen.csv").write(seen.take(step=1))
        ...     print(Path(f"{folder}/seen.csv").read_text()[:24])
        step,layer,forward_calls

    Not for several processes: write from one of them.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def write(self, observed: Observed) -> None:
        """Append the rows."""
        rows = observed.rows()
        columns = list(rows[0])
        begins = not self.path.exists() or self.path.stat().st_size == 0
        if not begins:
            with self.path.open(newline="", encoding="utf-8") as file:
                existing = next(csv.reader(file), [])
            received = f"{self.path} with the columns {', '.join(existing[:4])}, ..."
            _validate.require(existing == columns, "path", "be a file of this writer", received, "use a new file")
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns)
        if begins:
            writer.writeheader()
        writer.writerows(rows)
        _append(self.path, text.getvalue(), "\r\n")


class JSONLines:
    """One JSON object per line for each layer and one of all; numbers that are not finite are null.

    Args:
        path: the file; one that exists goes on.

    Examples:
        >>> import json, tempfile, torch
        >>> from pathlib import Path
        >>> from implicit_attention import ImplicitAttention
        >>> from implicit_attention.training import JSONLines, watch
        >>> layer = ImplicitAttention(8, heads=2)
        >>> seen = watch(layer)
        >>> output = layer(torch.randn(3, 5, 8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     JSONLines(f"{folder}/seen.jsonl").write(seen.take(step=1))
        ...     [json.loads(line)["forward_problems"] for line in Path(f"{folder}/seen.jsonl").read_text().splitlines()]
        [30, 30]

    Not for several processes: write from one of them.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def write(self, observed: Observed) -> None:
        """Append the lines."""
        rows = ({name: _finite(value) for name, value in row.items()} for row in observed.rows())
        _append(self.path, "".join(f"{json.dumps(row, allow_nan=False)}\n" for row in rows), "\n")


class TensorBoard:
    """Scalars `equilibrium/<layer>/<column>` in a writer that is handed in; a layer without a name is "(model)".

    Args:
        writer: anything with `add_scalar(name, value, step)`, such as `torch.utils.tensorboard.SummaryWriter`.

    Raises:
        TypeError: a writer without `add_scalar`.

    Examples:
        >>> import torch
        >>> from implicit_attention import ImplicitAttention
        >>> from implicit_attention.training import TensorBoard, watch
        >>> class Printer:
        ...     def add_scalar(self, name, value, step):
        ...         if name == "equilibrium/all/forward_problems":
        ...             print(name, value, step)
        >>> layer = ImplicitAttention(8, heads=2)
        >>> seen = watch(layer)
        >>> output = layer(torch.randn(3, 5, 8))
        >>> TensorBoard(Printer()).write(seen.take(step=1))
        equilibrium/all/forward_problems 30 1

    Not for failures by status, of which only the sums are written.
    """

    def __init__(self, writer: Any) -> None:
        if isinstance(writer, type) or not callable(getattr(writer, "add_scalar", None)):
            required = "have a method add_scalar(name, value, step)"
            raise TypeError(_validate.message("writer", required, type(writer).__name__))
        self.writer = writer

    def write(self, observed: Observed) -> None:
        """Add the scalars that are numbers."""
        for row in observed.rows():
            for name, value in row.items():
                known = isinstance(value, int | float) and not math.isnan(value)
                if known and name != "step" and "_failed_" not in name:
                    layer = row["layer"] or "(model)"
                    self.writer.add_scalar(f"equilibrium/{layer}/{name}", value, observed.step)


class ProgressLine:
    """One line that is written over in a terminal, and lines below each other in a file.

    Args:
        stream: where to, by default the standard error.

    Examples:
        >>> import sys, torch
        >>> from implicit_attention import ImplicitAttention
        >>> from implicit_attention.training import ProgressLine, watch
        >>> layer = ImplicitAttention(8, heads=2)
        >>> seen = watch(layer)
        >>> output = layer(torch.randn(3, 5, 8))
        >>> ProgressLine(sys.stdout).write(seen.take(step=1))
        step 1: evaluations ... failed 0 of 30, ...

    Not beside other progress bars of the same terminal, which it would write over.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream, self._width = stream, 0

    def write(self, observed: Observed) -> None:
        """Show `observed.line()`."""
        stream, line = self.stream or sys.stderr, observed.line()
        if stream.isatty():
            stream.write(f"\r{line.ljust(self._width)}")
            self._width = len(line)
        else:
            stream.write(f"{line}\n")
        stream.flush()


def _append(path: Path, text: str, newline: str) -> None:
    """Add lines at once; a line that a killed run left unfinished stays one of its own."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else newline + text
        file.write(text.encode())


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
