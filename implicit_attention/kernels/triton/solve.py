"""The solve of every query: evaluations over the keys, and between two of them a step, in a kernel of its own."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import types
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import _rule
from ..._fused_rule import FusedRule
from ...status import Status
from .. import trust
from ..problem import Attention, Solved
from .attend import SMALLEST_NORMAL, UNFINISHED, OverKeys, any_of, batch_offset, kernel, power_of_two, query_tile
from .layout import KernelLayout, Left, counted, in_memory, in_order, launch, step_tiles

CONVERGED = tl.constexpr(int(Status.CONVERGED))
DIVERGED = tl.constexpr(int(Status.DIVERGED))
NONFINITE = tl.constexpr(int(Status.NONFINITE))
EPS = tl.constexpr(torch.finfo(torch.float32).eps)
# Squares of shorter vectors have lost digits to underflow.
LEAST = tl.constexpr(2.0**-51)
MOST_UNIT = tl.constexpr(2.0**100)


def _compiled(*functions: Any) -> Any:
    """The last of these functions of `_rule` for Triton, in whose names it finds those before."""
    names = {name: tl.constexpr(number) for name, number in vars(_rule).items() if name.isupper()}
    names |= {"__name__": __name__, "lang": tl, "Tensor": tl.tensor, "Truth": tl.tensor}
    for function in functions:
        # The same code, which looks its names up elsewhere.
        copied = types.FunctionType(function.__code__, names, function.__name__)
        names[function.__name__] = triton.jit(copied)
    return names[functions[-1].__name__]


decide = _compiled(_rule.rounding_of, _rule.descends, _rule.shortened, _rule.promises, _rule.decide)


def solve(problem: Attention, initial: Tensor, stop: FusedRule) -> Solved:
    """Solve every query from `initial`, (*batch, N, D), without waiting for the device; answers are float32."""
    problem = in_memory(problem)
    stop = stop._replace(max_steps=counted(stop.max_steps), plain_steps=counted(stop.plain_steps))
    field, rows = problem.query, problem.query.shape[-2]
    empty = partial(trust.empty, device=field.device)
    answer = Solved.allocated(empty, field.shape, torch.float32)
    if field.numel() == 0:
        return answer
    layout = KernelLayout.of(problem)
    assert layout is not None
    evaluate, chosen = OverKeys(problem, layout, "evaluate"), step_tiles(problem)
    left = Left(problem, answer.status, evaluate.chosen)
    # Where f is evaluated next, and what is found there.
    point = initial.resolve_neg().to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    mean = empty(field.shape, dtype=torch.float32)
    logsumexp = empty(field.shape[:-1], dtype=torch.float32).fill_(torch.nan)
    carried = (empty(field.shape[:-1], dtype=kind) for kind in (torch.float32, torch.int8))
    given = in_order(field).float(), point, mean, logsumexp, problem.beta, *layout.beta, problem.anchor, *layout.anchor
    given += *answer[:3], *answer[4:], *carried
    programs = answer.status.numel() // rows * triton.cdiv(rows, chosen.rows)
    earliest = stop.max_steps + 1 if stop.fixed_budget else 0
    for step in range(stop.max_steps + 1):
        evaluate(left, point, mean, logsumexp)
        numbers = *layout.sizes[1:], rows, *stop, step, int(stop.exhausted), earliest
        launch(_step_kernel, programs, chosen, problem, *given, *left.placed(), *numbers, picked=left.listed)
        if not left.next():
            break
    return answer


@triton.jit
def length(x):
    """The lengths of rows, whose squares may underflow or overflow."""
    unit = tl.minimum(tl.maximum(power_of_two(tl.max(tl.abs(x), 1)), SMALLEST_NORMAL), MOST_UNIT)
    scaled = x * (1.0 / unit)[:, None]
    return unit * tl.sqrt(tl.sum(scaled * scaled, 1))


@triton.jit
def note(left, local, batch, N, next_order, next_counts, P: tl.constexpr):
    """Note the queries of the tile that are left, for the next step."""
    number = left.to(tl.int32)
    place = tl.atomic_add(next_counts + batch, tl.sum(number, 0), sem="relaxed") + tl.cumsum(number, 0) - 1
    if P.picked:
        tl.store(next_order + batch * N + place, local, mask=left)


@kernel
def _step_kernel(
    field,
    point,
    mean,
    logsumexp,
    beta,
    beta_0: tl.int64,
    beta_1: tl.int64,
    beta_2: tl.int64,
    anchor,
    anchor_0: tl.int64,
    anchor_1: tl.int64,
    anchor_2: tl.int64,
    state_out,
    mean_out,
    logsumexp_out,
    residual_out,
    tolerance_out,
    num_steps_out,
    num_evals_out,
    energy_out,
    tried_out,
    status,
    order,
    counts,
    next_order,
    next_counts,
    middle: tl.int32,
    inner: tl.int32,
    N: tl.int32,
    rtol: tl.float32,
    atol: tl.float32,
    max_steps: tl.int32,
    plain_steps: tl.int32,
    step: tl.int32,
    exhausted: tl.int32,
    earliest: tl.int32,
    P: tl.constexpr,
):
    """From the evaluation at `point` to the next point; the outputs hold the last accepted one and its evaluation."""
    ROWS: tl.constexpr = P.rows
    batch, _, first, local, dims, real, inside = query_tile(N, status, order, counts, P)
    if not any_of(real):
        return
    at, start = batch * N + first + local, (batch * N + first) * P.dim
    whole = start + local[:, None] * P.dim + dims[None, :]
    b = tl.load(beta + batch_offset(batch, (middle, inner), (beta_0, beta_1, beta_2)))
    a = tl.load(anchor + batch_offset(batch, (middle, inner), (anchor_0, anchor_1, anchor_2)))
    # Before there is an accepted point, and without an anchor, nothing is read, so that NaN there does not matter.
    index = tl.zeros([ROWS], tl.int32) + step
    known = real & (index >= plain_steps)
    based = inside & known[:, None]
    z = tl.load(point + whole, mask=inside, other=0.0)
    m = tl.load(mean + whole, mask=inside, other=0.0)
    ax = a * tl.load(field + whole, mask=inside & (tl.zeros([ROWS], tl.float32) + a != 0.0)[:, None], other=0.0)
    base_m = tl.load(mean_out + whole, mask=based, other=0.0)
    dz = z - tl.load(state_out + whole, mask=based, other=0.0)
    level = tl.load(logsumexp + at, mask=real, other=0.0)
    before = tl.load(energy_out + at, mask=known, other=0.0)
    residual_before = tl.load(residual_out + at, mask=known, other=0.0)
    tried = tl.load(tried_out + at, mask=known, other=0) != 0
    tl.debug_barrier()  # every thread has read what another may write

    f = ax + (1.0 - a) * m
    r = f - z
    df = (1.0 - a) * (m - base_m)
    dr = df - dz
    residual, tolerance = length(r), atol + rtol * length(f)
    finite = (residual < float("inf")) & (tolerance < float("inf"))
    energy = tl.sum(z * (0.5 * z - ax), 1) - (1.0 - a) / b * level
    accepted, tries, by_r, by_df = decide(
        tl.sum(r * r, 1),
        residual,
        energy,
        tl.sum((r - 0.5 * dr) * dz, 1),  # of -grad E = r
        tl.sum(dr * r, 1),
        tl.sum(dr * dr, 1),
        tl.sum(r * df, 1),
        tl.sum(df * df, 1),
        tl.sum(dz * dr, 1),
        before,
        residual_before,
        finite,
        tried,
        known & (index + 1 < max_steps),  # the last step of a budget is plain: it is never rejected
        EPS,
        SMALLEST_NORMAL,
        LEAST,
    )

    solved = accepted & finite & (residual <= tolerance) & (index >= earliest)
    broken = accepted & ~finite
    left = real & ~solved & ~broken & (index < max_steps)
    end = tl.where(left, UNFINISHED, exhausted)
    end = tl.where(broken, tl.where(index > 0, DIVERGED, NONFINITE), end)
    tl.store(status + at, tl.where(solved, CONVERGED, end).to(tl.int8), mask=real)
    tl.store(num_evals_out + at, index + 1, mask=real)
    write = real & accepted & (finite | (index == 0))
    tl.store(state_out + whole, tl.where(finite[:, None], z, float("nan")), mask=inside & write[:, None])
    tl.store(mean_out + whole, m, mask=inside & write[:, None])
    tl.store(logsumexp_out + at, level, mask=write)
    tl.store(residual_out + at, residual, mask=write)
    tl.store(tolerance_out + at, tolerance, mask=write)
    tl.store(num_steps_out + at, index, mask=write)
    tl.store(energy_out + at, energy, mask=write)
    tl.store(tried_out + at, tries.to(tl.int8), mask=real)
    plain = ax + (1.0 - a) * tl.where(accepted[:, None], m, base_m)
    fast = z + by_r[:, None] * r - by_df[:, None] * df
    tl.store(point + whole, tl.where(tries[:, None], fast, plain), mask=inside & left[:, None])
    note(left, local + first, batch, N, next_order, next_counts, P)
