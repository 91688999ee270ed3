"""Laws of a hidden unit: cumulants and samples of every tilted law against quadrature; the soft barrier of two."""

import copy
import functools
import math
import pickle

import numpy as np
import pytest
import scipy.stats
import torch

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
from implicit_attention.testing.numerics import check_derivatives

tensor = functools.partial(torch.tensor, dtype=torch.float64)
close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)
COUNT = 20_000
TILTS = (-1.4, -0.3, 0.0, 0.8, 1.5)


def grid(low, high, density):
    """Points that are dense at the ends of an interval, and the weights of a density there."""
    angle, weights = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(1000))
    angle = math.pi / 2 * (angle + 1)
    x = (low + high) / 2 - (high - low) / 2 * angle.cos()
    return x, density(x) * angle.sin() * weights


def mirrored(x, weights):
    return torch.cat([-x.flip(0), x]), torch.cat([weights.flip(0), weights])


CONTINUOUS = {
    "Gaussian": (GaussianUnits(0.3, 1.7), *grid(-19.7, 20.3, lambda h: torch.exp(-((h - 0.3) ** 2) / 3.4))),
    "Exponential": (ExponentialUnits(2.0), *grid(0, 80, lambda h: torch.exp(-2.0 * h))),
    "Laplace": (LaplaceUnits(0.5), *mirrored(*grid(0, 80, lambda h: torch.exp(-h / 0.5)))),
    "Sphere 2": (SphereUnits(2), *grid(-1, 1, lambda h: (1 - h * h) ** -0.5)),
    "Sphere 3": (SphereUnits(3), *grid(-1, 1, torch.ones_like)),
    "Sphere 8": (SphereUnits(8), *grid(-1, 1, lambda h: (1 - h * h) ** 2.5)),
}
DISCRETE = {
    "Bernoulli": (BernoulliUnits(0.2), [0, 1], [0.8, 0.2]),
    "Sign": (SignUnits(), [-1, 1], [0.5, 0.5]),
    "Poisson": (PoissonUnits(0.7), list(range(40)), scipy.stats.poisson.pmf(range(40), 0.7)),
    "Constant": (ConstantUnits(1.3), [1.3], [1.0]),
    "Discrete": (DiscreteUnits((-1, 0, 2.5), (1.0, 2.0, 0.5)), [-1, 0, 2.5], [1.0, 2.0, 0.5]),
}
LAWS = CONTINUOUS | {name: (law, tensor(x), tensor(w)) for name, (law, x, w) in DISCRETE.items()}
every_law = pytest.mark.parametrize(("units", "states", "weights"), LAWS.values(), ids=LAWS)
each = pytest.mark.parametrize("units", [law[0] for law in LAWS.values()], ids=LAWS)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def draws(units, dtype=torch.float64):
    """(COUNT, tilts)."""
    return units.sample(torch.tensor(TILTS, dtype=dtype).expand(COUNT, -1), generator=seeded())


@every_law
def test_cumulant_mean_and_variance_are_averages_over_the_tilted_law(units, states, weights):
    t, law = tensor(TILTS), (weights / weights.sum()).log()
    exponents = t[:, None] * states + law
    p = exponents.softmax(-1)
    mean = (p * states).sum(-1)
    found = units.cumulant(t), units.mean(t), units.variance(t)
    expected = exponents.logsumexp(-1), mean, (p * (states - mean[:, None]).square()).sum(-1)
    close(found, expected, rtol=1e-10, atol=1e-11)
    assert units.cumulant(tensor(0.0)) == 0


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


@pytest.mark.parametrize("units", [BernoulliUnits(0.5), SignUnits(), SphereUnits(3)], ids=repr)
def test_far_tilts_neither_overflow_nor_lose_the_variance(units):
    t = tensor([-300.0, 300.0]).requires_grad_()
    (first,) = torch.autograd.grad(units.cumulant(t).sum(), t, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), t)
    close((first, second), (units.mean(t), units.variance(t)))
    assert bool((units.variance(t) > 0).all())
    if not isinstance(units, SphereUnits):
        shift = 150.0 if isinstance(units, BernoulliUnits) else 0.0
        close(units.cumulant(t), tensor([300.0 - shift, 300.0 - shift]) + t.sign() * shift - math.log(2))


@each
def test_units_copy_compare_and_print_how_they_are_made(units):
    for other in (copy.deepcopy(units), pickle.loads(pickle.dumps(units)), eval(repr(units))):
        assert (other, hash(other)) == (units, hash(units))


# Samples.


@pytest.mark.parametrize(("units", "states", "weights"), CONTINUOUS.values(), ids=CONTINUOUS)
def test_continuous_samples_have_the_tilted_density(units, states, weights):
    def distribution(t):
        p = (t * states + weights.log()).softmax(-1)
        return lambda h: np.interp(h, states, p.cumsum(0) - p / 2)

    for column, t in zip(draws(units).T.numpy(), TILTS, strict=True):
        assert scipy.stats.kstest(column, distribution(t)).pvalue > 1e-3
        # The same samples are not those of another tilt.
        assert scipy.stats.kstest(column, distribution(t + 0.3)).pvalue < 1e-6


@pytest.mark.parametrize(("units", "states", "weights"), DISCRETE.values(), ids=DISCRETE)
def test_discrete_samples_have_the_tilted_weights(units, states, weights):
    for column, t in zip(draws(units).T, TILTS, strict=True):
        p = (t * tensor(states) + tensor(weights).log()).softmax(-1)
        seen = torch.stack([(column == state).sum() for state in states])
        assert seen.sum() == COUNT
        if len(states) == 1:
            continue
        usual = COUNT * p > 5
        # The rare states are one class.
        observed, expected = (torch.cat([x[usual], x[~usual].sum()[None]]) for x in (seen, COUNT * p))
        keep = expected > 0
        assert scipy.stats.chisquare(observed[keep], expected[keep], sum_check=False).pvalue > 1e-3


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_samples_follow_their_generator_and_keep_dtype_shape_and_neighbours(units, dtype):
    t = torch.tensor(TILTS, dtype=dtype).requires_grad_()
    drawn = units.sample(t.expand(4, -1).mT, generator=seeded())
    assert (drawn.dtype, drawn.shape, drawn.requires_grad) == (dtype, (5, 4), False)
    assert torch.equal(units.sample(t.expand(4, -1).mT, generator=seeded()), drawn)
    assert units.sample(torch.zeros(0, 3, dtype=dtype)).shape == (0, 3)
    spoilt = units.sample(torch.tensor([0.5, torch.nan, torch.inf, -1.0], dtype=dtype))
    assert spoilt.isfinite().tolist() == [True, False, False, True]
    error = (units.variance(tensor(TILTS)) / COUNT).sqrt()
    rounded, wide = units.mean(torch.tensor(TILTS, dtype=dtype).double()), draws(units, dtype).double().mean(0)
    assert ((wide - rounded).abs() <= 5 * error + 4e-3 * (dtype != torch.float32) + 1e-6).all()


@pytest.mark.parametrize(
    ("units", "outside", "inside"),
    [
        (ExponentialUnits(2.0), [2.0, 7.0], [1.999, -1e6]),
        (LaplaceUnits(0.5), [2.0, -2.0, 5.0], [1.999, -1.999]),
        (PoissonUnits(1.0), [40.0, 1000.0], [30.0, -1000.0]),
    ],
    ids=["Exponential", "Laplace", "Poisson"],
)
def test_outside_the_domain_everything_is_nan(units, outside, inside):
    functions = [functools.partial(units.sample, generator=seeded())]
    # The mean of a Poisson law is there where no number can be drawn.
    functions += [] if isinstance(units, PoissonUnits) else [units.cumulant, units.mean, units.variance]
    for function in functions:
        assert function(tensor(outside)).isnan().all()
        assert function(tensor(inside)).isfinite().all()


def test_extreme_tilts_give_the_states_that_they_force():
    t = tensor([-1e4, 1e4])
    assert BernoulliUnits(0.5).sample(t).tolist() == [0, 1]
    assert SignUnits().sample(t).tolist() == [-1, 1]
    assert DiscreteUnits((-2, 0, 3)).sample(t).tolist() == [-2, 3]
    near = SphereUnits(8).sample(t)
    assert (near[0] < -0.99) & (near[1] > 0.99)


def test_gaussian_units_with_a_variance_each_are_single_units_side_by_side():
    units, t = GaussianUnits(0.4, (0.64, 1.44, 0.0)), tensor([[0.3, -0.2, 1.0], [1.0, 2.0, 0.0]])
    alone = [GaussianUnits(0.4, variance) for variance in (0.64, 1.44, 0.0)]
    for name in ("cumulant", "mean", "variance"):
        close(getattr(units, name)(t), torch.stack([getattr(u, name)(t[:, i]) for i, u in enumerate(alone)], -1))
    drawn = units.sample(t.expand(COUNT, 2, 3), generator=seeded())
    assert ((drawn.mean(0) - units.mean(t)).abs() <= 5 * (units.variance(t) / COUNT).sqrt() + 1e-12).all()
    assert (units.largest_variance, eval(repr(units))) == (1.44, units)


class Uniform(Units):
    """On [-1, 1]: a law of a user, which is that of a component of a sphere in three dimensions."""

    def cumulant(self, t):
        return torch.log(torch.sinh(t) / t)


def test_wrong_arguments_of_samples_are_named():
    with pytest.raises(NotImplementedError, match=r"Uniform must define _draw\(t, generator\) to be sampled"):
        Uniform().sample(torch.ones(2))


def test_wrong_variances_are_named():
    with pytest.raises(ValueError, match=r"`variance` must be >= 0, got -1.0"):
        GaussianUnits(0.0, (1.0, -1.0))
    with pytest.raises(ValueError, match="`variance` must have at least one entry"):
        GaussianUnits(0.0, ())


def test_mean_and_variance_of_a_users_law_follow_from_its_cumulant():
    t = tensor([-1.3, 0.2, 5.0])
    close((Uniform().mean(t), Uniform().variance(t)), (SphereUnits(3).mean(t), SphereUnits(3).variance(t)), rtol=1e-9)


# The soft barrier.


@pytest.mark.parametrize("law", [ExponentialUnits, LaplaceUnits])
def test_a_soft_barrier_leaves_the_domain_before_it_alone_and_goes_on_as_a_parabola(law):
    at, scale = (1.5, 2.0) if law is ExponentialUnits else (1.5, 0.5)
    free, units = law(scale), law(scale, soft_barrier=0.25)
    before, beyond, at = tensor([-1.5, 0.2, 1.5]), tensor([1.6, 1.99, 2.0, 30.0]), tensor(at)
    for name in ("cumulant", "mean", "variance"):
        close(getattr(units, name)(before), getattr(free, name)(before))
    away = beyond - at
    close(units.cumulant(beyond), free.cumulant(at) + away * (free.mean(at) + away * free.variance(at) / 2))
    close(units.mean(beyond), free.mean(at) + away * free.variance(at))
    close(units.variance(beyond), free.variance(at).expand(4))
    assert (units.largest_variance, free.largest_variance) == (pytest.approx(float(free.variance(at))), math.inf)
    check_derivatives(units.cumulant, [tensor([-1.7, -1.2, 0.3, 1.4, 1.7, 5.0]).requires_grad_()])
    # It bounds the energy, and has no samples beyond.
    potential, v = HiddenUnits(torch.eye(2).double(), units), tensor([[3.0, 0.0], [0.5, 0.5], [torch.nan, 0.0]])
    assert potential.value(v).isfinite().tolist() == [True, True, False]
    assert potential.bounded_below(0.9 / units.largest_variance)
    assert not potential.bounded_below(1.1 / units.largest_variance)
    assert units.sample(tensor([1.4, 1.6, torch.nan]), generator=seeded()).isnan().tolist() == [False, True, True]
