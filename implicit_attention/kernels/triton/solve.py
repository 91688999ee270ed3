"""The solve of every query: evaluations over the keys, and between two of them a step, in a kernel of its own."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import types
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...solution import Status
from .. import rule, trust
from ..problem import FLOOR, Attention, FusedRule, Solved
from .attend import OverKeys
from .layout import InMemory, Left, counted, in_order, step_tiles
from .tile import INF, SMALLEST_NORMAL, UNFINISHED, any_of, kernel, power_of_two, query_tile, read, write

CONVERGED = tl.constexpr(int(Status.CONVERGED))
DIVERGED = tl.constexpr(int(Status.DIVERGED))
NONFINITE = tl.constexpr(int(Status.NONFINITE))
EPS = tl.constexpr(torch.finfo(torch.float32).eps)
# Squares of shorter vectors have lost digits to underflow.
LEAST = tl.constexpr(2.0**-51)
MOST_UNIT = tl.constexpr(2.0**100)
# In half precision rounding may be all that is left of a coarse residual that is so small a part of |f(z)|. After so
# many steps products are fine anyway: scores may be too large for coarse ones.
ROUNDING = tl.constexpr(1e-3)
PATIENCE = tl.constexpr(24)
# Fine residuals are true to this part of |f(z)|.
KNOWN_TO = tl.constexpr(FLOOR)


def _compiled(*functions: Any) -> Any:
    """The last of these functions of `rule` for Triton, in whose names it finds those before."""
    names = {name: tl.constexpr(number) for name, number in vars(rule).items() if name.isupper()}
    names |= {"__name__": __name__, "lang": tl, "Tensor": tl.tensor, "Truth": tl.tensor}
    for function in functions:
        # The same code, which looks its names up elsewhere.
        copied = types.FunctionType(function.__code__, names, function.__name__)
        names[function.__name__] = triton.jit(copied)
    return names[functions[-1].__name__]


decide = _compiled(rule.rounding_of, rule.descends, rule.shortened, rule.promises, rule.decide)


class Points(NamedTuple):
    """The point where f is evaluated next, and its evaluation; of the last accepted point the energy."""

    field: Tensor
    state: Tensor
    mean: Tensor
    logsumexp: Tensor
    energy: Tensor
    tried: Tensor  # whether the step to the point is accelerated


def solve(problem: Attention, initial: Tensor, stop: FusedRule) -> Solved:
    """Solve every query from `initial`, (*batch, N, D), without waiting for the device; answers are float32."""
    stop = stop._replace(max_steps=counted(stop.max_steps), plain_steps=counted(stop.plain_steps))
    field, rows = problem.query, problem.query.shape[-2]
    empty = partial(trust.empty, device=field.device, dtype=torch.float32)
    answer = Solved.allocated(partial(trust.empty, device=field.device), field.shape, torch.float32)
    if field.numel() == 0:
        return answer
    placed = InMemory.of(problem)
    evaluate, chosen = OverKeys(placed, "evaluate"), step_tiles(problem)
    left = Left(problem, answer.status, evaluate.chosen, fine=stop.max_steps == 0)
    point = initial.resolve_neg().to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    logsumexp, energy = empty(field.shape[:-1]).fill_(torch.nan), empty(field.shape[:-1])
    tried = trust.empty(field.shape[:-1], device=field.device, dtype=torch.int8)
    course = Points(in_order(field).float(), point, empty(field.shape), logsumexp, energy, tried)
    earliest = stop.max_steps + 1 if stop.fixed_budget else 0
    for step in range(stop.max_steps + 1):
        if step and not left.next():
            break
        evaluate(left, course)
        given = course, answer, left.noted, placed.numbers, rows, *stop, step, int(stop.exhausted), earliest
        placed.launch(_step_kernel, left.programs(chosen), chosen, *given, picked=left.listed)
    return answer


@triton.jit
def length(x):
    """The lengths of rows, whose squares may underflow or overflow."""
    unit = tl.minimum(tl.maximum(power_of_two(tl.max(tl.abs(x), 1)), SMALLEST_NORMAL), MOST_UNIT)
    scaled = x * (1.0 / unit)[:, None]
    return unit * tl.sqrt(tl.sum(scaled * scaled, 1))


@triton.jit
def note(still, end, local, batch, N, left, P: tl.constexpr):
    """Note the queries of the tile that are left for the next step, at the start of the list or (end 1) at its end."""
    number = still.to(tl.int32)
    counts = left.next_counts + 2 * batch + end
    place = tl.atomic_add(counts, tl.sum(number, 0), sem="relaxed") + tl.cumsum(number, 0) - 1
    if P.picked:
        if end:
            place = N - 1 - place
        write(left.next_order + batch * N + place, local, still)


@kernel
def _step_kernel(
    course,
    answer,
    left,
    numbers,
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
    """From the evaluation at a point to the next point; the answer holds the last accepted one and its evaluation."""
    batch, _, first, local, _, real, at, whole, inside = query_tile(N, left, P)
    if not any_of(real):
        return
    b, a = tl.load(numbers + 2 * batch), tl.load(numbers + 2 * batch + 1)
    # Before there is an accepted point, and without an anchor, nothing is read, so that NaN there does not matter.
    index = local * 0 + step
    known, anchored = real & (index >= plain_steps), inside & (local * 0.0 + a != 0.0)[:, None]
    based = inside & known[:, None]
    z = read(course.state + whole, inside)
    m = read(course.mean + whole, inside)
    ax = a * read(course.field + whole, anchored)
    base_m = read(answer.mean + whole, based)
    dz = z - read(answer.state + whole, based)
    level = read(course.logsumexp + at, real)
    before = read(course.energy + at, known)
    residual_before = read(answer.residual + at, real & (index > 0))
    tried = read(course.tried + at, known) != 0
    fine = real
    if P.half:
        fine = real & (read(left.fine + at, real) != 0)
    tl.debug_barrier()  # every thread has read what another may write

    f = ax + (1.0 - a) * m
    r, df = f - z, (1.0 - a) * (m - base_m)
    dr = df - dz
    residual, size = length(r), length(f)
    tolerance = atol + rtol * size
    finite = (residual < INF) & (tolerance < INF)
    energy = tl.sum(z * (0.5 * z - ax), 1) - (1.0 - a) / b * level
    # -grad E = r.
    trapezoid, across, turned = tl.sum((r - 0.5 * dr) * dz, 1), tl.sum(dr * r, 1), tl.sum(dr * dr, 1)
    sums = trapezoid, across, turned, tl.sum(r * df, 1), tl.sum(df * df, 1), tl.sum(dz * dr, 1)
    # The last step of a budget is plain: it is never rejected.
    truths = finite, tried, known & (index + 1 < max_steps)
    square, past, units = tl.sum(r * r, 1), (before, residual_before), (EPS, SMALLEST_NORMAL, LEAST)
    accepted, tries, by_r, by_df = decide(square, residual, energy, *sums, *past, *truths, *units)

    # In half precision what a residual is not known to counts against it.
    reached = residual <= (tolerance - KNOWN_TO * size if P.half else tolerance)
    solved = accepted & finite & fine & reached & (index >= earliest)
    broken = accepted & ~finite
    still = real & ~solved & ~broken & (index < max_steps)
    end = tl.where(broken, tl.where(index > 0, DIVERGED, NONFINITE), tl.where(still, UNFINISHED, exhausted))
    write(left.status + at, tl.where(solved, CONVERGED, end), real)
    write(answer.num_evals + at, index + 1, real)
    better = real & accepted & (finite | (index == 0))
    write(answer.state + whole, tl.where(finite[:, None], z, float("nan")), inside & better[:, None])
    write(answer.mean + whole, m, inside & better[:, None])
    write(answer.logsumexp + at, level, better)
    write(answer.residual + at, residual, better)
    write(answer.tolerance + at, tolerance, better)
    write(answer.num_steps + at, index, better)
    write(course.energy + at, energy, better)
    write(course.tried + at, tries, real)
    plain = ax + (1.0 - a) * tl.where(accepted[:, None], m, base_m)
    fast = z + by_r[:, None] * r - by_df[:, None] * df
    write(course.state + whole, tl.where(tries[:, None], fast, plain), inside & still[:, None])
    if P.half:
        # Only fine residuals are true. The next one may be within the tolerance if it shrinks as this one did.
        near = (residual <= tl.maximum(tolerance, ROUNDING * size)) | (
            residual * (residual / residual_before) <= tolerance
        )
        fine = fine | (accepted & near) | (index >= PATIENCE) | (index + 1 >= max_steps)
        write(left.fine + at, fine, real)
        note(still & fine, 1, local + first, batch, N, left, P)
        still = still & ~fine
    note(still, 0, local + first, batch, N, left, P)
