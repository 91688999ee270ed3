"""Attention over plain tensors: a few checks, one native operation that solves, and one of torch's that reads out.

A call that fails a check, wrong input included, is left to `core`, which gives the same bits by the potential, `solve`
and the potential's own read-out.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._autograd import are_plain, unobserved
from .._solve import concluded
from ..adjoints.native import (
    energy_of,
    is_differentiated,
    is_finite,
    is_native,
    potential_of,
    solve_natively,
    with_gradient,
)
from ..failure_policy import FailureSite, policy_of
from ..ops.attention import attend, differentiable, loses_nan, sdpa
from ..ops.fold import Fold
from ..ops.problem import Hopfield
from ..options import Plan
from ..solution import AdjointReport, Record, SolveReport
from ..solvers import Outcome
from ..status import of_attention
from .call import Attended
from .read_out import LINE, read_out

# Rows of so many numbers are aligned in any precision.
WIDTH = 4


def eager() -> bool:
    """Whether torch runs eagerly, `unobserved`, and its attention is its own."""
    return F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention and unobserved()


def explicit(problem: Hopfield, values: Any) -> Tensor | None:
    """The values read out at the query; None where it is left to `core`. Call while `eager`."""
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
    problem: Hopfield,
    values: Any,
    initial: Tensor,
    plan: Plan,
    on_failure: Any,
    site: FailureSite | None = None,
    *,
    report: bool = True,
    solution: bool = False,
) -> Attended | None:
    """Solve and read out, and report as `solve` does; None where it is left to `core`. Call while `eager`.

    report, solution: whether these are asked for.
    """
    if not is_native(problem, plan.impl, values):
        return None
    if initial is not problem.field and not (
        are_plain(problem.field.dtype, initial) and initial.shape == problem.field.shape
    ):
        return None
    assert plan.rule is not None
    differentiated = is_differentiated(*problem)
    told = report or differentiated or policy_of(on_failure).counts
    answer = solve_natively(problem, initial, plan.rule, plan.impl, mean=differentiated, evidence=told)
    if answer is None:
        return None
    found, failed = answer
    if failed and not told:
        # Nobody wanted evidence before.
        return solved(problem, values, initial, plan, on_failure, site)
    state, made, known = found.state, None, None
    if told:
        record, adjoint = Record._make(found[3:]), AdjointReport(on_failure=on_failure, site=site)
        if differentiated:
            state = with_gradient(problem, found, failed, plan.solver, plan.impl, adjoint)
        if failed or solution or policy_of(on_failure).counts:
            energy = functools.partial(_energy, problem)
            outcome = Outcome(state, record)
            made = concluded(outcome, plan.solver, plan.adjoint, adjoint, energy, failed=failed > 0, advice=of_attention)
            state, known = made.value, made.report
        else:
            if differentiated:
                adjoint.unsolved = record.failed
            known = SolveReport(record, adjoint, plan.remedies)
    pairs, first = problem.mask, problem.first
    if values is None:
        return Attended(state, state, known, made)
    if failed or pairs is not None or (first is not None and not is_finite(values)):
        return Attended(read_out(potential_of(problem), state, values, 0.0), state, known, made)
    return Attended(_read(state, problem.keys, values, problem.beta, first), state, known, made)


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


def _energy(problem: Hopfield, z: Tensor) -> Tensor:
    return energy_of(problem).energy(z)
