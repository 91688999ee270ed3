"""Synchronous dynamics in fields that change: the trajectory, and the entropy that every step produces."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .. import _validate
from .._torch import host_may_look, in_own_precision
from ..failure import OnFailure
from ..linear import spectral_radius
from ..solution import SolveReport
from ._curvature import flattened, local_field
from ._request import fill, reported, validated, without_nonfinite
from ._site import SpinSite, Spread, antisymmetric_sum, linear_response, stretched, sum_pairs
from .dynamics import DynamicalMethod
from .system import CouplingFunction, Couplings, SpinSystem, couple, mirrored

#: Krylov vectors for the relaxation time, which is exact for N D up to this. With N D = 1024 and random couplings 32
#: were off by 3 % and 64 by 1 %, at three times the time, which is most of the time of `drive`.
KRYLOV = 32


@dataclasses.dataclass(frozen=True)
class DrivenPath:
    """A closure's results for spins whose field changes; those about stationary states are None without these.

    Attributes:
        fields: h_t of the steps, (T, *batch, N, D).
        states: m_0 to m_T, (T + 1, *batch, N, D): `states[t]` is the state after t steps.
        entropy_production: sigma of every step, (T, *batch), in units of Boltzmann's constant.
        housekeeping: the part of sigma that keeps spins out of equilibrium, (T, *batch).
        field_change: the rest, which spins produce on their way to the stationary state of the momentary field.
        stationary: magnetizations of that state, (T, *batch, N, D).
        mismatch: of the state after every step to it, (T, *batch): the relative entropy of spins on their own.
        relaxation_time: steps in which a small deviation from it falls by 1/e, (T, *batch); inf where it grows. For
            N D > 32 an estimate, within a few percent.
        report: of the stationary solves, whose problems are times and samples, (T, *batch).

    Not for the state that dynamics settles in if the field stays: that is a `StationaryState`.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import KineticPlefka, drive
        >>> couplings = torch.tensor([[0.0, 0.5], [-0.2, 0.0]])
        >>> path = drive(KineticPlefka(), couplings, torch.ones(20, 2, 1))
        >>> path.states.shape, bool(path.mismatch[-1] < 1e-5)
        (torch.Size([21, 2, 1]), True)
    """

    fields: Tensor
    states: Tensor
    entropy_production: Tensor
    housekeeping: Tensor | None = None
    field_change: Tensor | None = None
    stationary: Tensor | None = None
    mismatch: Tensor | None = None
    relaxation_time: Tensor | None = None
    report: SolveReport | None = None


class _Law(NamedTuple):
    """Magnetizations (T, *batch, N, D) at T times, the entropies of spins that have them, (T, *batch), and how they
    vary."""

    magnetization: Tensor
    entropy: Tensor
    covariance: Spread


@in_own_precision
def drive(
    method: DynamicalMethod,
    couplings: Couplings | CouplingFunction,
    fields: Float[Tensor, "T *batch N D"],
    *,
    beta: float | Float[Tensor, "*#batch"] = 1.0,
    initial: Float[Tensor, "*batch N D"] | None = None,
    radius: Literal["sqrt_dim", "bessel"] | float = "sqrt_dim",
    mask: Bool[Tensor, "*#batch N"] | None = None,
    stationary: bool = True,
    on_failure: OnFailure = "raise",
) -> DrivenPath:
    """The path of synchronous dynamics in a field of its own at every step, and the entropy that each step produces.

    Step t draws all spins anew, s -> s', by P_t(s'|s) = prod_i exp(beta s'_i . f_i(s))/Z_1(f_i(s)) with the field
    f = h_t + J s. It changes the law p of the spins to p'. In exact dynamics it produces, with S(p) for the entropy,

        sigma = sum_{s, s'} p(s) P_t(s'|s) log [P_t(s'|s) p(s)/(P_t(s|s') p'(s'))]
              = beta sum_i h_i . (m'_i - m_i) + beta sum_ij Tr (J_ij - J_ji^T)^T <s'_i s_j^T>
                + sum_i <log Z_1(f_i(s))>_p' - <log Z_1(f_i(s))>_p + S(p') - S(p) >= 0.

    In a stationary state only the second term is left, which `stationary_state` gives. With pi_t for the law that P_t
    settles in, sigma has two parts, which are not negative either,

        field_change = KL(p | pi_t) - KL(p' | pi_t),        housekeeping = sigma - field_change.

    The first is 0 where spins stand in the stationary state of the momentary field, and the second where couplings are
    symmetric. In the method's closure laws have independent spins, S(p) = sum_i S(m_i), and <s'_i s_j^T> = m'_i m_j^T +
    D_ij. The averages of log Z_1, and of log pi_t with the correlations of the stationary law, are taken to the order
    J^2 around the mean field, which is the order of D. Then housekeeping, itself of order J^2, is off by O(J^3).
    sigma and field_change have the error of m, O(J^2) for `KineticPlefka()` and, for D = 1, O(J^3) for
    `GaussianClosure()`. Parts as small as their errors may be negative.

    Args:
        method: `KineticPlefka()` or `GaussianClosure()`, whose magnetizations follow by one evaluation a step.
        couplings: J as in `SpinSystem`, but no `LowRank`; a function of the field is evaluated at every h_t.
        fields: h_1 to h_T, of the steps.
        beta: inverse temperature > 0.
        initial: magnetizations before the first step, of spins that are independent; None is 0. For D > 1 they are
            shorter than R, as a vector of known direction has an entropy of minus infinity.
        radius: R as in `SpinSystem`.
        mask: which sites exist.
        stationary: whether the stationary states of all momentary fields are solved for, in one batch that starts from
            the states of the path. Without them there are states and entropy production only.
        on_failure: for stationary solves that failed, backward solves included: "raise", "warn" or "ignore".

    Returns:
        A `DrivenPath`. Numbers that are not finite make their own sample NaN from their step on.

    Raises:
        ConvergenceError: with on_failure="raise". TypeError, ValueError: a system that the method cannot treat, or
            `KineticPlefka(order=2)`, a step of which solves an equation.

    Gradients: of all but `relaxation_time` with respect to fields, couplings, beta and initial, to any order, through
    all steps. What is kept for them grows with T N^2, on bonds with T E.

    Reference: Hatano and Sasa (2001), Esposito and Van den Broeck (2010), here for steps in discrete time.

    Not for the state in a constant field: `stationary_state` takes one solve; not for strong couplings: sample with
    `synchronous`.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import GaussianClosure, drive
        >>> times, couplings = torch.arange(8.0), torch.tensor([[0.0, 0.5], [-0.2, 0.0]])
        >>> path = drive(GaussianClosure(), couplings, torch.cos(times)[:, None, None].expand(8, 2, 1))
        >>> torch.allclose(path.entropy_production, path.housekeeping + path.field_change)
        True
    """
    _validate.check_float_tensor("fields", fields, min_ndim=3)
    _validate.require(len(fields) > 0, "fields", "have at least one step", f"shape {tuple(fields.shape)}")
    # The times are samples of one system, so that all but the steps themselves is computed at once.
    system: SpinSystem = SpinSystem(couplings, fields, beta, radius=radius, mask=mask)
    system = validated(system, method, None, "none", on_failure, kind=DynamicalMethod)
    method.check_step()
    if system.graph is None:
        system.check_dense("for entropy production", "magnetization(system, method)")
    sound, lost = without_nonfinite(system)
    each = _each_step(sound)
    start, unusable = _start(method, each[0], initial)
    states = [start]
    for now in each:
        states.append(method.problem(now).fixed_point_map(states[-1]))
    before, after = torch.stack(states[:-1]), torch.stack(states[1:])
    # An unknown state makes all later ones unknown.
    lost = (lost.cumsum(0) > 0) | unusable
    p, q, delayed = _laws(method, sound, each[0], before, after)
    sigma = _entropy_production(method, sound, p, q, delayed)
    path = DrivenPath(
        fields=system.field,
        states=torch.cat((fill(start, unusable)[None], fill(after, lost))),
        entropy_production=fill(sigma, lost),
    )
    return _with_stationary(method, sound, path, p, q, lost, on_failure) if stationary else path


def _each_step(system: SpinSystem) -> list[SpinSystem]:
    """The systems of T steps, from one whose first axis is time."""
    steps, leading = len(system.field), len(system.batch)

    def parts(x: Any, own: int) -> Any:
        if not isinstance(x, Tensor) or x.ndim - own < leading:
            return [x] * steps
        # In one piece: the gradient of an index is as large as all steps together.
        return x.expand(steps, *x.shape[1:]).unbind(0)

    columns = parts(system.field, 2), parts(system.couplings, system.pair_axes), parts(system.beta, 0)
    systems = [system.at(*numbers) for numbers in zip(*columns, strict=True)]
    graph = system.graph
    for now, mask, ends in zip(systems, parts(system.mask, 1), parts(graph and graph.ends, 2), strict=True):
        now.mask, now.graph = mask, graph and graph.at(ends)
    return systems


def _start(method: DynamicalMethod, system: SpinSystem, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """The magnetizations before the first step, and the samples, (*batch), in which these are invalid."""
    if initial is None:
        initial = torch.zeros_like(system.field)
    method.check_initial(system, initial)
    m = initial.to(system.field.dtype)
    if system.mask is not None:
        m = m.masked_fill(~system.mask[..., None], 0.0)
    # Rounding may lengthen an Ising spin of length R.
    longest = m.detach().norm(dim=-1) / system.radius
    beyond = longest > 1 + 8 * torch.finfo(m.dtype).eps if system.dim == 1 else longest >= 1
    if host_may_look(beyond) and bool(beyond.any()):
        required = f"have vectors {'no longer' if system.dim == 1 else 'shorter'} than R = {system.radius:g}"
        worst = float(longest.nan_to_num().max()) * system.radius
        _validate.refuse("initial", required, f"one of length {worst:g}", "scale it")
    unusable = (beyond | ~m.isfinite().all(-1)).any(-1)
    return fill(m, unusable, 0.0), unusable


def _laws(
    method: DynamicalMethod, system: SpinSystem, first: SpinSystem, before: Tensor, after: Tensor
) -> tuple[_Law, _Law, Tensor]:
    """The laws before and after every step, and the delayed correlations between them."""
    response, covariance = method.spreads(system, after, before)
    fields = method.lone_field(system, after, before)
    entropy = _entropy(method, system, after, fields)
    # Before the first step spins are independent, with the magnetizations that they have.
    field = local_field(method.response, before[0], first.beta_over(0), first.radius)[0]
    alone = SpinSite(method.response, field, first).spread
    earlier = Spread(*(torch.cat((a[None], b[:-1])) for a, b in zip(alone, covariance, strict=True)))
    p = _Law(before, torch.cat((_entropy(method, first, before[0], field)[None], entropy[:-1])), earlier)
    return p, _Law(after, entropy, covariance), linear_response(system, response, earlier)


def _entropy(method: DynamicalMethod, system: SpinSystem, m: Tensor, field: Tensor) -> Tensor:
    """Return the entropy of independent spins with the magnetizations m, which a lone spin has in `field`."""
    value = method.response.log_partition(field, system.beta_over(0), system.radius)
    return (value - system.beta_over(1) * (field * m).sum(-1)).sum(-1)


def _entropy_production(method: DynamicalMethod, system: SpinSystem, p: _Law, q: _Law, delayed: Tensor) -> Tensor:
    """sigma of every step, (T, *batch)."""
    m, following = p.magnetization, q.magnetization
    heat = (system.live_field * (following - m)).sum((-1, -2)) + antisymmetric_sum(system, delayed)
    heat = heat + (following * system.coupled(m) - m * system.coupled(following)).sum((-1, -2))
    weight = _mean_log_partition(method, system, q) - _mean_log_partition(method, system, p)
    return system.beta_over(0) * heat + weight + q.entropy - p.entropy


def _mean_log_partition(method: DynamicalMethod, system: SpinSystem, law: _Law) -> Tensor:
    """sum_i <log Z_1(f_i(s))> to second order in the fluctuations of the field."""
    f = system.live_field + system.coupled(law.magnetization)
    value = method.response.log_partition(f, system.beta_over(0), system.radius).sum(-1)
    return value + _fluctuation(system, SpinSite(method.response, f, system).spread, law.covariance)


def _fluctuation(system: SpinSystem, at_i: Spread, at_j: Spread) -> Tensor:
    """(beta^2/2) sum_ij Tr J_ij^T A_i J_ij B_j, (T, *batch)."""
    return system.beta_over(0) * sum_pairs(system, system.live_pairs * linear_response(system, at_i, at_j)) / 2


def _with_stationary(
    method: DynamicalMethod, system: SpinSystem, path: DrivenPath, p: _Law, q: _Law, lost: Tensor, on_failure: OnFailure
) -> DrivenPath:
    """The path with all that concerns the stationary states of the momentary fields, NaN where `lost`, (T, *batch)."""
    # The driven spins are on their way to the solution from their own state, which is near.
    solution = method.solution(system, method.begin(system, q.magnetization))
    m, beta = solution.value, system.beta_over(0)
    f = system.live_field + system.coupled(m)
    covariance = method.spreads(system, m, m)[1]
    alone = method.response.magnetization(f, beta, system.radius)
    twin = mirrored(system.live_pairs, block=system.block, graph=system.graph)

    def log_probability(law: _Law) -> Tensor:
        """<log pi> but for a constant: pi(s') = <P(s'|s)>, to second order in the fluctuations of the past field."""
        moved = couple(twin, law.magnetization - alone, block=system.block, graph=system.graph)
        shifted = beta * (moved * stretched(moved, *covariance)).sum((-1, -2)) / 2
        own = (law.magnetization * f).sum((-1, -2))
        return beta * (own + shifted) + _fluctuation(system, law.covariance, covariance)

    change = log_probability(q) - log_probability(p) + q.entropy - p.entropy
    lone = method.lone_field(system, m, m)
    # KL(a | b) of single spins is log Z_1(b) - beta f_b . m_a - S(m_a), never negative but by rounding.
    mismatch = _entropy(method, system, q.magnetization, lone) - q.entropy
    return dataclasses.replace(
        path,
        housekeeping=path.entropy_production - fill(change, lost),
        field_change=fill(change, lost),
        stationary=fill(m, lost),
        mismatch=fill(mismatch, lost),
        relaxation_time=fill(_relaxation_time(method, system, m.detach()), lost),
        report=reported(method, solution.report, lost, "none", on_failure),
    )


@torch.no_grad()
def _relaxation_time(method: DynamicalMethod, system: SpinSystem, m: Tensor) -> Float[Tensor, "T *batch"]:
    jacobian = flattened(method.step_jacobian(system, m), m)
    radius = spectral_radius(jacobian, torch.zeros_like(m.flatten(-2)), KRYLOV)
    # log 1 = 0 and beyond: a deviation never falls.
    return torch.where(radius >= 1, math.inf, -1 / radius.log())
