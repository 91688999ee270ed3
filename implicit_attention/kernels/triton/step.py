"""The work between two evaluations of a user's map on a card, by two kernels, as step.h has it.

A row is worked off in parts. `_measure_kernel` writes r and sums of each part. `_advance_kernel` adds them up, decides
for the row in each of its programs alike, and writes the next states of its part.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...solution import Status
from ..step import Step
from ..trust import on_device
from .layout import PART
from .tile import INF, kernel, part_of_row, read, taken, write

CONVERGED = tl.constexpr(int(Status.CONVERGED))
DIVERGED = tl.constexpr(int(Status.DIVERGED))
NONFINITE = tl.constexpr(int(Status.NONFINITE))
# Of each part: the sum of squares, the largest number, and the sum of squares in units of that, of r and of f.
SIZES = tl.constexpr(6)


class TritonStep(Step):
    """`Step` by two kernels, for which the host does not wait."""

    def reads(self, mapped: Tensor) -> bool:
        like, given = ((t.shape, t.dtype, t.device) for t in (self.value, mapped))
        return type(mapped) is Tensor and given == like and not mapped.is_neg()

    def __call__(self, z: Tensor, mapped: Tensor, number: int) -> Tensor:
        z, mapped, old, rule, m = self.read(z), self.read(mapped), self.memory, self.rule, self.history
        to, value, (rows, n) = torch.empty_like(z), torch.empty_like(z), (old.active.numel(), z.shape[-1])
        parts, finfo = triton.cdiv(n, PART), torch.finfo(z.dtype)
        # What programs of a row read of the row is not written in its place.
        read = ("active", "best_residual", "accelerated", "last_residual", "gram", "counts")
        new = old._replace(**{name: torch.empty_like(getattr(old, name)) for name in read})
        sums = z.new_empty(rows, parts, SIZES.value + 3 * m)
        given = z, mapped, old, sums, n, number
        with on_device(z.device):
            _measure_kernel[(rows, parts)](*given, M=m)
            _advance_kernel[(rows, parts)](
                *(self.value, value, to, new, *given),
                *(rule.rtol, rule.atol, self.ridge, self.growth, finfo.eps, finfo.tiny),
                *(int(number >= rule.plain_steps), int(rule.fixed_budget)),
                M=m,
                SLOTS=max(2, triton.next_power_of_2(m)),
                PARTS=triton.next_power_of_2(parts),
            )
        self.memory, self.value = new, value
        return to


@triton.jit
def _sizes(x, out):
    """Write the sum of squares, the largest number, and the sum of squares in units of that."""
    peak = tl.max(tl.abs(x), 0)
    scaled = x / tl.where((peak > 0) & (peak < INF), peak, 1.0)
    tl.store(out, tl.sum(x * x, 0))
    tl.store(out + 1, peak)
    tl.store(out + 2, tl.sum(scaled * scaled, 0))


@kernel
def _measure_kernel(z, f, old, sums, n: tl.int32, number: tl.int32, M: tl.constexpr):
    row, part, local, inside = part_of_row(n)
    at, parts = row * n + local, tl.num_programs(1)
    here = read(z + at, inside)
    image = read(f + at, inside)
    r = image - here
    write(old.r + at, r, inside)
    out = sums + (row * parts + part) * (SIZES + 3 * M)
    _sizes(r, out)
    _sizes(image, out + 3)
    if M > 0:  # noqa: SIM102 - a constant and a number
        if (number > 0) & (tl.load(old.active + row) != 0):
            slot = tl.load(old.counts + 2 * row + 1) % M
            dr = r - read(old.last_r + at, inside)
            df = here - read(old.last_z + at, inside) + dr
            write(old.dr + (row * M + slot) * n + local, dr, inside)
            write(old.df + (row * M + slot) * n + local, df, inside)
            for other in tl.static_range(M):
                base = (row * M + other) * n + local
                earlier = tl.where(other == slot, dr, read(old.dr + base, inside))
                change = tl.where(other == slot, df, read(old.df + base, inside))
                tl.store(out + SIZES + 3 * other, tl.sum(dr * earlier, 0))
                tl.store(out + SIZES + 3 * other + 1, tl.sum(earlier * r, 0))
                tl.store(out + SIZES + 3 * other + 2, tl.max(tl.abs(change), 0))


@triton.jit
def _length(numbers, real, tiny, eps):
    """The length of a row from the sizes of its parts; squares neither overflow nor underflow."""
    square = tl.sum(read(numbers, real), 0)
    peaks = read(numbers + 1, real)
    peak = tl.max(peaks, 0)
    part = peaks / tl.where(peak > 0, peak, 1.0)
    scaled = peak * tl.sqrt(tl.sum(read(numbers + 2, real) * part * part, 0))
    plain = tl.sqrt(square)
    ordinary = (square >= tiny / eps) & (square < INF)
    # Where there is a NaN, the square is one.
    return tl.where(ordinary | (square != square), plain, tl.where(peak < INF, scaled, peak))


@kernel
def _advance_kernel(
    old_value,
    value,
    to,
    new,
    z,
    f,
    old,
    sums,
    n: tl.int32,
    number: tl.int32,
    rtol: tl.float64,
    atol: tl.float64,
    ridge: tl.float64,
    growth: tl.float64,
    eps: tl.float64,
    tiny: tl.float64,
    mixes: tl.int32,
    fixed: tl.int32,
    M: tl.constexpr,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
):
    row, part, local, inside = part_of_row(n)
    at, parts = row * n + local, tl.num_programs(1)
    WIDTH: tl.constexpr = SIZES + 3 * M
    some = tl.arange(0, PARTS)
    real, numbers = some < parts, sums + (row * parts + some) * WIDTH
    kind = z.dtype.element_ty
    # Numbers of the host are float64, or in the interpreter Python's.
    rtol, atol, growth = tl.full([], rtol, kind), tl.full([], atol, kind), tl.full([], growth, kind)
    ridge, eps, tiny = tl.full([], ridge, kind), tl.full([], eps, kind), tl.full([], tiny, kind)
    residual = _length(numbers, real, tiny, eps)
    size = _length(numbers + 3, real, tiny, eps)
    tolerance = atol + rtol * size
    active = tl.load(old.active + row) != 0
    best, last_residual = tl.load(old.best_residual + row), tl.load(old.last_residual + row)
    accelerated = tl.load(old.accelerated + row) != 0
    finite = (residual < INF) & (tolerance < INF)
    converged = finite & (residual <= tolerance) & (fixed == 0)
    # A plain step needs no test.
    fell = (residual == 0) | (residual < growth * last_residual)
    accepted = ~accelerated | fell
    better = active & accepted & ((fixed != 0) | (number == 0) | (residual < best) | converged)
    still = active & ~(accepted & (converged | ~finite))

    here = read(z + at, inside)
    kept = read(old_value + at, inside)
    # What is not finite from the start is NaN, loudly.
    start = tl.where((number == 0) & ~(residual < INF), float("nan"), here)
    kept = tl.where(better, start, kept)
    write(value + at, kept, inside)
    usable = accelerated & False
    if M > 0:
        r = read(old.r + at, inside)
        moved = still & accepted
        made, valid = tl.load(old.counts + 2 * row + 1), tl.load(old.counts + 2 * row)
        made = tl.where(moved & (number > 0), made + 1, made)
        valid = tl.where(moved & (number > 0), tl.minimum(valid + 1, M), valid)
        valid = tl.where(accepted, valid, 0)
        base_z = tl.where(accepted, here, read(old.last_z + at, inside))
        base_r = tl.where(accepted, r, read(old.last_r + at, inside))
        if still:
            write(old.last_z + at, base_z, inside)
            write(old.last_r + at, base_r, inside)
        # Changes by their age, newest first.
        age = tl.arange(0, SLOTS)
        slots = (made - 1 - age + 2 * M) % M
        used = age < valid
        each = real[:, None] & used[None, :]
        found = numbers[:, None] + SIZES + 3 * slots[None, :]
        products = tl.sum(read(found, each), 0)
        rest = tl.sum(read(found + 1, each), 0)
        largest = tl.max(read(found + 2, each), 0)
        i, j = age[:, None], age[None, :]
        places = row * M * M + slots[:, None] * M + slots[None, :]
        pairs = used[:, None] & used[None, :]
        gram = read(old.gram + places, pairs & (i > 0) & (j >= i))
        # Of two changes the newer one has the row.
        gram = tl.where(pairs, tl.where(i == 0, products[None, :], gram), 0.0)
        if part == 0:
            write(new.gram + places, gram, pairs & (j >= i))
            tl.store(new.counts + 2 * row, valid)
            tl.store(new.counts + 2 * row + 1, made)
        weights = _least_squares(gram, rest, age, valid, ridge, eps, tiny, M)
        step, bound = base_r, tl.max(tl.abs(base_r), 0) * 0.0
        for k in tl.static_range(M):
            weight = taken(weights, age == k)
            at_k = row * M * n + taken(slots, age == k) * n + local
            step -= weight * read(old.df + at_k, inside & (local * 0 + valid > k))
            bound += tl.abs(weight) * taken(largest, age == k)
        usable = still & (mixes != 0) & (valid > 0) & (bound + residual < INF)
        following = base_z + tl.where(usable, step, base_r)
    else:
        following = read(f + at, inside)
    # Others may read the state that is returned for a finished row.
    ended = tl.where((kept == kept) & (tl.abs(kept) < INF), kept, 0.0)
    write(to + at, tl.where(still, following, ended), inside)
    if part == 0:
        tl.store(old.residual + row, residual)
        tl.store(old.tolerance + row, tolerance)
        tl.store(new.active + row, still)
        tl.store(new.best_residual + row, tl.where(better, residual, best))
        tl.store(new.accelerated + row, tl.where(still, usable, accelerated))
        tl.store(new.last_residual + row, tl.where(still & accepted, residual, last_residual))
        if better:
            tl.store(old.best_tolerance + row, tolerance)
            tl.store(old.steps + row, number)
        if active:
            tl.store(old.evaluations + row, tl.load(old.evaluations + row) + 1)
            if accepted & converged:
                tl.store(old.status + row, CONVERGED)
            if accepted & ~finite:
                tl.store(old.status + row, tl.where(number == 0, NONFINITE, DIVERGED))


@triton.jit
def _least_squares(gram, rest, age, valid, ridge, eps, tiny, M: tl.constexpr):
    """The weights by an L D L^T factorisation of the products, newest change first.

    Columns that are dependent to rounding get none.
    """
    i, j = age[:, None], age[None, :]
    diagonal = (i == j) & (i < valid)
    shift = ridge * tl.sum(taken(gram, diagonal), 0) / tl.maximum(valid, 1) + tiny
    least = shift / 2 + 4 * eps * taken(gram, diagonal)
    gram += tl.where(diagonal, shift, 0.0)
    weights, lower = rest * 0.0, gram * 0.0
    for k in tl.static_range(M):
        line = taken(gram, i == k)
        pivot = taken(line, age == k)
        if k > 0:
            pivot = tl.where(pivot > taken(least, age == k), pivot, INF)
        here = taken(rest, age == k)
        weights = tl.where(age == k, here / pivot, weights)
        factor = tl.where((age > k) & (age < valid), line / pivot, 0.0)
        lower = tl.where(i == k, factor[None, :], lower)
        rest -= factor * here
        gram -= factor[:, None] * line[None, :]
    for back in tl.static_range(M - 1):
        k = M - 2 - back
        line = taken(lower, i == k)
        weights -= tl.where(age == k, tl.sum(line * weights, 0), 0.0)
    return tl.where(age < valid, weights, 0.0)
