"""The report of steps that were run backwards: how far from their start they ended."""

from __future__ import annotations

import torch
from torch import Tensor

from .._reporting import report_gradients
from ..solution import AdjointReport, Record
from ..status import Status

#: Rounding of this many units of a state is told of: where f repeats itself the error is 0, else it grows at each step.
ROUNDINGS = 16


def report_reconstruction(report: AdjointReport, error: Tensor, num_evals: int, if_random: str) -> None:
    """Keep the evidence of a backward pass, the error (*lead), and report the problems whose gradient is wrong.

    Of several passes the worst is kept.
    """
    if report.lead is not None and report.lead.numel() == error.numel():
        error = error.reshape(report.lead)
    before = report.reconstruction_error
    worst = error if before is None or before.shape != error.shape else torch.maximum(before, error)
    limit = torch.full_like(error, ROUNDINGS * torch.finfo(error.dtype).eps)
    record = Record.unmeasured(error, Status.CONVERGED)
    count = torch.full_like(record.num_steps, num_evals)
    records = []
    for size in (error, worst):
        status = record.status.masked_fill(~(size <= limit), int(Status.MAX_STEPS))
        records.append(Record(status, size, limit, count, count))
    now, kept = records
    report.status, report.residual, report.tolerance, report.num_steps, _ = kept
    report.reconstruction_error = worst
    what = "the backward pass by Reversible, whose gradient is therefore wrong,"
    remedies = {Status.MAX_STEPS: f"the steps ran back to another start, as f is not the same each time: {if_random}"}
    report_gradients(report.on_failure, what, None, now, remedies, site=report.site)
