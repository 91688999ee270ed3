"""Running sums over the solves of one layer since the last look, which stay on the device of the solves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _validate
from .._torch import backward_running, is_batched, is_exporting, is_fake, transforms_active
from ..problem import Problem
from ..solution import Record, SolveReport, Status

#: Evaluations are counted one by one up to this number.
BINS = 1024
# Rows of one side: statuses (and cotangents that were not finite), then evaluations, then calls and all evaluations.
LOST, STATUSES = len(Status), len(Status) + 1
CALLS, EVALUATIONS, WIDTH = STATUSES + BINS, STATUSES + BINS + 1, STATUSES + BINS + 2
FORWARD, BACKWARD = 0, 1
# In place of a tolerance of 0.
TINY = 1e-300


class Tally:
    """Counts of forward and backward solves, (2, WIDTH), and the worst of them, (2, STATUSES + 1).

    peaks: by status the largest residual in units of its tolerance, then the largest number of evaluations.
    """

    def __init__(self, device: torch.device, spectral: bool) -> None:
        self.spectral = spectral
        #: With `spectral`: the last problem that was solved, and its solution.
        self.sample: tuple[Problem, Tensor] | None = None
        self._make(device)

    def _make(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            # Parameters, whose sizes torch.compile takes as they are. It leaves those of other tensors open, and
            # compiles again where a size of the input was equal to one of them and no longer is.
            self.counts: Tensor = nn.Parameter(torch.zeros(2, WIDTH, dtype=torch.int64, device=device), False)
            self.peaks: Tensor = nn.Parameter(torch.zeros(2, STATUSES + 1, dtype=torch.float64, device=device), False)

    def add(self, report: SolveReport | Record) -> None:
        """Count a forward solve; one that checkpointing repeats in a backward pass is left out."""
        record = report.record if isinstance(report, SolveReport) else report
        self._add(FORWARD, record.status, record.residual, record.tolerance, record.num_evals, None)

    def add_backward(
        self, status: Tensor, residual: Tensor, tolerance: Tensor, num_steps: Tensor, lost: Tensor | None
    ) -> None:
        """Count a backward solve; `lost` says where the cotangent from above was not finite."""
        self._add(BACKWARD, status, residual, tolerance, num_steps, lost)

    def _add(self, side: int, *fields: Any) -> None:
        status = fields[0]
        if is_exporting() or status.numel() == 0:
            return
        if torch.compiler.is_compiling():
            _count_in_graph(self.counts, self.peaks, *fields, side)
            return
        if is_batched(status) or is_fake(status):
            return
        if self.counts.device != status.device:
            # The model was moved.
            counts, peaks = self.counts, self.peaks
            self._make(status.device)
            self.counts += counts.to(status.device)
            self.peaks += peaks.to(status.device)
        if not transforms_active():
            _count(self.counts, self.peaks, fields, side)
            return
        with torch._C._DisableFuncTorch():
            _count(self.counts, self.peaks, [t if t is None else _unwrapped(t) for t in fields], side)

    def keep(self, problem: Problem, value: Tensor) -> None:
        """Keep a problem and its solution, from which `take` may compute the spectral radius."""
        if not (is_batched(value) or transforms_active()):
            self.sample = problem.replace(*(t.detach() for t in problem.tensors())), value.detach()

    def taken(self) -> tuple[Tensor, Tensor]:
        """The sums so far, which begin again at zero."""
        taken = self.counts.clone(), self.peaks.clone()
        self.counts.zero_()
        self.peaks.zero_()
        return taken


@torch.no_grad()
def _count(counts: Tensor, peaks: Tensor, fields: Sequence[Any], side: int) -> None:
    # Read in this function, which runs when a compiled graph runs.
    if side == FORWARD and backward_running():
        return
    status, residual, tolerance, evaluations, lost = fields
    codes, spent, row = status.flatten().long(), evaluations.flatten().long(), counts[side]
    if lost is not None:
        codes = codes.masked_fill(lost.flatten(), LOST)
    one = torch.ones((), dtype=torch.int64, device=codes.device).expand_as(codes)
    row.index_add_(0, codes, one)
    row.index_add_(0, spent.clamp(max=BINS - 1).add_(STATUSES), one)
    row[CALLS:].add_(torch.stack([one[0], spent.sum()]))
    # NaN stays NaN in the sums; `Watch.take` reads it as infinite.
    ratio = residual.flatten().double() / tolerance.flatten().double().clamp(min=TINY)
    peak = peaks[side]
    peak[:STATUSES].scatter_reduce_(0, codes, ratio, "amax")
    peak[STATUSES] = torch.maximum(peak[STATUSES], spent.amax())


def _counted(counts: Tensor, peaks: Tensor, *fields_and_side: Any) -> None:
    *fields, side = fields_and_side
    if counts.device != fields[0].device:
        # A graph holds the tensors of a tally, which cannot follow a model then.
        required = f"be watched where it is when it is compiled ({fields[0].device})"
        remedy = "close() that watch and call watch(model) again"
        raise ValueError(_validate.message("model", required, f"a watch begun on {counts.device}", remedy))
    _count(counts, peaks, fields, side)


_count_in_graph = torch.library.custom_op(
    "implicit_attention::tally",
    _counted,
    mutates_args=("counts", "peaks"),
    schema="(Tensor(a!) counts, Tensor(b!) peaks, Tensor status, Tensor residual, Tensor tolerance, "
    "Tensor evaluations, Tensor? lost, int side) -> ()",
)


@_count_in_graph.register_fake
def _(*args: Any) -> None:
    return None


@_count_in_graph.register_vmap
def _(*args: Any) -> tuple[None, None]:
    # Calls inside torch.vmap are not seen.
    return None, None


def _unwrapped(tensor: Tensor) -> Tensor:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
