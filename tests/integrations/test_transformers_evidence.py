"""What is reported of the solves of registered attention, and of the conversion of a model."""

import copy

import pytest
import torch
from torch import nn
from transformers_models import MODELS, TIGHT, logits, make, model_and_inputs

from implicit_attention.integrations.transformers import convert, last_solves, register, report

every = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def equilibrium():
    register(on_failure="raise")


@every
def test_the_report_has_a_line_for_every_attention(name, capsys):
    model, given = model_and_inputs(name, padding=3)
    model(**given).logits.square().sum().backward()
    rows = report(model)
    assert len(rows) == (6 if name == "t5" else 2)
    printed = capsys.readouterr().out
    for row in rows:
        evidence = last_solves(model)[row.name]
        assert row.name in printed
        assert row.residual == evidence.residual.max()
        assert 0 <= row.relative_residual <= row.rtol == 1e-4
        assert f"  {row.relative_residual:.1e}  0.0001  " in printed
        assert 1 < row.num_evals <= row.max_evals == evidence.num_evals.max()
        assert row.converged == 1
        assert row.gradient == 1
        count = 5 if row.name.startswith("decoder") else 9
        assert row.queries == count
        assert 1 <= row.distinct <= count
        assert 0 < row.effective_keys <= 10


def test_the_diagnostics_are_those_of_the_attention():
    model, given = model_and_inputs(rows=1)
    with torch.no_grad():
        weights = model(**given, output_attentions=True, **TIGHT).attentions
    for row, p in zip(report(model), weights, strict=True):
        entropy = torch.special.entr(p).sum(-1)
        assert abs(row.effective_keys - float(entropy.exp().mean())) < 1e-6
    # Without an anchor all queries that see everything collapse to few points.
    model.config.is_causal = False
    flat = logits(model, given, anchor=0.0, is_causal=False)
    assert flat.isfinite().all()
    assert max(row.distinct for row in report(model)) < 9


def test_a_conversion_reports_what_each_anchor_changes():
    model, given = model_and_inputs(padding=3)
    softmax = logits(model, given, max_steps=0)
    model.set_attn_implementation("eager")
    seen = []
    conversion = convert(
        model,
        schedule=(1.0, 0.9, 0.5),
        inputs=given,
        fine_tune=lambda model, stage: seen.append((stage.anchor, model.training)),
        **TIGHT,
    )
    assert seen == [(1.0, False), (0.9, False), (0.5, False)]
    first, second, third = conversion.stages
    assert list(first.layers) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    for name in first.layers:
        assert first.layers[name] < 1e-6 < 1e-3 < second.layers[name] < third.layers[name]
    assert first.output < 1e-6 < second.output < third.output
    assert third.converged == 1
    final = logits(model, given)
    assert abs(float((final - softmax).norm() / softmax.norm()) - third.output) < 1e-6
    text = str(conversion)
    assert "model.layers.1.self_attn" in text
    assert f"{third.output:.3f}" in text
    assert "100 %" in text


def test_a_conversion_says_how_far_one_layer_is_from_softmax_on_its_own_inputs():
    model, given = model_and_inputs()
    stage = convert(model, schedule=[0.5], inputs=given, **TIGHT).stages[0]
    outputs = {}
    layer = model.model.layers[0].self_attn
    layer.o_proj.register_forward_pre_hook(lambda module, args: outputs.setdefault(len(outputs), args[0]))
    logits(model, given)
    logits(model, given, max_steps=0)
    ours, softmax = outputs.values()
    assert abs(float((ours - softmax).norm() / softmax.norm()) - stage.layers["model.layers.0.self_attn"]) < 1e-6


def test_a_conversion_follows_the_training_and_stays_with_its_model():
    model, given = model_and_inputs()
    other = copy.deepcopy(model)
    before = logits(other, given)

    def double(model, stage):
        with torch.no_grad():
            model.lm_head.weight.mul_(2)

    model.train()
    conversion = convert(model, schedule=(0.8, 0.3), inputs=given, fine_tune=double)
    assert model.training
    assert torch.equal(logits(other, given), before)
    # Doubled logits differ as much, relatively: both models that are compared have been trained.
    again = convert(model, schedule=(0.8, 0.3), inputs=given)
    assert again.stages[1].output == pytest.approx(conversion.stages[1].output, rel=1e-6)
    assert {row.anchor for row in report(model)} == {0.3}


def test_attention_that_took_no_part_is_named(capsys):
    model, given = model_and_inputs()
    model.model.layers[1].self_attn = nn.MultiheadAttention(32, 4)
    model.model.layers[1].forward = lambda hidden, **given: hidden
    logits(model, given)
    report(model)
    assert "attention of their own: MultiheadAttention (model.layers.1.self_attn)\n" in capsys.readouterr().out


def test_a_model_is_compared_with_itself_where_it_draws_at_random():
    model, given = model_and_inputs()
    model.lm_head.register_forward_hook(lambda module, args, output: output + torch.rand_like(output))
    state = torch.random.get_rng_state()
    assert convert(model, schedule=[1.0], inputs=given).stages[0].output < 1e-6
    assert torch.equal(torch.random.get_rng_state(), state)


def test_evidence_is_that_of_the_attention_in_use():
    model, given = model_and_inputs()
    assert last_solves(model) == {}
    logits(model, given)
    found = last_solves(model)
    assert list(found) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert all(layer.converged.all() for layer in found.values())
    model.set_attn_implementation("sdpa")
    assert last_solves(model) == {}
    with pytest.raises(ValueError, match="no layer of LlamaForCausalLM has called equilibrium attention"):
        report(model)


def test_wrong_conversions_are_named_before_anything_happens():
    model = make("llama")
    with pytest.raises(ValueError, match=r"`inputs` must hold no options, .*got \['max_steps'\]; pass them to convert"):
        convert(model, inputs={"max_steps": 3})
    assert model.config._attn_implementation != "equilibrium"
