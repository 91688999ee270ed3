"""Synchronous dynamics in the Gaussian-field closure: the field of the others has a normal distribution."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor

from .. import _validate
from ..potentials import SphereUnits
from ._site import Spread, linear_response
from .approximation import require_numbers
from .dynamics import DynamicalMethod, Moments, StepProblem
from .mean_field import contracts
from .system import SpinSystem


@dataclasses.dataclass(frozen=True, kw_only=True)
class GaussianClosure(DynamicalMethod):
    """Every spin answers, on average, a field of mean f_i = h_i + sum_j J_ij m_j that fluctuates normally.

    The variance of spin j is R^2 - |m_j|^2, that of the field V_i = sum_j J_ij^2 (R^2 - |m_j|^2), to all orders in J.
    For D = 1 the average is taken exactly. For vectors the length of the field is taken to be sharp, which it is for
    large D: n_i^2 = |f_i|^2 + V_i:

        D = 1:  m_i = R <tanh(beta R (f_i + sqrt(V_i) z))>, z normal        D > 1:  m_i = R A(beta R n_i) f_i/n_i

    A step later s_j is seen through the field that it was part of:

        D_ij = J_ij Tr (dm_i/df_i) C_j,        Tr C_j = R^2 - |m_j|^2,

    with dm_i/df_i at fixed V_i, and C_j the covariance of s_j, equal across f_j in all directions. Left out is that the
    parts of a field are correlated: the closure is best for many neighbours and couplings J_ij and J_ji that have
    nothing to do with each other; for symmetric ones the reaction of the neighbours is missing. For few dimensions and
    weak couplings it is off by O(J^2/D), where `KineticPlefka(order=2)` is off by O(J^3).

    Args:
        response: of one spin to its field; for D = 1 only `SphereUnits()`.
        solver: None is damped steps and then `Anderson`.
        adjoint: None is `Implicit()`.

    Couplings are a number for each pair.

    Reference: Mezard and Sakellariou (2011), and Plefka[t-1] of Aguilera, Moosavi and Shimazaki (2021), for D = 1.

    Not for equilibrium, whose law is Boltzmann's: use `AdaTAP()`; not for few strong neighbours: use `synchronous`.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import GaussianClosure, SpinSystem, stationary_state
        >>> asymmetric = torch.tensor([[0.0, 0.8], [-0.4, 0.0]])
        >>> state = stationary_state(SpinSystem(asymmetric, torch.ones(2, 1)), GaussianClosure())
        >>> bool(state.entropy_production > 0)
        True
    """

    def check(self, system: SpinSystem) -> None:
        super().check(system)
        require_numbers("GaussianClosure", system, "use KineticPlefka(order=1)")
        exact = system.dim > 1 or isinstance(self.response, SphereUnits)
        required = "be SphereUnits() for GaussianClosure of spins with D = 1, an average of tanh"
        _validate.require(exact, "response", required, repr(self.response), "or use KineticPlefka")

    @property
    def by_products(self) -> bool:
        return True

    def problem(self, system: SpinSystem) -> GaussianClosureProblem:
        return GaussianClosureProblem(system, self.response)

    def contracting(self, system: SpinSystem) -> Tensor | None:
        return None if system.low_rank else contracts(system, self.response, spread=True)

    def moments(self, system: SpinSystem, state: Tensor) -> Moments:
        return Moments(state, linear_response(system, *self.spreads(system, state, state)))

    def spreads(self, system: SpinSystem, m: Tensor, before: Tensor) -> tuple[Spread, Spread]:
        return self.problem(system).spreads(m, before)


class GaussianClosureProblem(StepProblem):
    """m = the mean answer to the fields that m makes: all sites of a sample are one problem."""

    def local(self, m: Tensor) -> tuple[Tensor, Tensor]:
        """f, (*batch, N, D), and V, (*batch, N)."""
        system = self.system
        variance = system.radius**2 - m.square().sum(-1, keepdim=True)
        spread = system.coupled_squares(variance)[..., 0]
        if system.known_couplings is not None and system.known_state is not None:
            known = system.radius**2 - system.known_state.square().sum(-1, keepdim=True)
            spread = spread + (system.known_couplings.square() @ known)[..., 0]
        return system.live_field + system.coupled(m), spread

    def fixed_point_map(self, z: Tensor) -> Tensor:
        f, spread = self.local(z)
        beta, radius, dim = self.system.beta_over(1), self.system.radius, self.system.dim
        scale = beta * radius
        if dim == 1:
            return radius * _mean_tanh(scale * f[..., 0], scale * scale * spread)[..., None]
        gain = self.response.gain(scale * scale * (f.square().sum(-1) + spread), dim)
        return (beta * radius**2 * gain)[..., None] * f

    def spreads(self, m: Tensor, before: Tensor) -> tuple[Spread, Spread]:
        """(1/beta) dm/df at fixed V, and the covariance C, of spins that have m a step after `before`."""
        f, spread = self.local(before)
        beta, radius, dim = self.system.beta_over(1), self.system.radius, self.system.dim
        scale = beta * radius
        squared = f.square().sum(-1)
        if dim == 1:
            tau = radius**2 * _mean_tanh_slope(scale * f[..., 0], scale * scale * spread)
            slope = torch.zeros_like(tau)
        else:
            t = scale * scale * (squared + spread)
            tau = radius**2 * self.response.gain(t, dim)
            slope = 2 * (scale * radius) ** 2 * self.response.gain_slope(t, dim)
        rest = (radius**2 - m.square().sum(-1) - slope * squared) / dim
        return Spread(f, tau, slope), Spread(f, rest, slope)


def _mean_tanh(mean: Tensor, variance: Tensor) -> Tensor:
    """<tanh(x)> for a normal x: smooth in the variance, which may be 0, and right to rounding for all of them.

    A logistic variable is a normal one whose standard deviation is 2 k, with k as in Kolmogorov's law. So tanh(x) is
    the mean of erf(x / (sqrt(2) k)), and another normal variable only adds to k^2: quadrature is over k alone.
    """
    scales, weights = _kolmogorov(mean.dtype, mean.device)
    width = (2 * (scales + variance[..., None])).sqrt()
    return (torch.erf(mean[..., None] / width) * weights).sum(-1)


def _mean_tanh_slope(mean: Tensor, variance: Tensor) -> Tensor:
    """d/dmean of `_mean_tanh`."""
    scales, weights = _kolmogorov(mean.dtype, mean.device)
    width = (2 * (scales + variance[..., None])).sqrt()
    return (torch.exp(-(mean[..., None] / width).square()) / width * weights).sum(-1) * (2 / math.sqrt(math.pi))


def _kolmogorov(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """k^2 and weights of a quadrature over Kolmogorov's law."""
    scales, weights = _kolmogorov_rule()
    return torch.tensor(scales, dtype=dtype, device=device), torch.tensor(weights, dtype=dtype, device=device)


@functools.cache
def _kolmogorov_rule(step: float = 0.1, low: float = -1.85, high: float = 1.6) -> tuple[list[float], list[float]]:
    """Equal steps in log k: the density falls off so fast on both sides that 35 of them reach rounding."""
    points = [math.exp(low + step * n) for n in range(round((high - low) / step) + 1)]
    weights = [k * _kolmogorov_density(k) for k in points]
    total = math.fsum(weights)
    return [k * k for k in points], [w / total for w in weights]


def _kolmogorov_density(k: float) -> float:
    """Return the density of P(k) = sum_n (-1)^n exp(-2 n^2 k^2), Kolmogorov's law, by a theta series."""
    if k > 1:
        return math.fsum(8 * k * (-1) ** (n - 1) * n * n * math.exp(-2 * (n * k) ** 2) for n in range(1, 12))
    squares = [((2 * n - 1) * math.pi / (2 * k)) ** 2 for n in range(1, 12)]
    return math.sqrt(2 * math.pi) / k**2 * math.fsum((x - 1) * math.exp(-x / 2) for x in squares)
