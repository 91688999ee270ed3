"""A user's own potential is one short class: `value` alone is enough."""

import torch
from torch import nn

from implicit_attention import AnchoredEnergy, Anderson, LogSumExp, Potential, solve
from implicit_attention.testing.numerics import random
from implicit_attention.testing.potential import PotentialContract


class LogCosh(Potential):
    """sum_a log cosh(z . w_a), the free energy of hidden +-1 units."""

    convex = True

    def __init__(self, weights):
        self.weights = weights

    def value(self, z):
        t = z @ self.weights
        return (t.abs() + torch.log1p((-2 * t.abs()).exp())).sum(-1)


class Network(Potential):
    """A potential given by a module, which is not convex."""

    def __init__(self, module):
        self.module = module

    def value(self, z):
        return self.module(z).squeeze(-1)


class TestLogCosh(PotentialContract):
    selects = False

    def make(self, dtype):
        return LogCosh(0.3 * random(5, 4, dtype=dtype))


class TestNetwork(PotentialContract):
    selects = False

    def make(self, dtype):
        module = nn.Sequential(nn.Linear(5, 8), nn.Softplus(), nn.Linear(8, 1))
        state = {n: random(*p.shape, seed=i, dtype=dtype) for i, (n, p) in enumerate(module.named_parameters())}
        module = module.to(dtype)
        module.load_state_dict(state)
        return Network(module)


def test_gradients_reach_the_users_tensors():
    weights = (0.3 * random(5, 4)).requires_grad_()
    field = random(2, 3, 5, seed=1)

    def equilibrium(weights):
        energy = AnchoredEnergy(LogCosh(weights), field, 0.5)
        return solve(energy, field, solver=Anderson(rtol=1e-13)).value

    assert torch.autograd.gradcheck(equilibrium, (weights,))


def test_gradients_reach_a_modules_parameters():
    module = nn.Sequential(nn.Linear(5, 8), nn.Softplus(), nn.Linear(8, 1)).double()
    field = random(2, 3, 5, seed=1)
    energy = AnchoredEnergy(Network(module), field, 0.5)
    names = [name for name, _ in energy.named_tensors()]
    assert "potential.module.0.weight" in names
    solution = solve(energy, field, solver=Anderson(rtol=1e-12))
    solution.value.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module[:1].parameters())
    assert module[0].weight.grad.abs().sum() > 0


def test_potentials_compose():
    class Sum(Potential):
        def __init__(self, *parts):
            self.parts = parts

        def value(self, z):
            return sum(part.value(z) for part in self.parts)

    keys, weights, z = random(2, 7, 5), 0.3 * random(5, 4, seed=1), random(2, 3, 5, seed=2)
    both = Sum(LogSumExp(keys, 0.5), LogCosh(weights))
    assert [name for name, _ in both.named_tensors()] == ["parts[0].keys", "parts[1].weights"]
    torch.testing.assert_close(both.mean(z), LogSumExp(keys, 0.5).mean(z) + LogCosh(weights).mean(z))
