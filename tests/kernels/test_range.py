"""What lies outside its range and was not seen at the door is told, not computed with; what is large is no error."""

import pytest
import torch

from implicit_attention import AnchoredEnergy, LogSumExp, Picard, Status, equilibrium_attention, solve
from implicit_attention.kernels import hopfield_solve
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


def test_nan_in_beta_is_bad_data_and_no_bad_argument():
    found = hopfield_solve(torch.ones(2, 3, 4), torch.ones(2, 5, 4), beta=torch.tensor([0.5, torch.nan]))
    assert found.status[0].eq(Status.CONVERGED).all()
    assert found.status[1].eq(Status.NONFINITE).all()


def by_operation(query, keys, offset, impl):
    options = {"beta": 1.0, "anchor": 0.5, "is_causal": True, "query_offset": offset, "rtol": 1e-6}
    return hopfield_solve(query, keys, **options, impl=impl).state


def by_attention(query, keys, offset, impl):
    return equilibrium_attention(query, keys, keys, anchor=0.5, is_causal=True, query_offset=offset, impl=impl)


def by_potential(query, keys, offset, impl):
    energy = AnchoredEnergy(LogSumExp(keys, 1.0, query_offset=offset), query, 0.5)
    return solve(energy, query, impl=impl).value


@pytest.mark.parametrize("door", [by_operation, by_attention, by_potential])
@pytest.mark.parametrize("impl", ["auto", "native", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_large_offset_hides_no_key(door, impl, dtype):
    query, keys = random(2, 3, 4, dtype=dtype), random(2, 5, 4, seed=1, dtype=dtype)
    expected = door(query, keys, keys.shape[-2], impl)
    for offset in (2**31 - 1, 2**31, 2**32, 2**53, 2**62):
        assert torch.equal(door(query, keys, offset, impl), expected)


#: dtype -> sizes of numbers whose squares are no numbers of it, and one whose residuals' squares are none.
SIZES = {torch.float32: (1e-30, 1e-25, 1e-19, 1e25), torch.float64: (1e-250, 1e-200, 1e-154, 1e200)}


@pytest.mark.parametrize("impl", ["native", "auto", "reference"])
@pytest.mark.parametrize(("dtype", "size"), [(dtype, size) for dtype, sizes in SIZES.items() for size in sizes])
def test_numbers_whose_squares_are_none_are_judged_by_their_size(dtype, size, impl):
    query, keys = random(2, 9, 8), random(2, 70, 8, seed=1)
    # Of scores that are all alike one evaluation tells the state; with the largest beta that there is they differ.
    beta = min(1 / size / size, 0.5 * torch.finfo(dtype).max)
    keys, beta = (keys, 1e-30) if size > 1 else (size * keys, beta)
    given = [t.to(dtype) for t in (size * query, keys)]
    options = {"beta": beta, "anchor": 0.5, "rtol": 1e-6, "atol": 0.0, "impl": impl}
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
        # Neighbours of ordinary size keep their bits.
        ordinary = random(2, 9, 8, seed=2).to(dtype)
        mixed = torch.cat([ordinary, given[0]], -2)
        alone, both = (hopfield_solve(q, given[1], **options).state for q in (ordinary, mixed))
        assert torch.equal(both[:, :9], alone)
