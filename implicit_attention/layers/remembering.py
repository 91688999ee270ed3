"""Base of layers that remember how their last solve went."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from .. import _validate
from .._solve import Route
from .._torch import backward_running, is_exporting
from ..failure import FailurePolicy, FailureSite, Located, report_failures
from ..options import SolveOptions
from ..solution import OF_ATTENTION, AdjointReport, Record, SolveReport, advice


class Remembering(nn.Module):
    """Base of layers with `last_solve`, which is part of neither the state dict, copies nor pickles."""

    options: SolveOptions
    _remembered: SolveReport | Record | None

    def __init__(self) -> None:
        super().__init__()
        self._remembered = None
        self._site = FailureSite()

    def _on_failure(self, options: SolveOptions) -> Any:
        """Return the failure policy of this layer's solves; refuse one that asks for explicit steps."""
        given = options.on_failure
        if isinstance(given, FailurePolicy) and given.forward == "explicit":
            required = f"have forward='best' in {type(self).__name__}: only attention has an explicit step"
            raise ValueError(_validate.message("on_failure", required, repr(given)))
        return Located(given, self._site)

    def _remember(self, report: SolveReport | Record | None, *, eager: bool = False) -> None:
        """Keep the report; `eager` says that torch runs eagerly, if the caller knows."""
        if eager and type(report) is SolveReport and self._site.tally is None and not backward_running():
            # `nn.Module` would test whether it is a parameter.
            self.__dict__["_remembered"] = report
            return
        if is_exporting():
            # The tensors have shapes alone, and an exported program keeps no attributes.
            return
        if report is not None and self._site.tally is not None:
            self._site.tally.add(report)
        # A graph that read the remembered report would be compiled anew for each of its shapes.
        if torch.compiler.is_compiling() or not is_repetition(self._remembered):
            self._remembered = report

    @property
    def last_solve(self) -> SolveReport | None:
        """The `SolveReport` of the last call. The first reading warns of failures in a compiled graph."""
        if isinstance(self._remembered, Record):
            self._remembered = report_from_graph(self._remembered, self.options, self._site)
        return self._remembered

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_remembered": None}


def report_from_graph(record: Record, options: SolveOptions, site: FailureSite | None = None) -> SolveReport:
    """The report of a solve in a compiled graph, at which the host looks now; warns if a problem failed."""
    on_failure, remedies = options.on_failure, advice(options.effective_solver.remedies, f"attention: {OF_ATTENTION}")
    # The policy of the call is in the graph. Reading an attribute of a layer warns, and does not raise.
    policy: Any = "warn" if on_failure == "raise" else on_failure
    if isinstance(policy, FailurePolicy) and policy.over == "raise":
        policy = dataclasses.replace(policy, over="warn")
    report_failures(policy, "the compiled solve", record, remedies, site=site)
    adjoint, solver = AdjointReport(in_graph=True, on_failure=on_failure, site=site), options.effective_solver
    way = None
    if not options.explicit:
        given = solver, options.impl, False, record.residual.dtype
        way = Route(*given, "operation", "operation", "operation", "in a compiled graph")
    return SolveReport(record, adjoint, remedies, tolerances=(solver.rtol, solver.atol), route=way)


def is_repetition(remembered: SolveReport | Record | None) -> bool:
    """Whether a backward pass runs that will fill the remembered report, so that the present solve repeats that one.

    Checkpointing that is not reentrant computes a forward pass again in the backward pass. The gradient is then that of
    the first solve's graph, and so is its report.
    """
    return isinstance(remembered, SolveReport) and remembered.adjoint.awaited and backward_running()
