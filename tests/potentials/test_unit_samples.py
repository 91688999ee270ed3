"""Samples of a hidden unit: moments, support and distribution of every tilted law; the soft barrier of two of them."""

import functools

import numpy as np
import pytest
import scipy.integrate
import scipy.special
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

tensor = functools.partial(torch.tensor, dtype=torch.float64)
close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)
COUNT = 20_000
TILTS = (-1.4, -0.3, 0.0, 0.8, 1.5)

# Every law with its unnormalised density and the interval that it lives on, or with its states and their weights.
CONTINUOUS = {
    "Gaussian": (GaussianUnits(0.3, 1.7), lambda h: np.exp(-((h - 0.3) ** 2) / 3.4), (-14, 14)),
    "Exponential": (ExponentialUnits(2.0), lambda h: np.exp(-2.0 * h), (0, 80)),
    "Laplace": (LaplaceUnits(0.5), lambda h: np.exp(-np.abs(h) / 0.5), (-60, 60)),
    "Sphere 2": (SphereUnits(2), lambda h: (1 - h * h) ** -0.5, (-1, 1)),
    "Sphere 3": (SphereUnits(3), np.ones_like, (-1, 1)),
    "Sphere 8": (SphereUnits(8), lambda h: (1 - h * h) ** 2.5, (-1, 1)),
}
DISCRETE = {
    "Bernoulli": (BernoulliUnits(0.2), [0, 1], [0.8, 0.2]),
    "Sign": (SignUnits(), [-1, 1], [0.5, 0.5]),
    "Poisson": (PoissonUnits(0.7), range(40), scipy.stats.poisson.pmf(range(40), 0.7)),
    "Constant": (ConstantUnits(1.3), [1.3], [1.0]),
    "Discrete": (DiscreteUnits((-1, 0, 2.5), (1.0, 2.0, 0.5)), [-1, 0, 2.5], [1.0, 2.0, 0.5]),
}
UNITS = {name: given[0] for name, given in (CONTINUOUS | DISCRETE).items()}
each = pytest.mark.parametrize("units", UNITS.values(), ids=UNITS)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def draws(units, seed=0, dtype=torch.float64):
    """(COUNT, tilts)."""
    return units.sample(torch.tensor(TILTS, dtype=dtype).expand(COUNT, -1), generator=seeded(seed))


@each
def test_mean_and_variance_are_those_of_the_tilted_law(units):
    t, drawn = tensor(TILTS), draws(units)
    mean, variance = units.mean(t), units.variance(t)
    away = drawn - mean
    # The spread of a square is measured: fourth cumulants are not what is tested.
    error = away.square().std(0) / COUNT**0.5
    assert (away.mean(0).abs() <= 5 * (variance / COUNT).sqrt() + 1e-12).all()
    assert ((away.square().mean(0) - variance).abs() <= 5 * error + 1e-12).all()


def distribution(density, low, high, t):
    """The distribution function of a tilted density, by quadrature on a grid that is dense at the ends."""
    x = (low + high) / 2 - (high - low) / 2 * np.cos(np.linspace(0, np.pi, 40_001))
    middle = (x[1:] + x[:-1]) / 2
    weight = density(middle) * np.exp(t * (middle - high)) * np.diff(x)
    total = np.concatenate([[0], np.cumsum(weight)])
    return lambda h: np.interp(h, x, total / total[-1])


@pytest.mark.parametrize(("units", "density", "ends"), CONTINUOUS.values(), ids=CONTINUOUS)
def test_continuous_samples_have_the_tilted_density(units, density, ends):
    for column, t in zip(draws(units, seed=1).T.numpy(), TILTS, strict=True):
        assert ends[0] <= column.min() <= column.max() <= ends[1]
        assert scipy.stats.kstest(column, distribution(density, *ends, t)).pvalue > 1e-3
        # The same samples are not those of another tilt.
        assert scipy.stats.kstest(column, distribution(density, *ends, t + 0.3)).pvalue < 1e-6


@pytest.mark.parametrize(("units", "states", "weights"), DISCRETE.values(), ids=DISCRETE)
def test_discrete_samples_have_the_tilted_weights(units, states, weights):
    states = np.asarray(states, dtype=float)
    for column, t in zip(draws(units, seed=1).T.numpy(), TILTS, strict=True):
        p = np.asarray(weights) * np.exp(t * states)
        p /= p.sum()
        assert np.isin(column, states).all()
        seen = np.array([(column == state).sum() for state in states])
        usual = COUNT * p > 5
        # The rare states are one class.
        observed, expected = (np.append(x[usual], x[~usual].sum()) for x in (seen, COUNT * p))
        if len(states) == 1:
            assert observed[0] == COUNT
            continue
        keep = expected > 0
        assert scipy.stats.chisquare(observed[keep], expected[keep], sum_check=False).pvalue > 1e-3


@each
def test_a_generator_gives_the_same_samples_and_none_is_torchs_own(units):
    assert torch.equal(draws(units), draws(units))
    if not isinstance(units, ConstantUnits):
        assert not torch.equal(draws(units), draws(units, seed=1))
    torch.manual_seed(0)
    first = units.sample(tensor(TILTS))
    torch.manual_seed(0)
    assert torch.equal(units.sample(tensor(TILTS)), first)
    state = torch.get_rng_state()
    draws(units)
    assert torch.equal(torch.get_rng_state(), state)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtype_shape_and_layout_are_kept(units, dtype):
    t = torch.tensor(TILTS, dtype=dtype).requires_grad_()
    drawn = units.sample(t.expand(4, -1).mT, generator=seeded())
    assert (drawn.dtype, drawn.shape, drawn.requires_grad) == (dtype, (5, 4), False)
    assert units.sample(torch.zeros(0, 3, dtype=dtype)).shape == (0, 3)
    assert units.sample(torch.tensor(0.5, dtype=dtype)).shape == ()
    wide = draws(units, dtype=dtype).double()
    error = (units.variance(tensor(TILTS)) / COUNT).sqrt()
    rounded = units.mean(torch.tensor(TILTS, dtype=dtype).double())
    assert ((wide.mean(0) - rounded).abs() <= 5 * error + 4e-3 * (dtype != torch.float32) + 1e-6).all()


@each
def test_a_tilt_without_law_is_nan_and_touches_no_other(units):
    t = torch.linspace(-1, 1, 6, dtype=torch.float64)
    bad = t.clone()
    bad[[1, 4]] = tensor([torch.nan, torch.inf])
    drawn = units.sample(bad, generator=seeded())
    others = [0, 2, 3, 5]
    assert drawn[[1, 4]].isnan().all()
    assert drawn[others].isfinite().all()


@pytest.mark.parametrize(
    ("units", "outside", "inside"),
    [
        (ExponentialUnits(2.0), [2.0, 7.0], [1.999, -1e6]),
        (LaplaceUnits(0.5), [2.0, -2.0, 5.0], [1.999, -1.999]),
        (PoissonUnits(1.0), [40.0, 1000.0], [30.0, -1000.0]),
    ],
    ids=["Exponential", "Laplace", "Poisson"],
)
def test_domains_of_samples(units, outside, inside):
    drawn = units.sample(tensor(outside + inside), generator=seeded())
    assert drawn[: len(outside)].isnan().all()
    assert drawn[len(outside) :].isfinite().all()


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
    assert units.largest_variance == 1.44
    drawn = units.sample(t.expand(COUNT, 2, 3), generator=seeded())
    assert ((drawn.mean(0) - units.mean(t)).abs() <= 5 * (units.variance(t) / COUNT).sqrt() + 1e-12).all()
    assert eval(repr(units)) == units
    with pytest.raises(ValueError, match=r"`t` must have 3 entries on the last axis.* got shape \(2, 2\)"):
        units.mean(t[:, :2])
    with pytest.raises(ValueError, match=r"`variance` must be >= 0, got -1.0"):
        GaussianUnits(0.0, (1.0, -1.0))
    with pytest.raises(ValueError, match="`variance` must have at least one entry"):
        GaussianUnits(0.0, ())


class Uniform(Units):
    def cumulant(self, t):
        return torch.log(torch.sinh(t) / t)


def test_wrong_arguments_of_samples_are_named():
    with pytest.raises(NotImplementedError, match=r"Uniform must define _draw\(t, generator\) to be sampled"):
        Uniform().sample(torch.ones(2))
    with pytest.raises(TypeError, match=r"`t` must be a torch\.Tensor, got float"):
        SignUnits().sample(0.5)
    with pytest.raises(TypeError, match=r"`generator` must be a torch.Generator or None, got 0; pass torch.Generator"):
        SignUnits().sample(torch.ones(2), generator=0)
    with pytest.raises(ValueError, match="`generator` must be on the device of `t` \\(meta\\), got cpu"):
        SignUnits().sample(torch.ones(2, device="meta"), generator=seeded())


BARRIERS = [ExponentialUnits(2.0, soft_barrier=0.25), LaplaceUnits(0.5, soft_barrier=0.25)]
barriers = pytest.mark.parametrize("units", BARRIERS, ids=["Exponential", "Laplace"])


@barriers
def test_a_soft_barrier_leaves_the_domain_before_it_alone_and_goes_on_as_a_parabola(units):
    free = type(units)(2.0 if isinstance(units, ExponentialUnits) else 0.5)
    before = torch.linspace(-1.5, 1.5, 31, dtype=torch.float64)
    beyond = tensor([1.6, 1.99, 2.0, 30.0])
    at = tensor(1.5)
    for name in ("cumulant", "mean", "variance"):
        close(getattr(units, name)(before), getattr(free, name)(before))
    away = beyond - 1.5
    close(units.cumulant(beyond), free.cumulant(at) + away * (free.mean(at) + away * free.variance(at) / 2))
    close(units.mean(beyond), free.mean(at) + away * free.variance(at))
    close(units.variance(beyond), free.variance(at).expand(4))
    close(tensor(units.largest_variance), free.variance(at))
    assert free.largest_variance == torch.inf
    if isinstance(units, LaplaceUnits):
        close(units.cumulant(-beyond), units.cumulant(beyond))
        close(units.mean(-beyond), -units.mean(beyond))


@barriers
def test_derivatives_agree_on_both_sides_of_the_barrier(units):
    t = tensor([-1.7, -1.2, 0.3, 1.4, 1.7, 5.0]).requires_grad_()
    assert torch.autograd.gradcheck(units.cumulant, t)
    assert torch.autograd.gradgradcheck(units.cumulant, t)
    close(torch.autograd.grad(units.cumulant(t).sum(), t)[0], units.mean(t.detach()))
    close(torch.autograd.grad(units.mean(t).sum(), t)[0], units.variance(t.detach()))


@barriers
def test_a_soft_barrier_bounds_the_energy_and_has_no_samples_beyond(units):
    weights = torch.eye(2, dtype=torch.float64)
    potential = HiddenUnits(weights, units)
    v = tensor([[3.0, 0.0], [0.5, 0.5], [torch.nan, 0.0]])
    assert potential.value(v).isfinite().tolist() == [True, True, False]
    free = HiddenUnits(weights, ExponentialUnits(2.0) if isinstance(units, ExponentialUnits) else LaplaceUnits(0.5))
    assert free.value(v).isfinite().tolist() == [False, True, False]
    assert potential.bounded_below(0.9 / units.largest_variance)
    assert not potential.bounded_below(1.1 / units.largest_variance)
    drawn = units.sample(tensor([1.4, 1.6, torch.nan]), generator=seeded())
    assert drawn.isnan().tolist() == [False, True, True]


@pytest.mark.parametrize("law", [ExponentialUnits, LaplaceUnits])
def test_a_soft_barrier_is_a_share_of_the_domain(law):
    assert law(2.0) == law(2.0, soft_barrier=None)
    for wrong in (0.0, -0.1):
        with pytest.raises(ValueError, match="`soft_barrier` must be > 0, got"):
            law(2.0, soft_barrier=wrong)
    with pytest.raises(ValueError, match=r"`soft_barrier` must be in \(0, 1\), a share of the domain, got 1.0;"):
        law(2.0, soft_barrier=1.0)
    with pytest.raises(TypeError, match="`soft_barrier` must be a number, got 'on'"):
        law(2.0, soft_barrier="on")
