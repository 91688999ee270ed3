"""Low-rank couplings: the numbers of the same couplings as a tensor, by products alone."""

import pytest
import torch
from work import Work

from implicit_attention.spins import (
    AdaTAP,
    AmosResponse,
    GaussianClosure,
    GaussianUnits,
    KineticPlefka,
    LowRank,
    MeanField,
    SpinSystem,
    decompose,
    free_energy,
    magnetization,
)
from implicit_attention.testing.numerics import random

METHODS = [
    MeanField(),
    MeanField(response=AmosResponse()),
    KineticPlefka(),
    GaussianClosure(),
    AdaTAP(prior=GaussianUnits()),
]
EQUILIBRIUM = [method for method in METHODS if method.symmetric]


def numbers(batch=(2, 3), sites=6, dim=4, rank=2, scale=0.3):
    factors, field = random(*batch, sites, rank, seed=1), random(*batch, sites, dim, seed=2)
    return scale * factors, field, 0.3 + random(*batch, seed=3).abs() / 2


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_products_give_what_the_tensor_gives(method, masked):
    factors, field, beta = (t.requires_grad_() for t in numbers())
    mask = random(2, 3, 6, seed=4) > -1 if masked else None
    couplings = LowRank(factors)
    own = torch.eye(6, dtype=torch.bool)
    dense = (factors @ factors.mT).masked_fill(own, 0.0)
    assert torch.equal(couplings.dense(), dense)

    def answer(couplings):
        m = magnetization(SpinSystem(couplings, field, beta, mask=mask), method)
        return m, torch.autograd.grad(m.square().cos().sum(), (factors, field, beta))

    (m, by), (m_dense, by_dense) = answer(couplings), answer(dense)
    torch.testing.assert_close(m, m_dense, rtol=0, atol=1e-10)
    torch.testing.assert_close(by, by_dense, rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", EQUILIBRIUM, ids=repr)
def test_free_energies_and_total_answers(method):
    factors, field, beta = numbers()
    low, dense = (SpinSystem(c, field, beta) for c in (LowRank(factors), LowRank(factors).dense()))
    torch.testing.assert_close(free_energy(low, method), free_energy(dense, method), rtol=0, atol=1e-12)

    def made(h):
        return LowRank(0.3 * torch.tanh(h[..., :2]))

    low = SpinSystem(made, field, beta)
    dense = SpinSystem(lambda h: made(h).dense(), field, beta)
    torch.testing.assert_close(magnetization(low, method), magnetization(dense, method), rtol=0, atol=1e-10)
    for part in ("full", "half"):
        make = SpinSystem.from_full if part == "full" else SpinSystem
        pair = (make(c, field, beta) for c in (LowRank(0.5 * factors), LowRank(0.5 * factors).dense()))
        torch.testing.assert_close(*(magnetization(s, method) for s in pair), rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_answers_are_differentiated_exactly(method):
    factors, field, beta = (t.requires_grad_() for t in numbers((), sites=3, dim=2))

    def value(factors, field, beta):
        return magnetization(SpinSystem(LowRank(factors), field, beta), method)

    assert torch.autograd.gradcheck(value, (factors, field, beta))
    assert torch.autograd.gradgradcheck(value, (factors, field, beta), atol=1e-5)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_no_tensor_of_all_pairs_is_made(method):
    sites, rank = 400, 3
    factors = (0.03 * random(sites, rank, seed=1)).requires_grad_()
    with Work() as work:
        magnetization(SpinSystem(LowRank(factors), random(sites, 2, seed=2)), method).sum().backward()
    # The largest are the coefficients of a law, 84 for a site.
    assert 0 < work.largest < sites * 100


def test_strong_couplings_that_need_damped_steps():
    factors, field, _ = numbers((4,), scale=1.5)
    low, dense = (SpinSystem(c, field, 1.5) for c in (LowRank(factors), LowRank(factors).dense()))
    torch.testing.assert_close(magnetization(low, MeanField()), magnetization(dense, MeanField()), rtol=0, atol=1e-9)


def test_a_sample_that_is_not_finite_changes_no_other():
    factors, field, beta = numbers((3,))
    broken = factors.clone()
    broken[1, 2, 0] = torch.nan
    sound, found = (
        magnetization(SpinSystem(LowRank(f), field, beta), MeanField(), on_failure="ignore") for f in (factors, broken)
    )
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], sound[[0, 2]])


def test_factors_of_too_many_samples_are_refused():
    with pytest.raises(ValueError, match="broadcast"):
        SpinSystem(LowRank(torch.zeros(3, 6, 2)), torch.zeros(2, 6, 3))


def test_parts_of_the_answer():
    factors, field, beta = numbers()
    parts = decompose(SpinSystem(LowRank(factors), field, beta), MeanField())
    same = decompose(SpinSystem(LowRank(factors).dense(), field, beta), MeanField())
    torch.testing.assert_close(parts.coupling, same.coupling, rtol=0, atol=1e-10)
