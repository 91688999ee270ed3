"""`GMRES` on a card: all between two products by three kernels, as `linear/_gmres.py` has it.

A row is worked off in parts. `_project_kernel` writes the inner products of each part of A v with the basis,
`_subtract_kernel` adds them up and leaves the remainder, with its inner products, and `_rotate_kernel` takes the second
pass of Gram-Schmidt where a row needs it, the rotation and the decisions: in each program of a row alike.
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
from ..trust import empty
from .layout import PART, on_device
from .tile import kernel

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
        constants = {"PART": PART, "SIDE": TOGETHER // dtype.itemsize, "SLOTS": most}
        whole, tiny = {**constants, "PARTS": triton.next_power_of_2(parts)}, ROUNDOFF * torch.finfo(dtype).eps
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
                _project_kernel[(rows, parts)](product, memory, n, parts, step, **constants)
                _subtract_kernel[(rows, parts)](product, memory, n, parts, step, **whole)
                _rotate_kernel[(rows, parts)](memory, n, parts, step, max_steps, TINY=tiny, **whole)
            correction = numbers(*residual.shape)
            _correct_kernel[(rows, parts)](correction, memory, n, PART=PART, SLOTS=most)
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
    return tl.load(basis + at, mask=(slot <= last)[:, None] & (local < n)[None, :], other=0.0)


@triton.jit
def _write_sums(x, out, basis, number, row, n, local, SIDE: tl.constexpr):
    """Write the sum of squares of a part, and its inner products with the basis."""
    tl.store(out, tl.sum(x * x, 0))
    for first in range(0, number + 1, SIDE):
        slot = first + tl.arange(0, SIDE)
        vectors = _vectors(basis, slot, number, row, n, local)
        tl.store(out + 1 + slot, tl.sum(vectors * x[None, :], 1), mask=slot <= number)


@triton.jit
def _length(sums, row, parts, SLOTS: tl.constexpr, PARTS: tl.constexpr):
    """The length of a row from sums of its parts."""
    some = tl.arange(0, PARTS)
    squares = tl.load(sums + (row * parts + some) * (SLOTS + 1), mask=some < parts, other=0.0)
    return tl.sqrt(tl.sum(squares, 0))


@triton.jit
def _coordinates(sums, row, parts, slot, last, SLOTS: tl.constexpr, PARTS: tl.constexpr):
    """Inner products of a row with these vectors of the basis, from sums of its parts, up to the `last`; else 0."""
    some = tl.arange(0, PARTS)
    at = (row * parts + some)[:, None] * (SLOTS + 1) + 1 + slot[None, :]
    return tl.sum(tl.load(sums + at, mask=(some < parts)[:, None] & (slot <= last)[None, :], other=0.0), 0)


@kernel
def _project_kernel(
    product,
    memory,
    n: tl.int32,
    parts: tl.int32,
    number: tl.int32,
    PART: tl.constexpr,
    SIDE: tl.constexpr,
    SLOTS: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    local = part * PART + tl.arange(0, PART)
    if tl.load(memory.active + (number % 2) * tl.num_programs(0) + row) != 0:
        x = tl.load(product + row * n + local, mask=local < n, other=0.0)
        out = memory.projected + (row * parts + part) * (SLOTS + 1)
        _write_sums(x, out, memory.basis, number, row, n, local, SIDE)


@kernel
def _subtract_kernel(
    product,
    memory,
    n: tl.int32,
    parts: tl.int32,
    number: tl.int32,
    PART: tl.constexpr,
    SIDE: tl.constexpr,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The remainder after one pass, in the place of the next vector of the basis."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    local = part * PART + tl.arange(0, PART)
    rows = tl.num_programs(0).to(tl.int64)
    if tl.load(memory.active + (number % 2) * rows + row) != 0:
        x = tl.load(product + row * n + local, mask=local < n, other=0.0)
        for first in range(0, number + 1, SIDE):
            slot = first + tl.arange(0, SIDE)
            along = _coordinates(memory.projected, row, parts, slot, number, SLOTS, PARTS)
            x -= tl.sum(along[:, None] * _vectors(memory.basis, slot, number, row, n, local), 0)
            if part == 0:
                tl.store(memory.column + row * SLOTS + slot, along, mask=slot <= number)
        tl.store(memory.basis + ((number + 1) * rows + row) * n + local, x, mask=local < n)
        out = memory.again + (row * parts + part) * (SLOTS + 1)
        _write_sums(x, out, memory.basis, number, row, n, local, SIDE)
        if part == 0:
            size = _length(memory.projected, row, parts, SLOTS, PARTS)
            stiffness = tl.load(memory.stiffness + row)
            # As in torch, a NaN stays.
            tl.store(memory.stiffness + row, tl.where(stiffness >= size, stiffness, size))


@kernel
def _rotate_kernel(
    memory,
    n: tl.int32,
    parts: tl.int32,
    number: tl.int32,
    max_steps: tl.int32,
    PART: tl.constexpr,
    SIDE: tl.constexpr,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    TINY: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    local = part * PART + tl.arange(0, PART)
    inside, rows = local < n, tl.num_programs(0).to(tl.int64)
    following = memory.basis + ((number + 1) * rows + row) * n + local
    # What programs of a row use of the row is not written in its place, but by the first, which alone uses that.
    now, then = (number % 2) * rows + row, ((number + 1) % 2) * rows + row
    goes_on = number < 0
    if tl.load(memory.active + now) != 0:
        x = tl.load(following, mask=inside, other=0.0)
        size = _length(memory.projected, row, parts, SLOTS, PARTS)
        height = _length(memory.again, row, parts, SLOTS, PARTS)
        twice = height < LOST * size
        # Which vectors take part in a second pass; which numbers the last row of Q has: in the first step it is 1.
        until, known = tl.where(twice, number, -1), tl.where(number > 0, number, -1)
        removed = tl.full([], 0.0, memory.basis.dtype.element_ty)
        diagonal = removed
        line = tl.arange(0, SLOTS)
        column = tl.zeros([SLOTS], memory.basis.dtype.element_ty)
        for first in range(0, number + 1, SIDE):
            slot = first + tl.arange(0, SIDE)
            along = _coordinates(memory.again, row, parts, slot, until, SLOTS, PARTS)
            x -= tl.sum(along[:, None] * _vectors(memory.basis, slot, until, row, n, local), 0)
            removed += tl.sum(along * along, 0)
            along += tl.load(memory.column + row * SLOTS + slot, mask=slot <= number, other=0.0)
            diagonal += tl.sum(along * tl.load(memory.last + now * SLOTS + slot, mask=slot <= known, other=1.0), 0)
            if part == 0:
                at = (row * SLOTS + line[:, None]) * SLOTS + slot[None, :]
                real = (line < number)[:, None] & (slot[None, :] <= line[:, None] + 1)
                column += tl.sum(tl.load(memory.turned + at, mask=real, other=0.0) * along[None, :], 1)
        # What a second pass removes is orthogonal to the rest.
        rest = height * height - removed
        height = tl.where(twice, tl.sqrt(tl.where(rest > 0, rest, 0.0)), height)
        tiny, residual = TINY * tl.load(memory.stiffness + row), tl.load(memory.residual_norm + row)
        steps = tl.load(memory.num_steps + row) + 1
        tl.debug_barrier()  # every thread has read what another may write
        height = tl.where(height <= tiny, 0.0, height)
        sides = tl.abs(diagonal) + height
        unit = tl.where(sides == 0, 1.0, sides)
        short, long = diagonal / unit, height / unit
        pivot = sides * tl.sqrt(short * short + long * long)
        goes_on = ~(pivot <= tiny)
        x = x / tl.where(height == 0, 1.0, height)
        tl.store(following, tl.where(goes_on & (height != 0), x, 0.0), mask=inside)
        if part == 0:
            tl.store(memory.num_steps + row, steps)
            if goes_on:
                cosine, sine = diagonal / pivot, height / pivot
                at = row * SLOTS + number
                tl.store(memory.target + at, cosine * residual)
                tl.store(memory.triangle + at * SLOTS + line, tl.where(line == number, pivot, column))
                last = tl.load(memory.last + now * SLOTS + line, mask=line <= known, other=1.0)
                ends, beyond = line <= number, line == number + 1
                tl.store(memory.turned + at * SLOTS + line, tl.where(ends, cosine * last, sine), mask=ends | beyond)
                after = tl.where(ends, sine * last, -cosine)
                tl.store(memory.last + then * SLOTS + line, after, mask=ends | beyond)
                tl.store(memory.residual_norm + row, sine * residual)
                tl.store(memory.used + row, number + 1)
                goes_on = (sine * residual > tl.load(memory.aim + row)) & (steps < max_steps)
            else:
                # A is singular on the invariant space.
                tl.store(memory.verdict + row, STALLED)
                tl.store(memory.used + row, number)
    else:
        tl.store(following, tl.zeros([PART], memory.basis.dtype.element_ty), mask=inside)
        if part + number == 0:
            tl.store(memory.used + row, 0)
    if part == 0:
        tl.store(memory.active + then, goes_on.to(tl.int8))


@kernel
def _correct_kernel(correction, memory, n: tl.int32, PART: tl.constexpr, SLOTS: tl.constexpr):
    """V R^{-1} of the target."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    local, line = part * PART + tl.arange(0, PART), tl.arange(0, SLOTS)
    inside, used = local < n, tl.load(memory.used + row)
    target = tl.load(memory.target + row * SLOTS + line, mask=line < used, other=0.0)
    value = tl.zeros([PART], correction.dtype.element_ty)
    for back in range(0, used):
        slot = used - 1 - back
        column = tl.load(memory.triangle + (row * SLOTS + slot) * SLOTS + line, mask=line <= slot, other=0.0)
        here = line == slot
        weight = tl.sum(tl.where(here, target, 0.0), 0) / tl.sum(tl.where(here, column, 0.0), 0)
        target -= weight * column
        vector = (slot.to(tl.int64) * tl.num_programs(0) + row) * n + local
        value += weight * tl.load(memory.basis + vector, mask=inside, other=0.0)
    tl.store(correction + row * n + local, value, mask=inside)
