"""Exceptions and warnings of the library."""

from __future__ import annotations

import sys


class ConvergenceError(RuntimeError):
    """At least one problem of a solve (or of its adjoint) has no answer; the message counts and locates them."""


class ConvergenceWarning(UserWarning):
    """Like `ConvergenceError`, for `on_failure="warn"`."""


class UnsupportedImplementation(ValueError):
    """An implementation was asked for by name that cannot do what is asked; the message says what can."""


class KernelWarning(RuntimeWarning):
    """A kernel is wrong or fails on this machine and is not used; said once, with what to report."""


def outside() -> int:
    """Stack level of the first caller outside this package and torch, so that a warning points at the user's line."""
    frame, level = sys._getframe(1), 1
    inside = (__name__.partition(".")[0], "torch")
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in inside:
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    return level
