"""`tie`: one step of tied layers is the model as it was; from there it is another model, which trains."""

import copy
import io

import pytest
import torch
import transformers as hf
from torch import nn

import implicit_attention as ia
from implicit_attention.layers import contractive

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
GPT2 = {"vocab_size": 60, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
HOSTS = {
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=2)), "model.layers"),
    "gpt2": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, eos_token_id=1, pad_token_id=0)), "transformer.h"),
    "bert": (lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES, max_position_embeddings=64)), "bert.encoder.layer"),
}
IDS = torch.arange(21).reshape(3, 7) % 59 + 1
EXIST = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7, [0, 1, 1, 1, 1, 1, 1]])


def host(name):
    torch.manual_seed(0)
    make, path = HOSTS[name]
    return make().eval(), path


def logits(model):
    return model(IDS, attention_mask=EXIST).logits[EXIST.bool()]


def encoder(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, **{"batch_first": True, **options})
    # The fast path of torch's own, where it has one.
    nested = not layer.norm_first and layer.self_attn.batch_first
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=nested)


@pytest.mark.parametrize("keep", [0, 1, (0, 2)])
@pytest.mark.parametrize("name", HOSTS)
def test_one_step_is_the_model_as_it_was(name, keep):
    model, path = host(name)
    want = logits(model)
    before = sum(p.numel() for p in model.parameters())
    equilibrium = ia.tie(model, path, keep=keep, steps=1)
    torch.testing.assert_close(logits(model), want, atol=1e-6, rtol=0)
    assert sum(p.numel() for p in model.parameters()) == before + 32 * 32
    outside = {0: 0, 1: 2, (0, 2): 2}[keep]
    assert len(equilibrium.block.layers) == 4 - outside
    assert set(equilibrium.last_solve.status.flatten().tolist()) == {ia.Status.BUDGET}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("keep", [0, 1])
def test_one_step_of_an_encoder_of_torch(keep, norm_first, training):
    model = encoder(norm_first=norm_first, dropout=0.0).train(training)
    x, missing = torch.randn(3, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 5])
    want = model(x, src_key_padding_mask=missing)
    ia.tie(model, "layers", keep=keep, steps=1)
    torch.testing.assert_close(model(x, src_key_padding_mask=missing), want, atol=1e-6, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(model(x, src_key_padding_mask=missing)[0], want[0], atol=1e-6, rtol=0)


def test_steps_run_the_layers_again_with_the_input_injected():
    model = encoder(dropout=0.0)
    layers = list(copy.deepcopy(model).layers)
    equilibrium = ia.tie(model, "layers", steps=3)
    nn.init.normal_(equilibrium.block.inject.weight, std=0.1)
    x = torch.randn(2, 5, 8)
    z = x
    for _ in range(3):
        z = z + x @ equilibrium.block.inject.weight.mT
        for layer in layers:
            z = layer(z)
    torch.testing.assert_close(model(x), z)


@pytest.mark.parametrize("name", HOSTS)
def test_it_trains_from_there(name):
    model, path = host(name)
    equilibrium = ia.tie(model.train(), path, keep=1, steps=3)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = model(IDS, attention_mask=EXIST, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        assert [n for n, p in model.named_parameters() if p.grad is None] == []
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.1
    assert float(equilibrium.block.inject.weight.detach().abs().min()) > 0


@pytest.mark.slow
def test_a_tied_encoder_is_solved_and_its_gradients_are_those_of_steps():
    model = encoder(dropout=0.0).double()
    equilibrium = ia.tie(model, "layers", solver=ia.Anderson(rtol=1e-11, atol=1e-11))
    with torch.no_grad():
        # Layers that forget most of what they read.
        for layer in equilibrium.block.layers:
            layer.norm2.weight.mul_(0.3)
    nn.init.normal_(equilibrium.block.inject.weight, std=0.3)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    z = model(x)
    assert bool(equilibrium.last_solve.converged.all())
    found = torch.autograd.grad(z.square().sum(), [*model.parameters()])
    equilibrium.steps = 400
    want = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    torch.testing.assert_close(found, want, atol=1e-8, rtol=0)


def test_state_dicts_and_copies():
    model, path = host("llama")
    ia.tie(model, path, keep=1, steps=2)
    want = logits(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    torch.manual_seed(7)
    other = HOSTS["llama"][0]().eval()
    ia.tie(other, path, keep=1, steps=2)
    other.load_state_dict(torch.load(file))
    for again in (other, copy.deepcopy(model)):
        torch.testing.assert_close(logits(again), want, atol=0, rtol=0)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_generation_is_that_of_the_whole_model(name, cached):
    model, path = host(name)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "use_cache": cached}
    want = model.generate(IDS[:1], **options)
    ia.tie(model, path, steps=1)
    assert model.generate(IDS[:1], **options).tolist() == want.tolist()


@pytest.mark.parametrize(("name", "causal"), [("llama", True), ("gpt2", True), ("bert", False)])
def test_layers_say_whether_tokens_read_later_ones(name, causal):
    model, path = host(name)
    assert ia.tie(model, path).causal is causal
    model, path = host(name)
    assert ia.tie(model, path, causal=not causal).causal is not causal
    assert ia.tie(encoder(), "layers").causal is False


class Counts(nn.Linear):
    """A layer that says of each token that it was there."""

    def forward(self, hidden, attention_mask=None):
        return hidden + 1


@pytest.mark.parametrize(
    ("mask", "absent"),
    [
        (None, None),
        ("words", None),
        (torch.zeros(3, 2), None),
        (torch.ones(2, 3), None),
        (torch.tensor([[0, 1, 1], [1, 1, 0]]), [[1, 0, 0], [0, 0, 1]]),
        (torch.ones(1, 1, 3, 3).tril().bool(), None),
        (torch.ones(2, 1, 3, 3).tril().bool() & torch.tensor([0, 1, 1]).bool(), [[1, 0, 0], [1, 0, 0]]),
        (torch.tensor([[[[0, 1, 1]]], [[[1, 1, 0]]]]).bool(), [[1, 0, 0], [0, 0, 1]]),
        (torch.full((2, 4, 3, 3), torch.finfo(torch.float32).min).triu(1), None),
        (torch.diag(torch.tensor([-torch.inf, -5.0, 0.0])).nan_to_num(0)[None, None], [[1, 0, 0], [1, 0, 0]]),
        (torch.ones(2, 1, 2, 5).bool(), None),
    ],
)
def test_masks_tell_which_tokens_exist(mask, absent):
    model = nn.Module()
    model.layers = nn.ModuleList([Counts(8, 8)])
    ia.tie(model, "layers", dim=8, steps=1)
    found = model.layers[0](torch.ones(2, 3, 8), attention_mask=mask)
    assert (found[..., 0] == 0).tolist() == [[bool(a) for a in row] for row in absent or [[0] * 3] * 2]


def test_states_of_layers_that_are_tied_are_refused():
    model, path = host("llama")
    ia.tie(model, path, steps=1)
    with pytest.raises(ValueError, match="output_hidden_states"):
        model(IDS, output_hidden_states=True)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"layers": "model.blocks"}, ValueError, "this model has lists at 'layers'"),
        ({"layers": "norm"}, TypeError, "lead to an nn.ModuleList"),
        ({"layers": 3}, TypeError, "attribute path"),
        ({"keep": 2}, ValueError, "leave at least one of the 4 layers"),
        ({"keep": (1, 1, 1)}, ValueError, "two: at the beginning and at the end"),
        ({"keep": -1}, ValueError, "keep"),
        ({"dim": 0}, ValueError, "dim"),
        ({"steps": -1}, ValueError, "steps"),
        ({"causal": 1}, TypeError, "causal"),
        ({"model": torch.tanh}, TypeError, "nn.Module"),
        ({"model": encoder(batch_first=False)}, ValueError, "number samples on its first axis"),
        ({"model": nn.Sequential(nn.Linear(2, 2))}, ValueError, "lead to an nn.ModuleList"),
    ],
)
def test_what_cannot_be_tied_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        ia.tie(**{"model": encoder(), "layers": "layers", **change})


def test_layers_of_different_kinds_are_refused():
    model = encoder()
    model.layers[2] = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="all be TransformerEncoderLayer"):
        ia.tie(model, "layers")
    ia.tie(model, "layers", keep=(0, 2))
    with pytest.raises(ValueError, match=r"all be TiedLayers|not be tied already"):
        ia.tie(model, "layers", keep=(0, 2))
    alone = nn.Module()
    alone.layers = nn.ModuleList([nn.Linear(3, 3)])
    with pytest.raises(ValueError, match="dim"):
        ia.tie(alone, "layers")


# Linear maps of bounded norm.


@pytest.mark.parametrize("shape", [(64, 64), (30, 100), (100, 30), (1, 5)])
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_norms_beyond_the_bound_are_scaled_to_just_below_it(shape, scale):
    torch.manual_seed(0)
    linear = contractive(nn.Linear(*reversed(shape)), bound=scale)
    for weight in (torch.randn(shape), torch.ones(shape), torch.eye(*shape), nn.init.orthogonal_(torch.empty(shape))):
        with torch.no_grad():
            linear.weight = 3 * scale * weight
        found = float(torch.linalg.matrix_norm(linear.weight.double(), 2).detach())
        assert found * min(shape) ** (1 / 128) / scale >= 1 - 1e-5
        assert found <= scale
    with torch.no_grad():
        linear.weight = torch.zeros(shape)
    assert not bool(linear.weight.any())


def test_a_contractive_map_keeps_its_bound_while_it_trains():
    torch.manual_seed(0)
    linear = contractive(nn.Linear(6, 6), bound=0.7)
    small = linear.parametrizations.weight.original.detach().clone()
    optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)
    x = torch.randn(9, 6)
    for _ in range(20):
        (-linear(x).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert float(torch.linalg.matrix_norm(linear.weight, 2).detach()) <= 0.7
    assert float(torch.linalg.matrix_norm(linear.weight, 2).detach()) > 0.66
    with torch.no_grad():
        linear.weight = 0.1 * small
    torch.testing.assert_close(linear.weight.detach(), 0.1 * small, atol=0, rtol=0)
