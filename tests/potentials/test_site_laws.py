"""Laws of one unit: what every prior has to do, quadrature, closed forms, extreme arguments, wrong ones."""

import functools
import math

import numpy as np
import pytest
import torch

from implicit_attention.potentials import DiscreteUnits, GaussianUnits, SignUnits, SiteLaw, SphereUnits
from implicit_attention.testing.numerics import random

FORWARD_MODE = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)
RADIUS = 1.2
THREE = DiscreteUnits((-1, 0, 2.5), (1.0, 2.0, 0.5))


def numbers(prior, theta, v, radius):
    """(log A, m, c)."""
    return prior.tilted_log_partition(theta, v, radius), *prior.tilted_moments(theta, v, radius)


class PriorContract:
    """Tests that every prior passes. A subclass defines `make` and `states`."""

    dim = 1

    def make(self):
        raise NotImplementedError

    def states(self):
        """States (K, D) and weights (K) of the law, by quadrature where they are not finitely many."""
        raise NotImplementedError

    def arguments(self, seed=0):
        """theta (2, 3, D), one of them zero, and V (2, 3)."""
        theta = random(2, 3, self.dim, seed=seed)
        theta[0, 1] = 0
        return theta, 0.2 * random(2, 3, seed=seed + 1)

    def tilted(self, theta, v):
        """(log A, <s>, <|s|^2>/2, Cov of all of these) by adding up states."""
        states, weights = self.states()
        numbers = torch.cat([states, states.square().sum(-1, keepdim=True) / 2], -1)
        exponents = torch.cat([theta, v[..., None]], -1) @ numbers.mT + weights.log()
        p = exponents.softmax(-1)
        mean = p @ numbers
        away = numbers - mean[..., None, :]
        return exponents.logsumexp(-1), mean, torch.einsum("...k,...ka,...kb->...ab", p, away, away)

    def test_everything_is_an_average_over_the_tilted_law(self):
        prior, (theta, v) = self.make(), self.arguments()
        log_partition, mean, covariance = self.tilted(theta, v)
        near = {"rtol": 1e-10, "atol": 1e-11}
        close(prior.tilted_log_partition(theta, v, RADIUS), log_partition, **near)
        m, c = prior.tilted_moments(theta, v, RADIUS)
        close(m, mean[..., :-1], **near)
        trace = covariance.diagonal(dim1=-2, dim2=-1)[..., :-1].sum(-1)
        close(c, trace / self.dim, **near)
        change = random(2, 3, self.dim + 1, seed=5)
        by_mean, by_half_square = prior.tilted_covariance(theta, v, RADIUS)(change[..., :-1], change[..., -1])
        answer = (covariance @ change[..., None])[..., 0]
        close(torch.cat([by_mean, by_half_square[..., None]], -1), answer, **near)

    def test_nothing_is_tilted_at_zero(self):
        zero = torch.zeros(1, self.dim, dtype=torch.float64)
        assert abs(self.make().tilted_log_partition(zero, zero[..., 0], RADIUS).item()) < 1e-15

    def test_mean_and_variance_are_the_first_derivatives(self):
        prior, (theta, v) = self.make(), self.arguments()
        theta.requires_grad_(), v.requires_grad_()
        value = prior.tilted_log_partition(theta, v, RADIUS)
        by_theta, by_v = torch.autograd.grad(value.sum(), (theta, v))
        mean, variance = prior.tilted_moments(theta, v, RADIUS)
        assert value.shape == variance.shape == (2, 3)
        close(mean, by_theta)
        close((mean.square().sum(-1) + self.dim * variance) / 2, by_v)

    def test_variance_and_covariance_are_the_second_derivatives(self):
        prior, (theta, v) = self.make(), self.arguments()

        def log_partition(theta, v):
            return prior.tilted_log_partition(theta[None], v[None], RADIUS)[0]

        hessian = torch.vmap(torch.func.jacrev(torch.func.jacrev(log_partition)))(theta[0], v[0])
        trace = hessian.diagonal(dim1=-2, dim2=-1).sum(-1)
        close(prior.tilted_moments(theta[0], v[0], RADIUS)[1], trace / self.dim, rtol=1e-11)
        product, _ = prior.tilted_covariance(theta[0], v[0], RADIUS)(theta[1], torch.zeros_like(v[0]))
        close(product, (hessian @ theta[1][..., None])[..., 0], rtol=1e-11)

    def test_the_defaults_of_the_base_class_agree(self):
        prior, arguments = self.make(), (*self.arguments(), RADIUS)
        change = (random(2, 3, self.dim, seed=7), random(2, 3, seed=8))
        near = {"rtol": 1e-10, "atol": 1e-12}
        for base, own in zip(SiteLaw.tilted_moments(prior, *arguments), prior.tilted_moments(*arguments), strict=True):
            close(base, own, **near)
        bases, owns = SiteLaw.tilted_covariance(prior, *arguments), prior.tilted_covariance(*arguments)
        for base, own in zip(bases(*change), owns(*change), strict=True):
            close(base, own, **near)

    @FORWARD_MODE
    def test_first_and_second_derivatives(self):
        prior, inputs = self.make(), [x.requires_grad_() for x in self.arguments()]

        def outputs(theta, v):
            return numbers(prior, theta, v, RADIUS)

        assert torch.autograd.gradcheck(outputs, inputs, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(outputs, inputs, fast_mode=True)

    def test_units_do_not_see_each_other(self):
        prior, (theta, v) = self.make(), self.arguments()
        spoilt, other = theta.clone(), v.clone()
        spoilt[:, 1], other[:, 1] = torch.nan, torch.nan
        for before, after in zip(numbers(prior, theta, v, RADIUS), numbers(prior, spoilt, other, RADIUS), strict=True):
            assert torch.equal(before[:, [0, 2]], after[:, [0, 2]])
            assert bool(after[:, 1].isnan().all())

    def test_radius_is_a_scale(self):
        """R s with theta/R and V/R^2 is s with theta and V."""
        prior, (theta, v) = self.make(), self.arguments()
        value, m, c = numbers(prior, theta, v, RADIUS)
        for found, expected in zip(numbers(prior, theta / 3, v / 9, 3 * RADIUS), (value, 3 * m, 9 * c), strict=True):
            close(found, expected)

    def test_strong_fields_overflow_nothing(self):
        prior = self.make()
        for size in (1e-8, 30.0, 1e3, 1e5):
            theta = (size * torch.ones(2, self.dim, dtype=torch.float64)).requires_grad_()
            v = torch.tensor([-0.3, 0.2], dtype=torch.float64, requires_grad=True)
            found = numbers(prior, theta, v, RADIUS)
            gradients = torch.autograd.grad(sum(x.sum() for x in found), (theta, v))
            assert all(bool(x.isfinite().all()) for x in (*found, *gradients))
            assert bool((found[2] >= 0).all())


class TestIsing(PriorContract):
    def make(self):
        return SignUnits()

    def states(self):
        return RADIUS * torch.tensor([[-1.0], [1.0]]).double(), torch.full((2,), 0.5).double()

    def test_variance_is_right_however_small(self):
        theta = torch.tensor([[40.0]], dtype=torch.float64)
        truth = 4 * math.exp(-80.0)
        assert SignUnits().tilted_moments(theta, theta[..., 0] * 0, 1.0)[1].item() == pytest.approx(truth, rel=1e-13)


class TestDiscrete(PriorContract):
    def make(self):
        return THREE

    def states(self):
        weights = torch.tensor([1.0, 2.0, 0.5]).double()
        return RADIUS * torch.tensor([[-1.0], [0.0], [2.5]]).double(), weights / weights.sum()

    def test_variance_is_right_however_small(self):
        """All but the state 2.5 die out; the nearest is 0."""
        theta = torch.tensor([[40.0]], dtype=torch.float64)
        truth = 2.5**2 * 2 / 0.5 * math.exp(-100.0)
        assert THREE.tilted_moments(theta, theta[..., 0] * 0, 1.0)[1].item() == pytest.approx(truth, rel=1e-12)


class TestGaussian(PriorContract):
    dim = 2

    def make(self):
        return GaussianUnits()

    def states(self):
        x, w = np.polynomial.hermite_e.hermegauss(60)
        grid = torch.tensor(np.stack(np.meshgrid(x, x), -1).reshape(-1, 2))
        weights = torch.tensor(np.outer(w, w).reshape(-1) / w.sum() ** 2)
        kept = weights > 0
        return RADIUS / math.sqrt(2) * grid[kept], weights[kept]

    def test_it_ends_where_it_cannot_be_normalised(self):
        theta = torch.zeros(4, 2, dtype=torch.float64, requires_grad=True)
        edge = 2 / RADIUS**2
        v = torch.tensor([0.999 * edge, 1.001 * edge, 2 * edge, -1e6], dtype=torch.float64)
        for found in numbers(GaussianUnits(), theta, v, RADIUS):
            known = found.reshape(4, -1).isfinite().all(-1)
            assert known.tolist() == [True, False, False, True]
        value = GaussianUnits().tilted_log_partition(theta, v, RADIUS)
        (gradient,) = torch.autograd.grad(value[[0, 3]].sum(), theta)
        assert bool(gradient[[0, 3]].isfinite().all())


class TestSphere(PriorContract):
    dim = 3

    def make(self):
        return SphereUnits()

    def states(self):
        z, w = np.polynomial.legendre.leggauss(40)
        angle = 2 * np.pi * np.arange(80) / 80
        ring = np.sqrt(1 - z**2)[:, None]
        height = np.broadcast_to(z[:, None], (40, 80))
        points = np.stack([ring * np.cos(angle), ring * np.sin(angle), height], -1).reshape(-1, 3)
        return RADIUS * torch.tensor(points), torch.tensor(np.repeat(w / w.sum() / 80, 80))


def test_a_sphere_of_one_dimension_is_two_states():
    theta, v = 3 * random(2, 4, 1), random(2, 4, seed=1)
    laws = SignUnits(), SphereUnits(), DiscreteUnits((-1, 1))
    for number, sphere, two in zip(*(numbers(law, theta, v, RADIUS) for law in laws), strict=True):
        assert torch.equal(number, sphere)
        close(number, two)
    mean = SignUnits().tilted_moments(theta, v, RADIUS)[0]
    assert torch.equal(mean, SphereUnits().magnetization(theta, 1.0, RADIUS))


def test_spheres_of_many_dimensions_have_what_is_left_of_their_length():
    for dim in (2, 3, 17, 300):
        theta = 5 * random(4, dim, seed=dim)
        m, c = SphereUnits().tilted_moments(theta, theta[..., 0] * 0, 1.7)
        close(m.square().sum(-1) + dim * c, torch.full((4,), 1.7**2, dtype=torch.float64))


def test_weights_are_divided_by_their_sum():
    theta, v = random(1, 2, 1), random(1, 2, seed=1)
    twice = DiscreteUnits([-1, 0, 2.5], [2.0, 4.0, 1.0])
    close(twice.tilted_log_partition(theta, v, 1.0), THREE.tilted_log_partition(theta, v, 1.0))
    even = DiscreteUnits((-1, 0, 2.5), (3, 3, 3))
    close(even.tilted_moments(theta, v, 1.0), DiscreteUnits((-1, 0, 2.5)).tilted_moments(theta, v, 1.0))
    assert hash(DiscreteUnits([1, 2])) == hash(DiscreteUnits((1.0, 2.0)))


def test_wrong_arguments_are_named():
    with pytest.raises(
        ValueError, match="`system` must have spins of dimension 1 for SignUnits, got D = 3; use Sphere"
    ):
        SignUnits().check("system", 3, 1.0)
    with pytest.raises(ValueError, match="`system` must have spins of dimension 1 for DiscreteUnits, got D = 2"):
        THREE.check("system", 2, 1.0)
    GaussianUnits().check("system", 2, 1.0)
    SphereUnits().check("system", 1, 1.0)
    with pytest.raises(TypeError, match="`values` must be a tuple of numbers, got float"):
        DiscreteUnits(1.0)
    with pytest.raises(ValueError, match="`values` must have at least one entry"):
        DiscreteUnits(())
    with pytest.raises(TypeError, match="`values` must be a number, got 'a'"):
        DiscreteUnits(("a",))
    with pytest.raises(ValueError, match="`weights` must have 2 entries, one for each value, got 1"):
        DiscreteUnits((0, 1), (1.0,))
    with pytest.raises(ValueError, match="`weights` must be > 0, got 0"):
        DiscreteUnits((0, 1), (1.0, 0.0))
    with pytest.raises(NotImplementedError, match="SiteLaw must define tilted_log_partition"):
        SiteLaw().tilted_log_partition(torch.zeros(1, 1), torch.zeros(1), 1.0)
