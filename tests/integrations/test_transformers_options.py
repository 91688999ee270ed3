"""Options of registered attention, by layer, model and call, and what is refused."""

import inspect

import pytest
import torch
from transformers import (
    AttentionMaskInterface,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTJConfig,
    GPTJForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.loss import loss_utils
from transformers_models import MODELS, TIGHT, batch, evaluations, logits, make, model_and_inputs

from implicit_attention import ConvergenceError, ConvergenceWarning, Picard, Unrolled
from implicit_attention.integrations.transformers import attach, convert, override, register, report

every = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def equilibrium():
    register(on_failure="raise")


# Options.


def test_options_hold_for_all_layers_for_one_and_for_one_call():
    model, given = model_and_inputs()
    solved = logits(model, given)
    assert min(evaluations(model)) > 1
    register(on_failure="raise", layers={1: {"max_steps": 0}})
    first_only = logits(model, given)
    first, second = evaluations(model)
    assert first > 1
    assert second == 0
    register(on_failure="raise", layers=lambda index: {"max_steps": 0} if index == 1 else {})
    assert torch.equal(logits(model, given), first_only)
    explicit = logits(model, given, max_steps=0)
    assert evaluations(model) == [0, 0]
    register(max_steps=0)
    assert torch.equal(logits(model, given), explicit)
    distances = [(other - solved).abs().max() for other in (first_only, explicit)]
    assert min(distances) > 1e-2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("anchor", 0.8),
        ("max_steps", 0),
        ("solver", Picard(rtol=0, atol=0, max_steps=1)),
        ("impl", "reference"),
    ],
)
def test_a_call_changes_what_is_answered(name, value):
    model, given = model_and_inputs(dtype=torch.float32, length=80)
    assert not torch.equal(logits(model, given), logits(model, given, **{name: value}))


def test_a_call_chooses_the_gradient():
    model, given = model_and_inputs()

    def gradient(**options):
        model.zero_grad()
        model(**given, **options).logits.square().sum().backward()
        return model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    solver, budget = TIGHT["solver"], Picard(rtol=0, atol=0, max_steps=2)
    tight = gradient(**TIGHT)
    torch.testing.assert_close(tight, gradient(solver=solver, adjoint=Unrolled()), rtol=1e-5, atol=1e-6)
    assert not torch.equal(gradient(solver=solver), tight)
    # A fixed budget is differentiated through its steps.
    assert torch.equal(gradient(solver=budget), gradient(solver=budget, adjoint=Unrolled()))


def test_failures_are_told_as_asked():
    model, given = model_and_inputs()
    with pytest.raises(ConvergenceError):
        logits(model, given, max_steps=1)
    with pytest.warns(ConvergenceWarning):
        logits(model, given, max_steps=1, on_failure="warn")
    logits(model, given, max_steps=1, on_failure="ignore")


def test_anchors_by_head_can_be_learned_by_a_module_that_hands_them_to_each_call():
    model, given = model_and_inputs()
    anchor = torch.tensor([0.3, 0.5, 0.7, 0.9], requires_grad=True)
    model(**given, anchor=anchor).logits.square().sum().backward()
    assert (anchor.grad != 0).all()
    assert abs(report(model)[0].anchor - 0.6) < 1e-6
    assert not torch.allclose(logits(model, given, anchor=0.6), logits(model, given, anchor=anchor.detach()))


def test_the_call_comes_before_the_model_before_the_layer_before_the_name():
    model, given = model_and_inputs()
    register(anchor=0.2, layers={1: {"anchor": 0.3}})
    logits(model, given)
    assert [row.anchor for row in report(model)] == [0.2, 0.3]
    convert(model, schedule=[0.4], inputs=given)
    logits(model, given)
    assert [row.anchor for row in report(model)] == [0.4, 0.4]
    logits(model, given, anchor=0.5)
    assert [row.anchor for row in report(model)] == [0.5, 0.5]


def test_an_override_holds_for_all_attention_until_it_ends():
    model, given = model_and_inputs("t5")
    solved, explicit = logits(model, given), logits(model, given, max_steps=0)
    with override(model, max_steps=0):
        assert torch.equal(logits(model, given), explicit)
        with override(model, anchor=0.9):
            assert torch.equal(logits(model, given), logits(model, given, anchor=0.9))
        assert torch.equal(logits(model, given), explicit)
    assert torch.equal(logits(model, given), solved)
    with pytest.raises(ValueError, match="`options` must hold options among anchor, solver"), override(model, steps=3):
        pass


def test_an_override_reaches_where_arguments_do_not():
    model, given = model_and_inputs()
    ids = given["input_ids"]
    with pytest.raises(ValueError, match="model_kwargs"):
        model.generate(ids, max_steps=0)
    with override(model, max_steps=0):
        model.generate(ids, max_new_tokens=2, do_sample=False)
    assert evaluations(model) == [0, 0]


def _trained(name):
    """Models whose losses take options, of six families."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"vocab_size": 40, "pad_token_id": 0}
    if name == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=1))
    if name == "gemma3":
        return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, num_key_value_heads=1, head_dim=8))
    return MODELS[name]()


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", "gpt_oss", "qwen2", "gemma3"])
def test_the_options_of_a_loss_reach_the_loss(name):
    torch.manual_seed(0)
    model = attach(_trained(name), anchor=0.9).eval()
    tokens = torch.randint(2, 40, (2, 7))
    # BERT has a loss of its own, which takes no options and leaves them alone.
    ignored = -100 if name == "bert" else -1
    labels = tokens.masked_fill(torch.arange(7) < 2, ignored)
    plain = model(tokens).logits
    shifted = labels if name == "bert" else torch.nn.functional.pad(labels, (0, 1), value=ignored)[..., 1:]
    for given, targets in (({}, shifted), ({"num_items_in_batch": 5}, shifted), ({"shift_labels": labels}, labels)):
        loss = model(tokens, labels=labels, ignore_index=ignored, **given).loss
        loss.backward()
        rows = plain.flatten(0, 1), targets.flatten()
        summed = torch.nn.functional.cross_entropy(*rows, ignore_index=ignored, reduction="sum")
        count = given.get("num_items_in_batch") if name != "bert" else None
        torch.testing.assert_close(loss, summed / (count or (targets != ignored).sum()), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="`achor` is neither an option"):
        model(tokens, labels=tokens, achor=0.5)


def test_every_option_of_the_common_losses_is_known():
    """A loss that gains an option must not refuse it."""
    losses = [loss_utils.fixed_cross_entropy, loss_utils.ForCausalLMLoss, loss_utils.ForMaskedLMLoss]
    losses += [loss_utils.ForTokenClassification, loss_utils.ForSequenceClassificationLoss]
    model, given = model_and_inputs()
    options = {n for loss in losses for n, p in inspect.signature(loss).parameters.items() if p.default is not p.empty}
    assert {"num_items_in_batch", "ignore_index", "shift_labels"} <= options
    assert torch.equal(logits(model, given, **dict.fromkeys(options, 0)), logits(model, given))


# What is refused.


@every
def test_an_unknown_argument_is_refused_with_the_options(name):
    model, given = model_and_inputs(name)
    with pytest.raises(ValueError, match=r"`ancor` is neither an option .*\(anchor, solver, .*ignore=\('ancor',\)"):
        logits(model, given, ancor=0.5)
    register(ignore=("ancor",))
    logits(model, given, ancor=0.5)


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"])
def test_packed_sequences_without_positions_are_refused(name):
    model, given = model_and_inputs()
    with pytest.raises(ValueError, match=f"`{name}` must be None .*LlamaAttention: a packed batch.*position_ids"):
        logits(model, given, **{name: torch.tensor([0, 5, 9])})


def test_sinks_are_one_for_each_head():
    model, given = model_and_inputs("gpt_oss")
    model.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"`s_aux` must have one logit for each head, got \(3,\)"):
        logits(model, given)
    with pytest.raises(ValueError, match=r"`sinks` must be None .* one for each head"):
        logits(*model_and_inputs(), sinks=torch.zeros(4))


def test_paged_caches_are_refused():
    model, given = model_and_inputs()
    with pytest.raises(ValueError, match=r"`cache` must be None .* paged caches"):
        logits(model, given, cache=object())


def without_masks(monkeypatch):
    """Models hand None to the attention function, as they do where an engine has replaced it but not the masks."""
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, "equilibrium")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("rows", [1, 2])
def test_without_any_mask_a_packed_document_is_answered_as_alone(name, rows, monkeypatch):
    register(max_steps=0)
    without_masks(monkeypatch)
    model = make(name)
    ids = batch(name, rows=rows, length=9)["input_ids"]
    lengths = ([5, 4], [2, 7])[:rows]
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    with torch.no_grad():
        eager = [
            [model(input_ids=part).logits for part in i.split(n, dim=1)]
            for i, n in zip(ids.split(1), lengths, strict=True)
        ]
        model.set_attn_implementation("equilibrium")
        packed = model(input_ids=ids, position_ids=positions).logits
        # The second call goes on with the last document of the first, and then begins another.
        cache = model(input_ids=ids[:, :1], position_ids=positions[:, :1], use_cache=True).past_key_values
        rest = model(input_ids=ids[:, 1:], position_ids=positions[:, 1:], past_key_values=cache).logits
    expected = torch.cat([torch.cat(row, dim=1) for row in eager])
    torch.testing.assert_close(packed, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rest, expected[:, 1:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"anchor": torch.tensor([0.5, 2.0])}, ValueError, r"`anchor` must be in \[0, 1\] everywhere"),
        ({"solver": "anderson"}, TypeError, "`solver` must be None or a Solver"),
        ({"layers": {0: {"steps": 3}}}, ValueError, r"`layers\[0\]` must hold options among anchor, .*got 'steps'"),
        ({"layers": [0.5, 0.6]}, TypeError, "`layers` must be a dict from layer index"),
        ({"ignore": "foo"}, TypeError, "`ignore` must be a collection of names"),
    ],
)
def test_wrong_options_are_named_at_the_door(options, error, match):
    with pytest.raises(error, match=match):
        register(**options)


def test_an_unknown_layer_is_named():
    model, given = model_and_inputs()
    register(layers={0: {"anchor": 0.9}, 2: {"anchor": 0.9}})
    with pytest.raises(ValueError, match=r"`layers` must hold indices of LlamaAttention among 0 to 1, got \[2\]"):
        logits(model, given)


def test_a_model_that_does_not_ask_is_named():
    config = GPTJConfig(vocab_size=50, n_embd=32, n_layer=1, n_head=4, rotary_dim=4, n_positions=32)
    with pytest.raises(ValueError, match="GPTJForCausalLM does not take its attention from transformers"):
        convert(GPTJForCausalLM(config))
