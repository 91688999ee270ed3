"""What lies outside its range and was not seen at the door is told, not computed with."""

import pytest
import torch

from implicit_attention import AnchoredEnergy, LogSumExp, Picard, Status, solve
from implicit_attention.ops import dispatch, hopfield_solve
from implicit_attention.ops.api import laid_out
from implicit_attention.ops.tiled.rows import TiledRows
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
    rows = TiledRows(laid_out(query, keys, beta=1.0, anchor=0.5, mask=None, is_causal=False), fused=True)
    assert [part.sets for part, _ in rows.parts(2 * 16 * 64)] == [2, 2, 2]


BACKENDS = {"native": "native", "tiled, fused": "tiled", "tiled": "auto"}
#: dtype -> sizes of numbers whose squares are no numbers of it, and one whose residuals' squares are none.
SIZES = {torch.float32: (1e-30, 1e-25, 1e-19, 1e25), torch.float64: (1e-250, 1e-200, 1e-154, 1e200)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "size"), [(dtype, size) for dtype, sizes in SIZES.items() for size in sizes])
def test_numbers_whose_squares_are_none_are_judged_by_their_size(dtype, size, backend, monkeypatch):
    query, keys = random(2, 9, 8), random(2, 70, 8, seed=1)
    # Of scores that are all alike one evaluation tells the state; with the largest beta that there is they differ.
    beta = min(1 / size / size, 0.5 * torch.finfo(dtype).max)
    keys, beta = (keys, 1e-30) if size > 1 else (size * keys, beta)
    given = [t.to(dtype) for t in (size * query, keys)]
    if backend != "native":
        monkeypatch.setattr(dispatch, "NATIVE_DTYPES", ())
    # Neighbours of ordinary size keep their bits.
    ordinary = random(2, 9, 8, seed=2).to(dtype)
    options = {"beta": beta, "anchor": 0.5, "rtol": 1e-6, "atol": 0.0, "impl": BACKENDS[backend]}
    found = hopfield_solve(*given, **options, max_steps=1000)
    assert (found.status == Status.CONVERGED).all()
    wide_keys = given[1].double()
    z = found.state.double()
    # In units of the size, so that float64 holds the squares.
    scores = beta * size * (z / size) @ wide_keys.mT
    f = 0.5 * given[0].double() / size + 0.5 * scores.softmax(-1) @ (wide_keys / size)
    true, length = (t.norm(dim=-1) for t in (f - z / size, f))
    rounding = 1e2 * torch.finfo(dtype).eps * length
    assert (true <= 1e-6 * length + rounding).all()
    assert ((found.residual.double() / size - true).abs() <= rounding).all()
    if size > 1:
        mixed = torch.cat([ordinary, given[0]], -2)
        alone, both = (hopfield_solve(q, given[1], **options).state for q in (ordinary, mixed))
        assert torch.equal(both[:, :9], alone)
