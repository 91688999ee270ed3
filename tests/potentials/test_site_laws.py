"""Laws of one spin: averages over tilted laws by quadrature, derivatives, extreme arguments."""

import functools
import math

import numpy as np
import pytest
import torch

from implicit_attention.potentials import DiscreteUnits, GaussianUnits, SignUnits, SiteLaw, SphereUnits
from implicit_attention.testing.numerics import check_derivatives, random

close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)
tensor = functools.partial(torch.tensor, dtype=torch.float64)
RADIUS = 1.2
THREE = DiscreteUnits((-1, 0, 2.5), (1.0, 2.0, 0.5))


def numbers(law, theta, v, radius=RADIUS):
    """(log A, m, c)."""
    return law.tilted_log_partition(theta, v, radius), *law.tilted_moments(theta, v, radius)


def gaussian_states():
    x, w = np.polynomial.hermite_e.hermegauss(60)
    grid, weights = np.stack(np.meshgrid(x, x), -1).reshape(-1, 2), np.outer(w, w).reshape(-1)
    return torch.tensor(grid[weights > 0]) / math.sqrt(2), torch.tensor(weights[weights > 0])


def sphere_states():
    z, w = np.polynomial.legendre.leggauss(40)
    angle, ring = 2 * np.pi * np.arange(80) / 80, np.sqrt(1 - z**2)[:, None]
    points = np.stack([ring * np.cos(angle), ring * np.sin(angle), np.broadcast_to(z[:, None], (40, 80))], -1)
    return torch.tensor(points.reshape(-1, 3)), torch.tensor(np.repeat(w, 80))


#: Laws with their states (K, D) at radius 1 and weights (K).
LAWS = {
    "ising": (SignUnits(), tensor([[-1], [1]]), tensor([1, 1])),
    "discrete": (THREE, tensor([[-1], [0], [2.5]]), tensor([1, 2, 0.5])),
    "gaussian": (GaussianUnits(), *gaussian_states()),
    "sphere": (SphereUnits(), *sphere_states()),
}
every_law = pytest.mark.parametrize(("law", "states", "weights"), LAWS.values(), ids=LAWS)
each = pytest.mark.parametrize(("law", "dim"), [(law, x.shape[1]) for law, x, _ in LAWS.values()], ids=LAWS)


def arguments(dim):
    """theta (2, 3, D), one of them zero, and V (2, 3)."""
    theta = random(2, 3, dim)
    theta[0, 1] = 0
    return theta, 0.2 * random(2, 3, seed=1)


@every_law
def test_everything_is_an_average_over_the_tilted_law(law, states, weights):
    dim, (theta, v) = states.shape[1], arguments(states.shape[1])
    s = torch.cat([RADIUS * states, (RADIUS * states).square().sum(-1, keepdim=True) / 2], -1)
    exponents = torch.cat([theta, v[..., None]], -1) @ s.mT + (weights / weights.sum()).log()
    p = exponents.softmax(-1)
    mean = p @ s
    away = s - mean[..., None, :]
    covariance = torch.einsum("...k,...ka,...kb->...ab", p, away, away)
    variance = covariance.diagonal(dim1=-2, dim2=-1)[..., :-1].sum(-1) / dim
    near = {"rtol": 1e-10, "atol": 1e-11}
    close(numbers(law, theta, v), (exponents.logsumexp(-1), mean[..., :-1], variance), **near)
    change = random(2, 3, dim + 1, seed=5)
    product = law.tilted_covariance(theta, v, RADIUS)(change[..., :-1], change[..., -1])
    close(torch.cat([product[0], product[1][..., None]], -1), (covariance @ change[..., None])[..., 0], **near)
    # R s with theta/R and V/R^2 is s with theta and V.
    value, m, c = numbers(law, theta, v)
    close(numbers(law, theta / 3, v / 9, 3 * RADIUS), (value, 3 * m, 9 * c))


@each
def test_moments_and_covariances_of_a_users_law_follow_from_its_log_partition(law, dim):
    class Own(SiteLaw):
        def tilted_log_partition(self, theta, v, radius):
            return law.tilted_log_partition(theta, v, radius)

    theta, v = arguments(dim)
    with pytest.raises(NotImplementedError, match="SiteLaw must define tilted_log_partition"):
        SiteLaw().tilted_log_partition(theta, v, RADIUS)
    close(numbers(Own(), theta, v), numbers(law, theta, v), rtol=1e-10, atol=1e-12)
    products = [each.tilted_covariance(theta, v, RADIUS)(theta + 1, v + 1) for each in (Own(), law)]
    close(*products, rtol=1e-10, atol=1e-12)


@each
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_first_and_second_derivatives(law, dim):
    inputs = [x.requires_grad_() for x in arguments(dim)]
    check_derivatives(functools.partial(numbers, law), inputs)
    assert torch.autograd.gradcheck(functools.partial(numbers, law), inputs, check_forward_ad=True)


@each
def test_sites_do_not_see_each_other(law, dim):
    theta, v = arguments(dim)
    found = numbers(law, theta, v)
    theta[:, 1], v[:, 1] = torch.nan, torch.nan
    for before, after in zip(found, numbers(law, theta, v), strict=True):
        assert torch.equal(before[:, [0, 2]], after[:, [0, 2]])
        assert bool(after[:, 1].isnan().all())


@each
def test_strong_fields_overflow_nothing(law, dim):
    for size in (1e-8, 30.0, 1e3, 1e5):
        theta, v = torch.full((2, dim), size).double().requires_grad_(), tensor([-0.3, 0.2]).requires_grad_()
        found = numbers(law, theta, v)
        gradients = torch.autograd.grad(sum(x.sum() for x in found), (theta, v))
        assert all(bool(x.isfinite().all()) for x in (*found, *gradients))
        assert bool((found[2] >= 0).all())


@pytest.mark.parametrize(("law", "truth"), [(SignUnits(), 4 * math.exp(-80)), (THREE, 25 * math.exp(-100))], ids=repr)
def test_the_variance_is_right_however_small(law, truth):
    """All but the largest state die out."""
    variance = law.tilted_moments(tensor([[40.0]]), tensor([0.0]), 1.0)[1]
    assert variance.item() == pytest.approx(truth, rel=1e-12)


def test_a_gaussian_ends_where_it_cannot_be_normalised():
    theta, edge = torch.zeros(4, 2, dtype=torch.float64, requires_grad=True), 2 / RADIUS**2
    v = tensor([0.999 * edge, 1.001 * edge, 2 * edge, -1e6])
    found = numbers(GaussianUnits(), theta, v)
    for number in found:
        assert number.reshape(4, -1).isfinite().all(-1).tolist() == [True, False, False, True]
    (gradient,) = torch.autograd.grad(found[0][[0, 3]].sum(), theta)
    assert bool(gradient[[0, 3]].isfinite().all())


def test_a_sphere_of_one_dimension_is_two_states():
    theta, v = 3 * random(2, 4, 1), random(2, 4, seed=1)
    found = numbers(SphereUnits(), theta, v)
    assert all(torch.equal(a, b) for a, b in zip(numbers(SignUnits(), theta, v), found, strict=True))
    close(numbers(DiscreteUnits((-1, 1)), theta, v), found)


@pytest.mark.parametrize("dim", [2, 3, 17, 300])
def test_spheres_of_many_dimensions_have_what_is_left_of_their_length(dim):
    theta = 5 * random(4, dim)
    m, c = SphereUnits().tilted_moments(theta, theta[..., 0] * 0, 1.7)
    close(m.square().sum(-1) + dim * c, tensor(1.7**2).expand(4))


def test_weights_are_divided_by_their_sum():
    theta, v = random(1, 2, 1), random(1, 2, seed=1)
    twice = DiscreteUnits([-1, 0, 2.5], [2.0, 4.0, 1.0])
    close(twice.tilted_log_partition(theta, v, 1.0), THREE.tilted_log_partition(theta, v, 1.0))
    close(numbers(DiscreteUnits((-1, 0), (3, 3)), theta, v), numbers(DiscreteUnits((-1, 0)), theta, v))
    assert hash(DiscreteUnits([1, 2])) == hash(DiscreteUnits((1.0, 2.0)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"values": ("a",)}, "`values` must be a number, got 'a'"),
        ({"values": (0, 1), "weights": (1.0,)}, "`weights` must have 2 entries, one for each value, got 1"),
        ({"values": (0, 1), "weights": (1.0, 0.0)}, "`weights` must be > 0, got 0"),
    ],
)
def test_wrong_values_are_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        DiscreteUnits(**options)
