"""Projections of `ImplicitAttention` are called as modules wherever a call is more than torch's linear function."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize

import implicit_attention as ia
from implicit_attention.testing.numerics import random

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


class Doubled(nn.Module):
    def forward(self, tensor):
        return 2 * tensor


class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def made(bias=True):
    torch.manual_seed(0)
    return ia.ImplicitAttention(12, heads=3, projection_bias=bias)


def hooked(layer, name):
    layer.get_submodule(name).register_forward_hook(lambda module, args, output: 2 * output)


def replaced(layer, name):
    part = layer.get_submodule(name)
    usual = part.forward
    part.forward = lambda x: 2 * usual(x)


def derived(layer, name):
    part = Twice(12, 12)
    part.load_state_dict(layer.get_submodule(name).state_dict())
    setattr(layer, name, part)


def parametrized(layer, name):
    part = layer.get_submodule(name)
    for kind in ("weight", "bias"):
        parametrize.register_parametrization(part, kind, Doubled())


def plain_tensor(layer, name):
    part = layer.get_submodule(name)
    for kind in ("weight", "bias"):
        doubled = 2 * getattr(part, kind).detach()
        delattr(part, kind)
        setattr(part, kind, doubled)


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize("change", [hooked, replaced, derived, parametrized, plain_tensor])
@pytest.mark.parametrize("steps", [0, None])
def test_what_a_module_does_beyond_its_product_is_done(change, name, steps):
    x, layer, other = random(2, 5, 12, seed=1, dtype=torch.float32), made(), made()
    with torch.no_grad():
        change(layer, name)
        for parameter in other.get_submodule(name).parameters():
            parameter.mul_(2)
        assert torch.equal(layer(x, max_steps=steps), other(x, max_steps=steps))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("steps", [0, None])
def test_the_bits_are_those_of_the_modules(bias, steps):
    x, found = random(2, 5, 12, seed=1, dtype=torch.float32), []
    for called in (False, True):
        layer = made(bias)
        hooks = [layer.get_submodule(n).register_forward_hook(lambda *_: None) for n in PROJECTIONS if called]
        assert len(hooks) == (4 if called else 0)
        output = layer(x, max_steps=steps)
        found.append((output, *torch.autograd.grad(output.square().sum(), list(layer.parameters()), allow_unused=True)))
    for mine, theirs in zip(*found, strict=True):
        assert mine is theirs is None or torch.equal(mine, theirs)


def test_hooks_on_every_module_see_each_projection():
    layer, seen = made(), []
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    layer(random(2, 5, 12, seed=1, dtype=torch.float32))
    hook.remove()
    assert {id(layer.get_submodule(name)) for name in PROJECTIONS} <= {id(module) for module in seen}


def test_parameters_of_a_functional_call_are_used():
    x, layer = random(2, 5, 12, seed=1, dtype=torch.float32), made()
    other = {name: 1.5 * parameter.detach() for name, parameter in layer.named_parameters() if "proj" in name}
    found = functional_call(layer, other, (x,))
    layer.load_state_dict(other, strict=False)
    assert torch.equal(found, layer(x))


def test_a_width_that_does_not_fit_is_refused_as_by_the_module():
    layer = made()
    layer.k_proj = nn.Linear(11, 12)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(random(2, 5, 12, seed=1, dtype=torch.float32))
