"""Registered attention in use: masks, and what models do with it."""

import copy
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers_models import MODELS, TIGHT, logits, model_and_inputs

from implicit_attention.integrations.transformers import convert, last_solves, register, report

every = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def equilibrium():
    register(on_failure="raise")


# Masks.


def forward(query, key, mask, **given):
    """The registered function as a model without rotary positions or a cache of its own would call it."""
    module = torch.nn.Module()
    module.is_causal = True
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
    with pytest.raises(TypeError, match="`attention_mask` must be boolean"):
        forward(query, key, allowed.long())


def test_without_a_mask_causality_ends_at_the_last_key():
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 4, n, 8, generator=generator, dtype=torch.float64) for n in (3, 5))
    by_hand = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)[None, None]
    torch.testing.assert_close(forward(query, key, None), forward(query, key, by_hand), rtol=1e-12, atol=1e-12)
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


@pytest.mark.parametrize("name", ["llama", "t5", "gemma2", "gpt_oss"])
def test_half_precision_is_solved_in_single(name):
    model, given = model_and_inputs(name, torch.bfloat16)
    found = model(**given).logits
    assert found.dtype == torch.bfloat16
    found.float().square().sum().backward()
    for solve in last_solves(model).values():
        assert solve.residual.dtype == torch.float32
        assert solve.converged.all()


def test_half_precision_loses_only_what_its_output_loses():
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 4, 5, 8, generator=generator).bfloat16() for _ in range(2))
    rounded = forward(query, key, None)
    assert torch.equal(rounded, forward(query.float(), key.float(), None).bfloat16())


@pytest.mark.slow
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
    pickle.loads(pickle.dumps(ALL_ATTENTION_FUNCTIONS["equilibrium"]))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(ValueError, match="no layer of LlamaForCausalLM has called"):
            report(other)
        assert torch.equal(logits(other, given), expected)
