"""The expansion in the couplings: its formulas written out, and what they are made of."""

import itertools
from pathlib import Path

import pytest
import torch
from solvable_models import ASYMMETRIC, double

from implicit_attention import Anderson
from implicit_attention.potentials import AmosResponse, LargeDResponse, SphereUnits
from implicit_attention.spins import KineticPlefka, SpinSystem, magnetization, stationary_state
from implicit_attention.testing.numerics import random

ISING, FIELD = ASYMMETRIC + torch.diag(double([0.2, 0, 0.1, 0])), double([0.6, -0.5, 0.9, 0.4])
SECOND = KineticPlefka(order=2)
SECOND_LARGE = KineticPlefka(order=2, response=LargeDResponse())


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


def of_second_order(couplings, field, beta, m, published=False):
    """theta by the large-D response and theta of the equation, in terms of m with matrices D x D written out.

    As `published` with spin-model transformers: R^2 - |m|^2 for the trace of a covariance, g of the site that is driven
    in the covariances of the sites that drive it, and the square of the reaction itself.
    """
    square, r = m.shape[-1] / 2 - 1, m.square().sum(-1)
    g = ((square + r) / (square - r))[:, None]
    theta, local = m * (1 + g) / beta, field + couplings @ m
    eye = torch.eye(m.shape[-1], dtype=m.dtype)
    outer, source = m[:, :, None] * m[:, None, :], g[:, None, None] if published else g[None, :, :, None]
    sigma = eye / (1 + source) - outer / (square * source)
    second = (couplings.square()[..., None, None] * sigma).sum(1)
    trace = second.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    if published:
        v = local - theta
        second = second + v[:, :, None] * v[:, None, :]
        trace = (couplings.square() @ (square - r))[:, None] + v.square().sum(-1, keepdim=True)
    along = torch.einsum("iab,ib->ia", second, m)
    quadratic = (m * along).sum(-1, keepdim=True)
    d2 = beta**2 / square**2 * (1 + 3 * g) / g**3 * quadratic * m
    d2 = d2 - beta**2 / (square * g * (1 + g)) * (trace * m + 2 * along)
    inner = (m * d2).sum(-1, keepdim=True)
    denominator = square * g / (1 + g) - r[:, None]
    return theta, local + (1 + g) / (2 * beta) * (d2 + m * inner / denominator)


def test_the_second_order_with_the_large_d_response_in_closed_form():
    """g and everything else in terms of m; the source of each term of Sbar is site j."""
    n, d, beta = 4, 6, 0.8
    couplings, field = 0.5 * random(n, n), random(n, d, seed=1)
    m = magnetization(SpinSystem(couplings, field, beta, radius="bessel"), SECOND_LARGE)
    theta, expected = of_second_order(couplings, field, beta, m)
    assert (theta - field - couplings @ m).abs().max() > 1e-2
    torch.testing.assert_close(theta, expected, rtol=1e-8, atol=1e-9)


def test_spin_model_transformers_differ_by_what_the_guide_says():
    """Sixteen spins with softmax couplings, in fields of length R."""
    off = []
    for d, beta, sharpness in itertools.product((8, 16, 64), (0.5, 1.0, 2.0), (1.0, 2.0)):
        query, key, x = (random(16, d, seed=seed) for seed in range(3))
        couplings = (sharpness * query @ key.mT / d**0.5).softmax(-1)
        field = (d / 2 - 1) ** 0.5 * x / x.norm(dim=-1, keepdim=True)
        system = SpinSystem(couplings, field, beta, radius="bessel")
        first, second = (
            magnetization(system, KineticPlefka(order=order, response=LargeDResponse())) for order in (1, 2)
        )
        theirs, step = second, torch.inf
        while step > 1e-9:
            theta = of_second_order(couplings, field, beta, theirs, published=True)[1]
            new = (theirs + LargeDResponse().magnetization(theta, beta, system.radius)) / 2
            theirs, step = new, (new - theirs).norm()
        off.append([float((theirs - ours).norm() / ours.norm()) for ours in (second, first)])
    (low, high), (low_first, high_first) = ((min(each), max(each)) for each in zip(*off, strict=True))
    said = f"differ by {low:.0e} to {high:.3f}, and by {low_first:.3f} to {high_first:.2f} from `order=1`"
    page = " ".join((Path(__file__).parents[2] / "docs" / "spin_layers.md").read_text().split())
    assert said.replace("e-0", "e-").replace(" 0.", " .") in page


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
