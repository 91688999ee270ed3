"""The interface by which a study reports its progress."""

from __future__ import annotations

from typing import Any, Protocol


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
