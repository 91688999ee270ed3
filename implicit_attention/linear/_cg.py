"""Conjugate gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .._torch import LinearMap, length
from ._vectors import ROUNDOFF, divide, dot
from .base import LinearSolver, SweepState, fresh, taken


@dataclass(frozen=True)
class CGState(SweepState):
    value: Tensor
    residual: Tensor
    residual_square: Tensor
    search: Tensor
    stiffness: Tensor  # the largest |A p| / |p| met: a lower bound of |A|


@dataclass(frozen=True)
class CG(LinearSolver[CGState]):
    """Conjugate gradients, for symmetric positive definite A.

    Not for matrices with negative eigenvalues, where it ends: use `MINRES()`; nor for others than symmetric: `GMRES()`.

    x_k minimises x . A x / 2 - b . x over span{b, A b, ..., A^{k-1} b}: k steps for k distinct eigenvalues.
    A problem that meets p . A p <= 0 ends there: it keeps its iterate, is flagged `negative_curvature` and gives the
    unit `direction` p / |p|; its status is STALLED. Curvature within rounding of 0 counts as negative only if |A p| is
    not small too: for A >= 0, |A p|^2 <= |A| p . A p, so that p . A p = 0 with A p != 0 proves A indefinite, while
    A p = 0 is a singular A (STALLED, not flagged).

    Reference: Hestenes, Stiefel (1952); the exit is that of Steihaug (1983).

    Examples:
        >>> import torch
        >>> from implicit_attention.linear import CG
        >>> matrix, b = torch.tensor([[2.0, 1.0], [1.0, 3.0]]), torch.ones(4, 2)
        >>> solution = CG().solve(lambda v: v @ matrix.mT, b)
        >>> bool(solution.converged.all()), torch.allclose(solution.value @ matrix.mT, b)
        (True, True)
    """

    symmetric: ClassVar[bool] = True
    monotone: ClassVar[bool] = False
    keeps_direction: ClassVar[bool] = True

    def begin(self, residual: Tensor) -> CGState:
        square = dot(residual, residual)
        return CGState(
            **fresh(square.sqrt()),
            value=torch.zeros_like(residual),
            residual=residual,
            residual_square=square,
            search=residual,
            stiffness=torch.zeros_like(square),
        )

    def step(self, matvec: LinearMap, state: CGState, active: Tensor) -> CGState:
        product = matvec(state.search)
        curvature, square = dot(state.search, product), dot(state.search, state.search)
        strength = dot(product, product)
        stiffness = torch.maximum(state.stiffness, divide(strength, square).sqrt())
        noise = ROUNDOFF * torch.finfo(product.dtype).eps * stiffness * square
        blocked = active & (curvature <= noise)  # a NaN is not blocked: it goes on into the residual and is seen there
        negative = blocked & ((curvature < -noise) | (strength > 100 * noise * stiffness))
        rate = divide(state.residual_square, curvature).unsqueeze(-1)
        residual = torch.addcmul(state.residual, rate, product, value=-1)
        square = dot(residual, residual)
        advanced = replace(
            state,
            value=torch.addcmul(state.value, rate, state.search),
            residual=residual,
            residual_norm=square.sqrt(),
            residual_square=square,
            search=torch.addcmul(residual, divide(square, state.residual_square).unsqueeze(-1), state.search),
            stiffness=stiffness,
        )
        return taken(state, advanced, active, blocked, negative)

    def correction(self, state: CGState) -> Tensor:
        return state.value

    def direction(self, state: CGState) -> Tensor:
        # The search direction of a blocked problem is still the one that blocked it.
        unit = divide(state.search, length(state.search))
        return torch.where(state.negative_curvature.unsqueeze(-1), unit, 0.0)
