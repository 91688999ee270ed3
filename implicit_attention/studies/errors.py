"""Errors that a user sees, each in one line."""

from __future__ import annotations

#: Characters of a message that are shown. A file can hold thousands of names.
LONGEST = 600


def printable(text: str) -> str:
    """`text` on one line, with escapes for what would act on a terminal."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST // 2]} ... {shown[-LONGEST // 2 :]}"


class InputError(Exception):
    """An argument or a file that cannot be used; the message is the one line that the user sees."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))
