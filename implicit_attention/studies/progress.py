"""The interface by which a study reports its progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

#: Updates between two lines of a training.
LINE_EVERY = 100


class Listener(Protocol):
    """An object that shows the progress of a study."""

    @property
    def has_bar(self) -> bool:
        """Whether a bar shows the current work all the time, so that lines about it are not needed."""

    def begin(self, name: str, done: int = 0, total: int | None = None) -> None:
        """`name` begins, after `done` of `total` pieces of work."""

    def part(self, done: int, total: int) -> None:
        """`done` of `total` pieces of the work that has begun are done."""

    def end(self, name: str, row: dict[str, Any]) -> None:
        """`name` has ended with this row of numbers."""


def reporter(progress: Listener, name: str, updates: int) -> Callable[[int, float], None]:
    """Begin a training, and return the function that shows it after every update, given its number and its loss."""
    progress.begin(name, 0, updates)

    def report(done: int, loss: float) -> None:
        progress.begin(f"{name}, loss {loss:.3f}", done, updates)
        if (done % LINE_EVERY == 0 and not progress.has_bar) or done == updates:
            progress.end(name, {"line": f"update {done} of {updates}, loss {loss:.3f}"})

    return report
