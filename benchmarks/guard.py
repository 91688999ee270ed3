"""Nothing is timed whose tests are red."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def red(tests: tuple[str, ...], root: Path = ROOT, marker: str = "not slow and not nightly") -> str | None:
    """Return why red tests forbid a timing; None if they pass. They run once per process, in one of their own.

    Args:
        tests: files or folders below `root`; without any there is nothing to refuse. One that is missing is red.
        root: where they are run.
        marker: which of them, as pytest's option `-m` has it.
    """
    if not tests:
        return None
    workers = (os.cpu_count() or 1) // 2
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers if workers > 1 else 0)]
    command += ["-x", "-m", marker, "-p", "no:cacheprovider"]
    # Options of a pytest around this run, or of its user, are not meant for these tests.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run([*command, *tests], cwd=root, env=outside, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    what = (failed or lines[-1:] or ["pytest said nothing"])[0]
    return f"not timed, its tests are red: {what[:200]}"
