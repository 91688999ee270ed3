"""The course of a solve: the state of a block after every evaluation, and its residuals."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import Solution
from ..layers import Equilibrium


class Course(NamedTuple):
    """A solve of one sample by Picard's iteration.

    Attributes:
        solution: with status, residual and evaluations.
        states: after every evaluation, with one sample each.
        residuals: |f(z) - z| / |f(z)| that each evaluation measures.
    """

    solution: Solution
    states: list[Tensor]
    residuals: list[float]

    @property
    def settled(self) -> bool:
        """Return whether the state has come to rest."""
        return bool(self.solution.converged)


@torch.no_grad()
def course_of(layer: Equilibrium, x: Tensor, *args: Any) -> Course:
    """Solve one sample, and keep the states on the way."""
    state, solution = layer(x, *args, return_solution=True, on_failure="ignore")
    # Picard's steps are plain: one by one they pass through the same states again.
    states = [layer(x, *args, steps=0)]
    for _ in range(int(solution.num_evals)):
        states.append(layer(x, *args, start=states[-1], steps=1))
    residuals = [float((after - z).norm() / after.norm()) for z, after in itertools.pairwise(states)]
    return Course(solution, [*states[1:-1], state], residuals)
