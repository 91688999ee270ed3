"""The weights of Anderson's steps, against dense least squares."""

import pytest
import torch

from implicit_attention import Anderson
from implicit_attention.solvers.anderson import AndersonHistory
from implicit_attention.testing.numerics import random


def weights(dr, r, valid):
    count = len(dr)
    gram = tuple(tuple((dr[i] * dr[j]).sum(-1) for j in range(i, count)) for i in range(count))
    return torch.stack(Anderson()._weights(AndersonHistory(tuple(dr), tuple(dr), gram, tuple(valid)), r), -1)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("whole", [True, False])
def test_weights_are_those_of_least_squares_over_valid_columns(count, whole):
    dr, r = [random(4, 50, seed=i) for i in range(count)], random(4, 50, seed=9)
    valid = [torch.tensor([True, True, True, whole or i == 0]) for i in range(count)]
    found = weights(dr, r, valid)
    for row in range(4):
        columns = [i for i in range(count) if valid[i][row]]
        expected = torch.zeros(count, dtype=torch.float64)
        matrix = torch.stack([dr[i][row] for i in columns], -1)
        expected[columns] = torch.linalg.lstsq(matrix, r[row, :, None]).solution[:, 0]
        torch.testing.assert_close(found[row], expected, rtol=1e-6, atol=1e-8)


def test_a_column_that_depends_on_newer_ones_has_no_weight_and_spoils_no_other():
    first, third, r = random(2, 50), random(2, 50, seed=2).float(), random(2, 50, seed=9).float()
    first = first.float()
    found = weights([first, 2 * first, third], r, [torch.ones(2, dtype=torch.bool)] * 3)
    expected = weights([first, third], r, [torch.ones(2, dtype=torch.bool)] * 2)
    assert found[:, 1].eq(0).all()
    torch.testing.assert_close(found[:, [0, 2]], expected, rtol=1e-4, atol=1e-5)
