"""Plain causal attention in transformers: a flag and the place of the first query stand for the mask."""

import warnings

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, StaticCache
from transformers_models import DECODERS, TIGHT, make, watched_calls

from implicit_attention.integrations.transformers import attach, register, report
from implicit_attention.kernels import native_status
from implicit_attention.testing.potential import Allocations

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
def calls():
    with watched_calls() as seen:
        yield seen


def with_masks(calls):
    """Whether each call had a mask; forgets them."""
    found = [mask is not None for *_, mask in calls]
    calls.clear()
    return found


SOLVER = {"solver": TIGHT["solver"]}
OPTIONS = {"explicit": {"max_steps": 0}, "auto": SOLVER, "native": {"impl": "native", **SOLVER}}


@pytest.mark.parametrize("length", [9, 80])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_flag_answers_as_the_mask_does_with_every_gradient(options, length, calls):
    if "impl" in options and native_status().isa is None:
        pytest.skip("there is no native library")
    model, ids = llama(**options), tokens(length)
    found = []
    for mask in (None, torch.ones(2, length, dtype=torch.long), written(length)):
        model.zero_grad()
        output = model(ids, attention_mask=mask, labels=ids)
        output.loss.backward()
        found.append((output.logits, [p.grad.clone() for p in model.parameters()]))
    assert with_masks(calls) == [False] * 4 + [True] * 2
    for each in found[:2]:
        torch.testing.assert_close(each, found[2], rtol=1e-8, atol=1e-9)


@torch.no_grad()
def test_a_flag_writes_nothing_of_the_size_of_all_pairs():
    length = 700
    with Allocations() as seen:
        llama(max_steps=0).model(tokens(length), use_cache=False)
    assert seen.largest < length**2


@pytest.mark.parametrize("name", DECODERS)
def test_tokens_that_follow_a_cache_answer_as_in_one_go(name):
    model, ids = attach(make(name), anchor=0.6, **TIGHT), tokens(12)
    whole = model(ids, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    parts = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split([5, 4, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-8, atol=1e-8)


def test_only_what_a_flag_says_goes_without_a_mask(calls):
    model, ids = llama(max_steps=0), tokens(8)
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]).expand(2, -1)
    cases = {
        "padded": {"attention_mask": padded},
        "packed": {"position_ids": positions, "use_cache": False},
        "static": {"past_key_values": StaticCache(config=model.config, max_cache_len=20), "use_cache": True},
    }
    for case, given in cases.items():
        model(ids, **given)
        assert with_masks(calls) == [True] * 2, case
    windows = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)).double()
    for length, expected in ((8, True), (3, False)):
        attach(windows, max_steps=0)(tokens(length))
        assert with_masks(calls) == [expected] * 2


def test_documents_in_one_row_stay_apart():
    model, ids = llama(**TIGHT), tokens(8)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]]).expand(2, -1)
    found = model(ids, position_ids=positions, use_cache=False).logits
    apart = [model(part, use_cache=False).logits for part in ids.split([5, 3], dim=1)]
    torch.testing.assert_close(found, torch.cat(apart, 1), rtol=1e-8, atol=1e-8)


APART = {"attention_mask": torch.block_diag(*[torch.ones(4, 4).tril()] * 2).bool()[None, None]}
RESTART = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
# What is passed beside positions that restart, by whether documents attend to each other then.
BESIDE = {
    "ones": (True, {"attention_mask": torch.ones(2, 8, dtype=torch.long), "use_cache": False}),
    "cache": (True, {}),
    "causal mask": (True, {"attention_mask": written(8)}),
    "alone": (False, {"use_cache": False}),
    "mask of documents": (False, APART),
}


@torch.no_grad()
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_documents_that_attend_to_each_other_are_told_of_once_and_answered_as_by_the_host(name, beside):
    mixed, given = BESIDE[beside]
    model, ids = make(name), tokens(8)
    given = {"position_ids": RESTART.expand(2, -1), **given}
    host, apart = model(ids, **given).logits, torch.cat([model(part).logits for part in ids.split(4, dim=1)], 1)
    attach(model, max_steps=0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = model(ids, **given).logits
    words = "`position_ids` restart, but documents of a row attend to each other; pass position_ids that restart, "
    words += "without a mask and with use_cache=False, or a mask (B, 1, N, N)"
    assert [str(warning.message) for warning in told] == [words] * mixed
    torch.testing.assert_close(found, host, rtol=1e-6, atol=1e-6)
    assert torch.allclose(found, apart, rtol=1e-6, atol=1e-6) != mixed


@torch.no_grad()
def test_documents_are_told_of_where_the_same_positions_kept_them_apart_before():
    model, ids, positions = llama(max_steps=0), tokens(8), RESTART.expand(2, -1)
    model(ids, position_ids=positions, use_cache=False)
    with pytest.warns(UserWarning, match="documents of a row attend to each other"):
        model(ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_that_restart_behind_padding_are_no_documents(side):
    ids, mask = tokens(8), torch.ones(2, 8, dtype=torch.long)
    mask[0, slice(3) if side == "left" else slice(5, 8)] = 0
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    assert bool((positions.diff() < 0).any())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("llama", "mistral"):
            model = attach(make(name), max_steps=0)
            model(ids, attention_mask=mask, position_ids=positions)
            if side == "left":
                model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False, pad_token_id=0)


def test_a_model_whose_attention_does_not_say_that_it_is_causal_gets_a_mask(calls):
    model, ids = llama(max_steps=0), tokens(8)
    expected = model(ids).logits
    silent = llama(max_steps=0)
    for layer in silent.model.layers:
        del layer.self_attn.is_causal
    attach(silent, anchor=0.6, max_steps=0)
    assert with_masks(calls) == [False] * 2
    torch.testing.assert_close(silent(ids).logits, expected)
    assert with_masks(calls) == [True] * 2
    # So does one that was never looked at.
    register(max_steps=0)
    plain = llama(max_steps=0)
    unseen = LlamaForCausalLM(LlamaConfig(**SIZES)).double().eval()
    unseen.load_state_dict(plain.state_dict())
    unseen.set_attn_implementation("equilibrium")
    torch.testing.assert_close(unseen(ids).logits, expected)
    assert with_masks(calls) == [True] * 2


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
