"""Naive mean field: its bound, its equation, and what is not asked of it where its steps contract."""

import math

import pytest
import torch

from implicit_attention import Anderson, Picard
from implicit_attention.potentials import AmosResponse, LargeDResponse, SphereUnits
from implicit_attention.spins import (
    Enumeration,
    MeanField,
    SpinSystem,
    free_energy,
    magnetization,
)
from implicit_attention.testing.numerics import random


def vectors(batch=(2,), sites=4, dim=3, *, strength=0.2, seed=0):
    couplings = strength * random(*batch, sites, sites, seed=seed)
    return (couplings + couplings.mT) / 2, random(*batch, sites, dim, seed=seed + 1)


@pytest.mark.parametrize("beta", [0.3, 1.0, 2.0])
def test_the_free_energy_is_an_upper_bound(beta):
    """Without a diagonal, which mean field reads as m_i^2 where it is R^2."""
    for seed in range(5):
        couplings, field = vectors(sites=6, dim=1, strength=0.5, seed=seed)
        couplings = couplings - torch.diag_embed(couplings.diagonal(dim1=-2, dim2=-1))
        system = SpinSystem(couplings, field, beta, radius=1.0)
        bound = free_energy(system, MeanField(), on_failure="ignore")
        assert bool((bound >= free_energy(system, Enumeration()) - 1e-9).all())


@pytest.mark.parametrize("response", [SphereUnits(), AmosResponse()])
def test_magnetizations_solve_their_equation(response):
    couplings, field = vectors()
    system = SpinSystem(couplings, field, 0.8)
    m = magnetization(system, MeanField(response=response))
    answer = response.magnetization(field + couplings @ m, 0.8, system.radius)
    torch.testing.assert_close(m, answer, rtol=1e-8, atol=1e-9)


def test_the_large_d_response_has_its_radius():
    couplings, field = vectors(dim=8)
    m = magnetization(SpinSystem(couplings, field, 0.8, radius="bessel"), MeanField(response=LargeDResponse()))
    assert bool((m.norm(dim=-1) < math.sqrt(3)).all())


def test_options_count():
    couplings, field = vectors(dim=2)
    system = SpinSystem(couplings, field)
    exact = free_energy(system, MeanField())
    assert not torch.equal(free_energy(system, MeanField(response=AmosResponse())), exact)
    assert not torch.equal(free_energy(system, MeanField(solver=Picard(rtol=1e-2))), exact)


def test_a_sample_that_contracts_has_its_bits_beside_one_that_does_not():
    couplings, field = vectors()
    both = MeanField().answer(SpinSystem(torch.stack([couplings[0], 8 * couplings[0]]), field))
    alone = MeanField().answer(SpinSystem(couplings[:1], field[:1]))
    assert both.report.num_evals[0] == alone.report.num_evals[0] < both.report.num_evals[1]
    torch.testing.assert_close(both.magnetization[0], alone.magnetization[0], rtol=0, atol=1e-15)


def test_an_answer_starts_the_next_solve():
    couplings, field = vectors()
    system = SpinSystem(2 * couplings, field)
    m, answer = magnetization(system, MeanField(solver=Anderson(rtol=1e-10)), return_answer=True)
    again = magnetization(
        system, MeanField(solver=Anderson(rtol=1e-9)), initial=answer.magnetization, return_answer=True
    )
    assert torch.equal(m, answer.magnetization)
    assert again[1].report.num_evals.tolist() == [1, 1]
    # Couplings that are a function of the field answer, too; <s_i> is told beside the total.
    total, answer = magnetization(SpinSystem(lambda h: h @ h.mT / 20, field), MeanField(), return_answer=True)
    direct, through = magnetization(SpinSystem(lambda h: h @ h.mT / 20, field), MeanField(), split=True)
    torch.testing.assert_close(answer.magnetization, direct)
    torch.testing.assert_close(total, direct + through)
    assert float(through.abs().max()) > 1e-3
