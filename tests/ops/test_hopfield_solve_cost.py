"""What `hopfield_solve` costs: memory, evaluations of queries that are done, and looks of the host."""

import pytest
import torch
from hopfield_cases import make

from implicit_attention._fused_rule import FusedRule
from implicit_attention.ops import dispatch, hopfield_solve
from implicit_attention.ops.api import laid_out
from implicit_attention.testing.numerics import random
from implicit_attention.testing.potential import Allocations


def run_it(query, keys, *, mask=None, is_causal=False, **stop):
    """Plain computation, of which a dispatch mode sees every part."""
    problem = laid_out(query, keys, beta=0.2, anchor=0.2, mask=mask, is_causal=is_causal)
    rule = FusedRule(**{"rtol": 1e-4, "atol": 1e-8, "max_steps": 30, "plain_steps": 3, **stop})
    return dispatch.solve(problem, query, rule, "auto")


@pytest.fixture
def without_kernel(monkeypatch):
    """Products are written out, as where torch has no attention kernel."""
    return lambda: monkeypatch.setattr(dispatch, "without_kernel", lambda problem: "it is not there")


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_scores_are_never_stored(is_causal, without_kernel):
    query, keys = random(512, 16), random(512, 16, seed=1)
    stop = {"rtol": 0.0, "atol": 0.0, "max_steps": 6} if is_causal else {}
    with Allocations() as seen:
        run_it(query, keys, is_causal=is_causal, **stop)
    assert seen.largest < 512 * 64
    without_kernel()
    with Allocations() as seen:
        run_it(query, keys, is_causal=is_causal)
    assert seen.largest >= 512 * 512


@pytest.mark.parametrize(
    ("shape", "matrices"), [((64, 128), 1), ((2, 1, 64, 128), 2), ((2, 1, 1, 128), 1), ((4, 64, 128), 8)]
)
def test_masks_are_not_copied_per_head(shape, matrices):
    """2 samples of 4 heads: what is made of a mask, in matrices (64, 128)."""
    query, keys = random(2, 4, 64, 8), random(2, 4, 128, 8, seed=1)
    with Allocations() as seen:
        run_it(query, keys, mask=random(*shape, seed=2) > -1, rtol=0.0, atol=0.0)
    assert seen.largest <= matrices * 64 * 128


def test_keys_that_broadcast_are_not_copied(without_kernel):
    query, keys = random(4, 3, 8, 64), random(128, 64, seed=1)
    # The weights that are written out are as many numbers as a copy of the keys for every two of the twelve.
    for largest in (128 * 64, 4 * 3 * 8 * 128):
        with Allocations() as seen:
            run_it(query, keys)
        assert seen.largest <= largest
        without_kernel()


def test_finished_queries_cost_nothing():
    """One query of many is hard: evaluations of the others are not paid for until it is done."""
    query, keys = random(512, 16), random(128, 16, seed=1)
    sizes = []

    class Sizes(Allocations):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "flash" in str(function):
                sizes.append(args[0].shape[-2])
            return super().__torch_dispatch__(function, types, args, kwargs)

    initial = hopfield_solve(query, keys, beta=0.2, anchor=0.2, rtol=1e-7).state
    initial[100] = 3.0
    problem = laid_out(query, keys, beta=0.2, anchor=0.2, mask=None, is_causal=False)
    with Sizes():
        dispatch.solve(problem, initial, FusedRule(1e-5, 0.0, 50, 3), "tiled")
    assert sizes[0] == 512
    assert len(sizes) > 3
    assert set(sizes[1:]) == {8}


@pytest.mark.parametrize(
    "case", ["plain", "causal", "key padding", "grouped and masked", "one memory", "anchor of each head"]
)
def test_a_fixed_budget_never_waits_for_an_accelerator(case):
    """Tensors without data: every look of the host at a number is an error."""
    query, keys, options = make(case, torch.float32)
    query, keys = query.to("meta"), keys.to("meta")
    options = {name: t.to("meta") if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    problem = laid_out(query, keys, **{"mask": None, "is_causal": False, **options})
    for plain_steps in (2, 9):
        found = dispatch.solve(problem, query, FusedRule(0.0, 0.0, 6, plain_steps), "auto")
        assert found.state.shape == query.shape
    with pytest.raises(NotImplementedError, match="meta"):
        dispatch.solve(problem, query, FusedRule(1e-4, 0.0, 6, 3), "auto")
