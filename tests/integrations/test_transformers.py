"""Registered attention in use: options by layer, model and call, what is refused, and what models do with it."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTJConfig, GPTJForCausalLM
from transformers_models import MODELS, batch, make

from implicit_attention import CG, Anderson, ConvergenceError, ConvergenceWarning, Implicit, Picard, Unrolled
from implicit_attention.integrations.transformers import convert, register, report

TIGHT = {"solver": Anderson(rtol=1e-12, atol=1e-13), "adjoint": Implicit(CG(rtol=1e-12))}
every = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def equilibrium():
    register(on_failure="raise")


def model_and_inputs(name="llama", dtype=torch.float64, **given):
    model = make(name, dtype)
    model.set_attn_implementation("equilibrium")
    return model, batch(name, **given)


def logits(model, given, **call):
    with torch.no_grad():
        return model(**given, **call).logits


def evaluations(model):
    """Of the first query of every layer."""
    return [int(module._equilibrium_last.evidence.num_evals.max()) for module in attentions(model)]


def attentions(model):
    return [module for module in model.modules() if hasattr(module, "_equilibrium_last")]


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


def test_a_schedule_over_layers_sets_their_anchors():
    model, given = model_and_inputs()
    register(layers=lambda index: {"anchor": 1 - 0.4 * index})
    logits(model, given)
    assert [row.anchor for row in report(model)] == [1.0, 0.6]


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
    found = []
    for adjoint in (None, TIGHT["adjoint"], Unrolled()):
        model.zero_grad()
        model(**given, solver=TIGHT["solver"], adjoint=adjoint).logits.square().sum().backward()
        found.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
    torch.testing.assert_close(found[1], found[2], rtol=1e-5, atol=1e-6)
    assert not torch.equal(found[0], found[1])


def test_failures_are_told_as_asked():
    model, given = model_and_inputs()
    with pytest.raises(ConvergenceError):
        logits(model, given, max_steps=1)
    with pytest.warns(ConvergenceWarning):
        logits(model, given, max_steps=1, on_failure="warn")
    logits(model, given, max_steps=1, on_failure="ignore")


def test_a_fixed_budget_is_differentiated_through_its_steps():
    model, given = model_and_inputs()
    budget = Picard(rtol=0, atol=0, max_steps=2)
    found = []
    for adjoint in (None, Unrolled()):
        model.zero_grad()
        model(**given, solver=budget, adjoint=adjoint).logits.square().sum().backward()
        found.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
    assert torch.equal(*found)


def test_anchor_one_is_softmax_attention():
    model, given = model_and_inputs()
    torch.testing.assert_close(
        logits(model, given, anchor=1.0), logits(model, given, max_steps=0), rtol=1e-6, atol=1e-6
    )


def test_anchors_by_head_can_be_learned():
    model, given = model_and_inputs()
    anchor = torch.tensor([0.3, 0.5, 0.7, 0.9], requires_grad=True)
    register(anchor=anchor)
    model(**given).logits.square().sum().backward()
    assert (anchor.grad != 0).all()
    assert (report(model)[0].anchor - 0.6) < 1e-6
    same = logits(model, given)
    register(anchor=0.6)
    assert not torch.allclose(logits(model, given), same)


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


def test_two_names_do_not_know_of_each_other():
    model, given = model_and_inputs()
    other = copy.deepcopy(model)
    register("softmax", max_steps=0)
    other.set_attn_implementation("softmax")
    assert not torch.allclose(logits(model, given), logits(other, given))
    assert evaluations(other) == [0, 0]
    assert min(evaluations(model)) > 1


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


def test_paged_caches_are_refused():
    model, given = model_and_inputs()
    with pytest.raises(ValueError, match=r"`cache` must be None .* paged caches"):
        logits(model, given, cache=object())


def test_packed_sequences_with_positions_are_kept_apart():
    model, _ = model_and_inputs()
    ids = batch("llama", rows=1, length=9)["input_ids"]
    positions = torch.cat([torch.arange(5), torch.arange(4)])[None]
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        apart = [model(input_ids=part).logits for part in ids.split([5, 4], dim=1)]
    torch.testing.assert_close(packed, torch.cat(apart, dim=1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"anchor": 1.5}, ValueError, r"`anchor` must be in \[0, 1\], got 1.5"),
        ({"anchor": torch.full((2, 2), 0.5)}, ValueError, "`anchor` must be a number or one for each head"),
        ({"anchor": torch.tensor([0.5, 2.0])}, ValueError, r"`anchor` must be in \[0, 1\] everywhere"),
        ({"max_steps": -1}, ValueError, "`max_steps` must be >= 0"),
        ({"solver": "anderson"}, TypeError, "`solver` must be None or a Solver"),
        ({"impl": "fast"}, ValueError, "`impl` must be one of"),
        (
            {"layers": {0: {"steps": 3}}},
            ValueError,
            r"`layers\[0\]` must hold options among anchor, solver.*got 'steps'",
        ),
        ({"layers": {0: {"anchor": 2}}}, ValueError, "`anchor` must be in"),
        ({"layers": {-1: {"anchor": 0.2}}}, ValueError, "`layers` must be >= 0"),
        ({"layers": [0.5, 0.6]}, TypeError, "`layers` must be a dict from layer index"),
        ({"layers": {0: 0.5}}, TypeError, r"`layers\[0\]` must be a dict of options"),
        ({"ignore": "foo"}, TypeError, "`ignore` must be a collection of names"),
        ({"name": "sdpa"}, ValueError, "`name` must not be one that transformers know already, got 'sdpa'"),
        ({"name": "eager"}, ValueError, "`name` must not be one"),
        ({"name": ""}, ValueError, "`name` must be a string"),
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


def test_a_missing_package_gives_the_line_that_installs_it():
    code = "import sys; sys.modules['transformers'] = None; import implicit_attention.integrations.transformers"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert 'pip install "implicit_attention[transformers]"' in found.stderr


def test_a_model_that_does_not_ask_is_named():
    config = GPTJConfig(vocab_size=50, n_embd=32, n_layer=1, n_head=4, rotary_dim=4, n_positions=32)
    with pytest.raises(ValueError, match="GPTJForCausalLM does not take its attention from transformers"):
        convert(GPTJForCausalLM(config))
    with pytest.raises(ValueError, match="no layer of LlamaForCausalLM has called equilibrium attention"):
        report(make("llama"))
    with pytest.raises(TypeError, match=r"`model` must be a PreTrainedModel.*replace_attention"):
        convert(torch.nn.Linear(2, 2))


# Masks.


def forward(query, key, mask, **given):
    """The registered function as a model without rotary positions or a cache of its own would call it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    module = torch.nn.Module()
    return ALL_ATTENTION_FUNCTIONS["equilibrium"](module, query, key, key, mask, **given)[0]


def test_a_mask_of_ones_own_may_be_additive():
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 4, 5, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    allowed = torch.rand(2, 1, 5, 5, generator=generator) > 0.4
    allowed[..., 0] = True
    lowest = torch.finfo(query.dtype).min
    additive = torch.zeros(2, 1, 5, 5, dtype=query.dtype).masked_fill(~allowed, lowest)
    torch.testing.assert_close(forward(query, key, additive), forward(query, key, allowed), rtol=1e-3, atol=1e-3)
    tight = {"solver": TIGHT["solver"]}
    ours = forward(query, key, additive, **tight), forward(query, key, allowed, **tight)
    torch.testing.assert_close(*ours, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="`attention_mask` must have four axes"):
        forward(query, key, allowed[:, 0, 0])
    with pytest.raises(ValueError, match="`attention_mask` must broadcast to"):
        forward(query, key, allowed[..., :3])


def test_without_a_mask_causality_ends_at_the_last_key():
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 4, n, 8, generator=generator, dtype=torch.float64) for n in (3, 5))
    by_hand = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)[None, None]
    assert torch.equal(forward(query, key, None), forward(query, key, by_hand))
    everything = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    assert torch.equal(forward(query, key, None, is_causal=False), forward(query, key, everything))
    # One query, the newest token, sees the whole cache.
    assert torch.equal(forward(query[:, :, :1], key, None), forward(query[:, :, :1], key, everything[:, :, :1]))


def test_a_sample_that_is_not_finite_stays_alone():
    model, given = model_and_inputs(rows=3)
    with torch.no_grad():
        embedded = model.get_input_embeddings()(given.pop("input_ids"))
    before = logits(model, {**given, "inputs_embeds": embedded})
    embedded[1, 2] = torch.nan
    after = logits(model, {**given, "inputs_embeds": embedded}, on_failure="ignore")
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert torch.equal(after[1, :2], before[1, :2])
    assert after[1, 2:].isnan().all()


# What models do.


@every
def test_attentions_are_given_out(name):
    model, given = model_and_inputs(name)
    key = "encoder_attentions" if name == "t5" else "attentions"
    with torch.no_grad():
        ours = model(**given, output_attentions=True)
        explicit = model(**given, output_attentions=True, max_steps=0)
        model.set_attn_implementation("eager")
        eager = model(**given, output_attentions=True)
    assert len(ours[key]) == 2
    for mine, one_step, theirs in zip(ours[key], explicit[key], eager[key], strict=True):
        torch.testing.assert_close(one_step, theirs.to(one_step.dtype), rtol=1e-6, atol=1e-6)
        assert mine.shape == theirs.shape
        assert mine.min() >= 0
        assert not torch.allclose(mine, one_step, rtol=0, atol=1e-3)
        total = mine.sum(-1)
        # A sink takes its part of the weight.
        assert (total < 1).all() if name == "gpt_oss" else torch.allclose(total, torch.ones_like(total))


def test_attentions_are_given_out_where_the_config_says_so():
    model, given = make("llama"), batch("llama")
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    model.set_attn_implementation("equilibrium")
    with torch.no_grad():
        assert len(model(**given).attentions) == 2


def test_dropout_is_for_training():
    model, given = model_and_inputs()
    model.config.attention_dropout = 0.5
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    evaluated = logits(model, given)
    assert torch.equal(logits(model, given), evaluated)
    model.train()
    torch.manual_seed(0)
    trained = [logits(model, given) for _ in range(2)]
    assert not torch.equal(*trained)
    torch.manual_seed(0)
    assert torch.equal(logits(model, given), trained[0])


def test_gradient_checkpointing_changes_no_gradient():
    model, given = model_and_inputs()
    found = []
    for checkpointing in (False, True):
        model.train()
        if checkpointing:
            model.activation_checkpointing_enable()
        model.zero_grad()
        model(**given, use_cache=False).logits.square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for plain, checkpointed in zip(*found, strict=True):
        torch.testing.assert_close(plain, checkpointed, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "t5", "gemma2", "gpt_oss"])
def test_half_precision_is_solved_in_single(name):
    model, given = model_and_inputs(name, torch.bfloat16)
    found = model(**given).logits
    assert found.dtype == torch.bfloat16
    found.float().square().sum().backward()
    for module in attentions(model):
        assert module._equilibrium_last.sample.state.dtype == torch.float32
        assert module._equilibrium_last.evidence.converged.all()


def test_half_precision_loses_only_what_its_output_loses():
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 4, 5, 8, generator=generator).bfloat16() for _ in range(2))
    rounded = forward(query, key, None)
    assert torch.equal(rounded, forward(query.float(), key.float(), None).bfloat16())


@pytest.mark.parametrize("train", [False, True])
def test_a_compiled_llama_is_one_graph(train):
    register()
    model, given = model_and_inputs(dtype=torch.float32, padding=3)
    given.pop("position_ids")
    rows = given["attention_mask"].bool()
    expected = model(**given, use_cache=False).logits[rows]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(train):
        for _ in range(2):
            found = compiled(**given, use_cache=False).logits[rows]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert all(row.converged == 1 and row.num_evals > 1 for row in report(model))
    if train:
        gradients = [torch.autograd.grad(y.square().sum(), list(model.parameters())) for y in (found, expected)]
        for ours, eager in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-2, atol=1e-3 * float(eager.abs().max()))


def test_a_compiled_gemma_breaks_its_graph_and_answers():
    register()
    model, given = model_and_inputs("gemma2", torch.float32)
    expected = logits(model, given, use_cache=False)
    with torch.no_grad():
        found = torch.compile(model, backend="eager")(**given, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_model_is_saved_and_loaded_with_the_name(tmp_path):
    model, given = model_and_inputs(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="equilibrium").eval()
    assert torch.equal(logits(loaded, given), logits(model, given))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert not torch.allclose(logits(plain, given), logits(model, given))


def test_copies_and_pickles_answer_alike_and_remember_nothing():
    model, given = model_and_inputs()
    convert(model, schedule=[0.7], inputs=given)
    expected = logits(model, given)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(ValueError, match="no layer of LlamaForCausalLM has called"):
            report(other)
        assert torch.equal(logits(other, given), expected)


# Evidence.


@every
def test_the_report_has_a_line_for_every_attention(name, capsys):
    model, given = model_and_inputs(name, padding=3)
    model(**given).logits.square().sum().backward()
    rows = report(model)
    assert len(rows) == (6 if name == "t5" else 2)
    printed = capsys.readouterr().out
    for row in rows:
        module = model.get_submodule(row.name)
        evidence = module._equilibrium_last.evidence
        assert row.name in printed
        assert row.residual == evidence.residual.max()
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


def test_a_conversion_to_a_fixed_budget():
    model, given = model_and_inputs()
    stage = convert(model, schedule=[0.5], inputs=given, solver=Picard(rtol=0, atol=0, max_steps=2)).stages[0]
    assert stage.converged != stage.converged  # nothing was to converge
    model(**given).logits.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_conversion_measures_on_something_of_its_own():
    conversion = convert(make("llama"), schedule=[0.9])
    assert 0 < conversion.stages[0].output < 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"schedule": []}, "`schedule` must hold at least one anchor"),
        ({"schedule": [1.2]}, r"`anchor` must be in \[0, 1\]"),
        ({"max_steps": -3}, "`max_steps` must be >= 0"),
    ],
)
def test_wrong_conversions_are_named_before_anything_happens(options, match):
    model = make("llama")
    with pytest.raises(ValueError, match=match):
        convert(model, **options)
    assert model.config._attn_implementation != "equilibrium"
