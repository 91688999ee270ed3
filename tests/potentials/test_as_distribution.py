"""as_distribution: the laws behind attention against printed numbers, integrals of the plane, and Bayes' rule."""

import functools
import math

import pytest
import torch

from implicit_attention import LogSumExp
from implicit_attention.potentials import DistanceLogSumExp, GaussianMixture, Softmax1, as_distribution, fisher
from implicit_attention.testing.numerics import check_derivatives, random

tensor = functools.partial(torch.tensor, dtype=torch.float64)
close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)
printed = functools.partial(torch.testing.assert_close, rtol=0, atol=5.1e-13)

PATTERNS = tensor([[1.0, 0.5], [-0.5, 1.2], [0.3, -1.0]])
POINT = tensor([[0.2, 0.1]])
ETA = tensor([[0.4, -0.3], [-1.0, 0.7]])
PI = tensor([0.2, 0.5, 0.3])
EACH = tensor([[[1.2, 0.3], [0.3, 0.8]], [[0.5, 0.0], [0.0, 0.9]], [[1.5, -0.4], [-0.4, 1.1]]])


def covariance_of(law):
    """Of a mixture without batch axes: within the components and between them."""
    p, means = law.mixture_distribution.probs, law.component_distribution.mean
    within = torch.diag(p @ law.component_distribution.variance)
    return within + (p[:, None] * means).mT @ means - torch.outer(law.mean, law.mean)


def plane():
    axis = torch.arange(-9, 9, 0.1, dtype=torch.float64)
    return torch.cartesian_prod(axis, axis), 0.1**2


@pytest.mark.parametrize(
    ("beta", "log_partition", "log_prob", "mean"),
    [
        (1.0, 3.616354072045, -2.458089348879, (0.206329031631, 0.338311899678)),
        (2.0, 3.619931067512, -2.385489937746, (0.140766666847, 0.443809397218)),
    ],
)
def test_patterns(beta, log_partition, log_prob, mean):
    phi = LogSumExp(PATTERNS, beta)
    law, energy = as_distribution(phi), POINT.square().sum(-1) / 2 - phi.value(POINT)
    printed(law.log_prob(POINT), tensor([log_prob]))
    printed(law.mean, tensor(mean))
    printed(-beta * energy - law.log_prob(POINT), tensor([log_partition]))
    # The second route: sums over the plane of exp(-beta E).
    grid, area = plane()
    weight = (-beta * (grid.square().sum(-1) / 2 - phi.value(grid))).exp() * area
    close(weight.sum().log(), tensor(log_partition), rtol=1e-11)
    close(weight @ grid / weight.sum(), law.mean, rtol=1e-10)
    if beta == 1:
        expected = tensor([[1.397477144379, -0.235328648122], [-0.235328648122, 1.821892818473]])
        printed(covariance_of(law), expected)
        second = (weight[:, None] * grid).mT @ grid / weight.sum()
        close(second - torch.outer(law.mean, law.mean), expected, rtol=1e-10)
    close(law.variance, covariance_of(law).diag())


def test_weights_grow_with_squared_norms():
    bias, norms = random(3), PATTERNS.square().sum(-1)
    for beta in (0.5, 2.0):
        weights = as_distribution(LogSumExp(PATTERNS, beta)).mixture_distribution.probs
        close(weights, (beta * norms / 2).softmax(-1))
        # A bias of -beta |k|^2/2 takes the norms out.
        even = as_distribution(LogSumExp(PATTERNS, beta, bias=bias - beta * norms / 2))
        close(even.mixture_distribution.probs, bias.softmax(-1)[None])
    weights = as_distribution(LogSumExp(PATTERNS, 1.0)).mixture_distribution.probs
    printed(weights, tensor([0.3155377333, 0.3931842271, 0.2912780395]), atol=5.1e-11)


def test_the_negative_gradient_of_the_energy_is_the_posterior_mean_minus_the_state():
    v, beta = (2 * random(4, 5)).requires_grad_(), 1.7
    phi = LogSumExp(random(6, 5, seed=1), beta)
    law = as_distribution(phi)
    # The weights of the components at v, by Bayes' rule from torch's densities.
    joint = law.mixture_distribution.logits + law.component_distribution.log_prob(v[..., None, :])
    average = joint.softmax(-1) @ law.component_distribution.mean
    close(average, phi.mean(v))
    close(torch.autograd.grad(law.log_prob(v).sum(), v)[0], beta * (average - v))


def test_masks_biases_and_tilts_row_by_row():
    keys, beta = random(2, 4, 5), tensor([0.5, 1.3])
    bias, tilt, v = random(2, 3, 4, seed=2), random(2, 3, 5, seed=3), random(2, 3, 5, seed=4)
    mask = random(2, 3, 4, seed=5) > -0.3
    mask[0, 1] = False
    mask[:, :, 2] = False
    poisoned = keys.clone()
    poisoned[:, 2] = math.nan
    poisoned.requires_grad_()
    law = as_distribution(LogSumExp(poisoned, beta, mask=mask, bias=bias), tilt)
    assert (law.batch_shape, law.event_shape) == ((2, 3), (5,))
    for b in range(2):
        for n in range(3):
            kept = mask[b, n]
            row, scale = keys[b][kept], float(beta[b])
            if not kept.any():
                row = torch.zeros(1, 5, dtype=torch.float64)
            logits = scale * row.square().sum(-1) / 2 + row @ tilt[b, n] + (bias[b, n][kept] if kept.any() else 0)
            parts = torch.distributions.MultivariateNormal(
                row + tilt[b, n] / scale, torch.eye(5, dtype=torch.float64) / scale
            )
            close(law.log_prob(v)[b, n].detach(), (logits.log_softmax(-1) + parts.log_prob(v[b, n])).logsumexp(-1))
    (gradient,) = torch.autograd.grad(law.log_prob(v).sum(), poisoned)
    assert gradient.isfinite().all()
    # A mask alone, a bias alone, and a mask of the keys alone.
    for given in ({"mask": mask}, {"bias": bias}, {"mask": mask[0, 2]}):
        phi = LogSumExp(keys, beta, **given)
        law, energies = as_distribution(phi), [x.square().sum(-1) / 2 - phi.value(x) for x in (v, 2 * v)]
        close(law.log_prob(v) - law.log_prob(2 * v), -beta[:, None] * (energies[0] - energies[1]))
        assert law.sample().isfinite().all()


@pytest.mark.parametrize("kind", ["keys", "shared", "each", "batched"])
def test_a_tilt_multiplies_the_density_by_an_exponential(kind):
    potential = {
        "keys": lambda: LogSumExp(PATTERNS, 1.7),
        "shared": lambda: GaussianMixture(PATTERNS, EACH[0], PI.log()),
        "each": lambda: GaussianMixture(PATTERNS, EACH, PI.log()),
        "batched": lambda: GaussianMixture(random(2, 3, 2), EACH, random(2, 3)),
    }[kind]()
    tilt = random(2, 3, 2, seed=1)
    plain, tilted = as_distribution(potential, torch.zeros_like(tilt)), as_distribution(potential, tilt)
    assert tilted.batch_shape == (2, 3)
    v = random(4, 2, 3, 2, seed=2)
    ratio = tilted.log_prob(v) - plain.log_prob(v) - (tilt * v).sum(-1)
    close(ratio, ratio[:1].expand_as(ratio))
    if kind != "keys":
        # The normaliser is G(0) - G(tilt), the mean and the variance those of the potential.
        close(ratio[0], potential.value(torch.zeros_like(tilt)) - potential.value(tilt))
        close(tilted.mean, potential.mean(tilt))
        close(tilted.variance, fisher(potential, tilt).diagonal(dim1=-2, dim2=-1))
        at_zero = as_distribution(potential)
        assert at_zero.batch_shape == potential.means.shape[:-2]
        if kind != "batched":
            grid, area = plane()
            close((at_zero.log_prob(grid).exp() * area).sum(), tensor(1.0), rtol=1e-9)


def test_samples_have_the_mean_and_the_variance():
    torch.manual_seed(0)
    for law in (
        as_distribution(LogSumExp(PATTERNS, 2.0)),
        as_distribution(GaussianMixture(PATTERNS, EACH, PI.log()), ETA),
    ):
        samples = law.sample((20000,))
        error = (law.variance / 20000).sqrt()
        assert ((samples.mean(0) - law.mean).abs() < 4 * error).all()
        assert ((samples.var(0) / law.variance - 1).abs() < 0.06).all()


def test_gradients():
    v, keys, beta, bias, tilt = random(3, 2), random(4, 2, seed=1), tensor(1.3), random(3, 4, seed=2), random(3, 2)
    inputs = tuple(t.requires_grad_() for t in (v, keys, beta, bias, tilt))

    def of_keys(v, keys, beta, bias, tilt):
        return as_distribution(LogSumExp(keys, beta, bias=bias), tilt).log_prob(v)

    def of_mixture(v, keys, roots, bias, tilt):
        covariances = roots @ roots.mT + torch.eye(2, dtype=torch.float64)
        return as_distribution(GaussianMixture(keys, covariances, bias), tilt).log_prob(v)

    roots = random(4, 2, 2, seed=3).requires_grad_()
    other = (v, keys, roots, random(4, seed=4).requires_grad_(), tilt)
    for function, arguments in ((of_keys, inputs), (of_mixture, other)):
        check_derivatives(function, arguments)


def test_distances_weigh_all_keys_alike_and_a_null_key_is_a_component():
    keys, v = random(4, 3), random(5, 3, seed=1)
    law = as_distribution(DistanceLogSumExp(keys, 0.7))
    torch.testing.assert_close(law.mixture_distribution.probs, torch.full((1, 4), 0.25).double())
    components = torch.distributions.MultivariateNormal(keys, torch.eye(3).double() / 0.7)
    expected = components.log_prob(v[:, None]).logsumexp(-1) - math.log(4)
    torch.testing.assert_close(law.log_prob(v), expected)
    null = as_distribution(Softmax1(keys, 0.7))
    assert null.component_distribution.batch_shape[-1] == 5
    torch.testing.assert_close(null.component_distribution.mean[..., -1, :].flatten(), torch.zeros(3).double())
