"""The one-step gradient: only the last application of f is differentiated."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from ..problem import Problem
from ..solvers.iterate import Outcome
from .base import Adjoint, Request
from .phantom import Phantom


@dataclasses.dataclass(frozen=True)
class OneStep(Adjoint):
    r"""The gradient of one more step from the solution: I in the place of (I - J)^{-1}, an error of O(|J|).

    ```math
    \frac{dL}{dt} \approx \left( \frac{\partial f}{\partial t} \right)^\top \frac{\partial L}{\partial z}
    ```

    Measured on log-sum-exp energies: relative error 1 to 14 %, by beta.

    Not for gradients that are to be exact: use `Implicit()`.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, OneStep, solve
        >>> shift = torch.tensor(0.5, requires_grad=True)
        >>> problem = FixedPointMap(lambda z, shift: z / 2 + shift, shift, event_ndim=1)
        >>> solve(problem, torch.zeros(1, 1), adjoint=OneStep()).value.sum().backward()
        >>> shift.grad  # 2 is exact
        tensor(1.)

    Reference: Fung et al. (2022), Jacobian-free backpropagation.
    """

    def run(self, request: Request) -> Outcome:
        return Phantom(steps=1).run(request)

    def through(self, problem: Problem, value: Tensor) -> Tensor:
        return Phantom(steps=1).through(problem, value)
