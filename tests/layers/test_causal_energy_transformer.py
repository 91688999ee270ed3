"""EnergyTransformer(causal=True): with a cache, and in both modes, no output depends on a later token."""

import copy
import math
import pickle

import pytest
import torch

from implicit_attention import Anderson, Broyden, EnergyTransformer, Picard, Status
from implicit_attention.potentials import LogSumExp
from implicit_attention.testing.numerics import random

TIGHT = Picard(rtol=1e-13, atol=1e-13, max_steps=2000)


def layer(mode="equilibrium", *, dtype=torch.float64, scale=0.25, dim=6, **options):
    """With weights at which attention and memory both matter."""
    if mode == "equilibrium":
        options.setdefault("solver", TIGHT)
    made = EnergyTransformer(dim, 2, 3, 7, mode=mode, causal=True, dtype=dtype, **options)
    with torch.no_grad():
        for i, weight in enumerate((made.w_query, made.w_key, made.memories)):
            weight.copy_(scale * random(*weight.shape, seed=i))
        made.norm.delta.copy_(0.1 * random(dim, seed=3))
    return made


def truth():
    """The layer and the tokens of the ground truth."""
    made = EnergyTransformer(
        4, 2, 2, 5, causal=True, beta=torch.tensor([0.7, 1.1], dtype=torch.float64), dtype=torch.float64
    )
    rows, columns = torch.arange(3.0, dtype=torch.float64), torch.arange(4.0, dtype=torch.float64)
    heads, widths = (torch.arange(2.0, dtype=torch.float64) for _ in range(2))
    by_head = heads[:, None, None], widths[:, None], columns
    with torch.no_grad():
        made.w_query.copy_(torch.cos(1 + 7 * by_head[0] + 3 * by_head[1] + by_head[2]) / 2)
        made.w_key.copy_(torch.sin(2 + 5 * by_head[0] + 2 * by_head[1] + by_head[2]) / 2)
        made.memories.copy_(torch.cos(3 + 2 * torch.arange(5.0).double()[:, None] + 5 * columns) / 2)
        made.norm.delta.copy_(columns / 10)
        made.norm.set_gamma(1.3)
    return made, torch.sin(1 + 4 * rows[:, None] + columns)


def test_ground_truth():
    made, x = truth()
    expected = torch.tensor([1.7705759616, -1.0653887279, -2.9877300330, -1.9280988644], dtype=torch.float64)
    torch.testing.assert_close(made(x, solver=TIGHT)[2], expected, rtol=0, atol=1e-10)
    assert made.last_solve.status.tolist() == [Status.CONVERGED] * 3


def decoded(made, x, sizes, key_masks=None, **options):
    cache, parts = made.new_cache(**options), x.split(sizes, dim=1)
    masks = key_masks or [None] * len(parts)
    found = [made(p, cache=cache, key_mask=m) for p, m in zip(parts, masks, strict=True)]
    return torch.cat(found, dim=1), cache


@pytest.mark.parametrize("exclude_self", [False, True])
def test_a_cache_gives_what_one_call_does(exclude_self):
    made, x = layer(exclude_self=exclude_self), random(3, 6, 6, seed=5).requires_grad_()
    whole = made(x)
    parameters = [x, *made.parameters()]
    by_whole = torch.autograd.grad(whole.square().sum(), parameters)
    for sizes, warm_start in (([1] * 6, False), ([2, 1, 3], True), ([2, 4], False), ([6], True)):
        found, cache = decoded(made, x, sizes, warm_start=warm_start)
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-11)
        # What is held is part of the graph.
        by_found = torch.autograd.grad(found.square().sum(), parameters)
        torch.testing.assert_close(by_found, by_whole, rtol=0, atol=1e-8)
        assert cache.length == cache.num_queries == 6
        assert cache.num_evals.shape == (3, 1)


def test_missing_tokens_beside_a_cache():
    made, x = layer(memory=LogSumExp), random(2, 5, 6, seed=5)
    exist = torch.tensor([[True] * 5, [True, False, True, True, False]])
    spoiled = x.masked_fill(~exist[..., None], math.nan)
    whole = made(spoiled, key_mask=exist)
    assert torch.equal(whole.isnan().any(-1), ~exist)
    solved = made(spoiled, key_mask=exist, return_solution=True)[1].value
    assert torch.equal(solved.eq(0).all(-1), ~exist)
    # As if they were not there.
    alone = made(x[1, [0, 2, 3]])
    torch.testing.assert_close(whole[1, [0, 2, 3]], alone, rtol=0, atol=1e-11)
    for sizes in ([1] * 5, [2, 3]):
        found, _ = decoded(made, spoiled, sizes, exist.split(sizes, dim=1))
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-11, equal_nan=True)
    # Masks may begin late, and end.
    late = exist.clone()
    late[:, :2] = True
    whole = made(x, key_mask=late)
    found, _ = decoded(made, x, [2, 2, 1], [None, late[:, 2:4], late[:, 4:]])
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-11)
    early = torch.ones(2, 5, dtype=torch.bool)
    early[1, 1] = False
    found, _ = decoded(made, x, [2, 3], [early[:, :2], None])
    torch.testing.assert_close(found, made(x, key_mask=early), rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", [Picard(rtol=1e-3), Anderson(), Anderson(history=1, rtol=1e-2), Picard(max_steps=3)])
def test_changing_the_last_token_changes_no_earlier_bit(solver, dtype):
    made, x = layer(dtype=dtype, solver=solver, on_failure="ignore"), random(2, 9, 6, seed=5).to(dtype)
    one, report = made(x), made.last_solve
    for last in (50 * random(2, 6, seed=6).to(dtype), 1e30 * x[:, -1], math.nan, math.inf):
        changed = x.clone()
        changed[:, -1] = last
        two = made(changed)
        assert torch.equal(one[:, :-1], two[:, :-1])
        assert not torch.equal(one[:, -1], two[:, -1])
        for name in ("status", "residual", "num_evals"):
            assert torch.equal(getattr(report, name)[:, :-1], getattr(made.last_solve, name)[:, :-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_changing_the_last_token_changes_no_earlier_bit_of_published_steps(dtype):
    made, x = layer("published", dtype=dtype), random(2, 9, 6, seed=5).to(dtype)
    changed = x.clone()
    changed[:, -1] = 50 * random(2, 6, seed=6).to(dtype)
    one, two = made(x), made(changed)
    assert torch.equal(one[:, :-1], two[:, :-1])
    assert not torch.equal(one[:, -1], two[:, -1])


def test_each_token_converges_by_itself():
    made, x = layer(solver=Picard(rtol=1e-6, atol=0)), random(2, 9, 6, seed=5)
    found, solution = made(x, return_solution=True)
    assert made.last_solve.status.shape == (2, 9)
    assert bool(made.last_solve.converged.all())
    residual = torch.linalg.vector_norm(made._problem(x, None, None).fixed_point_map(found) - found, dim=-1)
    torch.testing.assert_close(solution.residual, residual, rtol=1e-3, atol=1e-12)
    # The first token reads none but itself, and is done as if it were alone.
    alone = made(x[:, :1])
    torch.testing.assert_close(alone, found[:, :1], rtol=0, atol=1e-12)
    evals = made.last_solve.num_evals[:, 0]
    assert torch.equal(solution.num_evals[:, 0], evals)
    assert bool((solution.num_evals[:, 0] < solution.num_evals.amax(-1)).any())


def test_published_steps_are_those_of_a_prefix():
    made, x = layer("published", steps=5, step_size=0.3), random(2, 6, 6, seed=5).requires_grad_()
    whole = made(x)
    assert made.last_solve.status.tolist() == [Status.BUDGET] * 2
    # The first token by hand: it attends to itself alone.
    z = x[:, 0]
    for _ in range(5):
        g = made.norm(z[:, None])[:, 0]
        attended = torch.einsum("bi,hyi,hyj->bj", g, made.w_key, made.w_query)
        z = z + 0.3 * (attended + (g @ made.memories.mT).relu() @ made.memories)
    torch.testing.assert_close(whole[:, 0], z, rtol=0, atol=1e-12)
    for count in (1, 4):
        torch.testing.assert_close(made(x[:, :count]), whole[:, :count], rtol=0, atol=1e-13)
    again = copy.deepcopy(made)
    again.checkpoint = True
    by_kept, by_again = (torch.autograd.grad(m(x).square().sum(), [x, *m.parameters()]) for m in (made, again))
    torch.testing.assert_close(by_again, by_kept, rtol=0, atol=1e-12)
    # Of the outputs of two tokens no gradient reaches a later one.
    (by_x,) = torch.autograd.grad(whole[:, :2].square().sum(), x)
    assert by_x[:, :2].abs().min() > 0
    assert torch.equal(by_x[:, 2:], torch.zeros_like(by_x[:, 2:]))


def test_the_default_solver_makes_plain_steps():
    made, x = layer(solver=None), random(2, 5, 6, seed=5)
    found = made(x)
    assert bool(made.last_solve.converged.all())
    assert torch.equal(found, made(x, solver=Picard(max_steps=1000)))
    # The budget of a call is kept; nothing is solved with 0.
    made(x, max_steps=1, on_failure="ignore")
    assert made.last_solve.num_steps.tolist() == [[1] * 5] * 2
    assert torch.equal(made(x, max_steps=0), x)
    assert made.last_solve.status.tolist() == [[Status.EXPLICIT] * 5] * 2


def test_a_nan_reaches_no_earlier_token_and_no_other_sample():
    made, x = layer(on_failure="ignore"), random(2, 5, 6, seed=5)
    spoiled = x.clone()
    spoiled[0, 3, 1] = math.nan
    good, found = made(x), made(spoiled)
    assert torch.equal(found[0, :3], good[0, :3])
    assert torch.equal(found[1], good[1])
    assert bool(found[0, 3:].isnan().all())
    expected = [[Status.CONVERGED] * 3 + [Status.NONFINITE] * 2, [Status.CONVERGED] * 5]
    assert made.last_solve.status.tolist() == expected
    # Nor does it reach the gradient of a loss of the others.
    by_found, by_good = (
        torch.autograd.grad(t[torch.tensor(expected) == 0].square().sum(), list(made.parameters()))
        for t in (found, good)
    )
    torch.testing.assert_close(by_found, by_good, rtol=0, atol=1e-8)
    # Tokens that follow it in a cache are lost with it.
    cache = made.new_cache()
    made(spoiled[:, :4], cache=cache)
    assert made(x[:, 4:], cache=cache).isnan().any(-1).tolist() == [[True], [False]]


def test_a_nan_reaches_no_other_document():
    made, x = layer(on_failure="ignore"), random(2, 6, 6, seed=5)
    mask = torch.block_diag(torch.ones(2, 2), torch.ones(4, 4)) > 0
    good, spoiled = made(x, mask), x.clone()
    spoiled[1, 0] = math.nan
    found = made(spoiled, mask)
    assert found.isnan().any(-1).tolist() == [[False] * 6, [True, True] + [False] * 4]
    assert torch.equal(found[1, 2:], good[1, 2:])


def test_masks_that_are_mapped_over_and_samples_without_tokens():
    made, x, mask = layer(), random(3, 2, 5, 6, seed=5), random(3, 2, 5, 5, seed=6) > -0.5
    torch.testing.assert_close(torch.vmap(made)(x, mask), made(x, mask), rtol=0, atol=1e-11)
    assert made(x[..., :0, :]).shape == (3, 2, 0, 6)
    assert made.last_solve.status.shape == (3, 2, 0)


def test_half_precision_copies_and_pickles():
    made, x = layer(solver=None).bfloat16(), random(2, 4, 6, seed=5).bfloat16()
    whole = made(x)
    assert whole.dtype == torch.bfloat16
    found, cache = decoded(made, x, [1, 3])
    torch.testing.assert_close(found.float(), whole.float(), rtol=0, atol=0.05)
    other, held = copy.deepcopy((made, cache))
    more = random(2, 1, 6, seed=7).bfloat16()
    assert torch.equal(other(more, cache=held), made(more, cache=cache))
    assert torch.equal(pickle.loads(pickle.dumps(made))(x), whole)


def test_bad_calls_are_refused():
    made, x = layer(), random(2, 4, 6, seed=5)
    with pytest.raises(ValueError, match="`solver` must stop every token of a causal layer on its own, got Broyden"):
        made(x, solver=Broyden())
    with pytest.raises(ValueError, match="`mask` must be None beside a cache"):
        made(x, cache=made.new_cache(), mask=torch.ones(4, 4) > 0)
    # A call that raises leaves the cache as it is.
    cache = made.new_cache()
    made(x, cache=cache)
    with pytest.raises(ValueError, match="`cache` must be used with the batch that it holds"):
        made(x[:1], cache=cache)
    assert cache.length == 4
