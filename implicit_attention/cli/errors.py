"""Messages of one line on missing dependencies, and on files and folders that cannot be written."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..studies.errors import InputError

INSTALL = 'pip install -e ".[cli]"'


def missing(*modules: str) -> str | None:
    """Return the line that names the modules that are not installed and how to install them, or None."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    return f"this command needs {' and '.join(absent)}, not installed here; in the checkout: {INSTALL}"


@contextmanager
def writable(option: str, path: Path, kind: str = "file") -> Iterator[None]:
    """Turn an `OSError` of writing a file, or into a folder, into an `InputError`."""
    try:
        yield
    except OSError as error:
        reason, shown = error.strerror or type(error).__name__, path.name if kind == "file" else str(path)
        raise InputError(f"`{option}` must be a writable {kind}, got {shown!r} ({reason}); choose another") from None
