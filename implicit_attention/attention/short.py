"""The short way of attention: of plain tensors, a few checks, the kernel that solves, and one that reads out.

As in `_short`: a call that may fail a check is left to the general path, which gives the same bits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._short import (
    KINDS,
    ShortProblem,
    are_plain,
    find,
    found_states,
    is_differentiated,
    is_exact,
    is_finite,
    rule_of,
    unobserved,
)
from .._solve import concluded
from .._types import Impl
from ..adjoints import Implicit
from ..failure_policy import WORDS
from ..ops.attention import attend, differentiable, loses_nan, sdpa
from ..ops.fold import Fold
from ..options import SolveKeywords, SolveOptions
from ..solution import AdjointReport, Solution
from ..solvers import Anderson, Picard, Solver
from ..status import OF_ATTENTION, advice
from .read_out import LINE, read_out


def untouched() -> bool:
    """Whether torch runs eagerly, `unobserved`, and its attention is its own."""
    own = F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    return own and unobserved()


_ADVICE = functools.partial(advice, to_contract=OF_ATTENTION)
# Rows of so many numbers are aligned in any precision.
WIDTH = 4


class Plan(NamedTuple):
    """The part of `SolveOptions` that the short way serves. solver: None where nothing is solved."""

    solver: Solver | None
    impl: Impl


@functools.lru_cache(maxsize=256)
def _plan(options: SolveOptions) -> Plan | None:
    solver, adjoint = options.effective_solver, options.effective_adjoint
    if options.explicit:
        return Plan(None, options.impl) if options.impl == "auto" else None
    if rule_of(solver) is None or not (adjoint is None or is_exact(adjoint)) or options.impl not in ("auto", "native"):
        return None
    return Plan(solver, options.impl)


def planned(options: SolveOptions) -> Plan | None:
    """The plan, or None where the short way does not do what the options ask for."""
    known = type(options.solver) in (type(None), Anderson, Picard)
    return _plan(options) if known and (options.adjoint is None or is_exact(options.adjoint)) else None


@functools.lru_cache(maxsize=256, typed=True)
def _overridden(**options: Any) -> Plan | None:
    return planned(SolveOptions(**{name: value for name, value in options.items() if value is not None}))


def attention(
    query: Any, key: Any, value: Any, scale: Any, anchor: Any, first: int | None, given: SolveKeywords
) -> Tensor | None:
    """`equilibrium_attention` without a mask; None where it is left to the general path.

    first: with it, query i attends to keys up to first + i.
    """
    if not untouched() or type(query) not in KINDS or query.is_nested or query.ndim < 2:
        return None
    options: dict[str, Any] = dict(given)
    on_failure = options.pop("on_failure", None)
    on_failure = "warn" if on_failure is None else on_failure
    if on_failure not in WORDS:
        return None
    try:
        plan = _overridden(**options)
    except (TypeError, ValueError):
        # The general path says what is wrong.
        return None
    if plan is None:
        return None
    if first is not None and (type(key) not in KINDS or key.ndim < 2 or first + 1 >= key.shape[-2]):
        first = None
    problem = ShortProblem(query, key, max(query.shape[-1], 1) ** -0.5 if scale is None else scale, anchor, None, first)
    if plan.solver is None:
        return explicit(problem, value)
    if not problem.is_native(plan.impl, value) or (first is not None and not is_finite(value)):
        return None
    # Nobody sees evidence, unless a query has no answer.
    if is_differentiated(*problem):
        found = find(problem, query, plan.solver, plan.impl, AdjointReport(on_failure=on_failure))
        state, failed = (None, 0) if found is None else (found.outcome.value, found.failed)
    else:
        bare = found_states(problem, query, plan.solver, plan.impl, mean=False, evidence=False)
        state, failed = (None, 0) if bare is None else (bare.state, bare.failed)
    if state is None:
        return None
    if failed:
        told = solved(problem, value, query, plan, AdjointReport(on_failure=on_failure))
        return None if told is None else told[0]
    return _read(state, key, value, problem.beta, first)


def explicit(problem: ShortProblem, values: Any) -> Tensor | None:
    """The values read out at the query; None where it is left to the general path. Call while `untouched`."""
    query, keys, beta, anchor, pairs, first = problem
    if pairs is not None or not problem.is_plain(values):
        return None
    query = query.contiguous()
    # What a query that is not finite reads is NaN, which kernels do not always find.
    if query.data_ptr() % LINE or not is_finite(query):
        return None
    # What some queries do not attend to must not reach them.
    if (loses_nan(keys) or first is not None) and not is_finite(keys):
        return None
    if first is not None and not is_finite(values):
        return None
    output = _read(query, keys, values, beta, first)
    return output + 0 * anchor.sum() if isinstance(anchor, Tensor) and anchor.requires_grad else output


def solved(
    problem: ShortProblem, values: Any, initial: Tensor, plan: Plan, report: AdjointReport
) -> tuple[Tensor, Solution] | None:
    """Return the read-out at the equilibria (the state, without values), and the solution, reported as by `solve`.

    None where it is left to the general path. Call while `untouched`.
    """
    assert plan.solver is not None
    if not problem.is_native(plan.impl, values) or (initial is not problem.query and not _starts(initial, problem)):
        return None
    found = find(problem, initial, plan.solver, plan.impl, report)
    if found is None:
        return None
    failed = found.failed > 0
    energy = functools.partial(_energy, problem)
    solution = concluded(found.outcome, plan.solver, Implicit(), found.report, energy, failed=failed, advice=_ADVICE)
    state, pairs = solution.value, problem.pairs
    if values is None:
        return state, solution
    if failed or pairs is not None:
        return read_out(problem.potential, state, values, 0.0), solution
    if problem.first is not None and not is_finite(values):
        return read_out(problem.potential, state, values, 0.0), solution
    return _read(state, problem.keys, values, problem.beta, problem.first), solution


def _starts(initial: Tensor, problem: ShortProblem) -> bool:
    return are_plain(problem.query.dtype, initial) and initial.shape == problem.query.shape


def _read(z: Tensor, keys: Tensor, values: Tensor, beta: float | Tensor, first: int | None) -> Tensor:
    """softmax(beta z K^T) V of finite states and keys, as `LogSumExp.readout` has it."""
    query, scale = (beta[..., None, None] * z, 1.0) if isinstance(beta, Tensor) else (z, beta)
    differentiated = torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad or values.requires_grad)
    if _is_laid_out(z.shape, keys.shape, values.shape):
        # What `attend` does where there is nothing to lay out anew.
        query, keys, values = query.contiguous(), keys.contiguous(), values.contiguous()
        if not differentiated:
            return sdpa(query, keys, values, attn_mask=None, scale=scale, first=first)[0]
        return differentiable(query, keys, values, attn_mask=None, scale=scale, first=first)[0]  # type: ignore[no-any-return]
    kernel = differentiable if differentiated else sdpa
    fold = Fold(z.shape[:-2], keys.shape[:-2], values.shape[:-2])
    keys, values = (fold.rows(fold.moved(t)) for t in (keys, values))
    return fold.restored(attend(kernel, fold, fold.moved(query), keys, values, None, scale, first)[0])


@functools.lru_cache(maxsize=1024)
def _is_laid_out(shape: torch.Size, of_keys: torch.Size, of_values: torch.Size) -> bool:
    """Whether torch's kernel takes tensors of these shapes, and takes them aligned, as they are."""
    return len(shape) == 4 and of_keys == of_values and shape[:-2] == of_keys[:-2] and shape[-1] % WIDTH == 0


def _energy(problem: ShortProblem, z: Tensor) -> Tensor:
    return problem.energy.energy(z)
