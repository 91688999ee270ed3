"""A plain user energy: the contract for one and two event axes, modules, and its errors."""

import torch
from torch import nn

from implicit_attention import Anderson, EnergyFunction, GradientDescent, solve
from implicit_attention.testing.energy import EnergyContract
from implicit_attention.testing.numerics import random


def double_well(z, field):
    return (z.square().sum(-1) / 2 - 1).square() / 4 - (z * field).sum(-1) / 10


def coupled(z, couplings):
    """Sites that see each other: sum |z|^4/4 + |z|^2/2 - tr z^T J z / 2, over the last two axes."""
    quartic = (z**4 / 4 + z.square() / 2).sum((-1, -2))
    return quartic - (z * (couplings @ z)).sum((-1, -2)) / 2


class TestDoubleWell(EnergyContract):
    def make(self):
        return EnergyFunction(double_well, random(2, 3, 5, seed=3), event_ndim=1)


class TestCoupledSites(EnergyContract):
    def make(self):
        couplings = random(3, 3)
        return EnergyFunction(coupled, couplings + couplings.mT, event_ndim=2)


def test_a_module_declares_its_parameters():
    class Well(nn.Module):
        def __init__(self):
            super().__init__()
            self.centre = nn.Parameter(random(5))

        def forward(self, z):
            return (z - self.centre).square().sum(-1) / 2

    module = Well()
    solution = solve(EnergyFunction(module, event_ndim=1), random(2, 3, 5))
    torch.testing.assert_close(solution.value.detach(), module.centre.detach().expand(2, 3, 5))
    solution.value.sum().backward()
    torch.testing.assert_close(module.centre.grad, torch.full((5,), 6.0, dtype=torch.float64))


def test_backtracking_descends_where_plain_steps_would_diverge():
    energy = EnergyFunction(lambda z: 50 * z.square().sum(-1), event_ndim=1)
    solution = solve(energy, random(4, 5), solver=Anderson(rtol=0, atol=1e-9, plain_steps=200))
    assert solution.converged.all()
    assert solution.value.abs().max() < 1e-9


def test_gradient_descent_is_a_step_along_the_gradient():
    energy = EnergyFunction(double_well, random(2, 3, 5, seed=3), event_ndim=1)
    z = random(2, 3, 5)
    one = solve(energy, z, solver=GradientDescent(0.2, max_steps=1, rtol=0, atol=0))
    torch.testing.assert_close(one.value, z - 0.2 * energy.gradient(z))
