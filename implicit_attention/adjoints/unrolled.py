"""The gradients of steps that are recorded: of the whole iteration, or of a few or one at the solution."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .. import _validate
from .._torch import is_batched
from ..problem import Problem, isolated
from ..solution import Status
from ..solvers.loop import Outcome, plain_steps
from .base import Adjoint, Request, attach
from .implicit import fixed_point


@dataclasses.dataclass(frozen=True)
class Unrolled(Adjoint):
    """dL/dt through every step of the solver, and through the initial state: exact for the state that was computed.

    Memory grows with the number of steps. It is the one exact choice for fixed budgets (rtol = atol = 0), and the
    baseline of unrolled networks. Inside torch.vmap all `max_steps` steps are made, as the host cannot see which
    problems have finished.

    A problem that an accelerated solver brings to a residual of exactly 0 keeps its weights from there on. One that
    starts there has none: they would be 0/0, and depend on the direction in which the residual leaves 0, so that in
    general the accelerated steps have no derivative. The gradient is then that of as many plain steps. (With a
    tolerance no step is made, and the initial state alone gets a gradient.) Steps that only move rounding errors have
    the gradient of those: let a tolerance end what converges.

    Not for solves of many steps to a tolerance: use `Implicit()`, whose memory does not grow with them.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, Picard, Unrolled, solve
        >>> shift = torch.tensor(0.5, requires_grad=True)
        >>> problem = FixedPointMap(lambda z, shift: z / 2 + shift, shift, event_ndim=1)
        >>> budget = Picard(rtol=0, atol=0, max_steps=2)
        >>> solve(problem, torch.zeros(1, 1), solver=budget, adjoint=Unrolled()).value.sum().backward()
        >>> shift.grad
        tensor(1.5000)
    """

    def check(self, request: Request) -> None:
        required = "not be Unrolled() for a solver whose steps cannot be differentiated"
        remedy = "use Implicit(), or Picard, Anderson, Broyden or GradientDescent"
        _validate.require(request.solver.differentiable, "adjoint", required, type(request.solver).__name__, remedy)

    def run(self, request: Request) -> Outcome:
        outcome = request.run(request.problem, request.initial, graph=True)
        lost = outcome.record.status == Status.NONFINITE
        if is_batched(lost) or not outcome.value.requires_grad or not bool(lost.any()):
            return outcome
        # Once more without their tensors: NaN in their steps would be NaN in the gradients of all shared tensors.
        problem, initial = isolated(request.problem, request.initial, lost)
        again = request.solver.run(problem, initial, trace=request.trace, graph=True)
        # It may end sooner.
        last = len(again.states) - 1
        states = tuple(attach(z.detach(), again.states[min(i, last)]) for i, z in enumerate(outcome.states))
        return outcome._replace(value=attach(outcome.value.detach(), again.value), states=states)


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

    steps: int = _validate.integer(5, low=1)
    damping: float = _validate.part(0.0, remedy="at 1 no gradient would flow")

    def run(self, request: Request) -> Outcome:
        tensors = tuple(t.detach() for t in request.problem.tensors())
        outcome = fixed_point(request, tensors)
        return outcome._replace(value=self.through(request.problem, outcome.value.detach()))

    def through(self, problem: Problem, value: Tensor) -> Tensor:
        known = torch.isfinite(value)[..., None].flatten(value.ndim - problem.event_ndim).any(-1)
        problem, z = isolated(problem, value, ~known)
        return attach(value, plain_steps(problem.fixed_point_map, z, self.steps, self.damping))

    def __str__(self) -> str:
        return f"Phantom({self.steps}{f', damping={self.damping:g}' if self.damping else ''})"


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
