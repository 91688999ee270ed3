"""GMRES for the adjoints of plain tensors, whose steps the native library makes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from .._autograd import are_plain
from .._types import LinearMap
from ..linear import GMRES, LinearSolver
from ..ops.native.krylov import Arnoldi
from ..solvers.progress import library_for


@functools.lru_cache(maxsize=256)
def natively(method: LinearSolver[Any]) -> LinearSolver[Any]:
    """The same method with native steps, where it is GMRES."""
    return _NativeGMRES(**vars(method)) if type(method) is GMRES else method


@dataclasses.dataclass(frozen=True)
class _NativeGMRES(GMRES):
    """`GMRES` whose products may be overwritten."""

    def sweep(
        self, apply: LinearMap, residual: Tensor, tolerance: Tensor, live: Tensor, num_steps: Tensor, max_steps: int
    ) -> tuple[Any, Tensor]:
        library = library_for(residual, tolerance)
        if library is None or residual.numel() == 0:
            return super().sweep(apply, residual, tolerance, live, num_steps, max_steps)
        steps, tolerance, live = self.sweep_steps(max_steps), tolerance.contiguous(), live.contiguous()
        made = num_steps.clone(memory_format=torch.contiguous_format)
        state = Arnoldi.of(library, residual, tolerance, live, made, steps, max_steps)
        left = state.begin(residual.contiguous())
        while left and state.count < steps:
            product = apply(state.basis[state.count])
            if not are_plain(residual.dtype, product):
                return super().sweep(apply, residual, tolerance, live, num_steps, max_steps)
            left = state.step(product.contiguous())
        return state, state.num_steps

    def correction(self, state: Any) -> Tensor:
        return state.answer() if isinstance(state, Arnoldi) else super().correction(state)
