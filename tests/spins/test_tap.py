"""TAP and the third order: known values, errors of their order, and solutions outside of their reach called so."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from solvable_models import sherrington_kirkpatrick

from implicit_attention import Anderson, ConvergenceError, OneStep, Picard, Status
from implicit_attention.potentials import AmosResponse, LargeDResponse, SphereUnits
from implicit_attention.problem import pullback
from implicit_attention.spins import TAP, Enumeration, MeanField, SpinSystem, free_energy, magnetization, thermodynamics
from implicit_attention.testing.numerics import dense_jacobian, random

pytestmark = pytest.mark.cases(2)

FIELD = torch.tensor([[0.20], [-0.10], [0.30], [0.05]], dtype=torch.float64)
COUPLINGS = torch.zeros(4, 4, dtype=torch.float64)
for (i, j), value in {(0, 1): 0.30, (0, 2): -0.20, (0, 3): 0.10, (1, 2): 0.25, (1, 3): -0.15, (2, 3): 0.40}.items():
    COUPLINGS[i, j] = COUPLINGS[j, i] = value
SCALARS = ("free_energy", "internal_energy", "entropy", "heat_capacity")
BOTH = pytest.mark.parametrize("order", [2, 3])
#: For what holds for every response: a square root instead of Bessel functions.
CHEAP = AmosResponse()


def four(beta=1.0, scale=1.0):
    return SpinSystem(scale * COUPLINGS, FIELD, beta, measure="counting")


def symmetric(*shape, strength=0.3, seed=0):
    """Couplings as numbers, (*batch, N, N), or, of shape (N, N, D, D), as matrices; with a diagonal."""
    couplings = strength * random(*shape, seed=seed)
    twin = couplings.transpose(0, 1).mT if len(shape) == 4 else couplings.mT
    return (couplings + twin) / 2


def without_diagonal(couplings):
    itself = torch.eye(couplings.shape[0], dtype=torch.bool)
    return couplings.masked_fill(itself.reshape(*itself.shape, *(1,) * (couplings.ndim - 2)), 0.0)


def as_blocks(couplings, dim):
    return couplings[..., None, None] * torch.eye(dim, dtype=torch.float64)


def problem_of(system, method):
    return method.problem(system)


def close(value, truth, tolerance=1e-12):
    torch.testing.assert_close(value, truth, rtol=tolerance, atol=tolerance)


# Ising spins.


@pytest.mark.parametrize(
    ("order", "beta", "free", "m"),
    [
        (2, 1.0, -3.021587929413, [0.1392289589, -0.0136135989, 0.2538196204, 0.1409050997]),
        (3, 1.0, -2.9842808430, [0.1438932194, -0.0058493537, 0.2810732453, 0.1651425788]),
        (2, 2.0, -1.849399208130, None),
    ],
)
def test_four_spins(order, beta, free, m):
    found = thermodynamics(four(beta), TAP(order=order))
    assert float(found.free_energy) == pytest.approx(free, abs=6e-13 if order == 2 else 6e-11)
    if m is not None:
        np.testing.assert_allclose(found.magnetization.flatten(), m, rtol=0, atol=6e-11)


def test_the_linear_response_of_four_spins():
    assert float(thermodynamics(four(), TAP()).susceptibility()[2, 0, 3, 0]) == pytest.approx(0.2763758069, abs=6e-11)


@BOTH
def test_the_equations_written_out(order):
    """The sums over pairs and triples in loops, and the reaction of second order from the literature."""
    beta = 0.8
    found = thermodynamics(four(beta), TAP(order=order))
    m, h, couplings = found.magnetization[:, 0].numpy(), FIELD[:, 0].numpy(), COUPLINGS.numpy()
    c = 1 - m**2
    entropy = -sum((1 + s * x) / 2 * math.log((1 + s * x) / 2) for x in m for s in (-1, 1))
    log_z = entropy + beta * h @ m + beta / 2 * m @ couplings @ m
    for i, j in itertools.combinations(range(4), 2):
        bond = beta * couplings[i, j]
        log_z += bond**2 / 2 * c[i] * c[j]
        log_z += (order == 3) * 2 / 3 * bond**3 * m[i] * c[i] * m[j] * c[j]
    for i, j, k in itertools.combinations(range(4), 3):
        loop = couplings[i, j] * couplings[j, k] * couplings[k, i]
        log_z += (order == 3) * beta**3 * loop * c[i] * c[j] * c[k]
    assert float(found.log_partition) == pytest.approx(log_z, abs=1e-12)
    if order == 2:
        answer = np.tanh(beta * (h + couplings @ m) - beta**2 * m * (couplings**2 @ c))
        np.testing.assert_allclose(m, answer, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("order", "slope"), [(2, 3.0), (3, 4.0)])
def test_errors_are_of_the_next_order_for_ising_spins(order, slope):
    scales = np.array([0.02, 0.04, 0.08, 0.16])
    errors = [
        abs(float(free_energy(four(1.0, s), TAP(order=order)) - free_energy(four(1.0, s), Enumeration())))
        for s in scales
    ]
    assert np.polyfit(np.log(scales), np.log(errors), 1)[0] == pytest.approx(slope, abs=0.1)


def test_a_radius_is_a_unit():
    one = thermodynamics(four(0.9), TAP(order=3))
    two = thermodynamics(SpinSystem(COUPLINGS / 4, FIELD / 2, 0.9, radius=2.0, measure="counting"), TAP(order=3))
    for name in SCALARS:
        close(getattr(two, name), getattr(one, name))
    close(two.magnetization, 2 * one.magnetization)


@pytest.mark.parametrize("beta", [30.0, 3e3])
def test_frozen_spins_are_finite(beta):
    """Variances that underflow: fields of a thousand would divide 0 by 0 if derivatives were taken by the field."""
    field = torch.tensor([[1.0], [-1.4], [0.8], [1.2]], dtype=torch.float64)
    system = SpinSystem(0.3 * COUPLINGS, field, beta)
    for order in (2, 3):
        found = thermodynamics(system, TAP(order=order))
        close(found.free_energy, free_energy(system, Enumeration()), 1e-9)
        close(found.magnetization, field.sign(), 1e-9)


# Vectors, against a sum over points of the sphere.


def sphere(nodes, radius):
    """Points and log weights that integrate polynomials of degree 2 nodes - 1 over the sphere exactly."""
    z, weight = np.polynomial.legendre.leggauss(nodes)
    angle = np.pi * np.arange(2 * nodes) / nodes
    ring = np.sqrt(1 - z**2)
    points = [np.outer(ring, np.cos(angle)), np.outer(ring, np.sin(angle)), np.outer(z, np.ones(2 * nodes))]
    log_weight = np.log(np.repeat(weight, 2 * nodes) / (4 * nodes))
    return radius * torch.tensor(np.stack(points, -1).reshape(-1, 3)), torch.tensor(log_weight)


def three_vectors(couplings, field, beta, radius, nodes=12):
    """log Z of three spins in three dimensions: the third is integrated in closed form."""
    couplings = couplings if couplings.ndim == 4 else as_blocks(couplings, 3)
    spins, log_weight = sphere(nodes, radius)
    first, second = (beta * spins @ h + log_weight for h in field[:2])
    pair = first[:, None] + second + beta * spins @ couplings[0, 1] @ spins.mT
    seen = field[2] + (spins @ couplings[0, 2])[:, None] + spins @ couplings[1, 2]
    return (pair + SphereUnits().log_partition(seen, beta, radius)).flatten().logsumexp(0)


@pytest.mark.parametrize(("order", "slope"), [(2, 3.0), (3, 4.0)])
@pytest.mark.parametrize("block", [False, True])
def test_errors_are_of_the_next_order_for_vectors(order, slope, block):
    radius, beta, field = 1.3, 1.2, random(3, 3, seed=1)
    couplings = without_diagonal(symmetric(*(3, 3, 3, 3) if block else (3, 3), strength=1.0, seed=7))
    scales = np.array([0.03, 0.06, 0.12])
    errors = []
    for s in scales:
        system = SpinSystem(s * couplings, field, beta, radius=radius)
        truth = three_vectors(s * couplings, field, beta, radius)
        errors.append(abs(float(-beta * free_energy(system, TAP(order=order)) - truth)))
    assert np.polyfit(np.log(scales), np.log(errors), 1)[0] == pytest.approx(slope, abs=0.15)


@BOTH
@pytest.mark.parametrize("dim", [1, 3])
def test_blocks_of_numbers_are_numbers(order, dim):
    couplings, field = symmetric(4, 4, strength=0.4, seed=3), random(2, 4, dim, seed=2)
    plain = thermodynamics(SpinSystem(couplings, field, 0.8, radius=1.2), TAP(order=order, response=CHEAP))
    block = thermodynamics(
        SpinSystem(as_blocks(couplings, dim), field, 0.8, radius=1.2), TAP(order=order, response=CHEAP)
    )
    for name in (*SCALARS, "magnetization"):
        close(getattr(block, name), getattr(plain, name), 1e-11)
    # The correlation of numbers is the trace of that of matrices; on the diagonal it is R^2.
    close(block.correlations.diagonal(dim1=-2, dim2=-1).sum(-1), plain.correlations, 1e-11)
    close(plain.correlations.diagonal(dim1=-2, dim2=-1), torch.full((2, 4), 1.44, dtype=torch.float64))


@pytest.mark.by_name(slow=r"\[3-response0")
@pytest.mark.parametrize("response", [SphereUnits(), AmosResponse()])
@BOTH
def test_magnetizations_are_those_of_the_fixed_point(response, order):
    couplings, field = symmetric(4, 4), random(4, 3, seed=1)
    system, method = SpinSystem(couplings, field, 0.9, radius=1.3), TAP(order=order, response=response)
    x = method.solution(system, method.start(system)).value
    means = response.magnetization(x, 1.0, 1.3)
    close(magnetization(system, method), means, 1e-9)


def test_magnetizations_are_slopes_of_the_free_energy():
    field, bump, step = random(3, 2, seed=1), random(3, 2, seed=2), 1e-4
    couplings = symmetric(3, 3)

    def free(shift):
        return free_energy(SpinSystem(couplings, field + shift * bump, 0.9), TAP(order=3, response=CHEAP))

    slope = -(8 * (free(step) - free(-step)) - free(2 * step) + free(-2 * step)) / (12 * step)
    close((magnetization(SpinSystem(couplings, field, 0.9), TAP(order=3, response=CHEAP)) * bump).sum(), slope, 1e-9)


@BOTH
def test_without_couplings_spins_are_free(order):
    field = random(2, 3, 4, seed=1)
    found = thermodynamics(SpinSystem(torch.zeros(3, 3).double(), field, 0.7), TAP(order=order))
    close(found.log_partition, SphereUnits().log_partition(field, 0.7, 2.0).sum(-1))
    close(found.magnetization, SphereUnits().magnetization(field, 0.7, 2.0))


@BOTH
def test_zero_field_is_no_singular_point(order):
    """tau = R^2/D for all, so that the second order is sum J^2 R^4/(4 D); and chi is the same in all directions."""
    couplings = without_diagonal(symmetric(3, 3))
    found = thermodynamics(SpinSystem(couplings, torch.zeros(3, 3).double(), 0.8), TAP(order=order, response=CHEAP))
    truth = 0.64 / 4 * couplings.square().sum() * 3
    if order == 3:
        truth = truth + 0.8**3 / 6 * torch.trace(couplings @ couplings @ couplings) * 3
    close(found.log_partition, truth)
    assert (found.magnetization == 0).all()
    chi = found.susceptibility()
    close(chi[:, 1, :, 1], chi[:, 0, :, 0])
    assert bool(torch.isfinite(found.heat_capacity))


# A diagonal.


@pytest.mark.parametrize("dim", [1, 3])
def test_a_lone_spin_with_a_diagonal_is_exact(dim):
    own, field = torch.tensor([[0.7]], dtype=torch.float64), random(1, dim, seed=3)
    found = free_energy(SpinSystem(own, field, 1.1, radius=1.3), TAP())
    close(-1.1 * found, SphereUnits().log_partition(field, 1.1, 1.3)[0] + 1.1 * 0.7 * 1.69 / 2)


def test_an_anisotropy_counts_to_first_order():
    """A lone spin, whose exact log Z is an integral over one sphere."""
    field, own = random(1, 3, seed=3), symmetric(1, 1, 3, 3, seed=5)
    spins, log_weight = sphere(16, 1.3)
    errors = []
    for s in (0.05, 0.1, 0.2):
        energy = s / 2 * ((spins @ own[0, 0]) * spins).sum(-1) + spins @ field[0]
        truth = (1.1 * energy + log_weight).logsumexp(0)
        errors.append(abs(float(-1.1 * free_energy(SpinSystem(s * own, field, 1.1, radius=1.3), TAP()) - truth)))
    slopes = np.diff(np.log(errors)) / math.log(2)
    np.testing.assert_allclose(slopes, 2.0, atol=0.15)


# Symmetries.


@BOTH
def test_permutations_and_rotations(order):
    couplings, field = symmetric(4, 4, seed=1), random(4, 3, seed=2)
    turn = torch.linalg.qr(random(3, 3, seed=3)).Q
    swap = torch.tensor([2, 0, 3, 1])
    system = SpinSystem(couplings, field, 0.8)
    turned = SpinSystem(couplings[swap][:, swap], field[swap] @ turn, 0.8)
    close(free_energy(turned, TAP(order=order, response=CHEAP)), free_energy(system, TAP(order=order, response=CHEAP)))
    m = magnetization(system, TAP(order=order, response=CHEAP))
    close(magnetization(turned, TAP(order=order, response=CHEAP)), m[swap] @ turn, 1e-11)


def test_rotated_blocks():
    couplings, field = symmetric(3, 3, 3, 3, seed=1), random(3, 3, seed=2)
    turn = torch.linalg.qr(random(3, 3, seed=3)).Q
    system, method = SpinSystem(couplings, field, 0.8, radius=1.1), TAP(order=3, response=CHEAP)
    turned = SpinSystem(turn.mT @ couplings @ turn, field @ turn, 0.8, radius=1.1)
    close(magnetization(turned, method), magnetization(system, method) @ turn, 1e-11)


# Derivatives.


@pytest.mark.parametrize(
    ("dim", "block", "response"),
    [
        (1, False, SphereUnits()),
        (1, False, AmosResponse()),
        (3, False, SphereUnits()),
        (3, True, SphereUnits()),
    ],
)
@BOTH
def test_the_linearization_is_the_jacobian(dim, block, response, order):
    couplings = symmetric(*(3, 3, dim, dim) if block else (2, 3, 3))
    beta = torch.tensor([0.7, 1.3], dtype=torch.float64)
    system = SpinSystem(couplings, random(2, 3, dim, seed=4), beta, radius=1.4)
    problem = problem_of(system, TAP(order=order, response=response))
    z, u = random(2, 3, dim, seed=5), random(2, 3, dim, seed=6)
    linear, jacobian = problem.linearize(z), dense_jacobian(problem, z)
    flat = u.reshape(2, -1, 1)
    close(linear.jvp(u).reshape(2, -1, 1), jacobian @ flat)
    close(linear.vjp(u).reshape(2, -1, 1), jacobian.mT @ flat)
    for fast, slow in zip(linear.vjp_tensors(u), pullback(problem, z, u), strict=True):
        close(fast, slow)


CHECKS = pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])


def everything(system, method):
    """All outputs in one vector, so that one random direction checks them together."""
    found = thermodynamics(system, method)
    outputs = [getattr(found, n) for n in (*SCALARS, "magnetization", "correlations")]
    outputs.append(found.susceptibility_product(random(*found.magnetization.shape, seed=9)))
    return torch.cat([output.flatten() for output in outputs])


def test_the_map_adds_the_slope_of_the_expansion():
    for dim, response, order in itertools.product((1, 2, 3), (SphereUnits(), CHEAP), (2, 3)):
        system = SpinSystem(symmetric(4, 4), random(4, dim, seed=1), 1.2, radius=1.3)
        problem = problem_of(system, TAP(order=order, response=response))
        x = random(4, dim, seed=2).requires_grad_()
        m = response.magnetization(x, 1.0, 1.3)
        reaction = problem.fixed_point_map(x) - problem.field - problem.bonds @ m
        # d/dx is dm/dx, which is symmetric, times d/dm.
        (answered,) = torch.autograd.grad(m, x, reaction.detach(), retain_graph=True)
        (by_field,) = torch.autograd.grad(problem.correction(x), x)
        close(answered, by_field)


@pytest.mark.slow
@CHECKS
def test_derivatives_of_every_output(check):
    def outputs(field, couplings, beta):
        return everything(SpinSystem((couplings + couplings.mT) / 2, field, beta), TAP(order=3))

    inputs = [random(1, 3, 1, seed=1), 0.3 * random(1, 3, 3), torch.tensor([0.9], dtype=torch.float64)]
    assert check(outputs, [t.requires_grad_() for t in inputs], fast_mode=True)


@pytest.mark.slow
@CHECKS
@pytest.mark.parametrize("block", [False, True])
def test_derivatives_for_vectors(check, block):
    """Of second derivatives one more, of first derivatives two: each costs a multiple of the one before."""
    first = check is torch.autograd.gradcheck

    def outputs(field, couplings, beta):
        twin = couplings.transpose(0, 1).mT if block else couplings.mT
        system = SpinSystem((couplings + twin) / 2, field, beta, radius=1.1)
        method = TAP(order=3, response=CHEAP)
        if first:
            return everything(system, method)
        value = method.log_partition(system).value.sum()
        means, correlations = torch.autograd.grad(value, (system.field, system.couplings), create_graph=True)
        return torch.cat([value[None], means.flatten(), correlations.flatten()])

    inputs = [random(1, 2, 2, seed=1), 0.3 * random(*(2, 2, 2, 2) if block else (2, 2)), torch.tensor([0.9]).double()]
    assert check(outputs, [t.requires_grad_() for t in inputs], fast_mode=True)


@pytest.mark.slow
def test_derivatives_of_the_exact_response():
    def means(field, couplings):
        return magnetization(SpinSystem((couplings + couplings.mT) / 2, field, 0.9), TAP())

    inputs = [random(2, 2, seed=1).requires_grad_(), symmetric(2, 2).requires_grad_()]
    assert torch.autograd.gradcheck(means, inputs, fast_mode=True)


def test_vmap_and_grad_compose():
    fields = random(3, 4, 1, seed=4)

    def value(field):
        return magnetization(SpinSystem(COUPLINGS, field), TAP()).square().sum()

    mapped = torch.vmap(torch.func.grad(value))(fields)
    live = fields.clone().requires_grad_()
    (truth,) = torch.autograd.grad(sum(value(f) for f in live), live)
    close(mapped, truth, 1e-10)


def test_couplings_that_follow_the_field():
    field = FIELD.clone().requires_grad_()

    def follow(h):
        return COUPLINGS * torch.tanh(1 + h @ h.mT)

    (slope,) = torch.autograd.grad(-free_energy(SpinSystem(follow, field, 1.3), TAP()), field)
    close(magnetization(SpinSystem(follow, field, 1.3), TAP()), slope, 1e-10)


# Where the expansion does not converge.


def glass(samples, sites, seed):
    couplings = random(samples, sites, sites, seed=seed).triu(1) / math.sqrt(sites)
    return couplings + couplings.mT


def test_a_spin_glass_below_the_line():
    """Against the replica-symmetric values of infinitely many sites."""
    sites = 200
    field = torch.full((6, sites, 1), 0.5, dtype=torch.float64)
    system = SpinSystem(glass(6, sites, seed=0), field, 1.0, measure="counting")
    method = TAP()
    problem = problem_of(system, method)
    solution = method.solution(system, method.start(system))
    x = solution.value
    truth = sherrington_kirkpatrick(1.0, 0.5)
    assert solution.converged.all()
    assert float(x.tanh().square().mean()) == pytest.approx(truth.overlap, abs=0.02)
    assert float(problem.instability(x).mean()) == pytest.approx(truth.at_number, abs=0.05)
    assert float(free_energy(system, method).mean()) / sites == pytest.approx(truth.free_energy, abs=0.01)


@pytest.mark.slow
def test_a_spin_glass_above_the_line_is_flagged():
    """There the equations still have solutions, which overlap too little with themselves to be states."""
    field = torch.full((8, 100, 1), 0.5, dtype=torch.float64)
    system = SpinSystem(glass(8, 100, seed=1), field, 2.5)
    status = TAP().log_partition(system).report.status
    assert int((status == Status.CONVERGED).sum()) <= 1
    with pytest.raises(ConvergenceError, match="lower beta"):
        free_energy(system, TAP())


def test_the_criterion_of_a_pair():
    """Of two spins the eigenvalue is K^2 tau_1 tau_2, which crosses 1 at K = 1 without a field."""
    couplings = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    beta = torch.tensor([0.99, 1.01, 0.5], dtype=torch.float64)
    for dim in (1, 3):
        field = torch.zeros(3, 2, dim, dtype=torch.float64)
        evidence = TAP().log_partition(SpinSystem(couplings, field, beta)).report
        assert evidence.status.tolist() == [Status.CONVERGED, Status.OUT_OF_RANGE, Status.CONVERGED]
        assert bool((evidence.residual <= evidence.tolerance).all())


@pytest.mark.parametrize("dim", [1, 2])
def test_the_criterion_is_an_eigenvalue(dim):
    couplings = without_diagonal(symmetric(5, 5, strength=0.5))
    system, method = SpinSystem(couplings, random(5, dim, seed=2), 0.8), TAP()
    problem = problem_of(system, method)
    x = method.solution(system, method.start(system)).value
    tau = torch.maximum(*SphereUnits().covariance_parts(x, 1.0, system.radius))
    matrix = 0.64 * couplings.square() * tau[:, None] * tau
    close(problem.instability(x), torch.linalg.eigvalsh(matrix)[-1], 1e-6)


# Samples, masks, options.


def test_samples_do_not_see_each_other():
    couplings = symmetric(5, 4, 4, seed=3) * torch.tensor([1.0, 0.5, 2.0, 0.1, 1.5]).double()[:, None, None]
    field = random(5, 4, 1, seed=4)
    together = thermodynamics(SpinSystem(couplings, field, 0.7), TAP())
    for b in range(5):
        alone = thermodynamics(SpinSystem(couplings[b], field[b], 0.7), TAP())
        torch.testing.assert_close(together.free_energy[b], alone.free_energy, rtol=1e-15, atol=1e-15)
        torch.testing.assert_close(together.magnetization[b], alone.magnetization, rtol=4e-15, atol=1e-15)
        assert together.report.num_evals[b] == alone.report.num_evals


@pytest.mark.parametrize("dim", [1, 2])
def test_a_lost_sample_spoils_nothing_that_it_shares(dim):
    couplings = (0.5 * COUPLINGS).requires_grad_()
    base = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    beta = base * torch.tensor([1.0, 1.0, torch.nan, 1.0], dtype=torch.float64)
    field = random(4, 4, dim, seed=2)
    field[1, 2], field[3] = torch.nan, 1e200
    found = thermodynamics(SpinSystem(couplings, field, beta), TAP(response=AmosResponse()), on_failure="ignore")
    assert found.report.status.tolist() == [Status.CONVERGED, *[Status.NONFINITE] * 3]
    assert found.free_energy[1:].isnan().all()
    (found.heat_capacity[0] + found.magnetization[0].sum()).backward()
    first = SpinSystem(couplings.detach().requires_grad_(), field[0], 0.9)
    alone = thermodynamics(first, TAP(response=AmosResponse()))
    (alone.heat_capacity + alone.magnetization.sum()).backward()
    torch.testing.assert_close(found.free_energy[0], alone.free_energy, rtol=1e-15, atol=1e-15)
    close(couplings.grad, first.couplings.grad, 1e-9)


def test_lost_couplings_spoil_no_shared_beta():
    own = torch.stack([COUPLINGS, torch.full_like(COUPLINGS, torch.nan)])
    beta = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    field = random(2, 4, 1, seed=2)
    found = thermodynamics(SpinSystem(own, field, beta), TAP(), on_failure="ignore")
    assert found.report.status.tolist() == [Status.CONVERGED, Status.NONFINITE]
    assert found.log_partition.isnan().tolist() == [False, True]
    found.log_partition[0].backward()
    alone = thermodynamics(SpinSystem(COUPLINGS, field[0], 0.9), TAP())
    close(beta.grad, -alone.internal_energy, 1e-11)


def test_a_lost_diagonal_is_reported():
    couplings = COUPLINGS.clone()
    couplings[1, 1] = torch.nan
    found = thermodynamics(SpinSystem(couplings, FIELD), TAP(), on_failure="ignore")
    assert int(found.report.status) == Status.NONFINITE


@pytest.mark.parametrize("block", [False, True])
@BOTH
def test_masked_sites_change_nothing(order, block):
    couplings = symmetric(*(3, 3, 2, 2) if block else (3, 3), seed=1)
    wide = torch.full((5, 5, *couplings.shape[2:]), torch.nan, dtype=torch.float64)
    wide[:3, :3] = couplings
    field = random(5, 2, seed=2)
    small = thermodynamics(SpinSystem(couplings, field[:3], 0.8), TAP(order=order, response=CHEAP))
    field[3:] = torch.nan
    masked = thermodynamics(SpinSystem(wide, field, 0.8, mask=torch.arange(5) < 3), TAP(order=order, response=CHEAP))
    for name in SCALARS:
        close(getattr(masked, name), getattr(small, name))
    close(masked.magnetization[:3], small.magnetization)
    assert (masked.magnetization[3:] == 0).all()


def test_single_precision_is_solved_to_its_own_digits():
    single = thermodynamics(SpinSystem(COUPLINGS.float(), FIELD.float()), TAP())
    double = thermodynamics(SpinSystem(COUPLINGS, FIELD), TAP())
    assert single.free_energy.dtype == torch.float32
    for name in (*SCALARS, "magnetization"):
        torch.testing.assert_close(getattr(single, name).double(), getattr(double, name), rtol=1e-5, atol=1e-6)


def test_an_empty_batch_has_empty_results():
    assert thermodynamics(SpinSystem(COUPLINGS, FIELD.new_zeros(0, 4, 1)), TAP()).magnetization.shape == (0, 4, 1)


def test_options_count():
    system = SpinSystem(0.5 * COUPLINGS, random(4, 3, seed=1))
    exact = thermodynamics(system, TAP())
    assert not torch.equal(free_energy(system, TAP(order=3)), exact.free_energy)
    assert not torch.equal(free_energy(system, TAP(response=AmosResponse())), exact.free_energy)
    assert not torch.equal(free_energy(system, MeanField()), exact.free_energy)
    loose = free_energy(system, TAP(solver=Picard(rtol=1e-3, atol=0.0, damping=0.3)))
    assert 0 < abs(float(loose - exact.free_energy)) < 1e-5  # of second order: log Z is stationary
    obeyed = TAP(solver=Anderson(max_steps=0)).log_partition(system)
    assert int(obeyed.report.status) == Status.EXPLICIT
    careless = thermodynamics(system, TAP(adjoint=OneStep()))
    close(careless.free_energy, exact.free_energy)
    assert abs(float(careless.heat_capacity - exact.heat_capacity)) > 1e-4


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match=re.escape("`order` must be >= 2, got 1; use MeanField")):
        TAP(order=1)
    with pytest.raises(ValueError, match="`order` must be 2 or 3, got 4"):
        TAP(order=4)
    for name in ("response", "solver", "adjoint"):
        with pytest.raises(TypeError, match=f"`{name}` must be (None or )?a"):
            TAP(**{name: "exact"})
    with pytest.raises(ValueError, match=r"`couplings` must be symmetric .* for TAP"):
        free_energy(SpinSystem(torch.ones(3, 3).triu(), torch.zeros(3, 1)), TAP())
    with pytest.raises(ValueError, match="radius"):
        free_energy(SpinSystem(torch.zeros(3, 3), torch.zeros(3, 8)), TAP(response=LargeDResponse()))
