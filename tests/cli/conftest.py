"""Runs of `landscape` that several files look at."""

import pytest
from commands import done, strict


@pytest.fixture(scope="session")
def quick(tmp_path_factory):
    """The folder and the numbers of four scenes."""
    out = tmp_path_factory.mktemp("landscape") / "quick"
    done("landscape", "--quick", "--html", "--out", out)
    return out, strict(out / "landscape.json")


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The folder and the numbers of all scenes."""
    out = tmp_path_factory.mktemp("landscape") / "whole"
    done("landscape", "--html", "--out", out)
    return out, strict(out / "landscape.json")
