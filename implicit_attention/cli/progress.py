"""What the terminal shows while a command runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from rich import progress
from rich.console import Console

WIDTH = 120


def make_console(*, stderr: bool = False) -> Console:
    """A console; wide enough for the tables where nobody has set a width (pipes, logs)."""
    stream = sys.stderr if stderr else sys.stdout
    width = WIDTH if not stream.isatty() and "COLUMNS" not in os.environ else None
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)


class Progress(progress.Progress):
    """A line per finished method on stderr, and a bar below them where stderr is a terminal.

    Args:
        line: what is said of a finished method, from its row of numbers.
        console: to write to; by default stderr.
    """

    def __init__(self, line: Callable[[dict[str, Any]], str], console: Console | None = None) -> None:
        console = make_console(stderr=True) if console is None else console
        super().__init__(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            refresh_per_second=2,
        )
        self.line = line
        self.bar = self.add_task("starting", total=None)

    def begin(self, name: str, done: int = 0, total: int | None = None) -> None:
        """`name` begins, after `done` of `total` pieces of work."""
        self.update(self.bar, description=name, completed=done, total=total)

    def part(self, done: int, total: int) -> None:
        """`done` of `total` pieces of the work that has begun are done."""
        self.update(self.bar, completed=done, total=total)

    def end(self, name: str, row: dict[str, Any]) -> None:
        """`name` has ended with this row of numbers."""
        error = f"failed: {row['error']}: {row['message']}" if "error" in row else self.line(row)
        self.console.print(f"{name:<20} {error}", markup=False)
