"""Naive mean field: every spin answers the mean of the others."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from einops import einsum
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from .._autograd import sum_to_shape
from ..potentials import SphereUnits, SphericalLaw
from ..problem import Linearization, Problem, restricted
from ._curvature import covariance_roots, exceeds_one, lowest_eigenvalue
from .approximation import FixedPointApproximation
from .system import SpinSystem, couple


class MeanFieldProblem(Problem):
    """m_i = R A(beta R |f_i|) f_i/|f_i| with f = h + J m: all sites of a sample are one problem.

    Args:
        system: the spins.
        response: of one spin to its field.
    """

    event_ndim = 2
    row_block = 1

    def __init__(self, system: SpinSystem, response: SphericalLaw) -> None:
        self.field = system.live_field
        self.couplings = system.live_couplings
        self.beta = system.beta
        self.response = response
        self.radius = system.radius
        self.block = system.block

    def local_field(self, m: Tensor) -> Tensor:
        """h + J m."""
        return self.field + couple(self.couplings, m, block=self.block)

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return self.response.magnetization(self.local_field(z), self.beta, self.radius)

    def linearize(self, z: Tensor) -> Linearization:
        f = self.local_field(z)
        beta = self.beta[..., None, None] if isinstance(self.beta, Tensor) else self.beta

        def responded(v: Tensor) -> Tensor:
            return beta * self.response.covariance_product(f, self.beta, self.radius, v)

        def product(v: Tensor) -> Tensor:
            return responded(couple(self.couplings, v, block=self.block))

        def transposed(u: Tensor) -> Tensor:
            twin = self.couplings.transpose(-4, -3) if self.block else self.couplings
            return couple(twin.mT, responded(u), block=self.block)

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            w = responded(u)
            pattern = "... i a, ... j b -> ... i j a b" if self.block else "... i d, ... j d -> ... i j"
            gradients: list[Tensor | None] = [w, sum_to_shape(einsum(w, z, pattern), self.couplings.shape)]
            if isinstance(self.beta, Tensor):
                gradients.append(sum_to_shape((w * f).sum((-1, -2)) / self.beta, self.beta.shape))
            return tuple(gradients)

        return Linearization(product, transposed, pullback)

    def select(self, index: Tensor) -> Self:
        return restricted(self, index, field=2, couplings=4 if self.block else 2, beta=0)

    def check_undeclared(self, z: Tensor) -> None:
        """Nothing is read but attributes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanField(FixedPointApproximation):
    """log Z = sum_i log Z_1(h_i + sum_j J_ij m_j) - (beta/2) sum_ij m_i J_ij m_j, stationary at m = response(h + J m).

    The free energy of independent spins, off by O((beta J)^2). With the exact response it is an upper bound on F,
    unless some J_ii is negative: it counts with |m_i|^2 here, and with R^2 in truth.

    Args:
        response: of one spin to its field: `SphereUnits()` (exact), `AmosResponse()` or `LargeDResponse()`.
        solver: default damped steps and then `Anderson`, to a relative residual of 1e-11 (1e-6 in float32).
        adjoint: default `Implicit()`.

    Below a transition there are several branches; the one downhill from the response to the bare field is taken, or
    from `initial=`. It need not be a minimum: m = 0 without a field is none, which `check="stability"` tells.

    Reference: Plefka (1982), first order.
    """

    response: SphericalLaw = dataclasses.field(default_factory=SphereUnits)

    def __post_init__(self) -> None:
        super().__post_init__()
        given: Any = self.response
        if not isinstance(given, SphericalLaw):
            raise TypeError(
                _validate.message("response", "be a SphericalLaw", repr(given), "for example SphereUnits()")
            )

    def check(self, system: SpinSystem) -> None:
        super().check(system)
        self.response.check("system", system.dim, system.radius)

    def site_response(self) -> SphericalLaw:
        return self.response

    def problem(self, system: SpinSystem) -> MeanFieldProblem:
        return MeanFieldProblem(system, self.response)

    def start(self, system: SpinSystem) -> Tensor:
        return self.response.magnetization(system.live_field, system.beta, system.radius)

    def state_at(self, system: SpinSystem, m: Tensor) -> Tensor:
        return m

    def value(self, system: SpinSystem, state: Tensor) -> Tensor:
        others = system.coupled(state)
        sites = self.response.log_partition(system.live_field + others, system.beta, system.radius).sum(-1)
        return sites - system.sample_beta * (state * others).sum((-1, -2)) / 2

    def damping(self, system: SpinSystem) -> Tensor:
        # With t = beta R^2/D |lowest eigenvalue of J| a step falls, by convexity of log Z_1, if it is shorter than 1/t.
        field, couplings = system.live_field.detach(), system.live_couplings.detach()
        # Numbers couple the components of the spins alike: one of them has all eigenvalues.
        like = field if system.block else field[..., :1]
        lowest = lowest_eigenvalue(lambda v: couple(couplings, v, block=system.block), like)
        beta = torch.as_tensor(system.sample_beta, dtype=field.dtype, device=field.device).detach()
        steep = beta * system.radius**2 / system.dim * -lowest
        # A power of two, so that rounding in other company does not lead another way.
        part: Tensor = torch.exp2(-torch.ceil(torch.log2(steep.nan_to_num(nan=1.0).clamp(min=1.0))))
        return part

    def unstable(self, system: SpinSystem, state: Tensor) -> Tensor:
        field = system.live_field + system.coupled(state)
        beta = system.sample_beta
        root, _ = covariance_roots(self.response, field, beta, system.radius)
        rows = beta[..., None, None] if isinstance(beta, Tensor) else beta
        # The Hessian Cov^{-1} - beta J of beta F in m is positive where this map has no eigenvalue above 1.
        return exceeds_one(lambda v: rows * root(system.coupled(root(v))), state)
