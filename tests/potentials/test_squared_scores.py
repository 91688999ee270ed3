"""SquaredScores: the potential contract and its closed-form equilibrium."""

import pytest
import torch

from implicit_attention import AnchoredEnergy, Picard, SquaredScores, solve
from implicit_attention.testing.numerics import random
from implicit_attention.testing.potential import PotentialContract


class TestQuadratic(PotentialContract):
    def make(self, dtype):
        return SquaredScores(random(2, 7, 5, dtype=dtype), torch.tensor([0.02, 0.03], dtype=torch.float64).to(dtype))


class TestMaskedQuadratic(PotentialContract):
    def make(self, dtype):
        mask = torch.tensor([1, 1, 0, 1, 1, 0, 1], dtype=torch.bool)
        return SquaredScores(random(2, 7, 5, dtype=dtype), 0.03, mask=mask)


def test_equilibrium_is_the_solution_of_a_linear_system():
    keys, field, anchor = 0.3 * random(2, 7, 5), random(2, 3, 5, seed=1), 0.4
    solution = solve(AnchoredEnergy(SquaredScores(keys, 0.5), field, anchor), field, solver=Picard(rtol=1e-14, atol=0))
    matrix = torch.eye(5, dtype=torch.float64) - (1 - anchor) * 0.5 * keys.mT @ keys
    torch.testing.assert_close(solution.value, torch.linalg.solve(matrix, anchor * field.mT).mT, rtol=1e-7, atol=1e-7)


def test_bounded_below_follows_the_largest_eigenvalue():
    keys = torch.eye(5)[None]
    assert SquaredScores(keys, 0.9).bounded_below(1.0)
    assert not SquaredScores(keys, 1.1).bounded_below(1.0)
    assert SquaredScores(keys, 1.1).bounded_below(0.8)


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (2, 5)], ids=str)
def test_a_row_has_its_bits_alone_over_the_smallest_keys(size):
    """Matrices so small that torch multiplies them by itself, in an order that depends on how many rows there are."""
    for seed in range(4):
        keys, field = 0.3 * random(*size, seed=seed), random(250, size[1], seed=seed + 9)
        whole = solve(AnchoredEnergy(SquaredScores(keys, 0.5), field, 0.3), field).value
        for rows in (slice(0, 1), slice(1, 18), slice(0, None, 2)):
            alone = solve(AnchoredEnergy(SquaredScores(keys, 0.5), field[rows], 0.3), field[rows]).value
            assert torch.equal(alone, whole[rows])
