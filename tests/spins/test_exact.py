"""Solvable models: the known numbers, and what must hold between them."""

import math
import re

import numpy as np
import pytest
import torch
from solvable_models import (
    at_line,
    curie_weiss,
    curie_weiss_magnetization,
    peretto,
    sherrington_kirkpatrick,
    spherical_sk,
)

from implicit_attention.spins import Enumeration, SpinSystem, stationary_law, thermodynamics
from implicit_attention.testing.numerics import random

COUPLINGS = torch.tensor(
    [[0.0, 0.5, -0.3, 0.2], [-0.1, 0.0, 0.4, 0.3], [0.6, -0.2, 0.0, 0.1], [0.2, 0.5, -0.4, 0.0]], dtype=torch.float64
)
FIELD = torch.tensor([0.2, -0.1, 0.3, 0.05], dtype=torch.float64)
SYMMETRIC = (COUPLINGS + COUPLINGS.mT) / 2
# Bit i of a state's number says whether s_i = +1.
STATES = torch.tensor([[2 * (k >> i & 1) - 1 for i in range(4)] for k in range(16)], dtype=torch.float64)


# Curie-Weiss.


@pytest.mark.parametrize(
    ("sites", "log_partition", "m"),
    [
        (10, 0.858439374330, 0.479736171845),
        (100, 0.808367915705, 0.774241720703),
        (1000, 0.805501483472, 0.786407322718),
        (None, 0.805196270991, 0.787628618362),
    ],
)
def test_curie_weiss_in_a_field(sites, log_partition, m):
    found = curie_weiss(sites, 1.2, 0.1)
    assert found.log_partition == pytest.approx(log_partition, abs=6e-13)
    assert found.magnetization == pytest.approx(m, abs=6e-13)
    turned = curie_weiss(sites, 1.2, -0.1)
    assert turned.log_partition == pytest.approx(found.log_partition, abs=1e-13)
    assert turned.magnetization == pytest.approx(-found.magnetization, abs=1e-12)


def test_curie_weiss_is_what_enumeration_finds():
    n = 7
    couplings, field = torch.full((n, n), 1 / n, dtype=torch.float64), torch.full((n, 1), 0.3, dtype=torch.float64)
    exact = thermodynamics(SpinSystem(couplings, field, 0.9, measure="counting"), Enumeration())
    found = curie_weiss(n, 0.9, 0.3)
    assert found.log_partition == pytest.approx(float(exact.log_partition) / n, abs=1e-13)
    assert found.magnetization == pytest.approx(float(exact.magnetization.mean()), abs=1e-13)


def test_curie_weiss_below_the_critical_temperature():
    found = curie_weiss(None, 1.5)
    assert found.magnetization == pytest.approx(0.858559636640, abs=6e-13)
    assert -found.log_partition / 1.5 == pytest.approx(-0.538894232961, abs=6e-13)
    assert curie_weiss(None, 1.1).magnetization == pytest.approx(0.502940574944, abs=1e-12)


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_curie_weiss_has_no_magnetization_of_its_own_at_high_temperature(beta):
    found = curie_weiss(None, beta)
    assert found.magnetization == 0.0
    assert found.log_partition == pytest.approx(math.log(2), abs=1e-15)


@pytest.mark.parametrize(
    ("beta", "dim", "m"),
    [
        (1.5, 1, 0.858559636640),
        (1.5, 2, 0.7241587176),
        (1.5, 3, 0.6757069001),
        (1.5, 8, 0.6139205376),
        (1.5, 64, 0.5818695038),
        (1.5, math.inf, 0.5773502692),
        (1.1, 1, 0.502940574944),
        (1.1, 3, 0.3791501458),
        (1.1, math.inf, 0.3015113446),
    ],
)
def test_curie_weiss_vectors(beta, dim, m):
    assert curie_weiss_magnetization(beta, dim) == pytest.approx(m, abs=6e-11)


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 64, 1024, math.inf])
def test_vectors_of_every_dimension_order_at_beta_one(dim):
    assert curie_weiss_magnetization(0.5, dim) == 0.0
    assert curie_weiss_magnetization(1.0, dim) == 0.0
    # m^2 = (1 - 1/beta) (D + 2)/D to lowest order.
    growth = 1.0 if dim == math.inf else (dim + 2) / dim
    small = curie_weiss_magnetization(1 + 1e-6, dim)
    assert small**2 == pytest.approx(1e-6 * growth, rel=1e-3)


def test_with_the_bessel_radius_the_critical_point_moves():
    critical = 2 * 8 / (8 - 2)
    assert critical == pytest.approx(2.6666667, abs=5e-8)
    assert curie_weiss_magnetization(critical * 0.999, 8, radius="bessel") == 0.0
    assert 0 < curie_weiss_magnetization(critical * 1.001, 8, radius="bessel") < 0.1
    assert curie_weiss_magnetization(1.9, math.inf, radius="bessel") == 0.0
    assert curie_weiss_magnetization(4.0, math.inf, radius="bessel") == pytest.approx(math.sqrt(0.5))


def test_many_dimensions_approach_infinitely_many():
    limit = curie_weiss_magnetization(1.5, math.inf)
    errors = [curie_weiss_magnetization(1.5, dim) - limit for dim in (256, 1024)]
    assert errors[0] / errors[1] == pytest.approx(4.0, abs=0.05)


# Synchronous dynamics.


def test_synchronous_dynamics_at_half_the_coupling():
    law = stationary_law(COUPLINGS, FIELD, 0.5)
    m = [0.0646776571, -0.0209830878, 0.1547013174, -0.0050233099]
    np.testing.assert_allclose(law.magnetization, m, rtol=0, atol=6e-11)
    assert law.entropy_production == pytest.approx(0.428999177720, abs=6e-13)
    assert float(law.delayed[0, 1]) == pytest.approx(0.2335198195, abs=6e-11)
    assert float(law.delayed[2, 0]) == pytest.approx(0.2858532337, abs=6e-11)


def test_synchronous_dynamics():
    law = stationary_law(COUPLINGS, FIELD)
    m = [0.0864382798, -0.0093496731, 0.2447859183, -0.0294866398]
    np.testing.assert_allclose(law.magnetization, m, rtol=0, atol=6e-11)
    assert law.entropy_production == pytest.approx(1.485831189306, abs=6e-13)
    assert law.second_eigenvalue == pytest.approx(0.4612896576, abs=6e-11)


def transitions(couplings, field, beta):
    """p(s' | s) state by state, rows s, as the product over sites is written."""
    table = torch.ones(16, 16, dtype=torch.float64)
    for a, s in enumerate(STATES):
        for b, t in enumerate(STATES):
            for i in range(4):
                force = beta * float(field[i] + couplings[i] @ s)
                table[a, b] *= math.exp(float(t[i]) * force) / (2 * math.cosh(force))
    return table


@pytest.mark.parametrize("beta", [0.5, 1.0, 3.0])
def test_the_law_is_stationary_and_its_moments_are_averages(beta):
    law, table = stationary_law(COUPLINGS, FIELD, beta), transitions(COUPLINGS, FIELD, beta)
    p = law.probabilities
    close = {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(p @ table, p, **close)
    assert float(p.sum()) == pytest.approx(1.0, abs=1e-14)
    mean = p @ STATES
    torch.testing.assert_close(law.magnetization, mean, **close)
    equal = torch.einsum("s,si,sj->ij", p, STATES, STATES) - torch.outer(mean, mean)
    torch.testing.assert_close(law.correlations, equal, **close)
    later = torch.einsum("s,st,ti,sj->ij", p, table, STATES, STATES) - torch.outer(mean, mean)
    torch.testing.assert_close(law.delayed, later, **close)
    forward = p[:, None] * table
    produced = float((forward * (table / table.mT).log()).sum())
    assert law.entropy_production == pytest.approx(produced, abs=1e-12)


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_entropy_production_is_in_the_delayed_correlations(beta):
    law = stationary_law(COUPLINGS, FIELD, beta)
    antisymmetric = beta * float(((COUPLINGS - COUPLINGS.mT) * law.delayed).sum())
    assert law.entropy_production == pytest.approx(antisymmetric, abs=1e-12)


def test_symmetric_couplings_settle_in_perettos_law_and_produce_no_entropy():
    law = stationary_law(SYMMETRIC, FIELD)
    m = [0.2264979423, -0.0046724193, 0.3024298889, 0.0396615162]
    np.testing.assert_allclose(law.magnetization, m, rtol=0, atol=6e-11)
    torch.testing.assert_close(law.probabilities, peretto(SYMMETRIC, FIELD), rtol=1e-12, atol=1e-14)
    assert law.entropy_production == pytest.approx(0.0, abs=1e-13)
    boltzmann = thermodynamics(SpinSystem(SYMMETRIC, FIELD[:, None]), Enumeration()).magnetization
    truth = [0.2212950623, -0.0039868940, 0.3055311896, 0.0392669921]
    np.testing.assert_allclose(boltzmann[:, 0], truth, rtol=0, atol=6e-11)


def test_a_diagonal_is_memory_of_the_spin_itself():
    couplings = SYMMETRIC + torch.diag(torch.tensor([0.4, -0.3, 0.2, 0.1]).double())
    law = stationary_law(couplings, FIELD, 0.8)
    torch.testing.assert_close(law.probabilities, peretto(couplings, FIELD, 0.8), rtol=1e-12, atol=1e-14)


def test_many_states_are_treated_like_few():
    """Two chains that know nothing of each other: laws multiply, entropies add, the slower one is the second."""
    pair = random(5, 5, seed=2) / 4
    couplings, field = torch.block_diag(SYMMETRIC, pair), torch.cat([FIELD, random(5, seed=3)])
    together = stationary_law(couplings, field)
    one, other = stationary_law(SYMMETRIC, FIELD), stationary_law(pair, field[4:])
    # The first four bits of a number are the first four sites.
    product = torch.outer(other.probabilities, one.probabilities).flatten()
    torch.testing.assert_close(together.probabilities, product, rtol=1e-10, atol=1e-14)
    assert together.entropy_production == pytest.approx(one.entropy_production + other.entropy_production, abs=1e-11)
    # One real eigenvalue, and no other of its size.
    slower = max(one.second_eigenvalue, other.second_eigenvalue)
    assert together.second_eigenvalue == pytest.approx(slower, rel=1e-8)


# Sherrington-Kirkpatrick.


def test_replica_symmetric_numbers():
    q, at_number, free = sherrington_kirkpatrick(1.0, 0.5)
    assert q == pytest.approx(0.3025129643, abs=6e-11)
    assert at_number == pytest.approx(0.5534128767, abs=6e-11)
    assert free == pytest.approx(-1.0469778754, abs=6e-11)
    q, at_number, _ = sherrington_kirkpatrick(2.0, 0.5)
    assert q == pytest.approx(0.6215232943, abs=6e-11)
    assert at_number == pytest.approx(1.0628911947, abs=6e-11)


def test_the_at_line():
    assert at_line(0.5) == pytest.approx(1.86879231, abs=6e-9)
    assert at_line(-0.5) == pytest.approx(at_line(0.5), abs=1e-14)
    assert at_line(0.0) == 1.0
    assert sherrington_kirkpatrick(at_line(1.2), 1.2).at_number == pytest.approx(1.0, abs=1e-11)


@pytest.mark.parametrize("beta", [0.3, 0.9])
def test_without_a_field_at_high_temperature(beta):
    q, at_number, free = sherrington_kirkpatrick(beta)
    assert q == 0.0
    assert at_number == pytest.approx(beta**2, abs=1e-14)
    assert -beta * free == pytest.approx(math.log(2) + beta**2 / 4, abs=1e-14)


def test_without_a_field_at_low_temperature_the_overlap_is_positive_and_unstable():
    q, at_number, _ = sherrington_kirkpatrick(1.5)
    assert 0.3 < q < 0.8
    assert at_number > 1


def test_the_free_energy_is_stationary_in_the_overlap():
    """So that df/dh = -m = -E tanh, at fixed q."""
    step = 1e-4
    slope = (
        sherrington_kirkpatrick(1.3, 0.4 + step).free_energy - sherrington_kirkpatrick(1.3, 0.4 - step).free_energy
    ) / (2 * step)
    q = sherrington_kirkpatrick(1.3, 0.4).overlap
    z, weight = np.polynomial.hermite_e.hermegauss(200)
    m = weight @ np.tanh(1.3 * (math.sqrt(q) * z + 0.4)) / weight.sum()
    assert slope == pytest.approx(-m, abs=1e-7)


def test_spherical_numbers():
    assert spherical_sk(2.0) == pytest.approx(0.90342641, abs=6e-9)
    assert spherical_sk(0.5) == 0.0625
    assert spherical_sk(1.0) == pytest.approx(0.25)
    assert spherical_sk(1 + 1e-9) == pytest.approx(0.25, abs=1e-8)


@pytest.mark.parametrize(("beta", "sample"), [(0.5, 0.062463), (1.0, 0.250014), (2.0, 0.893110)])
def test_a_large_random_matrix_is_near_the_spherical_limit(beta, sample):
    assert spherical_sk(beta) == pytest.approx(sample, abs=2e-2)


# Arguments.


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (lambda: curie_weiss(0, 1.0), ValueError, "`sites` must be >= 1, got 0"),
        (lambda: curie_weiss(10, 0.0), ValueError, "`beta` must be > 0, got 0.0"),
        (lambda: curie_weiss_magnetization(1.5, 2.5), ValueError, "`dim` must be an integer or infinity, got 2.5"),
        (lambda: curie_weiss_magnetization(1.5, 0), ValueError, "`dim` must be >= 1, got 0"),
        (lambda: curie_weiss_magnetization(1.5, 2, radius="bessel"), ValueError, "`radius` must be"),
        (lambda: curie_weiss_magnetization(1.5, math.inf, radius=2.0), ValueError, "`radius` must be one of"),
        (lambda: stationary_law(torch.zeros(13, 13), torch.zeros(13)), ValueError, "`field` must have 1 to 12 sites"),
        (lambda: stationary_law(torch.zeros(3, 4), torch.zeros(3)), ValueError, "`couplings` must have shape (N, N)"),
        (lambda: stationary_law(torch.zeros(3, 3), torch.zeros(3, 1)), ValueError, "`field` must have shape (N,)"),
        (lambda: stationary_law(torch.zeros(3, 3), torch.zeros(3), -1.0), ValueError, "`beta` must be > 0, got -1.0"),
        (lambda: peretto(COUPLINGS, FIELD), ValueError, "`couplings` must be symmetric, got a difference of 9.0e-01"),
        (lambda: sherrington_kirkpatrick(-1.0), ValueError, "`beta` must be > 0, got -1.0"),
        (lambda: at_line(math.nan), ValueError, "`field` must be"),
        (lambda: spherical_sk(0.0), ValueError, "`beta` must be > 0"),
    ],
)
def test_arguments_out_of_range_are_refused(function, error, text):
    with pytest.raises(error, match=re.escape(text)):
        function()
