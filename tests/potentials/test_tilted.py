"""Tilted: the potential contract, tilted sums as sums with another bias, restriction to rows, and errors."""

import pytest
import torch

from implicit_attention import AnchoredEnergy, Anderson, LogSumExp, SquaredScores, solve
from implicit_attention.potentials import HiddenUnits, PoissonUnits, SelfAttention, Tilted
from implicit_attention.testing.numerics import random, relative_error
from implicit_attention.testing.potential import PotentialContract

KEYS = (2, 7, 5)


class TestOneTilt(PotentialContract):
    def make(self, dtype):
        return Tilted(LogSumExp(random(*KEYS, dtype=dtype), 0.7), random(5, seed=3, dtype=dtype))


class TestATiltPerProblem(PotentialContract):
    def make(self, dtype):
        return Tilted(LogSumExp(random(*KEYS, dtype=dtype), 0.7), random(2, 3, 5, seed=3, dtype=dtype))


def test_a_tilted_log_sum_exp_has_another_bias():
    keys, tilt, z, v = random(*KEYS), random(5, seed=3), random(2, 3, 5, seed=1), random(2, 3, 5, seed=2)
    phi = Tilted(LogSumExp(keys, 0.7), tilt)
    scores = 0.7 * keys @ tilt
    biased = LogSumExp(keys, 0.7, bias=(scores - scores.logsumexp(-1, keepdim=True))[:, None])
    torch.testing.assert_close(phi.value(z), biased.value(z))
    torch.testing.assert_close(phi.mean(z), biased.mean(z))
    torch.testing.assert_close(phi.covariance_product(z, v), biased.covariance_product(z, v))
    zero = torch.zeros_like(z)
    assert phi.value(zero).abs().max() == 0
    torch.testing.assert_close(phi.mean(zero), LogSumExp(keys, 0.7).mean(tilt.expand_as(z)))


def test_tilting_a_poisson_law_changes_its_rate():
    tilted = Tilted(HiddenUnits(torch.ones(1, 1).double(), PoissonUnits(2.0)), torch.tensor([0.7]).double())
    other = HiddenUnits(torch.ones(1, 1).double(), PoissonUnits(2.0 * torch.tensor(0.7).double().exp().item()))
    z = random(4, 1)
    torch.testing.assert_close(tilted.value(z), other.value(z))
    torch.testing.assert_close(tilted.mean(z), other.mean(z))


@pytest.mark.parametrize("shape", [(5,), (2, 3, 5)], ids=["one", "per problem"])
def test_equilibria_and_their_gradients(shape):
    tensors = [random(2, 3, 5), random(*KEYS, seed=1), random(*shape, seed=3)]
    query, keys, tilt = (t.requires_grad_() for t in tensors)
    energy = AnchoredEnergy(Tilted(LogSumExp(keys, 0.5), tilt), query, 0.4)
    found = solve(energy, query.detach(), solver=Anderson(rtol=1e-13, atol=1e-13))
    z = query
    for _ in range(150):
        z = 0.4 * query + 0.6 * LogSumExp(keys, 0.5).mean(z + tilt)
    assert found.converged.all()
    assert relative_error(found.value, z) < 1e-11
    got, expected = (torch.autograd.grad(v.square().sum(), [query, keys, tilt]) for v in (found.value, z))
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) < 1e-9


def test_rows_are_restricted_with_their_tilts():
    phi, z = Tilted(LogSumExp(random(*KEYS), 0.7), random(2, 3, 5, seed=3)), random(2, 3, 5, seed=1)
    index = torch.tensor([[2, 0], [1, 1]])
    rows = z.gather(1, index[..., None].expand(2, 2, 5))
    expected = phi.mean(z).gather(1, index[..., None].expand(2, 2, 5))
    torch.testing.assert_close(phi.select(index).mean(rows), expected)


def test_samples_of_tokens_are_tilted_together():
    phi, z = Tilted(SelfAttention(0.5), random(4, 5, seed=3)), random(2, 4, 5, seed=1)
    assert phi.event_ndim == 2
    expected = SelfAttention(0.5).value(z + phi.tilt) - SelfAttention(0.5).value(phi.tilt[None])
    torch.testing.assert_close(phi.value(z), expected)


def test_bounds_and_errors():
    quadratic = SquaredScores(torch.eye(5).double(), 0.5)
    tilted = Tilted(quadratic, random(5))
    assert tilted.bounded_below(1.9)
    assert not tilted.bounded_below(2.1)
    torch.testing.assert_close(tilted.lipschitz(), quadratic.lipschitz())
    with pytest.raises(TypeError, match="`tilt` must"):
        Tilted(quadratic, 1.0)
    with pytest.raises(ValueError, match="`tilt` must broadcast"):
        AnchoredEnergy(Tilted(quadratic, random(4)), random(2, 3, 5), 0.5)
    with pytest.raises(ValueError, match="raise the anchor above"):
        AnchoredEnergy(Tilted(SquaredScores(torch.eye(5).double(), 2.0), random(5)), random(2, 3, 5), 0.4)
