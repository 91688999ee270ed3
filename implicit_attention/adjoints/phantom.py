"""The phantom gradient: a few damped steps from the solution are differentiated."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from .. import _validate
from ..problem import Problem, isolated, lost_rows
from ..solvers.iterate import Outcome
from .base import Adjoint, Request, attach
from .implicit import fixed_point


@dataclasses.dataclass(frozen=True)
class Phantom(Adjoint):
    """dL/dt of z <- f(z) + damping (z - f(z)), repeated `steps` times from the solution held fixed.

    A truncated Neumann series for (I - J)^{-1}: an approximation whose error falls geometrically with `steps`.

    Args:
        steps: >= 1; 1 without damping is `OneStep()`.
        damping: in [0, 1), 0 is none.

    Not for gradients that are to be exact: use `Implicit()`.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, Phantom, solve
        >>> shift = torch.tensor(0.5, requires_grad=True)
        >>> problem = FixedPointMap(lambda z, shift: z / 2 + shift, shift, event_ndim=1)
        >>> solve(problem, torch.zeros(1, 1), adjoint=Phantom(steps=3)).value.sum().backward()
        >>> shift.grad  # 2 is exact
        tensor(1.7500)

    Reference: Geng et al. (2021), with tau = 1 - damping.
    """

    steps: int = 5
    damping: float = 0.0

    def __post_init__(self) -> None:
        _validate.store_plain(self)
        _validate.check_integer("steps", self.steps, low=1)
        _validate.check_number("damping", self.damping, low=0.0, high=1.0)
        _validate.require(self.damping < 1, "damping", "be < 1", self.damping, "at 1 no gradient would flow")

    def run(self, request: Request) -> Outcome:
        tensors = tuple(t.detach() for t in request.problem.tensors())
        outcome = fixed_point(request, tensors)
        return outcome._replace(value=self.through(request.problem, outcome.value.detach()))

    def through(self, problem: Problem, value: Tensor) -> Tensor:
        problem, z = isolated(problem, value, lost_rows(value, problem.event_ndim))
        for _ in range(self.steps):
            mapped = problem.fixed_point_map(z)
            z = mapped if self.damping == 0 else mapped + self.damping * (z - mapped)
        return attach(value, z)

    def __str__(self) -> str:
        return f"Phantom({self.steps}{f', damping={self.damping:g}' if self.damping else ''})"
