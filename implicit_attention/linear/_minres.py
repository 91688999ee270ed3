"""Minimal residuals for symmetric systems, definite or not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .._torch import LinearMap, length
from ._vectors import ROUNDOFF, divide, dot
from .base import LinearSolver, SweepState, fresh, taken


@dataclass(frozen=True)
class MINRESState(SweepState):
    value: Tensor
    lanczos: Tensor  # v_k
    lanczos_before: Tensor  # v_{k-1}
    beta: Tensor  # beta_k, the coupling of v_k and v_{k-1}
    cosine: Tensor  # c_{k-1}
    sine: Tensor  # s_{k-1}
    delta: Tensor  # delta_k, entry (k-1, k) of the rotated tridiagonal matrix before the rotation k-1
    epsilon: Tensor  # epsilon_k, entry (k-2, k)
    search: Tensor  # d_{k-1}
    search_before: Tensor  # d_{k-2}
    stiffness: Tensor  # the largest column of the tridiagonal matrix met: a lower bound of |A|


@dataclass(frozen=True)
class MINRES(LinearSolver[MINRESState]):
    """Minimal residuals, for symmetric A, definite or indefinite.

    Not for matrices that are not symmetric: use `GMRES()`. `CG()` takes less memory where A is positive definite.

    x_k minimises |b - A x| over span{b, A b, ..., A^{k-1} b}; the residual never grows. A singular system ends at a
    least-squares solution, |A r| <= sqrt(10 eps) |A| |r|, as STALLED unless it is consistent.
    `negative_curvature` is free here: the residual r_{k-1} has the curvature -c_{k-1} gamma_k |r_{k-1}|^2 in terms of
    the rotations. MINRES goes on after meeting it, so the flag says that A is not positive definite on the Krylov space
    of b; no direction is kept.

    Reference: Paige, Saunders (1975), in the notation of Choi, Paige, Saunders (2011); the curvature test is that of
    Liu, Roosta (2022), "MINRES: from negative curvature detection to monotonicity properties".

    Examples:
        >>> import torch
        >>> from implicit_attention.linear import MINRES
        >>> matrix, b = torch.tensor([[-2.0, 1.0], [1.0, 3.0]]), torch.ones(4, 2)
        >>> solution = MINRES().solve(lambda v: v @ matrix.mT, b)
        >>> bool(solution.converged.all()), torch.allclose(solution.value @ matrix.mT, b)
        (True, True)
    """

    symmetric: ClassVar[bool] = True

    def begin(self, residual: Tensor) -> MINRESState:
        size, still = length(residual), torch.zeros_like(residual)
        zeros = torch.zeros_like(size)
        # All but the first vector of Lanczos begins at 0.
        vectors = dict.fromkeys(("value", "lanczos_before", "search", "search_before"), still)
        numbers = dict.fromkeys(("beta", "sine", "delta", "epsilon", "stiffness"), zeros)
        return MINRESState(**fresh(size), **vectors, **numbers, lanczos=divide(residual, size), cosine=zeros - 1)

    def step(self, matvec: LinearMap, state: MINRESState, active: Tensor) -> MINRESState:
        # The step of Lanczos: A v_k without its parts along v_{k-1} and v_k is beta_{k+1} v_{k+1}.
        product = torch.addcmul(matvec(state.lanczos), state.beta.unsqueeze(-1), state.lanczos_before, value=-1)
        alpha = dot(state.lanczos, product)
        following = torch.addcmul(product, alpha.unsqueeze(-1), state.lanczos, value=-1)
        beta = length(following)
        column = (state.beta.square() + alpha.square() + beta.square()).sqrt()
        stiffness = torch.maximum(state.stiffness, column)
        roundoff = ROUNDOFF * torch.finfo(beta.dtype).eps
        beta = torch.where(beta <= roundoff * stiffness, 0.0, beta)  # an invariant subspace
        gamma = state.sine * state.delta - state.cosine * alpha
        curvature = -state.cosine * gamma  # of the unit residual r_{k-1} / |r_{k-1}|
        # |A r_{k-1}| / |r_{k-1}| = |(gamma_k, c_{k-1} beta_{k+1})|. Rounding stops its fall at about sqrt(eps) |A|, and
        # going on would only add null vectors. Above that, A >= 0 has curvature >= |A r|^2 / |A| |r|^2 > roundoff |A|.
        blocked = active & (torch.hypot(gamma, state.cosine * beta) <= roundoff**0.5 * stiffness)
        negative = active & ~blocked & (curvature <= roundoff * stiffness)
        above, pivot = state.cosine * state.delta + state.sine * alpha, torch.hypot(gamma, beta)
        cosine, sine = divide(gamma, pivot), divide(beta, pivot)
        search = state.lanczos - above.unsqueeze(-1) * state.search - state.epsilon.unsqueeze(-1) * state.search_before
        search = divide(search, pivot)
        advanced = replace(
            state,
            residual_norm=sine * state.residual_norm,
            value=torch.addcmul(state.value, (cosine * state.residual_norm).unsqueeze(-1), search),
            lanczos=divide(following, beta),
            lanczos_before=state.lanczos,
            beta=beta,
            cosine=cosine,
            sine=sine,
            delta=-state.cosine * beta,
            epsilon=state.sine * beta,
            search=search,
            search_before=state.search,
            stiffness=stiffness,
        )
        return taken(state, advanced, active, blocked, negative)

    def correction(self, state: MINRESState) -> Tensor:
        return state.value
