"""The base class of the linear solvers: options, the two hooks of a method, and the door `solve`."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from .._types import LinearMap
from .._validate import check_integer, check_number, store_plain
from . import _sweeps
from ._solution import LinearSolution
from ._vectors import freeze

__all__ = ["RUNNING", "LinearSolver", "SweepState", "freeze"]

#: The verdict of a problem that may go on.
RUNNING = -1


@dataclass(frozen=True)
class SweepState:
    """What the loop reads of a method's state; methods add their own (*batch, ...) tensors.

    Attributes:
        residual_norm: the method's own estimate of |residual - A correction|, (*batch).
        verdict: RUNNING, or the `Status` code with which the method gives a problem up, (*batch) int8.
        negative_curvature: whether v . A v <= 0 was met, (*batch) bool.
    """

    residual_norm: Tensor
    verdict: Tensor
    negative_curvature: Tensor


S = TypeVar("S", bound=SweepState)


@dataclass(frozen=True)
class LinearSolver(abc.ABC, Generic[S]):
    """Options of a matrix-free solver of A x = b; a new method is `begin`, `step` and `correction`.

    A solve is a sequence of sweeps. A sweep starts from the true residual r = b - A x, scaled to order one, and steps
    towards the correction A^{-1} r until the method's own residual estimate of every problem meets the tolerance; then
    the residual is computed anew. A problem whose true residual is still too large is swept again, `max_sweeps` times
    in all; if that does not help, it is STALLED, or CONVERGED if it misses the tolerance by less than a factor of 10,
    which is then the rounding error of b - A x itself. `LinearSolution.residual` always tells.

    Args:
        rtol: a problem is converged when |b - A x| <= atol + rtol |b|; at least 1e-6 for float32.
        atol: absolute part of the tolerance, in units of b.
        max_steps: largest `num_steps` of a problem; None: `default_max_steps(n)`.
        check_every: the host looks after so many steps whether any problem is still active (a synchronisation);
            None: every step on the CPU, every 4 elsewhere. Changes the waiting, never the values.
    """

    rtol: float = 1e-6
    atol: float = 0.0
    max_steps: int | None = None
    check_every: int | None = None

    #: Whether the method needs A = A^T on each problem.
    symmetric: ClassVar[bool]
    #: Number of sweeps allowed: the first and the refinements; None: as many as make progress.
    max_sweeps: ClassVar[int | None] = 3
    #: Whether |b - A x| never grows in exact arithmetic: a sweep that makes it grow is then undone, even the first.
    monotone: ClassVar[bool] = True
    #: Whether the method finds directions of negative curvature.
    keeps_direction: ClassVar[bool] = False

    def __post_init__(self) -> None:
        store_plain(self)
        check_number("rtol", self.rtol, low=0.0, high=1.0)
        check_number("atol", self.atol, low=0.0)
        if self.max_steps is not None:
            check_integer("max_steps", self.max_steps, low=1, remedy="use None for the default")
        if self.check_every is not None:
            check_integer("check_every", self.check_every, low=1, remedy="use None for the default")

    @abc.abstractmethod
    def begin(self, residual: Tensor) -> S:
        """The state of correction 0 for right-hand sides `residual` (*batch, n); rows of zeros are problems at rest."""

    @abc.abstractmethod
    def step(self, matvec: LinearMap, state: S, active: Tensor) -> S:
        """One step with one matvec; rows that are not active (*batch) must come back as they were (see `freeze`)."""

    @abc.abstractmethod
    def correction(self, state: S) -> Tensor:
        """The correction reached, (*batch, n)."""

    def direction(self, state: S) -> Tensor:
        """Unit directions of negative curvature where it was met, (*batch, n); read only if `keeps_direction`."""
        raise NotImplementedError

    def default_max_steps(self, n: int) -> int:
        """10 n, at least 50 and at most 500."""
        return min(max(10 * n, 50), 500)

    def sweep_steps(self, max_steps: int) -> int:
        """The longest sweep."""
        return max_steps

    def solve(self, matvec: LinearMap, b: Tensor, *, initial: Tensor | None = None) -> LinearSolution:
        """Solve A x = b for each problem of the batch on its own: one hard or poisoned problem changes no other.

        Runs under `torch.no_grad()` and returns detached tensors; the result is bit for bit the same whatever the other
        rows of the batch hold, provided that `matvec` has that property.

        Args:
            matvec: x -> A x, (*batch, n) -> (*batch, n), linear in each row and acting on each row separately.
            b: right-hand sides, (*batch, n), float32 or float64.
            initial: first guess, (*batch, n); default 0. A problem with b = 0 returns 0 whatever the guess.

        Returns:
            `LinearSolution`; failures are reported in `status`, never raised.

        Raises:
            TypeError: a wrong type or a dtype other than float32 and float64.
            ValueError: a shape, dtype or device that does not match b, or rtol < 1e-6 with float32.

        """
        with torch.no_grad():
            return _sweeps.run(self, matvec, b, initial)


def fresh(residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(zeros, RUNNING verdicts, no negative curvature), each (*batch): the bookkeeping of a new sweep."""
    zeros = torch.zeros_like(residual[..., 0])
    return zeros, torch.full_like(zeros, RUNNING, dtype=torch.int8), torch.zeros_like(zeros, dtype=torch.bool)
