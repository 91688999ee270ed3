"""A subclass that computes something else is not answered by the closed forms of its base."""

import pytest
import torch

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    FixedPointMap,
    ImplicitAttention,
    LogSumExp,
    Picard,
    SelfAttentionEnergy,
    SquaredScores,
    Status,
    solve,
)
from implicit_attention.potentials import (
    EluFeatures,
    GaussianMixture,
    HiddenUnits,
    KernelPotential,
    Polynomial,
    ReadsOut,
    SignUnits,
    SoftcapLogSumExp,
    Softmax1,
    Tilted,
    TokenAttention,
)
from implicit_attention.problem import Problem
from implicit_attention.testing.numerics import random, relative_error

TIGHT = {"rtol": 1e-11, "atol": 1e-13}


def closed_forms():
    """name -> a potential in closed form, of which subclasses are made."""
    keys = 0.4 * random(70, 5)
    square = 0.05 * random(5, 5, seed=1)
    return {
        "LogSumExp": (LogSumExp, (keys, 0.7)),
        "SoftcapLogSumExp": (SoftcapLogSumExp, (keys, 0.7, 2.0)),
        "SquaredScores": (SquaredScores, (keys / 10, 0.5)),
        "Polynomial": (Polynomial, (keys / 10, 0.5)),
        "HiddenUnits": (HiddenUnits, (keys.mT / 4, SignUnits())),
        "GaussianMixture": (GaussianMixture, (keys, square @ square.mT, torch.zeros(70, dtype=torch.float64))),
    }


def extra(z):
    """What subclasses add to the potential: 0.2 sum sqrt(1 + z^2), and its gradient."""
    return 0.2 * (1 + z.square()).sqrt().sum(-1)


def pull(z):
    return 0.2 * z / (1 + z.square()).sqrt()


def with_value(base):
    return type("Changed", (base,), {"value": lambda self, z: base.value(self, z) + extra(z)})


def with_both(base):
    own = {"value": vars(with_value(base))["value"], "mean": lambda self, z: base.mean(self, z) + pull(z)}
    return type("Changed", (base,), {"convex": True, **own})


def by_a_mixin(base):
    class Mixin:
        def value(self, z):
            return super().value(z) + extra(z)

    return type("Changed", (Mixin, base), {})


CHANGES = {"value": with_value, "both": with_both, "mixin": by_a_mixin}


def truth(base, arguments, x, anchor=0.5):
    """z = anchor x + (1 - anchor) (mean + pull)(z), dz/dx applied to ones, by the base's value differentiated alone."""
    potential = base(*arguments)

    def step(z, x):
        return anchor * x + (1 - anchor) * (torch.func.grad(lambda z: base.value(potential, z).sum())(z) + pull(z))

    z = x
    for _ in range(300):
        z = step(z, x)
    jacobian = torch.stack([torch.func.jacrev(lambda row: step(row[None], x[:1])[0])(row) for row in z])
    ones = torch.ones_like(z)[..., None]
    u = torch.linalg.solve(torch.eye(x.shape[-1]).double() - jacobian.mT, ones)
    return z, anchor * u.squeeze(-1), jacobian


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", closed_forms())
def test_a_solve_answers_what_the_subclass_computes(name, change):
    base, arguments = closed_forms()[name]
    potential, x = CHANGES[change](base)(*arguments), random(3, 5, seed=2).requires_grad_()
    expected, by_x, jacobian = truth(base, arguments, x.detach())
    energy = AnchoredEnergy(potential, x, 0.5)
    solution = solve(energy, x.detach(), solver=Anderson(**TIGHT))
    assert (solution.status == Status.CONVERGED).all()
    assert relative_error(solution.value, expected) < 1e-9
    assert (energy.fixed_point_map(solution.value) - solution.value).norm(dim=-1).max() <= 2e-10
    (got,) = torch.autograd.grad(solution.value, x, torch.ones_like(solution.value))
    assert relative_error(got, by_x) < 1e-7
    v = random(3, 5, seed=3)
    product = energy.hessian_product(expected, v)
    assert relative_error(product, v - (jacobian @ v[..., None]).squeeze(-1)) < 1e-8
    bound = potential.lipschitz()
    assert bound is None or bound >= 2 * torch.linalg.matrix_norm(jacobian, ord=2).max()
    assert potential.select(torch.tensor([0, 2])) is None
    assert not potential.convex or change == "both"


def over_given_keys():
    """name -> a potential of keys (2, 5, 4)."""
    covariance, heads = torch.eye(4, dtype=torch.float64), 0.3 * random(2, 2, 3, 4, seed=3)
    return {
        "Softmax1": lambda keys: Softmax1(keys, 0.7),
        "GaussianMixture": lambda keys: GaussianMixture(keys, covariance, torch.zeros(5, dtype=torch.float64)),
        "HiddenUnits": lambda keys: HiddenUnits(0.3 * keys.mT, SignUnits()),
        "KernelPotential": lambda keys: KernelPotential(0.3 * keys, 0.5, features=EluFeatures()),
        "Tilted": lambda keys: Tilted(LogSumExp(keys, 0.7), keys[:, :1]),
        "TokenAttention": lambda keys: TokenAttention(*(heads * keys.mean()), 0.5),
    }


@pytest.mark.parametrize("name", over_given_keys())
def test_a_tensor_that_no_formula_knows_changes_no_derivative(name):
    """Gradients written in the order of a class's own tensors would go to others."""
    found = []
    for further in (False, True):
        keys, x = 0.4 * random(2, 5, 4).requires_grad_(), random(2, 5, 4, seed=2).requires_grad_()
        potential = over_given_keys()[name](keys)
        if further:
            potential.further = random(3)
        value = solve(AnchoredEnergy(potential, x, 0.6), x.detach(), solver=Picard(**TIGHT)).value
        found.append(torch.autograd.grad(value.square().sum(), (keys, x), allow_unused=True))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", closed_forms())
def test_a_mean_alone_makes_no_class(name):
    """No value follows from it, and that of the base is another function's."""
    base, arguments = closed_forms()[name]
    mean = {"mean": lambda self, z: base.mean(self, z) + pull(z)}
    with pytest.raises(TypeError, match=r"`Changed` overrides `mean`, of which the `value` of \w+ knows nothing"):
        type("Changed", (base,), mean)
    kept = type("Changed", (base,), {"value": base.value, **mean})(*arguments)
    assert torch.equal(kept.value(random(3, 5)), base(*arguments).value(random(3, 5)))


@pytest.mark.parametrize("base", [LogSumExp, SoftcapLogSumExp])
@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_read_out_by_weights_that_may_not_be_its_own(change, base):
    changed = CHANGES[change](base)
    assert changed.probabilities is changed.readout is changed.readout_with_logsumexp is None
    assert not issubclass(changed, ReadsOut)
    with pytest.raises(ValueError, match="state"):
        ImplicitAttention(8, 1, potential=changed)


def test_weights_of_ones_own_leave_no_readout():
    class Changed(LogSumExp):
        def probabilities(self, z):
            return super().probabilities(z).square()

    assert Changed.readout is None
    keys, z = random(7, 5), random(3, 5)
    assert torch.equal(Changed(keys, 0.5).mean(z), LogSumExp(keys, 0.5).mean(z))


@pytest.mark.parametrize("method", ["covariance_product", "evaluate", "linearize"])
def test_a_shortcut_of_ones_own_is_taken(method):
    calls = []

    def recorded(self, *arguments):
        calls.append(method)
        return getattr(super(Changed, self), method)(*arguments)

    Changed = type("Changed", (LogSumExp,), {method: recorded})
    x = random(3, 5, seed=2).requires_grad_()
    energy = AnchoredEnergy(Changed(0.4 * random(70, 5), 0.7), x, 0.5)
    solve(energy, x.detach()).value.sum().backward()
    energy.hessian_product(x.detach(), x.detach())
    assert calls


def test_what_a_subclass_says_again_it_keeps():
    class Renamed(LogSumExp):
        convex = True
        select = LogSumExp.select
        readout = LogSumExp.readout

        def value(self, z):
            return super().value(z)

    potential, z = Renamed(random(7, 5), 0.5), random(3, 5)
    assert potential.convex
    assert potential.select(torch.tensor([0])) is potential
    assert torch.equal(potential.readout(z, random(7, 2)), LogSumExp(random(7, 5), 0.5).readout(z, random(7, 2)))


# Energies and other problems.


class OwnEnergy(AnchoredEnergy):
    def energy(self, z):
        return super().energy(z) - extra(z) / 2


class OwnGradient(OwnEnergy):
    def gradient(self, z):
        return AnchoredEnergy.gradient(self, z) - pull(z) / 2

    energy = OwnEnergy.energy


class OwnMap(OwnEnergy):
    def fixed_point_map(self, z):
        return AnchoredEnergy.fixed_point_map(self, z) + pull(z) / 2

    energy = OwnEnergy.energy


@pytest.mark.parametrize("kind", [OwnEnergy, OwnGradient, OwnMap])
def test_what_is_ones_own_is_solved_not_that_of_the_base(kind):
    keys, x = 0.4 * random(70, 5), random(3, 5, seed=2).requires_grad_()
    solution = solve(kind(LogSumExp(keys, 0.7), x, 0.5), x.detach(), solver=Anderson(**TIGHT))
    expected, by_x, _ = truth(LogSumExp, (keys, 0.7), x.detach())
    assert relative_error(solution.value, expected) < 1e-9
    (got,) = torch.autograd.grad(solution.value, x, torch.ones_like(solution.value))
    assert relative_error(got, by_x) < 1e-7


@pytest.mark.parametrize("method", ["fixed_point_map", "gradient"])
@pytest.mark.parametrize("base", [AnchoredEnergy, SelfAttentionEnergy, OwnEnergy])
def test_a_map_or_gradient_alone_makes_no_energy(base, method):
    said = rf"`Changed` overrides `{method}`, of which the `energy` of \w+ knows nothing; define it, .*subclass Problem"
    with pytest.raises(TypeError, match=said):
        type("Changed", (base,), {method: lambda self, z: z / 2})


def test_a_map_that_is_no_gradient_is_not_taken_for_one():
    keys, x = 0.4 * random(70, 5), random(3, 5, seed=2).requires_grad_()
    turn = 0.3 * (random(5, 5) - random(5, 5).mT)

    class Changed(Problem):
        event_ndim = 1

        def __init__(self, *given):
            self.inner = AnchoredEnergy(*given)

        def fixed_point_map(self, z):
            return self.inner.fixed_point_map(z) + (z @ turn).tanh()

    def step(z, x):
        return 0.5 * x + 0.5 * (0.7 * z @ keys.mT).softmax(-1) @ keys + (z @ turn).tanh()

    changed = solve(Changed(LogSumExp(keys, 0.7), x, 0.5), x.detach(), solver=Anderson(**TIGHT))
    own = solve(FixedPointMap(step, x, event_ndim=1), x.detach(), solver=Anderson(**TIGHT))
    got, expected = (torch.autograd.grad(s.value.sum(), x)[0] for s in (changed, own))
    assert relative_error(changed.value, own.value) < 1e-9
    assert relative_error(got, expected) < 1e-7


def test_tokens_of_ones_own_have_their_own_derivative():
    field = random(2, 4, 3).requires_grad_()

    class Changed(SelfAttentionEnergy):
        def energy(self, z):
            return super().energy(z) - extra(z).sum(-1) / 2

    changed = Changed(field, 0.5, 0.8, weight=0.5)
    solution = solve(changed, field.detach(), solver=Anderson(**TIGHT))

    def step(z, x):
        p = (0.5 * z @ z.mT).softmax(-1)
        return 0.8 * x + 0.1 * (p + p.mT) @ z + pull(z) / 2

    own = solve(FixedPointMap(step, field, event_ndim=2), field.detach(), solver=Picard(**TIGHT))
    assert relative_error(solution.value, own.value) < 1e-9
    got, expected = (torch.autograd.grad(s.value.sum(), field)[0] for s in (solution, own))
    assert relative_error(got, expected) < 1e-7
