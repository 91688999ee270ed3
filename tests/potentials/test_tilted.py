"""Tilted: the potential contract, tilted sums as sums with another bias, and tilts of laws and tokens."""

import pytest
import torch

from implicit_attention import AnchoredEnergy, LogSumExp, SquaredScores
from implicit_attention.potentials import HiddenUnits, PoissonUnits, SelfAttention, Tilted
from implicit_attention.testing.numerics import check_close, random
from implicit_attention.testing.potential import PotentialContract

KEYS, Z = random(2, 7, 5), random(2, 3, 5, seed=1)


class TestOneTilt(PotentialContract):
    shape = (5,)

    def make(self, dtype):
        return Tilted(LogSumExp(KEYS.to(dtype), 0.7), random(*self.shape, seed=3, dtype=dtype))


class TestATiltPerProblem(TestOneTilt):
    shape = (2, 3, 5)


def test_a_tilted_log_sum_exp_has_another_bias():
    tilt = random(5, seed=3)
    phi = Tilted(LogSumExp(KEYS, 0.7), tilt)
    scores = 0.7 * KEYS @ tilt
    biased = LogSumExp(KEYS, 0.7, bias=(scores - scores.logsumexp(-1, keepdim=True))[:, None])
    check_close(tuple(phi.evaluate(Z)), tuple(biased.evaluate(Z)), 1e-12)
    check_close(phi.mean(0 * Z), LogSumExp(KEYS, 0.7).mean(tilt.expand_as(Z)), 1e-12)
    assert phi.value(0 * Z).abs().max() == 0


def test_tilting_a_poisson_law_changes_its_rate():
    weights, tilt = torch.ones(1, 1).double(), torch.tensor([0.7]).double()
    tilted = Tilted(HiddenUnits(weights, PoissonUnits(2.0)), tilt)
    other = HiddenUnits(weights, PoissonUnits(2.0 * tilt.exp().item()))
    check_close(tuple(tilted.evaluate(random(4, 1))), tuple(other.evaluate(random(4, 1))), 1e-12)


def test_samples_of_tokens_are_tilted_together():
    phi, z = Tilted(SelfAttention(0.5), random(4, 5, seed=3)), random(2, 4, 5, seed=1)
    assert phi.event_ndim == 2
    expected = SelfAttention(0.5).value(z + phi.tilt) - SelfAttention(0.5).value(phi.tilt[None])
    check_close(phi.value(z), expected, 1e-12)


def test_a_tilt_changes_no_bound():
    quadratic = SquaredScores(torch.eye(5).double(), 0.5)
    tilted = Tilted(quadratic, random(5))
    assert tilted.bounded_below(1.9)
    assert not tilted.bounded_below(2.1)
    with pytest.raises(ValueError, match=r"raise the anchor above 0\.5"):
        AnchoredEnergy(4.0 * tilted, Z, 0.4)
    check_close(tilted.lipschitz(), quadratic.lipschitz(), 0.0)
