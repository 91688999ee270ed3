"""SoftcapLogSumExp: the contract, capped attention as read-out, and what capping changes."""

import math

import torch
from key_pairs import KEYS, pairs

from implicit_attention import LogSumExp
from implicit_attention.diagnostics import effective_keys
from implicit_attention.potentials import SoftcapLogSumExp
from implicit_attention.testing.numerics import check_close, random
from implicit_attention.testing.potential import PotentialContract

CAP = 1.5  # below most scores, so that it is felt


class TestPlain(PotentialContract):
    def make(self, dtype):
        return SoftcapLogSumExp(random(*KEYS, dtype=dtype), 0.7, CAP)


class TestMaskAndBias(PotentialContract):
    def make(self, dtype):
        return SoftcapLogSumExp(random(*KEYS, dtype=dtype), cap=CAP, **pairs(dtype))


def test_the_read_out_is_capped_attention():
    z, keys, values = random(2, 3, 5), random(2, 7, 5, seed=1), random(2, 7, 4, seed=2)
    potential = SoftcapLogSumExp(keys, 0.9, CAP)
    # As its authors write it.
    expected = (CAP * torch.tanh(0.9 * z @ keys.mT / CAP)).softmax(-1) @ values
    check_close(potential.readout(z, values), expected, 1e-12)
    # Its mean is not that read-out over the keys, whose Jacobian is not symmetric.
    assert (potential.mean(z) - potential.readout(z, keys)).abs().max() > 0.05


def test_a_large_cap_is_no_cap():
    z, keys = random(2, 3, 5), random(2, 7, 5, seed=1)
    for capped, plain in zip(
        SoftcapLogSumExp(keys, 0.9, 1e7).evaluate(z), LogSumExp(keys, 0.9).evaluate(z), strict=True
    ):
        check_close(capped, plain, 1e-12)


def test_the_cap_bounds_how_far_weights_differ():
    # Scores between -cap and cap: no weight is more than exp(2 cap) times another.
    potential, z = SoftcapLogSumExp(random(2, 50, 5, seed=1), 100.0, 0.5), random(2, 3, 5)
    weights = potential.probabilities(z)
    assert (weights.amax(-1) / weights.amin(-1)).max() <= math.e + 1e-9
    assert effective_keys(potential, z).min() > 40
