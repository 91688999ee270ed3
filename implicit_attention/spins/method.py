"""What a method is: a way from a spin system to its log-partition function, of which all else is a derivative."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _validate
from ..potentials.spin import BesselResponse, Response
from ..solution import Evidence
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

    def log_partition(self, system: SpinSystem) -> LogPartition:
        """log Z relative to the uniform measure, without `system.base_measure()`."""
        raise NotImplementedError(f"{type(self).__name__} must define log_partition(system)")


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
