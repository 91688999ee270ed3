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
from .dynamics import DynamicalMethod, StepProblem
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

    by_products = True

    def problem(self, system: SpinSystem) -> GaussianClosureProblem:
        return GaussianClosureProblem(system, self.response)

    def contracting(self, system: SpinSystem) -> Tensor | None:
        return None if system.low_rank else contracts(system, self.response, spread=True)

    def moments(self, system: SpinSystem, state: Tensor) -> tuple[Tensor, Tensor]:
        return state, linear_response(system, *self.spreads(system, state, state))

    def spreads(self, system: SpinSystem, m: Tensor, before: Tensor) -> tuple[Spread, Spread]:
        return self.problem(system).spreads(m, before)


class GaussianClosureProblem(StepProblem):
    """m = the mean answer to the fields that m makes: all sites of a sample are one problem."""

    def local(self, m: Tensor) -> tuple[Tensor, Tensor]:
        """x = beta R f, (*batch, N, D), and its variance (beta R)^2 V, (*batch, N)."""
        system = self.system
        variance = system.radius**2 - m.square().sum(-1, keepdim=True)
        spread = system.coupled_squares(variance)
        if system.known_couplings is not None and system.known_state is not None:
            known = system.radius**2 - system.known_state.square().sum(-1, keepdim=True)
            spread = spread + system.known_couplings.square() @ known
        scale = system.beta_over(2) * system.radius
        return scale * (system.live_field + system.coupled(m)), (scale * scale * spread)[..., 0]

    def fixed_point_map(self, z: Tensor) -> Tensor:
        (x, variance), radius, dim = self.local(z), self.system.radius, self.system.dim
        if dim == 1:
            return radius * _mean_tanh(x[..., 0], variance)[..., None]
        return radius * self.response.gain(x.square().sum(-1) + variance, dim)[..., None] * x

    def spreads(self, m: Tensor, before: Tensor) -> tuple[Spread, Spread]:
        """(1/beta) dm/df at fixed V, and the covariance C, of spins that have m a step after `before`."""
        (x, variance), radius, dim = self.local(before), self.system.radius, self.system.dim
        squared = x.square().sum(-1)
        if dim == 1:
            tau = radius**2 * _mean_tanh_slope(x[..., 0], variance)
            slope = torch.zeros_like(tau)
        else:
            tau = radius**2 * self.response.gain(squared + variance, dim)
            slope = 2 * radius**2 * self.response.gain_slope(squared + variance, dim)
        rest = (radius**2 - m.square().sum(-1) - slope * squared) / dim
        return Spread(x, tau, slope), Spread(x, rest, slope)


def _mean_tanh(mean: Tensor, variance: Tensor) -> Tensor:
    """<tanh(x)> for a normal x: smooth in the variance, which may be 0, and right to rounding for all of them.

    A logistic variable is a normal one whose standard deviation is 2 k, with k as in Kolmogorov's law. So tanh(x) is
    the mean of erf(x / (sqrt(2) k)), and another normal variable only adds to k^2: quadrature is over k alone.
    """
    width, weights = _widths(variance)
    return (torch.erf(mean[..., None] / width) * weights).sum(-1)


def _mean_tanh_slope(mean: Tensor, variance: Tensor) -> Tensor:
    """d/dmean of `_mean_tanh`."""
    width, weights = _widths(variance)
    return (torch.exp(-(mean[..., None] / width).square()) / width * weights).sum(-1) * (2 / math.sqrt(math.pi))


def _widths(variance: Tensor) -> tuple[Tensor, Tensor]:
    """(2 (k^2 + variance))^(1/2), (..., points), and weights of a quadrature over Kolmogorov's law of k."""
    scales, weights = torch.tensor(_kolmogorov_rule(), dtype=variance.dtype, device=variance.device)
    return (2 * (scales + variance[..., None])).sqrt(), weights


@functools.cache
def _kolmogorov_rule() -> tuple[list[float], list[float]]:
    """k^2 and weights. Equal steps in log k: the density falls off so fast on both sides that 35 reach rounding.

    The density of P(k) = sum_n (-1)^n exp(-2 n^2 k^2), Kolmogorov's law, is taken from a theta series. Where k is large
    it is right to the rounding of numbers near 1, and the weights are as small.
    """
    points, weights = [math.exp(0.1 * n - 1.85) for n in range(35)], []
    for k in points:
        squares = [((2 * n - 1) * math.pi / (2 * k)) ** 2 for n in range(1, 24)]
        weights.append(math.fsum((x - 1) * math.exp(-x / 2) for x in squares) / k)
    total = math.fsum(weights)
    return [k * k for k in points], [w / total for w in weights]
