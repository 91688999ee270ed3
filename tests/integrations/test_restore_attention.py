"""restore_attention: what was replaced stands again where it stood, with what was trained meanwhile."""

import copy
import pickle

import pytest
import torch
from multihead_hosts import DIM, B, N, options
from torch import nn

from implicit_attention.integrations.multihead import (
    ImplicitMultiheadAttention,
    replace_attention,
    restore_attention,
)
from implicit_attention.testing.numerics import random


def encoder(**changes):
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(**options(batch_first=True, **changes)), 2)


@pytest.mark.parametrize("training", [True, False])
def test_answers_keys_objects_and_modes_are_the_first_ones(training):
    model, x = encoder().train(training), random(B, N, DIM)
    held, keys = [layer.self_attn for layer in model.layers], list(model.state_dict())
    before = model(x)
    replaced = replace_attention(model, anchor=0.5)
    assert not torch.equal(model(x), before)
    found = restore_attention(model)
    assert list(found) == list(replaced)
    assert [layer.self_attn for layer in model.layers] == held == list(found.values())
    assert list(model.state_dict()) == keys
    assert all(module.training is training for module in found.values())
    assert torch.equal(model(x), before)
    # Nothing is left of it: the model can be replaced again.
    assert list(replace_attention(model)) == list(replaced)


def test_what_was_trained_moved_or_loaded_meanwhile_stays():
    model, x = encoder(), random(B, N, DIM)
    replace_attention(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sin().sum().backward()
    optimizer.step()
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.float().eval()
    # Loaded with assign=True the parameters are other objects than those that torch's modules held.
    loaded = {name: (t + 1).float() for name, t in model.state_dict().items()}
    model.load_state_dict(loaded, assign=True)
    model.layers[0].self_attn.in_proj_weight.requires_grad_(False)
    found = restore_attention(model)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        torch.testing.assert_close(parameter, (trained[name] + 1).float())
    assert [module.training for module in found.values()] == [False, False]
    assert [module.in_proj_weight.requires_grad for module in found.values()] == [False, True]
    fresh = encoder().float().eval()
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(x.float()), fresh(x.float()), rtol=1e-4, atol=1e-4)


def test_shared_modules_and_subclasses_come_back_as_they_were():
    class Named(nn.MultiheadAttention):
        pass

    model = nn.Module()
    model.first = Named(4, 2, kdim=3, vdim=5, add_bias_kv=True)
    model.first.note = "kept"
    model.again = nn.ModuleList([model.first, nn.MultiheadAttention(4, 2)])
    first, second = model.again
    replace_attention(model)
    assert list(restore_attention(model)) == ["first", "again.0", "again.1"]
    assert model.first is first is model.again[0]
    assert model.again[1] is second
    assert (type(model.first), model.first.note) == (Named, "kept")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_restore_their_own(copied):
    model, x = encoder().eval(), random(B, N, DIM)
    before = model(x)
    replace_attention(model)
    other = copied(model)
    found = restore_attention(other)
    assert torch.equal(other(x), before)
    assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}
    assert isinstance(model.layers[0].self_attn, ImplicitMultiheadAttention)
    assert found["layers.0.self_attn"].in_proj_weight is other.layers[0].self_attn.in_proj_weight


def test_what_cannot_be_restored_is_said_and_nothing_is_done():
    with pytest.raises(TypeError, match=r"`module` must be an nn.Module, got list"):
        restore_attention([])
    with pytest.raises(ValueError, match="`module` must hold attention that replace_attention has replaced, got Seq"):
        restore_attention(nn.Sequential(ImplicitMultiheadAttention(4, 2), nn.MultiheadAttention(4, 2)))
    with pytest.raises(ValueError, match="restore the model that holds it"):
        restore_attention(ImplicitMultiheadAttention.from_torch(nn.MultiheadAttention(4, 2)))
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2))
    replace_attention(model)
    before = list(model)
    handle = model[1].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="`module` must have no hooks on what is restored, got some on `1`"):
        restore_attention(model)
    assert list(model) == before
    handle.remove()
    own = nn.Sequential(*model, ImplicitMultiheadAttention(4, 2))
    assert list(restore_attention(own)) == ["0", "1"]
    assert isinstance(own[2], ImplicitMultiheadAttention)
