"""The adjoint solve of every query: products with the Hessian, between two of them a step of conjugate gradients."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...solution import Status
from .. import trust
from ..problem import AdjointAnswer, AdjointRule, Attention
from .attend import KernelOperands, OverKeys, gradient_of_keys
from .layout import InMemory, Left, counted, in_order, step_tiles
from .solve import CONVERGED, EPS, NONFINITE, note
from .tile import INF, LOG2E, UNFINISHED, any_of, kernel, narrow, power_of_two, query_tile, read, rest_of, scaled, write

MAX_STEPS = tl.constexpr(int(Status.MAX_STEPS))
STALLED = tl.constexpr(int(Status.STALLED))
# A curvature below this times eps |p|^2 is rounding or negative.
NOISE = tl.constexpr(10.0)
# Rounding may keep the recomputed residual above the tolerance by this factor, where the recurrence is below it.
SLACK = tl.constexpr(10.0)
# Cotangents below this are multiplied by a power of two.
SMALLEST_LARGE = tl.constexpr(2.0**-60)
LIFT = tl.constexpr(2.0**64)
# In half precision coarse products carry no finer tolerance.
COARSE_RTOL = 1e-3


class Directions(NamedTuple):
    """The evaluation at a solution, its cotangent, a direction, the covariance of the keys times it, and residuals."""

    state: Tensor
    mean: Tensor
    logsumexp: Tensor
    cotangent: Tensor
    search: Tensor
    spread: Tensor
    remainder: Tensor
    square: Tensor


def solve_adjoint(
    problem: Attention, state: Tensor, cotangent: Tensor, mean: Tensor, logsumexp: Tensor, rule: AdjointRule
) -> AdjointAnswer:
    """Solve A u = cotangent (*batch, N, D) for every query; mean and logsumexp are those at the state. All is float32.

    Queries that stall, saddles above all, have u = 0 and add nothing to the gradients: they wait for another method.
    One that is not finite makes the gradient of all keys in its reach NaN.
    """
    keys, rows = problem.keys, state.shape[-2]
    empty = partial(trust.empty, device=keys.device)
    answer = AdjointAnswer.allocated(empty, state.shape, keys.shape, torch.float32)
    if state.numel() == 0:
        answer.by_keys.zero_()
        return answer
    placed = InMemory.of(problem)
    multiply, chosen = OverKeys(placed, "product"), step_tiles(problem)
    rows_of = (empty(state.shape, dtype=placed.keys.memory.dtype) for _ in range(3))
    operands = KernelOperands(*rows_of, *(empty(state.shape[:-1], dtype=torch.float32) for _ in range(4)))
    there = map(in_order, (state, mean, logsumexp, cotangent))
    course = Directions(*there, *(empty(n, dtype=torch.float32) for n in (*[state.shape] * 3, state.shape[:-1])))
    steps = counted(rule.max_steps)
    left = Left(problem, answer.status, multiply.chosen)
    for step in range(steps + 1):
        if step:
            if not left.next():
                break
            multiply(left, course, fine=rule.rtol < COARSE_RTOL)
        given = left.noted, placed.numbers, rows, rule.rtol, steps, step
        placed.launch(_conjugate_kernel, left.programs(chosen), chosen, course, answer, *given, picked=left.listed)
    left = Left(problem, answer.status, multiply.chosen)
    multiply(left, course._replace(search=answer.value), fine=True)
    of_all = course, answer, operands, left.noted, placed.numbers, rows, steps
    placed.launch(_end_kernel, left.programs(chosen), chosen, *of_all, picked=left.listed)
    if keys.numel():
        gradient_of_keys(placed, operands, answer.by_keys)
    return answer


@triton.jit
def scaled_cotangent(cotangent, whole, inside):
    """A cotangent in units of the power of two that brings it to order one, and that."""
    g = read(cotangent + whole, inside)
    peak = tl.max(tl.abs(g), 1)
    # Subnormal cotangents are lifted first, as the reciprocal of their power of two is no number.
    lift = tl.where(peak < SMALLEST_LARGE, LIFT, 1.0)
    unit = power_of_two(peak * lift)
    return g * lift[:, None] / unit[:, None], unit / lift


@kernel
def _conjugate_kernel(
    course, answer, left, numbers, N: tl.int32, rtol: tl.float32, max_steps: tl.int32, step: tl.int32, P: tl.constexpr
):
    """A step of conjugate gradients, in units of the cotangent; the first, before any product, leads from 0 to 0."""
    batch, _, first, local, _, real, at, whole, inside = query_tile(N, left, P)
    if not any_of(real):
        return
    begun = real & (local * 0 + step > 0)
    known = inside & begun[:, None]
    by_cov = (1.0 - tl.load(numbers + 2 * batch + 1)) * tl.load(numbers + 2 * batch)
    p = read(course.search + whole, known)
    moved = p - by_cov * read(course.spread + whole, known)
    g, _ = scaled_cotangent(course.cotangent, whole, inside & ~known)
    r = g + read(course.remainder + whole, known)
    value = read(answer.value + whole, known)
    square = tl.load(course.square + at, mask=begun, other=1.0)
    tolerance = read(answer.tolerance + at, begun)
    tl.debug_barrier()  # every thread has read what another may write
    curvature = tl.sum(p * moved, 1)
    # A NaN is not blocked: it goes on into the residual and is seen there.
    blocked = begun & (curvature <= NOISE * EPS * tl.sum(p * p, 1))
    rate = tl.where(begun & ~blocked, square / curvature, 0.0)
    r -= rate[:, None] * moved
    reached = tl.sum(r * r, 1)
    tolerance = tl.where(begun, tolerance, rtol * tl.sqrt(reached))
    still = real & ~blocked & (reached > tolerance * tolerance) & (local * 0 + step < max_steps)
    value += rate[:, None] * p
    if P.half:
        # A = I - B with 0 <= B < 1 leaves B r of a residual r at u + r: one step more, for no product.
        value += tl.where(still[:, None], 0.0, r)
    write(answer.value + whole, value, inside)
    write(course.remainder + whole, r, inside)
    write(course.search + whole, r + (reached / square)[:, None] * p, inside)
    write(course.square + at, reached, real)
    write(answer.tolerance + at, tolerance, real)
    write(answer.num_steps + at, local * 0 + step, real)
    write(answer.negative_curvature + at, blocked, real)
    write(left.status + at, tl.where(still, UNFINISHED, MAX_STEPS), real)
    note(still, 0, local + first, batch, N, left, P)


@kernel
def _end_kernel(course, answer, operands, left, numbers, N: tl.int32, max_steps: tl.int32, P: tl.constexpr):
    """The residual of u, its gradients, and what the kernel for the keys reads; `spread` is the product with u."""
    batch, _, _, _, _, real, at, whole, inside = query_tile(N, left, P)
    b, rest = tl.load(numbers + 2 * batch), 1.0 - tl.load(numbers + 2 * batch + 1)
    g, unit = scaled_cotangent(course.cotangent, whole, inside)
    value = read(answer.value + whole, inside)
    z = read(course.state + whole, inside)
    m = read(course.mean + whole, inside)
    spread = read(course.spread + whole, inside)
    tolerance = read(answer.tolerance + at, real)
    blocked = read(answer.negative_curvature + at, real)
    steps = read(answer.num_steps + at, real)
    tl.debug_barrier()  # every thread has read what another may write
    r = g - (value - rest * b * spread)
    size = tl.sqrt(tl.sum(g * g, 1))
    # A row without a cotangent adds nothing, even if it is not finite.
    idle = size == 0.0
    residual = tl.where(idle, 0.0, tl.sqrt(tl.sum(r * r, 1)))
    finite = residual < INF
    solved = finite & (residual <= SLACK * tolerance) & ~blocked
    stalled = finite & ~solved & (blocked | (steps < max_steps))
    end = tl.where(solved, CONVERGED, tl.where(stalled, STALLED, tl.where(finite, MAX_STEPS, NONFINITE)))
    dropped = stalled | idle
    by_beta = tl.where(dropped, 0.0, rest * tl.sum(z * spread, 1))
    write(left.status + at, end, real)
    write(answer.residual + at, tl.where(stalled, size, residual) * unit, real)
    write(answer.tolerance + at, tolerance * unit, real)
    write(answer.by_beta + at, by_beta * unit, real)
    # A row that is not finite gives NaN.
    value = tl.where(dropped[:, None], 0.0, tl.where(finite[:, None], value, float("nan")))
    write(answer.value + whole, value * unit[:, None], inside)
    # z and u' = (1 - anchor) u as operands, and <mean, u'>. A query that adds nothing has probabilities exp2(-inf),
    # even if it is not finite.
    y, scale = scaled(tl.where(dropped[:, None], 0.0, z), P)
    high = narrow(y, P)
    write(operands.state + whole, high, inside)
    if P.half:
        write(operands.state_rest + whole, rest_of(y, high), inside)
    level = read(course.logsumexp + at, real) * LOG2E
    write(operands.state_scale + at, scale, real)
    write(operands.shift + at, tl.where(dropped, INF, level), real)
    value = rest * value
    if P.half:
        _, u_scale = scaled(tl.where(finite[:, None], value, 0.0), P)
        u = narrow(value * (1.0 / u_scale)[:, None], P)
        # Products of a tile are in units of its largest scale.
        write(operands.value_scale + at, tl.where(dropped, 0.0, u_scale * unit), real)
    else:
        u = value * unit[:, None]
    write(operands.value + whole, u, inside)
    centre = tl.sum(m * u.to(tl.float32), 1)
    write(operands.centre + at, tl.where(dropped, 0.0, centre), real)
