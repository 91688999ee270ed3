"""`diagnostics.jacobian_penalty`: the mean square of a map's singular values, against its dense Jacobian."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from implicit_attention import AnchoredEnergy, FixedPointMap, LogSumExp
from implicit_attention.diagnostics import jacobian_penalty
from implicit_attention.testing.numerics import dense_jacobian, random


def generator():
    return torch.Generator().manual_seed(0)


def coupled(z, weight, shift):
    return torch.tanh(weight @ z + shift * z.roll(1, -1))


def inputs():
    weight, shift, z = 0.5 * random(3, 3), random(2, 1, 4, seed=1), random(2, 3, 4, seed=2)
    return tuple(t.requires_grad_() for t in (weight, shift, z))


def test_it_is_the_estimate_of_the_dense_jacobian():
    weight, shift, z = inputs()
    problem = FixedPointMap(coupled, weight, shift, event_ndim=2)
    jacobian = dense_jacobian(problem, z).detach()
    signs = 2 * torch.randint(0, 2, z.shape, generator=generator()).double() - 1
    one = (jacobian.mT @ signs.flatten(1)[..., None]).squeeze(-1).square().mean(-1)
    torch.testing.assert_close(jacobian_penalty(problem, z, generator=generator()), one)
    exact = jacobian.square().sum((-1, -2)) / 12
    many = jacobian_penalty(problem, z, samples=3000, generator=generator())
    torch.testing.assert_close(many.detach(), exact, rtol=0.03, atol=0)
    assert not torch.allclose(one, exact, rtol=0.03)


def test_each_problem_has_its_own():
    weight, shift, z = inputs()
    both = jacobian_penalty(FixedPointMap(coupled, weight, shift, event_ndim=2), z, generator=generator())
    first = jacobian_penalty(FixedPointMap(coupled, weight, shift[:1], event_ndim=2), z[:1], generator=generator())
    assert both.shape == (2,)
    torch.testing.assert_close(both[:1], first)


def test_gradients_reach_the_tensors_and_the_state():
    def function(weight, shift, z):
        problem = FixedPointMap(coupled, weight, shift, event_ndim=2)
        return jacobian_penalty(problem, z, samples=2, generator=generator())

    assert torch.autograd.gradcheck(function, inputs())
    gradients = torch.func.grad(lambda *tensors: function(*tensors).sum(), (0, 1, 2))(*(t.detach() for t in inputs()))
    tensors = inputs()
    expected = torch.autograd.grad(function(*tensors).sum(), tensors)
    for gradient, truth in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, truth)


def test_energies_and_half_precision():
    keys, field = random(2, 7, 5), random(2, 3, 5, seed=1)
    energy = AnchoredEnergy(LogSumExp(keys, 0.5), field, 0.3)
    jacobian = dense_jacobian(energy, field)
    found = jacobian_penalty(energy, field, samples=2000, generator=generator())
    torch.testing.assert_close(found, jacobian.square().sum((-1, -2)) / 5, rtol=0.1, atol=0)
    half = AnchoredEnergy(LogSumExp(keys.bfloat16(), 0.5), field.bfloat16(), 0.3)
    lower = jacobian_penalty(half, field.bfloat16(), samples=2000, generator=generator())
    assert lower.dtype == torch.float32
    torch.testing.assert_close(lower.double(), found, rtol=0.05, atol=0)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, z, x):
        parts = self.project(z).unflatten(-1, (3, 2, 4)).unbind(-3)
        read = F.scaled_dot_product_attention(*(part.transpose(-2, -3) for part in parts))
        return F.layer_norm(z + x + read.transpose(-2, -3).flatten(-2), (8,))


def test_a_block_with_fused_attention_has_a_gradient():
    torch.manual_seed(0)
    block, x = Attention(), torch.randn(2, 5, 8)
    jacobian_penalty(FixedPointMap(block, x, event_ndim=2), torch.randn(2, 5, 8)).mean().backward()
    assert block.project.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_layouts(layout):
    weight, shift, z = (t.detach() for t in inputs())
    problem = FixedPointMap(coupled, weight, shift, event_ndim=2)
    given = {
        "transposed": z.mT.contiguous().mT,
        "strided": torch.stack([z, z], -1)[..., 0],
        "expanded": z[:1].expand_as(z),
    }[layout]
    same = given.contiguous()
    torch.testing.assert_close(
        jacobian_penalty(problem, given, generator=generator()), jacobian_penalty(problem, same, generator=generator())
    )
