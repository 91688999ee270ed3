"""What a method is: a way from a spin system to its log-partition function, of which all else is a derivative."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _validate
from ..adjoints import Adjoint
from ..potentials.spin import BesselResponse, Response
from ..problem import Problem
from ..solution import Evidence
from ..solve import solve
from ..solvers import Anderson, Solver
from ..status import Status
from .system import SpinSystem


class LogPartition(NamedTuple):
    """log Z of every sample, (*batch), and the evidence of the solve behind it, with *batch numbering its problems."""

    value: Tensor
    evidence: Evidence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """Base of the methods. A subclass defines `log_partition`, and what it cannot do in `check`.

    log Z has to be differentiable with respect to field, couplings and beta, each with the others fixed, as often as
    derivatives of F are wanted: magnetizations are the first with respect to the field, susceptibilities the second.
    The numbers that it gets are finite: samples with others are taken out, and their answers NaN.
    """

    def check(self, system: SpinSystem) -> None:
        """Raise where the method does not hold for such a system."""
        _require_symmetric(self, system)

    def site_response(self) -> Response:
        """How a lone spin answers its field."""
        return BesselResponse()

    def inverse_variances(self, system: SpinSystem) -> Tensor | None:
        """Lambda_i, (*batch, N), where Lambda - beta J is the method's inverse covariance of all spins; else None."""
        return None

    def log_partition(self, system: SpinSystem) -> LogPartition:
        """log Z relative to the uniform measure, without `system.base_measure()`."""
        raise NotImplementedError(f"{type(self).__name__} must define log_partition(system)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedPointMethod(Method):
    """Base of methods whose log Z is stationary where a fixed-point problem, one per sample, is solved.

    There may be several such points; each is a branch. The one that the start leads to is taken.
    """

    solver: Solver | None = None
    adjoint: Adjoint | None = None

    def __post_init__(self) -> None:
        for name, kind, example in (("solver", Solver, "Anderson()"), ("adjoint", Adjoint, "Implicit()")):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                required = f"be None or a {kind.__name__}"
                raise TypeError(_validate.message(name, required, repr(value), f"for example {example}"))

    def problem(self, system: SpinSystem) -> Problem:
        """The fixed-point problem, whose last two axes make a sample."""
        raise NotImplementedError(f"{type(self).__name__} must define problem(system)")

    def start(self, system: SpinSystem) -> Tensor:
        """Where its solver starts; with a field that is as strong as the couplings, on any branch."""
        raise NotImplementedError(f"{type(self).__name__} must define start(system)")

    def value(self, system: SpinSystem, state: Tensor) -> Tensor:
        """log Z, (*batch), at a state of the problem."""
        raise NotImplementedError(f"{type(self).__name__} must define value(system, state)")

    def log_partition(self, system: SpinSystem) -> LogPartition:
        start = self.start(system).detach()
        solver = self.solver or physics_solver(start.dtype)
        # What failed is told by whoever asks for log Z.
        solution = solve(self.problem(system), start, solver=solver, adjoint=self.adjoint, on_failure="ignore")
        return LogPartition(self.value(system, solution.value), solution.evidence())


def physics_solver(dtype: torch.dtype) -> Solver:
    """The solver of mean-field equations where none is given: numbers are compared to ten digits."""
    tolerance = 1e-6 if dtype == torch.float32 else 1e-11
    return Anderson(rtol=tolerance, atol=tolerance, max_steps=1000)


def _require_symmetric(method: Method, system: SpinSystem) -> None:
    system.check_symmetric(type(method).__name__)


def require_ising(method: Method, system: SpinSystem) -> None:
    """Raise unless spins are numbers."""
    _validate.require(
        system.dim == 1,
        "system",
        f"have spins of dimension 1 for {type(method).__name__}",
        f"D = {system.dim}",
        "use MeanField or SaddlePoint for vectors",
    )


def closed_form(value: Tensor) -> Evidence:
    """The evidence of what needs no iteration, for values (*batch)."""
    value = value.detach()
    none = torch.zeros_like(value, dtype=torch.int32)
    status = torch.where(torch.isfinite(value), int(Status.CONVERGED), int(Status.NONFINITE)).to(torch.int8)
    zero = torch.zeros_like(value)
    return Evidence(status=status, residual=zero, tolerance=zero, num_steps=none, num_evals=none)
