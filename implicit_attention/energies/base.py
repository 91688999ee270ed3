"""Energies: fixed-point problems whose residual f(z) - z is a negative gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import _validate
from .._torch import check_graph, exact_precision, grad, transforms_active, vjp
from ..problem import Evaluation, Problem, UserProblem
from ..solution import Status


class Energy(Problem, general=True):
    """E(z) per problem, with f(z) = z - grad E(z). A subclass defines `energy` and sets `event_ndim`.

    Not for |z|^2/2 minus a potential: use `AnchoredEnergy`, whose steps and bounds follow from the potential's.

    Examples:
        >>> import torch
        >>> from implicit_attention import solve
        >>> from implicit_attention.energies import Energy
        >>> class Bowl(Energy):
        ...     event_ndim = 1
        ...     def energy(self, z):
        ...         return (z - 1).square().sum(-1)
        >>> solve(Bowl(), torch.zeros(2, 3)).value.round(decimals=3)[0]
        tensor([1., 1., 1.])
    """

    symmetric = True
    has_energy = True
    to_contract = "scale E down"
    #: What to check where no step ends the descent of E; empty if its lower bound is certain.
    if_bottomless: str = "check that E has a lower bound, and no kink (as |z| has) where it is lowest"

    def advice(self, remedies: Mapping[Status, str]) -> dict[Status, str]:
        texts = super().advice(remedies)
        if self.if_bottomless:
            for status in texts.keys() & {Status.MAX_STEPS, Status.STALLED, Status.DIVERGED}:
                texts[status] = f"{self.if_bottomless}; if so, {texts[status]}"
        return texts

    def gradient(self, z: Tensor) -> Tensor:
        """Grad E(z), of z's shape."""
        return self._gradient_and_energy(z)[0]

    def _gradient_and_energy(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Both from one evaluation of E."""

        def total(z: Tensor) -> tuple[Tensor, Tensor]:
            energy = self.energy(z)
            check_graph(self._name(), energy, self.energy, z)
            return energy.sum(), energy

        found: tuple[Tensor, Tensor] = grad(total, has_aux=True)(z)
        return found

    def hessian_product(self, z: Tensor, v: Tensor) -> Tensor:
        """Hess E(z) v, each problem with its own Hessian."""
        _, pullback = vjp(self.gradient, z)
        product: Tensor = pullback(v)[0]
        return product

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return z - self.gradient(z)


class Dynamics(Problem, general=True):
    """Dynamics without a fixed point, of which a solver makes a fixed number of steps."""

    #: The remedy for a solver that waits for convergence.
    _instead: ClassVar[str]

    def check_solver(self, solver: Any) -> None:
        fixed = solver.fixed_budget or solver.max_steps == 0
        required = "make a fixed number of steps: these dynamics have no fixed point"
        received = f"{type(solver).__name__} with rtol={solver.rtol:g}"
        _validate.require(fixed, "solver", required, received, self._instead)


class EnergyFunction(UserProblem, Energy):
    """The energy E(z, *tensors) of a user's function, with f(z) = z - grad E(z).

    Plain steps descend where no curvature of E exceeds 2; elsewhere `GradientDescent(step_size)` or `Picard(damping)`
    take shorter ones, and the accelerated solvers halve theirs until E falls.

    Args:
        function: E(z, *tensors) -> one number per problem, i.e. of z's shape without its last `event_ndim` axes; or an
            nn.Module, whose parameters are then declared. It needs a lower bound, and two derivatives: an energy of
            ReLU layers has a Hessian of zero almost everywhere, so that their biases get no gradient, and its minima
            may be kinks, where no solve ends. Softplus, SiLU and tanh have none.
        *inputs: every tensor that E reads and whose gradient may be wanted, maybe as `PerSample(t)` or `Shared(t)`.
        event_ndim: number of trailing axes of z that form one problem.

    Gradients: with respect to every declared tensor, first and second order.

    Modules: in evaluation mode, as dropout draws anew at every evaluation, and batch normalisation in training mode
    makes the energy of one problem depend on others. A solve that fails names these; a fixed budget of steps
    (rtol = atol = 0) is made all the same.

    Not for a map that is no gradient: use `FixedPointMap`.

    Examples:
        >>> import torch
        >>> from implicit_attention import EnergyFunction, solve
        >>> target = torch.tensor([2.0, -1.0], requires_grad=True)
        >>> energy = EnergyFunction(lambda z, t: (z - t).square().sum(-1), target, event_ndim=1)
        >>> solution = solve(energy, torch.zeros(3, 2))
        >>> torch.autograd.grad(solution.value.sum(), target)[0].round(decimals=3)
        tensor([3., 3.])
    """

    row_block = 1
    select = UserProblem._restricted

    def energy(self, z: Tensor) -> Tensor:
        result, lead = self._called(z), z.shape[: z.ndim - self.event_ndim]
        return self._check_output(result, z, lead, "of z without its event axes", self._to_one_number(result, z))

    def evaluate(self, z: Tensor, *, energy: bool) -> Evaluation:
        # One call of the network, not one for the energy and one for its gradient.
        gradient, value = self._gradient_and_energy(z)
        return Evaluation(z - gradient, value if energy else None)

    def _to_one_number(self, result: Any, z: Tensor) -> str:
        """The remedy for a result that is not one number per problem."""
        if not isinstance(result, Tensor):
            return "return the energy alone"
        lead = z.ndim - self.event_ndim
        if result.ndim > lead and result.shape[lead:].numel() == 1:
            return "drop its last axis of size 1 with .squeeze(-1)"
        axes = tuple(range(-self.event_ndim, 0))
        return f"sum it over the axes {axes} of z, which form one problem, and over no others"

    if_random = "call model.eval(): what draws random numbers, as dropout does, has no minimum"

    def cause(self, z: Tensor) -> str:
        lead = z.shape[: z.ndim - self.event_ndim]
        if (random := super().cause(z)) or transforms_active() or lead.numel() < 2:
            return random
        # Problems read each other, as in batch normalisation, if the energy of the first is not its own.
        others = torch.arange(lead.numel(), device=z.device).reshape(*lead, *(1,) * self.event_ndim) > 0
        problem, z = self.apart(), z.detach()
        with torch.no_grad(), exact_precision(z):
            moved = torch.where(others, z / 2 + 0.1, z)
            alone, beside = (problem.energy(state).flatten()[0] for state in (moved, z))
        if not bool((alone - beside).abs() > torch.finfo(z.dtype).eps ** (2 / 3) * beside.abs()):
            return ""
        return (
            f"`{self._name()}` mixes problems: the energy of one changes with the states of others, so that none "
            "descends by itself; call model.eval(), normalise each problem by itself (nn.LayerNorm, nn.GroupNorm), or "
            "raise event_ndim to make them one problem"
        )
