"""Decoding token by token with a cache gives what one causal forward gives."""

import copy
import pickle

import pytest
import torch

from implicit_attention import Anderson, ConvergenceError, ImplicitAttention, Rotary
from implicit_attention.testing.numerics import random

B, N, DIM, HEADS = 2, 12, 16, 4


def layer(*, seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    return ImplicitAttention(DIM, HEADS, dtype=dtype, **{"causal": True, **options})


def tokens(rows=N, dtype=torch.float64):
    return random(B, rows, DIM, dtype=dtype)


def decode(made, x, sizes=None, **options):
    """The outputs of a call for every piece of the sequence, and the cache behind them."""
    cache = made.new_cache(**options)
    pieces = x.split(sizes or 1, dim=-2)
    return torch.cat([made(piece, cache=cache) for piece in pieces], dim=-2), cache


OPTIONS = [{}, {"kv_heads": 2}, {"rotary": Rotary()}, {"readout": "state", "rotary": Rotary()}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "anchor"),
    [(torch.float32, a) for a in (0.3, 0.5, 0.9)] + [(torch.float64, a) for a in (0.0, 0.1, 0.5)],
)
def test_token_by_token_equals_one_forward(options, dtype, anchor):
    made, x = layer(dtype=dtype, anchor=anchor, **options), tokens(dtype=dtype)
    stepwise, cache = decode(made, x)
    torch.testing.assert_close(stepwise, made(x), rtol=1e-6, atol=1e-6)
    assert cache.length == N


def test_past_the_number_of_keys_where_kernels_change():
    # Steps round differently there, and what is left of that at the equilibrium is a part of its tolerance.
    for dtype, rtol, limit, scale in ((torch.float32, 1e-6, 1e-6, 1), (torch.float64, 1e-12, 1e-9, 3)):
        made, x = layer(anchor=0.4, dtype=dtype, solver=Anderson(rtol=rtol)), scale * tokens(80, dtype=dtype)
        stepwise, _ = decode(made, x)
        torch.testing.assert_close(stepwise, made(x), rtol=limit, atol=limit)


@pytest.mark.parametrize("sizes", [[5, 1, 6], [11, 1], [12]])
def test_prompts_and_chunks(sizes):
    made, x = layer(rotary=Rotary()), tokens()
    torch.testing.assert_close(decode(made, x, sizes)[0], made(x), rtol=1e-10, atol=1e-10)


def test_left_padding_is_left_out():
    made, x = layer(), tokens()
    exists = torch.arange(N) >= torch.tensor([[3], [0]])
    full = made(x, key_mask=exists)
    cache = made.new_cache()
    stepwise = torch.cat([made(x[:, i : i + 1], cache=cache, key_mask=exists[:, : i + 1]) for i in range(N)], dim=1)
    torch.testing.assert_close(stepwise, full, rtol=1e-10, atol=1e-10)
    alone = made(x[:1, 3:])
    torch.testing.assert_close(full[:1, 3:], alone, rtol=1e-10, atol=1e-10)


def test_no_steps_decode_as_well():
    made, x = layer(max_steps=0), tokens()
    stepwise, cache = decode(made, x)
    torch.testing.assert_close(stepwise, made(x), rtol=1e-10, atol=1e-10)
    assert int(cache.num_evals.sum()) == 0


def test_evaluations_are_reported():
    made, x = layer(), tokens()
    _, cache = decode(made, x)
    made(x)
    assert cache.num_evals.shape == (B, HEADS)
    torch.testing.assert_close(cache.num_evals, made.last_solve.num_evals.sum(-1), rtol=0, atol=0)


def test_a_warm_start_saves_evaluations_where_neighbours_are_alike():
    made = layer(anchor=0.5, solver=Anderson(rtol=1e-7))
    x = tokens(1).expand(B, N, DIM) + 1e-3 * tokens()
    cold, plain = decode(made, x)
    warm, cache = decode(made, x, warm_start=True)
    torch.testing.assert_close(warm, cold, rtol=1e-6, atol=1e-6)
    assert int(cache.num_evals.sum()) < 0.9 * int(plain.num_evals.sum())


def test_gradients_flow_through_a_cache():
    made, x = layer(solver=Anderson(rtol=1e-11)), tokens().requires_grad_()
    wanted = [x, *made.parameters()]
    full = torch.autograd.grad(made(x).square().sum(), wanted)
    stepwise = torch.autograd.grad(decode(made, x)[0].square().sum(), wanted)
    torch.testing.assert_close(stepwise, full, rtol=1e-7, atol=1e-8)


def test_a_context_is_projected_once(monkeypatch):
    made, x, context = layer(causal=False), tokens(), random(B, 7, DIM, seed=5)
    cache = made.new_cache(context)
    expected = made(x, context)
    monkeypatch.setattr(made.k_proj, "forward", None)
    torch.testing.assert_close(made(x, cache=cache), expected)
    for i in range(3):
        torch.testing.assert_close(made(x[:, i : i + 1], cache=cache), expected[:, i : i + 1], rtol=1e-9, atol=1e-9)
    assert cache.length == 7


def test_beams_can_be_reordered():
    made, x = layer(), tokens()
    _, cache = decode(made, x[:, :6])
    cache.select_batch(torch.tensor([1, 0, 1]))
    swapped = x[[1, 0, 1]]
    expected = made(swapped)[:, 6:7]
    torch.testing.assert_close(made(swapped[:, 6:7], cache=cache), expected, rtol=1e-9, atol=1e-9)


def test_a_cache_remembers_the_padding():
    made, x = layer(), tokens()
    exists = torch.arange(N) >= torch.tensor([[3], [0]])
    full = made(x, key_mask=exists)
    for last in ({}, {"key_mask": torch.ones(B, 1, dtype=torch.bool)}):
        cache = made.new_cache()
        made(x[:, :6], cache=cache, key_mask=exists[:, :6])
        stepwise = [made(x[:, i : i + 1], cache=cache, **last) for i in range(6, N)]
        torch.testing.assert_close(torch.cat(stepwise, dim=1), full[:, 6:], rtol=1e-10, atol=1e-10)
    swapped = made.new_cache()
    made(x[:, :6], cache=swapped, key_mask=exists[:, :6])
    swapped.select_batch([1, 0])
    after = made(x[[1, 0], 6:7], cache=swapped)
    torch.testing.assert_close(after, full[[1, 0], 6:7], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [{"rotary": Rotary()}, {"causal": True}, {}])
def test_a_fixed_cache_counts_its_queries(options):
    made, x, context = layer(**{"causal": False, **options}), tokens(), random(B, N, DIM, seed=5)
    exists = torch.arange(N) != torch.tensor([[3], [0]])
    cache = made.new_cache(context, key_mask=exists)
    stepwise = torch.cat([made(x[:, i : i + 1], cache=cache) for i in range(N)], dim=1)
    torch.testing.assert_close(stepwise, made(x, context, key_mask=exists), rtol=1e-9, atol=1e-9)


def test_a_call_that_raises_leaves_the_cache_as_it_was():
    made, x = layer(), tokens()
    cache = made.new_cache()
    made(x[:, :4], cache=cache)
    with pytest.raises(ValueError, match="key_mask"):
        made(x[:, 4:5], cache=cache, key_mask=torch.ones(B, 3, dtype=torch.bool))
    with pytest.raises(ConvergenceError):
        made(x[:, 4:5], cache=cache, max_steps=1, on_failure="raise")
    assert cache.length == cache.num_queries == 4
    torch.testing.assert_close(made(x[:, 4:5], cache=cache), made(x)[:, 4:5], rtol=1e-9, atol=1e-9)


def test_a_nan_does_not_stay_in_a_warm_cache():
    made, x, context = layer(causal=False, on_failure="ignore"), tokens(), tokens()
    cache = made.new_cache(context, warm_start=True)
    spoiled = x[:, :1].clone()
    spoiled[0] = torch.nan
    made(spoiled, cache=cache)
    torch.testing.assert_close(made(x[:, 1:2], cache=cache), made(x[:, 1:2], context), rtol=1e-3, atol=1e-4)


def test_caches_and_layers_are_copied_together():
    made, x = layer(), tokens()
    cache = made.new_cache()
    with torch.no_grad():
        made(x[:, :4], cache=cache)
    for twin, its in (copy.deepcopy((made, cache)), pickle.loads(pickle.dumps((made, cache)))):
        torch.testing.assert_close(twin(x[:, 4:5], cache=its), made(x)[:, 4:5], rtol=1e-9, atol=1e-9)
        with pytest.raises(ValueError, match="another layer"):
            twin(x, cache=cache)


def test_a_cache_made_with_grad_is_copied_with_its_gradients():
    made, x = layer(), tokens()
    cache = made.new_cache()
    made(x[:, :4], cache=cache)
    held = copy.deepcopy(cache).held
    assert torch.equal(held.keys, cache.held.keys)
    assert held.keys.data_ptr() != cache.held.keys.data_ptr()
    for part in ("keys", "values"):
        parameters = [p for p in made.parameters() if p.requires_grad]
        sums = [getattr(h, part).square().sum() for h in (held, cache.held)]
        gradients = [torch.autograd.grad(s, parameters, allow_unused=True, retain_graph=True) for s in sums]
        assert any(g is not None and g.any() for g in gradients[0])
        torch.testing.assert_close(*gradients)


def test_wrong_caches_are_named():
    made, x = layer(), tokens()
    with pytest.raises(ValueError, match="`context` must broadcast to the leading axes of x"):
        made(x[:1], cache=made.new_cache(x))
    cache = made.new_cache()
    made(x, cache=cache)
    assert "growing, length=12" in repr(cache)
