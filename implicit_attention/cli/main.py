"""The entry point `app`: the commands if the optional dependencies are installed, the install line if not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .errors import missing


def _app() -> Callable[..., Any]:
    line = missing("typer", "rich")
    if line is None:
        from .commands import commands

        return commands

    def explain() -> None:
        print(f"error: {line}", file=sys.stderr)
        raise SystemExit(2)

    return explain


app: Any = _app()
