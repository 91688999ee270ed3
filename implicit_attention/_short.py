"""The short way of a solve: of plain tensors, one native call in one autograd function.

It is taken by calls that are certainly fine, which a few cheap checks tell. All else, wrong input included, is left to
the general path, of which the short way gives every bit, message and derivative.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _dispatch_keys,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch.autograd import forward_ad

from ._autograd import backward_running, sum_to_shape
from ._fused_rule import FusedRule
from ._types import Impl
from .adjoints import Implicit, Request
from .adjoints.implicit import SolveCall, gradients_at
from .adjoints.linear_system import conjugate_gradients, report_adjoint
from .energies import AnchoredEnergy
from .failure_policy import policy_of
from .fused import Adjoined, Lowered
from .ops import dispatch, trust
from .ops.native import checks
from .ops.native.adjoint import adjoints
from .ops.native.library import library
from .ops.native.solve import Equilibria, equilibria
from .ops.problem import carries
from .ops.rule import AdjointRule
from .potentials import LogSumExp
from .solution import AdjointReport, Record
from .solvers import Anderson, Picard, Solver
from .solvers.iterate import Outcome

_R = TypeVar("_R")

#: Types of tensors that hide nothing.
KINDS = (Tensor, torch.nn.Parameter)
# Numbers per head and the like, which are looked at one by one: with more the general path costs no more.
MOST_NUMBERS = 256
# Leading axes of a short call.
MOST_AXES = 8
# Of an inverse temperature.
LEAST, MOST = math.ulp(0.0), sys.float_info.max


def unobserved() -> bool:
    """Whether torch runs eagerly, and no transform, mode or recording sees or changes what is called."""
    return not (
        torch.compiler.is_compiling()
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _get_tracing_state() is not None
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or torch.is_autocast_enabled("cpu")
        or torch.are_deterministic_algorithms_enabled()
    )


def are_plain(dtype: torch.dtype, *tensors: Any) -> bool:
    """Whether all are strided tensors of numbers in this machine's memory and nothing more, while `unobserved`.

    None is of a subclass, wrapped by a transform, without numbers, sparse, nested, or to be negated when it is read.
    """
    keys = _plain_keys()
    for tensor in tensors:
        if type(tensor) not in KINDS or tensor.dtype != dtype or _dispatch_keys(tensor).raw_repr() not in keys:
            return False
    return True


@functools.cache
def _plain_keys() -> tuple[int, ...]:
    with torch.inference_mode():
        frozen = torch.empty(0, device="cpu")
    with torch.inference_mode(False):
        return tuple(_dispatch_keys(t).raw_repr() for t in (torch.empty(0, device="cpu"), frozen))


def _is_number_in(value: Any, query: Tensor, low: float, high: float) -> bool:
    """Whether `value` is a number in [low, high], or a small tensor of such numbers, one per batch entry of a query."""
    if type(value) in (float, int):
        return bool(low <= value <= high)
    if not are_plain(query.dtype, value) or value.numel() > MOST_NUMBERS:
        return False
    if not broadcasts(value.shape, query.shape[:-2]):
        return False
    return all(low <= number <= high for number in value.flatten().tolist())


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether `shape` broadcasts to `target` without enlarging it."""
    if shape == target:
        return True
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, whole) for size, whole in pairs)


@functools.lru_cache(maxsize=1024)
def fit(shape: torch.Size, of_keys: torch.Size, of_values: torch.Size | None) -> bool:
    """Whether queries, keys and values (if any) have shapes that belong together, with few axes and nothing empty."""
    if not 2 <= len(shape) <= MOST_AXES + 2 or len(of_keys) < 2 or shape[-1] != of_keys[-1]:
        return False
    lead = shape[:-2]
    if not broadcasts(of_keys[:-2], lead) or 0 in shape or 0 in of_keys:
        return False
    if of_values is None or of_values == of_keys:
        return True
    fits = len(of_values) >= 2 and of_values[-2] == of_keys[-2] and 0 not in of_values
    return fits and broadcasts(of_values[:-2], lead)


class ShortProblem(NamedTuple):
    """`AnchoredEnergy` of `LogSumExp` by its tensors, plain and of one dtype.

    query: (*batch, N, D). keys: (*#batch, M, D). beta, anchor: numbers or (*#batch). pairs: the mask, or the bias that
    has no derivative, (*#batch, #N, #M), or None. first: without pairs, query i attends to keys up to first + i.
    """

    query: Tensor
    keys: Tensor
    beta: float | Tensor
    anchor: float | Tensor
    pairs: Tensor | None
    first: int | None = None

    @classmethod
    def of(cls, energy: Any) -> ShortProblem | None:
        """The problem of such an energy; None for any other, and for one that computes or holds more."""
        if type(energy) is not AnchoredEnergy or not energy._has_only("potential", "field", "anchor"):
            return None
        potential = energy.potential
        if not isinstance(potential, LogSumExp) or not potential._is_own() or potential._dense:
            return None
        mask, bias = potential.mask, potential.bias
        if mask is not None and bias is not None:
            return None
        pairs = mask if bias is None else bias
        return cls(energy.field, potential.keys, potential.beta, energy.anchor, pairs, potential.query_offset)

    @property
    def potential(self) -> LogSumExp:
        pairs = self.pairs
        if pairs is None:
            return LogSumExp(self.keys, self.beta, query_offset=self.first)
        if pairs.dtype == torch.bool:
            return LogSumExp(self.keys, self.beta, mask=pairs)
        return LogSumExp(self.keys, self.beta, bias=pairs)

    @property
    def energy(self) -> AnchoredEnergy:
        return AnchoredEnergy(self.potential, self.query, self.anchor, unbounded="ignore")

    def detached(self) -> ShortProblem:
        return ShortProblem(*(t.detach() if isinstance(t, Tensor) else t for t in self))  # type: ignore[arg-type]

    def is_plain(self, values: Any = None) -> bool:
        """Whether all tensors are plain and fit each other, and numbers are in their range, while `unobserved`.

        values: what is read out, (*#batch, M, E), if anything.
        """
        query, keys, beta, anchor, pairs, _ = self
        dtype = query.dtype
        if dtype not in (torch.float32, torch.float64) or not are_plain(
            dtype, query, keys, keys if values is None else values
        ):
            return False
        if not fit(query.shape, keys.shape, None if values is None else values.shape):
            return False
        # Written out for the most frequent kind.
        if not ((type(anchor) is float and 0.0 <= anchor <= 1.0) or _is_number_in(anchor, query, 0.0, 1.0)):
            return False
        if not ((type(beta) is float and LEAST <= beta <= MOST) or _is_number_in(beta, query, LEAST, MOST)):
            return False
        if pairs is None:
            return True
        fixed = are_plain(torch.bool, pairs) or (are_plain(dtype, pairs) and not pairs.requires_grad)
        return fixed and pairs.ndim >= 2 and broadcasts(pairs.shape, (*query.shape[:-1], keys.shape[-2]))

    def is_native(self, impl: Impl, values: Any = None) -> bool:
        """Whether it `is_plain`, and the native operations solve it as it is."""
        query, keys, _, anchor, pairs, first = self
        wanted = query.dtype in dispatch.NATIVE_DTYPES or impl == "native"
        if not (wanted and self.is_plain(values) and carries(query.dtype, anchor)):
            return False
        # Keys that are not finite are kept from the queries that do not attend to them.
        return (pairs is None and first is None) or is_finite(keys)


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers of a plain tensor are known to be finite."""
    loaded = library()
    if loaded is not None and tensor.is_contiguous():
        return bool(loaded.finite(tensor.itemsize, tensor.data_ptr(), tensor.numel()))
    return math.isfinite((tensor.detach() if tensor.requires_grad else tensor).sum().item())


@functools.cache
def rule_of(solver: Solver) -> FusedRule | None:
    """Return the rule by which the native operation is this solver; None if it cannot be, or ends at no solution."""
    if type(solver) not in (Anderson, Picard):
        return None
    row = torch.zeros(1, 1, device="cpu")
    rule = solver.fused_rule(ShortProblem(row, row, 1.0, 0.0, None).energy)
    return None if rule is None or rule.max_steps == 0 or rule.fixed_budget else rule


def is_exact(adjoint: Any) -> bool:
    """Whether gradients are those of `Implicit()` as it is by default."""
    return type(adjoint) is Implicit and adjoint.linear_solver is None and adjoint.fallback is None


class Found(NamedTuple):
    """The state with its graph, how the solve went, how its backward solve will go, and how many have no answer."""

    outcome: Outcome
    report: AdjointReport
    failed: int


def is_differentiated(*parts: Any) -> bool:
    """Whether a derivative with respect to a tensor among `parts` can be asked for, while `unobserved`."""
    if torch.is_grad_enabled():
        for part in parts:
            if isinstance(part, Tensor) and part.requires_grad:
                return True
    return False


def found_states(
    problem: ShortProblem, initial: Tensor, solver: Solver, impl: Impl, *, mean: bool, evidence: bool
) -> Equilibria | None:
    """The equilibria of a problem that `is_native`, by a solver with a rule; None where no native library answers."""
    rule = rule_of(solver)
    assert rule is not None
    run = partial(equilibria, *problem, initial, rule, mean=mean, evidence=evidence)
    return _trusted("hopfield_solve", impl, problem, run)


def find(problem: ShortProblem, initial: Tensor, solver: Solver, impl: Impl, report: AdjointReport) -> Found | None:
    """The same with a graph and all evidence."""
    differentiated = is_differentiated(*problem)
    found = found_states(problem, initial, solver, impl, mean=differentiated, evidence=True)
    if found is None:
        return None
    assert found.num_steps is not None
    # All that is asked for is there.
    record = Record(found.status, found.residual, found.tolerance, found.num_steps, found.num_steps + 1)  # type: ignore[arg-type]
    value = found.state
    if differentiated:
        how = _How(solver, impl, report, found.failed == 0)
        value = _Equilibrium.apply(how, found, *problem)  # type: ignore[no-untyped-call]
        report.awaited = not backward_running()
        report.state_residual = None if report.on_failure == "ignore" else record.residual
    return Found(Outcome(value, record), report, found.failed)


def _trusted(operation: str, impl: Impl, problem: ShortProblem, run: Callable[[], _R]) -> _R | None:
    use = dispatch.native_use(operation, problem.keys, problem.pairs, problem.first)
    if use is None:
        return None
    check = partial(checks.CHECKS[operation], use.variant)
    return trust.answer(use, check, run, insists="native" if impl == "native" else None)


class _How(NamedTuple):
    """The non-tensor arguments of the backward pass."""

    solver: Solver
    impl: Impl
    report: AdjointReport
    #: Whether every query has an answer, so that no number is NaN that must not reach others.
    answered: bool


class _Equilibrium(torch.autograd.Function):
    """(how, found, query, keys, beta, anchor, pairs) -> the state, found beforehand.

    The native backward solve has no derivative. One that may be differentiated again, or that is observed, is made by
    the general path.
    """

    # Without `setup_context`: torch would bind the arguments by their signature at every call.
    @staticmethod
    def forward(ctx: Any, how: _How, found: Equilibria, *problem: Any) -> Tensor:
        ctx.how = how
        ctx.parts = tuple(Tensor if isinstance(part, Tensor) else part for part in problem)
        ctx.save_for_backward(found.state, found.mean, *(t for t in problem if isinstance(t, Tensor)))
        return found.state

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        state, mean, *tensors = ctx.saved_tensors
        held = iter(tensors)
        problem = ShortProblem(*(next(held) if part is Tensor else part for part in ctx.parts))
        how, needed = ctx.how, ctx.needs_input_grad[2:]
        plain = how.answered and not torch.is_grad_enabled() and unobserved()
        if plain and are_plain(state.dtype, cotangent, state, mean, problem.query, problem.keys):
            gradients = _by_adjoint(problem, how, state, mean, cotangent)
            if gradients is not None:
                return (None, None, *gradients)
        return (None, None, *_by_general(problem, how, state, cotangent, needed))


def _by_adjoint(
    problem: ShortProblem, how: _How, state: Tensor, mean: Tensor, cotangent: Tensor
) -> tuple[Tensor | None, ...] | None:
    """The gradients by the native backward solve, with its report; None where there is none."""
    query, keys, beta, anchor, pairs, first = problem
    method = conjugate_gradients(state.dtype)
    rule = AdjointRule(method.rtol, method.default_max_steps(state.shape[-1]))
    run = partial(adjoints, keys, beta, anchor, pairs, first, state, mean, cotangent, rule)
    native = _trusted("hopfield_adjoint", how.impl, problem, run)
    if native is None or (native.failed and policy_of(how.report.on_failure).backward == "zero"):
        return None
    found = native.whole
    if native.failed:
        held = problem.detached()
        packed = Lowered(held.energy, held.potential, None, how.impl).packed()
        found = dispatch.with_stalled(found, packed, state, cotangent, rule, by_bias=None)
    by_beta = sum_to_shape(found.by_beta.sum(-1), beta.shape) if isinstance(beta, Tensor) else None
    by_anchor = None
    if isinstance(anchor, Tensor):
        by_anchor = sum_to_shape((found.value * (query - mean)).sum((-1, -2)), anchor.shape)

    def mapped() -> Tensor:
        return problem.detached().energy.fixed_point_map(state)

    report_adjoint(how.report, how.solver, method, Adjoined(*found[:6]), True, state, cotangent, mapped)
    # In the memory of u, which nobody else reads.
    by_query = found.value.mul_(anchor[..., None, None] if isinstance(anchor, Tensor) else anchor)
    return by_query, found.by_keys, by_beta, by_anchor, None, None


def _by_general(
    problem: ShortProblem, how: _How, state: Tensor, cotangent: Tensor, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients as the general path has them, differentiable where derivatives are recorded."""
    energy = problem.energy
    request = Request(energy, state, how.solver, how.impl, False, how.report)
    # Keys, beta, pairs, query, anchor: the order of `energy.tensors()`.
    order = [i for i in (1, 2, 4, 0, 3) if isinstance(problem[i], Tensor)]
    found = gradients_at(
        SolveCall(energy, None, request), state, energy.tensors(), cotangent, [needed[i] for i in order]
    )
    gradients: list[Tensor | None] = [None] * len(problem)
    for i, gradient in zip(order, found, strict=True):
        gradients[i] = gradient
    return tuple(gradients)
