"""Plain causal attention in transformers: a flag and the place of the first query stand for the mask."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, StaticCache
from transformers_models import DECODERS, TIGHT, make

from implicit_attention.attention import core
from implicit_attention.integrations.transformers import attach, register, report
from implicit_attention.integrations.transformers.attention import EquilibriumForward
from implicit_attention.ops import native_status
from implicit_attention.potentials import masked_keys

SIZES = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def llama(**options):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.25)
    return attach(model, anchor=0.6, **options)


def tokens(length):
    return torch.randint(3, 50, (2, length), generator=torch.Generator().manual_seed(2))


def written(length, first=0):
    """The mask of a causal sequence, as models take it."""
    return torch.ones(length, first + length, dtype=torch.bool).tril(first).expand(2, 1, -1, -1)


@pytest.fixture
def masks(monkeypatch):
    """The masks that attention modules are called with."""
    seen, call = [], EquilibriumForward.__call__

    def watched(self, module, query, key, value, attention_mask, **others):
        seen.append(attention_mask)
        return call(self, module, query, key, value, attention_mask, **others)

    monkeypatch.setattr(EquilibriumForward, "__call__", watched)
    return seen


@pytest.fixture
def no_triangle(monkeypatch):
    def refused(*arguments):
        raise AssertionError("a mask of all pairs was written")

    for module in (core, masked_keys):
        monkeypatch.setattr(module, "triangle", refused)


SOLVER = {"solver": TIGHT["solver"]}
OPTIONS = {"explicit": {"max_steps": 0}, "auto": SOLVER, "native": {"impl": "native", **SOLVER}}


@pytest.mark.parametrize("length", [9, 80])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_flag_answers_as_the_mask_does_with_every_gradient(options, length, masks, no_triangle):
    if "impl" in options and native_status().isa is None:
        pytest.skip("there is no native library")
    model, ids = llama(**options), tokens(length)
    found = []
    for mask in (None, torch.ones(2, length, dtype=torch.long), written(length)):
        model.zero_grad()
        output = model(ids, attention_mask=mask, labels=ids)
        output.loss.backward()
        found.append((output.logits, [p.grad.clone() for p in model.parameters()]))
    assert [mask is None for mask in masks] == [True] * 4 + [False] * 2
    for each in found[:2]:
        torch.testing.assert_close(each, found[2], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", DECODERS)
def test_tokens_that_follow_a_cache_answer_as_in_one_go(name):
    model, ids = attach(make(name), anchor=0.6, **TIGHT), tokens(12)
    whole = model(ids, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    parts = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split([5, 4, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-8, atol=1e-8)


def test_only_what_a_flag_says_goes_without_a_mask(masks):
    model, ids = llama(max_steps=0), tokens(8)
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]).expand(2, -1)
    calls = {
        "padded": {"attention_mask": padded},
        "packed": {"position_ids": positions, "use_cache": False},
        "static": {"past_key_values": StaticCache(config=model.config, max_cache_len=20), "use_cache": True},
    }
    for case, given in calls.items():
        masks.clear()
        model(ids, **given)
        assert all(mask is not None for mask in masks), case
    windows = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)).double()
    for length, expected in ((8, False), (3, True)):
        masks.clear()
        attach(windows, max_steps=0)(tokens(length))
        assert [mask is None for mask in masks] == [expected] * 2


def test_documents_in_one_row_stay_apart():
    model, ids = llama(**TIGHT), tokens(8)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]]).expand(2, -1)
    found = model(ids, position_ids=positions, use_cache=False).logits
    apart = [model(part, use_cache=False).logits for part in ids.split([5, 3], dim=1)]
    torch.testing.assert_close(found, torch.cat(apart, 1), rtol=1e-8, atol=1e-8)


def test_a_model_whose_attention_does_not_say_that_it_is_causal_gets_a_mask(masks):
    model, ids = llama(max_steps=0), tokens(8)
    expected = model(ids).logits
    silent = llama(max_steps=0)
    for layer in silent.model.layers:
        del layer.self_attn.is_causal
    attach(silent, anchor=0.6, max_steps=0)
    masks.clear()
    torch.testing.assert_close(silent(ids).logits, expected)
    assert all(mask is not None for mask in masks)
    # So does one that was never looked at.
    register(max_steps=0)
    plain = llama(max_steps=0)
    unseen = LlamaForCausalLM(LlamaConfig(**SIZES)).double().eval()
    unseen.load_state_dict(plain.state_dict())
    unseen.set_attn_implementation("equilibrium")
    masks.clear()
    torch.testing.assert_close(unseen(ids).logits, expected)
    assert all(mask is not None for mask in masks)


def test_reports_weights_and_dropout_know_the_flag():
    model, ids = llama(**TIGHT), tokens(9)
    by_flag = model(ids, output_attentions=True).attentions
    told = report(model)
    by_mask = model(ids, attention_mask=written(9), output_attentions=True).attentions
    torch.testing.assert_close(by_flag, by_mask, rtol=1e-8, atol=1e-9)
    again = report(model)
    for ours, theirs in zip(told, again, strict=True):
        assert repr(ours) == repr(theirs)
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    torch.manual_seed(1)
    found = model(ids).logits
    assert found.isfinite().all()
    # The first token reads its own value, or nothing.
    assert not torch.equal(found[:, 1:], model(ids).logits[:, 1:])


def test_a_token_that_is_not_finite_reaches_those_after_it_alone():
    model, ids = llama(max_steps=30, on_failure="ignore"), tokens(9)
    embedded = model.get_input_embeddings()(ids).detach()
    clean = model(inputs_embeds=embedded).logits
    embedded[:, 6] = torch.nan
    found = model(inputs_embeds=embedded).logits
    torch.testing.assert_close(found[:, :6], clean[:, :6], rtol=1e-10, atol=1e-10)
    assert found[:, 6:].isnan().all()
