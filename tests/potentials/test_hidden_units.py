"""HiddenUnits: the potential contract for every law, effective energies, bounds, domains."""

import functools
import itertools
import math

import pytest
import torch

from implicit_attention import AnchoredEnergy, Status, solve
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
)
from implicit_attention.spins import Enumeration, SpinSystem, free_energy
from implicit_attention.testing.numerics import check_close, random
from implicit_attention.testing.potential import PotentialContract

tensor = functools.partial(torch.tensor, dtype=torch.float64)


class TestGaussian(PotentialContract):
    units, scale = GaussianUnits(0.3, 1.7), 0.3

    def make(self, dtype):
        return HiddenUnits(self.scale * random(2, 5, 7, dtype=dtype), self.units)


class TestBernoulli(TestGaussian):
    units = BernoulliUnits(0.2)


class TestSign(TestGaussian):
    units = SignUnits()


class TestPoisson(TestGaussian):
    units, scale = PoissonUnits(0.7), 0.1


class TestExponential(TestGaussian):
    # The contract goes as far as |t| = 40 scale, inside the domain.
    units, scale = ExponentialUnits(4.0), 0.04


class TestLaplace(TestGaussian):
    units, scale = LaplaceUnits(0.25), 0.04


class TestConstant(TestGaussian):
    units = ConstantUnits(1.3)


class TestSphere(TestGaussian):
    units = SphereUnits(3)


class TestDiscrete(TestGaussian):
    units = DiscreteUnits((-1, 0, 2.5), (1.0, 2.0, 0.5))


# A machine of three visible and two hidden units.

W, A = tensor([[0.5, 0.1], [-0.3, 0.4], [0.2, -0.6]]), tensor([0.1, -0.2, 0.3])
ENERGIES = {
    GaussianUnits(): -1.505,
    BernoulliUnits(0.5): -0.868121201130,
    BernoulliUnits(0.2): -0.769053148525,
    SignUnits(): -1.393611260449,
    PoissonUnits(1.0): -1.724851488200,
    ExponentialUnits(2.0): -0.921583624127,
    LaplaceUnits(0.5): -1.113955516775,
    ConstantUnits(1.0): -0.7,
    SphereUnits(3): -0.892971128492,
}


@pytest.mark.parametrize(("units", "energy"), ENERGIES.items(), ids=repr)
def test_effective_energy(units, energy):
    v = tensor([[1.0, -1.0, 1.0]])
    check_close(-(v @ A) - HiddenUnits(W, units).value(v), tensor([energy]), 0.0, 5.1e-13)


def test_gaussian_hidden_units_make_a_hopfield_network():
    v = tensor(list(itertools.product([-1, 1], repeat=3)))
    log_partition = (v @ A + HiddenUnits(W, GaussianUnits()).value(v)).logsumexp(0)
    check_close(log_partition, tensor(2.677314981337), 0.0, 5.1e-13)
    check_close(-free_energy(SpinSystem(W @ W.mT, A[:, None], measure="counting"), Enumeration()), log_partition, 1e-12)


def test_bounds_below_and_on_the_curvature():
    weights = torch.diag(tensor([2.0, 1.0]))
    wide = HiddenUnits(weights, GaussianUnits(0.0, 0.3))
    assert (wide.bounded_below(0.8), wide.bounded_below(0.9)) == (True, False)
    check_close(wide.lipschitz(), tensor(1.2), 1e-12)
    poisson = HiddenUnits(weights, PoissonUnits(1.0))
    assert (poisson.bounded_below(0.0), poisson.bounded_below(0.5), poisson.lipschitz()) == (True, False, None)
    assert HiddenUnits(weights, SignUnits()).bounded_below(math.inf)


@pytest.mark.parametrize("units", [ExponentialUnits(2.0), LaplaceUnits(0.5)], ids=repr)
def test_a_row_outside_the_domain_changes_no_other(units):
    weights, field, found = (0.3 * random(4, 5)).requires_grad_(), 0.3 * random(3, 4, seed=1), []
    for size in (0.0, 50.0):
        field[2] = size
        solution = solve(AnchoredEnergy(HiddenUnits(weights, units), field, 0.6), field, on_failure="ignore")
        found.append((solution.value[:2], torch.autograd.grad(solution.value[:2].square().sum(), weights)[0]))
    assert solution.status.tolist() == [Status.CONVERGED, Status.CONVERGED, Status.NONFINITE]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
