"""Picard iteration: the map again and again, i.e. repeated attention."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from .. import _validate
from ..kernels.problem import FusedRule
from ..problem import Problem
from ..solution import CONTRACT, Remedies, Status
from .loop import Iteration, Solver, Update


@dataclasses.dataclass(frozen=True)
class Picard(Solver):
    """z <- f(z) + damping (z - f(z)).

    Not for maps that do not contract, where it wanders: use `Anderson()`.

    Args:
        damping: in [0, 1); 0 is the plain iteration. What is measured against the tolerance is f(z) - z, never the
            damped step.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, solve
        >>> from implicit_attention.solvers import Picard
        >>> cosine = FixedPointMap(torch.cos, event_ndim=1)
        >>> solution = solve(cosine, torch.zeros(3, 1), solver=Picard(damping=0.3))
        >>> bool(solution.converged.all()), round(float(solution.value[0]), 3)
        (True, 0.739)
    """

    damping: float = _validate.part(0.0, remedy="at 1 nothing would move")

    by_token: ClassVar[bool] = True

    remedies: ClassVar[Remedies] = {
        **Solver.remedies,
        Status.MAX_STEPS: f"use Anderson(), raise max_steps, or {CONTRACT}",
        Status.DIVERGED: f"use Anderson(), add damping, or {CONTRACT}",
    }

    def fused_rule(self, problem: Problem) -> FusedRule | None:
        if self.damping:
            return None
        return FusedRule(self.rtol, self.atol, self.max_steps, plain_steps=self.max_steps + 1)

    def step(self, problem: Problem, state: Any, point: Iteration, accepted: Tensor) -> Update:
        if self.damping == 0:
            return Update(state, point.mapped)
        return Update(state, point.mapped - self.damping * point.r)
