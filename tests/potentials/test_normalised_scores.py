"""NormalisedScores: the contract, printed numbers, a layer norm over keys, convexity, keys that are left out."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F

from implicit_attention import AnchoredEnergy, Anderson, Implicit, ImplicitAttention, NewtonKrylov, solve
from implicit_attention.linear import CG
from implicit_attention.potentials import NormalisedScores, ReadsOut
from implicit_attention.testing.numerics import random, relative_error
from implicit_attention.testing.potential import PotentialContract

KEYS = (2, 7, 5)


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


def empty_row():
    """Row (0, 1) reads no key, row (1, 0) but one."""
    mask = random(2, 3, 7, seed=9) > 0
    mask[0, 1] = False
    mask[1, 0] = torch.arange(7) == 3
    return mask


class TestPlain(PotentialContract):
    def make(self, dtype):
        return NormalisedScores(random(*KEYS, dtype=dtype), 0.7)


class TestMaskAndBias(PotentialContract):
    def make(self, dtype):
        beta = torch.tensor([0.5, 1.3], dtype=torch.float64).to(dtype)
        bias = random(2, 3, 7, seed=4, dtype=dtype)
        bias[..., 2] = -torch.inf
        # As large as the variance, so that it is felt.
        return NormalisedScores(random(*KEYS, dtype=dtype), beta, mask=empty_row(), bias=bias, eps=0.5)


class TestSharedKeysWithoutEps(PotentialContract):
    def make(self, dtype):
        mask = torch.tensor([1, 1, 0, 1, 1, 0, 1], dtype=torch.bool)
        return NormalisedScores(random(7, 5, dtype=dtype), torch.tensor(0.8, dtype=dtype), mask=mask, eps=0.0)


def test_printed_numbers():
    keys = torch.tensor([[1, 0.5], [-0.5, 1.2], [0.3, -1], [-1, -0.4]], dtype=torch.float64)
    z, v = torch.tensor([[[0.6, -0.3]], [[0.5, -1]]], dtype=torch.float64)
    potential = NormalisedScores(keys, 1.5)
    for got, expected, places in (
        (potential.value(z), 2.086041972519, 12),
        (potential.mean(z), [2.672045947987, -1.609267715714], 12),
        (potential.covariance_product(z, v), [-1.567538955, -3.135238344], 9),
    ):
        expected = torch.tensor([expected], dtype=torch.float64)
        torch.testing.assert_close(got, expected, rtol=0, atol=0.51 * 10**-places)


@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_its_weights_are_a_layer_norm_over_the_keys_that_are_read(eps):
    keys, z, bias = random(*KEYS), random(2, 3, 5, seed=1), random(2, 3, 7, seed=4)
    mask, beta = empty_row(), (0.5, 1.3)
    potential = NormalisedScores(keys, torch.tensor(beta, dtype=torch.float64), mask=mask, bias=bias, eps=eps)
    value, mean = potential.evaluate(z)
    for b in range(2):
        for n in range(3):
            read = keys[b, mask[b, n]]
            scores = beta[b] * read @ z[b, n] + bias[b, n, mask[b, n]]
            count = len(scores)
            if count == 0:
                assert value[b, n] == 0
                assert mean[b, n].eq(0).all()
                continue
            close(mean[b, n], F.layer_norm(scores, (count,), eps=eps) @ read)
            close(value[b, n], count / beta[b] * (scores.var(correction=0) + eps).sqrt())


def test_it_does_not_change_when_all_keys_or_biases_are_shifted():
    keys, z, v, shift = random(*KEYS), random(2, 3, 5, seed=1), random(2, 3, 5, seed=2), random(1, 5, seed=3)
    a, b = NormalisedScores(keys, 0.7), NormalisedScores(keys + shift, 0.7, bias=torch.full((7,), 3.0).double())
    close(a.value(z), b.value(z))
    close(a.mean(z), b.mean(z))
    close(a.covariance_product(z, v), b.covariance_product(z, v))


@pytest.mark.parametrize("eps", [0.0, 1e-5, 1.0])
def test_it_is_convex(eps):
    """It is the norm of an affine function of z: its Hessians have no negative eigenvalue."""
    for seed in range(5):
        mask, bias = random(7, seed=seed + 50) > -0.5, random(7, seed=seed + 90)
        potential = NormalisedScores(random(7, 5, seed=seed), 0.9, mask=mask, bias=bias, eps=eps)
        assert potential.convex
        z = random(20, 5, seed=seed + 20) * torch.logspace(-3, 1, 20).double()[:, None]
        identity = torch.eye(5).double()
        hessians = torch.stack([potential.covariance_product(z, e.expand(20, 5)) for e in identity], -1)
        spectrum = torch.linalg.eigvalsh(hessians)
        assert bool((spectrum >= -1e-12 * spectrum.amax(-1, keepdim=True)).all())
        # The same as a norm.
        read = potential.keys[mask]
        affine = 0.9 * z @ read.mT + bias[mask]
        centred = affine - affine.mean(-1, keepdim=True)
        rest = torch.full((20, 1), math.sqrt(len(read) * eps), dtype=torch.float64)
        norm = torch.cat([centred, rest], -1).norm(dim=-1)
        close(potential.value(z), math.sqrt(len(read)) / 0.9 * norm)


def test_means_leave_the_hull_of_the_keys():
    keys, z = random(7, 5), random(3, 5, seed=1)
    assert (NormalisedScores(keys, 1.0).mean(z).norm(dim=-1) > keys.norm(dim=-1).max()).all()


def test_bounds():
    keys = random(*KEYS)
    potential = NormalisedScores(keys, 0.7, eps=0.04)
    centred = keys - keys.mean(-2, keepdim=True)
    close(potential.lipschitz(), 0.7 * torch.linalg.eigvalsh(centred.mT @ centred)[..., -1] / 0.2)
    assert potential.bounded_below(math.inf) is True
    assert NormalisedScores(keys, 0.7, eps=0.0).lipschitz() is None
    # Reached where all scores are the same: at z = 0, along the first eigenvector.
    v = torch.linalg.eigh(centred.mT @ centred).eigenvectors[..., -1][:, None]
    close(potential.covariance_product(0 * v, v).norm(dim=-1)[:, 0], potential.lipschitz())


@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_queries_of_no_key_and_of_one_are_zero_with_finite_gradients(eps):
    keys, z = random(*KEYS).requires_grad_(), random(2, 3, 5, seed=1).requires_grad_()
    mask = empty_row()
    for options in ({"mask": mask}, {"bias": torch.zeros(2, 3, 7).double().where(mask, -torch.inf)}):
        potential = NormalisedScores(keys, 0.7, eps=eps, **options)
        value, mean = potential.evaluate(z)
        assert value[0, 1] == 0
        assert abs(value[1, 0] - math.sqrt(eps) / 0.7) < 1e-15
        assert mean[0, 1].eq(0).all()
        assert mean[1, 0].eq(0).all()
        gradients = torch.autograd.grad(value.sum() + mean.square().sum(), (keys, z), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in gradients), (keys, z))
        assert all(g.isfinite().all() for g in (*gradients, *second))
        assert gradients[1][0, 1].eq(0).all()
        assert gradients[1][1, 0].eq(0).all()
        assert potential.covariance_product(z, z)[0, 1].eq(0).all()


def test_without_eps_equal_scores_are_a_kink_of_mean_zero():
    keys, z = random(7, 5), torch.zeros(1, 5).double().requires_grad_()
    value, mean = NormalisedScores(keys, 0.7, eps=0.0).evaluate(z)
    assert value.item() == 0
    assert mean.eq(0).all()
    assert torch.autograd.grad(value.sum(), z)[0].eq(0).all()
    assert NormalisedScores(keys, 0.7, eps=0.0).value(z * torch.nan).isnan().all()


def test_what_is_not_read_changes_nothing():
    keys, z = random(*KEYS), random(2, 3, 5, seed=1).requires_grad_()
    mask = torch.ones(2, 3, 7, dtype=torch.bool)
    mask[:, 1:, 4] = False
    plain = NormalisedScores(keys, 0.7, mask=mask)
    expected, by_z = plain.evaluate(z), torch.autograd.grad(plain.mean(z)[:, 1:].square().sum(), z)[0]
    for poison in (torch.nan, torch.inf, 1e200):
        poisoned = keys.clone()
        poisoned[:, 4] = poison
        potential = NormalisedScores(poisoned, 0.7, mask=mask)
        for got, want in zip(potential.evaluate(z), expected, strict=True):
            assert torch.equal(got[:, 1:], want[:, 1:])
            assert not torch.equal(got[:, 0], want[:, 0])
        mean = potential.mean(z)
        assert poison == 1e200 or mean[:, 0].isnan().all()
        assert torch.equal(torch.autograd.grad(mean[:, 1:].square().sum(), z)[0][:, 1:], by_z[:, 1:])
        assert NormalisedScores(poisoned, 0.7, mask=mask[:, 1:2]).lipschitz().isfinite().all()


def test_keys_in_any_layout():
    keys, z, mask, expected = random(*KEYS), random(2, 3, 5, seed=1), empty_row(), None
    strided = torch.zeros(2, 14, 10).double()
    strided[:, ::2, ::2] = keys
    for k in (keys, keys.mT.contiguous().mT, strided[:, ::2, ::2]):
        for x in (z, z.mT.contiguous().mT):
            potential = NormalisedScores(k, 0.7, mask=mask.mT.contiguous().mT)
            found = (*potential.evaluate(x), potential.covariance_product(x, x))
            expected = found if expected is None else expected
            for got, want in zip(found, expected, strict=True):
                close(got, want)
    one = NormalisedScores(keys[:1], 0.7, mask=mask[:1, :1])
    many = NormalisedScores(keys[:1].expand(2, 7, 5), 0.7, mask=mask[:1, :1].expand(2, 3, 7))
    close(one.mean(z), many.mean(z))


def test_equilibria_and_their_gradients():
    tensors = [random(2, 3, 5), random(2, 7, 5, seed=1), torch.tensor([0.5, 0.8]).double(), random(7, seed=4)]
    query, keys, beta, bias = (t.requires_grad_() for t in tensors)
    energy = AnchoredEnergy(NormalisedScores(keys, beta, bias=bias, mask=empty_row()), query, 0.4)
    tight = Anderson(rtol=1e-13, atol=1e-13)
    found = solve(energy, query.detach(), solver=tight, adjoint=Implicit(CG(rtol=1e-12)))
    z = found.value.detach()
    for _ in range(300):
        z = 0.4 * query + 0.6 * energy.potential.mean(z)
    assert relative_error(found.value, z) < 1e-11
    cotangent = random(2, 3, 5, seed=8)
    got, expected = (torch.autograd.grad(v, [query, keys, beta, bias], cotangent) for v in (found.value, z))
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) < 1e-9
    newton = solve(energy, found.value.detach() + 1e-3, solver=NewtonKrylov(rtol=1e-12, atol=1e-12))
    assert relative_error(newton.value, z) < 1e-10


@pytest.mark.parametrize("causal", [False, True])
def test_a_layer_trains_a_step(causal):
    torch.manual_seed(0)
    layer = ImplicitAttention(8, 2, potential=NormalisedScores, readout="state", causal=causal)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    x, losses = random(2, 6, 8, dtype=torch.float32), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            loss = (layer(x) - x).square().mean()
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
            optimizer.step()
    assert layer.last_solve.converged.all()
    assert losses[1] < losses[0]


def test_there_is_nothing_to_read_out():
    assert not issubclass(NormalisedScores, ReadsOut)
    with pytest.raises(ValueError, match="`readout` must be 'state' with NormalisedScores"):
        ImplicitAttention(8, 2, potential=NormalisedScores)


@pytest.mark.parametrize("eps", [-1e-5, math.inf, math.nan])
def test_eps_is_not_negative(eps):
    with pytest.raises(ValueError, match=f"`eps` must be >= 0, got {eps}"):
        NormalisedScores(random(*KEYS), 0.7, eps=eps)
