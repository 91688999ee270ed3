"""Adaptive TAP: known numbers, exact cases, orders of its errors, and a descent that does not fail."""

import itertools
import math
import re

import numpy as np
import pytest
import torch

from implicit_attention import ConvergenceError, Picard, Status, Unrolled, solve
from implicit_attention.potentials import DiscreteUnits, GaussianUnits, SignUnits, SphereUnits
from implicit_attention.problem import pullback
from implicit_attention.spins import (
    AdaTAP,
    Enumeration,
    SaddlePoint,
    SpinSystem,
    TransferMatrix,
    free_energy,
    magnetization,
    thermodynamics,
)
from implicit_attention.spins._expectation_consistency import SiteEquations, descended, guarded_inverse
from implicit_attention.spins.approximation import physics_solver
from implicit_attention.testing.numerics import dense_jacobian, random

SCALARS = ("free_energy", "internal_energy", "entropy", "heat_capacity")
THREE = DiscreteUnits((-1, 0, 2), (1.0, 2.0, 0.5))
GAUSSIAN = AdaTAP(prior=GaussianUnits())


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def pairs(size, entries):
    couplings = torch.zeros(size, size, dtype=torch.float64)
    for (i, j), value in entries.items():
        couplings[i, j] = couplings[j, i] = value
    return couplings


COUPLINGS = pairs(4, {(0, 1): 0.30, (0, 2): -0.20, (0, 3): 0.10, (1, 2): 0.25, (1, 3): -0.15, (2, 3): 0.40})
CHAIN = pairs(4, {(0, 1): 0.6, (1, 2): -0.5, (2, 3): 0.8})
FIELD = double([[0.20], [-0.10], [0.30], [0.05]])


def blocks():
    """Three sites of two dimensions, coupled by matrices."""
    couplings = torch.zeros(3, 3, 2, 2, dtype=torch.float64)
    given = {
        (0, 1): [[0.2, 0.1], [-0.1, 0.3]],
        (0, 2): [[-0.15, 0.05], [0.0, 0.1]],
        (1, 2): [[0.1, -0.2], [0.25, 0.05]],
    }
    for (i, j), matrix in given.items():
        couplings[i, j], couplings[j, i] = double(matrix), double(matrix).mT
    return couplings, double([[0.5, -0.2], [0.1, 0.3], [-0.4, 0.6]])


def disordered(*batch, sites, dim=1, seed=0, scale=1.0, diagonal=False):
    """Couplings and field of a spin glass, eigenvalues up to 2 `scale`."""
    couplings = scale * random(*batch, sites, sites, seed=seed) / math.sqrt(2 * sites)
    couplings = couplings + couplings.mT
    if not diagonal:
        couplings = couplings - torch.diag_embed(couplings.diagonal(dim1=-2, dim2=-1))
    return couplings, 0.5 * random(*batch, sites, dim, seed=seed + 1)


def slopes(errors):
    """Exponents of errors at scales that double."""
    return torch.stack(errors).abs().log2().diff().tolist()


def covariance(system, method):
    """(Lambda - beta J)^{-1} of numbers, from V and m."""
    v, m = method.cavity_variances(system), magnetization(system, method)[..., 0]
    return torch.linalg.inv(torch.diag_embed(v + 1 / (system.radius**2 - m**2)) - system.beta * system.couplings)


# Known numbers.


@pytest.mark.parametrize(
    ("beta", "free", "m"),
    [
        (1.0, -2.985339987693, [0.1430017993, -0.0108118675, 0.2721975824, 0.1534187118]),
        (2.0, -1.745059348675, [0.2360586186, 0.0629455867, 0.5167001076, 0.3871640194]),
    ],
)
@pytest.mark.parametrize("prior", [SphereUnits(), SignUnits(), DiscreteUnits((-1, 1))], ids=lambda p: type(p).__name__)
def test_four_spins(prior, beta, free, m):
    measure = "counting" if prior.fixed_length else "uniform"
    found = thermodynamics(SpinSystem(COUPLINGS, FIELD, beta, measure=measure), AdaTAP(prior=prior))
    states = 0.0 if measure == "counting" else 4 * math.log(2) / beta
    assert float(found.free_energy) - states == pytest.approx(free, abs=6e-13)
    np.testing.assert_allclose(found.magnetization.flatten(), m, rtol=0, atol=6e-11)


def test_cavity_variances_and_the_covariance_of_four_spins():
    system = SpinSystem(COUPLINGS, FIELD)
    v = [0.0955937970, 0.1156675828, 0.1867335819, 0.1314135898]
    np.testing.assert_allclose(AdaTAP().cavity_variances(system), v, rtol=0, atol=6e-11)
    found = covariance(system, AdaTAP())
    assert float(found[2, 3]) == pytest.approx(0.2934515573, abs=6e-11)
    # What makes it the answer: its diagonal is the variance of the sites.
    m = magnetization(system, AdaTAP())[:, 0]
    torch.testing.assert_close(found.diagonal(), 1 - m**2, rtol=1e-11, atol=0)
    inverse = torch.diag(AdaTAP().inverse_variances(system)) - COUPLINGS
    torch.testing.assert_close(inverse @ found, torch.eye(4).double(), rtol=0, atol=1e-10)


def test_the_susceptibility_is_better_than_the_covariance():
    system = SpinSystem(COUPLINGS, FIELD)
    chi = thermodynamics(system, AdaTAP()).susceptibility()[:, 0, :, 0]
    truth = thermodynamics(system, Enumeration()).susceptibility()[:, 0, :, 0]
    step = 1e-4 * torch.eye(4, dtype=torch.float64)[:, :, None]
    ahead, behind = (magnetization(SpinSystem(COUPLINGS, FIELD + s * step), AdaTAP()) for s in (1, -1))
    torch.testing.assert_close(chi, (ahead - behind)[..., 0] / 2e-4, rtol=1e-7, atol=1e-9)
    assert (chi - truth).abs().max() < 0.7 * (covariance(system, AdaTAP()) - truth).abs().max()


def test_the_gaussian_prior():
    couplings, field = blocks()
    found = thermodynamics(SpinSystem(couplings, field), GAUSSIAN)
    m = [[0.634691734, -0.0628131178], [0.0659671982, 0.2706807163], [-0.4209368612, 0.6257938711]]
    np.testing.assert_allclose(found.magnetization, m, rtol=0, atol=6e-10)
    assert float(found.log_partition) == pytest.approx(0.638130995364, abs=6e-13)
    v = GAUSSIAN.cavity_variances(SpinSystem(couplings, field))
    assert v.shape == (3, 2, 2)
    np.testing.assert_allclose(v[0], [[0.0621491512, 0.0048675431], [0.0048675431, 0.1234424707]], rtol=0, atol=6e-11)


def test_curie_weiss_of_a_hundred_spins():
    """A diagonal 1/N is kept; the exact values are .808367915705 and .774241720703, naive mean field's .8052, .7876."""
    system = SpinSystem(
        torch.full((100, 100), 0.01).double(), torch.full((100, 1), 0.1).double(), 1.2, measure="counting"
    )
    found = thermodynamics(system, AdaTAP())
    assert abs(float(found.log_partition) / 100 - 0.808367915705) < 5e-5
    assert abs(float(found.magnetization[0, 0]) - 0.774241720703) < 6e-4


# Exact cases.


@pytest.mark.parametrize("prior", [SignUnits(), THREE], ids=lambda p: type(p).__name__)
def test_sites_that_are_coupled_to_themselves_only_are_exact(prior):
    values, weights = ((-1, 1), (1, 1)) if prior.fixed_length else (THREE.values, THREE.weights)
    own, field, beta, radius = double([0.7, -0.4]), double([[0.4], [-1.0]]), 1.3, 1.2
    s, w = radius * double(values), double(weights) / sum(weights)
    exact = (w * torch.exp(beta * (field * s + own[:, None] * s**2 / 2))).sum(-1).log().sum()
    system = SpinSystem(torch.diag(own), field, beta, radius=radius)
    torch.testing.assert_close(AdaTAP(prior=prior).log_partition(system).value, exact, rtol=1e-13, atol=0)
    torch.testing.assert_close(AdaTAP(prior=prior).cavity_variances(system), beta * own, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dim", [1, 3])
def test_a_diagonal_is_a_constant_where_lengths_are_fixed(dim):
    couplings, field = disordered(sites=5, dim=dim, seed=3)
    own, beta, radius = double([0.5, -0.3, 2.0, 0.1, -1.0]), 1.2, 1.4
    without, having = (SpinSystem(couplings + k * torch.diag(own), field, beta, radius=radius) for k in (0, 1))
    shift = free_energy(without, AdaTAP()) - free_energy(having, AdaTAP())
    torch.testing.assert_close(shift, radius**2 * own.sum() / 2, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(magnetization(having, AdaTAP()), magnetization(without, AdaTAP()), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("block", [False, True])
def test_the_site_equations_of_gaussian_sites_have_the_closed_form(block):
    couplings, field = blocks() if block else disordered(sites=4, dim=3, scale=0.3, diagonal=True)
    system = SpinSystem(couplings, field, 0.8, radius=1.3)
    solver = Picard(rtol=1e-13, atol=1e-13, damping=0.5, max_steps=2000)
    state = solve(GAUSSIAN.problem(system), GAUSSIAN.start(system), solver=solver).value
    if not block:
        # For matrices V would have to be one, and log Z is the best that numbers can do.
        closed = GAUSSIAN.log_partition(system).value
        torch.testing.assert_close(GAUSSIAN.value(system, state), closed, rtol=1e-12, atol=0)
        torch.testing.assert_close(GAUSSIAN.cavity_variances(system), state[..., -1], rtol=1e-9, atol=1e-11)
    m = GAUSSIAN.problem(system).moments(state)[0]
    torch.testing.assert_close(magnetization(system, GAUSSIAN), m, rtol=1e-10, atol=1e-11)


def test_gaussian_sites_are_a_normal_law():
    """log Z, its slopes and its susceptibility from the precision matrix of all components, R^2 != D."""
    couplings, field = disordered(2, sites=4, dim=3, scale=0.4, diagonal=True)
    beta, radius = double([0.5, 1.1]), 1.5
    found = thermodynamics(SpinSystem(couplings, field, beta, radius=radius), GAUSSIAN)
    precision = 3 / radius**2 * torch.eye(4).double() - beta[:, None, None] * couplings
    m = torch.linalg.solve(precision, beta[:, None, None] * field)
    value = (beta[:, None, None] * field * m).sum((1, 2)) / 2 - 1.5 * torch.logdet(radius**2 / 3 * precision)
    torch.testing.assert_close(found.log_partition, value, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.magnetization, m, rtol=1e-11, atol=0)
    chi = beta[:, None, None] * torch.linalg.inv(precision)
    torch.testing.assert_close(found.susceptibility()[:, :, 1, :, 1], chi, rtol=1e-10, atol=1e-13)


def test_spin_one_against_all_its_states():
    """Weak couplings: the first two orders are exact, so that the error falls at least like the third."""
    weights = double(THREE.weights) / sum(THREE.weights)
    index = torch.tensor(list(itertools.product(range(3), repeat=4)))
    states, logs = double(THREE.values)[index], weights.log()[index].sum(-1)
    errors = []
    for scale in (0.01, 0.02, 0.04):
        energy = -scale * ((states @ COUPLINGS) * states).sum(-1) / 2 - states @ FIELD[:, 0]
        exact = (logs - 0.8 * energy).logsumexp(0)
        errors.append(AdaTAP(prior=THREE).log_partition(SpinSystem(scale * COUPLINGS, FIELD, 0.8)).value - exact)
    assert all(2.7 < slope < 3.3 for slope in slopes(errors))


# Orders of the error.


@pytest.mark.parametrize(("strength", "order"), [(0.0, 4.0), (0.7, 3.0)])
def test_ising_spins_are_off_by_the_third_order_of_the_couplings_or_the_fourth(strength, order):
    couplings, field = disordered(sites=4, seed=3)
    errors = []
    for scale in (0.005, 0.01, 0.02):
        system = SpinSystem(scale * couplings, strength * field)
        errors.append(free_energy(system, AdaTAP()) - free_energy(system, Enumeration()))
    assert all(abs(slope - order) < 0.3 for slope in slopes(errors))


def chain(dim, strength=1.0):
    field = torch.zeros(4, dim, dtype=torch.float64)
    field[:, 0] = strength * math.sqrt(dim) * double([0.4, -0.2, 0.3, 0.1])
    return SpinSystem(CHAIN, field, 1.2)


@pytest.mark.slow
def test_it_is_exact_for_many_dimensions():
    """Errors fall like 1/D; that of m is less than half that of the saddle point, and they approach each other."""
    errors, beyond, apart = [], [], []
    for dim in (16, 32, 64, 128):
        found, saddle, truth = (
            thermodynamics(chain(dim), method) for method in (AdaTAP(), SaddlePoint(), TransferMatrix())
        )
        errors.append((found.log_partition - truth.log_partition) / dim)
        apart.append((found.log_partition - saddle.log_partition) / dim)
        off, worse = ((x.magnetization - truth.magnetization).abs().max() for x in (found, saddle))
        beyond.append(float(off / worse))
    assert slopes(errors) == pytest.approx([-1.0] * 3, abs=0.03)
    assert slopes(apart) == pytest.approx([-1.0] * 3, abs=0.06)
    assert max(beyond) < 0.5
    assert float(errors[2]) == pytest.approx(-1.860e-3, abs=1e-6)


@pytest.mark.parametrize("dim", [2, 3, 16])
def test_without_a_field_it_is_the_saddle_point(dim):
    couplings, field = disordered(sites=6, dim=dim, diagonal=True)
    system = SpinSystem(couplings, 0 * field, 1.5, radius=1.1)
    value = AdaTAP().log_partition(system).value
    torch.testing.assert_close(value, SaddlePoint().log_partition(system).value, rtol=1e-12, atol=0)


def test_matrices_of_one_number_are_numbers():
    couplings, field = disordered(sites=4, dim=3, diagonal=True)
    matrices = couplings[..., None, None] * torch.eye(3).double()
    plain, block = (thermodynamics(SpinSystem(j, field, 1.3), AdaTAP()) for j in (couplings, matrices))
    torch.testing.assert_close(block.free_energy, plain.free_energy, rtol=1e-12, atol=0)
    torch.testing.assert_close(block.magnetization, plain.magnetization, rtol=1e-9, atol=1e-10)


# The equations and their solution.


@pytest.mark.parametrize("case", ["ising", "vectors", "matrices", "spin one"])
def test_the_linearization_is_the_jacobian(case):
    dim = {"vectors": 3, "matrices": 2}.get(case, 1)
    prior = THREE if case == "spin one" else SphereUnits()
    couplings, _ = disordered(2, sites=4 * dim if case == "matrices" else 4, scale=0.5)
    problem = SiteEquations(random(2, 4, dim, seed=3), couplings, prior, 1.3)
    z = descended(problem, problem.field)[0] + 0.05 * random(2, 4, dim + 1, seed=4)
    u = random(2, 4, dim + 1, seed=5)
    linear, jacobian = problem.linearize(z), dense_jacobian(problem, z)
    flat = u.reshape(2, -1, 1)
    torch.testing.assert_close(linear.jvp(u).reshape(2, -1, 1), jacobian @ flat, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(linear.vjp(u).reshape(2, -1, 1), jacobian.mT @ flat, rtol=1e-10, atol=1e-11)
    for one, other in zip(linear.vjp_tensors(u), pullback(problem, z, u), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("prior", "dim"), [(SphereUnits(), 1), (SphereUnits(), 3), (THREE, 1)])
def test_log_partition_is_stationary_at_the_solution(prior, dim):
    couplings, field = disordered(sites=5, dim=dim, seed=2)
    method, system = AdaTAP(prior=prior), SpinSystem(couplings, field, 1.4)
    problem = method.problem(system)
    z = solve(
        problem, descended(problem, problem.field)[0], solver=physics_solver(torch.float64)
    ).value.requires_grad_()
    (slope,) = torch.autograd.grad(method.value(system, z), z)
    assert slope.abs().max() < 1e-9
    moved = method.value(system, z + 0.1)
    (slope,) = torch.autograd.grad(moved, z)
    assert slope.abs().max() > 1e-3


@pytest.mark.slow
def test_random_systems_never_fail():
    """Of all temperatures, far into the spin glass; plain iteration fails there."""
    generator, failed = np.random.default_rng(0), 0
    for seed in range(10):
        sites, beta = int(generator.integers(2, 33)), float(10 ** generator.uniform(-1, 1.3))
        couplings, field = disordered(sites=sites, dim=1 + 2 * (seed % 2), seed=seed, diagonal=seed % 4 > 1)
        system = SpinSystem(couplings, field, beta)
        assert int(AdaTAP().log_partition(system).report.status) == Status.CONVERGED
        plain = AdaTAP(solver=Picard(damping=0.5, rtol=1e-6, max_steps=100))
        failed += int(plain.log_partition(system).report.status != Status.CONVERGED)
    assert failed > 1


@pytest.mark.parametrize("beta", [20.0, 1e3])
def test_spins_that_are_frozen(beta):
    """All variances vanish; log Z is the energy of a state that no spin lowers by turning round."""
    couplings, field = disordered(sites=10, seed=5)
    found = thermodynamics(SpinSystem(couplings, field, beta), AdaTAP())
    s = found.magnetization[:, 0]
    torch.testing.assert_close(s.abs(), torch.ones_like(s), rtol=1e-4, atol=0)
    local = field[:, 0] + couplings @ s.sign()
    assert bool((local * s > 0).all())
    energy = -(s.sign() * (field[:, 0] + local)).sum() / 2
    assert float(found.free_energy) == pytest.approx(float(energy + 10 * math.log(2) / beta), abs=2e-2 / beta)


@pytest.mark.parametrize(("sites", "seed", "beta"), [(8, 58, 60.0), (10, 7, 300.0), (12, 9, 100.0)])
def test_spins_that_are_frozen_and_coupled_to_themselves(sites, seed, beta):
    """Slopes vanish with the variances, also where a spin should turn round."""
    couplings, field = disordered(sites=sites, seed=seed, diagonal=True)
    evidence = AdaTAP().log_partition(SpinSystem(couplings, field, beta)).report
    assert int(evidence.status) == Status.CONVERGED, evidence


@pytest.mark.parametrize("seed", [9, 11])
def test_steps_stay_near(seed):
    """Too long ones would end in other minima, .9 and 1.3 above."""
    couplings, field = disordered(sites=10, seed=seed)
    found, exact = (free_energy(SpinSystem(couplings, field, 10.0), method) for method in (AdaTAP(), Enumeration()))
    assert float(found) == pytest.approx(float(exact), abs=0.02)


def test_an_inverse_that_does_not_exist_has_no_derivative():
    """Neither of an indefinite matrix nor of one that is not a number, whatever they share."""
    good = torch.eye(3).double()
    bad = torch.stack(
        [good, -good, torch.zeros(3, 3).double(), torch.nan * good, good + torch.diag(double([0, torch.inf, 0]))]
    )
    shared = torch.full((3, 3), 0.1).double().requires_grad_()
    x, logdet, positive = guarded_inverse(bad + shared)
    assert positive.tolist() == [True, False, False, False, False]
    truth = torch.linalg.inv(good + shared), torch.logdet(good + shared)
    torch.testing.assert_close((x[0], logdet[0]), truth)
    (gradient,) = torch.autograd.grad(x[0].sum() + logdet.sum(), shared)
    (truth,) = torch.autograd.grad(truth[0].sum() + truth[1], shared)
    torch.testing.assert_close(gradient, truth)


def test_a_state_that_is_not_a_number_has_no_derivative():
    couplings, field = disordered(2, sites=4)
    shared, method = couplings[0].clone().requires_grad_(), AdaTAP()
    system = SpinSystem(shared, field)
    state = method.solution(system, method.start(system)).value
    state = torch.where(torch.tensor([False, True])[:, None, None], torch.nan, state)
    value = method.value(system, state)
    assert value.isnan().tolist() == [False, True]
    (gradient,) = torch.autograd.grad(value[0], shared)
    assert bool(gradient.isfinite().all())


def mixed(*tensors):
    """One number that changes with every entry."""
    return sum((t * random(*t.shape, seed=i)).sum() for i, t in enumerate(tensors))


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "outputs"), [(1, (*SCALARS, "correlations")), (2, ("magnetization",))])
def test_outputs_are_differentiable_twice(dim, outputs):
    """Of vectors only the magnetization: fourth derivatives of Bessel functions take long."""
    couplings, field = disordered(sites=4 - dim, dim=dim, diagonal=True)

    def first(field, weights, beta):
        found = thermodynamics(SpinSystem((weights + weights.mT) / 2, field, beta), AdaTAP())
        every = [getattr(found, name) for name in (*SCALARS, "magnetization", "correlations")]
        return mixed(*every, found.susceptibility_product(0.7 * field))

    def second(field, weights, beta):
        system = SpinSystem((weights + weights.mT) / 2, field, beta)
        if outputs == ("magnetization",):
            return mixed(magnetization(system, AdaTAP()))
        found = thermodynamics(system, AdaTAP())
        return mixed(*(getattr(found, name) for name in outputs))

    arguments = [field.requires_grad_(), couplings.requires_grad_(), double(0.9).requires_grad_()]
    assert torch.autograd.gradcheck(first, arguments, fast_mode=True, atol=1e-6)
    assert torch.autograd.gradgradcheck(second, arguments, fast_mode=True, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("prior", [GaussianUnits(), THREE], ids=lambda p: type(p).__name__)
def test_derivatives_for_other_priors(prior):
    couplings, field = disordered(sites=2, scale=0.4, diagonal=True)

    def outputs(field, weights, beta):
        system = SpinSystem((weights + weights.mT) / 2, field, beta)
        found = thermodynamics(system, AdaTAP(prior=prior))
        variances = AdaTAP(prior=prior).cavity_variances(system)
        return mixed(found.free_energy, found.heat_capacity, found.magnetization, found.correlations, variances)

    arguments = [field.requires_grad_(), couplings.requires_grad_(), double(0.9).requires_grad_()]
    assert torch.autograd.gradcheck(outputs, arguments, fast_mode=True, atol=1e-6)
    assert torch.autograd.gradgradcheck(outputs, arguments, fast_mode=True, atol=1e-6)


def test_magnetization_is_the_slope_of_its_own_free_energy():
    couplings, field = disordered(sites=5, dim=3, seed=7)
    field.requires_grad_()
    for method in (AdaTAP(), GAUSSIAN):
        system = SpinSystem(0.3 * couplings, field, 1.3)
        (slope,) = torch.autograd.grad(-free_energy(system, method), field)
        m = method.problem(system).moments(_state(method, system))[0] if method is not GAUSSIAN else slope
        torch.testing.assert_close(magnetization(system, method), slope, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(m, slope, rtol=1e-9, atol=1e-10)


def _state(method, system):
    problem = method.problem(system)
    return solve(problem, descended(problem, problem.field)[0], solver=physics_solver(torch.float64)).value


# Samples and symmetries.


def test_permuting_sites_and_turning_axes_permutes_and_turns_the_answer():
    couplings, field = disordered(2, sites=4, dim=3, diagonal=True)
    order, turn = torch.tensor([2, 0, 3, 1]), torch.linalg.qr(random(3, 3, seed=9))[0]
    found = thermodynamics(SpinSystem(couplings, field, 1.3, radius=1.7), AdaTAP())
    moved = thermodynamics(
        SpinSystem(couplings[:, order][:, :, order], field[:, order] @ turn, 1.3, radius=1.7), AdaTAP()
    )
    torch.testing.assert_close(moved.free_energy, found.free_energy, rtol=1e-12, atol=0)
    torch.testing.assert_close(moved.heat_capacity, found.heat_capacity, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(moved.magnetization, found.magnetization[:, order] @ turn, rtol=1e-9, atol=1e-10)


def test_the_radius_is_a_scale():
    couplings, field = disordered(sites=4, dim=3)
    plain = thermodynamics(SpinSystem(couplings, field, 1.3, radius=1.0), AdaTAP())
    scaled = thermodynamics(SpinSystem(couplings / 4, field / 2, 1.3, radius=2.0), AdaTAP())
    torch.testing.assert_close(scaled.free_energy, plain.free_energy, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(scaled.magnetization, 2 * plain.magnetization, rtol=1e-9, atol=1e-10)


def test_one_sample_changes_no_other():
    """An easy sample, one deep in the glass, one that is not a number, one of strong fields: each as if alone."""
    couplings, field = disordered(4, sites=6, dim=1, seed=2)
    field = field * double([1.0, 1.0, 1.0, 50.0])[:, None, None]
    couplings[2, 0, 1] = couplings[2, 1, 0] = torch.nan
    beta = double([0.5, 8.0, 1.0, 1.0])
    found = thermodynamics(SpinSystem(couplings, field, beta), AdaTAP(), on_failure="ignore")
    assert found.report.status.tolist() == [0, 0, Status.NONFINITE, 0]
    assert found.free_energy[2].isnan()
    for i in (0, 1, 3):
        alone = thermodynamics(SpinSystem(couplings[i], field[i], beta[i]), AdaTAP())
        torch.testing.assert_close(found.free_energy[i], alone.free_energy, rtol=1e-15, atol=1e-15)
        torch.testing.assert_close(found.magnetization[i], alone.magnetization, rtol=1e-14, atol=1e-15)
        assert found.report.num_evals[i] == alone.report.num_evals


@pytest.mark.parametrize("block", [False, True])
def test_a_gaussian_that_does_not_exist_fails_alone(block):
    """Couplings are shared, and the loss leaves the failed sample out."""
    couplings, field = blocks() if block else disordered(sites=3, dim=2, diagonal=True)
    shared = couplings.clone().requires_grad_()
    beta = double([0.3, 40.0, 0.5])
    found = thermodynamics(SpinSystem(shared, field.expand(3, 3, 2), beta), GAUSSIAN, on_failure="ignore")
    assert found.report.status.tolist() == [0, Status.OUT_OF_RANGE, 0]
    assert found.free_energy.isnan().tolist() == [False, True, False]
    kept = found.free_energy[::2].sum() + found.heat_capacity[::2].sum()
    (gradient,) = torch.autograd.grad(kept, shared)
    leaf = couplings.clone().requires_grad_()
    alone = thermodynamics(SpinSystem(leaf, field.expand(2, 3, 2), beta[::2]), GAUSSIAN)
    (truth,) = torch.autograd.grad(alone.free_energy.sum() + alone.heat_capacity.sum(), leaf)
    torch.testing.assert_close(gradient, truth, rtol=1e-12, atol=1e-13)
    variances = GAUSSIAN.cavity_variances(SpinSystem(couplings, field.expand(3, 3, 2), beta))
    assert variances.flatten(1).isnan().any(-1).tolist() == [False, True, False]
    with pytest.raises(ConvergenceError):
        free_energy(SpinSystem(couplings, field, 40.0), GAUSSIAN)


def test_a_solve_that_breaks_down_fails_alone():
    couplings, field = disordered(sites=8, seed=1)
    shared, beta = couplings.clone().requires_grad_(), double([0.4, 30.0])
    method = AdaTAP(solver=Picard(rtol=1e-11, atol=1e-11, max_steps=300))
    found = thermodynamics(SpinSystem(shared, field.expand(2, 8, 1), beta), method, on_failure="ignore")
    assert found.report.converged.tolist() == [True, False]
    (gradient,) = torch.autograd.grad(found.free_energy[0] + found.heat_capacity[0], shared)
    assert bool(gradient.isfinite().all())
    variances = method.cavity_variances(SpinSystem(couplings, field.expand(2, 8, 1), beta))
    assert variances.isnan().any(-1).tolist() == [False, True]


@pytest.mark.parametrize("prior", [SphereUnits(), THREE, GaussianUnits()], ids=lambda p: type(p).__name__)
def test_masked_sites_change_nothing(prior):
    """Also for a law whose mean is not 0."""
    couplings, field = disordered(sites=6, scale=0.4)
    mask = torch.tensor([True, True, False, True, True, False])
    without = thermodynamics(SpinSystem(couplings[mask][:, mask], field[mask], 0.9), AdaTAP(prior=prior))
    couplings[~mask], couplings[:, ~mask], field[~mask] = (torch.nan,) * 3
    found = thermodynamics(SpinSystem(couplings, field, 0.9, mask=mask), AdaTAP(prior=prior))
    for name in SCALARS:
        torch.testing.assert_close(getattr(found, name), getattr(without, name), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found.magnetization[mask], without.magnetization, rtol=1e-9, atol=1e-10)
    assert bool((found.magnetization[~mask] == 0).all())


def test_vmap_and_grad_compose():
    couplings, _ = disordered(sites=4)
    fields = random(3, 4, 1, seed=4)

    def value(field):
        return magnetization(SpinSystem(couplings, field, 1.2), AdaTAP()).square().sum()

    mapped = torch.vmap(torch.func.grad(value))(fields)
    live = fields.clone().requires_grad_()
    (truth,) = torch.autograd.grad(sum(value(f) for f in live), live)
    torch.testing.assert_close(mapped, truth, rtol=1e-9, atol=1e-10)


def test_single_precision_is_solved_to_its_own_digits():
    couplings, field = disordered(2, sites=6, dim=3)
    double_, single = (
        thermodynamics(SpinSystem(couplings.to(t), field.to(t)), AdaTAP()) for t in (None, torch.float32)
    )
    for name in (*SCALARS, "magnetization"):
        torch.testing.assert_close(getattr(single, name).double(), getattr(double_, name), rtol=1e-4, atol=1e-4)


def test_an_empty_batch_has_empty_results():
    for method in (AdaTAP(), GAUSSIAN):
        found = thermodynamics(SpinSystem(COUPLINGS, FIELD.new_zeros(0, 4, 1)), method)
        assert found.magnetization.shape == (0, 4, 1)
        assert found.report.status.shape == (0,)


# Options.


def test_the_solver_and_the_adjoint_are_obeyed():
    system = SpinSystem(COUPLINGS, FIELD)
    default = thermodynamics(system, AdaTAP())
    solver = Picard(rtol=1e-12, atol=1e-12, damping=0.3)
    for method in (AdaTAP(solver=solver), AdaTAP(solver=Picard(rtol=0.0, atol=0.0, max_steps=80), adjoint=Unrolled())):
        found = thermodynamics(system, method)
        assert found.report.num_steps > default.report.num_steps
        torch.testing.assert_close(found.free_energy, default.free_energy, rtol=1e-12, atol=0)
        torch.testing.assert_close(found.heat_capacity, default.heat_capacity, rtol=1e-8, atol=0)


def test_wrong_arguments_are_named():
    for name, value in (("prior", "ising"), ("solver", "anderson"), ("adjoint", 1)):
        with pytest.raises(TypeError, match=re.escape(f"`{name}` must be ")):
            AdaTAP(**{name: value})
    vectors = SpinSystem(torch.zeros(3, 3), torch.zeros(3, 2))
    for prior in (SignUnits(), THREE):
        with pytest.raises(
            ValueError, match=f"`system` must have spins of dimension 1 for {type(prior).__name__}, got D = 2"
        ):
            free_energy(vectors, AdaTAP(prior=prior))
    counting = SpinSystem(torch.zeros(3, 3), torch.zeros(3, 1), measure="counting")
    assert float(free_energy(counting, AdaTAP(prior=SignUnits()))) == pytest.approx(-3 * math.log(2))
    for prior in (GaussianUnits(), THREE):
        with pytest.raises(ValueError, match=r"`measure` must be 'uniform' for .*, got 'counting'; use SpinSystem"):
            free_energy(counting, AdaTAP(prior=prior))
    with pytest.raises(ValueError, match="`couplings` must be symmetric"):
        free_energy(SpinSystem(torch.ones(3, 3).triu(), torch.zeros(3, 1)), AdaTAP())
    with pytest.raises(ValueError, match="`prior` must have spins of fixed length"):
        GAUSSIAN.site_response()
