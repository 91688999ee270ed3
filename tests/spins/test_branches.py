"""Where there are several solutions: the stable one is found, and an unstable one is called that."""

import dataclasses
import math
import re

import pytest
import torch
from work import Work

from implicit_attention import Anderson, ConvergenceError, ConvergenceWarning, FixedPointMap, Picard, Status, solve
from implicit_attention.potentials import AmosResponse
from implicit_attention.spins import (
    TAP,
    AdaTAP,
    Bethe,
    DiscreteUnits,
    DynamicalMethod,
    GaussianClosure,
    GaussianUnits,
    KineticPlefka,
    MeanField,
    SpinSystem,
    free_energy,
    magnetization,
    stability,
    stationary_law,
    stationary_state,
    thermodynamics,
)
from implicit_attention.testing.numerics import random

pytestmark = pytest.mark.cases(2)

N = 10
MAGNET = (torch.ones(N, N) - torch.eye(N)).double() / N


@pytest.mark.parametrize("method", [MeanField(), Bethe(), TAP()], ids=repr)
@pytest.mark.parametrize("beta", [1.5, 2.0, 3.0])
def test_a_magnet_below_its_transition_follows_a_small_field(method, beta):
    system = SpinSystem(MAGNET, torch.full((N, 1), 0.01).double(), beta)
    found = thermodynamics(system, method)
    assert found.report.status == Status.CONVERGED
    assert float(found.magnetization.min()) > 0.7
    # Chi of a minimum has no negative eigenvalue.
    chi = found.susceptibility()[:, 0, :, 0]
    assert float(torch.linalg.eigvalsh(chi)[0]) > 0


@pytest.mark.parametrize("method", [MeanField(), Bethe(), TAP()], ids=repr)
def test_zero_is_a_saddle_below_the_transition_and_told(method):
    system = SpinSystem(MAGNET, torch.zeros(2, N, 1).double(), torch.tensor([0.5, 2.0]).double())
    text = re.escape("ended on an unstable solution (status UNSTABLE) for 1 of 2 problems")
    for function in (thermodynamics, free_energy, magnetization):
        with pytest.warns(ConvergenceWarning, match=text):
            function(system, method, check="stability")
    with pytest.warns(ConvergenceWarning, match=text):
        thermodynamics(system, method)
    found = thermodynamics(system, method, on_failure="ignore")
    assert found.report.status.tolist() == [Status.CONVERGED, Status.UNSTABLE]


def test_belief_propagation_has_two_branches_below_the_transition():
    system = SpinSystem(MAGNET, torch.full((N, 1), 0.01).double(), 2.0)
    found = stability(system, Bethe(), starts=16)
    assert int(found.branches) == 2
    assert not found.reliable


@pytest.mark.parametrize("method", [GaussianClosure(), KineticPlefka(), KineticPlefka(order=2)], ids=repr)
def test_dynamics_settle_on_the_side_of_the_field(method):
    field = torch.full((N, 1), 0.05).double()
    found = stationary_state(SpinSystem(MAGNET, field, 2.0), method)
    truth = stationary_law(MAGNET, field[:, 0], 2.0).magnetization
    assert float((found.magnetization[:, 0] - truth).abs().max()) < 0.06
    system = SpinSystem(MAGNET, 0 * field, 2.0)
    for function in (stationary_state, magnetization):
        with pytest.warns(ConvergenceWarning, match="UNSTABLE"):
            function(system, method, check="stability")
    assert stationary_state(system, method, check="stability", on_failure="ignore").report.status == Status.UNSTABLE
    # What is not asked is not told.
    assert stationary_state(system, method).report.status == Status.CONVERGED


ITERATED = [MeanField(), TAP(), TAP(order=3), Bethe(), KineticPlefka(), KineticPlefka(order=2), GaussianClosure()]


def answered(system, method, **options):
    if isinstance(method, DynamicalMethod):
        return stationary_state(system, method, **options).report
    return thermodynamics(system, method, **options).report


@pytest.mark.parametrize("method", ITERATED, ids=repr)
def test_a_verdict_is_computed_only_where_it_is_asked_for(method):
    def operations(method, check):
        system = SpinSystem(0.6 * MAGNET, random(N, 1), 2.0)
        with Work() as work:
            magnetization(system, method, check=check, on_failure="ignore")
        return work.operations

    assert operations(method, "stability") > operations(method, "none")
    # A fixed budget is never judged.
    budget = dataclasses.replace(method, solver=Picard(rtol=0, atol=0, max_steps=2))
    assert operations(budget, "stability") == operations(budget, "none")


@pytest.mark.parametrize(
    ("method", "each"),
    [
        (MeanField(), 1),
        (MeanField(response=AmosResponse()), 1),
        (KineticPlefka(), 1),
        (GaussianClosure(), 2),
        (GaussianClosure(response=AmosResponse()), 2),
    ],
    ids=repr,
)
def test_where_steps_contract_neither_damping_nor_a_verdict_costs_a_product(method, each):
    couplings, field = 0.2 * random(2, 4, 4), random(2, 4, 3, seed=1)
    couplings = (couplings + couplings.mT) / 2

    def beyond(scale, **options):
        """Products beyond those of one evaluation for all samples at a time."""
        with Work() as work:
            _, answer = magnetization(SpinSystem(scale * couplings, field), method, return_answer=True, **options)
        return work.products - each * int(answer.report.num_evals.amax())

    check = {"check": "stability" if isinstance(method, MeanField) else "none"}
    assert beyond(1, **check) == 0
    # Stronger couplings are no longer certain.
    assert beyond(5, check="stability", on_failure="ignore") > 0


def test_tap_beyond_its_range_fails_whatever_is_asked():
    system = SpinSystem(3 * random(N, N), torch.zeros(N, 1).double(), 1.0)
    system = system.at(system.field, (system.couplings + system.couplings.mT) / 2, 1.0)
    for check in ("none", "stability"):
        evidence = thermodynamics(system, TAP(), check=check, on_failure="ignore").report
        assert evidence.status == Status.OUT_OF_RANGE


def unstable(system, method):
    _, answer = magnetization(system, method, check="stability", on_failure="ignore", return_answer=True)
    return answer.report.status == Status.UNSTABLE


NEAR = torch.tensor([-1e-3, -1e-5, 1e-5, 1e-4, 3e-4, 3e-3]).double()


@pytest.mark.slow
@pytest.mark.parametrize("method", [MeanField(), KineticPlefka()], ids=repr)
def test_a_long_chain_is_told_apart_just_above_and_just_below_its_transition(method):
    """Its slowest modes lie as near to each other as to the transition."""
    chain = torch.diag(torch.ones(255).double(), 1)
    chain = chain + chain.mT
    critical = 1 / float(torch.linalg.eigvalsh(chain)[-1])
    system = SpinSystem(chain, torch.zeros(6, 256, 1).double(), critical * (1 + NEAR))
    assert unstable(system, method).tolist() == [False, False, True, True, True, True]


def test_a_long_ring_is_told_apart_just_above_and_just_below_its_transition():
    """At m = 0 the Hessian of TAP is 1 + beta^2 sum_j J_ij^2 - beta J, with 16 equal neighbours."""
    apart = (torch.arange(256)[:, None] - torch.arange(256)).abs()
    ring = ((apart.minimum(256 - apart) <= 8) & (apart > 0)).double()
    critical = (1 - (1 - 4 / 16) ** 0.5) / 2
    system = SpinSystem(ring, torch.zeros(6, 256, 1).double(), critical * (1 + NEAR))
    assert unstable(system, TAP()).tolist() == [False, False, True, True, True, True]


@pytest.mark.slow
def test_the_second_order_of_dynamics_is_stable_where_its_own_steps_come_back():
    """theta is in its own equation, m' = tanh(beta f - beta^2 m' V): a step solves it, and dm'/dm follows from it."""
    count, n = 60, 12
    couplings, field = random(count, n, n, seed=1) / n**0.5, 0.3 * random(count, n, 1, seed=2)
    couplings[::4], field[::8] = 1 / n, 0.0
    beta = torch.linspace(0.3, 2.0, count).double()[:, None]
    method, system = KineticPlefka(order=2), SpinSystem(couplings, field, beta[:, 0])
    state = stationary_state(system, method, on_failure="ignore")
    found, m = state.report.converged, state.magnetization[..., 0]
    variance = 1 - m.square()
    reaction = (couplings.square() @ variance[..., None])[..., 0]
    by_mean = beta[..., None] * couplings + 2 * beta[..., None] ** 2 * m[..., None] * couplings.square() * m[:, None]
    jacobian = (variance / (1 + beta**2 * reaction * variance))[..., None] * by_mean
    radius = torch.linalg.eigvals(jacobian[found]).abs().amax(-1)
    assert len(radius) > 50
    assert 3 < int((radius > 1).sum()) < 40
    assert torch.equal(unstable(system, method)[found], radius > 1 + 1e-8)


def test_steps_of_vectors_are_linearised_as_they_are_made():
    system = SpinSystem(random(4, 4, seed=3) / 3, random(4, 3, seed=4), 0.8)
    method = KineticPlefka(order=2, response=AmosResponse())
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


# Branches that are chosen.


def ring(n, field, beta, dim=1):
    """An antiferromagnet: neighbours on a ring, in a field."""
    couplings, i = torch.zeros(n, n).double(), torch.arange(n)
    couplings[i, (i + 1) % n] = couplings[(i + 1) % n, i] = -1.0
    return SpinSystem(couplings, torch.full((n, dim), field).double(), beta)


def two_sublattices(field, beta):
    """(F per site, m of both) of a ring's alternating mean-field solution."""
    other = lambda m: math.tanh(beta * (field - 2 * m))  # noqa: E731
    a = -1.0
    # Two steps increase with m, so that from the lowest value they climb to the lowest solution.
    for _ in range(1000):
        a = other(other(a))
    b = other(a)
    assert a < 0 < b
    log_z = (math.log(math.cosh(beta * (field - 2 * a))) + math.log(math.cosh(beta * (field - 2 * b)))) / 2
    return -log_z / beta - a * b, a, b


@pytest.mark.slow
def test_stability_finds_the_branches_of_an_antiferromagnet_and_they_can_be_chosen():
    n, field, beta = 32, 0.3, 2.0
    system = ring(n, field, beta)
    truth, a, b = two_sublattices(field, beta)
    for seed in range(2):
        found = stability(system, MeanField(), starts=4, generator=torch.Generator().manual_seed(seed))
        assert found.report.status == Status.UNSTABLE
        assert float(found.free_energies.nan_to_num(nan=torch.inf).amin()) == pytest.approx(n * truth, rel=1e-9)
        assert int(found.first.sum()) == int(found.branches) >= 2
    m = found.lowest[:, 0]
    torch.testing.assert_close(
        m.sort().values, torch.tensor([a] * (n // 2) + [b] * (n // 2)).double(), atol=1e-8, rtol=0
    )
    assert bool((m * m.roll(1) < 0).all())
    assert float(free_energy(system, MeanField())) > n * truth + 1
    chosen = thermodynamics(system, MeanField(), initial=found.lowest)
    assert chosen.report.status == Status.CONVERGED
    torch.testing.assert_close(chosen.magnetization, found.lowest, rtol=0, atol=1e-8)
    for k in found.first.nonzero().flatten().tolist():
        free = free_energy(system, MeanField(), initial=found.magnetizations[k], check="stability")
        torch.testing.assert_close(free, found.free_energies[k], rtol=1e-8, atol=1e-8)


SPIN_ONE = AdaTAP(prior=DiscreteUnits((-1, 0, 1), (1, 0.5, 1)))
DYNAMICS = [KineticPlefka(), KineticPlefka(order=2), GaussianClosure()]


@pytest.mark.parametrize("method", [MeanField(), TAP(), Bethe(), AdaTAP(), SPIN_ONE, *DYNAMICS], ids=repr)
def test_magnetizations_choose_the_branch_against_a_field_and_lead_back_to_it(method):
    field = 0.01 * torch.tensor([1.0, -1.0]).double()[:, None, None].expand(2, N, 1)
    system = SpinSystem(MAGNET, field, 4.0 if isinstance(method, AdaTAP) else 2.0)
    own = magnetization(system, method, check="stability")
    assert bool((own * field > 0.3 * 0.01).all())
    torch.testing.assert_close(magnetization(system, method, initial=own), own, rtol=0, atol=1e-7)
    against = magnetization(system, method, initial=(-own).requires_grad_(), check="stability")
    assert bool((against * field < -0.3 * 0.01).all())
    # The field costs it some of its length.
    assert bool((against.abs() < own.abs()).all())
    torch.testing.assert_close(magnetization(system, method, initial=against), against, rtol=0, atol=1e-7)
    # By symmetry the two samples have opposite answers.
    torch.testing.assert_close(against[0], -against[1], rtol=0, atol=1e-8)
    assert not against.requires_grad
    slope = torch.func.grad(lambda m: magnetization(system, method, initial=m).sum())(-own)
    assert not slope.any()


@pytest.mark.parametrize("method", [MeanField(), KineticPlefka(), GaussianClosure()], ids=repr)
def test_magnetizations_choose_how_often_vectors_wind_around_a_ring(method):
    n, turns = 12, torch.tensor([0.0, 1.0]).double()
    system = SpinSystem(-ring(n, 0.0, 1.5).couplings, torch.zeros(2, n, 2).double(), 1.5)
    angle = 2 * math.pi * turns[:, None] * torch.arange(n) / n
    m = magnetization(system, method, initial=torch.stack((angle.cos(), angle.sin()), -1))
    length = m.norm(dim=-1)
    assert bool((length > 0.1).all())
    cosine = (m * m.roll(1, -2)).sum(-1) / length.square()
    torch.testing.assert_close(cosine, (2 * math.pi * turns / n).cos()[:, None].expand(2, n), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("method", [MeanField(), TAP(), Bethe(), AdaTAP(), *DYNAMICS], ids=repr)
def test_a_solution_is_its_own_start(method, dim):
    if isinstance(method, Bethe):
        dim = 1
    system = SpinSystem(0.6 * MAGNET, random(2, N, dim), torch.tensor([0.5, 0.9]).double())
    found = answered(system, method)
    m = magnetization(system, method)
    again = answered(system, method, initial=m)
    assert bool((found.num_evals > 4).all())
    assert bool((again.num_evals <= 3).all())


@pytest.mark.parametrize("method", [MeanField(), TAP(), Bethe(), AdaTAP(), KineticPlefka(order=2)], ids=repr)
def test_one_start_changes_no_other_sample_and_padding_changes_nothing(method):
    mask = torch.arange(N) < N - 2
    system = SpinSystem(MAGNET, torch.full((2, N, 1), 0.01).double(), 2.0, mask=mask)
    start = 0.9 * torch.ones(2, N, 1).double()
    truth = magnetization(system, method, initial=start)
    start[:, ~mask] = torch.nan
    assert torch.equal(magnetization(system, method, initial=start), truth)
    # No spin is longer than R: one loop may answer with such magnetizations.
    long = magnetization(system, method, initial=torch.full_like(start, 3.0))
    torch.testing.assert_close(long, truth, rtol=0, atol=1e-8)
    start[1, 0] = torch.nan
    lost = magnetization(system, method, initial=start, on_failure="ignore")
    torch.testing.assert_close(lost[0], truth[0], rtol=0, atol=1e-14)
    with pytest.raises(ConvergenceError, match=re.escape("failed for 1 of 2 problems, first at 1")):
        magnetization(system, method, initial=start)


def test_the_one_answer_of_gaussian_spins_has_no_start():
    with pytest.raises(ValueError, match="`initial` must be None for AdaTAP, which has one answer"):
        magnetization(SpinSystem(0.1 * MAGNET, random(N, 1)), AdaTAP(prior=GaussianUnits()), initial=random(N, 1))


def test_a_start_is_checked_at_the_door():
    system = SpinSystem(MAGNET, random(2, N, 1), 0.8)
    for function, method in ((magnetization, MeanField()), (stationary_state, GaussianClosure())):
        for initial, error, text in (
            (torch.zeros(N, 1), ValueError, r"have the field's shape (2, 10, 1), got shape (10, 1)"),
            (torch.zeros(2, N, 1, dtype=torch.int64), TypeError, "have a floating-point dtype"),
            ([0.0], TypeError, "be a torch.Tensor"),
            (torch.zeros(2, N, 1, device="meta"), ValueError, "be on the field's cpu, got meta"),
        ):
            with pytest.raises(error, match=re.escape(f"`initial` must {text}")):
                function(system, method, initial=initial)
    # Any precision will do.
    assert magnetization(system, MeanField(), initial=torch.zeros(2, N, 1).half()).dtype == torch.float64
