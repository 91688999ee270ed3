"""Spin layers token by token, and over long inputs: what one call over all tokens by a tensor of couplings gives."""

import copy

import pytest
import torch

from implicit_attention import Status
from implicit_attention.layers import Rotary, SpinAttention
from implicit_attention.layers.couplings import LowRankCouplings
from implicit_attention.spins import GaussianClosure, KineticPlefka, MeanField
from implicit_attention.testing.numerics import random

CLOSURES = [KineticPlefka(rtol=1e-12), KineticPlefka(order=2, rtol=1e-12), GaussianClosure(rtol=1e-12)]


def causal(method=CLOSURES[0], **options):
    torch.manual_seed(0)
    return SpinAttention(12, 2, causal=True, method=method, **options).double()


def decoded(layer, x, sizes, key_masks=None, **options):
    cache, parts = layer.new_cache(**options), x.split(sizes, dim=1)
    masks = key_masks or [None] * len(parts)
    return torch.cat([layer(p, cache=cache, key_mask=m) for p, m in zip(parts, masks, strict=True)], dim=1)


@pytest.mark.by_name(slow=r"KineticPlefka.*SphereUnits.*order=2")
@pytest.mark.parametrize("rotary", [None, Rotary()], ids=["plain", "rotary"])
@pytest.mark.parametrize("method", CLOSURES, ids=repr)
def test_token_by_token_is_one_call_of_all(method, rotary):
    layer, x = causal(method, rotary=rotary), random(3, 7, 12, seed=1).requires_grad_()
    whole = layer(x)
    (by_whole,) = torch.autograd.grad(whole.square().sum(), x, retain_graph=True)
    for sizes, warm_start in (([1] * 7, False), ([3, 1, 3], True), ([7], False)):
        parts = decoded(layer, x, sizes, warm_start=warm_start)
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-10)
        # What is held is part of the graph.
        (by_parts,) = torch.autograd.grad(parts.square().sum(), x)
        torch.testing.assert_close(by_parts, by_whole, rtol=0, atol=1e-8)


def test_missing_tokens_are_held_as_such():
    layer, x = causal(CLOSURES[2]), random(2, 6, 12, seed=1)
    mask = torch.tensor([[True, True, False, True, True, True], [True, True, True, True, False, True]])
    x = torch.where(mask[..., None], x, torch.nan)
    of_new = list(mask.split(1, dim=1))
    of_all = [mask[:, : i + 1] for i in range(6)]
    whole = layer(x, key_mask=mask)
    assert whole.isfinite().all()
    for masks in (of_new, of_all):
        torch.testing.assert_close(decoded(layer, x, [1] * 6, masks), whole, rtol=0, atol=1e-10)


def test_a_token_without_an_answer_is_felt_by_those_after_it_alone():
    layer, x = causal(on_failure="ignore"), random(2, 4, 12, seed=1)
    cache = layer.new_cache()
    broken = x.clone()
    broken[1, 1] = torch.nan
    sound, found = decoded(layer, x, [1] * 4), torch.cat([layer(t, cache=cache) for t in broken.split(1, 1)], 1)
    assert torch.equal(found[0], sound[0])
    assert torch.equal(found[1, 0], sound[1, 0])
    assert found[1, 1:].isnan().all()
    assert (layer.last_solve.status[1] == Status.NONFINITE).all()
    assert layer.last_solve.converged[0].all()


def test_a_cache_counts_evaluations_selects_and_is_copied():
    layer, x = causal(), random(3, 5, 12, seed=1)
    cache = layer.new_cache()
    layer(x[:, :4], cache=cache)
    assert (cache.length, cache.num_queries, cache.num_evals.shape) == (4, 4, (3, 2))
    assert cache.held.keys.shape == cache.held.values.shape == (3, 2, 4, 6)
    twin = copy.deepcopy((layer, cache))
    cache.select_batch(torch.tensor([2, 0]))
    last = layer(x[[2, 0], 4:], cache=cache)
    torch.testing.assert_close(last, layer(x)[[2, 0], 4:], rtol=0, atol=1e-10)
    assert twin[1].length == 4
    assert torch.equal(twin[0](x[[2, 0, 1], 4:][[1, 2, 0]], cache=twin[1])[2], last[0])


def test_wrong_uses_of_a_cache_are_refused():
    layer, x = causal(), random(2, 3, 12, seed=1)
    cache = layer.new_cache()
    with pytest.raises(ValueError, match="`mask` must be None beside a cache"):
        layer(x, mask=torch.ones(3, 3, dtype=torch.bool), cache=cache)
    layer(x, cache=cache)
    with pytest.raises(ValueError, match="the batch that it holds"):
        layer(x[:1], cache=cache)
    # A call that raises leaves the cache as it is.
    assert cache.length == 3


@pytest.mark.parametrize("derivative", ["explicit", "total"])
def test_low_rank_couplings_are_those_of_the_tensor(derivative):
    torch.manual_seed(0)
    x = random(2, 5, 12, seed=1)
    mask = torch.tensor([[True] * 5, [True, False, True, True, False]])
    options = {"derivative": derivative, "method": MeanField(rtol=1e-12)}
    layer = SpinAttention(12, 2, couplings="low_rank", **options).double()
    assert isinstance(layer.couplings, LowRankCouplings)
    assert layer.couplings.rank == 6
    whole = {name: value for name, value in layer.state_dict().items() if not name.startswith("couplings")}
    for given in (None, mask):

        def dense(h, given=given):
            return layer.couplings(h, given if given is None else given[:, None]).dense()

        twin = SpinAttention(12, 2, couplings=dense, **options).double()
        twin.load_state_dict(whole)
        torch.testing.assert_close(layer(x, key_mask=given), twin(x, key_mask=given), rtol=0, atol=1e-10)
    norms = torch.linalg.matrix_norm(layer.couplings(random(50, 2, 9, 6, seed=2)).dense(), 2)
    assert (norms <= 1).all()
    alike = layer.couplings(torch.ones(1, 2, 8, 6).double()).dense()
    torch.testing.assert_close(alike[0, 0, 0, 1:], torch.full((7,), 1 / 8).double())
