"""The frame that all functions of methods share: validation of arguments, and the report of the solve."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _validate
from .._autograd import backward_running
from .._reporting import check_on_failure, report_failures, warn_of_unstable
from .._types import OnFailure
from ..failure_policy import located
from ..problem import widened
from ..solution import Record, SolveReport
from ..status import Status
from .approximation import Approximation, Check
from .methods import listed
from .system import SpinSystem


def validated(
    system: SpinSystem,
    method: Approximation,
    initial: Tensor | None,
    check: Check,
    on_failure: OnFailure,
    kind: type[Approximation] = Approximation,
) -> SpinSystem:
    """The system in the precision of solves; raises where an argument is wrong, or the method cannot treat it."""
    _validate.check_instance("system", system, SpinSystem, "be a SpinSystem")
    if not isinstance(method, kind):
        remedy = f"use {listed(lambda other: issubclass(other, kind), '()')}"
        raise _validate.not_an_instance("method", method, kind, f"be an instance of {kind.__name__}", remedy)
    check_on_failure(on_failure, policies=False)
    _validate.check_choice("check", check, ("none", "stability"))
    method.check(system)
    if initial is not None:
        method.check_initial(system, initial)
    return widened(system)[0]


def reported(
    method: Approximation, report: SolveReport, nonfinite: Tensor, check: Check, on_failure: OnFailure
) -> SolveReport:
    """The report of a solve, in which replaced samples are NONFINITE, after failures were raised or warned of."""
    # A later backward pass reports its failures in the same way.
    on_failure, site = located(on_failure)
    report.adjoint.on_failure, report.adjoint.site, report.adjoint.lead = on_failure, site, nonfinite.shape
    report = SolveReport(report.record.nonfinite_at(nonfinite), report.adjoint, method.remedies)
    name = type(method).__name__
    # Checkpointing computes a pass again whose failures were reported before.
    if not backward_running():
        report_failures(on_failure, name, report.record, method.remedies, site=site)
        if check == "stability":
            warn_of_unstable(on_failure, name, report.status, site=site)
    return report


def closed_form(value: Tensor, residual: Tensor | None = None, tolerance: Tensor | None = None) -> SolveReport:
    """The report of values (*batch) that needed no iteration; MAX_STEPS where a residual exceeds its tolerance."""
    zero = torch.zeros_like(value.detach())
    residual, tolerance = (zero if number is None else number for number in (residual, tolerance))
    status = torch.where(residual <= tolerance, int(Status.CONVERGED), int(Status.MAX_STEPS))
    status = torch.where(torch.isfinite(value.detach()), status, int(Status.NONFINITE)).to(torch.int8)
    none = torch.zeros_like(status, dtype=torch.int32)
    return SolveReport(Record(status, residual, tolerance, none, none))
