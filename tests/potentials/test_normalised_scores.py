"""NormalisedScores: the contract, a layer norm over keys, convexity, keys whose scores are all the same."""

import math

import pytest
import torch
import torch.nn.functional as F
from key_pairs import KEYS, pairs, some_keys

from implicit_attention.potentials import NormalisedScores
from implicit_attention.testing.numerics import check_close, random
from implicit_attention.testing.potential import PotentialContract


class TestMaskAndBias(PotentialContract):
    def make(self, dtype):
        # Eps as large as the variance, so that it is felt.
        return NormalisedScores(random(*KEYS, dtype=dtype), eps=0.5, **pairs(dtype, left_out=True))


class TestSharedKeysWithoutEps(PotentialContract):
    def make(self, dtype):
        mask = torch.tensor([1, 1, 0, 1, 1, 0, 1], dtype=torch.bool)
        return NormalisedScores(random(7, 5, dtype=dtype), torch.tensor(0.8, dtype=dtype), mask=mask, eps=0.0)


@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_its_weights_are_a_layer_norm_over_the_keys_that_are_read(eps):
    keys, z, given = random(*KEYS), random(2, 3, 5, seed=1), pairs(torch.float64)
    value, mean = NormalisedScores(keys, eps=eps, **given).evaluate(z)
    for b, n in ((0, 0), (0, 2), (1, 0), (1, 1), (1, 2)):
        beta, mask = given["beta"][b], given["mask"][b, n]
        read = keys[b, mask]
        scores = beta * read @ z[b, n] + given["bias"][b, n, mask]
        check_close(mean[b, n], F.layer_norm(scores, scores.shape, eps=eps) @ read, 1e-12)
        check_close(value[b, n], len(scores) / beta * (scores.var(correction=0) + eps).sqrt(), 1e-12)


def test_it_does_not_change_when_all_keys_or_biases_are_shifted():
    keys, z, v = random(*KEYS), random(2, 3, 5, seed=1), random(2, 3, 5, seed=2)
    shifted = NormalisedScores(keys + random(1, 5, seed=3), 0.7, bias=torch.full((7,), 3.0).double())
    potential = NormalisedScores(keys, 0.7)
    for got, expected in zip(shifted.evaluate(z), potential.evaluate(z), strict=True):
        check_close(got, expected, 1e-12)
    check_close(shifted.covariance_product(z, v), potential.covariance_product(z, v), 1e-12)
    # Its means leave the hull of the keys.
    assert (potential.mean(z).norm(dim=-1) > keys.norm(dim=-1).amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("eps", [0.0, 1e-5, 1.0])
def test_it_is_convex(eps):
    """It is the norm of an affine function of z: its Hessians have no negative eigenvalue."""
    mask, bias = random(7, seed=50) > -0.5, random(7, seed=90)
    potential = NormalisedScores(random(7, 5), 0.9, mask=mask, bias=bias, eps=eps)
    assert potential.convex
    z = random(20, 5, seed=20) * torch.logspace(-3, 1, 20).double()[:, None]
    hessians = torch.stack([potential.covariance_product(z, e.expand(20, 5)) for e in torch.eye(5).double()], -1)
    spectrum = torch.linalg.eigvalsh(hessians)
    assert (spectrum >= -1e-12 * spectrum.amax(-1, keepdim=True)).all()
    affine = 0.9 * z @ potential.keys[mask].mT + bias[mask]
    centred, count = affine - affine.mean(-1, keepdim=True), affine.shape[-1]
    norm = (centred.square().sum(-1) + count * eps).sqrt()
    check_close(potential.value(z), math.sqrt(count) / 0.9 * norm, 1e-12)


def test_bounds():
    keys = random(*KEYS)
    potential, centred = NormalisedScores(keys, 0.7, eps=0.04), keys - keys.mean(-2, keepdim=True)
    spectrum, vectors = torch.linalg.eigh(centred.mT @ centred)
    check_close(potential.lipschitz(), 0.7 * spectrum[..., -1] / 0.2, 1e-12)
    assert potential.bounded_below(math.inf) is True
    assert NormalisedScores(keys, 0.7, eps=0.0).lipschitz() is None
    # Reached where all scores are the same: at z = 0, along the last eigenvector.
    v = vectors[..., -1][:, None]
    check_close(potential.covariance_product(0 * v, v).norm(dim=-1)[:, 0], potential.lipschitz(), 1e-12)


@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_a_query_of_one_key_has_mean_zero_and_finite_gradients(eps):
    keys, z = random(*KEYS).requires_grad_(), random(2, 3, 5, seed=1).requires_grad_()
    value, mean = NormalisedScores(keys, 0.7, eps=eps, mask=some_keys()).evaluate(z)
    assert abs(value[1, 0] - math.sqrt(eps) / 0.7) < 1e-15
    assert mean[1, 0].eq(0).all()
    gradients = torch.autograd.grad(value.sum() + mean.square().sum(), (keys, z), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in gradients), (keys, z))
    assert all(g.isfinite().all() for g in (*gradients, *second))
    assert gradients[1][1, 0].eq(0).all()


def test_without_eps_equal_scores_are_a_kink_of_mean_zero():
    potential, z = NormalisedScores(random(7, 5), 0.7, eps=0.0), torch.zeros(1, 5).double().requires_grad_()
    value, mean = potential.evaluate(z)
    assert value.item() == 0
    assert mean.eq(0).all()
    assert torch.autograd.grad(value.sum(), z)[0].eq(0).all()
    assert potential.value(z * torch.nan).isnan().all()
