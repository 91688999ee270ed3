"""The expansion in the couplings: its formulas written out, its order against exact chains, and its cumulants."""

import math
import re

import pytest
import torch

from implicit_attention import Anderson
from implicit_attention.potentials import AmosResponse, LargeDResponse, SaddlePointResponse, SphereUnits
from implicit_attention.spins import KineticPlefka, SpinSystem, magnetization, stationary_law, stationary_state
from implicit_attention.spins._site import SpinSite
from implicit_attention.testing.numerics import random

ISING = torch.tensor(
    [[0.2, 0.5, -0.3, 0.2], [-0.1, 0.0, 0.4, 0.3], [0.6, -0.2, 0.1, 0.1], [0.2, 0.5, -0.4, 0.0]], dtype=torch.float64
)
FIELD = torch.tensor([0.6, -0.5, 0.9, 0.4], dtype=torch.float64)
PLANAR = torch.tensor([[0.3, 0.9], [-0.5, 0.4]], dtype=torch.float64)
PLANAR_FIELD = torch.tensor([[0.5, 0.3], [-0.4, 0.8]], dtype=torch.float64)
SCALES = torch.tensor([0.05, 0.1, 0.2], dtype=torch.float64)
SECOND = KineticPlefka(order=2)


def slopes(errors):
    """Of every column of errors, (scales, columns), fitted to a power of the couplings."""
    x, y = SCALES.log(), errors.log()
    x = x - x.mean()
    return ((x[:, None] * y).sum(0) / x.square().sum()).tolist()


def planar_law(couplings, field, points=24):
    """m and <s_i(t + 1) s_j(t)^T> - m_i m_j^T of two planar spins of length sqrt(2), by states at equal angles.

    Sums over the circle of smooth functions are exact to rounding. Couplings (2, 2, 2, 2).
    """
    angle = 2 * math.pi * torch.arange(points, dtype=torch.float64) / points
    circle = math.sqrt(2) * torch.stack([angle.cos(), angle.sin()], -1)
    first, second = torch.meshgrid(torch.arange(points), torch.arange(points), indexing="ij")
    states = torch.stack([circle[first.flatten()], circle[second.flatten()]], 1)
    local = field + torch.einsum("ijab,sjb->sia", couplings, states)
    rate = torch.softmax(local @ circle.mT, -1)
    law = torch.full((points**2,), 1 / points**2, dtype=torch.float64)
    for _ in range(60):
        law = ((law[:, None] * rate[:, 0]).mT @ rate[:, 1]).flatten()
    m = torch.einsum("s,sia->ia", law, states)
    later = torch.einsum("s,sia,sjb->ijab", law, rate @ circle, states)
    return m, later - torch.einsum("ia,jb->ijab", m, m)


# Order in the couplings.


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (KineticPlefka(), (2.0, 2.0)),
        (SECOND, (3.0, 3.0, 4.0)),
    ],
)
def test_orders_for_ising_spins(method, expected):
    errors = []
    for scale in SCALES.tolist():
        law = stationary_law(scale * ISING, FIELD)
        state = stationary_state(SpinSystem(scale * ISING, FIELD[:, None], radius=1.0), method)
        errors.append(
            [
                (state.magnetization[:, 0] - law.magnetization).norm(),
                (state.delayed_correlations - law.delayed).norm(),
                (state.entropy_production - law.entropy_production).abs(),
            ]
        )
    # The entropy production of first order changes the sign of its error in between.
    found = slopes(torch.tensor(errors))[: len(expected)]
    assert found == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(("method", "expected"), [(KineticPlefka(), (2.0, 2.0, 3.5)), (SECOND, (3.0, 3.0, 4.0))])
def test_orders_for_planar_spins(method, expected):
    errors = []
    for scale in SCALES.tolist():
        couplings = scale * PLANAR
        m, later = planar_law(couplings[..., None, None] * torch.eye(2), PLANAR_FIELD)
        state = stationary_state(SpinSystem(couplings, PLANAR_FIELD), method)
        delayed = later.diagonal(dim1=-2, dim2=-1).sum(-1)
        produced = ((couplings - couplings.mT) * delayed).sum()
        errors.append(
            [
                (state.magnetization - m).norm(),
                (state.delayed_correlations - delayed).norm(),
                (state.entropy_production - produced).abs(),
            ]
        )
    assert slopes(torch.tensor(errors)) == pytest.approx(expected, abs=0.15)


def test_orders_for_matrices_as_couplings():
    blocks = 0.3 * random(2, 2, 2, 2, seed=3)
    errors = []
    for scale in SCALES.tolist():
        m, later = planar_law(scale * blocks, PLANAR_FIELD)
        state = stationary_state(SpinSystem(scale * blocks, PLANAR_FIELD), KineticPlefka())
        odd = scale * (blocks - blocks.transpose(0, 1).mT)
        errors.append(
            [
                (state.magnetization - m).norm(),
                (state.delayed_correlations - later.diagonal(dim1=-2, dim2=-1).sum(-1)).norm(),
                (state.entropy_production - (odd * later).sum()).abs(),
            ]
        )
    assert slopes(torch.tensor(errors)) == pytest.approx((2.0, 2.0, 3.0), abs=0.2)


def test_matrices_that_are_numbers_are_numbers():
    couplings, field = 0.2 * random(4, 4), random(2, 4, 3, seed=1)
    blocks = couplings[..., None, None] * torch.eye(3, dtype=torch.float64)
    beta = torch.tensor([0.6, 1.0], dtype=torch.float64)
    one, other = (stationary_state(SpinSystem(c, field, beta), KineticPlefka()) for c in (couplings, blocks))
    for name in ("magnetization", "delayed_correlations", "entropy_production"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-9, atol=1e-10)


def test_axes_of_every_site_may_be_turned_where_couplings_are_matrices():
    blocks, field = 0.2 * random(3, 3, 2, 2), random(3, 2, seed=1)
    turns = torch.linalg.qr(random(3, 2, 2, seed=2))[0]
    turned = torch.einsum("iab,ijbc,jdc->ijad", turns, blocks, turns)
    state = stationary_state(SpinSystem(blocks, field), KineticPlefka())
    other = stationary_state(SpinSystem(turned, (turns @ field[..., None])[..., 0]), KineticPlefka())
    torch.testing.assert_close(other.magnetization, (turns @ state.magnetization[..., None])[..., 0])
    torch.testing.assert_close(other.entropy_production, state.entropy_production)


# Formulas.


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


@pytest.mark.parametrize("strength", [0.0, 0.7, 30.0])
@pytest.mark.parametrize(
    ("response", "dim"),
    [
        (SphereUnits(), 1),
        (SphereUnits(), 2),
        (SphereUnits(), 5),
        (AmosResponse(), 1),
        (AmosResponse(), 3),
        (SaddlePointResponse(), 4),
        (LargeDResponse(), 6),
    ],
)
def test_cumulants_are_derivatives_of_the_response(response, dim, strength):
    beta, radius = 0.9, math.sqrt(dim / 2 - 1) if isinstance(response, LargeDResponse) else 1.3
    system = SpinSystem(torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, dim, dtype=torch.float64), beta)
    system.radius = radius
    theta = strength * random(2, dim, seed=3)
    site = SpinSite(response, theta, system)

    def mean(f):
        return response.magnetization(f[None], beta, radius)[0]

    first = [torch.func.jacrev(mean)(f) for f in theta]
    covariance = torch.stack(first) / beta
    third = torch.stack([torch.func.jacrev(torch.func.jacrev(mean))(f) for f in theta]) / beta
    eye = torch.eye(dim, dtype=torch.float64)
    built = site.tau[:, None, None] * eye + site.slope[:, None, None] * theta[:, :, None] * theta[:, None, :]
    close = {"rtol": 1e-7, "atol": 1e-11}
    torch.testing.assert_close(built, covariance, **close)
    skew, cubic = site.skewness()
    pairs = torch.einsum("ab,ic->iabc", eye, theta)
    pairs = pairs + pairs.permute(0, 1, 3, 2) + pairs.permute(0, 3, 2, 1)
    built = skew[:, None, None, None] * pairs
    built = built + cubic[:, None, None, None] * torch.einsum("ia,ib,ic->iabc", theta, theta, theta)
    torch.testing.assert_close(built, third, **close)
    if dim == 1 and strength > 1:
        return
    moment = random(dim, dim, seed=4)
    moment = moment + moment.mT
    along = theta @ moment
    found = site.onsager(along, moment.trace().expand(2))
    expected = torch.linalg.solve(covariance, torch.einsum("iabc,bc->ia", third, moment)) / 2
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-10)


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
def test_derivatives_with_the_exact_response_of_vectors(check):
    sharp = KineticPlefka(order=2, solver=Anderson(rtol=1e-13, atol=1e-13, max_steps=1000))

    def function(field, couplings, beta):
        state = stationary_state(SpinSystem(couplings, field, beta), sharp)
        # One number, and many dimensions, as high derivatives of Bessel functions take their time.
        outputs = state.magnetization, state.delayed_correlations, state.entropy_production
        return sum((x * random(*x.shape, seed=k)).sum() for k, x in enumerate(outputs))

    beta = torch.tensor(0.9, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (random(2, 64, seed=1), 0.3 * random(2, 2, seed=2), beta)]
    assert check(function, inputs, fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_derivatives_with_matrices_as_couplings(check):
    sharp = KineticPlefka(solver=Anderson(rtol=1e-13, atol=1e-13, max_steps=1000))

    def function(field, blocks):
        state = stationary_state(SpinSystem(blocks, field), sharp)
        return state.magnetization, state.delayed_correlations, state.entropy_production

    inputs = [t.requires_grad_() for t in (random(2, 2, 3, seed=1), 0.2 * random(2, 2, 3, 3, seed=2))]
    assert check(function, inputs, fast_mode=True)


# What is refused.


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: KineticPlefka(order=3), ValueError, "`order` must be one of 1, 2, got 3"),
        (lambda: KineticPlefka(order=True), TypeError, "`order` must be an integer, got True; use 1 or 2"),
        (
            lambda: stationary_state(SpinSystem(torch.zeros(2, 2, 3, 3), torch.zeros(2, 3)), SECOND),
            ValueError,
            "`couplings` must have a number for each pair, (N, N) or (*batch, N, N), for KineticPlefka(order=2), "
            "got shape (2, 2, 3, 3); use order=1",
        ),
        (
            lambda: stationary_state(
                SpinSystem(torch.zeros(2, 2), torch.zeros(2, 6)), KineticPlefka(response=LargeDResponse())
            ),
            ValueError,
            "`radius` must be sqrt(D/2 - 1)",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()
