"""GaussianMixture: attention of an exponential family, against integrals, softmax attention and printed numbers."""

import functools
import math

import pytest
import torch

from implicit_attention import LogSumExp
from implicit_attention.potentials import GaussianMixture
from implicit_attention.testing.numerics import check_close, random, relative_error
from implicit_attention.testing.potential import PotentialContract

tensor = functools.partial(torch.tensor, dtype=torch.float64)


def spread(*shape, dtype=torch.float64):
    roots = 0.3 * random(*shape, shape[-1], seed=7)
    return (roots @ roots.mT).to(dtype)


class TestShared(PotentialContract):
    means, covariances, weights = (2, 4, 5), (5,), (4,)

    def make(self, dtype):
        means, weights = random(*self.means, dtype=dtype), random(*self.weights, seed=3, dtype=dtype)
        return GaussianMixture(means, spread(*self.covariances, dtype=dtype), weights)


class TestSharedPerBatchEntry(TestShared):
    covariances, weights = (2, 1, 5), (2, 1)


class TestOnePerComponent(TestShared):
    covariances, weights = (4, 5), (2, 4)


class TestOnePerComponentAndBatchEntry(TestShared):
    covariances = (2, 4, 5)


# The example with three components in the plane.

ETA, PI = tensor([[0.4, -0.3]]), tensor([0.2, 0.5, 0.3])
MU = tensor([[0.5, -0.2], [1.0, 0.3], [-0.4, 0.8]])
SHARED = tensor([[1.2, 0.3], [0.3, 0.8]])
EACH = torch.stack([SHARED, torch.diag(tensor([0.5, 0.9])), tensor([[1.5, -0.4], [-0.4, 1.1]])])
EXAMPLES = [
    (SHARED, 0.228951489197, [1.0299672768, 0.1544833305]),
    (EACH, 0.242425758743, [0.9579349091, 0.0065014852]),
]


@pytest.mark.parametrize(("covariances", "value", "mean"), EXAMPLES, ids=["shared", "each"])
def test_value_and_mean(covariances, value, mean):
    # Only the symmetric part of a covariance counts.
    potential = GaussianMixture(MU, covariances + tensor([[0.0, 0.4], [-0.4, 0.0]]), PI.log())
    assert potential.value(ETA).item() == pytest.approx(value, abs=5.1e-13)
    assert potential.mean(ETA)[0].tolist() == pytest.approx(mean, abs=5.1e-11)
    # log E[exp(eta.x)] and the mean of x under the tilted law, on a grid of the plane.
    axis = torch.arange(-12, 14, 0.1, dtype=torch.float64)
    x = torch.cartesian_prod(axis, axis)
    laws = torch.distributions.MultivariateNormal(MU, covariances)
    tilted = (laws.log_prob(x[:, None]).exp() @ PI) * (x @ ETA[0]).exp() * 0.1**2
    check_close(potential.value(ETA)[0], tilted.sum().log(), 1e-11)
    check_close(potential.mean(ETA)[0], (tilted @ x) / tilted.sum(), 1e-11)


def test_without_spread_it_is_softmax_attention():
    z, v, means, weights = random(2, 3, 5), random(2, 3, 5, seed=1), random(2, 4, 5, seed=2), random(2, 4, seed=3)
    attention = LogSumExp(means, 1.0, bias=weights[:, None])
    for shape in ((5, 5), (4, 5, 5)):
        potential = GaussianMixture(means, torch.zeros(shape, dtype=torch.float64), weights)
        check_close(tuple(potential.evaluate(z)), tuple(attention.evaluate(z)), 1e-12)
        check_close(potential.covariance_product(z, v), attention.covariance_product(z, v), 1e-12)
        check_close(potential.responsibilities(z), attention.probabilities(z), 1e-12)


def test_a_component_of_no_weight_is_left_out_and_far_queries_do_not_overflow():
    weights = tensor([0.2, 0.0, 0.3]).log().requires_grad_()
    potential = GaussianMixture(MU, EACH, weights)
    rest = GaussianMixture(MU[[0, 2]], EACH[[0, 2]], tensor([0.2, 0.3]).log())
    check_close(tuple(potential.evaluate(ETA)), tuple(rest.evaluate(ETA)), 1e-12)
    (gradient,) = torch.autograd.grad(potential.mean(ETA).sum(), weights)
    assert bool(gradient.isfinite().all()) and gradient[1] == 0  # noqa: PT018
    for z in (1e6 * ETA, -1e6 * ETA):
        best = (torch.einsum("i,mij,j->m", z[0], EACH, z[0]) / 2 + MU @ z[0]).argmax()
        check_close(GaussianMixture(MU, EACH, PI.log()).mean(z)[0], MU[best] + EACH[best] @ z[0], 1e-12)


def test_bad_data_is_no_bad_argument():
    # From three dimensions on LAPACK raises for eigenvalues of NaN.
    potential = GaussianMixture(random(4, 3), torch.full((3, 3), math.nan).double(), random(4))
    assert potential.value(random(1, 3)).isnan().all()
    assert not potential.bounded_below(0.5)
    # Rounding may leave a singular matrix with a small negative eigenvalue.
    thin = random(2, 1).float()
    GaussianMixture(MU.float(), thin @ thin.mT, PI.log().float())


def test_what_means_have_in_common_costs_the_hessian_no_digits():
    means, matrix = random(12, 5, dtype=torch.float32) + 300, torch.eye(5) / 10
    z, v = random(7, 5, seed=1, dtype=torch.float32) / 3, random(7, 5, seed=2, dtype=torch.float32)
    narrow, wide = (GaussianMixture(*(t.to(d) for t in (means, matrix, torch.zeros(12)))) for d in (z.dtype, ETA.dtype))
    truth = wide.covariance_product(z.double(), v.double())
    for found in (narrow.covariance_product(z, v), narrow.linearize(z).product(v)):
        assert relative_error(found, truth) < 1e-5
