"""Bessel ratios against arithmetic of forty digits, with the derivatives that make every order of a response."""

import functools
import math

import mpmath
import pytest
import torch

from implicit_attention.potentials import _bessel, _debye

# Forward mode loads torch's own scripted formulas.
FORWARD_MODE = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
DIMS = [2, 3, 4, 8, 16, 64, 512, 1024, 4096]
KAPPAS = [1e-3, 0.1, 1.0, 7.0, 30.0, 1e3, 1e5]


@functools.cache
def bessel(order, kappa):
    return mpmath.besseli(order, kappa, maxterms=10**7)


@functools.cache
def exact(dim, t):
    """W, G, P, G', P' and P'' from mpmath; the differential equation of A, with digits to spare for its differences."""
    with mpmath.workdps(60):
        kappa, nu = mpmath.sqrt(mpmath.mpf(t)), mpmath.mpf(dim) / 2 - 1
        i = bessel(nu, kappa)
        a = bessel(nu + 1, kappa) / i
        w = mpmath.loggamma(nu + 1) + nu * mpmath.log(2 / kappa) + mpmath.log(i)
        p = 1 - a**2 - (dim - 1) * a / kappa
        dp = -2 * a * p - (dim - 1) * (p / kappa - a / kappa**2)
        ddp = -2 * p**2 - 2 * a * dp - (dim - 1) * (dp / kappa - 2 * p / kappa**2 + 2 * a / kappa**3)
        slopes = (p - a / kappa) / (2 * t), dp / (2 * kappa), (ddp - dp / kappa) / (4 * kappa**2)
        return w, a / kappa, p, *slopes


def squares(dtype):
    return torch.tensor(KAPPAS, dtype=dtype).square()


def worst(values, truth):
    """The largest relative error, against numbers of many digits."""
    return max(abs(float(mpmath.mpf(v) / x - 1)) for v, x in zip(values.double().tolist(), truth, strict=True))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_functions_and_derivatives_are_exact_to_rounding(dim, dtype):
    t = squares(dtype)
    truth = list(zip(*(exact(dim, x) for x in t.double().tolist()), strict=True))
    _, radial = _bessel._series(t, dim, 0, 2)
    computed = [
        (_bessel.log_partition(t, dim), 4),
        (_bessel.ratio(t, dim), 4),
        (_bessel.radial(t, dim), 10),
        (_bessel.ratio_slope(t, dim), 10),
        (radial[1], 16),
        (2 * radial[2], 40),
    ]
    for (value, units), numbers in zip(computed, truth, strict=True):
        assert worst(value, numbers) < units * torch.finfo(dtype).eps


@pytest.mark.parametrize("dim", [1, *DIMS])
def test_values_at_zero_are_the_limits(dim):
    zero = torch.zeros(1, dtype=torch.float64)
    assert _bessel.log_partition(zero, dim).item() == 0
    assert _bessel.ratio(zero, dim).item() == pytest.approx(1 / dim, rel=1e-15)
    assert _bessel.radial(zero, dim).item() == pytest.approx(1 / dim, rel=1e-15)
    assert _bessel.ratio_slope(zero, dim).item() == pytest.approx(-1 / (dim**2 * (dim + 2)), rel=1e-14)


def test_one_and_three_dimensions_are_elementary():
    kappa = torch.tensor([0.3, 2.0, 15.0, 400.0], dtype=torch.float64)
    torch.testing.assert_close(kappa * _bessel.ratio(kappa**2, 1), kappa.tanh(), rtol=1e-15, atol=0)
    coth = 1 / kappa.tanh() - 1 / kappa
    # The oracle is a difference of numbers up to 1/.3.
    torch.testing.assert_close(kappa * _bessel.ratio(kappa**2, 3), coth, rtol=0, atol=1e-15)


@FORWARD_MODE
@pytest.mark.cases(1)
@pytest.mark.parametrize("dim", [2, 3, 8, 70])
@pytest.mark.parametrize("name", ["log_partition", "ratio", "ratio_slope", "radial"])
def test_derivatives_of_each_function_check(dim, name):
    t = torch.tensor([0.0, 0.2, 9.0, 400.0], dtype=torch.float64, requires_grad=True)
    function = functools.partial(getattr(_bessel, name), dim=dim)
    assert torch.autograd.gradcheck(function, t, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, t, check_fwd_over_rev=True)


@FORWARD_MODE
@pytest.mark.cases(1)
@pytest.mark.parametrize("dim", [2, 3, 8, 70])
@pytest.mark.parametrize("name", ["length", "entropy"])
def test_derivatives_of_the_inverse_functions_check(dim, name):
    q = torch.tensor([0.0, 0.2, 0.6, 0.9], dtype=torch.float64, requires_grad=True)
    function = functools.partial(getattr(_bessel, name), dim=dim)
    assert torch.autograd.gradcheck(function, q, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, q, check_fwd_over_rev=True)


@pytest.mark.parametrize("dim", [2, 3, 8, 64, 512])
def test_inverse_and_entropy_agree_with_a_root_of_many_digits(dim):
    nu = mpmath.mpf(dim) / 2 - 1
    t = torch.tensor([1e-3, 0.3, 1.0, 12.0, 1e3, 1e5], dtype=torch.float64).square()
    q = t * _bessel.ratio(t, dim).square()
    lengths, entropies = [], []
    with mpmath.workdps(40):
        for guess, number in zip(t.tolist(), q.tolist(), strict=True):
            rho = mpmath.sqrt(mpmath.mpf(number))
            start = mpmath.sqrt(mpmath.mpf(guess)) * (1 + mpmath.mpf(10) ** -9)
            kappa = mpmath.findroot(lambda x: bessel(nu + 1, x) / bessel(nu, x) - rho, start, tol=1e-30)  # noqa: B023
            lengths.append(kappa / rho)
            w = mpmath.loggamma(nu + 1) + nu * mpmath.log(2 / kappa) + mpmath.log(bessel(nu, kappa))
            entropies.append(w - kappa * rho)
        assert worst(_bessel.length(q, dim), lengths) < 2e-15
        assert worst(_bessel.entropy(q, dim), entropies) < 2e-14


@pytest.mark.parametrize("dim", [2, 3, 8, 64, 4096])
def test_inverse_has_converged_for_every_magnetization(dim):
    near = torch.logspace(-15, -0.31, 300, dtype=torch.float64)
    q = torch.cat([near, 1 - near])
    length = _bessel.length(q, dim)
    # Bessel's equation solved for the length, which conditions it well also where q rounds to 1.
    t = q * length.square()
    w = _bessel.radial(t, dim) / _bessel.ratio(t, dim).square()
    again = (dim - 1 + ((dim - 1) ** 2 + 4 * (1 - q) * w).sqrt()) / (2 * (1 - q))
    torch.testing.assert_close(length, again, rtol=2e-15, atol=0)
    single = q.float()[q.float() < 1]
    in_single, in_double = _bessel.length(single, dim), _bessel.length(single.double(), dim)
    torch.testing.assert_close(in_single.double(), in_double, rtol=2e-7, atol=0)


def test_expansion_contains_the_series_of_stirling_and_ends_below_rounding():
    series = [1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188]
    assert [term.stirling for term in _debye.EXPANSION[1:11:2]] == pytest.approx(series, rel=1e-15)
    assert all(term.stirling == 0 for term in _debye.EXPANSION[2::2])
    for dtype, (order, _) in _debye.LOWEST_ORDER.items():
        assert _debye.EXPANSION[-1].bound * order ** -(len(_debye.EXPANSION) - 1) < torch.finfo(dtype).eps * order


def test_fewer_terms_and_steps_serve_in_high_dimensions_and_low_precision():
    small, large = _debye.start(2, torch.float64), _debye.start(4096, torch.float64)
    assert large.steps == 0
    assert large.terms < small.terms / 2
    assert _debye.start(2, torch.float32).steps < small.steps / 2


@pytest.mark.parametrize("dim", [1, 2, 5, 16, 90])
def test_taylor_coefficients_of_every_order_are_those_of_many_digits(dim):
    t = torch.tensor([0.3, 6.0, 150.0, 4e4], dtype=torch.float64)
    order = 4
    ratio, radial = _bessel._series(t, dim, order, order)
    truth = [riccati(dim, x, order) for x in t.tolist()]
    for k in range(order + 1):
        assert worst(ratio[k], [g[k] for g, _ in truth]) < 2e-15 * 3**k
        if dim > 1:
            assert worst(radial[k], [p[k] for _, p in truth]) < 4e-15 * 3**k


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_start_of_the_recurrences_serves_every_order(dtype):
    t = torch.tensor([1e-3, 1.0, 30.0], dtype=dtype).square()
    for dim in range(2, 65, 2):
        truth = [riccati(dim, x, 2) for x in t.double().tolist()]
        for order in range(3):
            for k, values in enumerate(_bessel._series(t, dim, order, order)):
                assert worst(values[order], [series[k][order] for series in truth]) < 8 * torch.finfo(dtype).eps


def riccati(dim, t, order):
    """Power series of G and P by 2 t G' = 1 - t G^2 - D G and P = G + 2 t G', which cost digits."""
    with mpmath.workdps(80):
        t = mpmath.mpf(t)
        nu, kappa = mpmath.mpf(dim) / 2 - 1, mpmath.sqrt(t)
        g = [bessel(nu + 1, kappa) / bessel(nu, kappa) / kappa]
        squares = []
        for k in range(order + 1):
            squares.append(sum(g[i] * g[k - i] for i in range(k + 1)))
            known = (k == 0) - t * squares[k] - (squares[k - 1] if k else 0) - (dim + 2 * k) * g[k]
            g.append(known / (2 * t * (k + 1)))
        return g, [(1 + 2 * k) * g[k] + 2 * t * (k + 1) * g[k + 1] for k in range(order + 1)]


def test_an_entry_depends_neither_on_its_neighbours_nor_on_what_else_is_asked():
    t = torch.rand(3000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 50
    for function in (_bessel.ratio, _bessel.ratio_slope, _bessel.radial, _bessel.log_partition):
        together = function(t, 5)
        for count in (1, 2, 3, 5, 8, 13):
            assert torch.equal(function(t[:count], 5), together[:count])
        assert torch.equal(function(t.view(3, 10, 100), 5), together.view(3, 10, 100))
    both = _bessel.derivatives(t, 5, (0, 1), (0,))
    for one, alone in zip(both, (_bessel.ratio, _bessel.ratio_slope, _bessel.radial), strict=True):
        torch.testing.assert_close(one, alone(t, 5), rtol=1e-15, atol=0)


@FORWARD_MODE
def test_functions_of_one_pass_have_the_derivatives_of_each():
    t = torch.tensor([0.0, 0.2, 9.0, 400.0], dtype=torch.float64, requires_grad=True)
    function = functools.partial(_bessel.derivatives, dim=3, ratio=(0, 2), radial=(1,))
    assert torch.autograd.gradcheck(function, t, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, t, check_fwd_over_rev=True)


@FORWARD_MODE
def test_transforms_of_torch_func_nest():
    t = torch.tensor([0.0, 0.7, 30.0], dtype=torch.float64)
    for dim in (2, 8):
        third = torch.func.vmap(torch.func.grad(torch.func.grad(lambda x: _bessel.ratio(x, dim))))(t)  # noqa: B023
        expected = 2 * _bessel._series(t, dim, 2, -1)[0][2]
        torch.testing.assert_close(third, expected, rtol=1e-14, atol=0)
        forward = torch.func.jacfwd(torch.func.jacrev(lambda x: _bessel.length(x, dim)))(t / 40)  # noqa: B023
        reverse = torch.func.jacrev(torch.func.jacrev(lambda x: _bessel.length(x, dim)))(t / 40)  # noqa: B023
        torch.testing.assert_close(forward, reverse, rtol=1e-12, atol=1e-12)


def test_a_pullback_whose_transform_is_over_leaves_no_graph():
    t = torch.tensor([0.3, 7.0], dtype=torch.float64)
    _, pullback = torch.func.vjp(lambda t: _bessel.ratio(t, 3), t)
    (slope,) = pullback(torch.ones_like(t))
    assert not slope.requires_grad
    torch.testing.assert_close(slope, _bessel.ratio_slope(t, 3), rtol=1e-15, atol=0)


def test_nothing_overflows_before_the_square_does():
    for dtype, largest in ((torch.float32, 1e18), (torch.float64, 1e150)):
        t = torch.tensor([largest], dtype=dtype).square()
        for dim in (2, 9, 200):
            assert (largest * _bessel.ratio(t, dim)).item() == pytest.approx(1, rel=1e-6)
            assert _bessel.log_partition(t, dim).item() == pytest.approx(largest, rel=1e-6)
    assert math.isnan(_bessel.ratio(torch.tensor([math.inf]), 2).item())
