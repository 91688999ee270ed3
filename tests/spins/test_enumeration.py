"""Enumeration: all states of small Ising systems, the truth that other methods are measured by."""

import itertools

import numpy as np
import pytest
import torch
from solvable_models import COUPLINGS, FIELD

from implicit_attention import Status
from implicit_attention.spins import Enumeration, SpinSystem, free_energy, magnetization, thermodynamics
from implicit_attention.testing.numerics import random


def field_dependent(field):
    """J_ij = .3 tanh(5 h_i h_j), i != j."""
    couplings = 0.3 * torch.tanh(5 * field @ field.mT)
    return couplings * (1 - torch.eye(len(field), dtype=field.dtype))


def test_couplings_that_follow_the_field():
    system = SpinSystem.from_full(field_dependent, FIELD, measure="counting")
    assert float(free_energy(system, Enumeration())) == pytest.approx(-2.882684317930, abs=6e-13)
    spins, through = magnetization(system, Enumeration(), split=True)
    mean = [0.2558581053, -0.1437536526, 0.3345630824, 0.0744924464]
    total = [0.491795096, -0.330294672, 0.515834811, 0.179689814]
    np.testing.assert_allclose(spins.flatten(), mean, rtol=0, atol=6e-11)
    np.testing.assert_allclose((spins + through).flatten(), total, rtol=0, atol=6e-10)
    np.testing.assert_array_equal(magnetization(system, Enumeration()), spins + through)


@pytest.mark.parametrize("beta", [0.3, 2.5])
def test_moments_are_averages_over_states(beta):
    """U, C, m, correlations and susceptibility from the weights of the states, with a diagonal and a radius."""
    n, radius = 5, 1.3
    couplings = random(n, n) / 4
    couplings = couplings + couplings.mT
    field = random(n, 1, seed=1)
    states = radius * np.array(list(itertools.product((-1.0, 1.0), repeat=n)))
    energies = -np.einsum("si,ij,sj->s", states, couplings, states) / 2 - states @ field[:, 0].numpy()
    weights = np.exp(-beta * (energies - energies.min()))
    weights /= weights.sum()
    mean = weights @ states
    second = np.einsum("s,si,sj->ij", weights, states, states)
    found = thermodynamics(SpinSystem(couplings, field, beta, radius=radius), Enumeration())
    close = {"rtol": 1e-12, "atol": 1e-12}
    np.testing.assert_allclose(found.internal_energy, weights @ energies, **close)
    np.testing.assert_allclose(found.heat_capacity, beta**2 * weights @ (energies - weights @ energies) ** 2, **close)
    np.testing.assert_allclose(found.entropy, -weights @ np.log(weights * 2**n), **close)
    np.testing.assert_allclose(found.magnetization[:, 0], mean, **close)
    np.testing.assert_allclose(found.correlations, second, **close)
    covariance = second - np.outer(mean, mean)
    np.testing.assert_allclose(found.susceptibility()[:, 0, :, 0], beta * covariance, **close)


def test_states_are_added_up_in_blocks():
    # 16 sites are four blocks; without couplings the sum is known.
    field = random(2, 16, 1)
    value = -free_energy(SpinSystem(torch.zeros(16, 16, dtype=torch.float64), field), Enumeration())
    torch.testing.assert_close(value, torch.cosh(field).log().sum((-2, -1)), rtol=1e-13, atol=1e-13)


def test_a_low_temperature_does_not_overflow():
    found = thermodynamics(SpinSystem(COUPLINGS, FIELD, 1e4, measure="counting"), Enumeration())
    # All spins up: -sum J - sum h, without entropy.
    assert float(found.free_energy) == pytest.approx(-1.15, abs=1e-12)
    assert float(found.entropy) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_sample_that_is_not_finite_is_flagged_alone(bad):
    field = FIELD.expand(3, 4, 1).clone()
    field[1, 2] = bad
    system = SpinSystem(COUPLINGS, field)
    found = thermodynamics(system, Enumeration(), on_failure="ignore")
    assert found.report.status.tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED]
    good = thermodynamics(SpinSystem(COUPLINGS, FIELD.expand(3, 4, 1)), Enumeration())
    for name in ("free_energy", "heat_capacity", "magnetization", "correlations"):
        torch.testing.assert_close(getattr(found, name)[[0, 2]], getattr(good, name)[[0, 2]], rtol=0, atol=0)
