"""Naive mean field: every spin answers the mean of the others."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from ..potentials import AmosResponse, LargeDResponse, SaddlePointResponse, SignUnits, SphereUnits, SphericalLaw
from ..problem import Linearization, pullback
from . import low_rank
from ._curvature import coupling_bound, covariance_roots, everywhere, exceeds_one, lowest_eigenvalue
from ._site import stretched
from .approximation import ResponseApproximation, SampleProblem, power_of_two
from .system import SpinSystem, couple, mirrored


class MeanFieldProblem(SampleProblem):
    """m_i = R A(beta R |f_i|) f_i/|f_i| with f = h + J m: all sites of a sample are one problem.

    Args:
        system: the spins.
        response: of one spin to its field.
    """

    def __init__(self, system: SpinSystem, response: SphericalLaw) -> None:
        self.field = system.live_field
        self.low_rank = system.low_rank
        self.graph = system.graph
        self.couplings = system.live_factors if self.low_rank else system.live_pairs
        self.beta = system.beta_over(0)
        self.response = response
        self.radius = system.radius
        self.block = system.block
        self.own_axes = {"field": 2, "couplings": 4 if system.block else 2, "beta": 0}

    def coupled(self, m: Tensor) -> Tensor:
        """J m."""
        if self.low_rank:
            return low_rank.product(self.couplings, m)
        return couple(self.couplings, m, block=self.block, graph=self.graph)

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return self.response.answer(self.field + self.coupled(z), self.beta, self.radius)

    def linearize(self, z: Tensor) -> Linearization:
        f = self.field + self.coupled(z)
        beta = self.beta[..., None, None] if isinstance(self.beta, Tensor) else self.beta
        tau, slope = self.response.covariance_terms(f, self.beta, self.radius)

        def product(v: Tensor) -> Tensor:
            return beta * stretched(self.coupled(v), f, tau, slope)

        def transposed(u: Tensor) -> Tensor:
            inner = beta * stretched(u, f, tau, slope)
            if self.low_rank:
                return self.coupled(inner)
            twin = mirrored(self.couplings, block=self.block, graph=self.graph)
            return couple(twin, inner, block=self.block, graph=self.graph)

        return Linearization(product, transposed, lambda u: pullback(self, z, u))


#: Laws by which a spin varies most where it has no field.
_SOFTEST_AT_ZERO = (SphereUnits, SignUnits, AmosResponse, SaddlePointResponse, LargeDResponse)


@torch.no_grad()
def contracts(system: SpinSystem, response: SphericalLaw, *, spread: bool = False) -> Tensor | None:
    """(*batch), whether m -> response(h + J m) is known to contract: there is one solution, to which plain steps lead.

    With `spread` the field varies as well, V_i = sum_j J_ij^2 (R^2 - |m_j|^2), and m_i = beta R^2 gain(t) f_i with
    t = (beta R)^2 (|f_i|^2 + V_i). None if the law is not one of those that are known.
    """
    if type(response) not in _SOFTEST_AT_ZERO:
        return None
    # Of the law's own, also inside torch.vmap. Its gain falls with t, and is convex.
    zero = torch.zeros((), dtype=torch.float64)
    gain, slope = float(response.gain(zero, system.dim)), -float(response.gain_slope(zero, system.dim))
    beta = system.beta_tensor().detach()
    softest = beta * (gain * system.radius**2)
    # |tanh''| <= 4/3^1.5, half of which is the derivative of <tanh> by the variance. For vectors |gain'| sqrt(t) is
    # below slope sqrt(t) and, as A grows, below gain/(2 sqrt(t)): below their geometric mean.
    steep = 4 / 3**1.5 if system.dim == 1 else 2 * math.sqrt(slope * gain / 2)
    squares = steep * system.radius**4 * beta.square() / softest if spread else None
    return torch.lt(softest * coupling_bound(system, squares=squares, enough=1 / softest), 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanField(ResponseApproximation):
    r"""Independent spins in each other's mean field, stationary at m = response(h + J m).

    ```math
    \log Z = \sum_i \log Z_1\left( h_i + \sum_j J_{ij} m_j \right) - \frac\beta2 \sum_{ij} m_i^\top J_{ij}\, m_j
    ```

    The free energy of independent spins, off by O((beta J)^2). With the exact response it is an upper bound on F,
    unless some J_ii is negative: it counts with |m_i|^2 here, and with R^2 in truth.

    Args:
        response: of one spin to its field: `SphereUnits()` (exact), `AmosResponse()` or `LargeDResponse()`.
        solver: default damped steps and then `Anderson`, to a relative residual of 1e-11 (1e-6 in float32).
        adjoint: default `Implicit()`.

    Below a transition there are several branches; the one downhill from the response to the bare field is taken, or
    from `initial=`. It need not be a minimum: m = 0 without a field is none, which `check="stability"` reports.

    Reference: Plefka (1982), first order.

    Not for strong couplings or few neighbours, where it is the least accurate method: use `AdaTAP()` for many
    neighbours, `SaddlePoint(one_loop=True)` for few.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import MeanField, SpinSystem, magnetization
        >>> couplings = 0.5 * (torch.ones(3, 3) - torch.eye(3))
        >>> system = SpinSystem(couplings, torch.tensor([[0.3], [0.0], [-0.1]]), beta=0.8)
        >>> magnetization(system, MeanField())[:, 0].round(decimals=3)
        tensor([0.3590, 0.1980, 0.1420])
    """

    def problem(self, system: SpinSystem) -> MeanFieldProblem:
        return MeanFieldProblem(system, self.response)

    by_products = True

    def value(self, system: SpinSystem, state: Tensor) -> Tensor:
        others = system.coupled(state)
        sites = self.response.log_partition(system.live_field + others, system.beta, system.radius).sum(-1)
        return sites - system.beta_over(0) * (state * others).sum((-1, -2)) / 2

    def contracting(self, system: SpinSystem) -> Tensor | None:
        return contracts(system, self.response)

    def damping(self, system: SpinSystem) -> Tensor:
        # With t = beta R^2/D |lowest eigenvalue of J| a step falls, by convexity of log Z_1, if it is shorter than 1/t.
        scale = system.beta_tensor().detach() * system.radius**2 / system.dim
        near = _part_of_step(scale * coupling_bound(system))
        if everywhere(near >= 0.5):
            return near
        return torch.where(near >= 0.5, near, _part_of_step(scale * -lowest_eigenvalue(system)))

    def unstable(self, system: SpinSystem, state: Tensor) -> Tensor:
        certain = self.contracting(system)
        if certain is not None and everywhere(certain):
            return torch.zeros_like(certain)
        field = system.live_field + system.coupled(state)
        root, _ = covariance_roots(self.response, field, system.beta_over(0), system.radius)
        beta = system.beta_over(2)
        # The Hessian Cov^{-1} - beta J of beta F in m is positive where this map has no eigenvalue above 1.
        return exceeds_one(lambda v: beta * root(system.coupled(root(v))), state)


def _part_of_step(steep: Tensor) -> Tensor:
    """The part of a step that falls: a power of two, so that rounding errors, which depend on the batch, do not lead to
    another branch."""
    return 1 / power_of_two(steep.nan_to_num(nan=1.0).clamp(min=1.0))
