"""Where there are several solutions: the stable one is found, and an unstable one is called that."""

import dataclasses
import re

import pytest
import torch

from implicit_attention import Anderson, ConvergenceWarning, FixedPointMap, Picard, Status, solve
from implicit_attention.potentials.spin import AmosResponse
from implicit_attention.spins import (
    TAP,
    AdaTAP,
    Bethe,
    GaussianField,
    KineticPlefka,
    MeanField,
    SpinSystem,
    free_energy,
    magnetization,
    stability,
    stationary_state,
    thermodynamics,
)
from implicit_attention.spins.dynamics import DynamicalMethod
from implicit_attention.spins.exact import stationary_law
from implicit_attention.testing.numerics import random

N = 10
MAGNET = (torch.ones(N, N) - torch.eye(N)).double() / N


@pytest.mark.parametrize("method", [MeanField(), Bethe(), TAP()], ids=repr)
@pytest.mark.parametrize("beta", [1.5, 2.0, 3.0])
def test_a_magnet_below_its_transition_follows_a_small_field(method, beta):
    system = SpinSystem(MAGNET, torch.full((N, 1), 0.01).double(), beta)
    found = thermodynamics(system, method)
    assert found.evidence.status == Status.CONVERGED
    assert float(found.magnetization.min()) > 0.7
    # Chi of a minimum has no negative eigenvalue.
    chi = found.susceptibility()[:, 0, :, 0]
    assert float(torch.linalg.eigvalsh(chi)[0]) > 0


@pytest.mark.parametrize("method", [MeanField(), Bethe(), TAP()], ids=repr)
def test_zero_is_a_saddle_below_the_transition_and_told(method):
    system = SpinSystem(MAGNET, torch.zeros(2, N, 1).double(), torch.tensor([0.5, 2.0]).double())
    text = re.escape("ended on an unstable solution (status SADDLE) for 1 of 2 problems")
    for function in (thermodynamics, free_energy, magnetization):
        with pytest.warns(ConvergenceWarning, match=text):
            function(system, method, check="stability")
    with pytest.warns(ConvergenceWarning, match=text):
        thermodynamics(system, method)
    found = thermodynamics(system, method, on_failure="ignore")
    assert found.evidence.status.tolist() == [Status.CONVERGED, Status.SADDLE]


def test_belief_propagation_has_two_branches_below_the_transition():
    system = SpinSystem(MAGNET, torch.full((N, 1), 0.01).double(), 2.0)
    found = stability(system, Bethe(), starts=16)
    assert int(found.branches) == 2
    assert not found.reliable


@pytest.mark.parametrize("method", [GaussianField(), KineticPlefka(), KineticPlefka(order=2)], ids=repr)
def test_dynamics_settle_on_the_side_of_the_field(method):
    field = torch.full((N, 1), 0.05).double()
    found = stationary_state(SpinSystem(MAGNET, field, 2.0), method)
    truth = stationary_law(MAGNET, field[:, 0], 2.0).magnetization
    assert float((found.magnetization[:, 0] - truth).abs().max()) < 0.06
    system = SpinSystem(MAGNET, 0 * field, 2.0)
    for function in (stationary_state, magnetization):
        with pytest.warns(ConvergenceWarning, match="SADDLE"):
            function(system, method, check="stability")
    assert stationary_state(system, method, check="stability", on_failure="ignore").evidence.status == Status.SADDLE
    # What is not asked is not told.
    assert stationary_state(system, method).evidence.status == Status.CONVERGED


ITERATED = [MeanField(), TAP(), TAP(order=3), Bethe(), KineticPlefka(), KineticPlefka(order=2), GaussianField()]


def answered(system, method, **options):
    if isinstance(method, DynamicalMethod):
        return stationary_state(system, method, **options).evidence
    return thermodynamics(system, method, **options).evidence


@pytest.mark.parametrize("method", ITERATED, ids=repr)
def test_a_verdict_is_computed_only_where_it_is_asked_for(method, monkeypatch):
    asked = []

    def unstable(self, system, state):
        asked.append(True)
        return torch.zeros(system.batch, dtype=torch.bool)

    for kind in type(method).mro()[:-1]:
        if "unstable" in vars(kind):
            monkeypatch.setattr(kind, "unstable", unstable)
    system = SpinSystem(0.3 * MAGNET, random(N, 1), 0.8)
    magnetization(system, method)
    answered(system, method, check="none")
    if not isinstance(method, DynamicalMethod):
        free_energy(system, method)
    assert not asked
    answered(system, method, check="stability")
    assert asked == [True]


@pytest.mark.parametrize("method", ITERATED, ids=repr)
def test_a_fixed_budget_is_never_judged(method, monkeypatch):
    def judged(self, system, state):
        raise AssertionError("a verdict that is thrown away")

    for kind in type(method).mro()[:-1]:
        for name in {"unstable", "out_of_range"} & vars(kind).keys():
            monkeypatch.setattr(kind, name, judged)
    method = dataclasses.replace(method, solver=Picard(rtol=0, atol=0, max_steps=2))
    system = SpinSystem(0.3 * MAGNET, random(N, 1), 0.8)
    solved = stationary_state if isinstance(method, DynamicalMethod) else lambda s, m, **o: m.log_partition(s, **o)
    found = solved(system, method, check="stability")
    assert found.evidence.status == Status.BUDGET


def test_tap_beyond_its_range_fails_whatever_is_asked():
    system = SpinSystem(3 * random(N, N), torch.zeros(N, 1).double(), 1.0)
    system = system.at(system.field, (system.couplings + system.couplings.mT) / 2, 1.0)
    for check in ("none", "stability"):
        evidence = thermodynamics(system, TAP(), check=check, on_failure="ignore").evidence
        assert evidence.status == Status.OUT_OF_RANGE


def test_what_is_checked_is_one_of_two():
    system = SpinSystem(MAGNET, random(N, 1), 0.8)
    for function in (thermodynamics, free_energy, magnetization):
        with pytest.raises(ValueError, match="`check` must be one of 'none', 'stability', got 'all'"):
            function(system, MeanField(), check="all")
    with pytest.raises(ValueError, match="`check` must be one of 'none', 'stability', got None"):
        stationary_state(system, GaussianField(), check=None)


def verdict(method, system):
    """The solution and whether it is called unstable."""
    state = method.solution(system, method.start(system)).value.detach()
    return state, method.unstable(system, state)


NEAR = torch.tensor([-1e-3, -1e-5, 1e-5, 1e-4, 3e-4, 3e-3]).double()


@pytest.mark.parametrize("method", [MeanField(), KineticPlefka()], ids=repr)
def test_a_long_chain_is_told_apart_just_above_and_just_below_its_transition(method):
    """Its slowest modes lie as near to each other as to the transition."""
    chain = torch.diag(torch.ones(255).double(), 1)
    chain = chain + chain.mT
    critical = 1 / float(torch.linalg.eigvalsh(chain)[-1])
    _, unstable = verdict(method, SpinSystem(chain, torch.zeros(6, 256, 1).double(), critical * (1 + NEAR)))
    assert unstable.tolist() == [False, False, True, True, True, True]


def test_a_long_ring_is_told_apart_just_above_and_just_below_its_transition():
    """At m = 0 the Hessian of TAP is 1 + beta^2 sum_j J_ij^2 - beta J, with 16 equal neighbours."""
    apart = (torch.arange(256)[:, None] - torch.arange(256)).abs()
    ring = ((apart.minimum(256 - apart) <= 8) & (apart > 0)).double()
    critical = (1 - (1 - 4 / 16) ** 0.5) / 2
    _, unstable = verdict(TAP(), SpinSystem(ring, torch.zeros(6, 256, 1).double(), critical * (1 + NEAR)))
    assert unstable.tolist() == [False, False, True, True, True, True]


def test_the_second_order_of_dynamics_is_stable_where_its_own_steps_come_back():
    """theta is in its own equation, m' = tanh(beta f - beta^2 m' V): a step solves it, and dm'/dm follows from it."""
    count, n = 60, 12
    couplings, field = random(count, n, n, seed=1) / n**0.5, 0.3 * random(count, n, 1, seed=2)
    couplings[::4], field[::8] = 1 / n, 0.0
    beta = torch.linspace(0.3, 2.0, count).double()[:, None]
    method, system = KineticPlefka(order=2), SpinSystem(couplings, field, beta[:, 0])
    theta, unstable = verdict(method, system)
    found = method.solution(system, method.start(system)).converged
    m = torch.tanh(beta * theta[..., 0])
    variance = 1 - m.square()
    reaction = (couplings.square() @ variance[..., None])[..., 0]
    by_mean = beta[..., None] * couplings + 2 * beta[..., None] ** 2 * m[..., None] * couplings.square() * m[:, None]
    jacobian = (variance / (1 + beta**2 * reaction * variance))[..., None] * by_mean
    radius = torch.linalg.eigvals(jacobian[found]).abs().amax(-1)
    assert len(radius) > 50
    assert 3 < int((radius > 1).sum()) < 40
    assert torch.equal(unstable[found], radius > 1 + 1e-8)


@pytest.mark.parametrize("squared_shift", [False, True])
def test_steps_of_vectors_are_linearised_as_they_are_made(squared_shift):
    system = SpinSystem(random(4, 4, seed=3) / 3, random(4, 3, seed=4), 0.8)
    method = KineticPlefka(order=2, squared_shift=squared_shift, response=AmosResponse())
    problem = method.problem(system)
    theta = method.solution(system, method.start(system)).value

    def step(before):
        z = before
        for _ in range(60):
            z = 0.5 * z + 0.5 * problem.next(z, before)
        return z

    torch.testing.assert_close(step(theta), theta, rtol=1e-9, atol=1e-9)
    v = random(4, 3, seed=5)
    moved = (step(theta + 1e-5 * v) - step(theta - 1e-5 * v)) / 2e-5
    torch.testing.assert_close(method.step_jacobian(system, theta)(v), moved, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("method", [MeanField(), TAP(), AdaTAP()], ids=repr)
def test_thermodynamics_go_through_every_transform(method):
    couplings, fields = 0.3 * MAGNET * N, random(3, N, 1, seed=1)

    def capacity(field, beta=0.8):
        return thermodynamics(SpinSystem(couplings / 3, field, beta), method).heat_capacity

    batch = capacity(fields)
    torch.testing.assert_close(torch.vmap(capacity)(fields), batch, rtol=1e-9, atol=1e-9)
    slope = torch.func.grad(lambda beta: capacity(fields[0], beta))(torch.tensor(0.8).double())
    far, near = capacity(fields[0], 0.801), capacity(fields[0], 0.799)
    torch.testing.assert_close(slope, (far - near) / 0.002, rtol=1e-4, atol=1e-4)


def test_maps_may_save_a_declared_tensor_as_it_is():
    couplings, h = 0.1 * random(3, 3), random(1, 3, seed=1)

    def answer(couplings):
        problem = FixedPointMap(lambda z, h, j: torch.tanh(h + z @ j.square()), h, couplings, event_ndim=1)
        return solve(problem, torch.zeros_like(h), solver=Anderson(rtol=1e-13)).value.sum()

    def curvature(couplings):
        gradient, pullback = torch.func.vjp(torch.func.grad(answer), couplings)
        return pullback(torch.ones_like(gradient))[0].sum()

    slope = torch.func.grad(curvature)(couplings)
    step = 1e-5 * random(3, 3, seed=2)
    moved = (curvature(couplings + step) - curvature(couplings - step)) / 2
    torch.testing.assert_close((slope * step).sum(), moved, rtol=1e-5, atol=1e-12)
