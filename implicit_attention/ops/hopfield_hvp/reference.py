"""The product with every matrix written out: what the others are compared with."""

from __future__ import annotations

from torch import Tensor

from .._rows import Rows, dot
from ..problem import Hopfield


def hessian_product(problem: Hopfield, state: Tensor, vector: Tensor) -> Tensor:
    """A v = v - (1 - anchor) beta Cov(z) v, (*batch, N, D)."""
    rows = Rows(problem.to(state.dtype), fused=False).without_common()
    z, v = rows.laid(state), rows.laid(vector)
    weights = rows.weights(z.flatten(0, 1))
    mean = weights @ rows.keys
    spread = (weights * (v @ rows.keys.mT)) @ rows.keys - mean * dot(mean, v)[..., None]
    product = v - (1 - rows.anchor) * rows.beta * spread
    return rows.restored(product.flatten(0, 1)[:, : rows.dim])
