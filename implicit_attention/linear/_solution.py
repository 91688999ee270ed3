"""The result of a linear solve: the value and, per problem, a record of how the solve went."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..solution import Recorded
from ..status import Status
from ._vectors import ROUNDOFF

# Rounding an answer x leaves a residual of about this many times eps |x|.
ROUNDING = 4.0
# Where that is more of the right-hand side than this, the answer has no digits.
MEANINGFUL = 0.02
# Attention over keys far from the origin loses more, as its products cancel (20 was measured): that is rounding while
# it stays below this part of the right-hand side.
CANCELLING, SMALL = 32.0, 1e-3


@dataclass(frozen=True, eq=False)
class LinearSolution(Recorded):
    """The answers x of a batch of systems A x = b, and how each solve went.

    Not for solves of fixed points: those return a `Solution`.

    Attributes:
        record: (*batch) each, and read by name: `status` (CONVERGED, MAX_STEPS, STALLED, NONFINITE or, by Neumann,
            DIVERGED); `residual` |b - A x|_2 of exactly this value, computed with a matvec of its own; `tolerance`
            atol + rtol |b|, which rounding may keep a converged residual above by less than a factor of 10;
            `num_steps` and `num_evals`, matvecs spent: one per step and one per restart, without the residual of
            `initial` and without the last check.
        value: x, (*batch, n); NaN for a problem whose status is NONFINITE.
        negative_curvature: whether v . A v <= 0 was met, (*batch) bool: by CG for a search direction, by MINRES for a
            residual; False for GMRES and Neumann, which do not look.
        direction: CG only, else None: the unit vector v of that curvature, (*batch, n), zero where none was met.
        checked: whether `value` is the last vector that the argument `check` of the solve was called with.

    Examples:
        >>> import torch
        >>> from implicit_attention.linear import CG
        >>> solution = CG().solve(lambda v: -v, torch.ones(2, 3))
        >>> solution.negative_curvature.tolist(), solution.direction.shape
        ([True, True], torch.Size([2, 3]))
    """

    value: Tensor
    negative_curvature: Tensor
    direction: Tensor | None = None
    checked: bool = False


def has_no_digits(size: Tensor, rhs: Tensor) -> Tensor:
    """Whether an answer, of norm `size`, of a system I - J is so long that the rounding of I - J explains it.

    Kernels give such a query up, too: its curvature is within ROUNDOFF eps of 0.
    """
    return ROUNDOFF * torch.finfo(size.dtype).eps * size > rhs


def forgiven(
    status: Tensor, residual: Tensor, tolerance: Tensor, negative_curvature: Tensor, size: Tensor, rhs: Tensor
) -> tuple[Tensor, Tensor]:
    """(status, tolerance), with stalled problems counted as solved where rounding of the answer explains the residual.

    Near a fold the answer, of norm `size`, is large against the right-hand side, of norm `rhs`, and no answer of that
    precision has a smaller residual: it is exact for a matrix that differs by rounding.
    """
    unit = torch.finfo(size.dtype).eps * size
    # A singular system drives the answer to 1/eps, where everything would be forgiven.
    stalled = (status == Status.STALLED) & (ROUNDING * unit <= MEANINGFUL * rhs)
    floor = torch.maximum(ROUNDING * unit, torch.minimum(CANCELLING * unit, SMALL * rhs))
    solved = torch.where(negative_curvature, int(Status.UNSTABLE), int(Status.CONVERGED)).to(torch.int8)
    status = torch.where(stalled & (residual <= floor), solved, status)
    return status, torch.where(stalled, torch.maximum(tolerance, floor), tolerance)
