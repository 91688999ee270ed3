"""The steps of restarted GMRES by the native library, all problems in one call."""

from __future__ import annotations

import dataclasses
from array import array

import torch
from torch import Tensor
from typing_extensions import Self

from .library import Library


@dataclasses.dataclass
class Arnoldi:
    """The memory of one sweep, which the library updates in place; each tensor is contiguous.

    basis: the vectors of Arnoldi's method, (steps + 1, *batch, n).
    least_squares: the columns of R (*batch, steps, steps), the rotations and the target (*batch, steps).
    pending, stiffness: the signed residual, and the largest |A v| met, (*batch).
    residual_norm: the residual by the recurrence, (*batch); `tolerance` ends a problem.
    verdict: -1, or STALLED for a matrix that is singular on the space, (*batch) int8.
    num_steps: products, (*batch) int64.
    live, active: which problems take part, and which go on, (*batch).
    most: the largest `num_steps`.
    count: the steps of this sweep.
    """

    library: Library
    basis: Tensor
    least_squares: tuple[Tensor, ...]
    pending: Tensor
    stiffness: Tensor
    residual_norm: Tensor
    tolerance: Tensor
    verdict: Tensor
    num_steps: Tensor
    live: Tensor
    active: Tensor
    most: int
    count: int = 0

    @classmethod
    def of(
        cls, library: Library, like: Tensor, tolerance: Tensor, live: Tensor, num_steps: Tensor, steps: int, most: int
    ) -> Self:
        """Return the memory of a sweep of so many steps, for residuals like `like` (*batch, n)."""
        lead = tolerance.shape
        small = (like.new_empty(*lead, steps, steps), *(like.new_empty(*lead, steps) for _ in range(3)))
        pending, stiffness, residual_norm = (torch.empty_like(tolerance) for _ in range(3))
        verdict, active = torch.empty_like(live, dtype=torch.int8), torch.empty_like(live)
        basis, numbers = like.new_empty(steps + 1, *like.shape), (pending, stiffness, residual_norm, tolerance)
        return cls(library, basis, small, *numbers, verdict, num_steps, live, active, most)

    @property
    def negative_curvature(self) -> Tensor:
        """Return False for each problem: the method does not look for it."""
        return torch.zeros_like(self.live)

    def begin(self, residual: Tensor) -> int:
        """Start from residuals (*batch, n), and return how many problems go on."""
        return self._call(-1, residual)

    def step(self, product: Tensor) -> int:
        """Take the product with the last vector of the basis, which it overwrites; return how many problems go on."""
        self.count += 1
        return self._call(self.count - 1, product)

    def answer(self) -> Tensor:
        """Return the sum of the vectors with the smallest residual, (*batch, n); once, as it uses up its memory."""
        total = torch.empty_like(self.basis[0])
        self._call(self.count, total, answers=True)
        return total

    def _call(self, step: int, vectors: Tensor, *, answers: bool = False) -> int:
        capacity, n = len(self.basis) - 1, self.basis.shape[-1]
        integers = array("q", (self.live.numel(), n, capacity, self.most, step, answers))
        tensors = (self.basis, *self.least_squares, self.pending, self.stiffness, self.residual_norm, self.tolerance)
        rest = (self.verdict, self.num_steps, self.live, self.active, vectors)
        addresses = array("Q", [t.data_ptr() for t in (*tensors, *rest)])
        places = integers.buffer_info()[0], addresses.buffer_info()[0]
        left: int = self.library.krylov(vectors.itemsize, *places, self.library.parallel_for, torch.get_num_threads())
        return left
