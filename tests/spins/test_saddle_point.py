"""The saddle point: its numbers and its convex problem."""

import math

import numpy as np
import pytest
import scipy.optimize
import torch

from implicit_attention import Status
from implicit_attention.spins import SaddlePoint, SpinSystem, free_energy, magnetization, thermodynamics
from implicit_attention.spins._multipliers import Multipliers
from implicit_attention.testing.numerics import random

LEADING, ONE_LOOP, SPHERICAL = SaddlePoint(), SaddlePoint(one_loop=True), SaddlePoint(shared=True)
METHODS = [LEADING, ONE_LOOP, SPHERICAL, SaddlePoint(shared=True, one_loop=True)]
NAMES = ["leading", "one_loop", "shared", "shared_one_loop"]


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def symmetric(n, *pairs):
    couplings = torch.zeros(n, n, dtype=torch.float64)
    for i, j, value in pairs:
        couplings[i, j] = couplings[j, i] = value
    return couplings


def close(value, truth, *, digits):
    """Agreement to half a unit of the last digit given."""
    torch.testing.assert_close(value.detach(), double(truth), rtol=0, atol=0.51 * 10.0**-digits)


def along_first_axis(strengths, dim):
    """Fields of hatted strength, along the first axis."""
    field = torch.zeros(len(strengths), dim, dtype=torch.float64)
    field[:, 0] = double(strengths) * math.sqrt(dim)
    return field


def per_dimension(system, method):
    return method.log_partition(system).value / system.dim


FOUR = symmetric(4, (0, 1, 0.3), (0, 2, -0.2), (0, 3, 0.1), (1, 2, 0.25), (1, 3, -0.15), (2, 3, 0.4))
VECTORS = double([[0.20, -0.10, 0.30], [0.05, 0.40, -0.20], [-0.30, 0.10, 0.15], [0.25, 0, -0.35]]) * math.sqrt(3)
CHAIN = symmetric(4, (0, 1, 0.6), (1, 2, -0.5), (2, 3, 0.8))


def four_vectors(beta=1.5):
    return SpinSystem(FOUR, VECTORS, beta)


def one_spin(dim):
    return SpinSystem(symmetric(1), along_first_axis([0.8], dim), 1.0)


def two_spins(dim, beta=1.3):
    return SpinSystem(symmetric(2, (0, 1, 0.7)), torch.zeros(2, dim, dtype=torch.float64), beta)


def chain(dim):
    return SpinSystem(CHAIN, along_first_axis([0.4, -0.2, 0.3, 0.1], dim), 1.2)


def disordered(*batch, n=3, d=5, seed=0, scale=0.7, dtype=torch.float64, beta=1.3, **options):
    """A diagonal, a field, R^2 != D."""
    couplings = scale * random(*batch, n, n, seed=seed)
    field = random(*batch, n, d, seed=seed + 1)
    options = {"radius": 1.7, **options}
    return SpinSystem((couplings + couplings.mT).to(dtype), field.to(dtype), beta, **options)


# ------------------------------------------------------------------ the numbers

EXACT = {  # D: one spin, its m, its one-loop value; two spins, their correlation, their one-loop value. Per dimension.
    2: (0.2798023624, 0.6198986494, 0.2846780451, 0.3505962734, 0.6658858792, 0.3556291200),
    4: (0.2712051281, 0.5889626042, 0.2722880455, 0.3382956175, 0.6296624422, 0.3393004633),
    8: (0.2658593182, 0.5717006865, 0.2660930458, 0.3309364972, 0.6104304895, 0.3311361349),
    16: (0.2629428043, 0.5629407144, 0.2629955459, 0.3270111829, 0.6009004965, 0.3270539707),
    64: (0.2606694053, 0.5564094845, 0.2606724209, 0.3239900078, 0.5938711114, 0.3239923476),
    256: (0.2600914557, 0.5547872468, 0.2600916397, 0.3232268007, 0.5921333618, 0.3232269418),
    1024: (0.2599464330, 0.5543824874, 0.2599464444, 0.3230355816, 0.5917002386, 0.3230355903),
}


@pytest.mark.parametrize("dim", [1, 2, 3, 64, 1024])
def test_leading_order_per_dimension_is_the_same_in_every_dimension(dim):
    close(per_dimension(one_spin(dim), LEADING), 0.2598980460, digits=10)
    close(magnetization(one_spin(dim), LEADING)[0, 0] / math.sqrt(dim), 0.5542476415, digits=10)
    close(per_dimension(two_spins(dim), LEADING), 0.3229718065, digits=10)
    close(thermodynamics(two_spins(dim), LEADING).correlations[0, 1] / dim, 0.5915559826, digits=10)
    close(LEADING.multipliers(two_spins(dim)), [1.5383159442] * 2, digits=10)


@pytest.mark.parametrize("dim", EXACT)
def test_one_loop_values(dim):
    close(per_dimension(one_spin(dim), ONE_LOOP), EXACT[dim][2], digits=10)
    close(per_dimension(two_spins(dim), ONE_LOOP), EXACT[dim][5], digits=10)


@pytest.mark.parametrize(("method", "order"), [(LEADING, -1), (ONE_LOOP, -2)], ids=["leading", "one_loop"])
def test_errors_fall_with_the_power_of_the_dimension(method, order):
    dims = [64, 256, 1024]

    def slope(errors):
        return np.polyfit(np.log(dims), np.log(np.abs(errors)), 1)[0]

    found = [
        slope([float(per_dimension(one_spin(d), method)) - EXACT[d][0] for d in dims]),
        slope([float(per_dimension(two_spins(d), method)) - EXACT[d][3] for d in dims]),
        slope([float(magnetization(one_spin(d), method)[0, 0]) / math.sqrt(d) - EXACT[d][1] for d in dims]),
        slope([float(thermodynamics(two_spins(d), method).correlations[0, 1]) / d - EXACT[d][4] for d in dims]),
    ]
    np.testing.assert_allclose(found, order, atol=0.03)


def test_a_chain_in_collinear_fields():
    truth = [0.24698687, -0.17356400, 0.37123802, 0.29268974]
    close(per_dimension(chain(16), LEADING), 0.8984356059, digits=10)
    close(magnetization(chain(16), LEADING)[:, 0] / 4, truth, digits=8)
    close(per_dimension(chain(16), ONE_LOOP), 0.9068918886, digits=10)
    close(per_dimension(chain(64), ONE_LOOP), 0.9005496766, digits=10)
    # Exact: .9066638248 and .9005359478.
    assert abs(float(per_dimension(chain(16), ONE_LOOP)) - 0.9066638248) < 3e-4
    assert abs(float(per_dimension(chain(64), ONE_LOOP)) - 0.9005359478) < 2e-5


def test_a_chain_without_field_is_the_sum_of_its_bonds():
    field = torch.zeros(4, 3, dtype=torch.float64)
    whole = LEADING.log_partition(SpinSystem(CHAIN, field, 1.2)).value
    close(whole, 2.1807247494, digits=10)
    bonds = [SpinSystem(symmetric(2, (0, 1, j)), field[:2], 1.2) for j in (0.6, -0.5, 0.8)]
    close(sum(LEADING.log_partition(bond).value for bond in bonds), float(whole), digits=12)


@pytest.mark.parametrize(
    ("beta", "correlation", "capacity"),
    [(0.25, 0.1699457286, 0.0280708218), (1.0, 0.5146178953, 0.2093809031), (4.0, 0.8372473324, 0.4121046808)],
)
def test_two_spins_at_several_temperatures(beta, correlation, capacity):
    found = thermodynamics(two_spins(3, beta), LEADING)
    close(found.correlations[0, 1] / 3, correlation, digits=10)
    close(found.heat_capacity / 3, capacity, digits=10)


def test_four_vectors():
    found = thermodynamics(four_vectors(), LEADING)
    close(found.log_partition / 3, 0.802844734342, digits=12)
    close(found.free_energy / 3, -0.535229822894, digits=12)
    close(LEADING.multipliers(four_vectors()), [1.374789653, 1.482700855, 1.485943098, 1.428383790], digits=9)
    close(found.magnetization[0] / math.sqrt(3), [0.314816529, -0.006661975, 0.276762414], digits=9)
    close(found.correlations[0, 1] / 3, 0.211420534, digits=9)
    close(found.internal_energy / 3, -0.896773342614, digits=12)
    close(found.entropy / 3, -0.542315279579, digits=12)
    close(found.heat_capacity / 3, 0.725574743622, digits=12)
    chi = found.susceptibility()
    close(chi[0, 0, 0], [1.026513529, 0.006711388, -0.183379744], digits=9)
    close(chi[0, 0, 1, 0], 0.279714308, digits=9)


def test_four_vectors_with_one_multiplier():
    close(SPHERICAL.multipliers(four_vectors()), [1.445604111866], digits=12)
    close(per_dimension(four_vectors(), SPHERICAL), 0.804720978766, digits=12)


def test_couplings_that_depend_on_the_field():
    def couplings(field):
        return 0.2 * torch.tanh(5 * field @ field.mT / 3) * (1 - torch.eye(3, dtype=torch.float64))

    system = SpinSystem.from_full(couplings, VECTORS[:3], 1.5)
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


# ------------------------------------------------------------------ the convex problem


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


def problems():
    n, d = 4, 3
    block = 0.2 * random(n, n, d, d, seed=7)
    live = torch.tensor([True, True, False, True])
    return {
        "per_site": LEADING._problem(disordered(n=n)),
        "shared": SPHERICAL._problem(disordered(n=n, mask=live)),
        "block": LEADING._problem(SpinSystem(block + block.permute(1, 0, 3, 2), random(n, d, seed=8), 1.1)),
    }


@pytest.mark.parametrize("name", ["per_site", "shared", "block"])
def test_hessian_and_gradient_are_those_of_phi_entry_by_entry(name):
    problem = problems()[name][0]
    t = problem.start() + 0.3 * random(problem.start().shape[-1], seed=3).abs()
    moments = problem.moments(t)
    hessian = torch.func.jacrev(torch.func.grad(lambda t: problem.moments(t).value))(t)
    torch.testing.assert_close(problem.hessian(*moments[:2]), hessian, rtol=1e-12, atol=1e-14)
    gradient = torch.func.grad(lambda t: problem.moments(t).value)(t)
    torch.testing.assert_close(-problem.group_size * problem.excess(moments) / 2, gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("radius", ["sqrt_dim", "bessel", 0.4])
def test_every_spin_has_its_length(radius):
    system = disordered(2, radius=radius, scale=2.0)
    found = thermodynamics(system, LEADING)
    squares = found.correlations.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(squares, torch.full_like(squares, system.radius**2), rtol=1e-12, atol=0)
    mean = thermodynamics(system, SPHERICAL).correlations.diagonal(dim1=-2, dim2=-1).mean(-1)
    torch.testing.assert_close(mean, torch.full_like(mean, system.radius**2), rtol=1e-12, atol=0)


def test_radius_is_a_change_of_units():
    system, c = disordered(), 3.0
    longer = SpinSystem(system.couplings / c**2, system.field / c, system.beta, radius=c * system.radius)
    for method in METHODS:
        torch.testing.assert_close(method.log_partition(longer).value, method.log_partition(system).value)


@pytest.mark.parametrize("method", [LEADING, SPHERICAL], ids=["per_site", "shared"])
def test_every_start_leads_to_the_same_multipliers(method, monkeypatch):
    system = disordered(n=6, scale=2.0)
    found = method.multipliers(system)
    start = Multipliers.start
    for seed in range(5):
        with monkeypatch.context() as patch:
            away = 10.0 ** random(1, found.shape[-1], seed=seed)
            patch.setattr(Multipliers, "start", lambda self, away=away: start(self) + away)
            patch.setattr(Multipliers, "guess", lambda self: torch.full_like(self.start(), torch.nan))
            torch.testing.assert_close(method.multipliers(system), found, rtol=1e-9, atol=0)


def test_phi_is_smallest_at_the_multipliers():
    problem = LEADING._problem(disordered(n=4))[0]
    t = LEADING.multipliers(disordered(n=4))
    near = t + 1e-2 * random(50, 4)
    spread = torch.stack([problem.moments(row).value for row in near])
    assert bool((spread > problem.moments(t).value).all())


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_free_spins_have_log_z_zero(method):
    system = SpinSystem(torch.zeros(3, 3, dtype=torch.float64), torch.zeros(3, 5, dtype=torch.float64), 2.0, radius=0.7)
    assert float(method.log_partition(system).value) == 0.0


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_a_matrix_per_pair_that_is_a_multiple_of_one_is_a_number_per_pair(method):
    system = disordered(n=4, d=3)
    block = system.couplings[..., None, None] * torch.eye(3, dtype=torch.float64)
    twin = SpinSystem(block, system.field, system.beta, radius=system.radius)
    torch.testing.assert_close(LEADING.multipliers(twin), LEADING.multipliers(system))
    if not method.one_loop:
        torch.testing.assert_close(method.log_partition(twin).value, method.log_partition(system).value)
    # Turning every site's axes by its own rotation changes couplings and fields, but not the spins' free energy.
    turns = torch.linalg.qr(random(4, 3, 3, seed=5))[0]
    turned = SpinSystem(
        torch.einsum("iab,ijbc,jdc->ijad", turns, block, turns),
        torch.einsum("iab,ib->ia", turns, system.field),
        system.beta,
        radius=system.radius,
    )
    torch.testing.assert_close(method.log_partition(turned).value, method.log_partition(twin).value)
