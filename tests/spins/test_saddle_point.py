"""The saddle point: its numbers and its multipliers."""

import math

import numpy as np
import pytest
import scipy.optimize
import torch
from solvable_models import CHAIN, VECTORS, double, four_vectors, two_spins

from implicit_attention import Status
from implicit_attention.spins import SaddlePoint, SpinSystem, free_energy, magnetization, thermodynamics
from implicit_attention.testing.numerics import random

LEADING, ONE_LOOP, SPHERICAL = SaddlePoint(), SaddlePoint(one_loop=True), SaddlePoint(shared=True)
METHODS = [LEADING, ONE_LOOP, SPHERICAL, SaddlePoint(shared=True, one_loop=True)]
NAMES = ["leading", "one_loop", "shared", "shared_one_loop"]


def close(value, truth, *, digits):
    """Agreement to half a unit of the last digit given."""
    torch.testing.assert_close(value.detach(), double(truth), rtol=0, atol=0.51 * 10.0**-digits)


def disordered(*batch, n=3, d=5, seed=0, scale=0.7, dtype=torch.float64, beta=1.3, **options):
    """A diagonal, a field, R^2 != D."""
    couplings = scale * random(*batch, n, n, seed=seed)
    field = random(*batch, n, d, seed=seed + 1)
    options = {"radius": 1.7, **options}
    return SpinSystem((couplings + couplings.mT).to(dtype), field.to(dtype), beta, **options)


def test_a_chain_without_field_is_the_sum_of_its_bonds():
    field = torch.zeros(4, 3, dtype=torch.float64)
    whole = LEADING.log_partition(SpinSystem(CHAIN, field, 1.2)).value
    close(whole, 2.1807247494, digits=10)
    bonds = [SpinSystem(double([[0, j], [j, 0]]), field[:2], 1.2) for j in (0.6, -0.5, 0.8)]
    close(sum(LEADING.log_partition(bond).value for bond in bonds), float(whole), digits=12)


def test_multipliers():
    close(LEADING.multipliers(two_spins(3)), [1.5383159442] * 2, digits=10)
    close(LEADING.multipliers(four_vectors()), [1.374789653, 1.482700855, 1.485943098, 1.428383790], digits=9)
    close(SPHERICAL.multipliers(four_vectors()), [1.445604111866], digits=12)


def test_couplings_that_depend_on_the_field():
    def couplings(field):
        return 0.2 * torch.tanh(5 * field @ field.mT / 3) * (1 - torch.eye(3, dtype=torch.float64))

    system = SpinSystem.from_full(couplings, 3**0.5 * VECTORS[:3], 1.5)
    close(free_energy(system, LEADING) / 3, -0.346251616398, digits=12)
    direct, through = magnetization(system, LEADING, split=True)
    close(direct[0] / math.sqrt(3), [0.2388478026, -0.2014614208, 0.3734642223], digits=10)
    # The second was found to be -.434694536371 by differences of F of sixth order.
    close((direct + through)[0] / math.sqrt(3), [0.2712349468, -0.4346945364, 0.4506943585], digits=10)


@pytest.mark.parametrize("radius", ["sqrt_dim", "bessel"])
@pytest.mark.parametrize(("gain", "order"), [(0.8, 0.0), (1.1, 0.3015113446), (1.5, 0.5773502692)])
def test_curie_weiss_orders_where_the_gain_exceeds_one(radius, gain, order):
    # The gain is beta R^2/D: with the shorter radius 8/3 is the critical beta of D = 8.
    n, dim = 256, 8
    beta = gain * (1.0 if radius == "sqrt_dim" else 8 / 3)
    everyone = torch.ones(n, n, dtype=torch.float64) / n
    found = thermodynamics(SpinSystem(everyone, torch.zeros(n, dim).double(), beta, radius=radius), LEADING)
    # Of finite N: lambda = 1 + (b/N)/(lambda - b), and <s_i . s_j>/R^2 = 1 - 1/lambda.
    multiplier = ((1 + gain) + math.sqrt((1 - gain) ** 2 + 4 * gain / n)) / 2
    squared = found.correlations[0, 1] / found.correlations[0, 0]
    close(squared, 1 - 1 / multiplier, digits=11)
    assert abs(float(squared) - order**2) < (8 if gain > 1.2 else 16) / n


def spherical_value(couplings, beta):
    system = SpinSystem(couplings, torch.zeros(len(couplings), 1, dtype=torch.float64), beta)
    return float(SPHERICAL.log_partition(system).value) / len(couplings)


def semicircle(n):
    """Couplings whose eigenvalues are quantiles of the semicircle law."""
    grid = torch.linspace(-math.pi / 2, math.pi / 2, 200_001, dtype=torch.float64)
    below = (grid + torch.sin(2 * grid) / 2) / math.pi + 0.5
    at = torch.searchsorted(below, (torch.arange(n, dtype=torch.float64) + 0.5) / n)
    return torch.diag(2 * torch.sin(grid[at]))


def test_one_multiplier_is_the_root_of_a_sum_over_eigenvalues():
    for beta in (0.5, 1.0, 2.0, 20.0):
        system = disordered(n=30, d=2, beta=beta, scale=0.1, radius="sqrt_dim")
        values, vectors = np.linalg.eigh(system.couplings.numpy())
        work = (beta * vectors.T @ system.field.numpy()) ** 2 / 2

        values, work = beta * values, work.sum(1)

        def excess(x, values=values, work=work):
            return (1 / (x - values) + work / (x - values) ** 2).mean() - 1

        top = values[-1]
        root = scipy.optimize.brentq(excess, top + 1e-9, top + 100 * beta + 10, xtol=1e-14)
        close(SPHERICAL.multipliers(system), [root], digits=11)


@pytest.mark.slow
def test_spherical_glass():
    for beta, truth in [(0.5, 0.0625), (1.0, 0.25), (2.0, 0.90342641)]:
        small, large = (spherical_value(semicircle(n), beta) for n in (100, 800))
        # The edge lies inside by N^(-2/3), to leading order.
        assert abs((4 * large - small) / 3 - truth) < 1e-3
    n = 800
    sample = torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sample = (sample + sample.mT) / math.sqrt(2 * n)
    for beta, truth in [(0.5, 0.062463), (1.0, 0.250014), (2.0, 0.893110)]:
        assert abs(spherical_value(sample, beta) - truth) < 2e-2


# Of all kinds.


def some_systems(count, *, seed=0):
    """Of all temperatures and sizes: glasses, magnets, with a diagonal and without, in fields and without."""
    generator = np.random.default_rng(seed)
    for k in range(count):
        n, d = (int(x) for x in generator.integers(2, 65, size=2))
        beta = float(10 ** generator.uniform(-2, 2))
        couplings = generator.standard_normal((n, n))
        couplings = (couplings + couplings.T) / math.sqrt(2)
        kinds = [couplings / math.sqrt(n), couplings, couplings / math.sqrt(n * d), np.abs(couplings) / math.sqrt(n)]
        kinds += [0.2 * couplings / math.sqrt(n) + 1 / n, np.full((n, n), 1 / n)]
        couplings = kinds[k % 6]
        if k // 6 % 2 == 0:
            np.fill_diagonal(couplings, 0)
        field = [0.0, 0.1, 1.0, 10.0][k // 12 % 4] * generator.standard_normal((n, d))
        yield SpinSystem(torch.as_tensor(couplings), torch.as_tensor(field), beta)


@pytest.mark.nightly
@pytest.mark.parametrize("method", [LEADING, SPHERICAL], ids=["per_site", "shared"])
def test_a_thousand_systems_are_solved_without_a_failure(method):
    steps = []
    for system in some_systems(1000):
        _, evidence = method.log_partition(system)
        assert int(evidence.status) == Status.CONVERGED, evidence
        assert float(evidence.residual) <= 1e-8
        steps.append((int(evidence.num_steps), int(evidence.num_evals)))
    assert np.median(steps, axis=0).max() <= 6
    assert np.max(steps, axis=0)[0] <= 19


def test_large_cold_systems_take_few_evaluations():
    for n in (200, 400):
        couplings = random(n, n)
        system = SpinSystem((couplings + couplings.mT) / (2 * n) ** 0.5, torch.zeros(n, 2).double(), 100.0)
        evidence = LEADING.log_partition(system).report
        assert bool(evidence.converged)
        assert int(evidence.num_evals) <= 32


@pytest.mark.parametrize("radius", ["sqrt_dim", "bessel", 0.4])
def test_every_spin_has_its_length(radius):
    system = disordered(2, radius=radius, scale=2.0)
    found = thermodynamics(system, LEADING)
    squares = found.correlations.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(squares, torch.full_like(squares, system.radius**2), rtol=1e-12, atol=0)
    mean = thermodynamics(system, SPHERICAL).correlations.diagonal(dim1=-2, dim2=-1).mean(-1)
    torch.testing.assert_close(mean, torch.full_like(mean, system.radius**2), rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_free_spins_have_log_z_zero(method):
    system = SpinSystem(torch.zeros(3, 3, dtype=torch.float64), torch.zeros(3, 5, dtype=torch.float64), 2.0, radius=0.7)
    assert float(method.log_partition(system).value) == 0.0
