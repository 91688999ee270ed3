"""GaussianMixture: attention of an exponential family, against integrals, softmax attention and printed numbers."""

import functools
import math

import pytest
import torch

from implicit_attention import AnchoredEnergy, Anderson, LogSumExp, solve
from implicit_attention.potentials import GaussianMixture
from implicit_attention.testing.numerics import random, relative_error
from implicit_attention.testing.potential import PotentialContract

tensor = functools.partial(torch.tensor, dtype=torch.float64)
close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)
printed = functools.partial(torch.testing.assert_close, rtol=0)


def spread(*shape, seed=7, dtype=torch.float64):
    roots = 0.3 * random(*shape, shape[-1], seed=seed)
    return (roots @ roots.mT).to(dtype)


class TestShared(PotentialContract):
    def make(self, dtype):
        return GaussianMixture(random(2, 4, 5, dtype=dtype), spread(5, dtype=dtype), random(4, seed=3, dtype=dtype))


class TestSharedPerBatchEntry(PotentialContract):
    def make(self, dtype):
        return GaussianMixture(
            random(2, 4, 5, dtype=dtype), spread(2, 1, 5, dtype=dtype), random(2, 1, seed=3, dtype=dtype)
        )


class TestOnePerComponent(PotentialContract):
    def make(self, dtype):
        return GaussianMixture(
            random(2, 4, 5, dtype=dtype), spread(4, 5, dtype=dtype), random(2, 4, seed=3, dtype=dtype)
        )


class TestOnePerComponentAndBatchEntry(PotentialContract):
    def make(self, dtype):
        return GaussianMixture(
            random(2, 3, 5, dtype=dtype), spread(2, 3, 5, dtype=dtype), random(2, 3, seed=3, dtype=dtype)
        )


class TestOneSet(PotentialContract):
    def make(self, dtype):
        return GaussianMixture(random(4, 5, dtype=dtype), spread(4, 5, dtype=dtype), random(4, seed=3, dtype=dtype))


# The example with three components in the plane.

ETA = tensor([[0.4, -0.3]])
PI = tensor([0.2, 0.5, 0.3])
MU = tensor([[0.5, -0.2], [1.0, 0.3], [-0.4, 0.8]])
SHARED = tensor([[1.2, 0.3], [0.3, 0.8]])
EACH = torch.stack([SHARED, torch.diag(tensor([0.5, 0.9])), tensor([[1.5, -0.4], [-0.4, 1.1]])])


def integrated(covariances):
    """log E[exp(eta.x)] and the mean of x under the tilted law, on a grid of the plane."""
    axis = torch.arange(-12, 14, 0.1, dtype=torch.float64)
    x = torch.cartesian_prod(axis, axis)
    density = torch.zeros(len(x), dtype=torch.float64)
    for pi, mu, covariance in zip(PI, MU, covariances.expand(3, 2, 2), strict=True):
        law = torch.distributions.MultivariateNormal(mu, covariance)
        density += pi * law.log_prob(x).exp() * 0.1**2
    tilted = density * (x @ ETA[0]).exp()
    return tilted.sum().log(), (tilted @ x) / tilted.sum()


@pytest.mark.parametrize(
    ("covariances", "value", "mean"),
    [
        (SHARED, 0.228951489197, (1.0299672768, 0.1544833305)),
        (EACH, 0.242425758743, (0.9579349091, 0.0065014852)),
    ],
    ids=["shared", "each"],
)
def test_value_and_mean(covariances, value, mean):
    potential = GaussianMixture(MU, covariances, PI.log())
    printed(potential.value(ETA), tensor([value]), atol=5.1e-13)
    printed(potential.mean(ETA), tensor([mean]), atol=5.1e-11)
    log_partition, average = integrated(covariances)
    close(potential.value(ETA)[0], log_partition, rtol=1e-11)
    close(potential.mean(ETA)[0], average, rtol=1e-11)


def test_jensen_bound_lies_below():
    # log of the average >= average of the logs, which are those of single components.
    single = GaussianMixture(MU[:, None], EACH[:, None], torch.zeros(1, dtype=torch.float64))
    eta = ETA.expand(3, 1, 2)
    printed(PI @ single.value(eta)[:, 0], tensor(0.2117), atol=5.1e-5)
    printed(PI @ single.mean(eta)[:, 0], tensor([0.874, 0.044]), atol=5.1e-4)
    for seed in range(5):
        eta = 2 * random(10, 2, seed=seed)
        bound = PI @ single.value(eta.expand(3, 10, 2))
        assert bool((GaussianMixture(MU, EACH, PI.log()).value(eta) >= bound).all())


def bregman(potential, eta2, eta1):
    return potential.value(eta2) - potential.value(eta1) - (potential.mean(eta1) * (eta2 - eta1)).sum(-1)


def test_bregman_divergence_is_a_relative_entropy():
    eta2 = tensor([[-0.2, 0.6]])
    keys = LogSumExp(MU, 1.0)
    p1, p2 = keys.probabilities(ETA), keys.probabilities(eta2)
    entropy = (p1 * (p1 / p2).log()).sum(-1)
    printed(entropy, tensor([0.187870225797]), atol=5.1e-13)
    close(bregman(keys, eta2, ETA), entropy)
    points = GaussianMixture(MU, torch.zeros(2, 2, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
    close(bregman(points, eta2, ETA), entropy)
    # Of one Gaussian it is (eta2 - eta1).Sigma (eta2 - eta1)/2.
    one = GaussianMixture(MU[:1], SHARED, torch.zeros(1, dtype=torch.float64))
    change = eta2 - ETA
    close(bregman(one, eta2, ETA), (change @ SHARED * change).sum(-1) / 2)


def test_without_spread_it_is_softmax_attention():
    z, v = random(2, 3, 5), random(2, 3, 5, seed=1)
    means, log_weights = random(2, 4, 5, seed=2), random(2, 4, seed=3)
    attention = LogSumExp(means, 1.0, bias=log_weights[:, None])
    for shape in ((5, 5), (4, 5, 5)):
        potential = GaussianMixture(means, torch.zeros(shape, dtype=torch.float64), log_weights)
        close(potential.value(z), attention.value(z))
        close(potential.mean(z), attention.mean(z))
        close(potential.covariance_product(z, v), attention.covariance_product(z, v))
        close(potential.responsibilities(z), attention.probabilities(z))


def test_shared_covariance_adds_a_linear_map():
    z, means, covariance = random(3, 5), random(4, 5, seed=2), spread(5)
    shared = GaussianMixture(means, covariance, torch.zeros(4, dtype=torch.float64))
    close(shared.mean(z), z @ covariance + LogSumExp(means, 1.0).mean(z))
    copies = GaussianMixture(means, covariance.expand(4, 5, 5), torch.zeros(4, dtype=torch.float64))
    close(copies.mean(z), shared.mean(z))


def test_the_covariance_is_the_centred_second_moment():
    z = random(1, 5)
    means, covariances, log_weights = random(4, 5, seed=2), spread(4, 5), random(4, seed=3)
    potential = GaussianMixture(means, covariances, log_weights)
    p = potential.responsibilities(z)[0]
    c = means + covariances @ z[0]
    second = torch.einsum("m,mij->ij", p, covariances) + torch.einsum("m,mi,mj->ij", p, c, c)
    expected = second - torch.outer(p @ c, p @ c)
    eye = torch.eye(5, dtype=torch.float64)
    close(torch.cat([potential.covariance_product(z, row[None]) for row in eye]), expected)


def test_only_the_symmetric_part_of_a_covariance_counts():
    skew = tensor([[0.0, 0.4], [-0.4, 0.0]])
    for covariances in (SHARED, EACH):
        plain, twisted = (GaussianMixture(MU, c, PI.log()) for c in (covariances, covariances + skew))
        close(plain.value(ETA), twisted.value(ETA))
        close(plain.mean(ETA), twisted.mean(ETA))


def test_a_component_of_no_weight_is_left_out():
    weights = tensor([0.2, 0.0, 0.3]).log().requires_grad_()
    potential = GaussianMixture(MU, EACH, weights)
    rest = GaussianMixture(MU[[0, 2]], EACH[[0, 2]], tensor([0.2, 0.3]).log())
    close(potential.value(ETA), rest.value(ETA))
    close(potential.mean(ETA), rest.mean(ETA))
    (gradient,) = torch.autograd.grad(potential.mean(ETA).sum(), weights)
    assert gradient[1] == 0
    assert bool(gradient.isfinite().all())


def test_far_queries_do_not_overflow():
    potential = GaussianMixture(MU, EACH, PI.log())
    for z in (1e6 * ETA, -1e6 * ETA):
        assert bool(potential.value(z).isfinite())
        scores = PI.log() + MU @ z[0] + torch.einsum("i,mij,j->m", z[0], EACH, z[0]) / 2
        best = scores.argmax()
        close(potential.mean(z)[0], MU[best] + EACH[best] @ z[0])


def test_equilibrium_against_plain_steps():
    x, means, covariances = random(2, 3, 5, seed=1), random(2, 4, 5), spread(4, 5) / 4
    potential = GaussianMixture(means, covariances, torch.zeros(4, dtype=torch.float64))
    assert potential.bounded_below(0.5)
    solution = solve(AnchoredEnergy(potential, x, 0.5), x, solver=Anderson(rtol=1e-12, atol=0))
    z = x
    for _ in range(2000):
        z = 0.5 * x + 0.5 * potential.mean(z)
    assert bool(solution.converged.all())
    close(solution.value, z, rtol=1e-8, atol=1e-8)


def test_a_row_that_is_not_finite_changes_no_other():
    x = random(3, 5, seed=1)
    lost = x.clone()
    lost[1] = math.inf
    potential = GaussianMixture(random(4, 5), spread(4, 5) / 4, torch.zeros(4, dtype=torch.float64))
    plain, other = (solve(AnchoredEnergy(potential, q, 0.5), q, on_failure="ignore") for q in (x, lost))
    assert torch.equal(plain.value[[0, 2]], other.value[[0, 2]])
    assert other.converged.tolist() == [True, False, True]


def test_bounded_below_follows_the_widest_component():
    zero = torch.zeros(2, dtype=torch.float64)
    widths = torch.diag_embed(tensor([[0.1, 0.2], [0.3, 1.2]]))
    potential = GaussianMixture(MU[:2], widths, zero)
    assert not potential.bounded_below(1.0)
    assert potential.bounded_below(0.8)


def test_errors_say_what_to_do():
    log_weights = PI.log()
    with pytest.raises(ValueError, match=r"`covariances` must be positive semi-definite, got the eigenvalue -0\.5; "):
        GaussianMixture(MU, torch.diag(tensor([1.0, -0.5])), log_weights)
    with pytest.raises(ValueError, match=r"`covariances` must be matrices of 2 x 2, .*; use torch\.diag_embed"):
        GaussianMixture(MU, torch.ones(3, 2, dtype=torch.float64), log_weights)
    with pytest.raises(ValueError, match=r"`covariances` must broadcast to \(\*batch, M, D, D\)"):
        GaussianMixture(MU, SHARED.expand(4, 2, 2), log_weights)
    with pytest.raises(ValueError, match=r"`log_weights` must broadcast to \(\*batch, M\)"):
        GaussianMixture(MU, SHARED, torch.zeros(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="`means` must hold at least one component"):
        GaussianMixture(MU[:0], SHARED, log_weights)
    with pytest.raises(TypeError, match="`means` must be a torch"):
        GaussianMixture([[1.0]], SHARED, log_weights)
    with pytest.raises(ValueError, match=r"`log_weights` must have the dtype of `means`.*convert it"):
        GaussianMixture(MU, SHARED, log_weights.float())
    potential = GaussianMixture(MU, SHARED, log_weights)
    with pytest.raises(ValueError, match=r"`field` must have the means' dimension 2"):
        AnchoredEnergy(potential, torch.zeros(1, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="`means` must broadcast to the leading axes of `field`"):
        AnchoredEnergy(GaussianMixture(MU.expand(4, 3, 2), SHARED, log_weights), ETA)


def test_bad_data_is_no_bad_argument():
    # From three dimensions on LAPACK raises for eigenvalues of NaN.
    covariance = torch.full((3, 3), torch.nan, dtype=torch.float64)
    potential = GaussianMixture(random(4, 3), covariance, random(4))
    assert potential.value(random(1, 3)).isnan().all()
    assert not potential.bounded_below(0.5)
    # Rounding may leave a singular matrix with a small negative eigenvalue.
    thin = random(2, 1).float()
    GaussianMixture(MU.float(), thin @ thin.mT, PI.log().float())


def test_what_means_have_in_common_costs_the_hessian_no_digits():
    means, matrix = random(12, 5, dtype=torch.float32) + 300, torch.eye(5) / 10
    z, v = random(7, 5, seed=1, dtype=torch.float32) / 3, random(7, 5, seed=2, dtype=torch.float32)
    narrow, wide = (
        GaussianMixture(*(t.to(d) for t in (means, matrix, torch.zeros(12)))) for d in (z.dtype, torch.float64)
    )
    truth = wide.covariance_product(z.double(), v.double())
    assert relative_error(narrow.covariance_product(z, v).double(), truth) < 1e-5
    assert relative_error(narrow.linearize(z).product(v).double(), truth) < 1e-5
