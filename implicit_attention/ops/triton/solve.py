"""The solve as one kernel: a tile of queries stays on the chip until its last query is done, the keys stream past."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import _safeguard
from ..._fused_rule import FusedRule
from ...status import Status
from .. import trust
from ..problem import Hopfield
from ..rule import Solved
from .kernels import attend, batch_offset, query_tile
from .layout import KernelLayout, in_memory, in_order, launch, offset_of, placed, tiles

CONVERGED = tl.constexpr(int(Status.CONVERGED))
DIVERGED = tl.constexpr(int(Status.DIVERGED))
NONFINITE = tl.constexpr(int(Status.NONFINITE))
DESCENT = tl.constexpr(_safeguard.DESCENT)
ENERGY_SLACK = tl.constexpr(_safeguard.ENERGY_SLACK)
STRETCH = tl.constexpr(_safeguard.STRETCH)
SLOPE = tl.constexpr(_safeguard.SLOPE)
LONGEST = tl.constexpr(_safeguard.LONGEST)
EPS = tl.constexpr(torch.finfo(torch.float32).eps)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
# Squares of shorter vectors have lost digits to underflow; times POWER these are far from that.
LEAST = tl.constexpr(2.0**-51)
POWER = tl.constexpr(2.0**80)


def solve(problem: Hopfield, initial: Tensor, stop: FusedRule) -> Solved:
    """Solve every query from `initial`, (*batch, N, D), without waiting for the device; answers are float32."""
    problem = in_memory(problem)
    field, count = problem.field, problem.keys.shape[-2]
    answer = Solved.allocated(partial(trust.empty, device=field.device), field.shape, torch.float32)
    if field.numel() == 0:
        return answer
    layout = KernelLayout.of(problem)
    assert layout is not None
    chosen, rows = tiles("solve", problem), field.shape[-2]
    launch(
        _solve_kernel,
        answer.status.numel() // rows * triton.cdiv(rows, chosen.rows),
        chosen,
        problem,
        *(
            field,
            layout.field,
            in_order(initial),
            *placed(problem, layout),
            *answer,
            layout.sizes,
            rows,
            count,
            offset_of(problem),
        ),
        *(*stop, int(stop.exhausted), stop.fixed_budget),
    )
    return answer


@triton.jit
def _length(rows, square):
    """The length of each row, (ROWS, D) -> (ROWS), whose `square` may have underflown or overflown."""
    unit = tl.where(square < LEAST * LEAST, POWER, tl.where(square < float("inf"), 1.0, 1.0 / POWER))
    scaled = rows * unit[:, None]
    return tl.sqrt(tl.sum(scaled * scaled, 1)) / unit


@triton.jit(do_not_specialize=["N", "M", "offset", "rtol", "atol", "max_steps", "plain_steps", "exhausted"])
def _solve_kernel(
    field,
    field_strides,
    initial,
    keys,
    keys_strides,
    beta,
    beta_strides,
    anchor,
    anchor_strides,
    mask,
    mask_strides,
    state_out,
    mean_out,
    logsumexp_out,
    status_out,
    residual_out,
    tolerance_out,
    num_steps_out,
    num_evals_out,
    sizes,
    N,
    M,
    offset,
    rtol,
    atol,
    max_steps,
    plain_steps,
    exhausted,
    FIXED: tl.constexpr,
    P: tl.constexpr,
):
    """Per query the iteration of `solvers.Anderson(history=1)` on an energy with a convex potential.

    The outputs hold the last accepted point and what was measured there. They are also where the next step reads the
    point that it started from, which frees the registers of two tiles.
    """
    ROWS: tl.constexpr = P.rows
    D: tl.constexpr = P.dim
    batch, first, local, dims, real, inside = query_tile(N, P)
    begin = batch * N + first
    places = local[:, None] * D + dims[None, :]
    state_at, mean_at = state_out + begin * D + places, mean_out + begin * D + places

    b = tl.load(beta + batch_offset(batch, sizes, beta_strides)).to(tl.float32)
    a = tl.load(anchor + batch_offset(batch, sizes, anchor_strides)).to(tl.float32)
    field += batch_offset(batch, sizes, field_strides) + first.to(tl.int64) * field_strides[3]
    field_at = field + local[:, None] * field_strides[3] + dims[None, :] * field_strides[4]
    # Without an anchor the field is not read, so that NaN in it does not matter.
    anchored = inside & (tl.zeros([ROWS], tl.float32) + a != 0.0)[:, None]
    key_rows = (keys + batch_offset(batch, sizes, keys_strides), keys_strides[3], keys_strides[4])
    pairs = (mask + batch_offset(batch, sizes, mask_strides), mask_strides[3], mask_strides[4], offset)

    z = tl.load(initial + begin * D + places, mask=inside, other=0.0).to(tl.float32)
    active = real
    accelerated = local < 0
    base_energy = tl.zeros([ROWS], tl.float32)
    base_residual = tl.zeros([ROWS], tl.float32)
    step = 0
    running = True
    while running:
        index = tl.zeros([ROWS], tl.int32) + step
        mean, logsumexp = attend(z, b, first, key_rows, pairs, N, M, P)
        x = tl.load(field_at, mask=anchored, other=0.0).to(tl.float32)
        f = a * x + (1.0 - a) * mean
        r = f - z
        square = tl.sum(r * r, 1)
        residual = _length(r, square)
        tolerance = atol + rtol * _length(f, tl.sum(f * f, 1))
        finite = (residual < float("inf")) & (tolerance < float("inf"))
        energy = tl.sum(z * (0.5 * z - a * x), 1) - (1.0 - a) / b * logsumexp

        # The test compares z with the point that the step started from.
        known = inside & (index >= plain_steps)[:, None]
        dz = z - tl.load(state_at, mask=known, other=0.0)
        df = (1.0 - a) * (mean - tl.load(mean_at, mask=known, other=0.0))
        dr = df - dz
        required = DESCENT * base_residual * base_residual
        rounding = EPS * tl.maximum(tl.abs(energy), tl.abs(base_energy))
        # -grad E = r: this is the fall of E up to third order, free of cancellation.
        trapezoid = tl.sum((r - 0.5 * dr) * dz, 1)
        measured = base_energy - energy >= required - rounding
        descends = tl.where(required > ENERGY_SLACK * rounding, measured, trapezoid >= required)
        accepted = (finite & descends) | ~accelerated

        kept = active & accepted
        at = begin + local
        small = kept & finite & (residual <= tolerance)
        broken = kept & ~finite
        if FIXED:
            small = small & (local < 0)
        write = kept & (finite | (index == 0))
        tl.store(logsumexp_out + at, logsumexp, mask=write)
        tl.store(residual_out + at, residual, mask=write)
        tl.store(tolerance_out + at, tolerance, mask=write)
        tl.store(num_steps_out + at, index, mask=write)
        failure = tl.where(index == 0, NONFINITE, DIVERGED)
        done = small | broken
        tl.store(status_out + at, tl.where(small, CONVERGED, failure).to(tl.int8), mask=done)
        tl.store(num_evals_out + at, index + 1, mask=done)
        active = active & ~done

        # r - gamma (dz + dr) where that promises descent, a long plain step where E curves down, else a plain one.
        gamma = tl.sum(dr * r, 1) / tl.maximum(tl.sum(dr * dr, 1), TINY)
        along, span = tl.sum(r * df, 1), tl.sum(df * df, 1)
        slope = square - gamma * along
        length = tl.sqrt(tl.maximum(slope - gamma * along + gamma * gamma * span, 0.0))
        cut = tl.where(length > LONGEST * residual, LONGEST * residual / length, 1.0)
        promising = (length < float("inf")) & (cut * slope >= SLOPE * square)
        # Products that underflow do not measure the curvature.
        downward = (tl.sum(dz * dr, 1) >= 0.0) & (base_residual >= LEAST)
        # The last step of a budget is plain: it is never rejected.
        accelerated = accepted & (downward | promising) & (index >= plain_steps) & (index + 1 < max_steps)

        # Read again: until here only z and the mean had to stay in registers.
        x = tl.load(field_at, mask=anchored, other=0.0).to(tl.float32)
        base_mean = tl.load(mean_at, mask=known, other=0.0)
        f = a * x + (1.0 - a) * tl.where(accepted[:, None], mean, base_mean)
        by_r = tl.where(downward, STRETCH, cut)
        by_df = tl.where(downward, 0.0, cut * gamma) * (1.0 - a)
        fast = z + by_r[:, None] * (f - z) - by_df[:, None] * (mean - base_mean)
        candidate = tl.where(accelerated[:, None], fast, f)
        tl.debug_barrier()  # every thread has read the last point
        tl.store(state_at, tl.where(finite[:, None], z, float("nan")), mask=inside & write[:, None])
        tl.store(mean_at, mean, mask=inside & write[:, None])
        tl.debug_barrier()  # every thread has written this one
        z = candidate
        # These serve to test the next step, which after a rejected one is plain and not tested.
        base_energy, base_residual = energy, residual
        step += 1
        running = (step <= max_steps) & (tl.max(active.to(tl.int32), 0) > 0)
    tl.store(status_out + begin + local, (tl.zeros([ROWS], tl.int32) + exhausted).to(tl.int8), mask=active)
    tl.store(num_evals_out + begin + local, tl.zeros([ROWS], tl.int32) + step, mask=active)
