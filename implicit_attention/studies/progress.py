"""The progress of a study, as it is reported to whoever shows it."""

from __future__ import annotations

from typing import Any, Protocol


class Listener(Protocol):
    """An object that is told how far a study is."""

    @property
    def has_bar(self) -> bool:
        """Whether it shows what has begun all the time, so that lines about it are not needed."""

    def begin(self, name: str, done: int = 0, total: int | None = None) -> None:
        """`name` begins, after `done` of `total` pieces of work."""

    def part(self, done: int, total: int) -> None:
        """`done` of `total` pieces of the work that has begun are done."""

    def end(self, name: str, row: dict[str, Any]) -> None:
        """`name` has ended with this row of numbers."""
