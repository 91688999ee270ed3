"""`settle`: the two streams of HRM-Text as one fixed point, with one set of slots for each stack."""

import copy
import pickle
import warnings

import pytest
import torch
import transformers as hf
from tied_models import BOTH, EXIST, IDS, MADE, MODES, TIGHT, cache_of, generated, hrm, settled, stored

import implicit_attention as ia
from implicit_attention.integrations.transformers import settle

# The published recursion.


@pytest.mark.parametrize("mode", MODES)
def test_without_steps_the_model_is_as_it_was_bit_for_bit(mode):
    model = hrm()
    keys, logits = list(model.state_dict()), model(IDS, attention_mask=EXIST).logits
    tokens, cache = generated(model, mode, cached=True), model(IDS, use_cache=True).past_key_values
    for _ in range(2):
        assert settle(model, steps=None) is model
        assert type(model.model) is hf.HrmTextModel
        assert list(model.state_dict()) == keys
        torch.testing.assert_close(model(IDS, attention_mask=EXIST).logits, logits, atol=0, rtol=0)
        assert generated(model, mode, cached=True) == tokens
        again = model(IDS, use_cache=True).past_key_values
        assert len(again.layers) == len(cache.layers) == 2 * 2 * 4
        for one, two in zip(again.layers, cache.layers, strict=True):
            torch.testing.assert_close(one.keys, two.keys, atol=0, rtol=0)
        settle(model)
        assert type(model.model) is not hf.HrmTextModel


@pytest.mark.parametrize("cycles", [(2, 3), (1, 1), (3, 2)])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_as_many_steps_as_high_cycles_are_the_published_answer(cycles, attention):
    model = hrm(H_cycles=cycles[0], L_cycles=cycles[1])
    model.set_attn_implementation(attention)
    exist = EXIST.bool()
    want = model(IDS, attention_mask=EXIST).logits[exist]
    settle(model, steps=cycles[0])
    torch.testing.assert_close(model(IDS, attention_mask=EXIST).logits[exist], want, atol=1e-6, rtol=0)
    model.model.equilibrium.steps = cycles[0] + 1
    assert float((model(IDS, attention_mask=EXIST).logits[exist] - want).detach().abs().max()) > 1e-4


def test_the_fixed_point_is_that_of_both_streams():
    model, equilibrium = settled()
    states = []
    equilibrium.register_forward_hook(lambda module, args, output: states.append((output, args)))
    with torch.no_grad():
        model(IDS, use_cache=False)
        (high, low), (x, options, _) = states[-1]
        options = {**options, "past_key_values": None}
        read = 4 * x[0]
        inner = model.model
        # Every low cycle stands still, not their composition alone.
        torch.testing.assert_close(inner.L_module(low + high + read, **options), low, atol=1e-4, rtol=0)
        torch.testing.assert_close(inner.H_module(high + low, **options), high, atol=1e-4, rtol=0)
    torch.testing.assert_close(model(IDS).logits, model.lm_head(high), atol=1e-5, rtol=0)


# Caches.


@pytest.mark.parametrize("solver", [TIGHT, ia.Picard(rtol=1e-6, damping=0.3, max_steps=300)])
@pytest.mark.parametrize("kind", ["dynamic", "by config", "static"])
@torch.no_grad()
def test_one_set_of_slots_for_each_stack(kind, solver):
    model, _ = settled(solver=solver)
    cache, published = cache_of(model, kind), cache_of(hrm(), kind)
    whole = hrm()
    for part in (IDS[:, :5], IDS[:, 5:6], IDS[:, 6:]):
        logits = model(part, past_key_values=cache, use_cache=True).logits
        whole(part, past_key_values=published, use_cache=True)
    assert len(cache.layers) == 4
    assert cache.is_initialized
    # H_cycles (L_cycles + 1) = 8 slots of the published recursion are 2.
    assert 4 * stored(cache) == stored(published)
    torch.testing.assert_close(logits, model(IDS, use_cache=False).logits[:, 6:], atol=1e-4, rtol=0)


@torch.no_grad()
def test_generation_goes_on_from_a_cache():
    model, _ = settled()
    options = {"do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0, "eos_token_id": None}
    first = model.generate(IDS, max_new_tokens=3, **options)
    more = model.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=4, **options)
    assert (
        more.sequences.tolist() == model.generate(IDS, max_new_tokens=7, use_cache=False, **options).sequences.tolist()
    )
    # What a candidate wrote is taken back.
    more.past_key_values.crop(-3)
    logits = model(more.sequences[:, 10:], past_key_values=more.past_key_values).logits
    torch.testing.assert_close(logits, model(more.sequences, use_cache=False).logits[:, 10:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "by config", "static"])
@pytest.mark.parametrize("name", ["llama", *BOTH])
@torch.no_grad()
def test_a_call_that_raises_leaves_the_cache_as_it_was(name, kind):
    model, equilibrium = MADE[name]()
    cache, options = cache_of(model, kind), equilibrium.options
    for held in (0, 5):
        if held:
            model(IDS[:, :5], past_key_values=cache, use_cache=True)
        before = copy.deepcopy(cache)
        equilibrium.options = options.override(solver=ia.Picard(max_steps=2))
        with pytest.raises(ia.ConvergenceError):
            model(IDS[:, 5:], past_key_values=cache, use_cache=True)
        equilibrium.options = options
        assert int(cache.get_seq_length()) == held
        for now, then in zip(cache.layers, before.layers, strict=False):
            assert int(now.get_seq_length()) == int(then.get_seq_length()) == held
            if held:
                torch.testing.assert_close(now.keys, then.keys, atol=0, rtol=0)
                torch.testing.assert_close(now.values, then.values, atol=0, rtol=0)
    want = model(IDS, use_cache=False).logits[:, 5:]
    found = model(IDS[:, 5:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(found, want, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", BOTH)
def test_steps_beside_tokens_of_a_cache_are_refused(name):
    model, equilibrium = MADE[name](steps=2)
    cache = model(IDS, use_cache=True).past_key_values
    for steps in (0, 2):
        equilibrium.steps = steps
        with pytest.raises(ValueError, match=f"steps={steps}; solve"):
            model(IDS[:, :1], past_key_values=cache)
    with pytest.raises(ValueError, match="use_cache=False"):
        generated(model, "greedy", cached=True)
    assert generated(model, "greedy", cached=False)


@pytest.mark.parametrize("mode", ["greedy", "static", "beams"])
def test_one_step_of_one_low_cycle_reads_what_an_evaluation_of_all_tokens_reads(mode):
    model, _ = settled(steps=1, L_cycles=1)
    assert generated(model, mode, cached=True) == generated(model, mode, cached=False)


# Gradients.


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["of the model", "static"])
def test_gradients_are_those_of_steps_with_and_without_an_empty_cache(kind):
    grads = []
    for cached, steps in ((False, 200), (False, "solve"), (True, "solve")):
        model, _ = settled(steps=steps, adjoint=ia.Implicit(ia.linear.GMRES(rtol=1e-6)))
        cache = {"past_key_values": cache_of(model, kind)} if cached and kind == "static" else {}
        model(IDS, attention_mask=EXIST, labels=IDS, use_cache=cached, **cache).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert [name for name, grad in grads[0].items() if grad is None] == ["model.z_L_init"]
    for name, grad in grads[0].items():
        for other in grads[1:]:
            torch.testing.assert_close(other[name], grad, atol=2e-5, rtol=2e-3, msg=name)


@pytest.mark.parametrize("kind", [hf.DynamicCache, lambda config: hf.StaticCache(config, max_cache_len=12)])
def test_a_cache_of_fewer_layers_is_refused_and_stays_empty(kind):
    model, _ = settled()
    cache = kind(config=hf.LlamaConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2))
    with pytest.raises(ValueError, match=r"`past_key_values` must have the \d layers .* got 1 of them; make it for"):
        model(IDS, past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == 0


def test_it_trains_from_the_published_model_and_w_learns():
    model = settle(hrm().train(), steps=range(2, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = model(IDS, attention_mask=EXIST, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.1
    assert float(model.model.equilibrium.block.inject.weight.detach().abs().min()) > 0


def test_a_prefix_is_solved_with_its_sample():
    model, equilibrium = settled(prefix_lm=True)
    assert equilibrium.causal is False
    prefix = torch.tensor([[1] * 4 + [0] * 3]).expand(3, -1)
    one, two = (model(IDS, token_type_ids=kinds).logits for kinds in (None, prefix))
    assert float((one - two)[:, :3].detach().abs().max()) > 1e-4
    options = {"do_sample": False, "max_new_tokens": 5, "token_type_ids": prefix, "pad_token_id": 0}
    tokens = [model.generate(IDS, use_cache=cached, **options).tolist() for cached in (True, False)]
    assert tokens[0][0][:7] == IDS[0].tolist()
    published = hrm(prefix_lm=True)
    want = published(IDS, token_type_ids=prefix).logits
    torch.testing.assert_close(settle(published, steps=2)(IDS, token_type_ids=prefix).logits, want, atol=1e-6, rtol=0)
    ordered, _ = settled(prefix_lm=True, causal=True)
    torch.testing.assert_close(ordered(IDS).logits, one, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="causal=False"):
        ordered(IDS, token_type_ids=prefix)


# What belongs to a model.


def test_files_have_the_published_names(tmp_path):
    model, _ = settled()
    published = list(hrm().state_dict())
    w = "model.equilibrium.block.inject.weight"
    assert sorted(model.state_dict()) == sorted([*published, w])
    assert sorted(name for name, _ in model.named_parameters()) == sorted([*published, w])
    torch.save(model.state_dict(), tmp_path / "settled.pt")
    other, _ = settled()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    other.load_state_dict(torch.load(tmp_path / "settled.pt"))
    torch.testing.assert_close(other(IDS).logits, model(IDS).logits, atol=0, rtol=0)
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plainly = hf.HrmTextForCausalLM.from_pretrained(tmp_path)
    for cached in (False, True):
        want = settle(copy.deepcopy(model), steps=None)(IDS, use_cache=cached).logits
        torch.testing.assert_close(plainly(IDS, use_cache=cached).logits, want, atol=0, rtol=0)
    inner = settle(hrm().model)
    inner.save_pretrained(tmp_path / "inner")
    assert inner.config.architectures == ["HrmTextModel"]


def test_copies_and_pickles_are_models_of_their_own():
    model, _ = settled()
    want = model(IDS).logits
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(again(IDS).logits, want, atol=0, rtol=0)
        with torch.no_grad():
            again.model.L_module.layers[0].mlp.down_proj.weight.add_(1.0)
            assert float((again(IDS).logits - want).abs().max()) > 1e-3
        torch.testing.assert_close(model(IDS).logits, want, atol=0, rtol=0)
    settle(model, steps=3)
    assert float(model.model.equilibrium.block.inject.weight.detach().trace()) == 4 * 32
    # The tensors of a wrong checkpoint are named.
    with pytest.raises(RuntimeError, match=r"L_module.layers.0.mlp.down_proj.weight"):
        model.load_state_dict({"model.L_module.layers.0.mlp.down_proj.weight": torch.zeros(1, 1)}, strict=False)


def test_tuples_are_returned_on_request():
    model, _ = settled()
    want = model(IDS).logits
    torch.testing.assert_close(model(IDS, return_dict=False)[0], want, atol=1e-5, rtol=0)
    (state, _) = model.model(IDS, return_dict=False)
    torch.testing.assert_close(model.lm_head(state), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"steps": 0}, ValueError, "steps"),
        ({"steps": range(0)}, ValueError, "steps"),
        ({"solver": "Picard"}, TypeError, "Picard"),
    ],
)
def test_what_cannot_be_settled_is_refused_by_name(change, error, words):
    model = hrm()
    with pytest.raises(error, match=words):
        settle(model, **change)
    assert not hasattr(model.model, "equilibrium")


@pytest.mark.parametrize("name", ["output_attentions", "output_hidden_states"])
def test_states_of_layers_are_refused(name):
    model, _ = settled()
    with pytest.raises(ValueError, match=f"{name}.*steps=None"):
        model(IDS, **{name: True})
