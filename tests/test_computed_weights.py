"""Blocks whose weights are computed at every call, and blocks that are compiled."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from implicit_attention import Anderson, FixedPointMap, Implicit, PerSample, Phantom, Picard, Unrolled, solve
from implicit_attention.linear import GMRES
from implicit_attention.testing.numerics import random

TIGHT = Anderson(rtol=1e-13, atol=0)
EXACT = Implicit(GMRES(rtol=1e-13))


class Block(nn.Module):
    def __init__(self, norm=lambda linear: linear):
        super().__init__()
        torch.manual_seed(0)
        self.first = norm(nn.Linear(4, 6))
        # Shared parts are shared in copies too.
        self.last = nn.Sequential(nn.Tanh(), norm(nn.Linear(6, 4)))
        self.same = self.last
        self.double()

    def forward(self, z, x):
        return 0.4 * torch.tanh(self.same(self.first(z)) + x)


def steps(block, x, count):
    """The unrolled loop, with the weights of one moment."""
    z = torch.zeros_like(x)
    for _ in range(count):
        z = block(z, x)
    return z


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "norm",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
    ],
)
def test_gradients_through_computed_weights_are_those_of_the_unrolled_loop(norm, training):
    x = random(5, 4).requires_grad_()
    for adjoint, solver in ((EXACT, TIGHT), (Unrolled(), Picard(rtol=0, atol=0, max_steps=60)), (Phantom(60), TIGHT)):
        block, other, once = (trained(norm, x).train(training) for _ in range(3))
        expected = by_hand(other, x)
        parameters = [x, *block.parameters()]
        before = {name: b.clone() for name, b in block.named_buffers()}
        problem = FixedPointMap(block, PerSample(x), event_ndim=1)
        value = solve(problem, torch.zeros_like(x), solver=solver, adjoint=adjoint).value
        torch.testing.assert_close(value, expected[0], rtol=1e-10, atol=1e-11)
        gradients = torch.autograd.grad(value.square().sum(), parameters, create_graph=True)
        torch.testing.assert_close(gradients, expected[1], rtol=1e-8, atol=1e-9)
        second = torch.autograd.grad(sum(g.square().sum() for g in gradients), parameters)
        torch.testing.assert_close(second, expected[2], rtol=1e-7, atol=1e-8)
        # One step of the power iteration each, as one call of the block makes, though f was called often.
        once(x, x)
        moved = dict(once.named_buffers())
        for name, buffer in block.named_buffers():
            torch.testing.assert_close(buffer, moved[name], rtol=1e-12, atol=1e-14)
            assert training or torch.equal(buffer, before[name])


def trained(norm, x):
    """A block whose power iterations have begun."""
    block = Block(norm)
    for _ in range(5):
        block(x, x)
    return block


def by_hand(block, x):
    """Value, gradient, and gradient of its square, of 60 steps with weights that are computed once."""
    norms = [hook for m in block.modules() for hook in m._forward_pre_hooks.values()]
    if norms:
        block(x, x)
        for module in block.modules():
            # Their last weights stay.
            module._forward_pre_hooks.clear()
        value = steps(block, x, 60)
    else:
        with parametrize.cached():
            value = steps(block, x, 60)
    parameters = [x, *block.parameters()]
    gradients = torch.autograd.grad(value.square().sum(), parameters, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in gradients), parameters)
    return value.detach(), tuple(g.detach() for g in gradients), second


class Scaled(nn.Module):
    calls = 0

    def forward(self, weight):
        Scaled.calls += 1
        return weight / 2


def test_weights_are_computed_once_per_solve():
    block = Block()
    for linear in (block.first, block.last[1]):
        parametrize.register_parametrization(linear, "weight", Scaled())
    Scaled.calls = 0
    x = random(5, 4)
    for _ in range(2):
        # Of the present weights, also of a problem that is kept.
        problem = FixedPointMap(block, x, event_ndim=1)
        for _ in range(2):
            value = solve(problem, torch.zeros_like(x), solver=TIGHT).value
            value.sum().backward()
            with torch.no_grad():
                block.first.parametrizations.weight.original += 0.1
    assert Scaled.calls == 2 * 4
    assert value.requires_grad
    assert type(block.first).__name__ == "ParametrizedLinear"
    assert block.first.parametrizations.weight.original.grad is not None


def test_cached_parametrisations_serve_a_solve():
    block, x = Block(parametrizations.weight_norm), random(5, 4)
    parameters = list(block.parameters())

    def gradient():
        problem = FixedPointMap(block, x, event_ndim=1)
        value = solve(problem, torch.zeros_like(x), solver=TIGHT, adjoint=EXACT).value
        return torch.autograd.grad(value.sum(), parameters)

    expected = gradient()
    with parametrize.cached():
        torch.testing.assert_close(gradient(), expected)
        with pytest.raises(ValueError, match=r"parametrize.cached\(\) must not be open"):
            FixedPointMap(block, x, event_ndim=1).replace(x, *parameters)


# Compiled blocks.


def by_method(block, **options):
    block.compile(**options)
    return block


def by_part(block, **options):
    block.first = torch.compile(block.first, **options)
    block.last.compile(**options)
    return block


class Counter:
    def __init__(self, inner):
        self.graphs, self.calls, self.inner = 0, 0, inner

    def __call__(self, graph, example):
        self.graphs += 1
        compiled = torch._dynamo.lookup_backend(self.inner)(graph, example)

        def called(*args):
            self.calls += 1
            return compiled(*args)

        return called


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


COMPILERS = {
    "whole": (torch.compile, "eager"),
    "ahead of time": (torch.compile, "aot_eager"),
    "block.compile": (by_method, "eager"),
    "parts": (by_part, "eager"),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("kind", "adjoint", "norm"),
    [
        *((kind, EXACT, None) for kind in COMPILERS),
        ("ahead of time", Unrolled(), None),
        ("block.compile", Phantom(3), None),
        ("whole", EXACT, parametrizations.spectral_norm),
        ("parts", Unrolled(), parametrizations.spectral_norm),
    ],
)
def test_a_compiled_block_is_solved_and_differentiated_as_the_block_is(kind, adjoint, norm):
    compiler, backend = COMPILERS[kind]
    x, counter = random(5, 4).requires_grad_(), Counter(backend)
    plain = Block(norm) if norm else Block()
    compiled = compiler(copy.deepcopy(plain), backend=counter)

    def answer(block):
        problem = FixedPointMap(block, PerSample(x), event_ndim=1)
        value = solve(problem, torch.zeros_like(x), solver=TIGHT, adjoint=adjoint).value
        return value, *torch.autograd.grad(value.square().sum(), [x, *block.parameters()])

    for _ in range(3):
        torch.testing.assert_close(answer(compiled), answer(plain), rtol=1e-9, atol=1e-11)
        made = counter.graphs
    # With and without graph, of a few sorts of weights; further solves compile nothing.
    assert made <= 4
    before = counter.calls
    answer(compiled)
    assert counter.graphs == made
    assert counter.calls > before + 5


@pytest.mark.usefixtures("fresh")
def test_evaluations_of_one_solve_share_what_is_compiled():
    x, counter = random(5, 4), Counter("eager")
    block = torch.compile(Block(), backend=counter)
    with torch.no_grad():
        solution = solve(FixedPointMap(block, x, event_ndim=1), torch.zeros_like(x), solver=TIGHT)
    assert counter.graphs == 1
    assert counter.calls == solution.num_evals.max() > 5


@pytest.mark.usefixtures("fresh")
def test_a_compiled_function_declares_the_modules_among_its_inputs():
    x, counter, block = random(5, 4), Counter("eager"), Block()
    parameters = list(block.parameters())
    plain = lambda z, x, block: block(z, x)  # noqa: E731
    compiled = torch.compile(plain, backend=counter)

    def answer(f):
        value = solve(FixedPointMap(f, x, block, event_ndim=1), torch.zeros_like(x), solver=TIGHT, adjoint=EXACT).value
        return torch.autograd.grad(value.sum(), parameters)

    for _ in range(2):
        torch.testing.assert_close(answer(compiled), answer(plain))
        made = counter.graphs
    answer(compiled)
    assert counter.graphs == made <= 3
    hidden = torch.compile(lambda z, x: block(z, x), backend=counter)
    with pytest.raises(ValueError, match="reads the parameters of `block`, which requires grad but is not declared"):
        solve(FixedPointMap(hidden, x, event_ndim=1), torch.zeros_like(x))


@pytest.mark.usefixtures("fresh")
def test_an_error_names_the_block_that_was_compiled():
    block = torch.compile(nn.Linear(4, 3), backend="eager")
    with pytest.raises(ValueError, match="`Linear` must return shape of z"):
        solve(FixedPointMap(block, event_ndim=1), torch.zeros(2, 4))
