"""Attention over plain tensors: a few checks, a native operation that solves, and torch's kernel that reads out.

A call that fails a check, wrong input included, is left to `core`, which gives the same bits by the potential, `solve`
and the potential's own read-out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._autograd import are_plain, backward_running, unobserved
from .._solve import concluded
from ..adjoints.native import (
    NativeSolve,
    energy_of,
    in_one_piece,
    is_differentiated,
    is_finite,
    is_native,
    piece_is_finite,
    potential_of,
    solve_natively,
)
from ..failure_policy import FailureSite, policy_of
from ..kernels.attention import loses_nan
from ..kernels.problem import Hopfield
from ..options import Plan
from ..solution import AdjointReport, Solution, SolveReport
from ..solvers import Outcome
from ..status import of_attention
from .call import Attended, Sources
from .read_out import LINE, is_laid_out, read_out, read_out_plain
from .training import columns_of, inputs_of, read_out_at


def eager() -> bool:
    """Whether torch runs eagerly, `unobserved`, and its attention is its own."""
    return F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention and unobserved()


def explicit(problem: Hopfield, values: Any, sources: Sources | None = None) -> Tensor | None:
    """The values read out at the query; None where it is left to `core`. Call while `eager`."""
    query, keys, beta, anchor, pairs, first = problem
    if pairs is not None or not problem.is_plain(values, numbers=sources is not None):
        return None
    query = query if in_one_piece(query) else query.contiguous()
    # A query that is not finite must read NaN, and kernels do not always return it.
    if query.data_ptr() % LINE or not piece_is_finite(query):
        return None
    # Keys and values that are not finite must not reach queries that do not attend to them.
    if (loses_nan(keys) or first is not None) and not is_finite(keys):
        return None
    if first is not None and not is_finite(values):
        return None
    columns = None if sources is None else columns_of(sources)
    output = read_out_plain(query, keys, values, beta, first, columns)
    return output + 0 * anchor.sum() if isinstance(anchor, Tensor) and anchor.requires_grad else output


def solved(
    problem: Hopfield,
    values: Any,
    initial: Tensor,
    plan: Plan,
    on_failure: Any,
    site: FailureSite | None = None,
    sources: Sources | None = None,
    *,
    report: bool = True,
    solution: bool = False,
) -> Attended | None:
    """Solve and read out, and report as `solve` does; None where it is left to `core`. Call while `eager`.

    sources: where beta and anchor come from, if they are learned and have no graph.
    report, solution: whether the caller wants these.
    """
    if not is_native(problem, plan.impl, values, numbers=sources is not None):
        return None
    if initial is not problem.field and not (
        are_plain(problem.field.dtype, initial) and initial.shape == problem.field.shape
    ):
        return None
    assert plan.rule is not None
    inputs = problem if sources is None or not torch.is_grad_enabled() else inputs_of(problem, sources)
    differentiated = is_differentiated(*inputs)
    counts = type(on_failure) is not str and policy_of(on_failure).counts
    reported = report or differentiated or counts
    answer = solve_natively(problem, initial, plan.rule, plan.impl, mean=differentiated, evidence=reported)
    if answer is None:
        return None
    state, mean, evidence, failed = answer
    if failed and evidence is None:
        # A failure needs evidence, which the first solve did not keep.
        return solved(problem, values, initial, plan, on_failure, site, sources)
    output, made, known = None, None, None
    if evidence is not None:
        later: dict[str, Callable[[], Any]] = {}
        if mean is not None:
            later["unsolved"] = lambda: evidence.record.failed
            if on_failure != "ignore":
                later["state_residual"] = lambda: evidence.residual
        awaited = mean is not None and not backward_running()
        adjoint = AdjointReport.deferred(later, on_failure=on_failure, site=site, awaited=awaited)
        if mean is not None:
            solve = NativeSolve(plan.solver, plan.impl, adjoint, failed == 0, evidence)
            if values is not None and not (failed or solution or counts) and _is_whole(problem, values):
                output = read_out_at(state, mean, values, problem, solve, sources, inputs)
            if output is None:
                if sources is not None:
                    beta, anchor = sources.recorded(problem.beta, problem.anchor)
                    problem = problem._replace(beta=beta, anchor=anchor)
                state = solve.states(problem, state, mean)
        if failed or counts:
            made = concluded(
                Outcome(state, evidence.record),
                plan.solver,
                plan.adjoint,
                adjoint,
                functools.partial(_energy, problem),
                failed=failed > 0,
                advice=of_attention,
            )
            state, known = made.value, made.report
        else:
            # Most reports are never read.
            later = {"record": lambda: evidence.record}
            told = {"adjoint": adjoint, "remedies": plan.remedies, "tolerances": (plan.solver.rtol, plan.solver.atol)}
            known = SolveReport.deferred(later, **told)
            if solution:
                fields = {"trace": None, "course": (), "energy_function": functools.partial(_energy, problem)}
                made = Solution.deferred(later, **told, value=state, **fields)
    if output is not None:
        return Attended(output, state, known, made)
    pairs, first = problem.mask, problem.first
    if values is None:
        output = state
    elif failed or pairs is not None or (first is not None and not is_finite(values)):
        output = read_out(potential_of(problem), state, values, 0.0)
    else:
        columns = None if differentiated else columns_of(sources)
        output = read_out_plain(state, problem.keys, values, problem.beta, first, columns)
    return Attended(output, state, known, made)


def _is_whole(problem: Hopfield, values: Tensor) -> bool:
    """Whether torch's kernel takes keys and values as they lie in memory, and no mask hides values from a query."""
    query, keys, _, _, pairs, first = problem
    if pairs is not None or not is_laid_out(query.shape, keys.shape, values.shape):
        return False
    return keys.is_contiguous() and values.is_contiguous() and (first is None or is_finite(values))


def _energy(problem: Hopfield, z: Tensor) -> Tensor:
    return energy_of(problem).energy(z)
