"""`EquilibriumTransformer`: its step is what its parameters say, masks mean what they mean in attention, it settles."""

import copy
import pickle

import pytest
import torch
from torch import nn

import implicit_attention as ia
from implicit_attention import EquilibriumTransformer, Rotary

TIGHT = ia.Anderson(rtol=1e-11, atol=1e-11, max_steps=400)


def made(**options):
    torch.manual_seed(0)
    model = EquilibriumTransformer(8, 2, **{"solver": TIGHT, **options}).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    for name, p in model.named_parameters():
        if "bias" in name:
            nn.init.normal_(p, std=0.1)
    return model, x


@torch.no_grad()
def settle(model):
    """Weights so small that a step contracts."""
    for name, p in model.named_parameters():
        p.mul_(0.3 if "norm" in name or "map" in name else 0.6)


def attention(module, h, allowed, bias=0.0):
    """Softmax attention written out; no key at all gives zero."""
    heads = []
    for part in module.qkv_proj(h).chunk(3, -1):
        heads.append(part.unflatten(-1, (2, 4)).transpose(1, 2))
    query, key, value = heads
    scores = (query @ key.mT / 2 + bias).masked_fill(~allowed, -torch.inf)
    read = scores.softmax(-1).nan_to_num(0.0) @ value
    return module.out_proj(read.transpose(1, 2).flatten(-2))


def step(model, z, x, allowed, bias=0.0):
    block = model.block
    (layer,), (inject, norm, kind) = block.layers, (block.inject, block.layers[0].norm, block.inject.kind)
    if kind == "add":
        h = z + x
    elif kind == "concat":
        h = torch.cat([z, x], -1) @ inject.map.weight.mT + inject.map.bias
    else:
        scale, shift = (x @ inject.map.weight.mT + inject.map.bias).split(8, -1)
        h = z * (1 + scale) + shift
    if norm == "post":
        h = layer.attention_norm(h + attention(layer.attention, h, allowed, bias))
        return layer.mlp_norm(h + layer.mlp(h))
    h = h + attention(layer.attention, layer.attention_norm(h), allowed, bias)
    return block.outer_norm(h + layer.mlp(layer.mlp_norm(h)))


EVERY = torch.ones(5, 5, dtype=torch.bool)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("injection", ["add", "concat", "film"])
def test_a_step_is_what_its_parameters_say(norm, injection):
    model, x = made(norm=norm, injection=injection)
    z = torch.zeros_like(x)
    for _ in range(3):
        z = step(model, z, x, EVERY)
    torch.testing.assert_close(model(x, steps=3), z)


MASKS = {
    "none": ({}, EVERY),
    "boolean": ({"mask": EVERY.triu()}, EVERY.triu()),
    "additive": ({"mask": torch.zeros(5, 5).masked_fill(~EVERY.triu(), -torch.inf)}, EVERY.triu()),
    "of a sample": ({"mask": torch.stack([EVERY.tril(), EVERY])}, torch.stack([EVERY.tril(), EVERY])[:, None]),
    "of a head": (
        {"mask": torch.stack([EVERY.tril(), EVERY]).expand(2, 2, 5, 5)},
        torch.stack([EVERY.tril(), EVERY]),
    ),
    "keys": (
        {"key_mask": torch.tensor([[1, 1, 0, 0, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)},
        torch.tensor([[1, 1, 0, 0, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)[:, None, None, :],
    ),
    "no key": (
        {"key_mask": torch.tensor([[0] * 5, [1] * 5], dtype=torch.bool)},
        torch.tensor([[0] * 5, [1] * 5], dtype=torch.bool)[:, None, None, :],
    ),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks_mean_what_they_mean_in_attention(name, causal):
    model, x = made(causal=causal)
    given, allowed = MASKS[name]
    allowed = allowed & EVERY.tril() if causal else allowed
    x.requires_grad_()
    z = torch.zeros_like(x)
    for _ in range(2):
        z = step(model, z, x, allowed)
    if causal and "key_mask" in given:
        z = torch.where(given["key_mask"][..., None], z, 0.0)
    found = model(x, **given, steps=2)
    torch.testing.assert_close(found, z)
    inputs = [x, *model.parameters()]
    for left, right in zip(*(torch.autograd.grad(t.square().sum(), inputs) for t in (found, z)), strict=True):
        torch.testing.assert_close(left, right)


def test_an_additive_mask_and_missing_keys_join():
    model, x = made()
    bias = torch.randn(5, 5, dtype=torch.float64)
    given, allowed = MASKS["keys"]
    found = model(x, bias, **given, steps=1)
    torch.testing.assert_close(found, step(model, torch.zeros_like(x), x, allowed, bias))


@pytest.mark.parametrize(
    "options", [{}, {"norm": "pre"}, {"injection": "concat"}, {"injection": "add"}, {"depth": 2}, {"dropout": 0.1}]
)
def test_its_solution_and_gradients_are_those_of_400_steps(options):
    model, x = made(**options)
    settle(model)
    key_mask = MASKS["keys"][0]["key_mask"]
    x.requires_grad_()
    inputs = [x, *model.parameters()]
    torch.manual_seed(1)
    z = model(x, key_mask=key_mask)
    assert bool(model.last_solve.converged.all())
    found = torch.autograd.grad(z.square().sum(), inputs)
    torch.manual_seed(1)
    want = model(x, key_mask=key_mask, steps=400)
    torch.testing.assert_close(z, want, atol=1e-9, rtol=0)
    for left, right in zip(found, torch.autograd.grad(want.square().sum(), inputs), strict=True):
        torch.testing.assert_close(left, right, atol=1e-8, rtol=0)


def test_equilibrium_attention_inside_of_each_step():
    model, x = made(attention="equilibrium", causal=True)
    z = model(x, steps=3)
    assert not torch.allclose(z, made(causal=True)[0](x, steps=3))
    moved = x.clone()
    moved[:, 3] += 1.0
    torch.testing.assert_close(model(moved, steps=3)[:, :3], z[:, :3], atol=1e-3, rtol=0)
    z.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_an_attention_module_is_copied_into_every_layer_and_given_the_masks():
    class Mean(nn.Linear):
        def forward(self, h, mask=None):
            weights = torch.ones(5, 5, dtype=h.dtype) if mask is None else mask.to(h.dtype)
            return super().forward(weights @ h / 5)

    given = Mean(8, 8)
    model, x = made(attention=given, depth=2, causal=True)
    first, second = (layer.attention for layer in model.block.layers)
    assert first is not given
    assert first is not second
    z = model(x, steps=2)
    moved = x.clone()
    moved[:, 3] += 1.0
    torch.testing.assert_close(model(moved, steps=2)[:, :3], z[:, :3], atol=0, rtol=0)


def test_rotary_positions_give_tokens_an_order():
    plain, x = made()
    turned, _ = made(rotary=Rotary())
    order = [3, 1, 0, 4, 2]
    torch.testing.assert_close(plain(x[:, order], steps=3), plain(x, steps=3)[:, order])
    assert not torch.allclose(turned(x[:, order], steps=3), turned(x, steps=3)[:, order])
    query = torch.randn(1, 2, 5, 4)
    assert not torch.equal(Rotary()(query, torch.arange(5)), query)


def test_samples_leave_with_their_masks():
    model, x = made()
    settle(model)
    x = x[:1].expand(12, 5, 8).clone()
    key_mask = torch.ones(12, 5, dtype=torch.bool)
    key_mask[::2, 3:] = False
    start = model(x, key_mask=key_mask).detach()
    start[-2:] = torch.randn(2, 5, 8, dtype=torch.float64)
    counts = []
    hook = model.block.register_forward_pre_hook(lambda block, given: counts.append(len(given[0])))
    z = model(x, key_mask=key_mask, start=start)
    hook.remove()
    assert counts.count(2) > 1
    torch.testing.assert_close(z[-2:], start[2:4], atol=1e-8, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 3])
def test_chunks_read_masks_that_all_samples_or_all_queries_share(chunk):
    model, x = made(causal=True, solver=ia.Picard(rtol=1e-12, atol=1e-12, max_steps=400), on_failure="raise")
    settle(model)
    # Of different sizes, so that samples leave the work one after the other.
    x = torch.cat([x, 0.1 * x])
    exist, bias = torch.tensor([0, 1, 0, 1, 1], dtype=torch.bool), torch.linspace(-1, 1, 5, dtype=torch.float64)
    want = model(x, bias.expand(5, 5), exist.expand(4, 5))
    for mask, key_mask in ((bias.expand(5, 5), exist), (bias, exist), (bias[None], exist.expand(4, 5))):
        torch.testing.assert_close(model(x, mask, key_mask, chunk=chunk), want, atol=1e-9, rtol=0)


def test_half_precision_and_autocast():
    model, x = made(solver=None)
    model, x = model.float(), x.float()
    want = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        z = model(x, key_mask=MASKS["keys"][0]["key_mask"])
        near = model(x)
    assert z.dtype == torch.float32
    torch.testing.assert_close(near, want, atol=0.05, rtol=0.05)
    z.sum().backward()
    assert model.bfloat16()(x.bfloat16(), torch.zeros(5, 5)).dtype == torch.bfloat16


def test_a_module_among_modules():
    model, x = made(dropout=0.1, steps=range(2, 5))
    assert "8, heads=2, steps=range(2, 5)" in repr(model)
    model.eval()
    want = model(x)
    assert bool(model.last_solve.converged.all())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x), want, atol=0, rtol=0)
    other = EquilibriumTransformer(8, 2, solver=TIGHT).double()
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x), want, atol=0, rtol=0)
    states = list(model.segments(x, EVERY.tril(), count=2, steps=3))
    torch.testing.assert_close(states[1], model(x, EVERY.tril(), steps=6))
