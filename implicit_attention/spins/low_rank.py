"""Couplings J = U U^T without a diagonal, of which only products are computed."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from ..problem import Declared


class LowRank(Declared):
    """Couplings J_ij = u_i . u_j for i != j and J_ii = 0, with the rows u_i of U, known by their products J v alone.

    There is no (N, N) tensor. J is symmetric, with eigenvalues from -max_i |u_i|^2 to the largest one of U^T U.

    Args:
        factors: U, (N, r) or (*batch, N, r).

    Raises:
        TypeError, ValueError: factors that are no floating-point tensor of two axes or more.

    Methods that need products alone take it: `MeanField`, `KineticPlefka(order=1)`, `GaussianClosure`, and
    `AdaTAP(prior=GaussianUnits())`, which solves by Woodbury's formula, in O(N r^2).

    Not for other methods, nor where r is about N: `dense()` gives the same couplings as a tensor.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import LowRank, MeanField, SpinSystem, magnetization
        >>> couplings, field = LowRank(torch.randn(500, 4) / 50), torch.randn(500, 8)
        >>> low = magnetization(SpinSystem(couplings, field), MeanField())
        >>> torch.allclose(low, magnetization(SpinSystem(couplings.dense(), field), MeanField()), atol=1e-4)
        True
    """

    def __init__(self, factors: Float[Tensor, "*batch N r"]) -> None:
        _validate.check_float_tensor("factors", factors, min_ndim=2)
        self.factors = factors

    def dense(self) -> Float[Tensor, "*batch N N"]:
        """J as a tensor."""
        own = torch.eye(self.factors.shape[-2], dtype=torch.bool, device=self.factors.device)
        return (self.factors @ self.factors.mT).masked_fill(own, 0.0)

    def __repr__(self) -> str:
        return f"LowRank(N = {self.factors.shape[-2]}, rank {self.factors.shape[-1]})"


def product(factors: Tensor, v: Tensor) -> Tensor:
    """J v, (*batch, N, D)."""
    return factors @ (factors.mT @ v) - factors.square().sum(-1, keepdim=True) * v


def product_of_squares(factors: Tensor, v: Tensor) -> Tensor:
    """sum_j J_ij^2 v_j, (*batch, N, 1)."""
    within = factors.mT @ (v * factors)
    own = factors.square().sum(-1, keepdim=True).square() * v
    return ((factors @ within) * factors).sum(-1, keepdim=True) - own
