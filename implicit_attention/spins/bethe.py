"""The Bethe approximation of Ising systems by belief propagation: exact where the couplings form a tree."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from .._torch import host_may_look_at_constant, readable
from ..potentials import SignUnits
from ..problem import Problem
from ..solution import Remedies, Status
from .approximation import FixedPointApproximation, SampleProblem, power_of_two, require_ising
from .system import SpinSystem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bethe(FixedPointApproximation):
    """log Z from messages u_ij, the field that site i passes on to site j through their coupling, for D = 1.

    With c_ij = beta h_i + sum_{k != j} u_ki, the field of i without j's part in it, and t_i = c_ij + u_ji:

        u_ij  = atanh(tanh(beta J_ij) tanh c_ij)
        log Z = sum_i log cosh t_i + sum_{i<j} (log Z_ij - log cosh t_i - log cosh t_j)

    for R = 1, with Z_ij the mean of exp(beta J_ij s_i s_j + c_ij s_i + c_ji s_j) over the four states of a pair. Exact
    on trees; elsewhere an approximation that is good where loops are long or couplings weak. log Z is stationary in the
    messages. They start from the bare fields, so that without one they stay at 0, also at temperatures where a
    magnetized solution is the stable one, which `initial=` leads to. Where loops are strong the messages do not settle,
    which the status says: Newton's method would find a stationary point there, too, but one that is far off.

    Correlations are derivatives of this log Z, as for every method: for a pair without a coupling that is m_i m_j even
    on a tree, where <s_i s_j> = chi_ij/beta + m_i m_j is exact.

    Args:
        solver: for the messages, all of a sample one problem; None is damped steps and then `Anderson` to a residual
            of 1e-11 (1e-6 in float32).
        adjoint: None is `Implicit()`.

    Gradients: with respect to field, couplings and beta, to any order.

    Reference: Yedidia, Freeman and Weiss (2005), section IV; Ricci-Tersenghi (2012), eq. 22, for the inverse covariance
    whose sign decides on stability.

    Not for dense couplings, whose loops are short: use `AdaTAP()` or `TAP()`; nor for magnetizations of lattices below
    their transition, where m is off by .4 and F by .02 a spin (open 3 x 3, beta J = 1): `SaddlePoint(one_loop=True)`.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import Bethe, Enumeration, SpinSystem, magnetization
        >>> couplings = torch.tensor([[0.0, 0.5], [0.5, 0.0]])
        >>> system = SpinSystem(couplings, field=torch.tensor([[0.3], [0.0]]))
        >>> bethe, exact = (magnetization(system, method) for method in (Bethe(), Enumeration()))
        >>> torch.allclose(bethe, exact, atol=1e-5)  # a pair is a tree
        True
    """

    remedies: ClassVar[Remedies] = {
        **FixedPointApproximation.remedies,
        Status.MAX_STEPS: "messages need not settle around strong loops: use AdaTAP(), Enumeration() or samples",
    }

    def check(self, system: SpinSystem) -> None:
        super().check(system)
        require_ising(self, system)

    def problem(self, system: SpinSystem) -> Problem:
        return _Messages(*_in_units(system)[:2])

    def start(self, system: SpinSystem) -> Tensor:
        field, bonds, _ = _in_units(system)
        return _passed_on(torch.zeros_like(bonds), field, bonds)

    def state_at(self, system: SpinSystem, m: Tensor) -> Tensor:
        # u_ij = atanh(t x) with t = tanh(beta J_ij), where x is the mean that i has without j. A pair of the means m_i
        # and m_j obeys m_i (1 - t^2 x^2) = x (1 - t^2) + t m_j (1 - x^2).
        bonds, m = _in_units(system)[1], m[..., 0] / system.radius
        below = 1 - torch.finfo(m.dtype).eps
        t = below * torch.tanh(bonds)
        own, other = m[..., :, None], m[..., None, :]
        between = (1 - t) * (1 + t)
        root = (between.square() - 4 * t * (own - t * other) * (other - t * own)).clamp(min=0).sqrt()
        return torch.atanh((2 * t * (own - t * other) / (between + root)).clamp(-below, below))

    def unit(self, system: SpinSystem) -> Tensor:
        # No message is larger than its bond.
        return power_of_two(_in_units(system)[1].detach().abs().clamp(min=1.0))

    def value(self, system: SpinSystem, state: Tensor) -> Tensor:
        field, bonds, own = _in_units(system)
        return _log_partition(state, field, bonds) + own.sum(-1) / 2

    def magnetization_at(self, system: SpinSystem, state: Tensor) -> Tensor:
        return system.radius * torch.tanh(_cavity(state, _in_units(system)[0])[0])[..., None]

    def unstable(self, system: SpinSystem, state: Tensor) -> Tensor:
        field, bonds, _ = _in_units(system)
        cavity = _cavity(state, field)[1]
        # A pair has the weights exp(+-bonds +- cavity +- cavity^T); of its two spins r is the correlation coefficient.
        along, across = _log_cosh(cavity + cavity.mT), _log_cosh(cavity - cavity.mT)
        variance = torch.logaddexp(_log_cosh(2 * bonds), _log_cosh(2 * cavity))
        # log |r| and log(1 - r^2), in a form that loses no digit where bonds are strong.
        log_sinh = 2 * bonds.abs() + torch.log(-torch.expm1(-4 * bonds.abs())) - math.log(2.0)
        size = log_sinh - (variance + variance.mT) / 2
        rest = torch.logaddexp(bonds + along, across - bonds) + torch.logaddexp(along - bonds, bonds + across)
        rest = rest - variance - variance.mT
        weights = torch.exp((size - rest).clamp(max=math.log(torch.finfo(size.dtype).max) / 4))
        r = torch.exp(size)
        # The inverse covariance, 1 + sum_j r^2/(1 - r^2) on the diagonal and -r/(1 - r^2), by the sums of its rows.
        own = 1 - (r / (1 + r)).sum(-1)
        return _indefinite(own + torch.finfo(own.dtype).eps ** 0.5, torch.sign(bonds) * weights)


_log_cosh = SignUnits().cumulant


class _Messages(SampleProblem):
    """u = f(u) for messages u, with fields (*batch, N) and bonds (*batch, N, N) in units of 1/beta."""

    def __init__(self, field: Tensor, bonds: Tensor) -> None:
        self.field = field
        self.bonds = bonds
        self.own_axes = {"field": 1, "bonds": 2}

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return _passed_on(z, self.field, self.bonds)


def _indefinite(own: Tensor, bonds: Tensor) -> Tensor:
    """Whether the matrix diag(own_i + sum_j |b_ij|) - b, (*batch, N, N), has a negative eigenvalue, (*batch).

    By elimination in terms of these numbers, which subtracts no large ones: it holds to the rounding of `own`, however
    large b is.

    Reference: O'Cinneide (1996), for b without negative entries.
    """
    result = torch.zeros_like(own[..., 0], dtype=torch.bool)
    for _ in range(own.shape[-1]):
        row, rest = bonds[..., 0, 1:], bonds[..., 1:, 1:]
        pivot = own[..., :1] + row.abs().sum(-1, keepdim=True)
        result = result | (pivot[..., 0] < 0)
        # After a negative pivot the verdict stands, and only the numbers must stay finite.
        part = row / torch.where(pivot > 0, pivot, torch.inf)
        joined = row[..., :, None] * part[..., None, :]
        joined = joined - torch.diag_embed(joined.diagonal(dim1=-2, dim2=-1))
        cancelled = torch.where(rest * joined < 0, torch.minimum(rest.abs(), joined.abs()), 0.0)
        own = own[..., 1:] + part.abs() * own[..., :1] + 2 * cancelled.sum(-1)
        bonds = rest + joined
    return result


def _in_units(system: SpinSystem) -> tuple[Tensor, Tensor, Tensor]:
    """Field, bonds and their diagonal of +-1 spins in units of 1/beta; bonds of every sample on their own."""
    field = system.beta_over(1) * system.radius * system.live_field[..., 0]
    bonds = (system.beta_over(2) * system.radius**2 * system.live_couplings).expand(*system.batch, -1, -1)
    own = bonds.diagonal(dim1=-2, dim2=-1)
    return field, bonds - torch.diag_embed(own), own


def _cavity(messages: Tensor, field: Tensor) -> tuple[Tensor, Tensor]:
    """t_i, (*batch, N), and c_ij = t_i - u_ji, (*batch, N, N), from messages u_ij."""
    total = field + messages.sum(-2)
    return total, total[..., :, None] - messages.mT


def _passed_on(messages: Tensor, field: Tensor, bonds: Tensor) -> Tensor:
    """The messages that these messages lead to."""
    return _message(_cavity(messages, field)[1], bonds)


def _message(a: Tensor, b: Tensor) -> Tensor:
    """atanh(tanh a tanh b): where it is small, and where tanh is 1 to rounding, too."""
    product, numbers = torch.tanh(a) * torch.tanh(b), readable(b)
    if numbers is not None and host_may_look_at_constant(numbers) and not bool((numbers.abs() >= 1).any()):
        return torch.atanh(product)
    large = (b.detach().abs() >= 1) & (a.detach().abs() >= 1)
    c, d = (-2 * x.abs().clamp(min=1) for x in (a, b))
    # log cosh(a + b) - log cosh(a - b) of large numbers, without those that cancel. (Torch's second derivative of
    # logaddexp is NaN where one of the two is far smaller.)
    top = torch.maximum(c, d).detach()
    both = top + torch.log(torch.exp(c - top) + torch.exp(d - top))
    far = torch.sign(a) * torch.sign(b) * (torch.log1p(torch.exp(c + d)) - both) / 2
    return torch.where(large, far, torch.atanh(product.clamp(-0.8, 0.8)))


def _log_partition(messages: Tensor, field: Tensor, bonds: Tensor) -> Tensor:
    """The Bethe log Z; at the fixed point its derivative in every message is 0."""
    total, cavity = _cavity(messages, field)
    other = cavity.mT
    # A pair with the fields a and b that all others leave it: the mean of exp(K + log cosh(a + b)) and of
    # exp(-K + log cosh(a - b)), as terms that are positive, so that they do not cancel where they are small.
    pairs = (_log_cosh(cavity + other) + _log_cosh(cavity - other)) / 2 + _log_cosh(bonds + _message(cavity, other))
    sites = _log_cosh(total)
    pairs = pairs - sites[..., :, None] - sites[..., None, :]
    others = 1 - torch.eye(total.shape[-1], dtype=total.dtype, device=total.device)
    return sites.sum(-1) + (others * pairs).sum((-2, -1)) / 2
