"""What lies outside its range and was not seen at the door is told, not computed with."""

import pytest
import torch

from implicit_attention import AnchoredEnergy, LogSumExp, Picard, Status, solve
from implicit_attention.ops.api import laid_out
from implicit_attention.ops.tiled.rows import Rows
from implicit_attention.testing.numerics import random


@pytest.mark.parametrize("bad", [-0.5, 1.5])
def test_an_anchor_that_left_its_range_is_not_solved_with(bad):
    query, keys = random(2, 3, 5, 4), random(2, 3, 70, 4, seed=1)
    anchor = torch.full((3,), 0.5, dtype=query.dtype)
    energy = AnchoredEnergy(LogSumExp(keys, 0.5), query, anchor)
    with torch.no_grad():
        anchor[1] = bad
    solution = solve(energy, query, solver=Picard(), on_failure="ignore")
    assert (solution.status[:, 1] == Status.NONFINITE).all()
    assert (solution.status[:, [0, 2]] == Status.CONVERGED).all()


def test_groups_of_sets_are_made_without_a_look_of_the_host():
    query, keys = torch.empty(6, 16, 4, device="meta"), torch.empty(6, 64, 4, device="meta")
    rows = Rows(laid_out(query, keys, beta=1.0, anchor=0.5, mask=None, is_causal=False), fused=True)
    assert [part.sets for part, _ in rows.parts(2 * 16 * 64)] == [2, 2, 2]
