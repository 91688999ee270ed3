"""Files of users, read as text."""

from __future__ import annotations

from pathlib import Path

from ..errors import InputError

#: The most bytes that are read from a file.
LARGEST = 2**16


def text_of(file: Path, content: str) -> str:
    """Return the text of a file, which is to hold `content`."""
    try:
        with file.open("rb") as opened:
            read = opened.read(LARGEST + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(f"`--file` must be a file that can be read, got {str(file)!r} ({reason})") from None
    if len(read) > LARGEST:
        raise InputError(f"`--file` must have at most {LARGEST} bytes, got more; it is to hold {content} alone")
    try:
        return read.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"`--file` must be text with {content}, got bytes that are no UTF-8: {file.name!r}") from None
