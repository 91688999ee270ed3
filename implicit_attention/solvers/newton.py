"""Newton's method with an inner Krylov solver, problem by problem."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from .. import _validate
from ..kernels import rule
from ..linear import CG, GMRES
from ..problem import Problem
from .loop import Iteration, flat, rows_where, unflat
from .safeguard import Proposal, Safeguarded


@dataclasses.dataclass(frozen=True)
class NewtonKrylov(Safeguarded):
    """z <- z + t s with (I - J) s = r solved to a relative `forcing`, J the Jacobian of f, t halved until accepted.

    Not for loose tolerances, which a few plain steps meet at a lower cost, nor for `Unrolled()`: use `Anderson()`.

    For energies I - J is the Hessian: conjugate gradients solve, and leave at the first direction of negative curvature
    with what they have (at once: along -grad E), so that the iteration descends past saddles. Other maps use GMRES.
    Every product with J counts as one evaluation.

    Args:
        forcing: relative residual of the inner solves, in (0, 1).
        inner_steps: largest number of products in one inner solve.
        guard: see `Safeguarded`.

    Reference: Dembo, Eisenstat and Steihaug (1982).

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp, solve
        >>> from implicit_attention.solvers import NewtonKrylov
        >>> keys, query = torch.eye(4), torch.ones(2, 4)
        >>> energy = AnchoredEnergy(LogSumExp(keys, beta=0.5), field=query, anchor=0.5)
        >>> solution = solve(energy, query, solver=NewtonKrylov(rtol=1e-6))
        >>> bool(solution.converged.all()), int(solution.num_steps.max()) < 10
        (True, True)
    """

    forcing: float = _validate.part(0.1, open_low=True)
    inner_steps: int = _validate.integer(50, low=1)

    differentiable: ClassVar[bool] = False
    backtracks: ClassVar[bool] = True
    # A Newton step is longer than the plain one along each eigenvector with curvature below 1.
    slope: ClassVar[float] = 1e-3
    growth: ClassVar[float] = 1.5
    longest: ClassVar[float] = float("inf")

    def propose(self, problem: Problem, history: object, point: Iteration, accepted: Tensor) -> Proposal:
        event = point.event_shape
        linear = problem.linearize(unflat(point.z, event))

        def matvec(v: Tensor) -> Tensor:
            return v - flat(linear.jvp(unflat(v, event)), event)

        rhs = rows_where(accepted & torch.isfinite(point.residual), point.r, 0.0)
        inner = (CG if problem.symmetric else GMRES)(rtol=self.forcing, max_steps=self.inner_steps)
        solution = inner.solve(matvec, rhs)
        moves = (solution.value != 0).any(-1)
        s = rows_where(moves, solution.value, rule.STRETCH * point.r)
        return Proposal(s, accepted, solution.num_steps)
