"""What a linear solve returns: the value and, per problem, the evidence for it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..status import Status


@dataclass(frozen=True)
class LinearSolution:
    """The answers x of a batch of systems A x = b, each with its own evidence.

    Attributes:
        value: x, (*batch, n); NaN for a problem whose status is NONFINITE.
        status: codes of `Status`, (*batch) int8: CONVERGED, MAX_STEPS, STALLED, NONFINITE or (Neumann) DIVERGED.
        residual: |b - A x|_2 of exactly this value, computed with a matvec of its own, (*batch).
        num_steps: matvecs spent, (*batch) int64: one per step and one per restart, without the residual of `initial`
            and without the last check.
        negative_curvature: whether v . A v <= 0 was met, (*batch) bool: by CG for a search direction, by MINRES for a
            residual; False for GMRES and Neumann, which do not look.
        direction: CG only, else None: the unit vector v of that curvature, (*batch, n), zero where none was met.
    """

    value: Tensor
    status: Tensor
    residual: Tensor
    num_steps: Tensor
    negative_curvature: Tensor
    direction: Tensor | None = None

    @property
    def converged(self) -> Tensor:
        """Whether |b - A x| <= atol + rtol |b|, up to the rounding described in `LinearSolver`, (*batch) bool."""
        return self.status == Status.CONVERGED
