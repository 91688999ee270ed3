"""Gradient descent on the energy, the method that unrolled networks use."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from .. import _validate
from ..problem import Problem
from ..solution import Remedies, Status
from .loop import Iteration, Solver, Update


@dataclasses.dataclass(frozen=True)
class GradientDescent(Solver):
    """z <- z - step_size grad E(z), where -grad E(z) = f(z) - z.

    Not for speed: use `Anderson()`, which needs far fewer evaluations.

    Args:
        step_size: > 0; 1 is one softmax attention per step, and below 2 over the largest curvature of E it descends.

    Raises:
        ValueError: in `solve`, for a map that has no energy.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp, solve
        >>> from implicit_attention.solvers import GradientDescent
        >>> keys, query = torch.eye(4), torch.ones(2, 4)
        >>> energy = AnchoredEnergy(LogSumExp(keys, beta=0.5), field=query, anchor=0.5)
        >>> solution = solve(energy, query, solver=GradientDescent(step_size=0.5))
        >>> bool(solution.converged.all()), int(solution.num_steps[0]) > 5
        (True, True)
    """

    step_size: float = _validate.number(0.1, low=0, open_low=True)

    remedies: ClassVar[Remedies] = {
        **Solver.remedies,
        Status.MAX_STEPS: "use Anderson(), or raise step_size or max_steps",
        Status.DIVERGED: "lower step_size, or use Anderson()",
    }

    def check_problem(self, problem: Problem) -> None:
        required, remedy = "have an energy for GradientDescent", "use Picard(damping=...) for a map that is no gradient"
        _validate.require(problem.has_energy, "problem", required, type(problem).__name__, remedy)

    def step(self, problem: Problem, state: Any, point: Iteration, accepted: Tensor) -> Update:
        return Update(state, point.z + self.step_size * point.r)
