"""Equilibria of plain tensors by one native call, and their gradients by another.

A call that fails one of a few cheap checks, wrong input included, is left to `lower`, the solvers' loop and
`Implicit.run`, which give the same bits, messages and derivatives.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .._autograd import applied, are_plain, sum_to_shape, unobserved
from .._fused_rule import FusedRule
from .._types import Impl
from ..energies import AnchoredEnergy
from ..kernels import dispatch, trust
from ..kernels.native import checks
from ..kernels.native.adjoint import adjoints
from ..kernels.native.library import library
from ..kernels.native.solve import Equilibria, Evidence, equilibria
from ..kernels.problem import Hopfield, carries
from ..kernels.rule import AdjointRule
from ..linear import CG, LinearSolution
from ..potentials import LogSumExp
from ..solution import AdjointReport
from ..solvers import Anderson, Picard, Solver
from .base import Adjoint, Request
from .implicit import Implicit, gradients_at
from .linear_system import conjugate_gradients, least_size, report_adjoint

_R = TypeVar("_R")


def native_rule(solver: Solver, adjoint: Adjoint, impl: Impl) -> FusedRule | None:
    """The rule by which the native operation is this solver; None for other solvers and fixed budgets."""
    exact = type(adjoint) is Implicit and adjoint.linear_solver is None and adjoint.fallback is None
    if not exact or impl not in ("auto", "native") or type(solver) not in (Anderson, Picard):
        return None
    return _rule_of(solver)


@functools.cache
def _rule_of(solver: Solver) -> FusedRule | None:
    row = torch.zeros(1, 1, device="cpu")
    rule = solver.fused_rule(AnchoredEnergy(LogSumExp(row, 1.0), row, 0.0))
    return None if rule is None or rule.max_steps == 0 or rule.fixed_budget else rule


def problem_of(energy: Any) -> Hopfield | None:
    """The tensors of `AnchoredEnergy` of `LogSumExp`; None for other energies, and for subclasses that change it."""
    if type(energy) is not AnchoredEnergy or not energy._has_only("potential", "field", "anchor"):
        return None
    potential = energy.potential
    if not isinstance(potential, LogSumExp) or not potential._is_own() or potential._dense:
        return None
    mask, bias = potential.mask, potential.bias
    if mask is not None and bias is not None:
        return None
    pairs = mask if bias is None else bias
    return Hopfield(energy.field, potential.keys, potential.beta, energy.anchor, pairs, potential.query_offset)


def potential_of(problem: Hopfield) -> LogSumExp:
    """The potential of a problem's keys."""
    _, keys, beta, _, pairs, first = problem
    if pairs is None:
        return LogSumExp(keys, beta, query_offset=first)
    if pairs.dtype == torch.bool:
        return LogSumExp(keys, beta, mask=pairs)
    return LogSumExp(keys, beta, bias=pairs)


def energy_of(problem: Hopfield) -> AnchoredEnergy:
    """The energy of a problem: the inverse of `problem_of`."""
    return AnchoredEnergy(potential_of(problem), problem.field, problem.anchor, unbounded="ignore")


def is_native(problem: Hopfield, impl: Impl, values: Any = None, *, numbers: bool = False) -> bool:
    """Whether a problem `is_plain`, and the native operations solve it as it is; `numbers` as there."""
    query, keys, _, anchor, pairs, first = problem
    if not (problem.is_plain(values, numbers=numbers) and carries(query.dtype, anchor)):
        return False
    # Keys that are not finite must not reach queries that do not attend to them.
    return (pairs is None and first is None) or is_finite(keys)


def in_one_piece(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous, or would be with tokens before heads, as projections lay out heads."""
    return tensor.is_contiguous() or (tensor.ndim > 2 and tensor.transpose(-3, -2).is_contiguous())


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers of a plain tensor are known to be finite."""
    return piece_is_finite(tensor) if in_one_piece(tensor) else _sum_is_finite(tensor)


def piece_is_finite(tensor: Tensor) -> bool:
    """Return the same of a tensor that is `in_one_piece`."""
    loaded = library()
    if loaded is None:
        return _sum_is_finite(tensor)
    return bool(loaded.finite(tensor.itemsize, tensor.data_ptr(), tensor.numel()))


def _sum_is_finite(tensor: Tensor) -> bool:
    return math.isfinite((tensor.detach() if tensor.requires_grad else tensor).sum().item())


def is_differentiated(*parts: Any) -> bool:
    """Whether a derivative with respect to a tensor among `parts` can be asked for, while `unobserved`."""
    if torch.is_grad_enabled():
        for part in parts:
            if isinstance(part, Tensor) and part.requires_grad:
                return True
    return False


def solve_natively(
    problem: Hopfield, initial: Tensor, rule: FusedRule, impl: Impl, *, mean: bool, evidence: bool
) -> Equilibria | None:
    """The equilibria of a problem that `is_native`; None where no library answers."""
    run = partial(equilibria, problem, initial, rule, mean=mean, evidence=evidence)
    return _trusted("hopfield_solve", impl, problem, run)


def _trusted(operation: str, impl: Impl, problem: Hopfield, run: Callable[[], _R]) -> _R | None:
    use = dispatch.native_use(operation, problem.keys, problem.mask, problem.first)
    if use is None:
        return None
    check = partial(checks.CHECKS[operation], use.variant)
    return trust.answer(use, check, run, insists="native" if impl == "native" else None)


class NativeSolve(NamedTuple):
    """The non-tensor arguments of the backward pass of a native solve.

    answered: whether every query has an answer, so that no number is NaN that must not reach others.
    evidence: of the solve.
    """

    solver: Solver
    impl: Impl
    report: AdjointReport
    answered: bool
    evidence: Evidence

    def states(self, problem: Hopfield, state: Tensor, mean: Tensor) -> Tensor:
        """The states of a solve, where the keys have this mean, differentiable; the backward solve reports."""
        return applied(_Equilibrium, self, (state, mean), *problem)


class _Equilibrium(torch.autograd.Function):
    """(solve, (state, mean), query, keys, beta, anchor, pairs, first) -> the state, which is solved already.

    The native backward solve has no derivative. One that may be differentiated again, or that is observed, is made by
    `Implicit`.
    """

    # Without `setup_context`: torch would bind the arguments by their signature at every call.
    @staticmethod
    def forward(ctx: Any, solve: NativeSolve, solved: tuple[Tensor, Tensor], *problem: Any) -> Tensor:
        ctx.solve = solve
        ctx.parts = [Tensor if isinstance(part, Tensor) else part for part in problem]
        ctx.save_for_backward(*solved, *[t for t in problem if isinstance(t, Tensor)])
        return solved[0]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        state, mean, *tensors = ctx.saved_tensors
        saved = iter(tensors)
        problem = Hopfield._make([next(saved) if part is Tensor else part for part in ctx.parts])
        plain = not torch.is_grad_enabled() and unobserved()
        if plain and are_plain(state.dtype, cotangent, state, mean, problem.field, problem.keys):
            gradients = native_gradients(problem, ctx.solve, state, mean, cotangent)
            if gradients is not None:
                return (None, None, *gradients, None, None)
        return (None, None, *_by_implicit(problem, ctx.solve, state, cotangent, ctx.needs_input_grad[2:]))


@functools.lru_cache(maxsize=256)
def _adjoint_rule(solver: Solver, dtype: torch.dtype, dim: int) -> tuple[CG, AdjointRule, float]:
    """The method of the backward solve, its rule, and the size below which a state counts as zero."""
    method = conjugate_gradients(solver.rtol, dtype)
    return method, AdjointRule(method.rtol, method.default_max_steps(dim)), least_size(solver, dim)


def native_gradients(
    problem: Hopfield, how: NativeSolve, state: Tensor, mean: Tensor, cotangent: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None:
    """The gradients of query, keys, beta and anchor by the native backward solve, reported; None where it has none."""
    if not how.answered:
        return None
    query, _, beta, anchor, _, _ = problem
    method, rule, least = _adjoint_rule(how.solver, state.dtype, state.shape[-1])
    report = how.report
    moved = 0 if report.on_failure == "ignore" else how.evidence.addresses()[1]
    run = partial(adjoints, problem, state, mean, cotangent, rule, moved=moved, least=least)
    native = _trusted("hopfield_adjoint", how.impl, problem, run)
    if native is None:
        return None
    value, by_beta, by_keys, evidence, failed, doubtful = native
    if failed:
        # Saddles above all, which `Implicit` finishes.
        return None
    by_number = sum_to_shape(by_beta.sum(-1), beta.shape) if isinstance(beta, Tensor) else None
    by_anchor = None
    if isinstance(anchor, Tensor):
        by_anchor = sum_to_shape((value * (query - mean)).sum((-1, -2)), anchor.shape)
    watched = not isinstance(report.on_failure, str) or (report.site is not None and report.site.tally is not None)
    if doubtful or watched or not moved or report.status is not None or report.lead is not None:

        def mapped() -> Tensor:
            return energy_of(problem.detached()).fixed_point_map(state)

        answer = native.answer
        solution = LinearSolution(answer.record, answer.value, answer.negative_curvature)
        report_adjoint(report, how.solver, method, solution, True, state, cotangent, mapped)
    else:
        # There is nothing to warn of, and nothing to add to.
        report.fill(
            {
                "status": lambda: evidence.status,
                "residual": lambda: evidence.number(0),
                "tolerance": lambda: evidence.number(1),
                "num_steps": lambda: evidence.steps,
                "negative_curvature": lambda: evidence.flags,
                "gradient_error": lambda: evidence.number(2),
            }
        )
    # u is not read again, and its memory serves.
    by_query = value.mul_(anchor.view(*anchor.shape, 1, 1) if isinstance(anchor, Tensor) else anchor)
    return by_query, by_keys, by_number, by_anchor


def _by_implicit(
    problem: Hopfield, how: NativeSolve, state: Tensor, cotangent: Tensor, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients as `Implicit` has them, differentiable where derivatives are recorded."""
    energy = energy_of(problem)
    request = Request(energy, state, how.solver, how.impl, False, how.report)
    # Keys, beta, pairs, query, anchor: the order of `energy.tensors()`.
    order = [i for i in (1, 2, 4, 0, 3) if isinstance(problem[i], Tensor)]
    derivatives = gradients_at(request, state, energy.tensors(), cotangent, [needed[i] for i in order])
    gradients: list[Tensor | None] = [None] * len(problem)
    for i, gradient in zip(order, derivatives, strict=True):
        gradients[i] = gradient
    return tuple(gradients)
