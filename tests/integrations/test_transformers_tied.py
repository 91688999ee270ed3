"""`tie` and `settle` beside caches of transformers: the tokens of `use_cache=False`, one slot for each layer."""

import copy
import warnings

import pytest
import torch
import transformers as hf
from tied_models import BOTH, EXIST, IDS, MADE, MODES, TIGHT, cache_of, generated, plain, stored, tied
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import DynamicCache

import implicit_attention as ia
from implicit_attention.integrations.transformers import last_solves, report
from implicit_attention.training import watch


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama, kept", "gpt2, kept", "qwen2, kept", "HRM-Text", "HRM-Text, 1 low cycle"])
def test_generation_with_a_cache_gives_the_tokens_without_one(name, mode):
    model, equilibrium = MADE[name]()
    with_cache = generated(model, mode, cached=True)
    assert with_cache == generated(model, mode, cached=False)
    assert bool(equilibrium.last_solve.converged.all())
    # The tokens are not all the same.
    assert len({token for row in with_cache for token in row[7:]}) > 2


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("mode", ["greedy", "static"])
@pytest.mark.parametrize("keep", [0, (0, 2)])
def test_other_layers_and_kinds_of_attention(keep, mode, attention):
    model, _ = tied("llama", keep=keep)
    model.set_attn_implementation(attention)
    assert generated(model, mode, cached=True) == generated(model, mode, cached=False)


@pytest.mark.parametrize("mode", ["greedy", "static", "beams"])
def test_windows_move_while_their_keys_stay(mode):
    model, _ = tied("mistral")
    assert generated(model, mode, cached=True) == generated(model, mode, cached=False)


@pytest.mark.parametrize("mode", ["greedy", "static"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_one_step_with_a_cache_is_the_model_as_it_was(name, mode):
    model = plain(name)
    want, logits = generated(model, mode, cached=True), model(IDS, attention_mask=EXIST).logits
    other, equilibrium = tied(name, contracts=False, solver=None, steps=1)
    assert other.config.use_cache
    # The first call tries whether the layers are causal.
    other(IDS)
    evaluations = counted(equilibrium)
    assert generated(other, mode, cached=True) == want
    # One evaluation for each of 8 calls, none for the cache.
    assert len(evaluations) == 8
    exist = EXIST.bool()
    torch.testing.assert_close(other(IDS, attention_mask=EXIST).logits[exist], logits[exist], atol=1e-5, rtol=0)


@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_a_cache_costs_one_evaluation_at_most(damping):
    model, equilibrium = tied("llama", solver=ia.Picard(rtol=1e-5, max_steps=900, damping=damping))
    evaluations, counts = counted(equilibrium), []
    model(IDS)
    for cached in (False, True):
        evaluations.clear()
        with torch.no_grad():
            model(IDS[:1], use_cache=cached)
        counts.append(len(evaluations))
    assert counts[0] <= counts[1] <= counts[0] + 1
    plainly, _ = tied("llama")
    assert generated(model, "greedy", cached=True) == generated(plainly, "greedy", cached=False)


def counted(equilibrium, shown=len):
    """A list that grows by an entry at each evaluation of the block."""
    seen = []
    equilibrium.block.register_forward_pre_hook(lambda module, arguments: seen.append(shown(arguments)))
    return seen


@pytest.mark.parametrize("solver", [TIGHT, ia.Picard(rtol=1e-2), ia.Picard(rtol=1e-6, damping=0.5, max_steps=900)])
@pytest.mark.parametrize("kind", ["dynamic", "by config", "static"])
def test_memory_is_that_of_the_kept_layers_and_one_block(kind, solver):
    model, equilibrium = tied("llama", solver=solver)
    whole = plain("llama")
    sizes = []
    for each in (model, whole):
        cache = cache_of(each, kind)
        for part in (IDS, IDS[:, :1], IDS[:, 1:3]):
            each(part, past_key_values=cache, use_cache=True)
        sizes.append((stored(cache), len(cache.layers), int(cache.get_seq_length())))
    assert sizes[0] == sizes[1]
    assert sizes[0][1:] == (4, 10)
    assert int(equilibrium.last_solve.num_evals.max()) > 3


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_the_keys_are_those_of_the_settled_states(name, kind):
    model, _ = tied(name)
    cache, other = cache_of(model, kind), cache_of(model, kind)
    together = model(IDS, past_key_values=cache, use_cache=True).logits
    apart = [model(IDS[:, i : i + 1], past_key_values=other, use_cache=True).logits for i in range(7)]
    torch.testing.assert_close(torch.cat(apart, dim=1), together, atol=2e-4, rtol=0)
    for one, two in zip(cache.layers, other.layers, strict=True):
        torch.testing.assert_close(one.keys, two.keys, atol=1e-4, rtol=0)
        torch.testing.assert_close(one.values, two.values, atol=1e-4, rtol=0)


# Gradients.


@pytest.mark.parametrize("steps", [None, 1, 3])
@pytest.mark.parametrize("kind", ["of the model", "dynamic", "static"])
def test_training_on_an_empty_cache_gives_the_gradients_without_one(kind, steps):
    grads = []
    for cached in (False, True):
        # Grouped keys are copied before they are read; the others are read where they lie.
        model, _ = tied(
            "gpt2" if kind == "static" else "llama", steps=steps, adjoint=ia.Implicit(ia.linear.GMRES(rtol=1e-6))
        )
        cache = {"past_key_values": cache_of(model, kind)} if cached and kind != "of the model" else {}
        output = model(IDS, attention_mask=EXIST, labels=IDS, use_cache=cached, **cache)
        assert (output.past_key_values is None) == (not cached)
        output.loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", BOTH)
def test_no_gradient_beside_tokens_that_a_cache_holds(name, kind):
    model, _ = MADE[name]()
    cache = cache_of(model, kind)
    with torch.no_grad():
        model(IDS[:, :4], past_key_values=cache, use_cache=True)
    logits = model(IDS[:, 4:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(logits, model(IDS, use_cache=False).logits[:, 4:], atol=2e-4, rtol=0)
    with pytest.raises(ValueError, match=r"use_cache=False"):
        logits.sum().backward()
    with torch.no_grad():
        assert not model(IDS[:, :1], past_key_values=cache, use_cache=True).logits.requires_grad


def test_dropout_draws_the_same_numbers_with_and_without_a_cache():
    numbers = []
    for cached in (False, True):
        torch.manual_seed(0)
        model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=60, n_embd=32, n_layer=3, n_head=4, n_positions=64))
        ia.tie(model.train(), "transformer.h", steps=2)
        model(IDS, use_cache=cached)
        numbers.append((model(IDS, use_cache=cached).logits, torch.rand(3)))
    torch.testing.assert_close(numbers[0], numbers[1], atol=0, rtol=0)


# Tokens that are absent or lost.


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "HRM-Text"])
def test_tokens_of_padding_are_zero_and_fail_nothing(name, attention):
    model, equilibrium = MADE[name]()
    model.set_attn_implementation(attention)
    states = []
    equilibrium.register_forward_hook(lambda module, args, output: states.extend(tree_leaves(output)))
    embeds = model.get_input_embeddings()(IDS).detach()
    spoilt = embeds.masked_fill(EXIST[..., None] == 0, torch.nan).requires_grad_()
    places = (EXIST.cumsum(-1) - 1).clamp(min=0)
    logits = model(inputs_embeds=spoilt, attention_mask=EXIST, position_ids=places).logits
    assert bool(equilibrium.last_solve.converged.all())
    assert not any(bool(state[EXIST == 0].any()) for state in states)
    (grad,) = torch.autograd.grad(logits[EXIST.bool()].square().sum(), spoilt)
    assert not bool(grad[EXIST == 0].nan_to_num(7.0).any())
    for row in range(3):
        alone = model(IDS[row : row + 1, EXIST[row].bool()]).logits
        torch.testing.assert_close(logits[row, EXIST[row].bool()], alone[0], atol=2e-4, rtol=0)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "HRM-Text"])
def test_nan_in_later_tokens_leaves_earlier_ones_as_they_are(name, cached):
    model, equilibrium = MADE[name](on_failure="ignore")
    embeds = model.get_input_embeddings()(IDS).detach()
    want = model(inputs_embeds=embeds[:, :5]).logits
    embeds[1, 5] = torch.nan
    places = torch.arange(7)[None]
    cache = DynamicCache() if cached else None
    logits = model(inputs_embeds=embeds, position_ids=places, past_key_values=cache, use_cache=cached).logits
    torch.testing.assert_close(logits[:, :5], want, atol=2e-4, rtol=0)
    assert bool(logits[1, 5:].isnan().all())
    assert bool(logits[[0, 2]].isfinite().all())
    lost = equilibrium.last_solve.status == ia.Status.NONFINITE
    assert lost.reshape(3, -1).any(-1).tolist() == [False, True, False]
    assert bool(equilibrium.last_solve.converged[~lost].all())
    if cached:
        later = model(IDS[:, :1], past_key_values=cache, use_cache=True).logits
        assert bool(later[1].isnan().all())
        assert bool(later[[0, 2]].isfinite().all())
        assert equilibrium.last_solve.converged[:, 0].tolist() == [True, False, True]
    equilibrium.options = equilibrium.options.override(on_failure="raise")
    with pytest.raises(ia.ConvergenceError, match=r"failed for .* look for NaN"):
        model(inputs_embeds=embeds)


def test_a_token_that_is_lost_among_tokens_that_read_each_other_loses_its_sample():
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    model = hf.BertModel(hf.BertConfig(**sizes, num_hidden_layers=2, max_position_embeddings=64)).eval()
    equilibrium = ia.tie(model, "encoder.layer", steps=2, on_failure="ignore")
    assert equilibrium.causal is False
    embeds = model.embeddings(IDS).detach()
    embeds[1, 5] = torch.nan
    out = model.encoder(embeds).last_hidden_state
    assert bool(out[1].isnan().all())
    assert bool(out[[0, 2]].isfinite().all())


# Refusals, evidence, options.


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda c: DynamicCache(config=c, offloading=True), "offload"),
        (lambda c: hf.EncoderDecoderCache(DynamicCache(), DynamicCache()), "EncoderDecoderCache"),
        (lambda c: DynamicCache(config=hf.MambaConfig(num_hidden_layers=4)), "LinearAttentionLayer"),
        (lambda c: Quantized(), "QuantizedLayer"),
    ],
)
def test_caches_that_cannot_be_read_again_are_refused_by_name(make, words):
    model, _ = tied("llama", keep=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = make(model.config)
    with pytest.raises(ValueError, match=words) as caught:
        model.model.layers[0](torch.randn(1, 3, 32), past_key_values=cache)
    assert "use_cache=False" in str(caught.value) or "offloading=False" in str(caught.value)


class QuantizedLayer(hf.cache_utils.DynamicLayer):
    """A kind of layer that the library does not know."""


class Quantized(hf.cache_utils.Cache):
    """A cache of such layers."""

    def __init__(self):
        super().__init__(layer_class_to_replicate=QuantizedLayer)


@pytest.mark.parametrize(("name", "path"), [(BOTH[0], "model.layers.1.equilibrium"), (BOTH[1], "model.equilibrium")])
def test_evidence_is_shown_and_watched_and_a_policy_tolerates_failures(name, path, capsys):
    model, equilibrium = MADE[name]()
    with watch(model) as seen:
        model(IDS, attention_mask=EXIST)
        observed = seen.take()
    assert list(last_solves(model)) == [path]
    (row,) = report(model)
    assert (row.name, row.converged, row.statuses) == (path, 1.0, {"CONVERGED": observed.total.forward.problems})
    assert f"{path}: {observed.total.forward.problems} CONVERGED" in capsys.readouterr().out
    policy = ia.FailurePolicy(tolerate=1.0)
    equilibrium.options = equilibrium.options.override(solver=ia.Picard(max_steps=2), on_failure=policy)
    assert generated(model, "greedy", cached=True)
    assert last_solves(model)[path].failed.any()


def test_tied_weights_are_saved_and_loaded(tmp_path):
    from safetensors.torch import load_file

    model, _ = tied("llama")
    model.save_pretrained(tmp_path)
    torch.manual_seed(9)
    other, _ = tied("llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    torch.testing.assert_close(other(IDS).logits, model(IDS).logits, atol=0, rtol=0)
    again = copy.deepcopy(model)
    assert generated(again, "greedy", cached=True) == generated(model, "greedy", cached=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    model, _ = tied("llama", solver=ia.Picard(rtol=1e-5, max_steps=300))
    model.to(dtype)
    for kind in ("dynamic", "static"):
        cache = cache_of(model, kind)
        for part in (IDS[:, :6], IDS[:, 6:]):
            logits = model(part, past_key_values=cache, use_cache=True).logits
        assert {layer.keys.dtype for layer in cache.layers} == {dtype}
        tolerance = 1e-3 if dtype == torch.float64 else 0.1
        want = model(IDS, use_cache=False).logits[:, 6:]
        torch.testing.assert_close(logits, want, atol=tolerance * float(want.detach().abs().max()), rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_samples_that_are_done_leave_the_work_beside_a_cache(kind):
    model, equilibrium = tied("llama")
    batches = counted(equilibrium, lambda args: args[0].shape[0])
    sizes = torch.tensor([1.0, 1e-3, 300.0])[:, None, None]
    embeds = model.get_input_embeddings()(IDS) * sizes
    cache, alone = cache_of(model, kind), [cache_of(model, kind) for _ in range(3)]
    for part in (slice(0, 5), slice(5, 6), slice(6, 7)):
        batches.clear()
        together = model(inputs_embeds=embeds[:, part], past_key_values=cache).logits
        # More than an attempt: where fewer samples do not fit, the library goes on with all. Several tokens in their
        # order stay until all samples are done.
        fewer = sum(batch < 3 for batch in batches)
        assert fewer > 3 or (part == slice(0, 5) and fewer == 0)
        for row in range(3):
            logits = model(inputs_embeds=embeds[row : row + 1, part], past_key_values=alone[row]).logits
            torch.testing.assert_close(together[row], logits[0], atol=2e-4, rtol=0)
