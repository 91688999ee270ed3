"""The common frame of all functions of methods: validation of arguments, and the report of the solve."""

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
from ._nonfinite import fill
from .approximation import Approximation, Check
from .methods import listed
from .system import SpinSystem


def accepted(
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


def told(
    method: Approximation, report: SolveReport, nonfinite: Tensor, check: Check, on_failure: OnFailure
) -> SolveReport:
    """The report of a solve, in which replaced samples are NONFINITE, after failures were raised or warned of."""
    # A later backward pass tells its failures in the same way.
    on_failure, site = located(on_failure)
    report.adjoint.on_failure, report.adjoint.site, report.adjoint.lead = on_failure, site, nonfinite.shape
    status = report.status.masked_fill(nonfinite, int(Status.NONFINITE))
    record = report.record._replace(status=status, residual=fill(report.residual, nonfinite))
    report = SolveReport(record, report.adjoint, method.remedies)
    name = type(method).__name__
    # What checkpointing computes again was told of before.
    if not backward_running():
        report_failures(on_failure, name, report.record, method.remedies, site=site)
        if check == "stability":
            warn_of_unstable(on_failure, name, report.status, site=site)
    return report


def closed_form(value: Tensor) -> SolveReport:
    """The report of values (*batch) that needed no iteration."""
    value = value.detach()
    none = torch.zeros_like(value, dtype=torch.int32)
    status = torch.where(torch.isfinite(value), int(Status.CONVERGED), int(Status.NONFINITE)).to(torch.int8)
    zero = torch.zeros_like(value)
    return SolveReport(Record(status, zero, zero, none, none))
