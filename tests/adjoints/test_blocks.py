"""Whole transformer blocks as fixed points: their gradients, and what an adjoint solve costs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from implicit_attention import Anderson, Broyden, FixedPointMap, Implicit, NewtonKrylov, Picard, solve
from implicit_attention.linear import GMRES, Neumann
from implicit_attention.testing.numerics import random, relative_error

TIGHT = {"rtol": 1e-13, "atol": 0.0, "max_steps": 500}
ADJOINT = Implicit(GMRES(rtol=1e-13))


class Block(nn.Module):
    """z <- norm(z + x + attention(z)), z <- norm(z + mlp(z)), so small that its steps contract."""

    def __init__(self, dim=8, fused=False):
        super().__init__()
        self.fused = fused
        self.project, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))

    def forward(self, z, x):
        queries, keys, values = self.project(z).chunk(3, -1)
        if self.fused:
            read = F.scaled_dot_product_attention(queries, keys, values)
        else:
            read = (queries @ keys.mT / z.shape[-1] ** 0.5).softmax(-1) @ values
        z = self.norms[0](z + x + self.out(read))
        return self.norms[1](z + self.mlp(z))


def made(fused=False):
    torch.manual_seed(0)
    block = Block(fused=fused).double()
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            # No gradient of a sum over an affine norm that is the same for all.
            parameter.add_(0.05 * random(*parameter.shape, seed=len(name)))
    return block, random(2, 5, 8, seed=1).requires_grad_()


def gradients(value, block, x):
    return torch.autograd.grad((value * random(2, 5, 8, seed=7)).sum(), [x, *block.parameters()])


@pytest.fixture(scope="module")
def unrolled():
    block, x = made()
    z = torch.zeros_like(x)
    for _ in range(400):
        before, z = z, block(z, x)
    assert (z - before).abs().max() < 1e-13
    return z.detach(), gradients(z, block, x)


@pytest.mark.parametrize(
    "solver",
    [
        Picard(**TIGHT),
        Picard(damping=0.3, **TIGHT),
        *(Anderson(history=m, **TIGHT) for m in (1, 2, 3, 5)),
        Broyden(**TIGHT),
        NewtonKrylov(**TIGHT),
    ],
    ids=repr,
)
def test_gradients_are_those_of_400_unrolled_steps(solver, unrolled):
    block, x = made()
    solution = solve(FixedPointMap(block, x, event_ndim=2), torch.zeros_like(x), solver=solver, adjoint=ADJOINT)
    state, expected = unrolled
    assert relative_error(solution.value, state) < 1e-10
    for gradient, truth in zip(gradients(solution.value, block, x), expected, strict=True):
        assert relative_error(gradient, truth) < 1e-8


@pytest.mark.parametrize("method", [GMRES(rtol=1e-12), Neumann(rtol=1e-12)], ids=lambda m: type(m).__name__)
def test_an_adjoint_solve_records_one_evaluation(method):
    block, x = made(fused=True)
    recorded, products = [], []

    def mapped(z, x, *parameters):
        out = torch.func.functional_call(block, dict(zip(names, parameters, strict=True)), (z, x))
        if out.requires_grad:
            recorded.append(len(z))
            out.register_hook(lambda u: products.append(u))
        return out

    names = [name for name, _ in block.named_parameters()]
    problem = FixedPointMap(mapped, x, *block.parameters(), event_ndim=2)
    solution = solve(problem, torch.zeros_like(x), solver=Picard(**TIGHT), adjoint=Implicit(method))
    recorded.clear()
    solution.value.sum().backward()
    assert len(recorded) == 1
    # The product that checks the answer gives the gradients of the tensors, too.
    assert len(products) == int(solution.adjoint.num_steps.max()) + 1


def test_tensors_that_are_not_wanted_get_none_and_unused_ones_zero():
    x = random(2, 5, 8, seed=1).requires_grad_()
    unused, constant = torch.ones(3, dtype=torch.float64, requires_grad=True), torch.ones(2).double()

    def mapped(z, x, unused, constant):
        return torch.tanh(0.5 * z.roll(1, -1) + x) + 0 * constant.sum()

    problem = FixedPointMap(mapped, x, unused, constant, event_ndim=2)
    solution = solve(problem, torch.zeros_like(x), adjoint=ADJOINT)
    by_x, by_unused = torch.autograd.grad(solution.value.sum(), (x, unused))
    assert by_x.abs().sum() > 0
    assert torch.equal(by_unused, torch.zeros_like(unused))


@pytest.mark.parametrize("which", ["state", "tensors"])
def test_a_map_without_a_graph_is_still_found(which):
    x = random(2, 5, 8).requires_grad_()

    def cut(z, x):
        return torch.tanh(0.5 * z.detach() + x) if which == "state" else torch.tanh(0.5 * z + x.detach())

    value = solve(FixedPointMap(cut, x, event_ndim=2), torch.zeros(2, 5, 8).double()).value
    with pytest.raises(ValueError, match="record the derivatives"):
        value.sum().backward()


def test_a_checkpointed_block_has_the_same_gradients(unrolled):
    block, x = made()

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, z, x):
            return checkpoint(self.block, z, x, use_reentrant=False)

    problem = FixedPointMap(Checkpointed(), x, event_ndim=2)
    value = solve(problem, torch.zeros_like(x), solver=Anderson(**TIGHT), adjoint=ADJOINT).value
    for gradient, truth in zip(gradients(value, block, x), unrolled[1], strict=True):
        assert relative_error(gradient, truth) < 1e-8


def test_samples_have_the_gradients_that_they_have_alone():
    # Long states take another way through the vector algebra than short ones.
    torch.manual_seed(0)
    block, x = Block(32).double(), random(3, 40, 32)
    value = solve(FixedPointMap(block, x, event_ndim=2), torch.zeros_like(x), solver=Anderson(**TIGHT)).value
    alone = [
        solve(FixedPointMap(block, one, event_ndim=2), torch.zeros_like(one), solver=Anderson(**TIGHT)).value
        for one in x.split(1)
    ]
    torch.testing.assert_close(value, torch.cat(alone), rtol=1e-9, atol=1e-11)
    cotangent = random(3, 40, 32, seed=7)
    whole = torch.autograd.grad(value, block.project.weight, cotangent)[0]
    parts = [torch.autograd.grad(v, block.project.weight, c)[0] for v, c in zip(alone, cotangent.split(1), strict=True)]
    assert relative_error(whole, sum(parts)) < 1e-8
