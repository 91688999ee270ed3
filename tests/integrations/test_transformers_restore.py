"""restore_attention of transformers: the attention, configuration and keys that a model had."""

import copy

import pytest
import torch
from torch import nn
from transformers_models import batch, logits, make, real

from implicit_attention.integrations.transformers import (
    attach,
    convert,
    learn_anchors,
    load,
    override,
    register,
    restore_attention,
)


@pytest.mark.parametrize(
    ("name", "attention"),
    [("llama", "eager"), ("llama", "sdpa"), ("t5", "sdpa"), ("bert", "sdpa"), ("gemma2", "eager")],
)
def test_answers_keys_and_configuration_are_the_first_ones(name, attention):
    model, given = make(name, torch.float32), batch(name, padding=3)
    model.set_attn_implementation(attention)
    before, config, keys = logits(model, given), model.config.to_dict(), list(model.state_dict())
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    attach(model, anchor=0.3, layers={0: {"max_steps": 0}})
    # Twice: the second time the attention before is ours.
    attach(model, anchor=0.4)
    learn_anchors(model)
    assert not torch.equal(logits(model, given), before)
    assert restore_attention(model) is model
    assert torch.equal(logits(model, given), before)
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == attention
    assert list(model.state_dict()) == keys
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    attach(model)
    assert not torch.equal(logits(model, given), before)


def test_what_was_trained_meanwhile_stays():
    model, given = make("llama", torch.float32), batch("llama", padding=3)
    convert(model, schedule=[0.5])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    trained = {name: t.clone() for name, t in model.state_dict().items()}
    restore_attention(model.train())
    assert model.training
    fresh = make("llama", torch.float32)
    fresh.load_state_dict(trained)
    assert torch.equal(logits(model.eval(), given), logits(fresh, given))


def test_copies_and_files_are_restored_too(tmp_path):
    model, given = make("llama", torch.float32), batch("llama", padding=3)
    model.set_attn_implementation("eager")
    before = logits(model, given)
    attach(model, anchor=0.5)
    copied = restore_attention(copy.deepcopy(model))
    assert copied.config._attn_implementation == "eager"
    assert torch.equal(logits(copied, given), before)
    assert model.config._attn_implementation == "equilibrium"
    model.save_pretrained(tmp_path)
    loaded = restore_attention(load(type(model), tmp_path))
    assert loaded.config._attn_implementation == "sdpa"
    tokens = real("llama", given)
    torch.testing.assert_close(logits(loaded, given)[tokens], before[tokens], rtol=1e-4, atol=1e-5)
    loaded.save_pretrained(tmp_path / "again")
    plain = type(model).from_pretrained(tmp_path / "again")
    assert torch.equal(logits(plain.eval(), given), logits(loaded, given))


def test_an_override_in_force_is_left_to_its_context():
    model, given = make("llama", torch.float32), batch("llama", padding=3)
    before = logits(model, given)
    attach(model)
    with override(model, anchor=0.2):
        restore_attention(model)
    assert torch.equal(logits(model, given), before)


def test_what_cannot_be_restored_is_said():
    with pytest.raises(TypeError, match="`model` must be a PreTrainedModel of transformers, got Linear"):
        restore_attention(nn.Linear(2, 2))
    model = make("llama", torch.float32)
    register()
    model.set_attn_implementation("equilibrium")
    with pytest.raises(ValueError, match="set_attn_implementation chooses the attention of a model by name"):
        restore_attention(model)
