"""ImplicitMultiheadAttention inside the transformer layers of torch.nn, and replace_attention."""

import contextlib
import copy
import inspect
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from implicit_attention import Anderson, ConvergenceError, OneStep, Picard, Status, UnsupportedImplementation
from implicit_attention.integrations.multihead import ImplicitMultiheadAttention, replace_attention
from implicit_attention.testing.numerics import equilibrium_reference, random

B, N, M, DIM, HEADS = 2, 6, 5, 8, 2
TIGHT = Anderson(rtol=1e-12, atol=1e-14)
PADDING = torch.arange(N) >= torch.tensor([[4], [6]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
MODES = {
    "train": (True, contextlib.nullcontext),
    "eval": (False, contextlib.nullcontext),
    "eval, no_grad": (False, torch.no_grad),
    "eval, inference_mode": (False, torch.inference_mode),
}
both_ways = pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "batch second"])
norm_places = pytest.mark.parametrize("norm_first", [True, False], ids=["norm first", "norm last"])
# Torch's layers warn that they have no fast path for such options, that nested tensors are a prototype, and that masks
# of two kinds will not always be taken.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]


def options(**given):
    return {"d_model": DIM, "nhead": HEADS, "dim_feedforward": 12, "dropout": 0.0, "dtype": torch.float64, **given}


def swapped(model, seed=0, **given):
    """The model with its attention replaced, all parameters moved off where they start."""
    found = replace_attention(model, **{"solver": TIGHT, **given})
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in dict.fromkeys(model.parameters()):
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model, found


@pytest.fixture
def calls(monkeypatch):
    """The modules that were called, counted without hooks, which would change the path that torch takes."""
    called, forward = [], ImplicitMultiheadAttention.forward

    def counted(self, *args, **kwargs):
        called.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(ImplicitMultiheadAttention, "forward", counted)
    return called


# The hosts, written out: batch first, float64.


def attended(module, x, context, mask=None):
    """What the module answers; `mask` additive, (B, N, M)."""
    query, key, value = (
        F.linear(t, w, b).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for t, w, b in zip(
            (x, context, context), module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3), strict=True
        )
    )
    mask = None if mask is None else mask[:, None]
    z = equilibrium_reference(query, key, value, mask, beta=module.beta(), anchor=module.anchor())
    return F.linear(z.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)


def feed_forward(layer, x):
    return layer.linear2(torch.relu(layer.linear1(x)))


def encoder_layer(layer, x, mask=None):
    if layer.norm_first:
        normed = layer.norm1(x)
        x = x + attended(layer.self_attn, normed, normed, mask)
        return x + feed_forward(layer, layer.norm2(x))
    x = layer.norm1(x + attended(layer.self_attn, x, x, mask))
    return layer.norm2(x + feed_forward(layer, x))


def decoder_layer(layer, x, memory, mask=None, memory_mask=None):
    if layer.norm_first:
        normed = layer.norm1(x)
        x = x + attended(layer.self_attn, normed, normed, mask)
        x = x + attended(layer.multihead_attn, layer.norm2(x), memory, memory_mask)
        return x + feed_forward(layer, layer.norm3(x))
    x = layer.norm1(x + attended(layer.self_attn, x, x, mask))
    x = layer.norm2(x + attended(layer.multihead_attn, x, memory, memory_mask))
    return layer.norm3(x + feed_forward(layer, x))


def additive(mask=None, padding=None, rows=N):
    total = torch.zeros(B, rows, N, dtype=torch.float64)
    total = total if mask is None else total + mask
    return total if padding is None else total.masked_fill(padding[:, None], -math.inf)


def agree(output, expected, kept=None):
    kept = torch.ones(output.shape[:2], dtype=torch.bool) if kept is None else kept
    torch.testing.assert_close(output[kept], expected[kept], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
@norm_places
@both_ways
def test_an_encoder_layer_calls_it(batch_first, norm_first, mode, calls):
    training, context = MODES[mode]
    layer = nn.TransformerEncoderLayer(**options(batch_first=batch_first, norm_first=norm_first))
    layer, _ = swapped(layer.train(training))
    x = random(B, N, DIM)
    for mask, padding in ((None, None), (None, PADDING), (CAUSAL, None), (CAUSAL, PADDING)):
        calls.clear()
        with context():
            given = x if batch_first else x.transpose(0, 1)
            output = layer(given, mask, padding, is_causal=mask is not None)
        agree(output if batch_first else output.transpose(0, 1), encoder_layer(layer, x, additive(mask, padding)))
        assert calls == [layer.self_attn]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("mode", MODES)
@norm_places
@both_ways
def test_an_encoder_calls_it_whether_swapped_before_or_after_it_was_made(batch_first, norm_first, mode, when, calls):
    training, context = MODES[mode]
    layer = nn.TransformerEncoderLayer(**options(batch_first=batch_first, norm_first=norm_first))
    if when == "before":
        replace_attention(layer, solver=TIGHT)
        encoder = nn.TransformerEncoder(layer, 2)
        for one in encoder.layers:
            nn.init.normal_(one.self_attn.anchor.logit)
        assert not encoder.use_nested_tensor
    else:
        encoder, found = swapped(nn.TransformerEncoder(layer, 2))
        assert list(found) == ["layers.0.self_attn", "layers.1.self_attn"]
        assert encoder.use_nested_tensor is (batch_first and not norm_first)
    encoder.train(training)
    x = random(B, N, DIM)
    for mask, padding, hint in ((None, None, None), (None, PADDING, None), (CAUSAL, None, None), (CAUSAL, None, True),
                                (CAUSAL, PADDING, False), (CAUSAL < 0, None, True)):  # fmt: skip
        calls.clear()
        with context():
            given = x if batch_first else x.transpose(0, 1)
            output = encoder(given, mask, padding, is_causal=hint)
        expected, causal = x, None if mask is None else CAUSAL
        for one in encoder.layers:
            expected = encoder_layer(one, expected, additive(causal, padding))
        kept = None if padding is None else ~padding
        agree(output if batch_first else output.transpose(0, 1), expected, kept)
        assert calls == [one.self_attn for one in encoder.layers]


def test_what_torch_nests_is_what_it_pads_otherwise(calls):
    layer = nn.TransformerEncoderLayer(**options(batch_first=True))
    encoder, found = swapped(nn.TransformerEncoder(layer, 3).eval())
    nested = []
    for module in found.values():
        forward = module.forward
        module.forward = lambda *args, _f=forward, **kw: (nested.append(args[0].is_nested), _f(*args, **kw))[1]
    x = random(B, N, DIM)
    with torch.no_grad():
        output = encoder(x, src_key_padding_mask=PADDING)
        assert nested == [True] * 3
        encoder.use_nested_tensor = False
        expected = encoder(x, src_key_padding_mask=PADDING)
        assert nested[3:] == [False] * 3
        torch.testing.assert_close(output[~PADDING], expected[~PADDING], rtol=1e-9, atol=1e-11)
    # As torch leaves what is padding there.
    assert torch.equal(output[PADDING], torch.zeros_like(output[PADDING]))


def test_one_layer_of_an_encoder_may_be_replaced_alone(calls):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(**options(batch_first=True))
    encoder = nn.TransformerEncoder(layer, 3).eval()
    x = random(B, N, DIM)
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=PADDING)
        found = replace_attention(encoder.layers[1], max_steps=0)
        assert list(found) == ["self_attn"]
        output = encoder(x, src_key_padding_mask=PADDING)
    assert calls == [encoder.layers[1].self_attn]
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    encoder.layers[1].self_attn.options = encoder.layers[1].self_attn.options.override(solver=Anderson())
    with torch.no_grad():
        other = encoder(x, src_key_padding_mask=PADDING)
    assert float((other - expected).abs().max()) > 1e-3


def test_anchors_learn_in_a_frozen_encoder_in_evaluation():
    layer = nn.TransformerEncoderLayer(**options(batch_first=True))
    encoder, found = swapped(nn.TransformerEncoder(layer, 2).eval().requires_grad_(False))
    anchors = [module.anchor.logit for module in found.values()]
    gradients = []
    for nested in (True, False):
        encoder.use_nested_tensor = nested
        output = encoder(random(B, N, DIM), src_key_padding_mask=PADDING)
        gradients.append(torch.autograd.grad(output[~PADDING].square().sum(), anchors))
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-10)
    assert all(float(g.abs().min()) > 1e-9 for g in gradients[0])


def test_a_nested_tensor_is_taken_in_self_attention_only():
    made = ImplicitMultiheadAttention(DIM, HEADS, batch_first=True)
    nested = torch.nested.nested_tensor([torch.randn(n, DIM) for n in (3, 5)])
    other = torch.nested.nested_tensor([torch.randn(n, DIM) for n in (3, 5)])
    output, weights = made(nested, nested, nested)
    assert output.is_nested
    assert weights.shape == (2, 5, 5)
    for one, sample in zip(output.unbind(), nested.unbind(), strict=True):
        torch.testing.assert_close(one, made(sample, sample, sample)[0], rtol=0, atol=1e-5)
    for wrong in (dict(key=other, value=other), dict(key=nested, value=nested, key_padding_mask=PADDING)):
        with pytest.raises(ValueError, match="`query` must be nested in self-attention without masks only"):
            made(nested, **wrong)
    with pytest.raises(ValueError, match="`attn_mask` must be given with is_causal=True"):
        made(nested, nested, nested, is_causal=True)


@pytest.mark.parametrize("mode", MODES)
@norm_places
@both_ways
def test_a_decoder_calls_both(batch_first, norm_first, mode, calls):
    training, context = MODES[mode]
    layer = nn.TransformerDecoderLayer(**options(batch_first=batch_first, norm_first=norm_first))
    decoder, found = swapped(nn.TransformerDecoder(layer, 2).train(training))
    assert list(found) == [f"layers.{i}.{name}" for i in range(2) for name in ("self_attn", "multihead_attn")]
    x, memory = random(B, N, DIM), random(B, N, DIM, seed=1)
    tensors = (x, memory) if batch_first else (x.transpose(0, 1), memory.transpose(0, 1))
    with context():
        output = decoder(
            *tensors, tgt_mask=CAUSAL, tgt_is_causal=True, tgt_key_padding_mask=torch.zeros_like(PADDING),
            memory_key_padding_mask=PADDING,
        )  # fmt: skip
    expected = x
    for one in decoder.layers:
        expected = decoder_layer(one, expected, memory, additive(CAUSAL), additive(padding=PADDING))
    agree(output if batch_first else output.transpose(0, 1), expected)
    assert calls == list(found.values())


@pytest.mark.parametrize("mode", MODES)
@both_ways
def test_a_whole_transformer_calls_all(batch_first, mode, calls):
    training, context = MODES[mode]
    model = nn.Transformer(
        DIM, HEADS, 2, 1, 12, dropout=0.0, batch_first=batch_first, dtype=torch.float64, norm_first=False
    )
    model, found = swapped(model.train(training))
    assert list(found) == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn",
                           "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"]  # fmt: skip
    source, target = random(B, N, DIM), random(B, N, DIM, seed=1)
    tensors = (source, target) if batch_first else (source.transpose(0, 1), target.transpose(0, 1))
    with context():
        output = model(
            *tensors, tgt_mask=CAUSAL, tgt_is_causal=True, src_key_padding_mask=PADDING, memory_key_padding_mask=PADDING
        )
    memory = source
    for one in model.encoder.layers:
        memory = encoder_layer(one, memory, additive(padding=PADDING))
    memory, padded = model.encoder.norm(memory), additive(padding=PADDING)
    expected = decoder_layer(model.decoder.layers[0], target, memory, additive(CAUSAL), padded)
    agree(output if batch_first else output.transpose(0, 1), model.decoder.norm(expected))
    assert calls == list(found.values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_model_without_steps_is_the_model_before(mode, dtype):
    training, context = MODES[mode]
    torch.manual_seed(0)
    model = nn.Transformer(16, 4, 2, 2, 32, dropout=0.0, batch_first=True, dtype=dtype).train(training)
    other = copy.deepcopy(model)
    replace_attention(other, max_steps=0)
    source, target = (random(B, N, 16, seed=seed, dtype=dtype) for seed in (0, 1))
    call = {"src_key_padding_mask": PADDING, "tgt_mask": CAUSAL.to(dtype), "tgt_is_causal": True,
            "memory_key_padding_mask": PADDING}  # fmt: skip
    with context():
        output, expected = (it(source, target, **call) for it in (other, model))
    atol = 3e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(output, expected, rtol=0, atol=atol)
    if mode in ("train", "eval"):
        for it in (output, expected):
            it.sin().sum().backward()
        gradients = dict(other.named_parameters())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name].grad, parameter.grad, rtol=0, atol=10 * atol)


def test_padding_changes_nothing_through_a_whole_encoder():
    layer = nn.TransformerEncoderLayer(**options(batch_first=True))
    encoder, _ = swapped(nn.TransformerEncoder(layer, 2), on_failure="raise")
    x = random(B, N, DIM)
    other = x.clone()
    other[PADDING] += random(B, N, DIM, seed=1)[PADDING]
    for training, context in MODES.values():
        encoder.train(training)
        with context():
            outputs = [encoder(t, src_key_padding_mask=PADDING)[~PADDING] for t in (x, other)]
        assert torch.equal(*outputs)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_layer_compiles_without_a_graph_break(training):
    torch._dynamo.reset()
    layer, found = swapped(nn.TransformerEncoderLayer(**options(batch_first=True)).train(training), solver=None)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x = random(B, N, DIM).requires_grad_()
    outcomes = []
    for forward in (layer, compiled):
        layer.zero_grad()
        output = forward(x, CAUSAL < 0, PADDING, is_causal=True)
        output.sin().sum().backward()
        gradients = [p.grad.clone() for p in layer.parameters()]
        outcomes.append((output.detach(), gradients, found["self_attn"].last_solve))
    (expected, gradients, evidence), (output, others, told) = outcomes
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(others, gradients, rtol=1e-10, atol=1e-11)
    assert torch.equal(told.num_evals, evidence.num_evals)


def test_a_model_copies_pickles_and_loads():
    layer = nn.TransformerEncoderLayer(**options(batch_first=True))
    encoder, _ = swapped(nn.TransformerEncoder(layer, 2).eval())
    x = random(B, N, DIM)
    expected = encoder(x)
    fresh, _ = swapped(nn.TransformerEncoder(layer, 2).eval(), seed=1)
    assert not torch.allclose(fresh(x), expected)
    fresh.load_state_dict(encoder.state_dict())
    for other in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder)), fresh):
        assert torch.equal(other(x), expected)


# replace_attention.


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.MultiheadAttention(4, 2)
        self.parts = nn.ModuleDict({"again": nn.Sequential(nn.Linear(4, 4), self.shared)})
        self.deep = nn.ModuleList([nn.ModuleList([nn.MultiheadAttention(4, 1, kdim=3)])])
        self.deep.append(self.deep[0])


def test_every_attention_is_replaced_wherever_it_is():
    model = Model()
    before, linear = dict(model.named_parameters()), model.parts["again"][0]
    found = replace_attention(model, anchor=0.25)
    assert list(found) == ["shared", "parts.again.1", "deep.0.0", "deep.1.0"]
    assert all(type(module) is ImplicitMultiheadAttention for module in found.values())
    assert all(model.get_submodule(name) is module for name, module in found.items())
    assert model.shared is model.parts["again"][1]
    assert model.deep[0] is model.deep[1]
    assert model.parts["again"][0] is linear
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert set(after) - set(before) == {"shared.beta.log_scale", "deep.0.0.beta.log_scale"}
    assert not any(isinstance(part, nn.MultiheadAttention) for part in model.modules())
    with pytest.raises(ValueError, match=r"`module` must have an nn.MultiheadAttention, got Model without any"):
        replace_attention(model)


def test_an_optimizer_made_before_goes_on():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(**options(batch_first=True)), 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = replace_attention(model)
    new = [p for module in found.values() for part in (module.anchor, module.beta) for p in part.parameters()]
    optimizer.add_param_group({"params": new})
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(random(B, N, DIM)).sin().sum().backward()
    optimizer.step()
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_what_cannot_be_replaced_is_said_and_nothing_is_done():
    class Own(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    with pytest.raises(TypeError, match=r"`module` must be an nn.Module, got list"):
        replace_attention([nn.MultiheadAttention(4, 2)])
    with pytest.raises(ValueError, match=r"`module` must have an nn.MultiheadAttention, got Linear without any"):
        replace_attention(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"use ImplicitMultiheadAttention.from_torch\(module\)"):
        replace_attention(nn.MultiheadAttention(4, 2))
    model = nn.Sequential(nn.MultiheadAttention(4, 2), Own(4, 2), nn.MultiheadAttention(4, 2))
    model[2].register_forward_pre_hook(lambda *_: None)
    before = list(model)
    with pytest.raises(ValueError, match=r"`1` with a forward of its own \(Own\); `2` with hooks, which would be lost"):
        replace_attention(model)
    assert list(model) == before
    for wrong, match in (({"anchor": 2.0}, "`anchor` must be in"), ({"max_steps": -1}, "`max_steps` must be >= 0")):
        with pytest.raises(ValueError, match=match):
            replace_attention(nn.Sequential(*before[:1]), **wrong)
    assert list(model) == before


def test_modes_precisions_and_what_is_trained_stay():
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2, dtype=torch.bfloat16))
    model[0].eval().requires_grad_(False)
    found = replace_attention(model)
    assert [module.training for module in found.values()] == [False, True]
    assert [module.anchor.logit.dtype for module in found.values()] == [torch.float32, torch.bfloat16]
    assert [module.in_proj_weight.requires_grad for module in found.values()] == [False, True]
    assert found["0"].anchor.training is False


def test_every_option_reaches_the_modules():
    names = {"anchor", "beta", "solver", "adjoint", "impl", "max_steps", "on_failure"}
    parameters = inspect.signature(replace_attention).parameters
    assert set(parameters) == {"module", *names}
    constructor = inspect.signature(ImplicitMultiheadAttention).parameters
    assert all(parameters[name].default == constructor[name].default for name in names)

    def made(**given):
        torch.manual_seed(0)
        model = nn.Sequential(nn.MultiheadAttention(DIM, HEADS, dtype=torch.float64))
        replace_attention(model, **given)
        return model[0]

    x = random(N, B, DIM)
    usual = made()(x, x, x)[0]
    for given in ({"anchor": 0.9}, {"beta": 3.0}, {"max_steps": 0}, {"solver": Picard(rtol=0, atol=0, max_steps=1)}):
        assert float((made(**given)(x, x, x)[0] - usual).detach().abs().max()) > 1e-4, given
    with pytest.raises(ConvergenceError):
        made(max_steps=1, on_failure="raise")(x, x, x)
    with pytest.raises(UnsupportedImplementation):
        made(impl="sdpa")(x, x, x)
    gradients = []
    for adjoint in (None, OneStep()):
        module = made(adjoint=adjoint)
        module(x, x, x)[0].sin().sum().backward()
        gradients.append(module.in_proj_weight.grad)
    assert not torch.allclose(*gradients, rtol=1e-3)
    module = made(max_steps=1, on_failure="ignore")
    module(x, x, x)
    assert bool((module.last_solve.status == Status.MAX_STEPS).any())
