"""One-site responses: ground truth, derivatives against autograd, inverse and entropy by other routes, limits."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch

from implicit_attention.potentials import (
    AmosResponse,
    LargeDResponse,
    SaddlePointResponse,
    SphereUnits,
    SphericalLaw,
)
from implicit_attention.testing.numerics import random

FORWARD_MODE = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
RESPONSES = [SphereUnits(), AmosResponse(), SaddlePointResponse(), LargeDResponse()]
close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)

BETA = torch.tensor([0.7, 1.3], dtype=torch.float64)


def radius_for(response, dim):
    """The radius that `response` takes; otherwise one at which no power of it drops out."""
    return math.sqrt(dim / 2 - 1) if isinstance(response, LargeDResponse) else 1.2 * math.sqrt(dim)


def cases(*dims):
    """Every response with every dimension in which it exists."""
    found = [(r, d) for r in RESPONSES for d in dims if d > 2 or not isinstance(r, LargeDResponse)]
    return pytest.mark.parametrize(
        ("response", "dim"), found, ids=lambda x: x if isinstance(x, int) else type(x).__name__
    )


def fields(dim, seed=0, dtype=torch.float64):
    """(2, 3, D), one of them zero and one strong."""
    field = random(2, 3, dim, seed=seed, dtype=dtype)
    field[0, 1] = 0
    field[1, 2] *= 10
    return field


def along(kappa, dim):
    """Fields (1, n, D) of lengths kappa in a slanted direction, for beta = R = 1."""
    direction = torch.arange(1.0, dim + 1, dtype=torch.float64)
    return (torch.as_tensor(kappa, dtype=torch.float64)[:, None] * direction / direction.norm())[None]


def ratio(response, kappa, dim):
    """A(kappa) by the public door; any radius serves, for A is a function of kappa."""
    radius = radius_for(response, dim)
    field = torch.zeros(len(kappa), dim, dtype=torch.float64)
    field[:, 0] = torch.as_tensor(kappa, dtype=torch.float64)
    return response.magnetization(field, 1 / radius, radius)[:, 0] / radius


def to_the_digits_of(text):
    return pytest.approx(float(text), rel=0, abs=0.51 * 10.0 ** -len(text.split(".")[1]))


@pytest.mark.parametrize(
    ("dim", "kappa", "ratio", "log_partition"),
    [
        (2, 1, ".446389965897", ".235914358507"),
        (3, 1, ".313035285499", ".161439361571"),
        (3, 10, ".900000004122", "7.00426772438"),
        (8, 10, ".697511367233", "4.43559434907"),
        (64, 100, ".732380194097", "48.8084854647"),
        (256, 10, ".0390035344582", ".195164938877"),
        (512, 100, ".188404764015", "9.5888377071"),
        (1024, 100, ".0967439948699", "4.85986402839"),
        (512, 0.01, ".0000195312499926", None),
    ],
)
def test_bessel_has_the_known_values(dim, kappa, ratio, log_partition):
    field = along([kappa], dim)
    response = SphereUnits()
    assert response.magnetization(field, 1.0, 1.0).norm().item() == to_the_digits_of(ratio)
    if log_partition:
        assert response.log_partition(field, 1.0, 1.0).item() == to_the_digits_of(log_partition)


def test_amos_and_large_d_have_the_known_values():
    amos = AmosResponse()
    assert ratio(amos, [5.0], 8).item() == to_the_digits_of(".488910912657")
    assert amos.log_partition(along([5.0], 8), 1.0, 1.0).item() == to_the_digits_of("1.367312265062")
    assert ratio(amos, [100.0], 64).item() == to_the_digits_of(".731803499842")
    assert amos.log_partition(along([100.0], 64), 1.0, 1.0).item() == to_the_digits_of("48.754998308505")
    assert ratio(LargeDResponse(), [5.0], 8).item() == to_the_digits_of(".566190378969")
    assert ratio(SphereUnits(), [5.0], 8).item() == to_the_digits_of(".494449764064")
    assert SphereUnits().log_partition(along([5.0], 8), 1.0, 1.0).item() == to_the_digits_of("1.378050893148")


@pytest.mark.parametrize(
    ("response", "errors"),
    [
        (AmosResponse(), [".0445", ".0304", ".0115", ".0057", ".0028", ".0014", ".0002"]),
        (SaddlePointResponse(), [".1156", ".0797", ".0309", ".0155", ".0078", ".0039", ".0005"]),
        (LargeDResponse(), [None, "2.00", ".333", ".143", ".0667", ".0323", ".0039"]),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, SphericalLaw) else "",
)
def test_largest_errors_of_the_closed_forms(response, errors):
    # The grid of the table: on a finer one two of its numbers are .0447 (Amos, D = 2) and .0799 (steepest descent, 3).
    kappa = torch.logspace(-2, 5, 120, dtype=torch.float64)
    for dim, text in zip([2, 3, 8, 16, 32, 64, 512], errors, strict=True):
        if text:
            error = (ratio(response, kappa, dim) / ratio(SphereUnits(), kappa, dim) - 1).abs().max()
            assert error.item() == to_the_digits_of(text)


def test_a_fine_grid_finds_the_largest_errors_at_moderate_fields():
    kappa = torch.logspace(-1, 2, 20001, dtype=torch.float64)
    worst = {}
    for response in (AmosResponse(), SaddlePointResponse()):
        error = 1 - ratio(response, kappa, 2) / ratio(SphereUnits(), kappa, 2)
        worst[type(response)] = error.max().item()
        assert 0 < error.argmax() < 20000
    # By mpmath: the maximum of 1 - A_Amos/A at kappa = 2.0866.
    assert worst[AmosResponse] == pytest.approx(0.0446636874, abs=1e-8)
    assert worst[SaddlePointResponse] == pytest.approx(2.59 * worst[AmosResponse], rel=1e-2)


def test_amos_is_a_lower_bound_that_is_exact_in_both_limits():
    kappa = torch.logspace(-3, 5, 200, dtype=torch.float64)
    for dim in (2, 3, 8, 512):
        error = 1 - ratio(AmosResponse(), kappa, dim) / ratio(SphereUnits(), kappa, dim)
        assert bool((error > -1e-15).all())
        assert error[[0, -1]].max() < 1e-5


def test_steepest_descent_and_large_d_are_the_printed_formulas():
    field, dim = fields(5), 5
    for beta in (0.4, 2.0):
        radius = math.sqrt(dim)
        root = torch.sqrt(dim**2 + 4 * beta**2 * radius**2 * field.square().sum(-1, keepdim=True))
        close(SaddlePointResponse().magnetization(field, beta, radius), 2 * beta * radius**2 * field / (dim + root))
        response, square = LargeDResponse(), dim / 2 - 1
        radius = math.sqrt(square)
        g = torch.sqrt(1 + beta**2 * field.square().sum(-1) / square)
        m = response.magnetization(field, beta, radius)
        close(m, beta * field / (1 + g)[..., None])
        close(response.log_partition(field, beta, radius), square * (g - 1 - torch.log((1 + g) / 2)))
        r = m.square().sum(-1) / square
        close(response.entropy(m, radius), square * torch.log(1 - r), rtol=1e-11)
        close(response.inverse(m, beta, radius), 2 * m / (beta * (1 - r))[..., None])
        product = field / (1 + g)[..., None] - m * (m * field).sum(-1, keepdim=True) / (square * g)[..., None]
        close(response.covariance_product(field, beta, radius, field), product)


@cases(1, 2, 3, 5, 70)
def test_magnetization_is_the_gradient_of_log_partition(response, dim):
    radius, field = radius_for(response, dim), fields(dim).requires_grad_()
    (gradient,) = torch.autograd.grad(response.log_partition(field, BETA, radius).sum(), field)
    m = response.magnetization(field, BETA, radius)
    close(gradient, BETA[:, None, None] * m)
    assert m.shape == (2, 3, dim)
    assert response.log_partition(field, BETA, radius).shape == (2, 3)


@cases(1, 2, 3, 5, 70)
def test_covariance_is_the_jacobian_element_by_element(response, dim):
    radius, field = radius_for(response, dim), fields(dim)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda f: response.magnetization(f[None], 0.7, radius)[0]))
    expected = jacobian(field.reshape(6, dim)).reshape(2, 3, dim, dim) / 0.7
    basis = torch.eye(dim, dtype=torch.float64)[:, None, None].expand(dim, 2, 3, dim)
    covariance = response.covariance_product(field, 0.7, radius, basis).movedim(0, -1)
    close(covariance, expected)
    close(covariance, covariance.mT)
    # The same from its two eigenvalues, where there is a direction.
    tau, rho = response.covariance_parts(field, 0.7, radius)
    u = torch.nn.functional.normalize(field, dim=-1)
    across = torch.eye(dim, dtype=torch.float64) - u[..., None] * u[..., None, :]
    close(covariance, tau[..., None, None] * across + rho[..., None, None] * (u[..., None] * u[..., None, :]))
    assert bool((rho > 0).all()) and bool((tau >= rho * (1 - 1e-14)).all())  # noqa: PT018
    again, slope = response.covariance_terms(field, 0.7, radius)
    assert torch.equal(again, tau)
    close(tau + slope * field.square().sum(-1), rho)


@pytest.mark.parametrize("dim", [2, 3, 8])
@pytest.mark.parametrize("response", [SphereUnits(), AmosResponse(), SaddlePointResponse()])
def test_cumulant_terms_are_derivatives_of_one_another(response, dim):
    field = random(2, 5, dim, seed=3).requires_grad_()
    beta, radius = 1.3, 1.7
    *terms, rho = response.cumulant_terms(field, beta, radius, 4)
    for lower, upper in itertools.pairwise(terms):
        (slope,) = torch.autograd.grad(lower.sum(), field, retain_graph=True)
        torch.testing.assert_close(slope, upper[..., None] * field, rtol=1e-12, atol=1e-14)
    for value, alone in zip(terms[:2], response.covariance_terms(field, beta, radius), strict=True):
        torch.testing.assert_close(value, alone, rtol=1e-14, atol=0)
    torch.testing.assert_close(rho, response.covariance_parts(field, beta, radius)[1], rtol=1e-14, atol=0)
    m = response.magnetization(field, beta, radius)
    torch.testing.assert_close(beta * terms[0][..., None] * field, m, rtol=1e-14, atol=0)


@FORWARD_MODE
@pytest.mark.cases(1)
@cases(1, 2, 3, 5)
@pytest.mark.parametrize("name", ["log_partition", "magnetization", "covariance_parts", "covariance_terms"])
def test_first_and_second_derivatives_also_at_zero_field(response, dim, name):
    radius = radius_for(response, dim)
    inputs = fields(dim).requires_grad_(), BETA.clone().requires_grad_()

    def function(field, beta):
        return getattr(response, name)(field, beta, radius)

    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, inputs)


@cases(1, 2, 3, 5)
def test_derivatives_of_inverse_and_entropy(response, dim):
    radius = radius_for(response, dim)
    m = response.magnetization(0.3 * fields(dim)[:, 1:], BETA, radius).requires_grad_()
    beta = BETA.clone().requires_grad_()

    def function(m, beta):
        return response.inverse(m, beta, radius), response.entropy(m, radius)

    assert torch.autograd.gradcheck(function, (m, beta))
    assert torch.autograd.gradgradcheck(function, (m, beta))


@cases(1, 2, 3, 8)
def test_fourth_derivative_at_zero_field_is_the_fourth_cumulant(response, dim):
    radius = radius_for(response, dim)

    def value(x):
        field = torch.zeros(1, dim, dtype=torch.float64)
        return response.log_partition(torch.cat([x.reshape(1, 1), field[:, 1:]], dim=1), 1.0, radius)[0]

    derivative, found = value, []
    for _ in range(4):
        derivative = torch.func.grad(derivative)
        found.append(derivative(torch.zeros((), dtype=torch.float64)).item())
    tau, slope = (x.item() for x in response.covariance_terms(torch.zeros(1, dim, dtype=torch.float64), 1.0, radius))
    fourth = 3 * slope if dim > 1 or not isinstance(response, SphereUnits) else -2 * radius**4
    assert found == pytest.approx([0, tau, 0, fourth], rel=1e-13, abs=1e-14)
    if isinstance(response, SphereUnits):
        assert found[3] == pytest.approx(-6 * radius**4 / (dim**2 * (dim + 2)), rel=1e-13)


@pytest.mark.parametrize("dim", [2, 3, 64, 4096])
def test_strong_fields_keep_their_derivatives(dim):
    response, kappa = SphereUnits(), 1e5
    x = torch.tensor(kappa, dtype=torch.float64)
    unit = torch.zeros(1, dim, dtype=torch.float64)
    unit[0, 0] = 1

    def length(x):
        return response.magnetization(x * unit, 1.0, 1.0)[0, 0]

    rho = response.covariance_parts(kappa * unit, 1.0, 1.0)[1].item()
    assert torch.func.grad(length)(x).item() == pytest.approx(rho, rel=1e-9)
    # The law far out, 1 - A = (D-1)/(2 kappa) - (D-1)(D-3)/(8 kappa^2) - ..., differentiated.
    if dim <= 64:
        c, d, e = (dim - 1) / 2, -(dim - 1) * (dim - 3) / 8, -(dim - 1) * (dim - 3) / 8
        expected = [c / kappa**2 + 2 * d / kappa**3, -2 * c / kappa**3 - 6 * d / kappa**4]
        assert rho == pytest.approx(expected[0], rel=1e-6 + abs(3 * e / kappa**2))
        second = torch.func.grad(lambda y: response.covariance_parts(y * unit, 1.0, 1.0)[1][0])(x).item()
        assert second == pytest.approx(expected[1], rel=1e-5)
    single = response.covariance_parts((kappa * unit).float(), 1.0, 1.0)[1].item()
    assert single == pytest.approx(rho, rel=1e-6)


@pytest.mark.parametrize("dim", [2, 3])
def test_quadrature_gives_the_same_moments(dim):
    x, weight = np.polynomial.legendre.leggauss(200)
    kappa = np.array([1e-2, 0.5, 3.0, 20.0])
    # The first component: uniform on [-1, 1] in three dimensions, the cosine of a uniform angle in two.
    component = x if dim == 3 else np.cos(np.pi * (x + 1) / 2)
    density = weight / 2 * np.exp(kappa[:, None] * (component - 1))
    z = density.sum(-1)
    mean = (density * component).sum(-1) / z
    variance = (density * component**2).sum(-1) / z - mean**2
    across = (density * (1 - component**2)).sum(-1) / z / (dim - 1)
    radius, beta = 1.7, 0.6
    field = along(kappa / (beta * radius), dim)
    response = SphereUnits()
    value = response.log_partition(field, beta, radius)[0]
    np.testing.assert_allclose(value, np.log(z) + kappa, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(response.magnetization(field, beta, radius)[0].norm(dim=-1), radius * mean, rtol=1e-12)
    tau, rho = response.covariance_parts(field, beta, radius)
    np.testing.assert_allclose(rho[0], radius**2 * variance, rtol=1e-11)
    np.testing.assert_allclose(tau[0], radius**2 * across, rtol=1e-11)


def test_one_dimension_is_an_ising_spin():
    response, radius, beta = SphereUnits(), 1.0, 0.8
    field = torch.tensor([0.0, 1e-9, -0.3, 0.9, -1.3, 40.0, -1e5], dtype=torch.float64)[:, None]
    x = beta * field[:, 0]
    m = response.magnetization(field, beta, radius)
    assert torch.equal(m[:, 0], x.tanh())
    value = response.log_partition(field, beta, radius)
    close(value, torch.logaddexp(x, -x) - math.log(2), atol=2e-16)
    assert value[1].item() == pytest.approx((0.8e-9) ** 2 / 2, rel=1e-12)
    leaf = field.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(response.log_partition(leaf, beta, radius).sum(), leaf)
    close(gradient, beta * m, rtol=1e-15, atol=0)
    tau, rho = response.covariance_parts(field, beta, radius)
    assert torch.equal(tau, rho)
    close(rho[:-1], x[:-1].cosh() ** -2, rtol=1e-13, atol=0)
    half = (1 + m[:-2, 0]) / 2
    entropy = -half * half.log() - (1 - half) * (1 - half).log() - math.log(2)
    close(response.entropy(m, radius)[:-2], entropy, atol=3e-16)
    ends = torch.tensor([[1.0], [-1.0], [1.5]], dtype=torch.float64)
    torch.testing.assert_close(
        response.entropy(ends, 1.0), torch.tensor([-math.log(2), -math.log(2), torch.nan]).double(), equal_nan=True
    )


@cases(1, 2, 3, 5, 70)
def test_inverse_undoes_magnetization(response, dim):
    radius, field = radius_for(response, dim), 0.2 * fields(dim)
    m = response.magnetization(field, BETA, radius)
    assert bool((m.norm(dim=-1) < radius).all())
    close(response.inverse(m, BETA, radius), field, rtol=1e-11)
    again = 0.9 * radius * torch.nn.functional.normalize(random(2, 3, dim, seed=4), dim=-1)
    close(response.magnetization(response.inverse(again, BETA, radius), BETA, radius), again)


@cases(1, 2, 3, 5, 70)
def test_entropy_is_the_legendre_transform(response, dim):
    radius, field = radius_for(response, dim), 0.2 * fields(dim)
    m = response.magnetization(field, BETA, radius).requires_grad_()
    entropy = response.entropy(m, radius)
    beta = BETA[:, None]

    def dual(f):
        return response.log_partition(f, BETA, radius) - beta * (f * m.detach()).sum(-1)

    close(entropy.detach(), dual(field))
    # It is the smallest of them, and its gradient is minus the field.
    for seed in range(5):
        moved = dual(field + 0.1 * random(2, 3, dim, seed=seed + 10))
        assert bool((moved > entropy.detach()).all())
    (gradient,) = torch.autograd.grad(entropy.sum(), m)
    close(gradient, -beta[..., None] * field, rtol=1e-11)


@cases(1, 2, 5)
def test_log_partition_is_convex_and_even(response, dim):
    radius = radius_for(response, dim)
    for seed in range(10):
        a, b = fields(dim, seed), fields(dim, seed + 50)
        middle = response.log_partition((a + b) / 2, BETA, radius)
        ends = response.log_partition(a, BETA, radius) + response.log_partition(b, BETA, radius)
        assert bool((middle <= ends / 2 + 1e-13).all())
        assert torch.equal(response.magnetization(-a, BETA, radius), -response.magnetization(a, BETA, radius))


@cases(2, 5)
def test_rotations_of_the_field_rotate_the_answer(response, dim):
    radius, field = radius_for(response, dim), fields(dim)
    rotation = torch.linalg.qr(random(dim, dim, seed=3))[0]
    rotated = field @ rotation
    close(response.magnetization(rotated, BETA, radius), response.magnetization(field, BETA, radius) @ rotation)
    close(response.log_partition(rotated, BETA, radius), response.log_partition(field, BETA, radius))
    close(
        response.covariance_product(rotated, BETA, radius, rotated),
        response.covariance_product(field, BETA, radius, field) @ rotation,
    )


def test_all_responses_agree_in_high_dimension():
    dim = 100_000
    radius = math.sqrt(dim / 2 - 1)
    field = random(1, 2, dim)
    truth = SphereUnits().magnetization(field, 1.5, radius)
    for response in RESPONSES[1:]:
        torch.testing.assert_close(response.magnetization(field, 1.5, radius), truth, rtol=3e-5, atol=0)
