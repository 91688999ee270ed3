"""The gradient of a fixed number of steps that are run backwards, so that none of them is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from .._autograd import (
    check_graph,
    exact_precision,
    is_batched,
    is_differentiated,
    may_have_tangent,
    transforms_active,
    without_hooks,
)
from .._norm import norm
from .._reporting import report_gradients
from ..linear._vectors import along
from ..problem import Problem, evaluate_pure, isolated
from ..solution import AdjointReport, Record
from ..solvers import Picard
from ..solvers.loop import Outcome
from ..status import Status
from .base import Adjoint, Request

#: The largest denominator of a damping: with a larger one, products would be rounded to more units.
DENOMINATORS = 1000
#: Bits of the integers at the start, by the precision of the states, and the least size that these resolve.
BITS = {torch.float64: (49, 2.0**-900), torch.float32: (38, 2.0**-60)}
#: Integers larger than this have outgrown their room: torch's have 63 bits and a sign.
LARGEST = 2**62

Gradients = tuple[Tensor | None, ...]


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


def pure(problem: Problem) -> Callable[[Tensor], Tensor]:
    """f of the problem, whose first two evaluations are tested for writes to their state."""
    calls = 0

    def mapped(z: Tensor) -> Tensor:
        nonlocal calls
        result = evaluate_pure(problem, z, energy=False, call=calls).mapped
        calls += 1
        return result

    return mapped


def coupled_steps(mapped: Callable[[Tensor], Tensor], start: Any, steps: int, damping: Fraction) -> Any:
    """The value after some steps in floats, by operations that autograd and compilers record."""
    part = float(damping)

    def towards(new: Tensor, old: Tensor) -> Tensor:
        return new - part * (new - old)

    y = z = start
    for _ in range(steps):
        y = towards(mapped(z), y)
        z = towards(mapped(y), z)
    return z


def merged_rows(chosen: Tensor, ours: Tensor, others: Tensor) -> Tensor:
    """`ours` where a problem (*lead) is chosen, else `others`."""
    return torch.where(along(chosen, others), ours, others)


class IntegerUnits(NamedTuple):
    """The sizes of the integers 1 of states, one for each problem, (*lead, 1, ...): powers of two, and their inverses.

    bits: those of the largest number that the unit was chosen for.
    """

    unit: Tensor
    inverse: Tensor
    bits: int

    @classmethod
    def of(cls, start: Tensor, first: Tensor, event_ndim: int, left_out: Tensor | None) -> Self:
        """The units for a start and f there; 0 for problems that are left out, whose states then are."""
        bits, least = BITS[start.dtype]
        size = torch.maximum(largest(start, event_ndim), largest(first, event_ndim))
        power = torch.frexp(size.nan_to_num(1.0, 1.0).clamp_min(least)).exponent
        one = torch.ones_like(size)
        units = [torch.ldexp(one, power - bits), torch.ldexp(one, bits - power)]
        if left_out is not None:
            units = [unit.masked_fill(left_out, 0.0) for unit in units]
        unit, inverse = (unit.reshape((*unit.shape, *(1,) * event_ndim)) for unit in units)
        return cls(unit, inverse, bits)

    def floats(self, x: Tensor) -> Tensor:
        """The states of integers."""
        return x.to(self.unit.dtype).mul_(self.unit)

    def integers(self, z: Tensor, inverse: Tensor | None = None) -> Tensor:
        """The integers of z, which are any where z has no place; of a part of it with that part of `inverse`."""
        return (z * (self.inverse if inverse is None else inverse)).to(torch.int64)

    def hold(self, size: Tensor) -> Tensor:
        """Whether the integers have room for states (*lead) of this size; False for NaN."""
        return size * self.inverse.reshape(size.shape) <= LARGEST

    def apart(self, x: Tensor, other: Tensor, event_ndim: int) -> Tensor:
        """The largest difference of integers, (*lead), relative to the numbers that the unit was chosen for."""
        return largest((x - other).to(self.unit.dtype), event_ndim) / 2.0**self.bits


def largest(z: Tensor, event_ndim: int) -> Tensor:
    """The largest absolute value of each problem, (*lead); NaN where one is."""
    size = z.detach().abs()
    return size.flatten(z.ndim - event_ndim).amax(-1) if event_ndim else size


class Ends(NamedTuple):
    """The result of steps in integers: all that the way back needs beside the start and the tensors.

    y, z: the last states, as integers.
    words: what the products dropped.
    units: of the integers.
    failed: (*lead), problems that left the numbers, or their integers.
    """

    y: Tensor
    z: Tensor
    words: list[Tensor]
    units: IntegerUnits
    failed: Tensor


@dataclasses.dataclass
class BackAndForth:
    """The steps of one call.

    Attributes:
        request: without tensors, as those are saved where hooks see them.
        fraction: the damping.
        steps: how many; >= 1.
        lost: whether a problem failed on the way there, and is left out.
    """

    request: Request
    fraction: Fraction
    steps: int
    lost: bool = False

    def problem(
        self, start: Tensor, tensors: Sequence[Tensor], needed: Sequence[bool], failed: Tensor | None
    ) -> tuple[Problem, Tensor]:
        """Problem and start; the tensors of the problem are leaves, and failed problems read finite numbers only."""
        problem = self.request.problem.replace(*(t.detach() for t in tensors))
        if failed is not None:
            with torch.no_grad():
                problem, start = isolated(problem, start, failed)
        leaves = (t.detach().requires_grad_(n) for t, n in zip(problem.tensors(), needed, strict=True))
        return problem.replace(*leaves), start

    def there(self, start: Tensor, tensors: Sequence[Tensor], needed: Sequence[bool]) -> Ends:
        """All steps; once more without the problems that fail in them."""
        ends = self._there(*self.problem(start, tensors, needed, None))
        self.lost = bool(ends.failed.any())
        if self.lost:
            problem, first = self.problem(start, tensors, needed, ends.failed)
            again = self._there(problem, first, ends.failed)
            ends = again._replace(failed=ends.failed | again.failed)
        return ends

    def _there(self, problem: Problem, start: Tensor, left_out: Tensor | None = None) -> Ends:
        evaluate = pure(problem)

        def mapped(z: Tensor) -> Tensor:
            # With the graph of the way back: without one, modules may take other kernels, with other bits.
            with torch.enable_grad(), without_hooks():
                return evaluate(z.detach().requires_grad_()).detach()

        new = mapped(start)
        units = IntegerUnits.of(start, new, problem.event_ndim, left_out)
        digits, part = LostDigits(self.fraction, 2 * self.steps), float(1 - self.fraction) * units.inverse
        y = z = units.integers(start)
        size = torch.maximum(largest(start, problem.event_ndim), largest(new, problem.event_ndim))
        for step in range(self.steps):
            if step:
                new = mapped(units.floats(z))
                size = torch.maximum(size, largest(new, problem.event_ndim))
            y = digits.multiply(y).add_(units.integers(new, part))
            new = mapped(units.floats(y))
            size = torch.maximum(size, largest(new, problem.event_ndim))
            z = digits.multiply(z).add_(units.integers(new, part))
        failed = ~units.hold(size)
        return Ends(y, z, digits.words, units, failed if left_out is None else failed & ~left_out)

    def back(
        self, start: Tensor, tensors: Sequence[Tensor], needed: Sequence[bool], ends: Ends, cotangent: Tensor
    ) -> tuple[Tensor, Gradients]:
        """The gradients of the start and of each tensor that is needed."""
        problem, start = self.problem(start, tensors, needed, ends.failed if self.lost else None)
        if self.lost:
            cotangent = merged_rows(ends.failed, torch.zeros_like(cotangent), cotangent)
        # Compiled modules stay so, as plain ones would return other bits.
        pull, part, rest = Pull(problem.unwritten()), float(1 - self.fraction), float(self.fraction)
        y, z, _, units, _ = ends
        digits, inverse = LostDigits(self.fraction, 2 * self.steps, ends.words), part * units.inverse
        by_y, by_z = torch.zeros_like(cotangent), cotangent
        for step in reversed(range(self.steps)):
            new, product = pull(units.floats(y), part * by_z)
            z, by_y, by_z = digits.divide(z - units.integers(new, inverse)), product.add_(by_y), rest * by_z
            new, product = pull(units.floats(z) if step else start, part * by_y)
            y, by_y, by_z = digits.divide(y - units.integers(new, inverse)), by_y.mul_(rest), by_z.add_(product)
        first = units.integers(start)
        error = torch.maximum(*(units.apart(x, first, problem.event_ndim) for x in (y, z)))
        report_reconstruction(self.request.report, error, 2 * self.steps, problem.if_random)
        return by_y + by_z, pull.gradients

    def recorded(
        self, start: Tensor, tensors: Sequence[Tensor], needed: Sequence[bool], failed: Tensor, cotangent: Tensor
    ) -> Gradients:
        """The gradients of the start and the tensors with a graph of their own, from a graph of all steps."""
        # Views: a tensor may be computed from another one of them.
        inputs = [t.view_as(t) for t in (start, *tensors)]
        problem, first = self.request.problem.replace(*inputs[1:]).apart(), inputs[0]
        if self.lost:
            problem, first = isolated(problem, first, failed)
            cotangent = merged_rows(failed, torch.zeros_like(cotangent), cotangent)
        value = coupled_steps(pure(problem), first, self.steps, self.fraction)
        where = [i for i, n in enumerate((True, *needed)) if n and inputs[i].requires_grad]
        found = torch.autograd.grad(value, [inputs[i] for i in where], cotangent, create_graph=True, allow_unused=True)
        gradients = dict(zip(where, found, strict=True))
        return tuple(map(gradients.get, range(len(inputs))))


class Pull:
    """f with J^T u, evaluation by evaluation; what its tensors get is added up.

    Attributes:
        gradients: (df/dt)^T u of every tensor t that requires grad, over all evaluations; None for others.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.tensors = problem, problem.tensors()
        self.wanted = [t for t in self.tensors if t.requires_grad]

    def __call__(self, z: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """f(z) and J^T u."""
        with torch.enable_grad(), without_hooks():
            z = z.detach().requires_grad_()
            mapped = self.problem.fixed_point_map(z)
            if not mapped.requires_grad:
                check_graph(self.problem._map_name(), mapped, self.problem.fixed_point_map, z)
                return mapped, torch.zeros_like(z)
            # To the leaves, which are nobody else's, and add up what they get.
            torch.autograd.backward(mapped, u, inputs=[z, *self.wanted])
        return mapped.detach(), torch.zeros_like(z) if z.grad is None else z.grad

    @property
    def gradients(self) -> Gradients:
        return tuple(t.grad for t in self.tensors)


class ReversibleSteps(torch.autograd.Function):
    """(run, initial, *tensors) -> (value, failed)."""

    @staticmethod
    def forward(ctx: Any, run: BackAndForth, initial: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ends = run.there(initial, tensors, ctx.needs_input_grad[2:])
        ctx.run, ctx.bits = run, ends.units.bits
        ctx.mark_non_differentiable(ends.failed)
        ctx.set_materialize_grads(False)
        kept = (ends.y, ends.z, ends.units.unit, ends.units.inverse, ends.failed, *ends.words)
        ctx.save_for_backward(initial, *tensors, *kept)
        ctx.count = len(tensors)
        return ends.units.floats(ends.z), ends.failed

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        start, *rest = ctx.saved_tensors
        tensors, (y, z, unit, inverse, failed, *words) = rest[: ctx.count], rest[ctx.count :]
        if cotangent is None:
            return (None,) * (2 + len(tensors))
        if torch._C._functorch.is_legacy_batchedtensor(cotangent):
            raise RuntimeError(
                "steps cannot run backwards with is_grads_batched=True or vectorize=True; use torch.func.jacrev"
            )
        run, needed = ctx.run, ctx.needs_input_grad[2:]
        with exact_precision(start):
            if torch.is_grad_enabled():
                return (None, *run.recorded(start, tensors, needed, failed, cotangent))
            ends = Ends(y, z, words, IntegerUnits(unit, inverse, ctx.bits), failed)
            by_start, gradients = run.back(start, tensors, needed, ends, cotangent)
        return (None, by_start if ctx.needs_input_grad[1] else None, *gradients)


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
    record = Record.unmeasured(error, Status.CONVERGED)
    count = torch.full_like(record.num_steps, num_evals)
    records = []
    for size in (error, worst):
        status = record.status.masked_fill(~(size <= limit), int(Status.MAX_STEPS))
        records.append(Record(status, size, limit, count, count))
    now, kept = records
    report.status, report.residual, report.tolerance, report.num_steps, _ = kept
    report.reconstruction_error = worst
    what = "the backward pass by Reversible, whose gradient is therefore wrong,"
    remedies = {Status.MAX_STEPS: f"the steps ran back to another start, as f is not the same each time: {if_random}"}
    report_gradients(report.on_failure, what, None, now, remedies, site=report.site)


class LostDigits:
    """A store of what the products with a fraction drop.

    Not for floats: state and store are integers of 64 bits.

    Args:
        fraction: n/m, in (0, 1).
        count: how many products are made.
        words: the integers of a store after its `count` products, which are to be undone; empty before the first.

    Examples:
        >>> import torch
        >>> from fractions import Fraction
        >>> from implicit_attention.adjoints.reversible import LostDigits
        >>> store, x = LostDigits(Fraction(4, 5), 1), torch.tensor([-123, 456])
        >>> y = store.multiply(x)
        >>> y.tolist(), LostDigits(Fraction(4, 5), 1, store.words).divide(y).tolist()
        ([-98, 365], [-123, 456])

    Reference: Maclaurin, Duvenaud and Adams (2015).
    """

    def __init__(self, fraction: Fraction, count: int, words: Sequence[Tensor] = ()) -> None:
        self.numerator, self.denominator = fraction.numerator, fraction.denominator
        power = self.denominator.bit_length() - 1
        #: The binary logarithm of the denominator; None where that is no power of two.
        self.power = power if 2**power == self.denominator else None
        self.words = list(words)
        self.turns = _turns(self.numerator, self.denominator, count)
        self.index = count if words else 0

    def multiply(self, x: Tensor) -> Tensor:
        """x n/m, up to n units; what it drops is kept."""
        known = self.words.pop() if self.index and self.index not in self.turns else None
        quotient, rest = _divided(x, self.denominator, self.power)
        word = rest if known is None else rest.add_(known, alpha=self.denominator)
        if self.numerator > 1:
            word, rest = _divided(word, self.numerator, None, positive=True)
            quotient = quotient.mul_(self.numerator).add_(rest)
        self.words.append(word)
        self.index += 1
        return quotient

    def divide(self, x: Tensor) -> Tensor:
        """The integer of which `multiply`, the last one that is not undone, made x."""
        word, self.index = self.words.pop(), self.index - 1
        if self.numerator > 1:
            x, rest = _divided(x, self.numerator, None)
            word = rest.add_(word, alpha=self.numerator)
        word, rest = _divided(word, self.denominator, self.power, positive=True)
        if self.index and self.index not in self.turns:
            self.words.append(word)
        return rest.add_(x, alpha=self.denominator)


def _divided(x: Tensor, by: int, power: int | None, *, positive: bool = False) -> tuple[Tensor, Tensor]:
    """The quotient, rounded down, and the remainder >= 0."""
    if power is not None:
        return x >> power, x & (by - 1)
    quotient = torch.div(x, by, rounding_mode="trunc" if positive else "floor")
    return quotient, torch.sub(x, quotient, alpha=by)


def _turns(numerator: int, denominator: int, count: int) -> frozenset[int]:
    """The products before which a new integer is begun, as the last one would be too large with another digit."""
    turns, bound = set(), 0
    for index in range(count):
        if bound * denominator + denominator > LARGEST:
            turns.add(index)
            bound = 0
        bound = (bound * denominator + denominator - 1) // numerator
    return frozenset(turns)
