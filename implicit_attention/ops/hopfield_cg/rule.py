"""When a system of the adjoint solve is done: what every implementation obeys."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class CGStop(NamedTuple):
    """Tolerance of |g - A u| <= rtol |g| and the largest number of products A p."""

    rtol: float
    max_steps: int


class Adjoint(NamedTuple):
    """u with A u = g for A = I - (1 - anchor) beta Cov(z), the Hessian of E at z, and the gradients that u carries.

    value: u, (*batch, N, D). Of what follows all but the last are (*batch, N): codes of `Status` (int8), the residual
    |g - A u| recomputed at u, its tolerance, products (int32), whether a direction of negative curvature was met; a
    query where it was has u = 0 and adds nothing to the gradients.
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
