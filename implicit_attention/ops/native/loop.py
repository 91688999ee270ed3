"""The general loop's look at one evaluation of a map, in one pass over the states by the native library."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import torch
from torch import Tensor

from .library import Library


class Measured(NamedTuple):
    """r = f(z) - z (*lead, n), |r| and the tolerance atol + rtol |f(z)|, (*lead)."""

    r: Tensor
    residual: Tensor
    tolerance: Tensor


def measured(library: Library, z: Tensor, mapped: Tensor, rtol: float, atol: float, like: Tensor) -> Measured:
    """Compare states with their images: contiguous tensors (*lead, n) of one dtype, in this machine's memory.

    like: a contiguous tensor (*lead) of that dtype.
    """
    # Torch is slower with shapes.
    r, residual, tolerance = torch.empty_like(z), torch.empty_like(like), torch.empty_like(like)
    numbers = array("d", (rtol, atol))
    addresses = array("Q", [t.data_ptr() for t in (z, mapped, r, residual, tolerance)])
    library.measure(
        z.dtype.itemsize,
        residual.numel(),
        z.shape[-1],
        numbers.buffer_info()[0],
        addresses.buffer_info()[0],
        library.parallel_for,
        torch.get_num_threads(),
    )
    return Measured(r, residual, tolerance)


class Decisions:
    """The state of every row of a solve, which the library updates in place.

    Args:
        active: which rows are unfinished, (*lead).
        residual, tolerance, steps: at the best state, (*lead).
        num_evals: evaluations, (*lead).
        status: codes of `Status`, (*lead).
    """

    def __init__(
        self, active: Tensor, residual: Tensor, tolerance: Tensor, steps: Tensor, num_evals: Tensor, status: Tensor
    ) -> None:
        #: Which rows were improved by the last step.
        self.better = torch.empty_like(active)
        self._kept = active, residual, tolerance, steps, num_evals, status, self.better
        self._addresses = array("Q", [*(t.data_ptr() for t in self._kept), 0, 0, 0])

    def decide(
        self,
        library: Library,
        step: int,
        residual: Tensor,
        tolerance: Tensor,
        accepted: Tensor | None,
        *,
        fixed: bool,
        descends: bool,
    ) -> tuple[int, int]:
        """Decide after a step, and return how many rows it improved, and how many are unfinished.

        accepted: (*lead), rows whose step the solver accepts; None for all.
        fixed: whether the number of steps is fixed; else rows end by their residual.
        descends: whether the last state is the best one.
        """
        addresses = self._addresses
        addresses[-3], addresses[-2] = residual.data_ptr(), tolerance.data_ptr()
        addresses[-1] = 0 if accepted is None else accepted.data_ptr()
        counts: int = library.decide(
            residual.dtype.itemsize, residual.numel(), step, fixed, descends, addresses.buffer_info()[0]
        )
        return counts >> 32, counts & 0xFFFFFFFF


class Planned:
    """The measurement and the decisions of one evaluation after the other, by calls that are planned once.

    Args:
        decisions: the state of every row.
        z: a state, contiguous, (*lead, n).
        like: a contiguous tensor (*lead) of that dtype.
        rtol, atol: tolerances.
        fixed, descends: as for `Decisions.decide`.
    """

    def __init__(
        self,
        library: Library,
        decisions: Decisions,
        z: Tensor,
        like: Tensor,
        rtol: float,
        atol: float,
        *,
        fixed: bool,
        descends: bool,
    ) -> None:
        self.library, self.decisions = library, decisions
        #: What the last evaluation was measured to be, and which candidates the method accepted.
        self.r, self.residual, self.tolerance = torch.empty_like(z), torch.empty_like(like), torch.empty_like(like)
        self.accepted = torch.ones_like(decisions.better)
        self.sizes = z.dtype.itemsize, like.numel(), z.shape[-1]
        self.workers = library.parallel_for, torch.get_num_threads()
        self._numbers = array("d", (rtol, atol))
        self._points = array("Q", [0, 0, *(t.data_ptr() for t in (self.r, self.residual, self.tolerance))])
        last = (self.residual, self.tolerance, self.accepted)
        self._rows = array("Q", [*decisions._addresses[:-3], *(t.data_ptr() for t in last)])
        self._measure = (*self.sizes, self._numbers.buffer_info()[0], self._points.buffer_info()[0], *self.workers)
        self._decide = fixed, descends, self._rows.buffer_info()[0]

    def measure(self, z: Tensor, mapped: Tensor) -> None:
        """Compare states with their images: contiguous tensors."""
        self._points[0], self._points[1] = z.data_ptr(), mapped.data_ptr()
        self.library.measure(*self._measure)

    def decide(self, step: int) -> tuple[int, int]:
        """Decide about the candidates that are `accepted`: how many rows were improved, and how many are unfinished."""
        counts: int = self.library.decide(*self.sizes[:2], step, *self._decide)
        return counts >> 32, counts & 0xFFFFFFFF


#: Steps that are mixed at most, as in mixing.h.
MOST_MIXED = 8


class Mixing(NamedTuple):
    """The memory of Anderson's method, which the library updates in place.

    z, r, residual: of the last accepted states, (*lead, n) and (*lead).
    accelerated: whether the step that was tried last is more than a plain one, (*lead).
    dr, df: the last changes of r and f(z), (*lead, history, n).
    gram: products of the former, (*lead, history, history).
    counts: how many changes may be mixed, and how many were made, (*lead, 2).
    """

    z: Tensor
    r: Tensor
    residual: Tensor
    accelerated: Tensor
    dr: Tensor
    df: Tensor
    gram: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, z: Tensor, history: int) -> Mixing:
        """Return the memory before the first evaluation, for states (*lead, n)."""
        *lead, n = z.shape
        last_z, last_r = (z.new_zeros(z.shape) for _ in range(2))
        dr, df = (z.new_empty(*lead, history, n) for _ in range(2))
        accelerated, counts = z.new_zeros(lead, dtype=torch.bool), z.new_zeros(*lead, 2, dtype=torch.int32)
        gram = z.new_empty(*lead, history, history)
        return cls(last_z, last_r, z.new_zeros(lead), accelerated, dr, df, gram, counts)

    def accepted(self, library: Library, residual: Tensor, growth: float) -> Tensor:
        """Return which candidates are accepted, (*lead): plain steps, and others where |r| grew at most so much."""
        return _accepted(library, residual, self.residual, self.accelerated, growth)

    def candidate(
        self,
        library: Library,
        z: Tensor,
        r: Tensor,
        residual: Tensor,
        accepted: Tensor,
        *,
        ridge: float,
        mixes: bool,
        learns: bool,
    ) -> Tensor:
        """Return the states to evaluate next, (*lead, n), from the last evaluation: contiguous tensors.

        mixes: whether a step may be more than a plain one.
        learns: whether there is a step before to learn from.
        """
        to = torch.empty_like(z)
        integers = array("q", (residual.numel(), z.shape[-1], self.dr.shape[-2], mixes, learns))
        addresses = array("Q", [t.data_ptr() for t in (*self, z, r, residual, accepted, to)])
        places = integers.buffer_info()[0], ridge, addresses.buffer_info()[0]
        library.mix(z.dtype.itemsize, *places, library.parallel_for, torch.get_num_threads())
        return to


class MixedSteps:
    """Anderson's steps for `Planned` evaluations.

    Args:
        mixing: the memory.
        ridge: of the systems.
        growth: how much |r| may grow in a mixed step.
        plain_steps: how many steps are plain ones at first.
    """

    def __init__(self, mixing: Mixing, planned: Planned, *, ridge: float, growth: float, plain_steps: int) -> None:
        self.mixing, self.planned, self.plain_steps = mixing, planned, plain_steps
        itemsize, count, n = planned.sizes
        judged = planned.residual, mixing.residual, mixing.accelerated, planned.accepted
        self._accept = itemsize, count, growth, *(t.data_ptr() for t in judged)
        self._integers = array("q", (count, n, mixing.dr.shape[-2], 0, 1))
        point = planned.r, planned.residual, planned.accepted
        self._addresses = array("Q", [*(t.data_ptr() for t in mixing), 0, *(t.data_ptr() for t in point), 0])
        places = self._integers.buffer_info()[0], ridge, self._addresses.buffer_info()[0]
        self._mix = itemsize, *places, *planned.workers

    def accept(self) -> None:
        """Say which candidates are accepted, after the first evaluation."""
        self.planned.library.accept(*self._accept)

    def next(self, z: Tensor, mapped: Tensor, step: int) -> Tensor:
        """Return the states to evaluate next, of the shape of z."""
        to = torch.empty_like(z)
        self._integers[3] = step >= self.plain_steps
        self._addresses[-5], self._addresses[-1] = z.data_ptr(), to.data_ptr()
        self.planned.library.mix(*self._mix)
        return to


class PlainSteps:
    """Plain steps for `Planned` evaluations, all of which are accepted."""

    def accept(self) -> None:
        """Change nothing."""

    def next(self, z: Tensor, mapped: Tensor, step: int) -> Tensor:
        return mapped


def _accepted(library: Library, residual: Tensor, before: Tensor, accelerated: Tensor, growth: float) -> Tensor:
    accepted = torch.empty_like(accelerated)
    addresses = (t.data_ptr() for t in (residual, before, accelerated, accepted))
    library.accept(residual.dtype.itemsize, residual.numel(), growth, *addresses)
    return accepted


class Secants(NamedTuple):
    """The memory of Broyden's method, which the library updates in place.

    z, r, residual: of the last accepted states, (*lead, n) and (*lead).
    accelerated: whether the step that was tried last is more than a plain one, (*lead).
    u, v: the pairs of minus the inverse Jacobian I - sum_i u_i v_i^T, (*lead, history, n).
    valid: which of them hold, (*lead, history).
    made: how many were made, (*lead).
    """

    z: Tensor
    r: Tensor
    residual: Tensor
    accelerated: Tensor
    u: Tensor
    v: Tensor
    valid: Tensor
    made: Tensor

    @classmethod
    def empty(cls, z: Tensor, history: int) -> Secants:
        """Return the memory before the first evaluation, for states (*lead, n)."""
        *lead, n = z.shape
        last_z, last_r = (z.new_zeros(z.shape) for _ in range(2))
        u, v = (z.new_empty(*lead, history, n) for _ in range(2))
        accelerated, valid = z.new_zeros(lead, dtype=torch.bool), z.new_zeros(*lead, history, dtype=torch.bool)
        made = z.new_zeros(lead, dtype=torch.int32)
        return cls(last_z, last_r, z.new_zeros(lead), accelerated, u, v, valid, made)

    def accepted(self, library: Library, residual: Tensor, growth: float) -> Tensor:
        """Return which candidates are accepted, (*lead): plain steps, and others where |r| grew at most so much."""
        return _accepted(library, residual, self.residual, self.accelerated, growth)

    def candidate(self, library: Library, *point: Tensor, learns: bool) -> Tensor:
        """Return the states to evaluate next, (*lead, n), from the last evaluation: contiguous tensors.

        point: z, r, the residual, and whether they were accepted.
        learns: whether there is a step before to learn from.
        """
        to = torch.empty_like(self.z)
        integers = array("q", (self.residual.numel(), self.z.shape[-1], self.u.shape[-2], learns))
        addresses = array("Q", [t.data_ptr() for t in (*self, *point, to)])
        places = integers.buffer_info()[0], addresses.buffer_info()[0]
        library.secants(self.z.itemsize, *places, library.parallel_for, torch.get_num_threads())
        return to


class Descent(NamedTuple):
    """The memory of Anderson's method with one change, on an energy that plain steps lower; the library updates it.

    z, r, residual, energy: of the last accepted states, (*lead, n) and (*lead).
    accelerated: whether the step that was tried last is more than a plain one, (*lead).
    direction: that step, (*lead, n).
    """

    z: Tensor
    r: Tensor
    direction: Tensor
    residual: Tensor
    energy: Tensor
    accelerated: Tensor

    @classmethod
    def empty(cls, z: Tensor) -> Descent:
        """Return the memory before the first evaluation, for states (*lead, n)."""
        lead = z.shape[:-1]
        last_z, last_r, direction = (z.new_empty(z.shape) for _ in range(3))
        residual, energy = (z.new_zeros(lead) for _ in range(2))
        return cls(last_z, last_r, direction, residual, energy, z.new_zeros(lead, dtype=torch.bool))

    def accepted(self, library: Library, r: Tensor, residual: Tensor, energy: Tensor) -> Tensor:
        """Return which candidates are accepted, (*lead): plain steps, and others that lower the energy enough."""
        accepted = torch.empty_like(self.accelerated)
        self._call(library, (r, r, residual, energy, accepted, r), candidates=False)
        return accepted

    def candidate(self, library: Library, *point: Tensor, ridge: float, **rule: bool) -> Tensor:
        """Return the states to evaluate next, (*lead, n), from the last evaluation: contiguous tensors.

        point: z, r, the residual, the energy, and whether they were accepted.
        rule: `learns`, if there is a step before; `mixes`, if a step may be accelerated; `last`, if the budget ends
            after the next one; `stretches`, if steps are long where the energy curves downwards.
        """
        to = torch.empty_like(self.z)
        self._call(library, (*point, to), candidates=True, ridge=ridge, **rule)
        return to

    def _call(
        self,
        library: Library,
        tensors: tuple[Tensor, ...],
        *,
        candidates: bool,
        ridge: float = 0.0,
        learns: bool = False,
        mixes: bool = False,
        last: bool = False,
        stretches: bool = False,
    ) -> None:
        flags = candidates, learns, mixes, last, stretches
        integers = array("q", (self.residual.numel(), self.z.shape[-1], *flags))
        addresses = array("Q", [t.data_ptr() for t in (*self, *tensors)])
        places = integers.buffer_info()[0], ridge, addresses.buffer_info()[0]
        library.descend(self.z.itemsize, *places, library.parallel_for, torch.get_num_threads())
