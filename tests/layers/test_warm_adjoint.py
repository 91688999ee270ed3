"""A backward solve that starts at the last one: the same gradients, by fewer products where samples repeat."""

import copy
import pickle

import torch
from torch import nn
from torch.testing import assert_close

from implicit_attention import Equilibrium, Picard


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, z, x):
        return torch.tanh(0.9 * self.mix(z).roll(1, -1) + x)


def trained(warm, steps=6, rate=1e-3):
    """The products of each backward solve, the gradients of the last one, and the layer."""
    torch.manual_seed(0)
    layer = Equilibrium(Block(), solver=Picard(rtol=1e-6), warm_adjoint=warm)
    x, y = torch.randn(5, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    products = []
    for _ in range(steps):
        layer.zero_grad()
        (layer(x) - y).square().mean().backward()
        assert bool((layer.last_solve.adjoint.status == 0).all())
        products.append(float(layer.last_solve.adjoint.num_steps.double().mean()))
        gradient = [p.grad.clone() for p in layer.parameters()]
        with torch.no_grad():
            for p in layer.parameters():
                p -= rate * p.grad
    return products, gradient, layer


def test_repeated_samples_need_fewer_products_for_the_same_gradient():
    cold, expected, _ = trained(False)
    warm, found, layer = trained(True)
    assert warm[0] == cold[0]
    assert sum(warm[1:]) < 0.7 * sum(cold[1:])
    assert_close(found, expected, rtol=1e-4, atol=1e-7)
    # Copies and files hold no solution.
    assert set(layer.state_dict()) == {"block.mix.weight", "block.mix.bias"}
    assert "warm_adjoint=True" in repr(pickle.loads(pickle.dumps(layer)))
    x, needed = torch.randn(5, 8, dtype=torch.float64), []
    for each in (layer, layer, copy.deepcopy(layer)):
        each(x).square().sum().backward()
        needed.append(int(each.last_solve.adjoint.num_steps.sum()))
    assert needed[1] < needed[2]


def test_of_other_samples_second_derivatives_are_those_of_a_cold_solve():
    _, _, layer = trained(True)
    x = 0.3 * torch.randn(2, 8, dtype=torch.float64, requires_grad=True)

    def gradient(warm):
        layer.warm_adjoint = warm
        (first,) = torch.autograd.grad(layer(x, solver=Picard(rtol=1e-12)).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    assert_close(gradient(True), gradient(False), rtol=1e-8, atol=1e-10)
