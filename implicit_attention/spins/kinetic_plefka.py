"""Expansion of synchronous dynamics in the couplings: naive mean field, and one order beyond."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from .. import _validate
from .._torch import LinearMap, jvp_by_vjp, vjp
from ..linear import _matrices
from ..problem import Problem
from ..solution import Remedies, Status
from ._site import SpinSite, Spread, at_pairs, inner, linear_response
from .approximation import field_unit, require_numbers
from .bonds import Graph
from .dynamics import DynamicalMethod, StepProblem
from .mean_field import MeanFieldProblem, contracts
from .system import SpinSystem, couple


@dataclasses.dataclass(frozen=True, kw_only=True)
class KineticPlefka(DynamicalMethod):
    """m_i = response(theta_i), with an effective field theta that is expanded in the couplings.

    In the field theta_i spin i has the covariance Sigma_i and the third cumulant kappa_i. To first order

        theta_i = f_i = h_i + sum_j J_ij m_j,        D_ij = beta J_ij Tr Sigma_i Sigma_j,

    which is naive mean field. To second order a spin also feels how those before it fluctuate, Sbar_i = sum_j J_ij^2
    Sigma_j. With : and ::: for sums over two and three indices,

        theta_i = f_i + (beta/2) Sigma_i^{-1} (kappa_i : Sbar_i),    D_ij += (beta^2/2) J_ij^2 kappa_i ::: kappa_j.

    For D = 1 that is m_i = tanh(beta f_i - beta^2 m_i sum_j J_ij^2 (1 - m_j^2)), and D_ij of first order times
    1 + 2 beta J_ij m_i m_j. m is off by O(J^2) and O(J^3), sigma by O(J^3) and O(J^4): the second order is better
    where couplings are weak, and often worse where they are strong. There `GaussianClosure` holds.

    Args:
        order: 1 or 2. A matrix for each pair, (N, N, D, D), needs 1.
        response: of one spin to its field.
        solver: None is damped steps and then `Anderson`.
        adjoint: None is `Implicit()`.

    Reference: Aguilera, Moosavi and Shimazaki (2021), Plefka[t-1, t], for D = 1. Here for any response.

    Not for equilibrium, whose law is Boltzmann's: use `TAP()`; not for strong couplings: use `GaussianClosure()`.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import KineticPlefka, SpinSystem, magnetization
        >>> asymmetric = torch.tensor([[0.0, 0.4], [-0.2, 0.0]])
        >>> magnetization(SpinSystem(asymmetric, torch.ones(2, 1)), KineticPlefka(order=2)).shape
        torch.Size([2, 1])
    """

    remedies: ClassVar[Remedies] = {
        **DynamicalMethod.remedies,
        Status.MAX_STEPS: "the expansion need not settle for strong couplings: use GaussianClosure(), or lower beta",
    }

    order: int = _validate.integer(1, low=1, remedy="use 1 or 2")

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.check_choice("order", self.order, (1, 2))

    @property
    def by_products(self) -> bool:
        return self.order == 1

    by_bonds = True

    def check(self, system: SpinSystem) -> None:
        super().check(system)
        if self.order > 1:
            require_numbers("KineticPlefka(order=2)", system, "use order=1")

    def problem(self, system: SpinSystem) -> Problem:
        return MeanFieldProblem(system, self.response) if self.order == 1 else PlefkaProblem(system, self.response)

    def start(self, system: SpinSystem) -> Tensor:
        return super().start(system) if self.order == 1 else system.live_field

    def state_at(self, system: SpinSystem, m: Tensor) -> Tensor:
        return m if self.order == 1 else self.response.inverse(m, system.beta_over(0), system.radius)

    def contracting(self, system: SpinSystem) -> Tensor | None:
        return contracts(system, self.response) if self.order == 1 else None

    def unit(self, system: SpinSystem) -> Tensor | None:
        return field_unit(system) if self.order > 1 else None

    def magnetization_at(self, system: SpinSystem, state: Tensor) -> Tensor:
        return state if self.order == 1 else self.response.magnetization(state, system.beta_over(0), system.radius)

    def step_jacobian(self, system: SpinSystem, state: Tensor) -> LinearMap:
        if self.order == 1:
            return super().step_jacobian(system, state)
        # To second order a step in time solves an equation for theta: the problem's map is not that step.
        return PlefkaProblem(system, self.response).step_jacobian(state)

    def moments(self, system: SpinSystem, state: Tensor) -> tuple[Tensor, Tensor]:
        if self.order == 1:
            return state, linear_response(system, *self.spreads(system, state, state))
        site = SpinSite(self.response, state, system)
        return site.mean, site.linear_response(system) + site.skew_response(system)

    def check_step(self) -> None:
        required = "give the next magnetizations by one evaluation"
        received = f"KineticPlefka(order={self.order}), a step of which solves an equation"
        remedy = "use KineticPlefka(order=1) or GaussianClosure()"
        _validate.require(self.order == 1, "method", required, received, remedy)

    def spreads(self, system: SpinSystem, m: Tensor, before: Tensor) -> tuple[Spread, Spread]:
        spread = SpinSite(self.response, self.lone_field(system, m, before), system).spread
        return spread, spread

    def lone_field(self, system: SpinSystem, m: Tensor, before: Tensor) -> Tensor:
        return system.live_field + system.coupled(before)


class PlefkaProblem(StepProblem):
    """theta = h + J m(theta) + the second-order term: all sites of a sample are one problem.

    The state is theta and not m, which would have to stay inside the sphere.
    """

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return self.next(z, z)

    def next(self, z: Tensor, before: Tensor) -> Tensor:
        """The right-hand side for spins that are in the fields z, and were in the fields `before` a step ago."""
        past = SpinSite(self.response, before, self.system)
        site = past if z is before else SpinSite(self.response, z, self.system)
        local = self.system.live_field + self.system.coupled(past.mean)
        along, trace = _second_moments(self.system.live_pairs, past, z, self.system.graph)
        if self.system.known_couplings is not None and self.system.known_state is not None:
            known = SpinSite(self.response, self.system.known_state, self.system)
            more_along, more_trace = _second_moments(self.system.known_couplings, known, z, None)
            along, trace = along + more_along, trace + more_trace
        return local + site.onsager(along, trace)

    def step_jacobian(self, theta: Tensor) -> LinearMap:
        """Return the Jacobian of the step from the fields `before` to z = next(z, before), at a fixed point theta."""
        _, own = vjp(lambda z: self.next(z, theta), theta)
        basis = torch.eye(theta.shape[-1], dtype=theta.dtype, device=theta.device)
        # A site's equation has its own theta alone on the right-hand side: row by row a D x D matrix for each.
        rows = [own(axis.expand(theta.shape))[0] for axis in basis]
        inverse = _matrices.inverse(basis - torch.stack(rows, -2))

        def moved(v: Tensor) -> Tensor:
            return jvp_by_vjp(lambda before: self.next(theta, before), (theta,), (v,))

        return lambda v: (inverse @ moved(v)[..., None])[..., 0]


def _second_moments(couplings: Tensor, past: SpinSite, theta: Tensor, graph: Graph | None) -> tuple[Tensor, Tensor]:
    """M theta, (*batch, N, D), and tr M, (*batch, N), of the second moments of the field that past sites make."""
    weights, before = couplings.square(), past.field
    seen = weights * at_pairs(past.slope, graph)[1] * inner(theta, before, graph)
    along = couple(weights, past.tau[..., None], block=False, graph=graph) * theta
    along = along + couple(seen, before, block=False, graph=graph)
    return along, couple(weights, past.trace[..., None], block=False, graph=graph)[..., 0]
