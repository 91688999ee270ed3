"""Two coupled states, step by step, there in integers and back bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from .._autograd import check_graph, exact_precision, without_hooks
from ..linear._vectors import along
from ..problem import Problem, evaluate_pure, isolated
from .base import Request
from .lost_digits import LostDigits
from .reconstruction import report_reconstruction

#: Bits of the integers at the start, by the precision of the states, and the least size that these resolve.
BITS = {torch.float64: (49, 2.0**-900), torch.float32: (38, 2.0**-60)}
#: Integers larger than this have outgrown their room.
LARGEST = 2.0**62

Gradients = tuple[Tensor | None, ...]


def pure(problem: Problem) -> Callable[[Tensor], Tensor]:
    """f of the problem, whose first two evaluations are tested for writes to their state."""
    calls = 0

    def mapped(z: Tensor) -> Tensor:
        nonlocal calls
        result = evaluate_pure(problem, z, energy=False, call=calls).mapped
        if calls == 1 and not problem.tested:
            problem.pass_tests()
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
