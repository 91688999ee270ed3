"""Messages of one line on missing dependencies, and on folders that cannot be written."""

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


def require_modules(*modules: str) -> None:
    """Raise `InputError` with the install line unless all `modules` are installed."""
    if (line := missing(*modules)) is not None:
        raise InputError(line)


@contextmanager
def writable(out: Path) -> Iterator[None]:
    """Turn an `OSError` of writing into `out` into an `InputError`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(f"`--out` must be a writable folder, got {str(out)!r} ({reason}); choose another") from None
