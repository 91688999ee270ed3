"""The iteration in torch: every query stops on its own, and finished queries leave the work.

It answers where no kernel of ours does. States are flat, (E * R, D), and numbers per query (E * R).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..._fused_rule import FusedRule
from ..._norm import norm, resolves
from ..._safeguard import DESCENT, ENERGY_SLACK, LONGEST, SLOPE, STRETCH
from ...status import Status
from ..problem import Hopfield
from ..rule import Solved
from .rows import TiledRows, dot

# Steps between two looks at whether all are finished, each of which makes the host wait for an accelerator.
LOOK_EVERY = 4
# Sets of keys are worked off in groups of about so many pairs of a query and a key: enough work for a call of torch,
# and no more states than that in memory.
PAIRS = 2**23


class Point(NamedTuple):
    """Measurements at the last accepted state: r = f(z) - z, |r|, |r|^2 and E."""

    r: Tensor
    residual: Tensor
    square: Tensor
    energy: Tensor


class Step(NamedTuple):
    """The step s tried from there: |s|^2, <r, s>, and whether it is the plain step s = r."""

    direction: Tensor
    square: Tensor
    slope: Tensor
    plain: Tensor


@torch.no_grad()
def solve(problem: Hopfield, initial: Tensor, stop: FusedRule, *, fused: bool, keep_mean: bool = True) -> Solved:
    """Solve from `initial`; `fused` evaluates by torch's attention kernels, else every product is written out.

    Without `keep_mean` the mean that is returned has no rows.
    """
    rows = TiledRows(problem, fused=fused)
    answers = _Answers(rows, stop, keep_mean)
    start = rows.laid(initial).flatten(0, 1)
    for part, flat in rows.parts(PAIRS):
        _iterate(part, start if flat is None else start.index_select(0, flat), answers, stop)
    return answers.solved()


@torch.inference_mode()
def _iterate(rows: TiledRows, z: Tensor, answers: _Answers, stop: FusedRule) -> None:
    """Solve some of the queries from z."""
    rows, flat = rows.padded(answers.count)
    z = z if flat is None else z.index_select(0, flat)
    active = rows.ids < answers.count
    looks_every = 0 if stop.fixed_budget else 1 if z.device.type == "cpu" else LOOK_EVERY
    learns = stop.plain_steps < stop.max_steps
    base: Point | None = None
    tried: Step | None = None
    for index in range(stop.max_steps + 1):
        mean, logsumexp = rows.evaluate(z)
        f = rows.mapped(mean)
        r = f - z
        residual = norm(r)
        tolerance = stop.atol + stop.rtol * norm(f)
        finite = residual + tolerance < torch.inf
        unsolved = finite if stop.fixed_budget else finite & (residual > tolerance)
        candidates, accepted, point = active, None, None
        if learns and index + 1 >= stop.plain_steps:
            point = Point(r, residual, residual.square(), rows.energy(z, logsumexp))
            if base is not None and tried is not None:
                end_slope = dot(r, tried.direction)
                accepted = (_descends(point, base, tried, end_slope) & finite) | tried.plain
                candidates = active & accepted
        if base is not None and tried is not None and (looks_every != 1 or not bool(finite.all())):
            # A query that diverged returns the point before.
            z = torch.where(finite[:, None], z, z - tried.direction)
            residual = torch.where(finite, residual, base.residual)
        last = index == stop.max_steps
        # The last step is plain, and thus accepted.
        done = active if last else candidates > unsolved
        active = active ^ answers.keep(done, rows.ids, index, finite, z, mean, logsumexp, residual, tolerance)
        if last:
            break
        counts = rows.counts(active) if looks_every and index % looks_every == 0 else None
        if counts is not None and not any(counts):
            break
        del mean, logsumexp
        if point is None:
            z = f
        elif base is None or tried is None or accepted is None:
            base, tried, z = point, Step(r, point.square, point.square, torch.ones_like(active)), f
        else:
            # A rejected step goes back to the last accepted point, at which diverged queries are already.
            z = torch.where((accepted | ~finite)[:, None], z, z - tried.direction)
            rows_of = (accepted[:, None], accepted, accepted, accepted)
            point = Point(*(torch.where(a, new, old) for a, new, old in zip(rows_of, point, base, strict=True)))
            tried = _proposed(point, base, tried, end_slope, accepted, plain=index + 1 == stop.max_steps)
            base, z = point, z + tried.direction
        if counts is not None and (smaller := rows.compacted(active, counts)) is not None:
            rows, flat = smaller
            z, active = z.index_select(0, flat), active[flat]
            if base is not None and tried is not None:
                base = Point(*(t.index_select(0, flat) for t in base))
                tried = Step(*(t.index_select(0, flat) for t in tried))


def _descends(point: Point, base: Point, tried: Step, end_slope: Tensor) -> Tensor:
    """Whether E falls by DESCENT |r|^2 along the step; by the trapezoid rule where E cannot resolve that."""
    required = DESCENT * base.square
    rounding = torch.finfo(required.dtype).eps * torch.maximum(point.energy.abs(), base.energy.abs())
    resolved = required > ENERGY_SLACK * rounding
    fall = torch.where(resolved, base.energy - point.energy + rounding, (tried.slope + end_slope) / 2)
    return fall >= required


def _proposed(point: Point, base: Point, tried: Step, end_slope: Tensor, accepted: Tensor, *, plain: bool) -> Step:
    """r - gamma (dz + dr), gamma = <dr, r>/|dr|^2, if that promises descent, 4 r where E curves down, else r.

    dz is the step tried and end_slope = <r, dz>; neither is read where it was not accepted.
    """
    r, square = point.r, point.square
    if plain:
        return Step(r, square, square, torch.ones_like(accepted))
    dr = r - base.r
    dr_dr = dot(dr, dr)
    dr_r = (square + dr_dr - base.square) / 2
    dz_dr = end_slope - tried.slope
    gamma = dr_r / dr_dr.clamp(min=torch.finfo(r.dtype).tiny)
    fall = gamma * (end_slope + dr_r)
    slope = square - fall
    length = slope - fall + gamma.square() * (tried.square + 2 * dz_dr + dr_dr)
    cut = (LONGEST**2 * square / length).clamp(max=1).sqrt()
    slope = cut * slope
    # Products that underflow do not measure the curvature.
    downward = (dz_dr >= 0) & resolves(base.residual)
    # Of a step without a finite length, slope is NaN, and compares false.
    mixed = accepted & ~downward & (slope >= SLOPE * square)
    stretched = accepted & downward
    by_r = torch.where(mixed, cut, torch.where(stretched, STRETCH, 1.0))
    by_df = torch.where(mixed, -cut * gamma, 0.0)
    direction = by_df[:, None] * (tried.direction + dr) + by_r[:, None] * r
    return Step(direction, dot(direction, direction), torch.where(mixed, slope, by_r * square), ~(mixed | stretched))


class _Answers:
    """The outcome of every query, written when it is done; one place more takes the rows that only fill up."""

    def __init__(self, rows: TiledRows, stop: FusedRule, keep_mean: bool) -> None:
        self.keep_mean = keep_mean
        self.rows, self.stop, self.count = rows, stop, rows.sets * rows.count
        keys = rows.keys
        self.state = keys.new_empty((self.count + 1, keys.shape[-1]))
        self.mean = torch.empty_like(self.state) if keep_mean else self.state[:0]
        self.measured = keys.new_empty((self.count + 1, 3))
        self.steps = torch.zeros(self.count + 1, dtype=torch.int32, device=keys.device)
        self.status = torch.full_like(self.steps, int(stop.exhausted), dtype=torch.int8)

    def keep(
        self, done: Tensor, ids: Tensor, index: int, finite: Tensor, z: Tensor, mean: Tensor, *measured: Tensor
    ) -> Tensor:
        """Write the rows that are `done` after `index` steps with their logsumexp, residual and tolerance."""
        everything = done
        numbers = torch.stack(measured, dim=-1)
        if z.device.type == "cpu":
            # The host may look: only rows that are done are moved.
            chosen = done.nonzero().squeeze(-1)
            if len(chosen) == 0:
                return everything
            ids, done, finite, z, numbers = (t.index_select(0, chosen) for t in (ids, done, finite, z, numbers))
            mean = mean.index_select(0, chosen) if self.keep_mean else mean
        if index == 0:
            z = torch.where(finite[:, None], z, torch.nan)
        status = torch.full_like(done, int(self.stop.exhausted), dtype=torch.int8)
        if not self.stop.fixed_budget:
            status.masked_fill_(numbers[:, 1] <= numbers[:, 2], int(Status.CONVERGED))
        status.masked_fill_(~finite, int(Status.DIVERGED if index else Status.NONFINITE))
        result = [(self.state, z), (self.measured, numbers), (self.status, status)]
        result.append((self.steps, torch.full_like(status, index, dtype=torch.int32)))
        if self.keep_mean:
            result.append((self.mean, mean))
        for whole, part in result:
            if z.device.type != "cpu":
                part = torch.where(done[:, None] if part.ndim > 1 else done, part, whole[ids])
            whole.index_copy_(0, ids, part)
        return everything

    def solved(self) -> Solved:
        rows, count = self.rows, self.count
        logsumexp, residual, tolerance = self.measured[:count].unbind(-1)
        steps = self.steps[:count]
        state = rows.restored(self.state[:count, : rows.dim])
        mean = rows.restored(self.mean[:count, : rows.dim]) if self.keep_mean else self.mean
        numbers = (logsumexp, self.status[:count], residual, tolerance, steps, steps + 1)
        return Solved(state, mean, *(rows.restored(t) for t in numbers))
