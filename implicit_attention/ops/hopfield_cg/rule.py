"""When a system of the adjoint solve is done: what every implementation obeys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..problem import Hopfield

#: Relative tolerance of the adjoint solve: tighter than any forward tolerance in use, and within reach of the precision
#: in which products are formed.
RTOL = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
MAX_STEPS = 500


class CGStop(NamedTuple):
    """Tolerance of |g - A u| <= rtol |g| and the largest number of products A p."""

    rtol: float
    max_steps: int

    @classmethod
    def of(cls, rtol: float | None, max_steps: int, products: torch.dtype) -> CGStop:
        """By default the tolerance of the precision in which products are formed."""
        return cls(RTOL[products] if rtol is None else rtol, max_steps)


class Adjoint(NamedTuple):
    """u with A u = g for A = I - (1 - anchor) beta Cov(z), the Hessian of E at z, and the gradients that u carries.

    value: u, (*batch, N, D). Of what follows all but the last are (*batch, N): codes of `Status` (int8), the residual
    |g - A u| recomputed at u, its tolerance, products (int32), whether a direction of negative curvature was met. A
    solution where it was is a saddle, whose status says so.
    by_beta: <df/dbeta, u> per query, (*batch, N). by_keys: (df/dK)^T u, of the keys' shape.
    """

    value: Tensor
    status: Tensor
    residual: Tensor
    tolerance: Tensor
    num_steps: Tensor
    negative_curvature: Tensor
    by_beta: Tensor
    by_keys: Tensor


def nothing(problem: Hopfield, state: Tensor) -> Adjoint:
    """The answer where there is nothing to solve."""
    row = state.new_zeros(state.shape[:-1])
    codes, counts = row.to(torch.int8), row.to(torch.int32)
    by_keys = state.new_zeros(problem.keys.shape)
    return Adjoint(torch.zeros_like(state), codes, row, row.clone(), counts, row.bool(), row.clone(), by_keys)
