"""Polynomial, Exponential and laws of units over keys: the contract, cumulants, sums key by key, domains, bounds."""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from key_pairs import KEYS, LAWS, pairs

from implicit_attention import AnchoredEnergy, ImplicitAttention, Picard, SquaredScores, Status, solve
from implicit_attention.potentials import (
    BernoulliUnits,
    Exponential,
    ExponentialUnits,
    GaussianUnits,
    HiddenUnits,
    LaplaceUnits,
    PoissonUnits,
    Polynomial,
    SignUnits,
    SphereUnits,
    units_potential,
)
from implicit_attention.testing.numerics import check_close, random
from implicit_attention.testing.potential import PotentialContract

tensor = partial(torch.tensor, dtype=torch.float64)
#: The function of one score (beta <k, z> + bias, beta), and the potential that sums it over the keys.
FAMILIES = {
    **{n: (lambda s, b, n=n: b / n * (s / b).relu() ** n, partial(Polynomial, degree=n)) for n in (2, 3, 5)},
    "exponential": (lambda s, b: s.exp() / b, Exponential),
    **{str(law): (lambda s, b, law=law: law.cumulant(s) / b, units_potential(law)) for law in LAWS},
}


class TestPolynomial3(PotentialContract):
    factory = partial(Polynomial, degree=3)

    def make(self, dtype):
        return self.factory(0.3 * random(*KEYS, dtype=dtype), **pairs(dtype, left_out=True))


class TestPolynomial2(TestPolynomial3):
    factory = partial(Polynomial)


class TestExponential(TestPolynomial3):
    factory = partial(Exponential)


class TestSigns(TestPolynomial3):
    factory = units_potential(SignUnits())


class TestLaplace(TestPolynomial3):
    factory = units_potential(LaplaceUnits(0.1))


class TestSpheres(TestPolynomial3):
    factory = units_potential(SphereUnits(3))


class TestBernoulliOfSharedKeys(PotentialContract):
    def make(self, dtype):
        mask = torch.tensor([1, 1, 0, 1, 1, 0, 1], dtype=torch.bool)
        keys, beta = 0.3 * random(7, 5, dtype=dtype), torch.tensor(0.8, dtype=dtype)
        return units_potential(BernoulliUnits(0.2))(keys, beta, mask=mask)


CUMULANTS = [
    (BernoulliUnits(0.3), (0.126033691328, -0.180564673935), (0.3, 0.21, 0.084, -0.0546)),
    (SignUnits(), (0.066942946299, 0.290753560328), (0, 1, 0, -2)),
    (PoissonUnits(2.5), (1.119336536658, -1.376677589707), (2.5, 2.5, 2.5, 2.5)),
    (ExponentialUnits(1.7), (0.245449308829, -0.385662480812), (0.588235294, 0.346020761, 0.407083249, 0.718382203)),
    (LaplaceUnits(0.6), (0.050539894054, 0.261884379631), (0, 0.72, 0, 1.5552)),
    (SphereUnits(5), (0.013663334341, 0.063425703520), (0, 0.2, 0, -0.034285714)),
    (GaussianUnits(0.4, 2.25), (0.3020125, 0.4), (0.4, 2.25, 0, 0)),
]


@pytest.mark.parametrize(("units", "values", "cumulants"), CUMULANTS)
def test_printed_values_and_cumulants_of_laws(units, values, cumulants):
    """Over the one key 1 at beta 1 it is K itself, whose derivatives at 0 are the cumulants."""
    potential = units_potential(units)(tensor([[1.0]]), 1.0)
    check_close(potential.value(tensor([[0.37], [-0.8]])), tensor(values), 0, 5.1e-13)
    derivative = lambda t: potential.value(t[None, None]).sum()  # noqa: E731
    for cumulant in cumulants:
        derivative = torch.func.grad(derivative)
        check_close(derivative(tensor(0.0)), tensor(cumulant), 0, 5.1e-10)


@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_the_sum_over_the_keys_that_are_read(name):
    """Key by key, each left out that is masked, by -inf or by the mask; derivatives by autograd."""
    function, make = FAMILIES[name]
    keys, z, v, given = (
        0.3 * random(*KEYS),
        random(2, 3, 5, seed=1),
        random(2, 3, 5, seed=2),
        pairs(torch.float64, left_out=True),
    )
    potential = make(keys, **given)

    def total(row, b, n):
        read = given["mask"][b, n] & (given["bias"][b, n] > -torch.inf)
        scores = given["beta"][b] * (keys[b, read] * row).sum(-1) + given["bias"][b, n, read]
        return function(scores, given["beta"][b]).sum()

    for b in range(2):
        for n in range(3):
            phi, row = partial(total, b=b, n=n), z[b, n]
            check_close(potential.value(z)[b, n], phi(row), 1e-12)
            check_close(potential.mean(z)[b, n], torch.func.grad(phi)(row), 1e-12)
            product = torch.func.hessian(phi)(row) @ v[b, n]
            check_close(potential.covariance_product(z, v)[b, n], product, 1e-12)


def test_degree_2_is_the_memory_of_the_energy_transformer():
    """Its energy as published is -1/2 sum relu(xi g)^2, and the force relu(g xi^T) xi."""
    xi, g = random(7, 5), random(2, 3, 5, seed=1)
    potential = Polynomial(xi, 1.0)
    check_close(-potential.value(g), -0.5 * torch.einsum("md,bnd->bnm", xi, g).relu().square().sum(-1), 1e-12)
    check_close(potential.mean(g), (g @ xi.mT).relu() @ xi, 1e-12)


SOME = torch.tensor([1, 1, 0, 1, 1, 0, 1], dtype=torch.bool)
#: Two potentials over the same keys that differ by a constant.
PAIRS = {
    "squared scores": lambda k: (
        Polynomial(torch.cat([k, -k], -2), 0.4, mask=SOME.repeat(2)),
        SquaredScores(k, 0.4, mask=SOME),
        0.0,
    ),
    "Gaussian units": lambda k: (units_potential(GaussianUnits())(k, 0.4), SquaredScores(k, 0.4), 0.0),
    "Poisson units": lambda k: (
        units_potential(PoissonUnits(1.0))(k, 0.4, mask=SOME),
        Exponential(k, 0.4, mask=SOME),
        -5 / 0.4,
    ),
    **{str(law): lambda k, law=law: (units_potential(law)(k, 1.0), HiddenUnits(k.mT, law), 0.0) for law in LAWS},
}


@pytest.mark.parametrize("name", PAIRS)
def test_other_potentials_by_the_same_numbers(name):
    z, v = random(2, 3, 5, seed=1), random(2, 3, 5, seed=2)
    one, other, constant = PAIRS[name](0.3 * random(*KEYS))
    check_close(one.value(z), other.value(z) + constant, 1e-12)
    check_close(one.mean(z), other.mean(z), 1e-12)
    check_close(one.covariance_product(z, v), other.covariance_product(z, v), 1e-12)


@pytest.mark.parametrize("units", [ExponentialUnits(2.0), LaplaceUnits(0.5)], ids=str)
def test_a_score_outside_the_domain_stays_in_its_row(units):
    keys, make = torch.eye(3).double(), units_potential(units)
    potential, z = make(keys, 1.0), tensor([[0.1, 0.2, 0.3], [2.5, 0.0, 0.0], [0.3, 0.1, 0.2]])
    assert potential.value(z).isnan().tolist() == [False, True, False]
    assert potential.mean(z)[1].isnan().all()
    solution = solve(AnchoredEnergy(potential, z, 0.5), z, solver=Picard(), on_failure="ignore")
    assert solution.status.tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED]
    # Read by a query, that key is outside; masked, it is nothing.
    assert make(keys, 1.0, mask=torch.tensor([False, True, True])).value(z).isfinite().all()


FASTER = partial(Polynomial, degree=3), Exponential, units_potential(PoissonUnits(1.0))


def test_bounds():
    short_key = torch.tensor([[0.0, 0.0], [0.1, 0.0]])
    keys = torch.eye(5)[None]
    twice, halves = torch.cat([keys, keys], -2), torch.arange(10) // 5 == torch.arange(2)[:, None]
    long, short = torch.eye(5) * torch.tensor([1.0, 1, 1, 1, 9]), torch.arange(5) < 4
    for potential, scale, known in (
        (Polynomial(keys, 0.9), 1.0, True),
        (Polynomial(keys, 1.1), 1.0, False),
        (Polynomial(keys, 1.1), 0.8, True),
        # One key twice: each alone is short enough, together they are not.
        (Polynomial(twice, 0.9), 1.0, False),
        (Polynomial(twice, 0.49), 1.0, True),
        # Unless no query reads both; then nothing is known.
        (Polynomial(twice, 0.9, mask=halves), 1.0, None),
        (Polynomial(keys.expand(2, 5, 5), torch.tensor([0.5, 1.1])), 0.9, True),
        (Polynomial(keys.expand(2, 5, 5), torch.tensor([0.5, 1.1])), 1.0, False),
        # A long key that no query reads does not count.
        (Polynomial(long, 0.9), 1.0, False),
        (Polynomial(long, 0.9, mask=short), 1.0, True),
        (units_potential(GaussianUnits(0.4, 1 / 0.36))(keys, 0.36), 0.9, True),
        (units_potential(GaussianUnits(0.4, 1 / 0.36))(keys, 0.36), 1.1, False),
        (units_potential(SignUnits())(keys, 9.0), math.inf, True),
        (units_potential(LaplaceUnits(0.1))(keys, 1.0), 0.5, None),
        # What grows faster than squares is unbounded once a key is read.
        *((make(short_key, 1.0), 1e-3, False) for make in FASTER),
        *((make(short_key, 1.0, mask=torch.tensor([True, False])), 1e9, True) for make in FASTER),
        *((make(short_key, 1.0, bias=torch.tensor([0.0, -torch.inf])), 1e9, True) for make in FASTER),
    ):
        assert potential.bounded_below(scale) is known
    assert all(make(short_key, 1.0).lipschitz() is None for make in FASTER)
    check_close(Polynomial(random(2, 7, 5), 0.3).lipschitz(), SquaredScores(random(2, 7, 5), 0.3).lipschitz(), 1e-12)
    assert units_potential(LaplaceUnits(0.1))(keys, 1.0).lipschitz() is None


def test_a_factory_is_copied_with_the_layer():
    layer = ImplicitAttention(8, 2, potential=units_potential(BernoulliUnits(0.3)), readout="state")
    x = random(1, 3, 8, dtype=torch.float32)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))


def test_large_degrees_do_not_overflow():
    """(s/beta)^30 is a number where s^30 is none."""
    potential, z = Polynomial(torch.eye(2), 16.0, degree=30), torch.tensor([[2.0, 1.0]])
    torch.testing.assert_close(potential.mean(z), 16 * z**29)
    assert potential.value(z).isfinite().all()


@pytest.mark.parametrize("name", FAMILIES)
def test_arguments_of_keys_are_checked(name):
    with pytest.raises(ValueError, match="`beta` must be > 0, got 0"):
        FAMILIES[name][1](torch.zeros(2, 7, 5), 0.0)
