"""`GMRES` on a card: all between two products by three launches, as `linear/_gmres.py` has it.

A row is worked off in parts. `_project_kernel` writes the inner products of each part of A v with the basis; called
again it adds them up and leaves the remainder, with its inner products. `_rotate_kernel` takes the second pass of
Gram-Schmidt where a row needs it, the rotation and the decisions: in each program of a row alike.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._torch import LinearMap, Looks, length, looks_every
from ...linear import GMRES
from ...linear._vectors import LOST as _LOST
from ...linear._vectors import ROUNDOFF
from ...linear.base import SweepState, fresh
from ...solution import Status
from ..trust import empty, on_device
from .layout import PART
from .tile import kernel, part_of_row, read, taken, write

STALLED = tl.constexpr(int(Status.STALLED))
LOST = tl.constexpr(_LOST)
#: Bytes that a thread reads of a part of so many vectors of the basis at once.
TOGETHER = 32
#: Vectors that the basis has room for at first; then as many again.
ROOM = 8


class SweepMemory(NamedTuple):
    """All that a sweep keeps of its rows; S is the number of its steps and one, up to a power of two.

    basis: V, a vector of each row after another, (at most steps + 1, rows, n), so that a product reads one tensor.
    projected, again: of A v and of its remainder, for each part the sum of squares and the inner products with the
        basis, (rows, parts, S + 1).
    column: V^T A v after one pass, (rows, S).
    turned: the rows of Q that no step will change, (rows, S, S).
    last: the last row of Q at even and at odd steps, (2, rows, S).
    triangle: the columns of R, (rows, S, S); target: the first entries of Q |r| e_1, (rows, S).
    used: steps in R, (rows).
    active: which rows go on, at even and at odd steps, (2, rows).
    residual_norm, verdict, stiffness, num_steps: as in `GMRESState` and `LinearSolver`; aim: for the first.
    """

    basis: Tensor
    projected: Tensor
    again: Tensor
    column: Tensor
    turned: Tensor
    last: Tensor
    triangle: Tensor
    target: Tensor
    used: Tensor
    active: Tensor
    residual_norm: Tensor
    verdict: Tensor
    stiffness: Tensor
    num_steps: Tensor
    aim: Tensor


@dataclass(frozen=True)
class SweepPlan:
    """The compile-time constants of the kernels."""

    side: int  # vectors of the basis that are read at once
    slots: int  # S
    parts: int  # of a row, up to a power of two
    tiny: float  # what is rounding beside the length of a product


@dataclass(frozen=True)
class TritonGMRES(GMRES):
    """`GMRES` with sweeps by kernels, for which the host does not wait, and by torch where they are not trusted."""

    #: Whether kernels may make sweeps of so many steps from such residuals.
    trusts: Callable[[Tensor, int], bool] = field(default=lambda residual, steps: True, repr=False)

    def _sweep(
        self, matvec: LinearMap, residual: Tensor, live: Tensor, aim: Tensor, num_steps: Tensor, max_steps: int
    ) -> tuple[Any, Tensor, Tensor]:
        steps = self.sweep_steps(max_steps)
        if not self.trusts(residual, steps):
            return super()._sweep(matvec, residual, live, aim, num_steps, max_steps)
        residual, dtype, device = residual.contiguous(), residual.dtype, residual.device
        size, rows, n = length(residual), live.numel(), residual.shape[-1]
        parts, most = triton.cdiv(n, PART), triton.next_power_of_2(steps + 1)

        def numbers(*axes: int, dtype: torch.dtype = dtype) -> Tensor:
            return empty(axes, dtype=dtype, device=device)

        told = fresh(size)
        memory = SweepMemory(
            basis=numbers(min(steps + 1, ROOM), *residual.shape),
            projected=numbers(rows, parts, most + 1),
            again=numbers(rows, parts, most + 1),
            column=numbers(rows, most),
            turned=numbers(rows, most, most),
            last=numbers(2, rows, most),
            triangle=numbers(rows, most, most),
            target=numbers(rows, most),
            used=numbers(rows, dtype=torch.int32),
            active=numbers(2, rows, dtype=torch.int8),
            residual_norm=size,
            verdict=told["verdict"],
            stiffness=torch.zeros_like(size),
            num_steps=num_steps.clone(memory_format=torch.contiguous_format),
            aim=aim.contiguous(),
        )
        torch.div(residual, size.masked_fill(size == 0, 1.0).unsqueeze(-1), out=memory.basis[0])
        memory.active[0] = (live & (size > aim) & (num_steps < max_steps)).flatten()
        tiny = ROUNDOFF * torch.finfo(dtype).eps
        plan = SweepPlan(TOGETHER // dtype.itemsize, most, triton.next_power_of_2(parts), tiny)
        with on_device(device):
            for step in range(steps):
                measured = memory.active[step % 2].view(torch.bool), size.flatten(), memory.aim.flatten()
                if step == 0:
                    looks = Looks(looks_every(self.check_every, size), *measured)
                elif step >= looks.due and not looks.left(step, *measured):
                    break
                if step + 1 == len(memory.basis):
                    basis = numbers(min(steps + 1, 2 * len(memory.basis)), *residual.shape)
                    basis[: step + 1] = memory.basis
                    memory = memory._replace(basis=basis)
                product = _read(matvec(memory.basis[step]), residual)
                for again in (False, True):
                    _project_kernel[(rows, parts)](product, memory, n, step, plan, again)
                _rotate_kernel[(rows, parts)](memory, n, step, max_steps, plan)
            correction = numbers(*residual.shape)
            _correct_kernel[(rows, parts)](correction, memory, n, plan)
        return SweepState(**told), correction, memory.num_steps


def _read(product: Tensor, like: Tensor) -> Tensor:
    """A product as kernels read it: plain numbers in order."""
    if type(product) is Tensor and not product.is_neg():
        return product.contiguous()
    return torch.empty_like(like).copy_(product)


@triton.jit
def _vectors(basis, slot, last, row, n, local):
    """A part of a row of these vectors of the basis, up to the `last`; 0 in the place of others."""
    at = (slot.to(tl.int64)[:, None] * tl.num_programs(0) + row) * n + local[None, :]
    return read(basis + at, (slot <= last)[:, None] & (local < n)[None, :])


@triton.jit
def _length(sums, row, P: tl.constexpr):
    """The length of a row from sums of its parts."""
    some, parts = tl.arange(0, P.parts), tl.num_programs(1)
    return tl.sqrt(tl.sum(read(sums + (row * parts + some) * (P.slots + 1), some < parts), 0))


@triton.jit
def _coordinates(sums, row, slot, last, P: tl.constexpr):
    """Inner products of a row with these vectors of the basis, from sums of its parts, up to the `last`; else 0."""
    some, parts = tl.arange(0, P.parts), tl.num_programs(1)
    at = (row * parts + some)[:, None] * (P.slots + 1) + 1 + slot[None, :]
    return tl.sum(read(sums + at, (some < parts)[:, None] & (slot <= last)[None, :]), 0)


@kernel
def _project_kernel(product, memory, n: tl.int32, number: tl.int32, P: tl.constexpr, AGAIN: tl.constexpr):
    """Sums of the parts of a product; or of its remainder after one pass, in the place of the next vector of V."""
    row, part, local, inside = part_of_row(n)
    rows = tl.num_programs(0).to(tl.int64)
    if tl.load(memory.active + (number % 2) * rows + row) != 0:
        x, sums = read(product + row * n + local, inside), memory.projected
        if AGAIN:
            for first in range(0, number + 1, P.side):
                slot = first + tl.arange(0, P.side)
                along = _coordinates(sums, row, slot, number, P)
                x -= tl.sum(along[:, None] * _vectors(memory.basis, slot, number, row, n, local), 0)
                if part == 0:
                    write(memory.column + row * P.slots + slot, along, slot <= number)
            write(memory.basis + ((number + 1) * rows + row) * n + local, x, inside)
            if part == 0:
                size = _length(sums, row, P)
                stiffness = tl.load(memory.stiffness + row)
                # As in torch, a NaN stays.
                tl.store(memory.stiffness + row, tl.where(stiffness >= size, stiffness, size))
            sums = memory.again
        out = sums + (row * tl.num_programs(1) + part) * (P.slots + 1)
        tl.store(out, tl.sum(x * x, 0))
        for first in range(0, number + 1, P.side):
            slot = first + tl.arange(0, P.side)
            vectors = _vectors(memory.basis, slot, number, row, n, local)
            write(out + 1 + slot, tl.sum(vectors * x[None, :], 1), slot <= number)


@kernel
def _rotate_kernel(memory, n: tl.int32, number: tl.int32, max_steps: tl.int32, P: tl.constexpr):
    row, part, local, inside = part_of_row(n)
    rows = tl.num_programs(0).to(tl.int64)
    following = memory.basis + ((number + 1) * rows + row) * n + local
    # What programs of a row use of the row is not written in its place, but by the first, which alone uses that.
    now, then = (number % 2) * rows + row, ((number + 1) % 2) * rows + row
    goes_on = number < 0
    if tl.load(memory.active + now) != 0:
        x = read(following, inside)
        size = _length(memory.projected, row, P)
        height = _length(memory.again, row, P)
        twice = height < LOST * size
        # Which vectors take part in a second pass; which numbers the last row of Q has: in the first step it is 1.
        until, known = tl.where(twice, number, -1), tl.where(number > 0, number, -1)
        removed = tl.full([], 0.0, memory.basis.dtype.element_ty)
        diagonal = removed
        line = tl.arange(0, P.slots)
        column = tl.full([P.slots], 0.0, memory.basis.dtype.element_ty)
        for first in range(0, number + 1, P.side):
            slot = first + tl.arange(0, P.side)
            along = _coordinates(memory.again, row, slot, until, P)
            x -= tl.sum(along[:, None] * _vectors(memory.basis, slot, until, row, n, local), 0)
            removed += tl.sum(along * along, 0)
            along += read(memory.column + row * P.slots + slot, slot <= number)
            diagonal += tl.sum(along * tl.load(memory.last + now * P.slots + slot, mask=slot <= known, other=1.0), 0)
            if part == 0:
                at = (row * P.slots + line[:, None]) * P.slots + slot[None, :]
                real = (line < number)[:, None] & (slot[None, :] <= line[:, None] + 1)
                column += tl.sum(read(memory.turned + at, real) * along[None, :], 1)
        # What a second pass removes is orthogonal to the rest.
        rest = height * height - removed
        height = tl.where(twice, tl.sqrt(tl.where(rest > 0, rest, 0.0)), height)
        tiny, residual = P.tiny * tl.load(memory.stiffness + row), tl.load(memory.residual_norm + row)
        steps = tl.load(memory.num_steps + row) + 1
        tl.debug_barrier()  # every thread has read what another may write
        height = tl.where(height <= tiny, 0.0, height)
        sides = tl.abs(diagonal) + height
        unit = tl.where(sides == 0, 1.0, sides)
        short, long = diagonal / unit, height / unit
        pivot = sides * tl.sqrt(short * short + long * long)
        goes_on = ~(pivot <= tiny)
        x = x / tl.where(height == 0, 1.0, height)
        write(following, tl.where(goes_on & (height != 0), x, 0.0), inside)
        if part == 0:
            tl.store(memory.num_steps + row, steps)
            if goes_on:
                cosine, sine = diagonal / pivot, height / pivot
                at = row * P.slots + number
                tl.store(memory.target + at, cosine * residual)
                tl.store(memory.triangle + at * P.slots + line, tl.where(line == number, pivot, column))
                last = tl.load(memory.last + now * P.slots + line, mask=line <= known, other=1.0)
                ends, beyond = line <= number, line == number + 1
                write(memory.turned + at * P.slots + line, tl.where(ends, cosine * last, sine), ends | beyond)
                after = tl.where(ends, sine * last, -cosine)
                write(memory.last + then * P.slots + line, after, ends | beyond)
                tl.store(memory.residual_norm + row, sine * residual)
                tl.store(memory.used + row, number + 1)
                goes_on = (sine * residual > tl.load(memory.aim + row)) & (steps < max_steps)
            else:
                # A is singular on the invariant space.
                tl.store(memory.verdict + row, STALLED)
                tl.store(memory.used + row, number)
    else:
        write(following, 0.0, inside)
        if part + number == 0:
            tl.store(memory.used + row, 0)
    if part == 0:
        tl.store(memory.active + then, goes_on.to(tl.int8))


@kernel
def _correct_kernel(correction, memory, n: tl.int32, P: tl.constexpr):
    """V R^{-1} of the target."""
    row, _, local, inside = part_of_row(n)
    line, used = tl.arange(0, P.slots), tl.load(memory.used + row)
    target = read(memory.target + row * P.slots + line, line < used)
    value = tl.full(local.shape, 0.0, correction.dtype.element_ty)
    for back in range(0, used):
        slot = used - 1 - back
        column = read(memory.triangle + (row * P.slots + slot) * P.slots + line, line <= slot)
        here = line == slot
        weight = taken(target, here) / taken(column, here)
        target -= weight * column
        vector = (slot.to(tl.int64) * tl.num_programs(0) + row) * n + local
        value += weight * read(memory.basis + vector, inside)
    write(correction + row * n + local, value, inside)
