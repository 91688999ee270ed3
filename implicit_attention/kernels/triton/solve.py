"""The solve as one kernel: a tile of queries stays on the chip until its last query is done, the keys stream past."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import _rule
from ..._fused_rule import FusedRule
from ...status import Status
from .. import trust
from ..problem import Attention, Solved
from .kernels import (
    LOG2E,
    attend,
    batch_offset,
    columns,
    kernel,
    matrix,
    no_sums,
    query_tile,
    rounded,
    scaled_back,
    sums,
    visited_tiles,
)
from .layout import (
    KernelLayout,
    Picked,
    alike,
    counted,
    gathered_after,
    in_memory,
    in_order,
    launch,
    offset_of,
    placed,
    tiles,
)
from .mask_tiles import MaskTiles

CONVERGED = tl.constexpr(int(Status.CONVERGED))
DIVERGED = tl.constexpr(int(Status.DIVERGED))
NONFINITE = tl.constexpr(int(Status.NONFINITE))
DESCENT = tl.constexpr(_rule.DESCENT)
ENERGY_SLACK = tl.constexpr(_rule.ENERGY_SLACK)
STRETCH = tl.constexpr(_rule.STRETCH)
SLOPE = tl.constexpr(_rule.SLOPE)
LONGEST = tl.constexpr(_rule.LONGEST)
EPS = tl.constexpr(torch.finfo(torch.float32).eps)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
# Squares of shorter vectors have lost digits to underflow; times POWER these are far from that.
LEAST = tl.constexpr(2.0**-51)
POWER = tl.constexpr(2.0**80)
# The status of a query that goes on in the next launch.
UNFINISHED = -1


def solve(problem: Attention, initial: Tensor, stop: FusedRule, ends: tuple[int, ...] | None = None) -> Solved:
    """Solve every query from `initial`, (*batch, N, D), without waiting for the device; answers are float32.

    ends: the evaluations after which the queries of a set that have not ended are gathered into tiles of their own, so
        that no tile waits for its slowest query; by default those that pay. Masks of pairs cannot be gathered.
    """
    problem = in_memory(problem)
    stop = stop._replace(max_steps=counted(stop.max_steps), plain_steps=counted(stop.plain_steps))
    field, count = problem.query, problem.keys.shape[-2]
    empty = partial(trust.empty, device=field.device)
    answer = Solved.allocated(empty, field.shape, torch.float32)
    if field.numel() == 0:
        return answer
    layout = KernelLayout.of(problem)
    assert layout is not None
    chosen, rows = tiles("solve", problem), field.shape[-2]
    point = initial.resolve_neg().to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    carried = tuple(empty(field.shape[:-1], dtype=kind) for kind in (torch.float32, torch.float32, torch.int8))
    held = (in_order(field).float(), point, empty(field.shape, dtype=torch.float32))
    ends = gathered_after(problem, stop) if ends is None else ends
    assert not ends or problem.pairs is None or alike(problem), (
        "the tiles of a mask of pairs are of queries as they stand"
    )
    listed = MaskTiles.of(problem, layout, chosen, by_keys=False)
    for begin, end in zip((0, *ends), (*ends, stop.max_steps + 1), strict=True):
        picked = unfinished(answer.status, rows) if begin > 0 else None
        launch(
            _solve_kernel,
            answer.status.numel() // rows * triton.cdiv(rows, chosen.rows),
            chosen,
            problem,
            *(*held, *placed(problem, layout), *answer, *carried),
            *(*(picked or (None, None)), *listed.placed(), *layout.sizes[1:], rows, count, offset_of(problem)),
            *(*stop, begin, end, int(stop.exhausted) if end > stop.max_steps else UNFINISHED),
            *(stop.fixed_budget, bool(ends)),
            picked=picked is not None,
        )
    return answer


def unfinished(status: Tensor, rows: int) -> Picked:
    """The queries of each set that have not ended, in order."""
    going = status.view(-1, rows) == UNFINISHED
    order = going.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return Picked(order, going.sum(-1, dtype=torch.int32))


@triton.jit
def _length(square, small, big):
    """The length of rows from their sums of squares: as they are, in units of 1/POWER, and in units of POWER."""
    far = tl.where(square < float("inf"), tl.sqrt(square), tl.sqrt(big) * POWER)
    return tl.where(square < LEAST * LEAST, tl.sqrt(small) / POWER, far)


@triton.jit
def _columns_at(column, point, fresh, field, a, local, real, anchored, P: tl.constexpr):
    """Read some columns: offsets in memory, which of them exist, z, the mean at z, a x."""
    place, exists = columns(column, local, P)
    there = real[:, None] & exists
    z = tl.load(point + place, mask=there, other=0.0)
    mean = tl.load(fresh + place, mask=there, other=0.0)
    return place, there, z, mean, a * tl.load(field + place, mask=anchored[:, None] & exists, other=0.0)


@kernel
def _solve_kernel(
    field,
    point,
    fresh,
    keys,
    keys_0: tl.int64,
    keys_1: tl.int64,
    keys_2: tl.int64,
    keys_row: tl.int64,
    keys_column: tl.int64,
    beta,
    beta_0: tl.int64,
    beta_1: tl.int64,
    beta_2: tl.int64,
    anchor,
    anchor_0: tl.int64,
    anchor_1: tl.int64,
    anchor_2: tl.int64,
    mask,
    mask_0: tl.int64,
    mask_1: tl.int64,
    mask_2: tl.int64,
    mask_row: tl.int64,
    mask_column: tl.int64,
    state_out,
    mean_out,
    logsumexp_out,
    status_out,
    residual_out,
    tolerance_out,
    num_steps_out,
    num_evals_out,
    base_energy_out,
    base_residual_out,
    accelerated_out,
    order,
    counts,
    listed,
    listed_counts,
    listed_0: tl.int64,
    listed_1: tl.int64,
    listed_2: tl.int64,
    middle: tl.int32,
    inner: tl.int32,
    N: tl.int32,
    M: tl.int32,
    offset: tl.int32,
    rtol: tl.float32,
    atol: tl.float32,
    max_steps: tl.int32,
    plain_steps: tl.int32,
    begin: tl.int32,
    end: tl.int32,
    unfinished: tl.int32,
    FIXED: tl.constexpr,
    ONE_OF_SEVERAL: tl.constexpr,
    P: tl.constexpr,
):
    """Per query the iteration of `solvers.Anderson(history=1)` on an energy with a convex potential.

    This launch makes the evaluations `begin` to `end` - 1; the status of queries that go on is `unfinished`.

    `point` is the point of the next evaluation and `fresh` the mean there; the outputs hold the last accepted point and
    what was measured there. Between two evaluations these are read a few columns at a time: the registers are those of
    the loop over the keys.
    """
    ROWS: tl.constexpr = P.rows
    D: tl.constexpr = P.dim
    batch, tile, first, local, dims, real, inside = query_tile(N, order, counts, P)
    if P.picked:  # noqa: SIM102 - only then are there counts to load
        if tile * ROWS >= tl.load(counts + batch):
            return
    here = batch * N + first
    at, start = here + local, here * D
    field, point, fresh = field + start, point + start, fresh + start
    state_out, mean_out = state_out + start, mean_out + start

    sizes = (middle, inner)
    b = tl.load(beta + batch_offset(batch, sizes, (beta_0, beta_1, beta_2)))
    a = tl.load(anchor + batch_offset(batch, sizes, (anchor_0, anchor_1, anchor_2)))
    per_beta = (1.0 - a) / b
    # Without an anchor the field is not read, so that NaN in it does not matter.
    anchored = real & (tl.zeros([ROWS], tl.float32) + a != 0.0)
    key_rows = matrix(keys, batch, sizes, (keys_0, keys_1, keys_2, keys_row, keys_column), P, False)
    pairs = (matrix(mask, batch, sizes, (mask_0, mask_1, mask_2, mask_row, mask_column), P, True), offset)
    tiles = (listed, listed_counts, (listed_0, listed_1, listed_2))

    active = real
    accelerated = local < 0
    base_energy = tl.zeros([ROWS], tl.float32)
    base_residual = tl.zeros([ROWS], tl.float32)
    if P.picked:
        accelerated = tl.load(accelerated_out + at, mask=real, other=0) != 0
        base_energy = tl.load(base_energy_out + at, mask=real, other=0.0)
        base_residual = tl.load(base_residual_out + at, mask=real, other=0.0)
    step = 0
    running = True
    if P.picked:
        step = begin
    while running:
        index = tl.zeros([ROWS], tl.int32) + step
        whole = local[:, None] * D + dims[None, :]
        half, scale = rounded(tl.load(point + whole, mask=inside, other=0.0), P)
        visited = visited_tiles(batch, tile, first, local, real, offset, tiles, sizes, N, M, P)
        mean, logsumexp = attend(half, scale * (b * LOG2E), first + local, key_rows, pairs, visited, N, M, P)
        tl.store(fresh + whole, mean, mask=inside)
        tl.debug_barrier()  # every thread has written the mean

        # The test compares this point with the one that the step started from.
        later = step >= plain_steps
        known = real & (index >= plain_steps)
        square = no_sums(P)
        size = no_sums(P)
        lost = no_sums(P)
        energy = no_sums(P)
        trapezoid = no_sums(P)
        across = no_sums(P)
        turned = no_sums(P)
        along = no_sums(P)
        span = no_sums(P)
        bent = no_sums(P)
        for column in tl.range(0, D, P.columns, num_stages=1):
            place, there, z, m, ax = _columns_at(column, point, fresh, field, a, local, real, anchored, P)
            f = ax + (1.0 - a) * m
            r = f - z
            square += sums(r * r, P)
            size += sums(f * f, P)
            energy += sums(z * (0.5 * z - ax), P)
            if P.dtype != "fp32":
                lost += sums(m * (z - scaled_back(z, scale, P)), P)
            if later:
                dz = z - tl.load(state_out + place, mask=there, other=0.0)
                df = (1.0 - a) * (m - tl.load(mean_out + place, mask=there, other=0.0))
                dr = df - dz
                # -grad E = r: this is the fall of E up to third order, free of cancellation.
                trapezoid += sums((r - 0.5 * dr) * dz, P)
                across += sums(dr * r, P)
                turned += sums(dr * dr, P)
                along += sums(r * df, P)
                span += sums(df * df, P)
                bent += sums(dz * dr, P)
        square, size, lost, energy = tl.sum(square, 1), tl.sum(size, 1), tl.sum(lost, 1), tl.sum(energy, 1)
        trapezoid, across, turned = tl.sum(trapezoid, 1), tl.sum(across, 1), tl.sum(turned, 1)
        along, span, bent = tl.sum(along, 1), tl.sum(span, 1), tl.sum(bent, 1)
        # Squares that underflow or overflow are rare, and those of rows that have ended do not matter.
        plainly = (square >= LEAST * LEAST) & (square < float("inf"))
        plainly = plainly & (size >= LEAST * LEAST) & (size < float("inf"))
        residual, length = tl.sqrt(square), tl.sqrt(size)
        if tl.max((active & ~plainly).to(tl.int32), 0) > 0:
            small, big = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
            small_f, big_f = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
            for column in tl.range(0, D, P.columns, num_stages=1):
                _, _, z, m, ax = _columns_at(column, point, fresh, field, a, local, real, anchored, P)
                f = ax + (1.0 - a) * m
                r = f - z
                small += tl.sum((r * POWER) * (r * POWER), 1)
                big += tl.sum((r / POWER) * (r / POWER), 1)
                small_f += tl.sum((f * POWER) * (f * POWER), 1)
                big_f += tl.sum((f / POWER) * (f / POWER), 1)
            residual, length = _length(square, small, big), _length(size, small_f, big_f)
        logsumexp += b * lost
        tolerance = atol + rtol * length
        finite = (residual < float("inf")) & (tolerance < float("inf"))
        energy -= per_beta * logsumexp

        required = DESCENT * base_residual * base_residual
        rounding = EPS * tl.maximum(tl.abs(energy), tl.abs(base_energy))
        measured = base_energy - energy >= required - rounding
        descends = tl.where(required > ENERGY_SLACK * rounding, measured, trapezoid >= required)
        accepted = (finite & descends) | ~accelerated

        kept = active & accepted
        solved = kept & finite & (residual <= tolerance)
        broken = kept & ~finite
        if FIXED:
            solved = solved & (local < 0)
        write = kept & (finite | (index == 0))
        tl.store(logsumexp_out + at, logsumexp, mask=write)
        tl.store(residual_out + at, residual, mask=write)
        tl.store(tolerance_out + at, tolerance, mask=write)
        tl.store(num_steps_out + at, index, mask=write)
        failure = tl.where(index == 0, NONFINITE, DIVERGED)
        done = solved | broken
        tl.store(status_out + at, tl.where(solved, CONVERGED, failure).to(tl.int8), mask=done)
        tl.store(num_evals_out + at, index + 1, mask=done)
        active = active & ~done

        # r - gamma (dz + dr) where that promises descent, a long plain step where E curves down, else a plain one.
        gamma = across / tl.maximum(turned, TINY)
        slope = square - gamma * along
        reach = tl.sqrt(tl.maximum(slope - gamma * along + gamma * gamma * span, 0.0))
        cut = tl.where(reach > LONGEST * residual, LONGEST * residual / reach, 1.0)
        promising = (reach < float("inf")) & (cut * slope >= SLOPE * square)
        # Products that underflow do not measure the curvature.
        downward = (bent >= 0.0) & (base_residual >= LEAST)
        # The last step of a budget is plain: it is never rejected.
        accelerated = accepted & (downward | promising) & (index >= plain_steps) & (index + 1 < max_steps)

        by_r = tl.where(downward, STRETCH, cut)
        by_df = tl.where(downward, 0.0, cut * gamma) * (1.0 - a)
        tl.debug_barrier()  # every thread has read the last point
        for column in tl.range(0, D, P.columns, num_stages=1):
            place, there, z, m, ax = _columns_at(column, point, fresh, field, a, local, real, anchored, P)
            base = tl.load(mean_out + place, mask=known[:, None] & there, other=0.0)
            tl.debug_barrier()  # what one thread reads another may write
            f = ax + (1.0 - a) * tl.where(accepted[:, None], m, base)
            fast = z + by_r[:, None] * (f - z) - by_df[:, None] * (m - base)
            tl.store(state_out + place, tl.where(finite[:, None], z, float("nan")), mask=write[:, None] & there)
            tl.store(mean_out + place, m, mask=write[:, None] & there)
            tl.store(point + place, tl.where(accelerated[:, None], fast, f), mask=there)
        tl.debug_barrier()  # every thread has written this one
        # These serve to test the next step, which after a rejected one is plain and not tested.
        base_energy, base_residual = energy, residual
        step += 1
        running = (step < end) & (tl.max(active.to(tl.int32), 0) > 0)
    tl.store(status_out + at, (tl.zeros([ROWS], tl.int32) + unfinished).to(tl.int8), mask=active)
    if ONE_OF_SEVERAL:
        tl.store(base_energy_out + at, base_energy, mask=active)
        tl.store(base_residual_out + at, base_residual, mask=active)
        tl.store(accelerated_out + at, accelerated.to(tl.int8), mask=active)
    tl.store(num_evals_out + at, tl.zeros([ROWS], tl.int32) + step, mask=active)
