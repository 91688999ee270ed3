"""Seven architectures of transformers with equilibrium attention, against their own eager attention."""

import pytest
import torch
from transformers import DynamicCache
from transformers_models import CACHED, DECODERS, MODELS, TIGHT, WINDOW, batch, make, real, with_equilibria

from implicit_attention.integrations.transformers import register

# Solves are exact to 1e-12, but these models round norms and rotary angles to float32, whatever their precision.
ROUNDING = 1e-6
every = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def equilibrium():
    register(anchor=0.5, on_failure="raise", **TIGHT)


def logits(model, given, attention="equilibrium", **call):
    model.set_attn_implementation(attention)
    with torch.no_grad():
        return model(**given, **call).logits


@every
@pytest.mark.parametrize("padding", [0, 3])
def test_no_step_is_the_eager_model(name, padding):
    model, given = make(name, torch.float32), batch(name, padding=padding)
    rows = real(name, given)
    error = logits(model, given, max_steps=0)[rows] - logits(model, given, "eager")[rows]
    assert error.abs().max() <= 1e-5


@every
@pytest.mark.parametrize("padding", [0, 3])
def test_equilibria_are_those_of_a_reference_inside_eager_attention(name, padding):
    model, given = make(name), batch(name, padding=padding)
    rows = real(name, given)
    ours, reference = logits(model, given)[rows], logits(model, given, with_equilibria(0.5))[rows]
    assert (ours - reference).abs().max() <= ROUNDING * reference.abs().max()
    assert (ours - logits(model, given, max_steps=0)[rows]).abs().max() > 1e-2 * ours.abs().max()


@every
def test_a_padded_sequence_answers_as_it_does_alone(name):
    model, given = make(name), batch(name, padding=3)
    padded = logits(model, given)
    exists = given["attention_mask"][0].bool()
    alone = {key: value[:1] for key, value in given.items()}
    for key in ("input_ids", "attention_mask", "position_ids"):
        if key in alone:
            alone[key] = alone[key][:, exists]
    rows = slice(None) if name == "t5" else exists
    torch.testing.assert_close(padded[0][rows], logits(model, alone)[0], rtol=ROUNDING, atol=ROUNDING)


@every
def test_what_a_padded_token_is_changes_nothing(name):
    model, given = make(name), batch(name, padding=3)
    rows = real(name, given)
    before = logits(model, given)[rows]
    padded = given["attention_mask"] == 0
    given["input_ids"] = torch.where(padded, 49 - given["input_ids"] // 2, given["input_ids"])
    assert torch.equal(logits(model, given)[rows], before)
    # Where it exists, it is felt.
    given["attention_mask"] = torch.ones_like(given["attention_mask"])
    assert not torch.allclose(logits(model, given)[rows], before)


@pytest.mark.parametrize("name", DECODERS)
def test_no_token_sees_the_future(name):
    model, given = make(name), batch(name)
    before = logits(model, given)
    given["input_ids"][:, -1] = (given["input_ids"][:, -1] + 1) % 48 + 2
    after = logits(model, given)
    assert torch.equal(after[:, :-1], before[:, :-1])
    assert not torch.allclose(after[:, -1], before[:, -1])


def test_a_sliding_window_ends_where_it_should():
    model, given = make("mistral"), batch("mistral", length=12)
    before = logits(model, given)
    given["input_ids"][:, 0] = given["input_ids"][:, 0] % 48 + 2
    after = logits(model, given)
    reach = 2 * (WINDOW - 1)  # two layers
    assert torch.equal(after[:, reach + 1 :], before[:, reach + 1 :])
    assert not torch.allclose(after[:, reach], before[:, reach], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CACHED)
def test_decoding_with_a_cache_is_the_full_forward(name):
    model, given = make(name), batch(name, padding=3)
    model.set_attn_implementation("equilibrium")
    full = logits(model, given)
    tokens = "decoder_input_ids" if name == "t5" else "input_ids"
    given = dict(given)
    ids, mask = given.pop(tokens), given.pop("attention_mask")
    positions = given.pop("position_ids", None)
    cache, parts, first = None if name == "t5" else DynamicCache(config=model.config), [], 0
    for size in (4, *[1] * (ids.shape[1] - 4)):
        now = slice(first, first + size)
        call = {**given, tokens: ids[:, now], "attention_mask": mask if name == "t5" else mask[:, : first + size]}
        call |= {} if positions is None else {"position_ids": positions[:, now]}
        with torch.no_grad():
            found = model(**call, past_key_values=cache, use_cache=True)
        cache, first = found.past_key_values, first + size
        parts.append(found.logits)
    rows = real(name, {"attention_mask": mask})
    torch.testing.assert_close(torch.cat(parts, dim=1)[rows], full[rows], rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("name", CACHED)
def test_generating_with_a_static_cache_is_generating_with_a_dynamic_one(name, padding):
    model, given = make(name), batch(name, padding=padding)
    model.set_attn_implementation("equilibrium")
    given = {key: given[key] for key in ("input_ids", "attention_mask")}
    texts = []
    for kind in ("dynamic", "static"):
        found = model.generate(
            **given,
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            cache_implementation=kind,
            output_logits=True,
            return_dict_in_generate=True,
            disable_compile=True,
        )
        texts.append(torch.stack(found.logits))
    torch.testing.assert_close(*texts, rtol=ROUNDING, atol=ROUNDING)
    # Not by chance: the same model with softmax attention says something else.
    assert texts[0].shape[0] == 6
    register(max_steps=0)
    plain = model.generate(
        **given, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True
    ).logits[0]
    assert not torch.allclose(plain, texts[0][0])
