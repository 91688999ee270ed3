"""What a command cannot do, said in one line."""

from __future__ import annotations

import importlib.util

INSTALL = 'pip install -e ".[cli]"'


class InputError(Exception):
    """An argument or a file that cannot be used; the message is the one line that the user sees."""


def missing(modules: tuple[str, ...]) -> str | None:
    """The line that asks for the optional dependencies among `modules` that are not installed, or None."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    return f"this command needs {' and '.join(absent)}, not installed here; in the checkout: {INSTALL}"


def require_modules(*modules: str) -> None:
    """Raise `InputError` with the install line unless all `modules` are installed."""
    line = missing(modules)
    if line is not None:
        raise InputError(line)
