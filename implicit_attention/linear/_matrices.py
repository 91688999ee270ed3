"""Solves and inverses of batches of dense matrices that need not be definite."""

from __future__ import annotations

import torch
from torch import Tensor

#: The largest matrices that torch's LU factorization of a batch gets on a CPU.
LARGEST_LU = 128


def solve(a: Tensor, b: Tensor) -> Tensor:
    """a^{-1} b for a (*batch, n, n) and b (*batch, n, k); not finite where a is singular.

    With torch 2.13 on a CPU with two threads the LU factorization of two or more matrices of 150 x 150 or larger, in
    float32 and float64, never returns, or gives pivots of 0: `torch.linalg.solve`, `inv`, `lu_factor` and `slogdet` of
    such batches alike, single matrices and one thread excepted. Up to 149 x 149 it was never seen to. So batches of
    larger matrices are factorized as QR, whatever the number of threads.

    Gradients: with respect to both, to any order.
    """
    if _has_lu(a):
        solution: Tensor = torch.linalg.solve_ex(a, b).result
        return solution
    q, r = torch.linalg.qr(a)
    result: Tensor = torch.linalg.solve_triangular(r, q.mT @ b, upper=True)
    return result


def inverse(a: Tensor) -> Tensor:
    """a^{-1}, (*batch, n, n); not finite where a is singular. See `solve`."""
    if _has_lu(a):
        result: Tensor = torch.linalg.inv_ex(a).inverse
        return result
    return solve(a, torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand(a.shape))


def _has_lu(a: Tensor) -> bool:
    small = a.device.type != "cpu" or a.shape[-1] <= LARGEST_LU
    # Inside torch.vmap one matrix may be many.
    return small or (a.ndim == 2 and not torch._C._are_functorch_transforms_active())
