"""The gradient of a fixed number of steps that are run backwards, so that none of them is kept."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import torch
from torch import Tensor

from .. import _validate
from .._autograd import exact_precision, is_batched, is_differentiated, may_have_tangent, transforms_active
from .._norm import norm
from ..problem import Problem, isolated
from ..solution import Record
from ..solvers import Picard
from ..solvers.iterate import Outcome
from ..status import Status
from .base import Adjoint, Request
from .reversible_steps import BackAndForth, ReversibleSteps, coupled_steps, merged_rows, pure

#: The largest denominator of a damping: with a larger one, products would be rounded to more units.
DENOMINATORS = 1000


@dataclasses.dataclass(frozen=True)
class Reversible(Adjoint):
    r"""The exact gradient of a fixed number of damped steps at the memory of one, as each is run backwards.

    ```math
    y' = d y + (1 - d) f(z), \qquad z' = d z + (1 - d) f(y')
    ```

    Both states start at the initial one, and the value is z. A step evaluates f twice; the backward pass evaluates it
    twice more, and differentiates both. Their fixed points are those of f.

    Floats cannot be run backwards, as that multiplies their rounding by 1/d a step. The states are therefore integers
    of 64 bits, which f reads as floats, and what a product with d drops is kept: log2(1/d) bits. With d = 0.5 the
    states of 64 steps take 16 bytes an entry, at any precision. The integers have room for states 2^13 times as large
    as the start and f there in float64, 2^24 times in float32. A problem beyond that is DIVERGED, and has no gradient.

    f has to return the same bits whenever it is evaluated at the same state. `solution.adjoint.reconstruction_error`
    is then exactly 0 after a backward pass. Where it is not the gradient is wrong, and is reported as failed.

    Args:
        damping: d, in [0.001, 0.999], taken as the nearest fraction with a denominator of at most 1000. The larger it
            is, the fewer bits are kept, and the slower the steps.

    Not for solves to a tolerance, whose steps are not counted: use `Implicit()`. Not for few steps: `Unrolled()` takes
    less time. Derivatives beyond the first, forward mode and torch.func are right, at the memory of `Unrolled()`.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, Picard, Reversible, solve
        >>> shift = torch.tensor(0.5, requires_grad=True)
        >>> problem = FixedPointMap(lambda z, shift: z / 2 + shift, shift, event_ndim=1)
        >>> budget = Picard(rtol=0, atol=0, max_steps=64)
        >>> solution = solve(problem, torch.zeros(1, 1), solver=budget, adjoint=Reversible(damping=0.5))
        >>> solution.value.sum().backward()
        >>> shift.grad, solution.adjoint.reconstruction_error
        (tensor(2.0000), tensor([0.]))

    References: McCallum, Arora and Foster (2025), reversible deep equilibrium models; Maclaurin, Duvenaud and
    Adams (2015), who keep what products drop.
    """

    damping: float = 0.5

    def __post_init__(self) -> None:
        _validate.store_plain(self)
        least, remedy = 1 / DENOMINATORS, "at 0 no step can be undone, and at 1 nothing moves"
        _validate.check_number("damping", self.damping, low=least, high=1 - least, remedy=remedy)

    @property
    def fraction(self) -> Fraction:
        """The damping that is used."""
        return Fraction(self.damping).limit_denominator(DENOMINATORS)

    def check(self, request: Request) -> None:
        solver, problem = request.solver, request.problem
        counted = isinstance(solver, Picard) and (solver.fixed_budget or solver.max_steps == 0)
        required = "not be Reversible() but for a fixed number of plain steps"
        received = f"{type(solver).__name__} with max_steps={solver.max_steps} and rtol={solver.rtol:g}"
        remedy = "use Picard(rtol=0, atol=0, max_steps=k) or Equilibrium(steps=k); Implicit() for a tolerance"
        _validate.require(counted, "adjoint", required, received, remedy)
        self.check_damping(getattr(solver, "damping", 0.0))
        remedy = "use Unrolled()"
        for name, given in (("trace", request.trace), ("callback", request.callback is not None)):
            required = "be left out with adjoint=Reversible(), which shows no step"
            _validate.require(not given, name, required, "one" if name == "callback" else given, remedy)
        required = "not be Reversible() for states of a domain, such as a sphere, that its steps leave"
        free = type(problem).retract is Problem.retract
        _validate.require(free, "adjoint", required, type(problem).__name__, remedy)

    def check_damping(self, damping: float) -> None:
        """Raise where a solver has another damping."""
        required = f"have the damping of Reversible(damping={self.damping:g}), or none"
        _validate.require(damping in (0, self.damping), "solver", required, f"damping={damping:g}", "leave it out")

    def run(self, request: Request) -> Outcome:
        problem, initial, steps = request.problem, request.initial, request.solver.max_steps
        tensors = problem.tensors()
        traced = transforms_active() or any(map(may_have_tangent, (initial, *tensors)))
        nothing = steps == 0 or initial.numel() == 0
        with exact_precision(initial):
            if traced or nothing or not is_differentiated(initial, *tensors):
                return self._recorded(request)
            run = BackAndForth(request.without_tensors(), self.fraction, steps)
            value, failed = ReversibleSteps.apply(run, initial, *tensors)  # type: ignore[no-untyped-call]
            return self._judged(request, value, failed)

    def _recorded(self, request: Request) -> Outcome:
        """The same steps as plain operations, with the graph of each where derivatives are recorded."""
        problem, initial, steps = request.problem, request.initial, request.solver.max_steps
        value = coupled_steps(pure(problem), initial, steps, self.fraction)
        finite = torch.isfinite(value.detach())
        failed = ~(finite.flatten(value.ndim - problem.event_ndim).all(-1) if problem.event_ndim else finite)
        lost = not is_batched(failed) and bool(failed.any())
        if lost and (value.requires_grad or transforms_active()):
            # Once more without their tensors: NaN in their steps would be NaN in the gradients of all shared tensors.
            problem, start = isolated(problem, initial, failed)
            again = coupled_steps(pure(problem), start, steps, self.fraction)
            value = merged_rows(failed, value.detach(), again)
        return self._judged(request, value if steps else value.clone(), failed)

    @torch.no_grad()
    def _evidence(self, request: Request, value: Tensor, failed: Tensor) -> tuple[Record, Tensor | None]:
        """The record of the value, and what stands in for it where a problem failed."""
        problem, steps, instead = request.problem.undifferentiated(), request.solver.max_steps, None
        count = torch.full_like(failed, steps, dtype=torch.int32)
        status = torch.full_like(count, int(Status.BUDGET if steps else Status.EXPLICIT), dtype=torch.int8)
        status = status.masked_fill(failed, int(Status.DIVERGED))
        if not is_batched(failed) and bool(failed.any()):
            # The best of the plain steps, and what became of them.
            plain = Picard(rtol=0, atol=0, max_steps=steps, damping=self.damping)
            outcome = plain.run(problem, request.initial.detach())
            status = torch.where(failed & outcome.record.failed, outcome.record.status, status)
            instead = outcome.value.detach()
            value = merged_rows(failed, instead, value)
        residual = torch.full_like(failed, torch.nan, dtype=value.dtype)
        if request.measured:
            change = (problem.fixed_point_map(value) - value)[..., None]
            residual = norm(change.flatten(value.ndim - problem.event_ndim))
        evals = 2 * count + int(request.measured)
        return Record(status, residual, torch.zeros_like(residual), count, evals), instead

    def _judged(self, request: Request, value: Tensor, failed: Tensor) -> Outcome:
        record, instead = self._evidence(request, value.detach(), failed)
        return Outcome(value if instead is None else merged_rows(failed, instead, value), record)
