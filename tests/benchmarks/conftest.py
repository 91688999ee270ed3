"""The suites are tried without running the tests of what they time first, but for the tests of just that."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import guard  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def green():
    """Every test is taken for green; a test that wants a red one replaces `guard.red` once more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "red", lambda tests, root=None, marker="": None)
        yield
