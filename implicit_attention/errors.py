"""Exceptions and warnings of the library."""

from __future__ import annotations

import sys


class ConvergenceError(RuntimeError):
    """At least one problem of a solve, or of its adjoint, has no answer; the message counts and locates them.

    Examples:
        >>> import torch
        >>> from implicit_attention import ConvergenceError, equilibrium_attention
        >>> x = 3 * torch.eye(4)
        >>> try:
        ...     equilibrium_attention(x, x, x, max_steps=1, on_failure="raise")
        ... except ConvergenceError as error:
        ...     print(str(error).partition(",")[0])
        Anderson failed for 4 of 4 problems

    Not for arguments that are out of range: these raise ValueError or TypeError.
    """


class ConvergenceWarning(UserWarning):
    """At least one problem has no answer, or an uncertain gradient, with `on_failure="warn"`.

    Examples:
        >>> import warnings, torch
        >>> from implicit_attention import ConvergenceWarning, equilibrium_attention
        >>> x = 3 * torch.eye(4)
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", ConvergenceWarning)
        ...     equilibrium_attention(x, x, x, max_steps=1).shape
        torch.Size([4, 4])

    Not for telling which problems failed: read `Solution.status`, or `last_solve` of a layer.
    """


class UnsupportedImplementation(ValueError):
    """The implementation that `impl` names cannot do what is asked; the message says what can.

    Examples:
        >>> import torch
        >>> from implicit_attention import UnsupportedImplementation, equilibrium_attention
        >>> x = torch.eye(4)
        >>> try:
        ...     equilibrium_attention(x, x, x, impl="triton", max_steps=0)
        ... except UnsupportedImplementation:
        ...     print("not with triton")
        not with triton

    Not for impl="auto", which takes an implementation that can: it is never raised there.
    """


class KernelWarning(RuntimeWarning):
    """A kernel is wrong or fails on this machine and is not used; said once, with what to report."""


def outside() -> int:
    """Stack level of the first caller outside this package and torch, so that a warning points at the user's line."""
    frame, level = sys._getframe(1), 1
    inside = (__name__.partition(".")[0], "torch")
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in inside:
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    return level
