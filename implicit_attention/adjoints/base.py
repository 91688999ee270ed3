"""What an adjoint is: a way to run a solver and to let gradients through its answer."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .._types import Impl
from ..fused import lower
from ..problem import Problem
from ..solution import AdjointReport
from ..solvers import Outcome, Solver


@dataclasses.dataclass
class Request:
    """One call of `solve`, as the adjoints see it."""

    problem: Problem
    initial: Tensor
    solver: Solver
    impl: Impl
    trace: bool
    report: AdjointReport

    def solved(self, problem: Problem, initial: Tensor) -> Outcome:
        """The outcome for `problem` without a graph, by a fused operation where `impl` has or wants one."""
        lowered = lower(problem, self.solver, self.impl, every_step=self.trace)
        if lowered is None:
            return self.solver.run(problem, initial, trace=self.trace)
        return Outcome(*lowered.solve(initial))


@dataclasses.dataclass(frozen=True)
class Adjoint:
    """Base of adjoints. A subclass defines `run`, which returns an `Outcome` whose value carries the gradient."""

    def check(self, request: Request) -> None:
        """Raise if the gradient that is asked for would be wrong."""

    def run(self, request: Request) -> Outcome:
        raise NotImplementedError(f"{type(self).__name__} must define run(request)")


def attach(value: Tensor, graph: Tensor) -> Tensor:
    """`value`, bit for bit, with the derivatives of `graph` where both are finite."""
    return torch.where(torch.isfinite(graph) & torch.isfinite(value), value + (graph - graph.detach()), value)
