"""SphereUnits to rounding: Bessel ratios, their derivatives and inverse against arithmetic of many digits."""

import functools

import mpmath
import pytest
import torch

from implicit_attention.potentials import SphereUnits
from implicit_attention.testing.numerics import random

LAW = SphereUnits()
KAPPAS = [1e-3, 0.1, 1.0, 7.0, 30.0, 1e3, 1e5]


def along(lengths, dim, dtype=torch.float64):
    """Vectors (n, D) of these lengths, whose squares have no rounding of their own."""
    vectors = torch.zeros(len(lengths), dim, dtype=dtype)
    vectors[:, 0] = torch.as_tensor(lengths, dtype=dtype)
    return vectors


@functools.cache
def bessel(order, kappa):
    return mpmath.besseli(order, kappa, maxterms=10**7)


def log_partition(dim, kappa):
    nu = mpmath.mpf(dim) / 2 - 1
    return mpmath.loggamma(nu + 1) + nu * mpmath.log(2 / kappa) + mpmath.log(bessel(nu, kappa))


def series(dim, t, order):
    """Derivatives of G = A/kappa by t = kappa^2, and those of dA/dkappa = G + 2 t G', by 2 t G' = 1 - t G^2 - D G."""
    t, nu = mpmath.mpf(t), mpmath.mpf(dim) / 2 - 1
    kappa = mpmath.sqrt(t)
    g = [bessel(nu + 1, kappa) / bessel(nu, kappa) / kappa]
    squares = []
    for k in range(order + 1):
        squares.append(sum(g[i] * g[k - i] for i in range(k + 1)))
        known = (k == 0) - t * squares[k] - (squares[k - 1] if k else 0) - (dim + 2 * k) * g[k]
        g.append(known / (2 * t * (k + 1)))
    radial = [(1 + 2 * k) * g[k] + 2 * t * (k + 1) * g[k + 1] for k in range(order + 1)]
    return [[x[k] * mpmath.factorial(k) for k in range(order + 1)] for x in (g, radial)]


def worst(values, truth):
    """The largest relative error, against numbers of many digits."""
    return max(abs(float(mpmath.mpf(v) / x - 1)) for v, x in zip(values.double().tolist(), truth, strict=True))


@pytest.mark.parametrize("dim", [2, 3, 4, 8, 16, 64, 512, 1024, 4096])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_functions_and_derivatives_are_exact_to_rounding(dim, dtype):
    field, eps = along(KAPPAS, dim, dtype).requires_grad_(), torch.finfo(dtype).eps
    squares = field[:, 0].detach().square()
    gain, slope, bend, radial = LAW.cumulant_terms(field, 1.0, 1.0, 3)
    (change,) = torch.autograd.grad(radial.sum(), field)
    with mpmath.workdps(80):
        truth = [series(dim, t, 2) for t in squares.tolist()]
        values = [log_partition(dim, mpmath.sqrt(mpmath.mpf(t))) for t in squares.tolist()]
        assert worst(LAW.log_partition(field, 1.0, 1.0), values) < 4 * eps
        assert worst(LAW.magnetization(field, 1.0, 1.0)[:, 0] / field[:, 0], [g[0] for g, _ in truth]) < 5 * eps
        for found, k, units in ((gain, 0, 4), (slope / 2, 1, 10), (bend / 4, 2, 8)):
            assert worst(found, [g[k] for g, _ in truth]) < units * eps
        assert worst(radial, [p[0] for _, p in truth]) < 10 * eps
        assert worst(change[:, 0] / field[:, 0] / 2, [p[1] for _, p in truth]) < 17 * eps


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cumulants_of_every_order_are_those_of_many_digits(dtype):
    """Every start of the recurrences serves every order; the numbers are squares in either precision."""
    kappas, eps = [2**-10, 0.5, 1.0, 12.5, 30.0, 200.0], torch.finfo(dtype).eps
    for dim in (*range(2, 65, 2), 5, 90):
        terms = LAW.cumulant_terms(along(kappas, dim, dtype), 1.0, 1.0, 5)
        with mpmath.workdps(80):
            truth = [series(dim, x**2, 4)[0] for x in kappas]
            for k in range(5):
                assert worst(terms[k] / 2**k, [g[k] for g in truth]) < (8 if k < 3 else 9 * 3**k) * eps


@pytest.mark.parametrize("dim", [2, 3, 8, 64, 512])
def test_inverse_and_entropy_agree_with_a_root_of_many_digits(dim):
    kappas = [1e-3, 0.3, 1.0, 12.0, 1e3, 1e5]
    m = LAW.magnetization(along(kappas, dim), 1.0, 1.0)
    found, entropies = LAW.inverse(m, 1.0, 1.0)[:, 0].tolist(), LAW.entropy(m, 1.0).tolist()
    nu, eps = mpmath.mpf(dim) / 2 - 1, torch.finfo(torch.float64).eps
    with mpmath.workdps(40):
        for guess, number, value, entropy in zip(kappas, m[:, 0].tolist(), found, entropies, strict=True):
            start = mpmath.mpf(guess) * (1 + mpmath.mpf(10) ** -9)
            kappa = mpmath.findroot(lambda x: bessel(nu + 1, x) / bessel(nu, x) - number, start, tol=1e-30)  # noqa: B023
            # A rounding of m^2 moves 1 - m^2, and with it the field.
            assert abs(float(value / kappa - 1)) < 8 * eps / (1 - number)
            truth = log_partition(dim, kappa) - kappa * number
            assert abs(float(entropy - truth)) < 8 * eps * float(abs(truth) + kappa * number)


@pytest.mark.parametrize("dim", [2, 3, 8, 64, 4096])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_inverse_has_converged_for_every_magnetization(dim, dtype):
    near = torch.logspace(-15 if dtype == torch.float64 else -6, -0.31, 100, dtype=dtype)
    m = along(torch.cat([near, 1 - near]), dim, dtype)
    again = LAW.magnetization(LAW.inverse(m, 1.0, 1.0), 1.0, 1.0)
    torch.testing.assert_close(again, m, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_a_site_depends_neither_on_its_neighbours_nor_on_the_shape():
    field = 3 * random(3000, 5)
    for function in (LAW.log_partition, LAW.magnetization, lambda *x: torch.stack(LAW.covariance_parts(*x), -1)):
        together = function(field, 1.0, 1.0)
        for count in (1, 2, 3, 5, 8, 13):
            assert torch.equal(function(field[:count], 1.0, 1.0), together[:count])
        assert torch.equal(function(field.view(3, 1000, 5), 1.0, 1.0).flatten(0, 1), together)


def test_nothing_overflows_before_the_square_does():
    for dtype, largest in ((torch.float32, 1e18), (torch.float64, 1e150)):
        for dim in (2, 9, 200):
            field = along([largest], dim, dtype)
            assert LAW.magnetization(field, 1.0, 1.0)[0, 0].item() == pytest.approx(1, rel=1e-6)
            assert LAW.log_partition(field, 1.0, 1.0).item() == pytest.approx(largest, rel=1e-6)
            assert LAW.magnetization(field * largest, 1.0, 1.0).isnan().all()
