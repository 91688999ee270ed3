"""Adaptive TAP: exact cases, and a descent that does not fail."""

import math

import numpy as np
import pytest
import torch
from solvable_models import COUPLINGS, FIELD, chain, curie_weiss, double

from implicit_attention import ConvergenceError, Picard, Status, Unrolled
from implicit_attention.potentials import DiscreteUnits, GaussianUnits, SignUnits
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
from implicit_attention.testing.numerics import random

SCALARS = ("free_energy", "internal_energy", "entropy", "heat_capacity")
THREE = DiscreteUnits((-1, 0, 2), (1.0, 2.0, 0.5))
GAUSSIAN = AdaTAP(prior=GaussianUnits())


def blocks():
    """Three sites of two dimensions, coupled by matrices."""
    upper = torch.zeros(3, 3, 2, 2, dtype=torch.float64)
    upper[0, 1] = double([[0.2, 0.1], [-0.1, 0.3]])
    upper[0, 2] = double([[-0.15, 0.05], [0.0, 0.1]])
    upper[1, 2] = double([[0.1, -0.2], [0.25, 0.05]])
    return upper + upper.permute(1, 0, 3, 2), double([[0.5, -0.2], [0.1, 0.3], [-0.4, 0.6]])


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sites", "log_partition", "m"), [(100, 0.808367915705, 0.774241720703), (1000, 0.805501483472, 0.786407322718)]
)
def test_curie_weiss_of_many_spins(sites, log_partition, m):
    """A diagonal 1/N is kept; infinitely many spins, and naive mean field, have .8052 and .7876."""
    found = thermodynamics(curie_weiss(sites, 1, 1.2, 0.1, measure="counting"), AdaTAP())
    assert abs(float(found.log_partition) / sites - log_partition) < 5e-3 / sites
    assert abs(float(found.magnetization[0, 0]) - m) < 0.06 / sites


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


# Orders of the error.


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


# The equations and their solution.


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


# Samples and symmetries.


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
