"""A backward solve that starts at the last one: the same gradients, by fewer products where samples repeat."""

import copy
import pickle

import torch
from torch import nn
from torch.testing import assert_close

from implicit_attention import Equilibrium, Picard
from implicit_attention.adjoints.base import AdjointMemory


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, z, x):
        return torch.tanh(0.9 * self.mix(z).roll(1, -1) + x)


def trained(warm, steps=6, rate=1e-3, batches=1):
    """The products of each backward solve, the gradients of the last one, and the layer."""
    torch.manual_seed(0)
    layer = Equilibrium(Block(), solver=Picard(rtol=1e-6), warm_adjoint=warm)
    x, y = torch.randn(batches, 5, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    products = []
    for step in range(steps):
        layer.zero_grad()
        (layer(x[step % batches]) - y).square().mean().backward()
        assert bool((layer.last_solve.adjoint.status == 0).all())
        products.append(float(layer.last_solve.adjoint.num_steps.double().mean()))
        gradient = [p.grad.clone() for p in layer.parameters()]
        with torch.no_grad():
            for p in layer.parameters():
                p -= rate * p.grad
    return products, gradient, layer


def test_repeated_samples_need_fewer_products_for_the_same_gradient():
    cold, expected, _ = trained(False)
    warm, found, _ = trained(True)
    assert warm[0] == cold[0]
    assert sum(warm[1:]) < 0.7 * sum(cold[1:])
    assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_other_samples_are_solved_to_the_same_tolerance():
    cold, expected, _ = trained(False, batches=3)
    warm, found, _ = trained(True, batches=3)
    assert sum(warm) <= sum(cold) + 2 * len(cold)
    assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_other_shapes_start_at_zero_and_numbers_that_are_not_finite_are_not_kept():
    _, _, layer = trained(True)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.isfinite().all()
    memory = AdjointMemory()
    memory.keep(torch.tensor([1.0, torch.nan, torch.inf]))
    assert memory.value.tolist() == [1.0, 0.0, 0.0]
    assert memory.start(torch.zeros(3)) is memory.value
    assert memory.start(torch.zeros(2)) is None
    assert memory.start(torch.zeros(3, dtype=torch.float64)) is None


def test_copies_and_files_hold_no_solution():
    _, _, layer = trained(True)
    assert layer._memory.value is not None
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other._memory.value is None
        assert other.warm_adjoint
    assert set(layer.state_dict()) == {"block.mix.weight", "block.mix.bias"}
    assert "warm_adjoint=True" in repr(layer)


def test_second_derivatives_are_those_of_a_cold_solve():
    _, _, layer = trained(True)
    x = 0.3 * torch.randn(2, 8, dtype=torch.float64, requires_grad=True)

    def gradient(warm):
        layer.warm_adjoint = warm
        (first,) = torch.autograd.grad(layer(x, solver=Picard(rtol=1e-12)).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    assert_close(gradient(True), gradient(False), rtol=1e-8, atol=1e-10)
