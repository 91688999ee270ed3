"""A user's own potential is one short class: `value` alone is enough."""

import functools

import pytest
import torch
from torch import nn

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    EnergyFunction,
    FixedPointMap,
    LogSumExp,
    OneStep,
    Potential,
    Unrolled,
    solve,
)
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


class Kept(Potential):
    """Log-sum-exp over the rows of K W, which is formed once and kept."""

    convex = True

    def __init__(self, keys, weight, closed):
        self.keys, self.weight, self.closed = keys, weight, closed

    def value(self, z):
        return (z @ self.product().mT).logsumexp(-1)

    def mean(self, z):
        return (z @ self.product().mT).softmax(-1) @ self.product() if self.closed else super().mean(z)


class KeptInAnAttribute(Kept):
    kept = None

    def product(self):
        self.kept = self.keys @ self.weight if self.kept is None else self.kept
        return self.kept


class KeptInAList(Kept):
    kept = ()

    def product(self):
        self.kept = self.kept or [self.keys @ self.weight]
        return self.kept[0]


class KeptAsAProperty(Kept):
    kept = functools.cached_property(lambda self: self.keys @ self.weight)

    def product(self):
        return self.kept


@pytest.mark.parametrize("kind", [KeptInAnAttribute, KeptInAList, KeptAsAProperty])
@pytest.mark.parametrize("closed", [False, True])
def test_a_product_that_is_kept_between_evaluations_is_named(kind, closed):
    keys, weight, field = random(7, 5).requires_grad_(), random(5, 5, seed=1), random(3, 5, seed=2)
    energy = AnchoredEnergy(kind(keys, weight, closed), field, 0.5)
    with pytest.raises(ValueError, match=r"`potential.kept(\[0\])?` must not be kept while .* at every call"):
        solve(energy, field)
    with torch.no_grad():
        solution = solve(energy, field)
        expected = solve(AnchoredEnergy(LogSumExp(keys @ weight, 1.0), field, 0.5), field)
    torch.testing.assert_close(solution.value, expected.value)


class Detached(Potential):
    def __init__(self, weights):
        self.weights = weights

    def value(self, z):
        return (z.detach() @ self.weights).square().sum(-1)


class Constant(Potential):
    """Phi = c, whose mean is 0 for certain."""

    def __init__(self, number):
        self.number = number

    def value(self, z):
        return self.number.expand(z.shape[:-1])


def test_a_value_that_detaches_the_state_is_refused():
    weights, field = random(5, 4), random(2, 3, 5, seed=1)
    for tensors in (weights, weights.clone().requires_grad_()):
        with pytest.raises(ValueError, match=r"`Detached\.value` must record the derivatives of the tensors.*detach"):
            solve(AnchoredEnergy(Detached(tensors), field, 0.5), field)
    energy = EnergyFunction(lambda z, w: (z.detach() @ w).square().sum(-1), weights, event_ndim=1)
    with pytest.raises(ValueError, match="must record the derivatives"):
        solve(energy, field)
    solution = solve(AnchoredEnergy(Constant(torch.ones((), dtype=torch.float64)), field, 0.5), field)
    torch.testing.assert_close(solution.value, field / 2, rtol=1e-12, atol=1e-12)


def test_a_value_that_returns_nothing_is_named():
    class Forgetful(LogCosh):
        def value(self, z):
            super().value(z)

    class Closed(Forgetful):
        value = Forgetful.value

        def mean(self, z):
            return torch.tanh(z @ self.weights) @ self.weights.mT

    for kind in (Forgetful, Closed):
        energy = AnchoredEnergy(kind(random(5, 4)), random(2, 3, 5), 0.5)
        with pytest.raises(TypeError, match=rf"`{kind.__name__}\.value` must return .* shape \(2, 3\), got NoneType"):
            solve(energy, energy.field)


class WithoutGraph(Potential):
    """Log-sum-exp in closed form: exact to the first derivative, but of a mean that records none."""

    convex = True

    def __init__(self, keys):
        self.keys = keys

    def value(self, z):
        return (z @ self.keys.mT).logsumexp(-1)

    @torch.no_grad()
    def mean(self, z):
        return LogSumExp(self.keys, 1.0).mean(z)

    def linearize(self, z):
        return LogSumExp(self.keys, 1.0).linearize(z)


class NeitherGraphNorLinearisation(WithoutGraph):
    linearize = Potential.linearize


def test_a_mean_without_graph_is_refused_where_its_derivative_is_asked_for():
    keys, field = (0.5 * random(7, 5)).requires_grad_(), random(3, 5, seed=2)
    closed, exact = (AnchoredEnergy(p, field, 0.5) for p in (WithoutGraph(keys), LogSumExp(keys, 1.0)))
    tight = Anderson(rtol=1e-12)
    gradients = [torch.autograd.grad(solve(e, field, solver=tight).value.sum(), keys)[0] for e in (closed, exact)]
    torch.testing.assert_close(*gradients)
    refused = "`WithoutGraph.mean` must record the derivatives of the tensors that it reads"
    with pytest.raises(ValueError, match=refused):
        torch.autograd.grad(solve(closed, field).value.sum(), keys, create_graph=True)
    for adjoint in (OneStep(), Unrolled()):
        with pytest.raises(ValueError, match=refused):
            solve(closed, field, adjoint=adjoint)
    with pytest.raises(ValueError, match=r"NeitherGraphNorLinearisation.mean` must record"):
        solve(AnchoredEnergy(NeitherGraphNorLinearisation(keys), field, 0.5), field).value.sum().backward()


def test_a_map_without_graph_is_refused_and_one_that_does_not_read_what_it_is_given_is_not():
    weight = (0.3 * random(5, 5)).requires_grad_()

    def cut(z, w):
        return torch.tanh(z.detach() @ w.detach())

    with pytest.raises(ValueError, match="`cut` must record the derivatives"):
        solve(FixedPointMap(cut, weight, event_ndim=1), random(3, 5)).value.sum().backward()
    solve(FixedPointMap(lambda z, w: torch.ones_like(z), weight, event_ndim=1), random(3, 5)).value.sum().backward()
    assert not weight.grad.any()


def test_the_contract_finds_a_mean_without_graph():
    contract = PotentialContract()
    contract.make = lambda dtype: WithoutGraph(random(7, 5, dtype=dtype))
    with pytest.raises(AssertionError, match=r"`WithoutGraph\.mean` has no graph to z"):
        contract.test_mean_has_a_graph_to_all_that_it_reads()
