"""The Energy Transformer: one energy of all tokens, descended for a few steps or to its minimum."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

from .. import _validate
from .._solve import solve
from ..energies.legendre import LegendreEnergy, PublishedDynamics
from ..options import SolveKeywords, SolveOptions
from ..potentials import LogSumExp, Potential, TokenAttention, TokenMemory
from ..potentials.layer_norm import LayerNormPotential
from ..potentials.summed_scores import Polynomial
from ..solvers import GradientDescent
from .remembering import Remembering

Mode: TypeAlias = Literal["equilibrium", "published"]


class EnergyLayerNorm(nn.Module):
    """Layer norm with one gain gamma > 0 for all entries, the gradient of a convex function (`lagrangian`)."""

    def __init__(self, dim: int, *, bias: bool = True, eps: float = 1e-5, **made: Any) -> None:
        super().__init__()
        # softplus(raw) = 1.
        self.raw_gamma = nn.Parameter(torch.full((), 0.5413248546129181, **made))
        self.delta = nn.Parameter(torch.zeros(dim, **made)) if bias else None
        self.eps = eps

    def lagrangian(self) -> LayerNormPotential:
        """L, of which this layer is the gradient."""
        return LayerNormPotential(F.softplus(self.raw_gamma), self.delta, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.lagrangian().mean(x)


class EnergyTransformer(Remembering):
    """Tokens that descend one energy together."""

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        memories: int,
        *,
        mode: Mode = "equilibrium",
        memory: Any = "rectified",
        beta: Any = None,
        memory_beta: float = 1.0,
        exclude_self: bool = False,
        causal: bool = False,
        steps: int = 12,
        step_size: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[SolveKeywords],
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.mode, self.steps, self.step_size, self.exclude_self = mode, steps, step_size, exclude_self
        self.beta = head_dim**-0.5 if beta is None else beta
        self.memory, self.memory_beta = memory, memory_beta
        self.norm = EnergyLayerNorm(dim, **made)
        self.w_query = nn.Parameter(torch.empty(heads, head_dim, dim, **made))
        self.w_key = nn.Parameter(torch.empty(heads, head_dim, dim, **made))
        self.memories = nn.Parameter(torch.empty(memories, dim, **made))
        self.options = SolveOptions().override(**options)
        for weight, std in ((self.w_query, 0.002), (self.w_key, 0.002), (self.memories, 0.02)):
            nn.init.normal_(weight, std=std)

    def potential(self, mask: Tensor | None = None) -> Potential:
        """Phi, minus the published energy, of the normalised tokens."""
        made_by = {"rectified": Polynomial, "softmax": LogSumExp}.get(self.memory, self.memory)
        attention = TokenAttention(self.w_query, self.w_key, self.beta, mask=mask, exclude_self=self.exclude_self)
        return attention + TokenMemory(made_by(self.memories, self.memory_beta))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        return_energies: bool = False,
        return_solution: bool = False,
        **options: Unpack[SolveKeywords],
    ) -> Any:
        """The tokens x (*batch, N, dim) after the steps, or at the minimum."""
        chosen = self.options.override(**options)
        lagrangian, potential = self.norm.lagrangian(), self.potential(mask)
        if self.mode == "published":
            problem: Any = PublishedDynamics(lagrangian, potential)
            solver: Any = GradientDescent(step_size=self.step_size, max_steps=self.steps, rtol=0, atol=0)
            chosen = chosen.override(solver=solver)
        else:
            problem = LegendreEnergy(lagrangian, potential, x)
        solution = solve(
            problem,
            x,
            solver=chosen.effective_solver,
            adjoint=chosen.effective_adjoint,
            on_failure=chosen.on_failure,
            trace=return_energies,
        )
        self._remember(solution.report)
        results = [solution.value]
        if return_energies:
            assert solution.trace is not None
            results.append(solution.trace.energy)
        if return_solution:
            results.append(solution)
        return tuple(results) if len(results) > 1 else solution.value
