"""HiddenUnits: every law of a hidden unit against averages over it, effective energies, domains."""

import copy
import functools
import itertools
import math
import pickle

import numpy as np
import pytest
import torch

from implicit_attention import AnchoredEnergy, LogSumExp, NewtonKrylov, Picard, SquaredScores, Status, solve
from implicit_attention.potentials import (
    BernoulliUnits,
    ConstantUnits,
    DiscreteUnits,
    ExponentialUnits,
    GaussianUnits,
    HiddenUnits,
    LaplaceUnits,
    PoissonUnits,
    SignUnits,
    SphereUnits,
    Units,
)
from implicit_attention.spins import Enumeration, SpinSystem, free_energy
from implicit_attention.testing.numerics import random, relative_error
from implicit_attention.testing.potential import PotentialContract

tensor = functools.partial(torch.tensor, dtype=torch.float64)
close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)
printed = functools.partial(torch.testing.assert_close, rtol=0, atol=5.1e-13)

UNITS = [
    GaussianUnits(0.3, 1.7),
    BernoulliUnits(0.2),
    SignUnits(),
    PoissonUnits(0.7),
    ExponentialUnits(2.0),
    LaplaceUnits(0.5),
    ConstantUnits(1.3),
    SphereUnits(3),
    DiscreteUnits((-1, 0, 2.5), (1.0, 2.0, 0.5)),
]
each = pytest.mark.parametrize("units", UNITS, ids=lambda u: type(u).__name__)


class Contract(PotentialContract):
    units: Units
    scale = 0.3

    def make(self, dtype):
        return HiddenUnits(self.scale * random(2, 5, 7, dtype=dtype), self.units)


class TestGaussian(Contract):
    units = GaussianUnits(0.3, 1.7)


class TestBernoulli(Contract):
    units = BernoulliUnits(0.2)


class TestSign(Contract):
    units = SignUnits()


class TestPoisson(Contract):
    units = PoissonUnits(0.7)
    scale = 0.1


class TestExponential(Contract):
    # The contract goes as far as |t| = 40 scale, inside the domain.
    units = ExponentialUnits(4.0)
    scale = 0.04


class TestLaplace(Contract):
    units = LaplaceUnits(0.25)
    scale = 0.04


class TestConstant(Contract):
    units = ConstantUnits(1.3)


class TestSphere(Contract):
    units = SphereUnits(3)


class TestDiscrete(Contract):
    units = DiscreteUnits((-1, 0, 2.5), (1.0, 2.0, 0.5))


class TestSharedWeights(PotentialContract):
    def make(self, dtype):
        return HiddenUnits(0.3 * random(5, 4, dtype=dtype), SphereUnits(8))


# Every law by its definition.


def interval(low, high, density, points=400):
    """States and normalised weights of a density, by quadrature."""
    x, w = np.polynomial.legendre.leggauss(points)
    x = (high - low) / 2 * tensor(x.tolist()) + (high + low) / 2
    weights = tensor(w.tolist()) * density(x)
    return x, weights / weights.sum()


def law(units):
    if isinstance(units, GaussianUnits):
        m, v = units.center, units.spread
        return interval(m - 20, m + 20, lambda x: torch.exp(-((x - m) ** 2) / (2 * v)))
    if isinstance(units, BernoulliUnits):
        return tensor([0, 1]), tensor([1 - units.p, units.p])
    if isinstance(units, SignUnits):
        return tensor([-1, 1]), tensor([0.5, 0.5])
    if isinstance(units, PoissonUnits):
        n = torch.arange(60, dtype=torch.float64)
        return n, torch.exp(n * math.log(units.rate) - units.rate - torch.lgamma(n + 1))
    if isinstance(units, ExponentialUnits):
        return interval(0, 60, lambda x: units.rate * torch.exp(-units.rate * x))
    if isinstance(units, LaplaceUnits):
        x, w = interval(0, 60, lambda x: torch.exp(-x / units.scale))
        return torch.cat([-x, x]), torch.cat([w, w]) / 2
    if isinstance(units, ConstantUnits):
        return tensor([units.value]), tensor([1.0])
    if isinstance(units, DiscreteUnits):
        return tensor(units.values), tensor(units.weights) / sum(units.weights)
    return interval(-1, 1, lambda x: (1 - x**2) ** ((units.dim - 3) / 2))


@pytest.mark.parametrize("units", [*UNITS, SphereUnits(8), BernoulliUnits(0.999)], ids=repr)
def test_cumulant_mean_and_variance_are_averages_over_the_tilted_law(units):
    t = tensor([-1.3, -0.4, 0.0, 0.7, 1.1])
    states, weights = law(units)
    exponents = t[:, None] * states + weights.log()
    p = exponents.softmax(-1)
    mean = (p * states).sum(-1)
    near = {"rtol": 1e-10, "atol": 1e-11}
    close(units.cumulant(t), exponents.logsumexp(-1), **near)
    close(units.mean(t), mean, **near)
    close(units.variance(t), (p * (states - mean[:, None]).square()).sum(-1), **near)


@each
def test_mean_and_variance_are_the_derivatives_and_bounded_by_the_largest(units):
    t = tensor([-1.9, -0.4, 0.0, 0.7, 1.9]).requires_grad_()
    (first,) = torch.autograd.grad(units.cumulant(t).sum(), t, create_graph=True)
    close(units.mean(t), first)
    (second,) = torch.autograd.grad(units.mean(t).sum(), t)
    close(units.variance(t), second)
    assert bool((units.variance(t) <= units.largest_variance * (1 + 1e-14)).all())
    assert units.cumulant(tensor([0.0])).item() == 0.0


@each
def test_the_defaults_of_the_base_class_agree(units):
    t = tensor([-1.3, 0.0, 0.7])
    close(Units.mean(units, t), units.mean(t))
    close(Units.variance(units, t), units.variance(t), rtol=1e-11)


@each
def test_first_and_second_derivatives_of_all_three(units):
    t = tensor([-1.3, 0.0, 0.7]).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: (units.cumulant(t), units.mean(t)), t)
    assert torch.autograd.gradgradcheck(lambda t: (units.cumulant(t), units.mean(t)), t)
    if not isinstance(units, GaussianUnits):
        assert torch.autograd.gradcheck(units.variance, t)


def cumulants(units, count):
    t = tensor([0.0]).requires_grad_()
    value, found = units.cumulant(t), []
    for _ in range(count):
        (value,) = torch.autograd.grad(value.sum(), t, create_graph=True)
        found.append(value.item())
    return found


def test_cumulants_of_every_order():
    orders = range(1, 7)
    exponential = [math.factorial(n - 1) / 1.5**n for n in orders]
    laplace = [2 * math.factorial(n - 1) * 0.7**n if n % 2 == 0 else 0.0 for n in orders]
    assert cumulants(ExponentialUnits(1.5), 6) == pytest.approx(exponential, rel=1e-13)
    assert cumulants(LaplaceUnits(0.7), 6) == pytest.approx(laplace, rel=1e-13)
    assert cumulants(PoissonUnits(0.7), 6) == pytest.approx([0.7] * 6, rel=1e-13)
    p = 0.2
    q = p * (1 - p)
    assert cumulants(BernoulliUnits(p), 4) == pytest.approx([p, q, q * (1 - 2 * p), q * (1 - 6 * q)], rel=1e-13)
    assert cumulants(SignUnits(), 4) == pytest.approx([0, 1, 0, -2], abs=1e-13)
    dim = 5
    fourth = 3 / (dim * (dim + 2)) - 3 / dim**2
    assert cumulants(SphereUnits(dim), 4) == pytest.approx([0, 1 / dim, 0, fourth], abs=1e-13)


def test_far_tilts_neither_overflow_nor_lose_the_variance():
    t = tensor([-300.0, 300.0]).requires_grad_()
    close(BernoulliUnits(0.5).cumulant(t), tensor([-math.log(2), 300 - math.log(2)]))
    close(SignUnits().cumulant(t), tensor([1.0, 1.0]) * (300 - math.log(2)))
    for units in (BernoulliUnits(0.5), SignUnits(), SphereUnits(3)):
        (first,) = torch.autograd.grad(units.cumulant(t).sum(), t, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), t)
        close(first, units.mean(t))
        close(second, units.variance(t))
        assert bool((units.variance(t) > 0).all())


def test_sphere_in_three_dimensions_has_elementary_functions():
    t = tensor([-2.0, 1e-3, 5.0])
    close(SphereUnits(3).cumulant(t), torch.log(torch.sinh(t) / t), rtol=1e-9)
    close(SphereUnits(3).mean(t), 1 / torch.tanh(t) - 1 / t, rtol=1e-9)
    for function in (SphereUnits(3).cumulant, SphereUnits(3).mean, SphereUnits(3).variance):
        assert function(tensor([1e200])).isnan().all()
    assert SphereUnits(3).mean(torch.ones(1, dtype=torch.bfloat16)).dtype == torch.bfloat16


# Domains.


@pytest.mark.parametrize(
    ("units", "inside", "outside"),
    [(ExponentialUnits(2.0), [-50.0, 1.999], [2.0, 3.0]), (LaplaceUnits(0.5), [-1.999, 1.999], [-2.0, 2.0, 7.0])],
)
def test_outside_the_domain_everything_is_nan(units, inside, outside):
    for function in (units.cumulant, units.mean, units.variance):
        assert bool(function(tensor(inside)).isfinite().all())
        assert bool(function(tensor(outside)).isnan().all())


@pytest.mark.parametrize("units", [ExponentialUnits(2.0), LaplaceUnits(0.5)], ids=repr)
def test_a_row_outside_the_domain_changes_no_other(units):
    x = 0.3 * random(3, 4, seed=1)
    far = x.clone()
    far[1] = 50.0
    found = []
    for field in (x, far):
        weights = (0.3 * random(4, 5)).requires_grad_()
        potential = HiddenUnits(weights, units)
        value, mean = potential.evaluate(field)
        solution = solve(AnchoredEnergy(potential, field, 0.6), field, on_failure="ignore")
        kept = [0, 2]
        (gradient,) = torch.autograd.grad(solution.value[kept].square().sum() + value[kept].sum(), weights)
        found.append((value[kept], mean[kept], solution.value[kept], gradient))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert bool(value[1].isnan())
    assert bool(mean[1].isnan().all())
    assert solution.status.tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED]


# Effective energies of a small machine: three visible units, two hidden ones.

W = tensor([[0.5, 0.1], [-0.3, 0.4], [0.2, -0.6]])
A = tensor([0.1, -0.2, 0.3])
V = tensor([[1.0, -1.0, 1.0]])
VISIBLE = tensor(list(itertools.product([-1, 1], repeat=3)))


def effective_energy(units, v):
    return -(v @ A) - HiddenUnits(W, units).value(v)


@pytest.mark.parametrize(
    ("units", "energy"),
    [
        (GaussianUnits(mean=0.0, variance=1.0), -1.505),
        (BernoulliUnits(0.5), -0.868121201130),
        (BernoulliUnits(0.2), -0.769053148525),
        (SignUnits(), -1.393611260449),
        (PoissonUnits(1.0), -1.724851488200),
        (ExponentialUnits(2.0), -0.921583624127),
        (LaplaceUnits(0.5), -1.113955516775),
        (ConstantUnits(1.0), -0.7),
        (SphereUnits(3), -0.892971128492),
    ],
    ids=repr,
)
def test_effective_energy(units, energy):
    printed(effective_energy(units, V), tensor([energy]))
    states, weights = law(units)
    summed = (((V @ W)[..., None] * states).exp() * weights).sum(-1).log().sum(-1)
    close(effective_energy(units, V), -(V @ A) - summed, rtol=1e-10, atol=1e-11)


def test_bernoulli_machine_by_enumeration_of_visible_and_of_all_units():
    log_weights = -effective_energy(BernoulliUnits(0.5), VISIBLE)
    printed(log_weights.logsumexp(0), tensor(2.289397122185))
    mean = log_weights.softmax(0) @ VISIBLE
    close(mean, tensor([0.3844817423, -0.1661295862, 0.1146107213]), rtol=0, atol=5.1e-11)
    hidden = tensor(list(itertools.product([0, 1], repeat=2)))
    joint = (VISIBLE @ A)[:, None] + VISIBLE @ W @ hidden.mT - 2 * math.log(2)
    close(log_weights.logsumexp(0), joint.flatten().logsumexp(0))
    close(mean, joint.flatten().softmax(0).view(8, 4).sum(-1) @ VISIBLE)


def test_gaussian_hidden_units_make_a_hopfield_network():
    units = GaussianUnits(0.0, 1.0)
    log_partition = (-effective_energy(units, VISIBLE)).logsumexp(0)
    printed(log_partition, tensor(2.677314981337))
    system = SpinSystem(W @ W.mT, A[:, None], measure="counting")
    close(log_partition, -free_energy(system, Enumeration()))
    v = random(4, 3)
    close(HiddenUnits(W, units).value(v), SquaredScores(W.mT, 1.0).value(v))


def test_the_gradient_is_the_mean_of_the_hidden_units_given_the_visible():
    # dE/dv = -a - W <h|v>, against the table of all states of h.
    hidden = tensor(list(itertools.product([-1, 1], repeat=2)))
    given = (V @ W @ hidden.mT).softmax(-1) @ hidden
    v = V.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(effective_energy(SignUnits(), v).sum(), v)
    close(gradient, -A - given @ W.mT)


# The mixture of Gaussians of which modern Hopfield networks are the energy.

X = tensor([[1, 0.5], [-0.5, 1.2], [0.3, -1]])


@pytest.mark.parametrize(("beta", "partition"), [(1.0, 37.2016855987), (2.0, 37.3349941393)])
def test_hopfield_mixture(beta, partition):
    potential = LogSumExp(X, beta)
    axis = torch.arange(-11, 11, 0.1, dtype=torch.float64)
    v = torch.cartesian_prod(axis, axis)
    energy = AnchoredEnergy(potential, v).energy(v)
    weight = (-beta * energy).exp() * 0.1**2
    closed = 2 * math.pi / beta * (beta * X.square().sum(-1) / 2).exp().sum()
    close(weight.sum(), tensor(partition), rtol=0, atol=5.1e-11)
    close(weight.sum(), closed)
    w = (weight[:, None] * potential.probabilities(v)).sum(0) / weight.sum()
    close(w, (beta * X.square().sum(-1) / 2).softmax(0))
    if beta == 1:
        close(w, tensor([0.3155377333, 0.3931842271, 0.2912780395]), rtol=0, atol=5.1e-11)


@pytest.mark.parametrize("solver", [Picard(rtol=1e-13, atol=0, max_steps=5000), NewtonKrylov(rtol=1e-13, atol=0)])
def test_hopfield_fixed_point(solver):
    start = tensor([[0.2, 0.1]])
    energy = AnchoredEnergy(LogSumExp(X, 1.0), start)
    solution = solve(energy, start, solver=solver)
    close(solution.value, tensor([[0.2415214765, 0.5878474157]]), rtol=0, atol=5.1e-11)
    printed(energy.energy(solution.value), tensor([-1.209001656387]))


# Structure and errors.


def test_bounds_below_and_on_the_curvature():
    weights = torch.diag(tensor([2.0, 1.0]))
    close(HiddenUnits(weights, GaussianUnits(0.0, 0.2)).lipschitz(), tensor(0.8))
    close(HiddenUnits(weights, SphereUnits(8)).lipschitz(), tensor(0.5))
    assert HiddenUnits(weights, PoissonUnits(1.0)).lipschitz() is None
    assert HiddenUnits(weights, GaussianUnits(0.0, 0.2)).bounded_below(1.0)
    assert not HiddenUnits(weights, GaussianUnits(0.0, 0.3)).bounded_below(1.0)
    assert HiddenUnits(weights, GaussianUnits(0.0, 0.3)).bounded_below(0.5)
    assert HiddenUnits(weights, SignUnits()).bounded_below(math.inf)
    assert not HiddenUnits(weights, PoissonUnits(1.0)).bounded_below(0.5)
    assert HiddenUnits(weights, PoissonUnits(1.0)).bounded_below(0.0)


@each
def test_units_copy_compare_and_print_how_they_are_made(units):
    for other in (copy.deepcopy(units), pickle.loads(pickle.dumps(units)), eval(repr(units))):
        assert other == units
        assert hash(other) == hash(units)


def test_low_precision_keeps_its_dtype():
    weights, v = 0.1 * random(3, 4), random(2, 3)
    for units in UNITS:
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-2)):
            value = HiddenUnits(weights.to(dtype), units).value(v.to(dtype))
            assert value.dtype == dtype
            assert relative_error(value, HiddenUnits(weights, units).value(v)) < tolerance


def test_errors_say_what_to_do():
    units = SignUnits()
    with pytest.raises(
        TypeError, match=r"`units` must be Units, got the class SignUnits; pass an instance: SignUnits\(\)"
    ):
        HiddenUnits(W, SignUnits)
    with pytest.raises(
        ValueError, match=r"`units` must have a dimension as hidden units, got .*; for example SphereUn"
    ):
        HiddenUnits(W, SphereUnits())
    with pytest.raises(TypeError, match="`weights` must be a torch"):
        HiddenUnits([[1.0]], units)
    with pytest.raises(ValueError, match=r"`weights` must have at least one visible and one hidden unit"):
        HiddenUnits(torch.zeros(3, 0), units)
    with pytest.raises(ValueError, match=r"`field` must have one entry for each of the 3 rows of `weights`"):
        AnchoredEnergy(HiddenUnits(W, units), torch.zeros(1, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"`field` must have the dtype of `weights`.*convert it"):
        AnchoredEnergy(HiddenUnits(W, units), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="`weights` must broadcast to the leading axes of `field`"):
        AnchoredEnergy(HiddenUnits(W.expand(2, 3, 2), units), torch.zeros(1, 3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: GaussianUnits(0.0, -1.0), ValueError, "`variance` must be >= 0, got -1.0"),
        (lambda: GaussianUnits("a", 1.0), TypeError, "`mean` must be a number"),
        (lambda: BernoulliUnits(1.0), ValueError, "`p` must be between 0 and 1, got 1.0; use ConstantUnits"),
        (lambda: BernoulliUnits(0), ValueError, "`p` must be between 0 and 1, got 0; use ConstantUnits"),
        (lambda: PoissonUnits(0.0), ValueError, "`rate` must be > 0"),
        (lambda: ExponentialUnits(-1.0), ValueError, "`rate` must be > 0"),
        (lambda: LaplaceUnits(0.0), ValueError, "`scale` must be > 0"),
        (lambda: ConstantUnits(math.inf), ValueError, "`value` must be"),
        (lambda: SphereUnits(1), ValueError, r"`dim` must be >= 2, got 1; use SignUnits\(\)"),
        (lambda: SphereUnits(3.0), TypeError, "`dim` must be an integer"),
    ],
)
def test_parameters_are_checked(make, error, words):
    with pytest.raises(error, match=words):
        make()
