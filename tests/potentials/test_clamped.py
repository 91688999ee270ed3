"""Potentials of states with known entries: the contract, and what patterns say of unknown entries."""

import pytest
import torch

from implicit_attention import LogSumExp, SquaredScores
from implicit_attention.potentials import DistanceLogSumExp
from implicit_attention.potentials._clamped import Clamped, filled
from implicit_attention.testing.numerics import random, relative_error
from implicit_attention.testing.potential import PotentialContract

KNOWN = random(2, 3, 5, seed=8) > 0


def clamped(potential, dtype=torch.float64):
    return Clamped(potential, KNOWN, random(2, 3, 5, seed=9, dtype=dtype))


class TestClampedDistances(PotentialContract):
    def make(self, dtype):
        return clamped(DistanceLogSumExp(random(2, 7, 5, dtype=dtype), 0.7), dtype)


class TestClampedDotProducts(PotentialContract):
    def make(self, dtype):
        return clamped(LogSumExp(random(2, 7, 5, dtype=dtype), 0.7), dtype)


class TestClampedWithoutWeights(PotentialContract):
    def make(self, dtype):
        return clamped(SquaredScores(random(2, 7, 5, dtype=dtype), 0.1), dtype)


def test_nothing_known_is_the_potential_itself_and_all_known_is_constant():
    potential, z = LogSumExp(random(2, 7, 5), 0.7), random(2, 3, 5, seed=1)
    free = Clamped(potential, torch.zeros_like(KNOWN), torch.zeros_like(z))
    for name in ("value", "mean"):
        assert torch.equal(getattr(free, name)(z), getattr(potential, name)(z))
    held = Clamped(potential, torch.ones_like(KNOWN), random(2, 3, 5, seed=9))
    assert torch.equal(held.mean(z), held.at)
    assert held.covariance_product(z, z).abs().max() == 0


def test_filled_entries_are_conditional_means_of_gaussians():
    patterns, queries, beta = random(7, 5), random(2, 3, 5, seed=1), torch.tensor(0.7, dtype=torch.float64)
    expected = queries.clone()
    for i in range(2):
        for j in range(3):
            on = KNOWN[i, j]
            distances = (queries[i, j, on] - patterns[:, on]).square().sum(-1)
            expected[i, j, ~on] = ((-0.35 * distances).softmax(0) @ patterns)[~on]
    torch.testing.assert_close(filled(queries, KNOWN, patterns, beta), expected, rtol=1e-12, atol=1e-13)
    # The conditional means by the density itself: integrated over a grid of the one entry that is unknown.
    one, grid = torch.arange(5) < 4, torch.linspace(-12, 12, 4001, dtype=torch.float64)
    points = torch.cat([queries[0, 0, :4].expand(len(grid), 4), grid[:, None]], -1)
    density = (-0.35 * torch.cdist(points, patterns).square()).exp().sum(-1)
    found = filled(queries[:1, :1], one, patterns, beta)[0, 0]
    torch.testing.assert_close(found[4], (density * grid).sum() / density.sum(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_fills_nearly_the_same(dtype):
    patterns, queries = random(7, 5) + 20, random(2, 3, 5, seed=1) + 20
    found = filled(queries.to(dtype), KNOWN, patterns.to(dtype), 0.7)
    assert found.dtype == dtype
    rounded = (queries.to(dtype).double(), KNOWN, patterns.to(dtype).double(), 0.7)
    assert relative_error(found, filled(*rounded)) < (1e-6 if dtype == torch.float32 else 1e-2)
