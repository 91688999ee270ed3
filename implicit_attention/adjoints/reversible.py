"""The gradient of a fixed number of steps that are run backwards, so that none of them is kept."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from .. import _validate
from .._torch import (
    along,
    check_graph,
    exact_precision,
    is_batched,
    is_differentiated,
    may_have_tangent,
    norm,
    transforms_active,
    without_hooks,
)
from ..failure import report_failures
from ..problem import Problem, changed, evaluate_pure, isolated
from ..solution import AdjointReport, Record, Status
from ..solvers import Picard
from ..solvers.loop import Outcome
from .base import Adjoint, Request

#: The largest denominator of a damping: with a larger one, products would be rounded to more units.
DENOMINATORS = 1000
#: Bits of the integers at the start, by the precision of the states, and the least size that these resolve.
BITS = {torch.float64: (49, 2.0**-900), torch.float32: (38, 2.0**-60)}
#: Integers larger than this have outgrown their room: torch's have 63 bits and a sign.
LARGEST = 2**62


def _check_damping(argument: str, given: Any) -> None:
    least, remedy = 1 / DENOMINATORS, "at 0 no step can be undone, and at 1 nothing moves"
    _validate.check_number(argument, given, low=least, high=1 - least, remedy=remedy)


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

    damping: float = _validate.option(_check_damping, 0.5)

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
        with exact_precision(initial):
            if traced or not (steps and initial.numel() and is_differentiated(initial, *tensors)):
                return self._judged(request, *self._recorded(problem, initial, steps))
            kept = request.without_tensors(len(tensors)), self.fraction
            found = ReversibleSteps.apply(*kept, initial, *tensors)  # type: ignore[no-untyped-call]
            return self._judged(request, *found)

    def _recorded(self, problem: Problem, initial: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """The value and what failed by plain operations, with the graph of each step where derivatives are recorded."""
        value = coupled_steps(pure(problem), initial, steps, self.fraction)
        failed = ~torch.isfinite(value.detach())[..., None].flatten(value.ndim - problem.event_ndim).all(-1)
        if not is_batched(failed) and bool(failed.any()) and (value.requires_grad or transforms_active()):
            # Once more without their tensors: NaN in their steps would be NaN in the gradients of all shared tensors.
            problem, start = isolated(problem, initial, failed)
            again = coupled_steps(pure(problem), start, steps, self.fraction)
            value = torch.where(along(failed, value), value.detach(), again)
        return value if steps else value.clone(), failed

    def _judged(self, request: Request, value: Tensor, failed: Tensor) -> Outcome:
        """The outcome with its record, in which the best of the plain steps stands in where a problem failed."""
        problem, steps = changed(request.problem, lambda t: t), request.solver.max_steps
        status, residual, _, none, _ = Record.unmeasured(value, request.solver.end_rule.exhausted, problem.event_ndim)
        status, count = status.masked_fill(failed, int(Status.DIVERGED)), none + steps
        if not is_batched(failed) and bool(failed.any()):
            plain = Picard(rtol=0, atol=0, max_steps=steps, damping=self.damping)
            with torch.no_grad():
                outcome = plain.run(problem, request.initial.detach())
            # What became of the plain steps, too.
            status = torch.where(failed & outcome.record.failed, outcome.record.status, status)
            value = torch.where(along(failed, value), outcome.value.detach(), value)
        if request.measured:
            with torch.no_grad():
                change = (problem.fixed_point_map(value.detach()) - value)[..., None]
            residual = norm(change.flatten(value.ndim - problem.event_ndim))
        evals = 2 * count + int(request.measured)
        return Outcome(value, Record(status, residual, torch.zeros_like(residual), count, evals))


def pure(problem: Problem) -> Callable[[Tensor], Tensor]:
    """f of the problem, whose first two evaluations are tested for writes to their state."""
    calls = itertools.count()
    return lambda z: evaluate_pure(problem, z, energy=False, call=next(calls)).mapped


def coupled_steps(mapped: Callable[[Tensor], Tensor], start: Tensor, steps: int, damping: Fraction) -> Tensor:
    """The value after some steps in floats, by operations that autograd and compilers record."""
    part = float(damping)
    other = z = start
    # Both states are moved by the same rule, in turns.
    for _ in range(2 * steps):
        new = mapped(z)
        other, z = z, new - part * (new - other)
    return z


def largest(z: Tensor, event_ndim: int) -> Tensor:
    """The largest absolute value of each problem, (*lead); NaN where one is."""
    return z.detach().abs()[..., None].flatten(z.ndim - event_ndim).amax(-1)


class Integers:
    """States as integers, whose damped moves can be undone: what the products with the damping drop is kept.

    Args:
        unit: the size of 1 for each problem, (*lead, 1, ...), a power of two; 0 for those left out, whose states are 0.
        damping: n/m in (0, 1).
        count: how many moves are made.
        words: what was kept of `count` moves, which are to be undone; empty before the first.

    Reference: Maclaurin, Duvenaud and Adams (2015).
    """

    def __init__(self, unit: Tensor, damping: Fraction, count: int, words: Sequence[Tensor] = ()) -> None:
        self.unit, self.inverse = unit, torch.where(unit > 0, 1 / unit, 0.0)
        self.numerator, self.denominator, self.part = damping.numerator, damping.denominator, float(1 - damping)
        self.words, self.index = list(words), count if words else 0
        #: The products whose digits one integer has room for.
        self.room, bound = 0, 0
        while self.room < count and bound * self.denominator + self.denominator <= LARGEST:
            bound = (bound * self.denominator + self.denominator - 1) // self.numerator
            self.room += 1

    def floats(self, x: Tensor) -> Tensor:
        """The states of integers."""
        return x.to(self.unit.dtype).mul_(self.unit)

    def of(self, z: Tensor, part: float = 1.0) -> Tensor:
        """The integers of a part of z; any integers where z does not fit."""
        return (z * (part * self.inverse)).to(torch.int64)

    def moved(self, x: Tensor, new: Tensor) -> Tensor:
        """n/m x, up to n units, and (1 - n/m) new."""
        quotient, word = divided(x, self.denominator)
        if self.index % self.room:
            word.add_(self.words.pop(), alpha=self.denominator)
        if self.numerator > 1:
            word, rest = divided(word, self.numerator)
            quotient = quotient.mul_(self.numerator).add_(rest)
        self.words.append(word)
        self.index += 1
        return quotient.add_(self.of(new, self.part))

    def undone(self, x: Tensor, new: Tensor) -> Tensor:
        """The integer of which `moved`, the last one that is not undone, made x."""
        x, word, self.index = x - self.of(new, self.part), self.words.pop(), self.index - 1
        if self.numerator > 1:
            x, rest = divided(x, self.numerator)
            word = rest.add_(word, alpha=self.numerator)
        word, rest = divided(word, self.denominator)
        if self.index % self.room:
            self.words.append(word)
        return rest.add_(x, alpha=self.denominator)


def divided(x: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """The quotient, rounded down, and the remainder >= 0."""
    quotient = torch.div(x, by, rounding_mode="floor")
    return quotient, torch.sub(x, quotient, alpha=by)


def with_leaves(problem: Problem, start: Tensor, failed: Tensor) -> tuple[Problem, Tensor]:
    """Problem and start; the tensors of the problem are leaves, and what failed reads finite numbers only."""
    needed = [t.requires_grad for t in problem.tensors()]
    with torch.no_grad():
        problem, start = isolated(problem, start, failed)
    leaves = (t.detach().requires_grad_(n) for t, n in zip(problem.tensors(), needed, strict=True))
    return problem.replace(*leaves), start


def steps_there(
    problem: Problem, start: Tensor, count: int, fraction: Fraction, left_out: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The state after `count` moves; the last two as integers, their unit, what failed, and what the products dropped.

    All are made once more without the problems that leave the numbers, or their integers.
    """
    ndim = problem.event_ndim
    nothing = start.new_zeros(start.shape[: start.ndim - ndim], dtype=torch.bool)
    without = nothing if left_out is None else left_out
    leaves, first = with_leaves(problem, start, without)
    evaluate = pure(leaves)

    def mapped(z: Tensor) -> Tensor:
        # With the graph of the way back: without one, modules may take other kernels, with other bits.
        with torch.enable_grad(), without_hooks():
            return evaluate(z.detach().requires_grad_()).detach()

    new = mapped(first)
    size = torch.maximum(largest(first, ndim), largest(new, ndim))
    bits, least = BITS[size.dtype]
    power = torch.frexp(size.nan_to_num(1.0, 1.0).clamp_min(least)).exponent
    unit = torch.ldexp(torch.ones_like(size), power - bits).masked_fill(without, 0.0)
    integers = Integers(along(unit, start), fraction, count)
    y = z = integers.of(first)
    for i in range(count):
        if i:
            new = mapped(integers.floats(z))
            size = torch.maximum(size, largest(new, ndim))
        y, z = z, integers.moved(y, new)
    # So is NaN.
    failed = without | ~(size * integers.inverse.reshape(size.shape) <= LARGEST)
    if left_out is None and bool(failed.any()):
        return steps_there(problem, start, count, fraction, failed)
    return integers.floats(z), y, z, integers.unit, failed, *integers.words


def steps_back(
    problem: Problem, start: Tensor, count: int, fraction: Fraction, ends: Sequence[Tensor], by_z: Tensor
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The distance to the start at which the moves back arrive, (*lead), and the gradients of start and tensors.

    ends: of `steps_there`, without the state; by_z: dL/dz.
    """
    y, z, unit, failed, *words = ends
    problem, start = with_leaves(problem, start, failed)
    # Compiled modules stay so, as plain ones would return other bits.
    problem, integers = problem.unwritten(), Integers(unit, fraction, count, words)
    by_z = by_z.masked_fill(along(failed, by_z), 0.0)
    by_y = torch.zeros_like(by_z)
    for i in reversed(range(count)):
        new, product = pulled(problem, integers.floats(y) if i else start, integers.part * by_z)
        y, z = integers.undone(z, new), y
        by_y, by_z = by_z.mul_(float(fraction)), product.add_(by_y)
    first = integers.of(start)
    apart = (largest((x - first).to(unit.dtype), problem.event_ndim) for x in (y, z))
    # Relative to the numbers that the unit was chosen for.
    error = torch.maximum(*apart) / 2.0 ** BITS[unit.dtype][0]
    return error, (by_y + by_z, *(t.grad for t in problem.tensors()))


def steps_recorded(
    problem: Problem, start: Tensor, count: int, fraction: Fraction, failed: Tensor, by_z: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of `steps_back` with a graph of their own, from a graph of all steps."""
    # Views: a tensor may be computed from another one of them.
    inputs = [t.view_as(t) for t in (start, *problem.tensors())]
    problem, first = isolated(problem.replace(*inputs[1:]).apart(), inputs[0], failed)
    value = coupled_steps(pure(problem), first, count // 2, fraction)
    by_z = by_z.masked_fill(along(failed, by_z), 0.0)
    needed = [t for t in inputs if t.requires_grad]
    found = iter(torch.autograd.grad(value, needed, by_z, create_graph=True, allow_unused=True))
    return tuple(next(found) if t.requires_grad else None for t in inputs)


def pulled(problem: Problem, z: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """f(z) and J^T u; the tensors of the problem, which are leaves, add (df/dt)^T u to their `grad`."""
    with torch.enable_grad(), without_hooks():
        z = z.detach().requires_grad_()
        mapped = problem.fixed_point_map(z)
        if not mapped.requires_grad:
            check_graph(problem._name(), mapped, problem.fixed_point_map, z)
            return mapped, torch.zeros_like(z)
        torch.autograd.backward(mapped, u, inputs=[z, *(t for t in problem.tensors() if t.requires_grad)])
    return mapped.detach(), torch.zeros_like(z) if z.grad is None else z.grad


class ReversibleSteps(torch.autograd.Function):
    """(request, fraction, initial, *tensors) -> (value, failed)."""

    @staticmethod
    def forward(
        ctx: Any, request: Request, fraction: Fraction, initial: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.request, ctx.fraction, ctx.num_tensors = request, fraction, len(tensors)
        given = request.problem.replace(*tensors), initial, 2 * request.solver.max_steps, fraction
        value, *ends = steps_there(*given)
        ctx.mark_non_differentiable(ends[3])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(initial, *tensors, *ends)
        return value, ends[3]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        start, *rest = ctx.saved_tensors
        tensors, ends = rest[: ctx.num_tensors], rest[ctx.num_tensors :]
        if cotangent is None:
            return (None,) * (3 + len(tensors))
        if torch._C._functorch.is_legacy_batchedtensor(cotangent):
            raise RuntimeError(
                "steps cannot run backwards with is_grads_batched=True or vectorize=True; use torch.func.jacrev"
            )
        request, count = ctx.request, 2 * ctx.request.solver.max_steps
        given = request.problem.replace(*tensors), start, count, ctx.fraction
        with exact_precision(start):
            if torch.is_grad_enabled():
                return None, None, *steps_recorded(*given, ends[3], cotangent)
            error, gradients = steps_back(*given, ends, cotangent)
            report_reconstruction(request.report, error, count, request.problem.if_random)
            return None, None, *gradients


#: Rounding of this many units of a state is told of: where f repeats itself the error is 0, else it grows at each step.
ROUNDINGS = 16


def report_reconstruction(report: AdjointReport, error: Tensor, num_evals: int, if_random: str) -> None:
    """Keep the evidence of a backward pass, the error (*lead), and report the problems whose gradient is wrong.

    Of several passes the worst is kept.
    """
    if report.lead is not None and report.lead.numel() == error.numel():
        error = error.reshape(report.lead)
    before = report.reconstruction_error
    worst = error if before is None or before.shape != error.shape else torch.maximum(before, error)
    limit = torch.full_like(error, ROUNDINGS * torch.finfo(error.dtype).eps)
    count = torch.full_like(error, num_evals, dtype=torch.int32)

    def record(size: Tensor) -> Record:
        status = torch.where(size <= limit, int(Status.CONVERGED), int(Status.MAX_STEPS)).to(torch.int8)
        return Record(status, size, limit, count, count)

    report.status, report.residual, report.tolerance, report.num_steps, _ = record(worst)
    report.reconstruction_error = worst
    what = "the backward pass by Reversible, whose gradient is therefore wrong,"
    remedies = {Status.MAX_STEPS: f"the steps ran back to another start, as f is not the same each time: {if_random}"}
    report_failures(report.on_failure, what, record(error), remedies, site=report.site, side="backward")
