"""TAP and the third order: their equations, and solutions outside of their reach called so."""

import itertools
import math

import numpy as np
import pytest
import torch
from solvable_models import COUPLINGS, FIELD, four

from implicit_attention import Anderson, ConvergenceError, OneStep, Picard, Status
from implicit_attention.potentials import AmosResponse, SphereUnits
from implicit_attention.spins import TAP, Enumeration, MeanField, SpinSystem, free_energy, stability, thermodynamics
from implicit_attention.testing.numerics import random

pytestmark = pytest.mark.cases(2)

BOTH = pytest.mark.parametrize("order", [2, 3])
#: For what holds for every response: a square root instead of Bessel functions.
CHEAP = AmosResponse()


def close(value, truth, tolerance=1e-12):
    torch.testing.assert_close(value, truth, rtol=tolerance, atol=tolerance)


# Ising spins.


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


@pytest.mark.parametrize("beta", [30.0, 3e3])
def test_frozen_spins_are_finite(beta):
    """Variances that underflow: fields of a thousand would divide 0 by 0 if derivatives were taken by the field."""
    field = torch.tensor([[1.0], [-1.4], [0.8], [1.2]], dtype=torch.float64)
    system = SpinSystem(0.3 * COUPLINGS, field, beta)
    for order in (2, 3):
        found = thermodynamics(system, TAP(order=order))
        close(found.free_energy, free_energy(system, Enumeration()), 1e-9)
        close(found.magnetization, field.sign(), 1e-9)


# Vectors.


@BOTH
def test_zero_field_is_no_singular_point(order):
    """tau = R^2/D for all, so that the second order is sum J^2 R^4/(4 D); and chi is the same in all directions."""
    couplings = 0.3 * random(3, 3).triu(1)
    couplings = (couplings + couplings.mT) / 2
    found = thermodynamics(SpinSystem(couplings, torch.zeros(3, 3).double(), 0.8), TAP(order=order, response=CHEAP))
    truth = 0.64 / 4 * couplings.square().sum() * 3
    if order == 3:
        truth = truth + 0.8**3 / 6 * torch.trace(couplings @ couplings @ couplings) * 3
    close(found.log_partition, truth)
    assert (found.magnetization == 0).all()
    chi = found.susceptibility()
    close(chi[:, 1, :, 1], chi[:, 0, :, 0])
    assert bool(torch.isfinite(found.heat_capacity))


@pytest.mark.parametrize("dim", [1, 3])
def test_a_lone_spin_with_a_diagonal_is_exact(dim):
    own, field = torch.tensor([[0.7]], dtype=torch.float64), random(1, dim, seed=3)
    found = free_energy(SpinSystem(own, field, 1.1, radius=1.3), TAP())
    close(-1.1 * found, SphereUnits().log_partition(field, 1.1, 1.3)[0] + 1.1 * 0.7 * 1.69 / 2)


# Where the expansion does not converge.


def glass(samples, sites, seed):
    couplings = random(samples, sites, sites, seed=seed).triu(1) / math.sqrt(sites)
    return couplings + couplings.mT


@pytest.mark.slow
def test_a_spin_glass_below_the_line():
    """Against the replica-symmetric values of infinitely many sites."""
    sites = 200
    field = torch.full((6, sites, 1), 0.5, dtype=torch.float64)
    system = SpinSystem(glass(6, sites, seed=0), field, 1.0, measure="counting")
    found = thermodynamics(system, TAP())
    assert float(found.magnetization.square().mean()) == pytest.approx(0.3025129643, abs=0.02)
    assert float(stability(system, TAP(), starts=0).almeida_thouless.mean()) == pytest.approx(0.5534128767, abs=0.05)
    assert float(found.free_energy.mean()) / sites == pytest.approx(-1.0469778754, abs=0.01)


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


# Samples, masks, options.


def test_a_lost_diagonal_is_reported():
    couplings = COUPLINGS.clone()
    couplings[1, 1] = torch.nan
    found = thermodynamics(SpinSystem(couplings, FIELD), TAP(), on_failure="ignore")
    assert int(found.report.status) == Status.NONFINITE


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
