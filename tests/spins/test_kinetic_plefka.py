"""The expansion in the couplings: its formulas written out, and what they are made of."""

import pytest
import torch
from solvable_models import ASYMMETRIC, double

from implicit_attention import Anderson
from implicit_attention.potentials import AmosResponse, LargeDResponse, SphereUnits
from implicit_attention.spins import KineticPlefka, SpinSystem, magnetization, stationary_state
from implicit_attention.testing.numerics import random

ISING, FIELD = ASYMMETRIC + torch.diag(double([0.2, 0, 0.1, 0])), double([0.6, -0.5, 0.9, 0.4])
SECOND = KineticPlefka(order=2)


def test_the_second_order_for_ising_spins_is_the_usual_formula():
    beta = 0.9
    state = stationary_state(SpinSystem(ISING, FIELD[:, None], beta, radius=1.0), SECOND)
    m = state.magnetization[:, 0]
    variance = 1 - m.square()
    onsager = beta**2 * m * (ISING.square() @ variance)
    torch.testing.assert_close(m, torch.tanh(beta * (FIELD + ISING @ m) - onsager), rtol=1e-9, atol=1e-10)
    first = beta * ISING * torch.outer(variance, variance)
    expected = first * (1 + 2 * beta * ISING * torch.outer(m, m))
    torch.testing.assert_close(state.delayed_correlations, expected, rtol=1e-10, atol=1e-12)


def test_the_second_order_with_the_large_d_response_in_closed_form():
    """g and everything else in terms of m, matrices D x D written out; the source of each term of Sbar is site j."""
    n, d, beta = 4, 6, 0.8
    couplings, field = 0.5 * random(n, n), random(n, d, seed=1)
    square = d / 2 - 1
    system = SpinSystem(couplings, field, beta, radius="bessel")
    method = KineticPlefka(order=2, response=LargeDResponse())
    m = magnetization(system, method)
    r = m.square().sum(-1) / square
    g = ((1 + r) / (1 - r))[:, None]
    theta = m * (1 + g) / beta
    local = field + couplings @ m
    eye = torch.eye(d, dtype=torch.float64)
    outer = m[:, :, None] * m[:, None, :]
    sigma = eye / (1 + g[..., None]) - outer / (square * g[..., None])
    second = torch.einsum("ij,jab->iab", couplings.square(), sigma)
    along = torch.einsum("iab,ib->ia", second, m)
    quadratic = (m * along).sum(-1, keepdim=True)
    trace = second.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    d2 = beta**2 / square**2 * (1 + 3 * g) / g**3 * quadratic * m
    d2 = d2 - beta**2 / (square * g * (1 + g)) * (trace * m + 2 * along)
    inner = (m * d2).sum(-1, keepdim=True)
    denominator = square * g / (1 + g) - m.square().sum(-1, keepdim=True)
    expected = local + (1 + g) / (2 * beta) * (d2 + m * inner / denominator)
    assert (theta - local).abs().max() > 1e-2
    torch.testing.assert_close(theta, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("response", "dim"), [(SphereUnits(), 1), (SphereUnits(), 3), (AmosResponse(), 4)])
def test_delayed_correlations_are_contractions_of_cumulants(response, dim):
    beta, couplings = 0.8, 0.3 * random(3, 3)
    system = SpinSystem(couplings, random(3, dim, seed=1), beta)
    state = stationary_state(system, KineticPlefka(order=2, response=response))
    theta = response.inverse(state.magnetization, beta, system.radius)

    def mean(f):
        return response.magnetization(f[None], beta, system.radius)[0]

    sigma = torch.stack([torch.func.jacrev(mean)(f) for f in theta]) / beta
    kappa = torch.stack([torch.func.jacrev(torch.func.jacrev(mean))(f) for f in theta]) / beta**2
    first = beta * couplings * torch.einsum("iab,jab->ij", sigma, sigma)
    second = beta**2 / 2 * couplings.square() * torch.einsum("iabc,jabc->ij", kappa, kappa)
    torch.testing.assert_close(state.delayed_correlations, first + second, rtol=1e-7, atol=1e-9)
    assert second.abs().max() > 1e-4


def test_saturated_spins_do_not_overflow():
    """Their variance, 1e-350 and less, is nothing to divide by."""
    state = stationary_state(SpinSystem(ISING, FIELD[:, None], 2e3, radius=1.0), SECOND, on_failure="ignore")
    assert all(torch.isfinite(x).all() for x in (state.magnetization, state.entropy_production))
    strong = SpinSystem(0.01 * ISING, 50 * FIELD[:, None], 1e2, radius=1.0)
    torch.testing.assert_close(magnetization(strong, SECOND)[:, 0], FIELD.sign(), rtol=1e-12, atol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_derivatives_with_matrices_as_couplings(check):
    sharp = KineticPlefka(solver=Anderson(rtol=1e-13, atol=1e-13, max_steps=1000))

    def function(field, blocks):
        state = stationary_state(SpinSystem(blocks, field), sharp)
        return state.magnetization, state.delayed_correlations, state.entropy_production

    inputs = [t.requires_grad_() for t in (random(2, 2, 3, seed=1), 0.2 * random(2, 2, 3, 3, seed=2))]
    assert check(function, inputs, fast_mode=True)
