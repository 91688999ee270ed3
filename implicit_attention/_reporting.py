"""The report of failures to the user: one exception or warning that counts and locates them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _validate
from ._autograd import backward_running, host_may_look, is_batched, transforms_active
from .errors import ConvergenceError, ConvergenceWarning, outside
from .failure_policy import WORDS, FailurePolicy, FailureSite, Side, located, own_site, policy_of
from .solution import NO_REMEDIES, UNSURE, Record, Remedies, shown_index
from .status import Status

SHOWN = 3
# The estimate of a gradient's error is of first order: beyond this it says only that the error is large.
UNKNOWN = 0.25
# A layer does not warn of so few doubtful gradients, which any training meets; its `last_solve` counts them.
RARE = FailurePolicy(tolerate=1e-3, window=100, over="warn")
# The kinds of warnings beside statuses: gradients that may be off, and findings of a layer.
_UNSURE_KIND, OTHER_KIND = 100, 101


def table(cells: Sequence[Sequence[str]]) -> str:
    """The rows of a table as text, the first column aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def check_on_failure(on_failure: Any, *, policies: bool = True) -> None:
    """Raise unless it is a word, or a policy where these are known."""
    given, site = located(on_failure)
    if isinstance(given, FailurePolicy):
        # Words only where something is wrong: torch.compile does not follow the making of a text.
        if not policies and site is None:
            required = "be 'raise', 'warn' or 'ignore' here"
            remedy = "a policy is of layers, `solve` and `equilibrium_attention`"
            raise ValueError(_validate.message("on_failure", required, repr(given), remedy))
        return
    if isinstance(given, type) and issubclass(given, FailurePolicy):
        raise TypeError(
            _validate.message("on_failure", "be an instance", "the class FailurePolicy", "pass FailurePolicy()")
        )
    if given not in WORDS:
        required = f"be one of {', '.join(map(repr, WORDS))}"
        remedy = "or pass a FailurePolicy" if policies else ""
        raise ValueError(_validate.message("on_failure", required, repr(given), remedy))


def report_failures(
    on_failure: Any,
    what: str,
    record: Record,
    remedies: Remedies = NO_REMEDIES,
    cause: Callable[[], str] = str,
    *,
    site: FailureSite | None = None,
    side: Side = "forward",
) -> None:
    """Raise or warn if more problems failed than are tolerated, with the remedy of the first, and the `cause`.

    Inside torch.vmap, where the host cannot look, the status itself must be read.
    """
    failed = record.failed

    def message() -> str:
        indices = failed.nonzero()
        first = [tuple(i) for i in indices[:SHOWN].tolist()]
        where = ", ".join(map(shown_index, first)) if first[0] else "the only problem"
        more = ", ..." if len(indices) > SHOWN else ""
        because = f"; {reason}" if (reason := cause()) else ""
        return (
            f"{what} failed for {len(indices)} of {failed.numel()} problems, first at {where}{more}: "
            f"{record.message(first[0], remedies)}{because}"
        )

    _tell(on_failure, site, side, failed, message, f"{what} is not reliable", status=record.status)


def tell(
    on_failure: Any, failed: Tensor, message: Callable[[], str], *, received: str = "the solution", but: str = ""
) -> None:
    """Raise or warn of failures that a layer finds by itself.

    `but` follows a warning, and `received` names the value that is returned.
    """
    # Checkpointing computes a forward pass again, whose failures were reported before.
    if not backward_running():
        _tell(on_failure, None, "layer", failed, message, received=received, but=but)


def _tell(
    on_failure: Any,
    site: FailureSite | None,
    side: Side,
    failed: Tensor,
    message: Callable[[], str],
    otherwise: str = "",
    *,
    status: Tensor | None = None,
    received: str = "the solution",
    but: str = "",
) -> None:
    """Raise or warn if more problems failed than are tolerated, with the `message` on those of this call.

    otherwise: what to say where only calls before this one had failures; nothing if it is empty.
    """
    policy, site = policy_of(on_failure), site or own_site(on_failure)
    if policy.over == "ignore" or is_batched(failed):
        return
    too_many = (site or policy._site).count(side, policy, failed) if policy.counts else ""
    now = too_many is not None and bool(failed.any())
    if not now and not (too_many and otherwise):
        return
    text = message() if now else otherwise
    follows = f"{'.' if now else ':'} {too_many}" if too_many else ""
    if policy.over == "raise":
        remedy = f"Pass on_failure='warn' or 'ignore' to receive {received} all the same."
        raise ConvergenceError(f"{text}{follows}. {remedy}")
    kind = OTHER_KIND if status is None else int(status.max()) if now else int(Status.MAX_STEPS)
    _warn(site, "forward" if side == "layer" else side, kind, f"{text}{follows}{but}")


def report_gradients(
    on_failure: Any,
    what: str,
    error: Tensor | None,
    record: Record,
    remedies: Remedies = NO_REMEDIES,
    *,
    site: FailureSite | None = None,
) -> None:
    """Report failures of backward solves, and warn of gradients that the residual of the states spoils.

    A layer warns of such gradients where they are not `RARE`, a function each time.
    """
    policy, site = policy_of(on_failure), site or own_site(on_failure)
    if policy.over == "ignore" or is_batched(record.status):
        return
    report_failures(on_failure, what, record, remedies, site=site, side="backward")
    # A policy that tolerates failures says nothing of estimates.
    if error is None or policy.counts:
        return
    unsure = ((error > UNSURE) & ~record.failed).cpu()
    if site is not None and site.count("backward", RARE, unsure) is None:
        return
    if count := int(unsure.sum()):
        worst = float(error[unsure].max())
        share = f"{100 * min(worst, UNKNOWN):.0f} %{' or more' if worst > UNKNOWN else ''}"
        message = (
            f"the gradients of {count} of {unsure.numel()} problems may be off by {share}, as their states are "
            "solved to a residual only and the problems are nearly singular there (a fold; see "
            "`AdjointReport.gradient_error`); solve with a smaller rtol, or in float64"
        )
        _warn(site, "backward", _UNSURE_KIND, message)


def warn_of_unstable(on_failure: Any, what: str, status: Tensor, *, site: FailureSite | None = None) -> None:
    """Warn of unstable solutions: they solve the equations, but small deviations from them grow."""
    if policy_of(on_failure).over == "ignore" or is_batched(status):
        return
    count = int((status == Status.UNSTABLE).sum())
    if count:
        message = (
            f"{what} ended on an unstable solution (status UNSTABLE) for {count} of {status.numel()} problems: "
            "a small field, or another solver, may lead to a stable one"
        )
        _warn(site, "forward", int(Status.UNSTABLE), message)


def _warn(site: FailureSite | None, side: Side, kind: int, message: str) -> None:
    again = "" if site is None else site.again(side, kind)
    if again is not None:
        warnings.warn(f"{message}{again}", ConvergenceWarning, stacklevel=outside())


def without_gradient(on_failure: Any, failed: Tensor, value: Tensor) -> Tensor:
    """The value; with backward="zero" a problem (*lead) that failed gets no gradient by it."""
    # Inside transforms a value that is differentiated at an outer level, or in forward mode, does not say so.
    if policy_of(on_failure).backward == "keep" or not (value.requires_grad or transforms_active()):
        return value
    return torch.where(_along(failed, value), value.detach(), value)


def left_out(on_failure: Any, status: Tensor, cotangent: Tensor) -> Tensor | None:
    """With backward="zero" the cotangent (*lead, *event) without failed problems; None where nothing is to be done.

    The host looks, except under transforms. A problem whose cotangent is not finite keeps it.
    """
    if policy_of(on_failure).backward == "keep":
        return None
    failed = forgiven(status, cotangent) > Status.UNSTABLE
    if host_may_look(status) and not bool(failed.any()):
        return None
    return cotangent.masked_fill(_along(failed, cotangent), 0.0)


def stays_out(on_failure: Any, answer: Tensor, rhs: Tensor, event_ndim: int) -> Tensor:
    """The answer (*lead, *event) of a linear system; with backward="zero" one that was left out has no derivative.

    Such an answer is 0 for a right-hand side that is not 0, as no solution is.
    """
    if policy_of(on_failure).backward == "keep":
        return answer
    lead = answer.ndim - event_ndim
    left = _everywhere(answer == 0, lead) & ~_everywhere(rhs == 0, lead)
    return torch.where(_along(left, answer), answer.detach(), answer)


def lost(status: Tensor, cotangent: Tensor) -> Tensor:
    """(*lead), where the gradient from above is not finite, so that there is no gradient and no solve failed."""
    return ~_everywhere(torch.isfinite(cotangent), status.ndim)


def unread(z: Tensor, cotangent: Tensor, event_ndim: int) -> Tensor:
    """(*lead), where a state is not finite and the loss does not read it.

    It must not reach tensors that problems share: 0 * NaN is NaN. One with a cotangent stays: its solve fails.
    """
    lead = z.ndim - event_ndim
    return ~_everywhere(torch.isfinite(z), lead) & _everywhere(cotangent == 0, lead)


def forgiven(status: Tensor, cotangent: Tensor) -> Tensor:
    """The status of backward solves, of which those whose `cotangent` is `lost` have not failed."""
    return status.masked_fill(lost(status, cotangent), int(Status.CONVERGED))


def _along(failed: Tensor, value: Tensor) -> Tensor:
    return failed.reshape((*failed.shape, *(1,) * (value.ndim - failed.ndim)))


def _everywhere(holds: Tensor, lead: int) -> Tensor:
    """Whether something holds for all entries of a problem, (*lead, *event) -> (*lead)."""
    return holds.flatten(lead).all(-1) if holds.ndim > lead else holds
