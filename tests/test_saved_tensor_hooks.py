"""Hooks on saved tensors, such as those of checkpointing, change no gradient, whatever is differentiated inside."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import implicit_attention as ia
from implicit_attention import spins
from implicit_attention.layers import SpinAttention, SpinTransformerBlock
from implicit_attention.linear import Neumann
from implicit_attention.potentials import HiddenUnits, Potential, Units
from implicit_attention.testing.numerics import random

N, D = 4, 6


class LogCosh(Potential):
    def value(self, z):
        return 0.5 * z.cosh().log().sum(-1)


class Softplus(Units):
    def cumulant(self, t):
        return torch.nn.functional.softplus(t)


def hidden(q, k):
    return ia.solve(ia.AnchoredEnergy(HiddenUnits(0.3 * k.mT, Softplus()), q, 0.5), q).value


def energy(q, k):
    weights = 0.1 * k.sum(-2, keepdim=True)
    return ia.EnergyFunction(lambda z, q, w: (z.square() / 2 - w * z.cos() - z * q).sum(-1), q, weights, event_ndim=1)


def system(h, J=None):
    if J is None:
        return spins.SpinSystem(lambda h: 0.05 * h @ h.mT, h)
    return spins.SpinSystem((J + J.mT) / 20, h)


def magnetized(method):
    return lambda h, k: spins.magnetization(system(h), method) + spins.magnetization(system(h, k @ k.mT), method)


def layer(cls, **options):
    torch.manual_seed(0)
    made = cls(D, 2, method=spins.MeanField(), derivative="total", **options).double()
    return lambda h, k: made(h)


CALLS = {
    "a potential by its value": lambda q, k: ia.solve(ia.AnchoredEnergy(LogCosh(), q, 0.5), q).value,
    "units by their cumulant": hidden,
    "an energy": lambda q, k: ia.solve(energy(q, k), q).value,
    "an energy by Newton's method": lambda q, k: ia.solve(energy(q, k), q, solver=ia.NewtonKrylov()).value,
    "an adjoint by a series": lambda q, k: ia.solve(energy(q, k), q, adjoint=ia.Implicit(Neumann())).value,
    "attention": lambda q, k: ia.equilibrium_attention(q, k, k),
    "MeanField": magnetized(spins.MeanField()),
    "TAP": magnetized(spins.TAP()),
    "AdaTAP": magnetized(spins.AdaTAP()),
    "SaddlePoint": magnetized(spins.SaddlePoint()),
    "GaussianClosure": lambda h, k: spins.magnetization(system(h, k @ k.mT), spins.GaussianClosure()),
    "thermodynamics": lambda h, k: spins.thermodynamics(system(h, k @ k.mT), spins.TAP()).entropy,
    "spin layer": layer(SpinAttention),
    "spin block": layer(SpinTransformerBlock, feed_forward=8),
}


def on_cpu(function, *inputs):
    with torch.autograd.graph.save_on_cpu():
        return function(*inputs)


HOOKS = {
    "checkpoint": lambda f, *x: checkpoint(f, *x, use_reentrant=False),
    "reentrant checkpoint": lambda f, *x: checkpoint(f, *x, use_reentrant=True),
    "save_on_cpu": on_cpu,
}


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_without_hooks(name, hooks):
    inputs = [(0.5 * random(2, N, D, seed=seed)).requires_grad_() for seed in (0, 1)]
    expected = torch.autograd.grad(CALLS[name](*inputs).square().sum(), inputs, allow_unused=True)
    HOOKS[hooks](CALLS[name], *inputs).square().sum().backward()
    for tensor, gradient in zip(inputs, expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_are_there_again_afterwards_in_their_order(fails):
    seen, x = [], torch.ones(2, 3, requires_grad=True)

    class Failing(LogCosh):
        def value(self, z):
            raise ZeroDivisionError

    def hook(name):
        return torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(name) or t, lambda t: t)

    with hook("outer"):
        with hook("inner"):
            if fails:
                with pytest.raises(ZeroDivisionError):
                    Failing().mean(x)
            else:
                LogCosh().mean(x)
            assert not seen
            x.exp()
        x.exp()
    x.exp()
    assert seen == ["inner", "outer"]
