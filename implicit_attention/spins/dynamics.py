"""Synchronous dynamics: spins that all answer the field of the step before, and the state that they settle in."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NoReturn

from jaxtyping import Float
from torch import Tensor

from .. import _validate
from .._torch import LinearMap, in_own_precision
from ..failure import OnFailure
from ..potentials import SphericalLaw
from ..solution import Remedies, SolveReport, Status
from ._curvature import local_field, radius_exceeds_one
from ._request import fill, reported, validated, without_nonfinite
from ._site import Spread, antisymmetric_sum
from .approximation import Approximation, Check, LogPartition, ResponseApproximation, SampleProblem
from .system import SpinSystem


@dataclasses.dataclass(frozen=True)
class StationaryState:
    """A closure's results for the state that synchronous dynamics settles in.

    Attributes:
        magnetization: m_i = <s_i>, (*batch, N, D).
        delayed_correlations: D_ij = <s_i(t + 1) . s_j(t)> - m_i . m_j, (*batch, N, N); on bonds, symmetric or
            directed, (*batch, 2, E): index 0 is D_ij and index 1 D_ji of the pair (i, j) of `Bonds.pairs`.
        entropy_production: sigma per step, (*batch), in units of Boltzmann's constant. Zero if J_ij = J_ji^T, else
            positive in truth; an approximation need not be.
        report: of the solve behind it.

    Not for equilibrium: `thermodynamics` gives a `Thermodynamics`.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import GaussianClosure, SpinSystem, stationary_state
        >>> couplings = torch.tensor([[0.0, 0.5], [0.5, 0.0]])
        >>> system = SpinSystem(couplings, field=torch.tensor([[0.3], [0.0]]))
        >>> state = stationary_state(system, GaussianClosure())
        >>> state.delayed_correlations.shape, bool(state.entropy_production.abs() < 1e-6)  # symmetric couplings
        (torch.Size([2, 2]), True)
    """

    magnetization: Tensor
    delayed_correlations: Tensor
    entropy_production: Tensor
    report: SolveReport


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicalMethod(ResponseApproximation):
    """Base of the closures of p(s' | s) = prod_i exp(beta s'_i . f_i(s))/Z_1(f_i(s)) with f = h + J s.

    Every spin is drawn anew at every step, from the field that all of them made at the step before. Couplings need not
    be symmetric, and J_ii is the memory of a spin. There is no energy, hence no free energy: `stationary_state` and
    `magnetization` answer for it. For symmetric couplings the chain obeys detailed balance, but its law is
    Peretto's, not Boltzmann's, so that even there magnetizations differ from those of an equilibrium method.

    Args:
        response: of one spin to its field: `SphereUnits()` (exact), `AmosResponse()`, `LargeDResponse()`, ...
        solver: default damped steps and then `Anderson`, to a relative residual of 1e-11 (1e-6 in float32).
        adjoint: default `Implicit()`.

    A fixed point from which small deviations grow under the closure's own steps has the status UNSTABLE, where
    `check="stability"` asks for it.

    A subclass defines `problem`, `start`, `state_at`, `moments`, for `drive` also `spreads`, and the
    refusals `check` and `check_step`.

    Not for use by itself: use `GaussianClosure()` or `KineticPlefka()`, or derive your own closure.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import DynamicalMethod, GaussianClosure, KineticPlefka, SpinSystem
        >>> system = SpinSystem(torch.tensor([[0.0, 0.5], [0.2, 0.0]]), field=torch.tensor([[0.3], [0.0]]))
        >>> closures: list[DynamicalMethod] = [KineticPlefka(), GaussianClosure()]
        >>> [closure.problem(system).fixed_point_map(system.field).shape for closure in closures]
        [torch.Size([2, 1]), torch.Size([2, 1])]
    """

    symmetric = False
    remedies: ClassVar[Remedies] = {
        **ResponseApproximation.remedies,
        Status.DIVERGED: "lower beta",
        Status.UNSTABLE: "choose another state by `initial=`, or sample the dynamics with `synchronous`",
        Status.NONFINITE: "look for NaN, infinities and beta <= 0 in this sample",
    }

    def unstable(self, system: SpinSystem, state: Tensor) -> Tensor:
        # The solution is a fixed point of the map from one step to the next: small deviations have to shrink.
        return radius_exceeds_one(self.step_jacobian(system, state), state)

    def step_jacobian(self, system: SpinSystem, state: Tensor) -> LinearMap:
        """The Jacobian of the closure's step in time at a solution, by default that of the problem's map."""
        return self.problem(system).linearize(state).jvp

    def moments(self, system: SpinSystem, state: Tensor) -> tuple[Tensor, Tensor]:
        """m, (*batch, N, D), and D, (*batch, N, N) or, on bonds, (*batch, 2, E), at a solution of the problem.

        For matrices as couplings <s_i(t + 1) s_j(t)^T> - m_i m_j^T in the place of D_ij.
        """
        raise NotImplementedError(f"{type(self).__name__} must define moments(system, state)")

    def beside(self, system: SpinSystem, couplings: Tensor, state: Tensor) -> SpinSystem:
        """The system beside M sites that do not read it, and whose state is known: the next tokens of a causal one.

        Args:
            system: the sites to be solved for, (*batch, N, D).
            couplings: how they read the others, a number for each pair, (*batch, N, M).
            state: of the others, (*batch, M, D): `Answer.state` of the call before.
        """
        others = couplings @ self.magnetization_at(system, state)
        joined = system.at(system.field + others, system.couplings, system.beta)
        joined.known_couplings, joined.known_state = couplings, state
        return joined

    def check_step(self) -> None:
        """Raise if the problem's map is not the step in time, of magnetizations, that `drive` takes."""

    def spreads(self, system: SpinSystem, m: Tensor, before: Tensor) -> tuple[Spread, Spread]:
        """(1/beta) dm/df, and the covariance, of spins that have the magnetizations m a step after `before`."""
        raise NotImplementedError(f"{type(self).__name__} must define spreads(system, m, before)")

    def lone_field(self, system: SpinSystem, m: Tensor, before: Tensor) -> Tensor:
        """The field in which a lone spin has the magnetization m, to which the step from `before` led."""
        return local_field(self.response, m, system.beta_over(0), system.radius)[0]

    def log_partition(
        self, system: SpinSystem, *, initial: Tensor | None = None, check: Check = "none"
    ) -> LogPartition:
        no_free_energy(self)


class StepProblem(SampleProblem, general=True):
    """Base of the closures' equations: problems of a system with a number for each pair, and of its spins' response."""

    def __init__(self, system: SpinSystem, response: SphericalLaw) -> None:
        self.system = system
        self.response = response


def no_free_energy(method: Approximation) -> NoReturn:
    """Raise, as dynamics has no free energy."""
    name = type(method).__name__
    remedy = "use stationary_state(system, method) or magnetization(system, method); for symmetric couplings, MeanField"
    _validate.refuse("method", "have a free energy", f"{name}, which describes dynamics", remedy, TypeError)


@in_own_precision
def stationary_state(
    system: SpinSystem,
    method: DynamicalMethod,
    *,
    initial: Float[Tensor, "*batch N D"] | None = None,
    check: Check = "none",
    on_failure: OnFailure = "raise",
) -> StationaryState:
    """Magnetization, delayed correlations and entropy production of synchronous dynamics, by one solve.

    The entropy production follows from the delayed correlations by an identity of the chain that holds exactly,

        sigma = beta sum_ij Tr (J_ij - J_ji^T)^T <s_i(t + 1) s_j(t)^T>,

    for a number per pair beta sum_ij (J_ij - J_ji) D_ij: log Z_1 and the field drop out.

    Args:
        system: the spins, with couplings of any kind but a `LowRank`.
        method: `GaussianClosure()` or `KineticPlefka()`.
        initial: magnetizations that the solve starts from, (*batch, N, D), to choose one of several states. None is the
            answer to the bare field.
        check: "stability" gives a state that small deviations grow from the status UNSTABLE, with a warning. That takes
            longer than most solves. With "none" all that solves the equations is CONVERGED.
        on_failure: for samples whose solve failed, backward solves included: "raise", "warn" or "ignore".

    Raises:
        ConvergenceError: with on_failure="raise". TypeError, ValueError: a system that the method cannot treat.

    Gradients: every output with respect to field, couplings and beta, to any order; none with respect to `initial`.

    Not for equilibrium: use `thermodynamics`; not for a small Ising system: `stationary_law` is exact.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import KineticPlefka, SpinSystem, stationary_state
        >>> couplings = torch.tensor([[0.0, 0.5], [0.5, 0.0]])
        >>> system = SpinSystem(couplings, field=torch.tensor([[0.3], [0.0]]))
        >>> stationary_state(system, KineticPlefka(order=2)).magnetization.shape
        torch.Size([2, 1])
    """
    system = validated(system, method, initial, check, on_failure, kind=DynamicalMethod)
    sound, nonfinite = without_nonfinite(system)
    solution = method.solution(sound, method.begin(sound, initial), check=check)
    m, delayed = method.moments(sound, solution.value)
    entropy = sound.beta_over(0) * antisymmetric_sum(sound, delayed)
    if sound.block:
        delayed = delayed.diagonal(dim1=-2, dim2=-1).sum(-1)
    return StationaryState(
        magnetization=fill(m, nonfinite),
        delayed_correlations=fill(delayed, nonfinite),
        entropy_production=fill(entropy, nonfinite),
        report=reported(method, solution.report, nonfinite, check, on_failure),
    )
