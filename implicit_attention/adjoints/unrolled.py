"""The gradient of the iteration itself, recorded step by step."""

from __future__ import annotations

import dataclasses

from .. import _validate
from .._autograd import is_batched
from ..problem import isolated
from ..solvers.iterate import Outcome
from ..status import Status
from .base import Adjoint, Request, attach


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
        _validate.require(
            request.solver.differentiable,
            "adjoint",
            "not be Unrolled() for a solver whose steps cannot be differentiated",
            type(request.solver).__name__,
            "use Implicit(), or Picard, Anderson, Broyden or GradientDescent",
        )

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
