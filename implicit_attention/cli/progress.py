"""Progress in the terminal while a command runs."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from rich import progress
from rich.console import Console, ConsoleDimensions

WIDTH = 120
#: After so many seconds without a line a log gets one; in long runs after a tenth of the time so far, up to LONG.
QUIET, LONG = 5.0, 60.0


def make_console(*, stderr: bool = False) -> Console:
    """Return a console, wide enough for the tables in pipes and logs, unless COLUMNS sets a width."""
    stream = sys.stderr if stderr else sys.stdout
    width = WIDTH if not stream.isatty() and "COLUMNS" not in os.environ else None
    console = Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)
    if console.is_dumb_terminal:
        # Else rich takes it for 80 columns wide.
        console.size = ConsoleDimensions(*shutil.get_terminal_size())
    return console


class Progress(progress.Progress):
    """A line per finished method on stderr, and a bar below them where stderr is a terminal.

    Elsewhere, as in a pipe or a log, a line says what goes on where nothing was written for some seconds.

    Args:
        line: makes the line of a finished method from its row of numbers.
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
        self.began = self.written = time.monotonic()
        self.over = threading.Event()
        self.teller = None if console.is_terminal or console.quiet else threading.Thread(target=self._tell, daemon=True)

    @property
    def has_bar(self) -> bool:
        """Return whether a bar shows the current work."""
        return self.console.is_terminal

    def start(self) -> None:
        """Begin to show what goes on."""
        super().start()
        if self.teller is not None and not self.teller.is_alive() and not self.over.is_set():
            self.began = self.written = time.monotonic()
            self.teller.start()

    def stop(self) -> None:
        """Show nothing from now on."""
        self.over.set()
        if self.teller is not None and self.teller.is_alive():
            self.teller.join()
        super().stop()

    def _tell(self) -> None:
        """Write what goes on, in a thread of its own, as a method may work long without a line."""
        while not self.over.is_set():
            now = time.monotonic()
            due = self.written + min(max(QUIET, (now - self.began) / 10), LONG)
            if now >= due:
                self._write(self._now(now - self.began))
            else:
                self.over.wait(due - now)

    def _now(self, seconds: float) -> str:
        (task,) = self.tasks
        done = "" if task.total is None else f"{task.completed:.0f} of {task.total:.0f}, "
        return f"{task.description:<20} {done}{seconds:.0f} s so far"

    def _write(self, text: str) -> None:
        self.written = time.monotonic()
        self.console.print(text, markup=False)

    def begin(self, name: str, done: int = 0, total: int | None = None) -> None:
        """Show that `name` begins, after `done` of `total` pieces of work."""
        self.update(self.bar, description=name, completed=done, total=total)

    def part(self, done: int, total: int) -> None:
        """Show that `done` of `total` pieces of the work that has begun are done."""
        self.update(self.bar, completed=done, total=total)

    def end(self, name: str, row: dict[str, Any]) -> None:
        """Write that `name` has ended with this row of numbers."""
        error = f"failed: {row['error']}: {row['message']}" if "error" in row else self.line(row)
        self._write(f"{name:<20} {error}")
