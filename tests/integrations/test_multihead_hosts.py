"""ImplicitMultiheadAttention inside the transformer layers of torch.nn."""

import contextlib
import copy

import pytest
import torch
from multihead_hosts import DIM, HEADS, B, N, additive, agree, decoder_layer, encoder_layer, options
from torch import nn

from implicit_attention import Anderson
from implicit_attention.integrations.multihead import ImplicitMultiheadAttention, replace_attention
from implicit_attention.testing.numerics import random

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
