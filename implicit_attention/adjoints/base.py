"""What an adjoint is: a way to run a solver and to let gradients through its answer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..problem import Problem
from ..solution import AdjointReport

if TYPE_CHECKING:
    from ..solvers import Outcome, Solver


@dataclasses.dataclass
class Request:
    """One call of `solve`, as the adjoints see it."""

    problem: Problem
    initial: Tensor
    solver: Solver
    trace: bool
    report: AdjointReport


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
