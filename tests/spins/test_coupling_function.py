"""Couplings that are a function of the field: m = -dF/dh in total, and its parts."""

import torch
from torch import nn

from implicit_attention.spins import Enumeration, SpinSystem, free_energy, magnetization, thermodynamics
from implicit_attention.testing.numerics import random

B, N = 2, 4
BETA = torch.tensor([0.6, 1.3], dtype=torch.float64)


def close(value, truth, tolerance=1e-12):
    torch.testing.assert_close(value, truth, rtol=tolerance, atol=tolerance)


def test_magnetization_is_the_total_slope_of_the_free_energy():
    couple, field = 0.3 * random(N, N), random(B, N, 1, seed=1)

    def follow(h):
        return torch.tanh(couple + couple.mT + h @ h.mT) / 4

    def free(field):
        return free_energy(SpinSystem(follow, field, BETA), Enumeration())

    live = field.clone().requires_grad_()
    (total,) = torch.autograd.grad(-free(live).sum(), live)
    moving = SpinSystem(follow, field, BETA)
    close(magnetization(moving, Enumeration()), total)
    spins, through = magnetization(moving, Enumeration(), split=True)
    close(spins + through, total)
    # At fixed couplings: the first part alone, as in the bundle.
    close(spins, magnetization(SpinSystem(follow(field), field, BETA), Enumeration()))
    close(spins, thermodynamics(moving, Enumeration()).magnetization)
    assert through.abs().max() > 1e-2


def test_without_a_function_nothing_comes_through_the_couplings():
    system = SpinSystem(random(N, N).diagonal().diag(), random(B, N, 1, seed=1), BETA)
    spins, through = magnetization(system, Enumeration(), split=True)
    assert (through == 0).all()
    close(magnetization(system, Enumeration()), spins, 0.0)


def test_parameters_of_a_coupling_function_learn():
    class Couplings(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

        def forward(self, h):
            return self.scale * torch.tanh(h @ h.mT)

    module, field = Couplings(), random(B, N, 1, seed=1)
    magnetization(SpinSystem(module, field, BETA), Enumeration()).square().sum().backward()

    def loss(shift):
        live = field.clone().requires_grad_()
        moving = SpinSystem(lambda h: (0.3 + shift) * torch.tanh(h @ h.mT), live, BETA)
        (total,) = torch.autograd.grad(free_energy(moving, Enumeration()).sum(), live)
        return total.square().sum()

    step = 1e-5
    near, far = loss(step) - loss(-step), loss(2 * step) - loss(-2 * step)
    close(module.scale.grad, (8 * near - far) / (12 * step), 1e-8)


def test_couplings_shared_by_a_batch_may_follow_all_of_it():
    field = random(B, N, 1, seed=1)

    def follow(h):
        return 0.2 * torch.tanh(h @ h.mT).mean(0)

    live = field.clone().requires_grad_()
    value = free_energy(SpinSystem(follow, live, BETA), Enumeration())
    # dF/dh of all samples together: log Z of every sample counts by its own beta.
    (total,) = torch.autograd.grad((value * BETA).sum(), live)
    found = magnetization(SpinSystem(follow, field, BETA), Enumeration())
    close(found, -total / BETA[:, None, None])


def test_magnetization_can_be_transformed():
    batch = random(3, N, 1, seed=4)

    def function(field):
        couplings = lambda h: 0.2 * torch.tanh(h @ h.mT)  # noqa: E731
        return magnetization(SpinSystem(couplings, field, 0.9), Enumeration()).square().sum()

    field = batch[0].clone().requires_grad_()
    (truth,) = torch.autograd.grad(function(field), field)
    close(torch.func.grad(function)(batch[0]), truth)
    close(torch.vmap(torch.func.grad(function))(batch)[0], truth)


def test_a_half_precision_module_may_give_the_couplings():
    module = nn.Linear(1, 3, dtype=torch.bfloat16)
    field = random(B, N, 1, seed=1).bfloat16()
    magnetization(SpinSystem(lambda h: module(h) @ module(h).mT, field), Enumeration())
