"""The Neumann series: plain fixed-point iteration on a linear system."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .._torch import LinearMap, length
from ..solution import Remedies, Status
from ._vectors import choose, freeze
from .base import LinearSolver, SweepState, fresh

#: A residual that has grown by this factor is not a transient.
GROWTH = 1e6


@dataclass(frozen=True)
class NeumannState(SweepState):
    value: Tensor
    residual: Tensor
    best: Tensor
    best_norm: Tensor
    start_norm: Tensor


@dataclass(frozen=True)
class Neumann(LinearSolver[NeumannState]):
    """The Neumann series x = sum_k (I - A)^k b, for A with spectral radius of I - A below 1.

    Not for maps that do not contract, or only slowly: use `GMRES()`.

    x <- x + (b - A x). A problem whose residual grows by a factor 1e6 or leaves the finite numbers is DIVERGED; one
    that grows more slowly ends as MAX_STEPS. Both return their best iterate.

    Reference: Neumann (1877), Untersuchungen ueber das logarithmische und Newton'sche Potential.

    Examples:
        >>> import torch
        >>> from implicit_attention.linear import Neumann
        >>> matrix, b = torch.tensor([[1.0, 0.5], [0.0, 0.8]]), torch.ones(4, 2)
        >>> solution = Neumann().solve(lambda v: v @ matrix.mT, b)
        >>> bool(solution.converged.all()), torch.allclose(solution.value @ matrix.mT, b)
        (True, True)
    """

    symmetric: ClassVar[bool] = False
    remedies: ClassVar[Remedies] = {
        **LinearSolver.remedies,
        Status.MAX_STEPS: "raise max_steps, or use GMRES()",
        Status.DIVERGED: "I - A is no contraction: use CG(), MINRES() or GMRES()",
    }

    def default_max_steps(self, n: int) -> int:
        """500, whatever n: the series does not terminate after n terms."""
        return 500

    def begin(self, residual: Tensor) -> NeumannState:
        size, still = length(residual), torch.zeros_like(residual)
        return NeumannState(**fresh(size), value=still, residual=residual, best=still, best_norm=size, start_norm=size)

    def step(self, matvec: LinearMap, state: NeumannState, active: Tensor) -> NeumannState:
        value, residual = state.value + state.residual, state.residual - matvec(state.residual)
        size = length(residual)
        better = size < state.best_norm
        advanced = replace(
            state,
            residual_norm=size,
            verdict=state.verdict.masked_fill(~(size <= GROWTH * state.start_norm), int(Status.DIVERGED)),
            value=value,
            residual=residual,
            best=choose(better, value, state.best),
            best_norm=torch.where(better, size, state.best_norm),
        )
        return freeze(active, advanced, state)

    def correction(self, state: NeumannState) -> Tensor:
        return state.best
