"""The steps of the published Energy Transformer: activation checkpointing, and a report where the energy rises."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .._torch import transforms_active
from ..energies.causal_tokens import CausalDynamics
from ..energies.legendre import PublishedDynamics
from ..failure import OnFailure, policy_of, tell
from ..problem import Evaluation, Problem
from ..solvers import GradientDescent, Picard, Solver


class Recomputed(Problem):
    """Published steps whose energies have no graph, and which, by choice, a backward pass computes again.

    Args:
        *parts: of the problem.
        recompute: whether steps are computed again.
    """

    def __init__(self, *parts: Any, recompute: bool) -> None:
        super().__init__(*parts)
        self.recompute = recompute

    def evaluate(self, z: Tensor, *, energy: bool) -> Evaluation:
        # The hooks of torch's checkpointing are refused inside torch.func.
        if not self.recompute or transforms_active() or not torch.is_grad_enabled():
            return self._evaluated(z, energy)
        evaluation: Evaluation = checkpoint(self._evaluated, z, energy, use_reentrant=False, preserve_rng_state=False)
        return evaluation

    def _evaluated(self, z: Tensor, energy: bool) -> Evaluation:
        mapped, value = super().evaluate(z, energy=energy)
        # Energies with a graph would keep their intermediate tensors alive until the last step.
        return Evaluation(mapped, None if value is None else value.detach())


class PublishedSteps(Recomputed, PublishedDynamics):
    """The steps of `PublishedDynamics`."""


class CausalSteps(Recomputed, CausalDynamics):
    """The steps of `CausalDynamics`."""


def published_solver(step_size: float, steps: int, *, causal: bool) -> Solver:
    """The solver that makes `steps` steps of this size; causal tokens have no energy, and make damped plain steps."""
    fixed: dict[str, Any] = {"max_steps": steps, "rtol": 0.0, "atol": 0.0}
    return Picard(damping=1 - step_size, **fixed) if causal else GradientDescent(step_size, **fixed)


def report_rise(energies: Tensor, step_size: float, on_failure: OnFailure) -> None:
    """Raise or warn if energies (steps + 1, *lead) of any problem rise by more than rounding."""
    if policy_of(on_failure).over == "ignore" or energies.numel() == 0:
        return
    rises = energies.diff(dim=0)
    rounding = torch.finfo(energies.dtype).eps ** (2 / 3) * energies.abs().amax(0)
    rises = rises.where(rises > rounding, 0.0)
    failed = (rises > 0).any(0)

    def message() -> str:
        step, *problem = torch.unravel_index(rises.argmax(), rises.shape)
        place = (int(step), *map(int, problem))
        where = f" of problem {place[1] if len(place) == 2 else place[1:]}" if problem else ""
        count, of, by, before = int(failed.sum()), failed.numel(), float(rises[place]), float(energies[place])
        return (
            f"the energy rises in {count} of {of} problems, most at step {place[0] + 1}{where}, by {by:.3g} "
            f"from {before:.6g}: steps of {step_size:g} are too long there; use a smaller step_size, and more steps"
        )

    tell(on_failure, failed, message, received="the tokens")
