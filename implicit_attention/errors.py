"""Exceptions and warnings of the library."""

from __future__ import annotations


class ConvergenceError(RuntimeError):
    """At least one problem of a solve (or of its adjoint) has no answer; the message counts and locates them."""


class ConvergenceWarning(UserWarning):
    """Like `ConvergenceError`, for `on_failure="warn"`."""


class UnsupportedImplementation(ValueError):
    """An implementation was asked for by name that cannot do what is asked; the message says what can."""
