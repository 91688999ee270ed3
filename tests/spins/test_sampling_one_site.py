"""One spin in a field: moments against the Bessel response, the law of the cosine against its density."""

import numpy as np
import pytest
import torch

from implicit_attention.potentials import SphereUnits
from implicit_attention.spins.sampling import sample_spins
from implicit_attention.testing.numerics import random

DRAWS = 20_000


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def axis(dim, seed=1):
    u = random(dim, seed=seed)
    return u / u.norm()


def drawn(field, beta=1.0, radius=1.0, draws=DRAWS, seed=0):
    """Spins (draws, D) in one field (D)."""
    return sample_spins(field.expand(draws, len(field)), beta, radius, generator(seed))


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 8, 64])
@pytest.mark.parametrize("kappa", [0.0, 1e-30, 0.3, 2.0, 30.0, 1e3, 1e5])
def test_moments(dim, kappa):
    """Mean and all second moments within 4.5 standard errors: there are up to 2,144 of them."""
    u, beta, radius = axis(dim), 0.7, 1.3
    field = kappa / (beta * radius) * u
    spins = drawn(field, beta, radius, draws=DRAWS if dim < 60 else 4000)
    torch.testing.assert_close(spins.norm(dim=-1), torch.full_like(spins[:, 0], radius), rtol=1e-14, atol=0)
    response = SphereUnits()
    one = field[None]
    mean = response.magnetization(one, beta, radius)[0]
    tau, rho = (float(v) for v in response.covariance_parts(one, beta, radius))
    # Deviations along and across the field have scales of their own.
    along = spins @ u - mean @ u
    across = spins - (spins @ u)[:, None] * u
    error = len(spins) ** -0.5
    assert abs(along.mean()) <= 4.5 * error * rho**0.5 + 1e-15
    assert abs(along.square().mean() - rho) <= 4.5 * error * along.square().std() + 1e-15
    if dim > 1:
        assert (across.mean(0).abs() <= 4.5 * error * tau**0.5).all()
        products = across[:, :, None] * across[:, None, :]
        expected = tau * (torch.eye(dim).double() - torch.outer(u, u))
        assert ((products.mean(0) - expected).abs() <= 4.5 * error * products.std(0) + 1e-15).all()
        mixed = along[:, None] * across
        assert (mixed.mean(0).abs() <= 4.5 * error * mixed.std(0) + 1e-15).all()


def angle_distribution(angle, kappa, dim):
    """P(angle between spin and field <= angle), by the trapezoid rule on exp(kappa cos) sin^(D-2)."""
    widest = min(np.pi, 12 * np.sqrt((dim + 20) / max(kappa, 1e-3)))
    grid = np.linspace(0, widest, 200_001)
    log = -2 * kappa * np.sin(grid / 2) ** 2
    if dim > 2:
        with np.errstate(divide="ignore"):
            log = log + (dim - 2) * np.log(np.sin(grid))
    density = np.exp(log - log.max())
    total = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return np.interp(angle, grid, total / total[-1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("dim", [2, 3, 4, 7, 100])
@pytest.mark.parametrize("kappa", [0.0, 0.8, 20.0, 1e3, 1e5])
def test_the_angle_has_the_exact_distribution(dim, kappa, dtype):
    """Kolmogorov and Smirnov: sqrt(n) sup|F_n - F| > 2.2 has a probability of 1e-4."""
    field = torch.zeros(dim, dtype=dtype)
    field[0] = kappa
    spins = drawn(field, draws=8000).double()
    # The cosine has no digits for small angles.
    angle = torch.atan2(spins[:, 1:].norm(dim=-1), spins[:, 0]).sort().values.numpy()
    exact = angle_distribution(angle, kappa, dim)
    n = len(angle)
    gap = max(np.abs(exact - np.arange(n) / n).max(), np.abs(exact - np.arange(1, n + 1) / n).max())
    assert gap * np.sqrt(n) < 2.2


def test_a_wrong_concentration_would_be_seen():
    spins = drawn(torch.tensor([20.0, 0, 0, 0]).double(), draws=8000)
    angle = torch.atan2(spins[:, 1:].norm(dim=-1), spins[:, 0]).sort().values.numpy()
    gap = np.abs(angle_distribution(angle, 21.5, 4) - np.arange(8000) / 8000).max()
    assert gap * np.sqrt(8000) > 2.2


@pytest.mark.parametrize("dim", [2, 3, 5])
def test_every_direction_of_the_axis(dim):
    """Also -e_1, at which the reflection that is used changes its form, and 0, which has no direction."""
    fields = torch.cat([torch.eye(dim), -torch.eye(dim), torch.zeros(1, dim)]).double() * 40
    spins = sample_spins(fields.expand(4000, *fields.shape), 1.0, 1.0, generator())
    mean = SphereUnits().magnetization(fields, 1.0, 1.0)
    assert ((spins.mean(0) - mean).abs() < 4.5 * spins.std(0) / 4000**0.5).all()


def test_an_ising_spin_never_turns_against_an_overwhelming_field():
    field = torch.full((100_000, 1), -30.0)
    assert (sample_spins(field, 1.0, 2.0, generator()) == -2).all()
    up = sample_spins(torch.full((200_000, 1), 0.4), 0.5, 2.0, generator()) > 0
    probability = 1 / (1 + np.exp(-2 * 0.5 * 2.0 * 0.4))
    assert abs(up.double().mean() - probability) < 4 * (probability * (1 - probability) / 200_000) ** 0.5


def test_a_uniform_number_that_is_zero_is_no_infinite_logistic_one():
    n, seed = 2**14, 1233
    assert torch.empty(n).uniform_(generator=generator(seed)).min() == 0
    assert (sample_spins(torch.full((n, 1), -30.0), 1.0, 1.0, generator(seed)) == -1).all()


def test_beta_is_per_sample():
    field = torch.tensor([0.5, 0.0]).double().expand(2, 40_000, 2)
    spins = sample_spins(field, torch.tensor([0.1, 6.0]).double(), 1.5, generator())
    mean = SphereUnits().magnetization(field[:, :1], torch.tensor([0.1, 6.0]).double(), 1.5)[:, 0]
    assert ((spins.mean(1) - mean).abs() < 4 * spins.std(1) / 200).all()


def test_what_is_not_finite_is_nan_in_its_row_alone():
    field = torch.full((6, 4), 2.0).double()
    field[1, 2], field[4] = torch.nan, torch.inf
    lost = torch.tensor([False, True, False, False, True, False])
    assert (sample_spins(field, 1.0, 1.0, generator()).isnan().all(-1) == lost).all()
    assert (sample_spins(field[:, :1], 1.0, 1.0, generator()).isnan()[:, 0] == (torch.arange(6) == 4)).all()
    # Numbers whose squares overflow have no length.
    assert sample_spins(torch.full((1, 4), 1e30), 1.0, 1.0, generator()).isnan().all()


def test_the_generator_alone_decides():
    field = random(50, 4)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = sample_spins(field, 1.0, 1.0, generator(3))
    assert torch.equal(first, sample_spins(field, 1.0, 1.0, generator(3)))
    assert not torch.equal(first, sample_spins(field, 1.0, 1.0, generator(4)))
    assert torch.equal(before, torch.get_rng_state())


def test_dtypes_shapes_and_gradients():
    field = random(2, 3, 5).requires_grad_()
    spins = sample_spins(field, 1.0, 1.0, generator())
    assert spins.shape == field.shape
    assert not spins.requires_grad
    half = sample_spins(field.detach().bfloat16(), 1.0, 1.0, generator())
    assert half.dtype == torch.bfloat16
    assert sample_spins(torch.zeros(0, 4), 1.0, 1.0, generator()).shape == (0, 4)
