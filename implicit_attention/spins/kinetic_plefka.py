"""Expansion of synchronous dynamics in the couplings: naive mean field, and one order beyond."""

from __future__ import annotations

import dataclasses

import torch
from einops import einsum
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from .._autograd import jvp_by_vjp, vjp
from .._types import LinearMap
from ..potentials import SphereUnits, SphericalLaw
from ..problem import Problem
from .dynamics import DynamicalMethod, Moments
from .mean_field import MeanFieldProblem
from .system import SpinSystem


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
        order: 1 or 2. A matrix for each pair, (N, N, D, D), goes with 1.
        squared_shift: with order 2, let Sbar_i have the term (f_i - theta_i)(f_i - theta_i)^T. It is of fourth order,
            left out of the usual formula for D = 1, but not of one for vectors; there it costs accuracy.
        response: of one spin to its field.
        solver: None is damped steps and then `Anderson`.
        adjoint: None is `Implicit()`.

    Reference: Aguilera, Moosavi and Shimazaki (2021), Plefka[t-1, t], for D = 1. Here for any response.
    """

    order: int = 1
    squared_shift: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.check_integer("order", self.order, low=1, remedy="use 1 or 2")
        _validate.check_choice("order", self.order, (1, 2))
        if not isinstance(self.squared_shift, bool):
            raise TypeError(_validate.message("squared_shift", "be True or False", repr(self.squared_shift)))
        first = self.order == 1
        _validate.require(not (first and self.squared_shift), "squared_shift", "be False", True, "use order=2")

    def check(self, system: SpinSystem) -> None:
        super().check(system)
        required = "have a number for each pair, (N, N) or (*batch, N, N), for order=2"
        received = f"shape {tuple(system.couplings.shape)}"
        _validate.require(self.order == 1 or not system.block, "couplings", required, received, "use order=1")

    def problem(self, system: SpinSystem) -> Problem:
        if self.order == 1:
            return MeanFieldProblem(system, self.response)
        return PlefkaProblem(system, self.response, squared_shift=self.squared_shift)

    def start(self, system: SpinSystem) -> Tensor:
        if self.order == 2:
            return system.live_field
        return self.response.magnetization(system.live_field, system.sample_beta, system.radius)

    def state_at(self, system: SpinSystem, m: Tensor) -> Tensor:
        return m if self.order == 1 else self.response.inverse(m, system.sample_beta, system.radius)

    def step_jacobian(self, system: SpinSystem, state: Tensor) -> LinearMap:
        problem = self.problem(system)
        # To second order theta is in its own equation, which a step solves: the problem's map is no step.
        return (
            problem.step_jacobian(state) if isinstance(problem, PlefkaProblem) else super().step_jacobian(system, state)
        )

    def moments(self, system: SpinSystem, state: Tensor) -> Moments:
        if self.order == 1:
            site = Site(self.response, system.live_field + system.coupled(state), system)
            return Moments(state, site.linear_response(system))
        site = Site(self.response, state, system)
        return Moments(site.mean, site.linear_response(system) + site.skew_response(system))


class PlefkaProblem(Problem):
    """theta = h + J m(theta) + the second-order term: all sites of a sample are one problem.

    The state is theta and not m, which would have to stay inside the sphere.

    Args:
        system: the spins, with a number for each pair.
        response: of one spin to its field.
        squared_shift: as in `KineticPlefka`.
    """

    event_ndim = 2
    row_block = 1

    def __init__(self, system: SpinSystem, response: SphericalLaw, *, squared_shift: bool) -> None:
        self.system = system
        self.response = response
        self.squared_shift = squared_shift

    def select(self, index: Tensor) -> Self:
        clone = self.replace(*self.tensors())
        clone.system = self.system.select(index)
        return clone

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return self.next(z, z)

    def next(self, z: Tensor, before: Tensor) -> Tensor:
        """The right-hand side for spins that are in the fields z, and were in the fields `before` a step ago."""
        past = Site(self.response, before, self.system)
        site = past if z is before else Site(self.response, z, self.system)
        local = self.system.live_field + self.system.coupled(past.mean)
        weights = self.system.live_couplings.square()
        # Of the second moment M of the field, M theta and tr M are all that counts.
        along = (weights @ past.tau[..., None]) * z + (weights * past.slope[..., None, :] * (z @ before.mT)) @ before
        trace = (weights @ past.trace[..., None])[..., 0]
        if self.squared_shift:
            shift = local - z
            along = along + shift * (shift * z).sum(-1, keepdim=True)
            trace = trace + shift.square().sum(-1)
        return local + site.onsager(along, trace)

    def step_jacobian(self, theta: Tensor) -> LinearMap:
        """Of the step that leads from the fields `before` to z = next(z, before), at a fixed point theta."""
        _, own = vjp(lambda z: self.next(z, theta), theta)
        basis = torch.eye(theta.shape[-1], dtype=theta.dtype, device=theta.device)
        # A site's equation has its own theta alone on the right-hand side: row by row a D x D matrix for each.
        rows = [own(axis.expand(theta.shape))[0] for axis in basis]
        inverse = torch.linalg.inv_ex(basis - torch.stack(rows, -2)).inverse

        def product(v: Tensor) -> Tensor:
            moved = jvp_by_vjp(lambda before: self.next(theta, before), (theta,), (v,))
            result: Tensor = (inverse @ moved[..., None])[..., 0]
            return result

        return product


class Site:
    """The cumulants of spins in given fields theta, (*batch, N, D), as functions that are smooth also at 0.

        m = beta tau theta,    Sigma = tau I + slope theta theta^T,
        beta kappa_abc = skew (I_ab theta_c + I_ac theta_b + I_bc theta_a) + cubic theta_a theta_b theta_c,

    with slope and, for D > 1, skew = slope the derivative of tau, and cubic that of slope, over |theta|.
    """

    def __init__(self, response: SphericalLaw, theta: Tensor, system: SpinSystem) -> None:
        self.theta = theta
        self.dim = theta.shape[-1]
        self.beta, self.radius = system.site_beta, system.radius
        self.response = response
        self.squared = theta.square().sum(-1)
        arguments = theta, system.sample_beta, system.radius
        self.mean = response.magnetization(*arguments)
        self.tau, self.slope = response.covariance_terms(*arguments)
        self.rho = response.covariance_parts(*arguments)[1]
        # Its variance is too small to divide by, but has a logarithm with a slope of -2 beta m.
        self.ising = self.dim == 1 and isinstance(response, SphereUnits)

    @property
    def overlap(self) -> Tensor:
        """theta_i . theta_j, (*batch, N, N)."""
        return self.theta @ self.theta.mT

    @property
    def trace(self) -> Tensor:
        """Tr Sigma."""
        return self.dim * self.tau + self.slope * self.squared

    def skewness(self) -> tuple[Tensor, Tensor]:
        """(skew, cubic)."""
        scale = self.beta * self.beta * self.radius**2
        t = scale * self.squared
        if self.ising:
            return -2 / 3 * scale * self.response.gain(t, 1) * self.rho, torch.zeros_like(t)
        by_t = vjp(lambda t: self.response.gain_slope(t, self.dim), t)[1](torch.ones_like(t))[0]
        return self.slope, 4 * (scale * self.radius) ** 2 * by_t

    def onsager(self, along: Tensor, trace: Tensor) -> Tensor:
        """(beta/2) Sigma^{-1} (kappa : M) from M theta, (*batch, N, D), and tr M, (*batch, N)."""
        if self.ising:
            beta = self.beta[..., None] if isinstance(self.beta, Tensor) else self.beta
            return -beta * self.mean * trace[..., None]
        skew, cubic = self.skewness()
        across = skew / self.tau
        quadratic = (self.theta * along).sum(-1)
        own = (skew * trace + (cubic - 2 * across * self.slope) * quadratic) / self.rho
        return across[..., None] * along + own[..., None] * self.theta / 2

    def linear_response(self, system: SpinSystem) -> Tensor:
        """beta Tr Sigma_i J_ij Sigma_j, (*batch, N, N); for matrices without the trace, (*batch, N, N, D, D)."""
        couplings, tau, slope = system.live_couplings, self.tau, self.slope
        beta = self.beta[..., None] if isinstance(self.beta, Tensor) else self.beta
        if not system.block:
            radial = slope * self.squared
            traces = (
                tau[..., :, None] * self.trace[..., None, :]
                + radial[..., :, None] * tau[..., None, :]
                + slope[..., :, None] * slope[..., None, :] * self.overlap.square()
            )
            return beta * couplings * traces
        theta, stretched = self.theta, slope[..., None] * self.theta
        inner = "... i a, ... i j a b -> ... i j b"
        left = tau[..., :, None, None, None] * couplings
        left = left + einsum(stretched, einsum(theta, couplings, inner), "... i a, ... i j b -> ... i j a b")
        right = tau[..., None, :, None, None] * left
        right = right + einsum(
            einsum(left, theta, "... i j a b, ... j b -> ... i j a"), stretched, "... i j a, ... j b -> ... i j a b"
        )
        return (beta[..., None, None] if isinstance(beta, Tensor) else beta) * right

    def skew_response(self, system: SpinSystem) -> Tensor:
        """(beta^2/2) J_ij^2 kappa_i ::: kappa_j, (*batch, N, N)."""
        skew, cubic = self.skewness()
        overlap = self.overlap
        crossed = skew[..., :, None] * (cubic * self.squared)[..., None, :]
        crossed = crossed + (cubic * self.squared)[..., :, None] * skew[..., None, :]
        flat = (3 * self.dim + 6) * skew[..., :, None] * skew[..., None, :] + 3 * crossed
        steep = cubic[..., :, None] * cubic[..., None, :] * overlap.square()
        return system.live_couplings.square() * overlap * (flat + steep) / 2
