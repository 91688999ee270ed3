"""replace_attention: which modules of a model are replaced, by what, and what is refused."""

import pytest
import torch
from multihead_hosts import DIM, HEADS, B, N, options
from torch import nn

from implicit_attention import OneStep, Picard
from implicit_attention.integrations.multihead import ImplicitMultiheadAttention, replace_attention
from implicit_attention.testing.numerics import random


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

    model = nn.Sequential(nn.MultiheadAttention(4, 2), Own(4, 2), nn.MultiheadAttention(4, 2))
    model[2].register_forward_pre_hook(lambda *_: None)
    before = list(model)
    with pytest.raises(ValueError, match=r"`1` with a forward of its own \(Own\); `2` with hooks, which would be lost"):
        replace_attention(model)
    assert list(model) == before
    with pytest.raises(ValueError, match="`anchor` must be in"):
        replace_attention(nn.Sequential(before[0]), anchor=2.0)
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
    options = {"solver": Picard(max_steps=1), "adjoint": OneStep(), "impl": "reference", "on_failure": "ignore"}
    model = nn.Sequential(nn.MultiheadAttention(DIM, HEADS))
    (made,) = replace_attention(model, anchor=0.9, beta=3.0, max_steps=7, **options).values()
    assert (made.anchor(), made.beta()) == (0.9, 3.0)
    assert {name: getattr(made.options, name) for name in options} == options
    assert made.options.max_steps == 7
