"""How failures reach the user: one exception or warning that counts and locates them."""

from __future__ import annotations

import warnings

from torch import Tensor

from . import _validate
from ._autograd import is_batched
from ._types import OnFailure
from .errors import ConvergenceError, ConvergenceWarning, outside
from .solution import sentence
from .status import Status

SHOWN = 3


def check_on_failure(on_failure: str) -> None:
    _validate.check_choice("on_failure", on_failure, ("raise", "warn", "ignore"))


def report_failures(
    on_failure: OnFailure, what: str, status: Tensor, residual: Tensor, tolerance: Tensor, steps: Tensor
) -> None:
    """Raise or warn if any problem failed. Inside vmap, where the host cannot look, the status itself must be read."""
    if on_failure == "ignore" or is_batched(status):
        return
    failed = status > Status.SADDLE
    if not bool(failed.any()):
        return
    indices = failed.nonzero()
    first = [tuple(i) for i in indices[:SHOWN].tolist()]
    where = ", ".join(str(i[0]) if len(i) == 1 else str(i) for i in first) if first[0] else "the only problem"
    more = ", ..." if len(indices) > SHOWN else ""
    example = first[0]
    message = (
        f"{what} failed for {len(indices)} of {status.numel()} problems, first at {where}{more}: "
        f"{sentence(status[example], residual[example], tolerance[example], steps[example])}"
    )
    if on_failure == "raise":
        raise ConvergenceError(f"{message}. Pass on_failure='warn' or 'ignore' to receive the solution all the same.")
    warnings.warn(message, ConvergenceWarning, stacklevel=outside())


def warn_of_saddles(on_failure: OnFailure, what: str, status: Tensor) -> None:
    """Warn of solutions that are unstable: they solve the equations, but are hardly what was asked for."""
    if on_failure == "ignore" or is_batched(status):
        return
    count = int((status == Status.SADDLE).sum())
    if count:
        message = (
            f"{what} ended on an unstable solution (status SADDLE) for {count} of {status.numel()} problems: "
            "a small field, or another solver, may lead to a stable one"
        )
        warnings.warn(message, ConvergenceWarning, stacklevel=outside())
