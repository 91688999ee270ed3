"""Entmax: the contract, its weights by other routes, exact retrieval, orders that are tensors."""

import math
from functools import partial

import pytest
import torch
from key_pairs import KEYS, pairs, some_keys

from implicit_attention import AnchoredEnergy, LogSumExp, solve
from implicit_attention.potentials import Entmax
from implicit_attention.testing.numerics import check_close, random, relative_error
from implicit_attention.testing.potential import PotentialContract

tensor = partial(torch.tensor, dtype=torch.float64)


class TestSparsemax(PotentialContract):
    def make(self, dtype):
        return Entmax(random(*KEYS, dtype=dtype), 0.7, alpha=2.0)


class TestMaskAndBias(PotentialContract):
    def make(self, dtype):
        return Entmax(random(*KEYS, dtype=dtype), **pairs(dtype))


class TestOrderPerEntry(PotentialContract):
    def make(self, dtype):
        return Entmax(random(*KEYS, dtype=dtype), alpha=tensor([1.25, 1.6]).to(dtype), **pairs(dtype))


def by_bisection(scores, alpha):
    """Alpha-entmax, the threshold to the last bit by halving."""
    x = (alpha - 1) * scores
    low, high = x.amax(-1, keepdim=True) - 1, x.amax(-1, keepdim=True)
    for _ in range(200):
        middle = (low + high) / 2
        above = ((x - middle).clamp(min=0) ** (1 / (alpha - 1))).sum(-1, keepdim=True) >= 1
        low, high = middle.where(above, low), high.where(above, middle)
    p = (x - low).clamp(min=0) ** (1 / (alpha - 1))
    return p / p.sum(-1, keepdim=True)


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0, 1e4])
@pytest.mark.parametrize("count", [1, 2, 50, 700])
def test_weights_equal_those_by_bisection(scale, count):
    scores, phi = scale * random(6, count, seed=count), partial(Entmax, torch.eye(count).double(), 1.0)
    for alpha in (1.1, 1.3, 1.5, 1.8, 2.0):
        found = phi(alpha=alpha).probabilities(scores)
        check_close(found, by_bisection(scores, alpha), 0, 4e-14 * max(scale, 4))
        check_close(phi(alpha=tensor(alpha)).probabilities(scores), found, 0, 1e-13)
        # Under torch.func the host does not stop the Newton steps: a fixed number of them has to do.
        check_close(torch.vmap(phi(alpha=alpha).probabilities)(scores[None]), found[None], 0, 1e-14)


@pytest.mark.parametrize("alpha", [1.0001, 1.3, 1.5, 1.9, 2.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_weights_are_probabilities_whatever_the_scores(alpha, dtype):
    i, lowest = torch.arange(300), torch.finfo(torch.float32).min
    smooth = [0.0 * i, -i / 300, -(0.97 ** i.flip(0)), -(2.0**-i)]
    rough = [1e30 * (i / 150 - 1), lowest + 0.0 * i, (-0.01 * i).where(i % 2 == 0, -torch.inf)]
    z, bias = torch.zeros(7, 1, dtype=dtype), torch.stack(smooth + rough).to(dtype)
    phi = Entmax(torch.zeros(300, 1, dtype=dtype), 1.0, alpha=alpha, bias=bias)
    p = phi.probabilities(z)
    assert (p >= 0).all()
    assert ((p.sum(-1) - 1).abs() <= 8 * torch.finfo(dtype).eps).all()
    assert (p[-1, 1::2] == 0).all()
    torch.testing.assert_close(p[0], torch.full_like(p[0], 1 / 300))
    assert phi.value(z)[:4].isfinite().all()


def test_near_one_it_is_log_sum_exp():
    keys, z, v = random(*KEYS), random(2, 3, 5, seed=1), random(2, 3, 5, seed=2)
    phi, soft = Entmax(keys, 0.7, alpha=1 + 1e-5, mask=some_keys()), LogSumExp(keys, 0.7, mask=some_keys())
    for found, expected in zip(phi.evaluate(z), soft.evaluate(z), strict=True):
        assert 1e-6 < relative_error(found, expected) < 3e-5
    assert relative_error(phi.covariance_product(z, v), soft.covariance_product(z, v)) < 3e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_alpha_keeps_its_digits_near_softmax(dtype):
    scores, weights = 2 * random(5, 9), random(5, 9, seed=1)
    p = scores.softmax(-1)
    raw = -p * p.log().square() / 2
    expected = (weights * (raw - p * raw.sum(-1, keepdim=True))).sum(), (p * (p.log() - p.log().square() / 2)).sum()
    for above in (1.2e-7, 9.5e-7, 1e-5):
        alpha = tensor(1 + above).to(dtype).requires_grad_()
        phi = Entmax(torch.eye(9, dtype=dtype), 1.0, alpha=alpha)
        z = scores.to(dtype)
        parts = (weights.to(dtype) * phi.probabilities(z)).sum(), phi.value(z).sum()
        for part, gradient in zip(parts, expected, strict=True):
            check_close(torch.autograd.grad(part, alpha)[0].double(), gradient, 10 * above + 2e-6)


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_a_key_beyond_the_margin_is_retrieved_exactly(alpha):
    """Where k_i beats others by 1/((alpha - 1) beta) + 2 M eps, one step returns it without rounding."""
    keys, eps, noise = random(12, 20, seed=5), 0.05, random(8, 12, 20, seed=6)
    products = keys @ keys.mT
    gaps = (products.diagonal()[:, None] - products).fill_diagonal_(math.inf).amin()
    beta = float(1.0001 / ((alpha - 1) * (gaps - 2 * keys.norm(dim=-1).amax() * eps)))
    z = keys + eps * noise / noise.norm(dim=-1, keepdim=True)
    phi = Entmax(keys, beta, alpha=alpha)
    assert torch.equal(phi.mean(z), keys.expand_as(z))
    # And there it neither moves nor bends: the solve ends with a residual of 0.
    assert phi.covariance_product(z, noise).eq(0).all()
    found = solve(AnchoredEnergy(phi, z, 0.0), z)
    assert torch.equal(found.value, keys.expand_as(z))
    assert (found.residual == 0).all()


def test_the_bound_on_the_curvature_is_nearly_reached():
    # Two keys of equal weight: the Jacobian of p is 1/4 (alpha -> 1) to 1/2 (alpha = 2) times (v_1 - v_2).
    keys, z = tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.zeros(1, 2).double()
    for alpha in (1.1, 1.5, 2.0):
        phi = Entmax(keys, 3.0, alpha=alpha)
        check_close(phi.lipschitz(), phi.covariance_product(z, keys[:1])[0, 0], 1e-8)
    assert Entmax(keys, 3.0).bounded_below(math.inf)


def test_forward_mode_equals_reverse_mode():
    inputs = random(2, 3, 5), random(*KEYS, seed=1), tensor([1.25, 1.6])
    of = lambda z, keys, alpha: Entmax(keys, 0.7, alpha=alpha).evaluate(z)  # noqa: E731
    check_close(torch.func.jacfwd(of, (0, 1, 2))(*inputs), torch.func.jacrev(of, (0, 1, 2))(*inputs), 1e-11)
    z, keys, alpha = inputs
    value = lambda t: Entmax(keys, 0.7, alpha=alpha + t).value(z + t * z.roll(1, 0)).sum()  # noqa: E731
    at = torch.tensor(0.1).double()
    by_reverse = torch.func.jacrev(torch.func.jacrev(value))(at)
    check_close(torch.func.jacfwd(torch.func.jacfwd(value))(at), by_reverse, 1e-11)
