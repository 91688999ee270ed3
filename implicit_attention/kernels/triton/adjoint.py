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
from .attend import OverKeys
from .keys import KernelOperands, gradient_of_keys
from .layout import InMemory, Left, counted, in_order, step_tiles
from .solve import note
from .tile import LOG2E, UNFINISHED, any_of, kernel, narrow, power_of_two, query_tile, rest_of, scaled

CONVERGED = tl.constexpr(int(Status.CONVERGED))
MAX_STEPS = tl.constexpr(int(Status.MAX_STEPS))
STALLED = tl.constexpr(int(Status.STALLED))
NONFINITE = tl.constexpr(int(Status.NONFINITE))
EPS = tl.constexpr(torch.finfo(torch.float32).eps)
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
    product, chosen = OverKeys(placed, "product"), step_tiles(problem)
    operands = KernelOperands.allocated(empty, state.shape, placed.keys.memory.dtype)
    there = map(in_order, (state, mean, logsumexp, cotangent))
    course = Directions(*there, *(empty(n, dtype=torch.float32) for n in (*[state.shape] * 3, state.shape[:-1])))
    # Kernels write truth values as numbers.
    written = answer._replace(negative_curvature=answer.negative_curvature.view(torch.uint8))
    steps = counted(rule.max_steps)

    def run(step: int, left: Left) -> None:
        given = course, written, operands, left.noted, placed.beta, placed.anchor, rows, rule.rtol, steps, step
        kernel = _conjugate_kernel if step <= steps else _end_kernel
        placed.launch(kernel, left.programs(chosen), chosen, *given, picked=left.listed)

    left = Left(problem, answer.status, product.chosen)
    for step in range(steps + 1):
        if step:
            if not left.next():
                break
            product(left, *course[:3], course.search, course.spread, fine=rule.rtol < COARSE_RTOL)
        run(step, left)
    left = Left(problem, answer.status, product.chosen)
    product(left, *course[:3], answer.value, course.spread, fine=True)
    run(steps + 1, left)
    if keys.numel():
        gradient_of_keys(placed, operands, answer.by_keys)
    return answer


@triton.jit
def scaled_cotangent(cotangent, whole, inside):
    """A cotangent in the units of the power of two that brings it to order one; that is the first over the second."""
    g = tl.load(cotangent + whole, mask=inside, other=0.0)
    peak = tl.max(tl.abs(g), 1)
    # Subnormal cotangents are lifted first, as the reciprocal of their power of two is no number.
    lift = tl.where(peak < SMALLEST_LARGE, LIFT, 1.0)
    unit = power_of_two(peak * lift)
    return g * lift[:, None] / unit[:, None], unit, lift


@kernel
def _conjugate_kernel(
    course,
    answer,
    operands,
    left,
    beta,
    anchor,
    N: tl.int32,
    rtol: tl.float32,
    max_steps: tl.int32,
    step: tl.int32,
    P: tl.constexpr,
):
    """A step of conjugate gradients, in units of the cotangent; the first, before any product, leads from 0 to 0."""
    D: tl.constexpr = P.dim
    batch, _, first, local, dims, real, inside = query_tile(N, left, P)
    if not any_of(real):
        return
    at, whole = batch * N + first + local, (batch * N + first) * D + local[:, None] * D + dims[None, :]
    begun = real & (local * 0 + step > 0)
    known = inside & begun[:, None]
    by_cov = (1.0 - tl.load(anchor + batch)) * tl.load(beta + batch)
    p = tl.load(course.search + whole, mask=known, other=0.0)
    moved = p - by_cov * tl.load(course.spread + whole, mask=known, other=0.0)
    g, _, _ = scaled_cotangent(course.cotangent, whole, inside & ~known)
    r = g + tl.load(course.remainder + whole, mask=known, other=0.0)
    value = tl.load(answer.value + whole, mask=known, other=0.0)
    square = tl.load(course.square + at, mask=begun, other=1.0)
    tolerance = tl.load(answer.tolerance + at, mask=begun, other=0.0)
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
    tl.store(answer.value + whole, value, mask=inside)
    tl.store(course.remainder + whole, r, mask=inside)
    tl.store(course.search + whole, r + (reached / square)[:, None] * p, mask=inside)
    tl.store(course.square + at, reached, mask=real)
    tl.store(answer.tolerance + at, tolerance, mask=real)
    tl.store(answer.num_steps + at, local * 0 + step, mask=real)
    tl.store(answer.negative_curvature + at, blocked.to(tl.uint8), mask=real)
    tl.store(left.status + at, tl.where(still, UNFINISHED, MAX_STEPS).to(tl.int8), mask=real)
    note(still, 0, local + first, batch, N, left, P)


@kernel
def _end_kernel(
    course,
    answer,
    operands,
    left,
    beta,
    anchor,
    N: tl.int32,
    rtol: tl.float32,
    max_steps: tl.int32,
    step: tl.int32,
    P: tl.constexpr,
):
    """The residual of u, its gradients, and what the kernel for the keys reads; `spread` is the product with u."""
    D: tl.constexpr = P.dim
    batch, _, first, local, dims, real, inside = query_tile(N, left, P)
    at, whole = batch * N + first + local, (batch * N + first) * D + local[:, None] * D + dims[None, :]
    b, rest = tl.load(beta + batch), 1.0 - tl.load(anchor + batch)
    g, unit, lift = scaled_cotangent(course.cotangent, whole, inside)
    value = tl.load(answer.value + whole, mask=inside, other=0.0)
    z = tl.load(course.state + whole, mask=inside, other=0.0)
    m = tl.load(course.mean + whole, mask=inside, other=0.0)
    product = tl.load(course.spread + whole, mask=inside, other=0.0)
    tolerance = tl.load(answer.tolerance + at, mask=real, other=0.0)
    blocked = tl.load(answer.negative_curvature + at, mask=real, other=0) != 0
    steps = tl.load(answer.num_steps + at, mask=real, other=0)
    tl.debug_barrier()  # every thread has read what another may write
    r = g - (value - rest * b * product)
    size = tl.sqrt(tl.sum(g * g, 1))
    # A row without a cotangent adds nothing, even if it is not finite.
    idle = size == 0.0
    residual = tl.where(idle, 0.0, tl.sqrt(tl.sum(r * r, 1)))
    finite = residual < float("inf")
    solved = finite & (residual <= SLACK * tolerance) & ~blocked
    stalled = finite & ~solved & (blocked | (steps < max_steps))
    end = tl.where(solved, CONVERGED, tl.where(stalled, STALLED, tl.where(finite, MAX_STEPS, NONFINITE)))
    dropped = stalled | idle
    by_beta = tl.where(dropped, 0.0, rest * tl.sum(z * product, 1))
    tl.store(left.status + at, end.to(tl.int8), mask=real)
    tl.store(answer.residual + at, tl.where(stalled, size, residual) * unit / lift, mask=real)
    tl.store(answer.tolerance + at, tolerance * unit / lift, mask=real)
    tl.store(answer.by_beta + at, by_beta * unit / lift, mask=real)
    # A row that is not finite gives NaN.
    value = tl.where(dropped[:, None], 0.0, tl.where(finite[:, None], value, float("nan")))
    tl.store(answer.value + whole, value * unit[:, None] / lift[:, None], mask=inside)
    # z and u' = (1 - anchor) u as operands, and <mean, u'>. A query that adds nothing has probabilities exp2(-inf),
    # even if it is not finite.
    y, scale = scaled(tl.where(dropped[:, None], 0.0, z), P)
    high = narrow(y, P)
    tl.store(operands.state + whole, high, mask=inside)
    if P.half:
        tl.store(operands.state_rest + whole, rest_of(y, high), mask=inside)
    level = tl.load(course.logsumexp + at, mask=real, other=0.0) * LOG2E
    tl.store(operands.state_scale + at, scale, mask=real)
    tl.store(operands.shift + at, tl.where(dropped, float("inf"), level), mask=real)
    value = rest * value
    if P.half:
        _, u_scale = scaled(tl.where(finite[:, None], value, 0.0), P)
        u = narrow(value * (1.0 / u_scale)[:, None], P)
        # Products of a tile are in units of its largest scale.
        tl.store(operands.value_scale + at, tl.where(dropped, 0.0, u_scale * unit / lift), mask=real)
    else:
        u = value * unit[:, None] / lift[:, None]
    tl.store(operands.value + whole, u, mask=inside)
    centre = tl.sum(m * u.to(tl.float32), 1)
    tl.store(operands.centre + at, tl.where(dropped, 0.0, centre), mask=real)
