"""How failures reach the user: one exception or warning that counts and locates them."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import Tensor

from . import _validate
from ._autograd import is_batched
from ._types import OnFailure
from .errors import ConvergenceError, ConvergenceWarning, outside
from .solution import NO_REMEDIES, Record, Remedies
from .status import Status

SHOWN = 3
# Gradients with a larger estimated relative error than UNSURE are warned of. The estimate is of first order, and
# beyond UNKNOWN it says only that the error is large.
UNSURE, UNKNOWN = 0.15, 0.25


def check_on_failure(on_failure: str) -> None:
    _validate.check_choice("on_failure", on_failure, ("raise", "warn", "ignore"))


def report_failures(
    on_failure: OnFailure,
    what: str,
    record: Record,
    remedies: Remedies = NO_REMEDIES,
    cause: Callable[[], str] = str,
) -> None:
    """Raise or warn if any problem failed, with the remedy of the method for the first one, and the `cause` if known.

    Inside torch.vmap, where the host cannot look, the status itself must be read.
    """
    if on_failure == "ignore" or is_batched(record.status):
        return
    failed = record.failed
    if not bool(failed.any()):
        return
    indices = failed.nonzero()
    first = [tuple(i) for i in indices[:SHOWN].tolist()]
    where = ", ".join(str(i[0]) if len(i) == 1 else str(i) for i in first) if first[0] else "the only problem"
    more = ", ..." if len(indices) > SHOWN else ""
    message = (
        f"{what} failed for {len(indices)} of {failed.numel()} problems, first at {where}{more}: "
        f"{record.message(first[0], remedies)}"
    )
    if told := cause():
        message += f"; {told}"
    if on_failure == "raise":
        raise ConvergenceError(f"{message}. Pass on_failure='warn' or 'ignore' to receive the solution all the same.")
    warnings.warn(message, ConvergenceWarning, stacklevel=outside())


def report_gradients(
    on_failure: OnFailure, what: str, error: Tensor | None, record: Record, remedies: Remedies = NO_REMEDIES
) -> None:
    """`report_failures` of backward solves, and a warning of gradients that the residual of the states spoils."""
    if on_failure == "ignore" or is_batched(record.status):
        return
    report_failures(on_failure, what, record, remedies)
    if error is None:
        return
    unsure = (error > UNSURE) & ~record.failed
    if count := int(unsure.sum()):
        worst = float(error[unsure].max())
        share = f"{100 * min(worst, UNKNOWN):.0f} %{' or more' if worst > UNKNOWN else ''}"
        message = (
            f"the gradients of {count} of {unsure.numel()} problems may be off by {share}, as their states are "
            "solved to a residual only and the problems are nearly singular there (a fold; see "
            "`AdjointReport.gradient_error`); solve with a smaller rtol, or in float64"
        )
        warnings.warn(message, ConvergenceWarning, stacklevel=outside())


def warn_of_unstable(on_failure: OnFailure, what: str, status: Tensor) -> None:
    """Warn of unstable solutions: they solve the equations, but small deviations from them grow."""
    if on_failure == "ignore" or is_batched(status):
        return
    count = int((status == Status.UNSTABLE).sum())
    if count:
        message = (
            f"{what} ended on an unstable solution (status UNSTABLE) for {count} of {status.numel()} problems: "
            "a small field, or another solver, may lead to a stable one"
        )
        warnings.warn(message, ConvergenceWarning, stacklevel=outside())
