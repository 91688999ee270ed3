"""Causal layers on inputs that are transposed, strided or expanded: states and gradients of contiguous ones."""

import pytest
import torch
from test_causal_block import decoded, made, tokens

import implicit_attention as ia
from implicit_attention import Anderson, Picard, Rotary
from implicit_attention.layers import Exit


def spread(x, kind):
    """The numbers of x (2, 7, 8), or of its first sample, in memory of another order."""
    if kind == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "features first":
        return x.mT.contiguous().mT
    if kind == "strided":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]
    if kind == "one sample":
        return x[:1].expand(2, 7, 8)
    return x[:, :1].expand(2, 7, 8) if kind == "one token" else x[..., :1].expand(2, 7, 8)


STRIDES = ["transposed", "features first", "strided", "one sample", "one token", "one number"]
WAYS = {
    "whole": {},
    "anderson": {"solver": Anderson(rtol=1e-8, atol=1e-12, history=2, max_steps=500)},
    "chunks": {"chunk": 3},
    "steps": {"steps": 5},
    "unrolled": {"adjoint": ia.Unrolled()},
    "phantom": {"adjoint": ia.Phantom(4)},
    "one step": {"adjoint": ia.OneStep()},
    "reversible": {"adjoint": ia.Reversible(damping=0.5), "steps": 5},
    "padded": {"key_mask": torch.arange(7) >= torch.tensor([[2], [0]])},
    "padded chunks": {"key_mask": torch.arange(7) < torch.tensor([[5], [7]]), "chunk": 3},
    "packed": {"mask": (torch.arange(7) < 4)[:, None] == (torch.arange(7) < 4)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", STRIDES)
def test_states_and_gradients(kind, way):
    model, answers = made(depth=2, rotary=Rotary()), []
    view = spread(tokens(2, 7, 8), kind)
    start, cotangent = (spread(tokens(2, 7, 8, seed=seed), kind) for seed in (2, 3))
    assert not view.is_contiguous()
    for like in (torch.Tensor.contiguous, torch.Tensor.detach):
        x = like(view).detach().requires_grad_()
        assert x.is_contiguous() == (like is torch.Tensor.contiguous)
        z = model(x, start=like(start), **WAYS[way])
        gradients = torch.autograd.grad(z, [x, *model.parameters()], like(cotangent))
        answers.append([z.detach(), model.last_solve.status, *gradients])
    for found, expected in zip(answers[1], answers[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


CALLS = {
    "decoded": lambda model, x: decoded(model, x),
    "in parts": lambda model, x: decoded(model, x, parts=[3, 1, 3]),
    "steps": lambda model, x: decoded(model, x, parts=[3, 1, 3], steps=4),
    "chunks": lambda model, x: decoded(model, x, parts=[7], chunk=2),
    "warm": lambda model, x: decoded(model, x, cache=model.new_cache(warm_start=True)),
    "exit": lambda model, x: model(x, exit=Exit(evaluations=3)),
    "tolerance": lambda model, x: model(x, exit=0.05, chunk=3),
    "mean": lambda model, x: model(x, exit=Exit(mean=2.5)),
    "no gradient": lambda model, x: model(x),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", STRIDES)
@torch.no_grad()
def test_caches_and_exits(kind, call):
    model, x = made(rotary=Rotary()), spread(tokens(2, 7, 8), kind)
    found, expected = (CALLS[call](model, t) for t in (x, x.contiguous()))
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["transposed", "strided"])
def test_the_gradient_is_exact(kind):
    model = made(solver=Picard(rtol=1e-11, atol=1e-12, max_steps=500))
    x = spread(tokens(2, 7, 8), kind)[:1, :3].requires_grad_()
    assert not x.is_contiguous()
    assert torch.autograd.gradcheck(lambda x: model(x, chunk=2), (x,), atol=1e-5)
