"""The stationary law of synchronous dynamics: known numbers, and what must hold between them."""

import math

import numpy as np
import pytest
import torch
from solvable_models import ASYMMETRIC as COUPLINGS
from solvable_models import DRIVE as FIELD
from solvable_models import ising_states, peretto

from implicit_attention.spins import Enumeration, SpinSystem, stationary_law, thermodynamics
from implicit_attention.testing.numerics import random

SYMMETRIC = (COUPLINGS + COUPLINGS.mT) / 2
STATES = ising_states(4)


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
