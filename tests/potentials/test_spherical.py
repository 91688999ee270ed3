"""One-site responses: ground truth, derivatives of one another, inverse and entropy, sites apart, precision."""

import functools
import itertools
import math

import pytest
import torch

from implicit_attention.potentials import AmosResponse, LargeDResponse, SaddlePointResponse, SphereUnits
from implicit_attention.testing.numerics import check_derivatives, random, relative_error

# Forward mode loads torch's own scripted formulas.
FORWARD_MODE = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
RESPONSES = [SphereUnits(), AmosResponse(), SaddlePointResponse(), LargeDResponse()]
every_response = pytest.mark.parametrize("response", RESPONSES, ids=lambda r: type(r).__name__)
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


def fields(dim, dtype=torch.float64):
    """(2, 3, D), one of them zero and one strong."""
    field = random(2, 3, dim, dtype=dtype)
    field[0, 1] = 0
    field[1, 2] *= 10
    return field


def functions(response, field, beta, radius, *, product=True):
    """All functions of a field, with one number or vector per site."""
    values = response.log_partition(field, beta, radius), response.magnetization(field, beta, radius)
    # In one dimension the second term is 0 everywhere.
    terms = response.covariance_terms(field, beta, radius) if field.shape[-1] > 1 else ()
    products = [response.covariance_product(field, beta, radius, field)] if product else []
    return *values, *response.covariance_parts(field, beta, radius), *terms, *products


def duals(response, m, beta, radius):
    return response.inverse(m, beta, radius), response.entropy(m, radius)


def along(kappa, response, dim):
    """Fields (n, D) of these kappa in a slanted direction, for beta = 1/R."""
    direction = torch.arange(1.0, dim + 1, dtype=torch.float64)
    return torch.as_tensor(kappa, dtype=torch.float64)[:, None] * direction / direction.norm()


def ratio(response, kappa, dim):
    """A(kappa); any radius serves."""
    radius = radius_for(response, dim)
    return response.magnetization(along(kappa, response, dim), 1 / radius, radius).norm(dim=-1) / radius


def to_the_digits_of(text):
    return pytest.approx(float(text), rel=0, abs=0.51 * 10.0 ** -len(text.split(".")[1]))


@pytest.mark.parametrize(
    ("response", "dim", "kappa", "expected", "log_partition"),
    [
        (SphereUnits(), 2, 1, ".446389965897", ".235914358507"),
        (SphereUnits(), 3, 1, ".313035285499", ".161439361571"),
        (SphereUnits(), 3, 10, ".900000004122", "7.00426772438"),
        (SphereUnits(), 8, 5, ".494449764064", "1.378050893148"),
        (SphereUnits(), 8, 10, ".697511367233", "4.43559434907"),
        (SphereUnits(), 64, 100, ".732380194097", "48.8084854647"),
        (SphereUnits(), 256, 10, ".0390035344582", ".195164938877"),
        (SphereUnits(), 512, 100, ".188404764015", "9.5888377071"),
        (SphereUnits(), 1024, 100, ".0967439948699", "4.85986402839"),
        (SphereUnits(), 512, 0.01, ".0000195312499926", None),
        (AmosResponse(), 8, 5, ".488910912657", "1.367312265062"),
        (AmosResponse(), 64, 100, ".731803499842", "48.754998308505"),
        (LargeDResponse(), 8, 5, ".566190378969", None),
    ],
)
def test_known_values(response, dim, kappa, expected, log_partition):
    assert ratio(response, [kappa], dim).item() == to_the_digits_of(expected)
    if log_partition:
        assert response.log_partition(along([kappa], response, dim), 1.0, 1.0).item() == to_the_digits_of(log_partition)


@pytest.mark.parametrize(
    ("response", "errors"),
    [
        (AmosResponse(), [".0445", ".0304", ".0115", ".0057", ".0028", ".0014", ".0002"]),
        (SaddlePointResponse(), [".1156", ".0797", ".0309", ".0155", ".0078", ".0039", ".0005"]),
        (LargeDResponse(), [None, "2.00", ".333", ".143", ".0667", ".0323", ".0039"]),
    ],
    ids=["Amos", "saddle point", "large D"],
)
def test_largest_errors_of_the_closed_forms(response, errors):
    # The grid of the table: on a finer one two of its numbers are .0447 (Amos, D = 2) and .0799 (steepest descent, 3).
    kappa = torch.logspace(-2, 5, 120, dtype=torch.float64)
    for dim, text in zip([2, 3, 8, 16, 32, 64, 512], errors, strict=True):
        if text:
            error = ratio(response, kappa, dim) / ratio(SphereUnits(), kappa, dim) - 1
            assert error.abs().max().item() == to_the_digits_of(text)
            # Amos' bound is a lower one, and exact in both limits.
            if isinstance(response, AmosResponse):
                assert error.max() < 1e-15
                assert error[[0, -1]].abs().max() < 2e-4


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


@cases(1, 2, 3, 5, 70)
def test_magnetization_and_covariance_are_the_derivatives(response, dim):
    radius, field = radius_for(response, dim), fields(dim).requires_grad_()
    (gradient,) = torch.autograd.grad(response.log_partition(field, BETA, radius).sum(), field)
    m = response.magnetization(field, BETA, radius)
    close(gradient, BETA[:, None, None] * m)
    field = field.detach()
    jacobian = torch.func.vmap(torch.func.jacrev(lambda f: response.magnetization(f[None], 0.7, radius)[0]))
    expected = jacobian(field.reshape(6, dim)).reshape(2, 3, dim, dim) / 0.7
    basis = torch.eye(dim, dtype=torch.float64)[:, None, None].expand(dim, 2, 3, dim)
    close(response.covariance_product(field, 0.7, radius, basis).movedim(0, -1), expected)
    # The same from its two eigenvalues, where there is a direction.
    tau, rho = response.covariance_parts(field, 0.7, radius)
    u = torch.nn.functional.normalize(field, dim=-1)
    along = u[..., None] * u[..., None, :]
    close(tau[..., None, None] * (torch.eye(dim).double() - along) + rho[..., None, None] * along, expected)
    assert bool(((rho > 0) & (tau >= rho * (1 - 1e-14))).all())
    again, slope = response.covariance_terms(field, 0.7, radius)
    assert torch.equal(again, tau)
    close(tau + slope * field.square().sum(-1), rho)


@every_response
def test_cumulant_terms_are_derivatives_of_one_another(response):
    field = random(2, 5, 6, seed=3).requires_grad_()
    beta, radius = 1.3, radius_for(response, 6)
    *terms, rho = response.cumulant_terms(field, beta, radius, 4)
    for lower, upper in itertools.pairwise(terms):
        (slope,) = torch.autograd.grad(lower.sum(), field, retain_graph=True)
        close(slope, upper[..., None] * field, atol=1e-14)
    close((*terms[:2], rho), (*response.covariance_terms(field, beta, radius), rho), rtol=1e-14)
    close(rho, response.covariance_parts(field, beta, radius)[1], rtol=1e-14)


@FORWARD_MODE
@pytest.mark.cases(1)
@cases(1, 2, 3, 5)
def test_first_and_second_derivatives_also_at_zero_field(response, dim):
    radius, inputs = radius_for(response, dim), (fields(dim).requires_grad_(), BETA.clone().requires_grad_())
    function = functools.partial(functions, response, radius=radius)
    check_derivatives(function, inputs)
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
    m = response.magnetization(0.3 * fields(dim)[:, 1:], BETA, radius).requires_grad_()
    check_derivatives(functools.partial(duals, response, radius=radius), (m, inputs[1]))


def test_one_dimension_is_an_ising_spin():
    response, beta = SphereUnits(), 0.8
    field = torch.tensor([0.0, 1e-9, -0.3, 0.9, -1.3, 40.0, -1e5], dtype=torch.float64)[:, None]
    x, m = beta * field[:, 0], response.magnetization(field, beta, 1.0)
    assert torch.equal(m[:, 0], x.tanh())
    value = response.log_partition(field, beta, 1.0)
    close(value, torch.logaddexp(x, -x) - math.log(2), atol=2e-16)
    assert value[1].item() == pytest.approx((0.8e-9) ** 2 / 2, rel=1e-12)
    tau, rho = response.covariance_parts(field, beta, 1.0)
    assert torch.equal(tau, rho)
    close(rho[:-1], x[:-1].cosh() ** -2, rtol=1e-13, atol=0)
    half = (1 + m[:-2, 0]) / 2
    entropy = -half * half.log() - (1 - half) * (1 - half).log() - math.log(2)
    close(response.entropy(m, 1.0)[:-2], entropy, atol=3e-16)
    ends = response.entropy(torch.tensor([[1.0], [-1.0], [1.5]], dtype=torch.float64), 1.0)
    assert ends.tolist() == pytest.approx([-math.log(2), -math.log(2), math.nan], nan_ok=True)


@cases(1, 2, 3, 5, 70)
def test_inverse_undoes_magnetization_and_entropy_is_the_legendre_transform(response, dim):
    radius, field = radius_for(response, dim), 0.2 * fields(dim)
    m = response.magnetization(field, BETA, radius).requires_grad_()
    inverse, entropy = duals(response, m, BETA, radius)
    close(inverse, field, rtol=1e-11)

    def dual(f):
        return response.log_partition(f, BETA, radius) - BETA[:, None] * (f * m.detach()).sum(-1)

    close(entropy.detach(), dual(field))
    # It is the smallest of them, and its gradient is minus the field.
    assert bool((dual(field + 0.1 * random(2, 3, dim, seed=10)) > entropy).all())
    (gradient,) = torch.autograd.grad(entropy.sum(), m)
    close(gradient, -BETA[:, None, None] * field, rtol=1e-11)
    strong = 0.9 * radius * torch.nn.functional.normalize(random(2, 3, dim, seed=4), dim=-1)
    close(response.magnetization(response.inverse(strong, BETA, radius), BETA, radius), strong)


def test_all_responses_agree_in_high_dimension():
    dim = 100_000
    radius, field = math.sqrt(dim / 2 - 1), random(1, 2, dim)
    truth = SphereUnits().magnetization(field, 1.5, radius)
    for response in RESPONSES[1:]:
        close(response.magnetization(field, 1.5, radius), truth, rtol=3e-5, atol=0)


# Responses as functions of tensors.


@cases(1, 4, 5)
def test_sites_do_not_see_each_other(response, dim):
    radius, field = radius_for(response, dim), 0.2 * fields(dim)
    m = response.magnetization(field, BETA, radius)
    poisoned, outside = field.clone(), m.clone()
    poisoned[:, 1] = torch.nan
    outside[0, 1], outside[1, 1] = 2 * radius, torch.nan
    for every, clean, dirty in ((functions, field, poisoned), (duals, m, outside)):
        alone = every(response, clean[:1, 2:], BETA[:1], radius)
        for whole, spoilt, one in zip(
            every(response, clean, BETA, radius), every(response, dirty, BETA, radius), alone, strict=True
        ):
            assert torch.equal(whole[:, [0, 2]], spoilt[:, [0, 2]])
            assert bool(spoilt[:, 1].isnan().all())
            close(one[0, 0], whole[0, 2], rtol=1e-15, atol=0)
    # A gradient is not spoilt either.
    leaf = poisoned.requires_grad_()
    (gradient,) = torch.autograd.grad(response.log_partition(leaf, BETA, radius).sum(), leaf)
    assert bool(gradient[:, [0, 2]].isfinite().all())


@every_response
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_the_float64_result_rounded(response, dtype):
    radius, field, beta = radius_for(response, 6), fields(6, dtype), BETA.to(dtype)
    m, eps = field[:, :2] / 40, torch.finfo(dtype).eps
    units = 8 if dtype == torch.float32 else 1
    # The product of a strong field with itself cancels.
    exact = functions(response, field.double(), beta.double(), radius, product=False)
    for value, truth in zip(functions(response, field, beta, radius, product=False), exact, strict=True):
        assert value.dtype == dtype
        close(value.double(), truth, rtol=units * eps, atol=units * eps / 1e3)
    exact = duals(response, m.double(), beta.double(), radius)
    for value, truth in zip(duals(response, m, beta, radius), exact, strict=True):
        assert value.dtype == dtype
        assert relative_error(value, truth) < 4 * eps


@FORWARD_MODE
@every_response
def test_transforms_of_torch_func(response):
    radius, field = radius_for(response, 5), fields(5)
    per_site = torch.vmap(torch.vmap(lambda f: response.magnetization(f[None], 0.7, radius)[0]))(field)
    close(per_site, response.magnetization(field, 0.7, radius))

    def total(f, beta):
        return response.log_partition(f, beta, radius).sum() + response.entropy(0.1 * f / (1 + f**2), radius).sum()

    by_reverse = torch.func.jacrev(torch.func.jacrev(total))(field, 0.7)
    by_site = lambda f, beta: torch.vmap(lambda f: total(f[None], beta))(f).sum()  # noqa: E731
    for gradient in (torch.func.jacrev, torch.func.jacfwd):
        for function in (total, by_site):
            close(torch.func.jacfwd(gradient(function))(field, 0.7), by_reverse)
    by_beta = torch.func.vmap(torch.func.grad(total, argnums=1), in_dims=(None, 0))(field, BETA)
    close(by_beta[1], torch.func.grad(total, argnums=1)(field, BETA[1]))
    # A pullback whose transform is over leaves no graph.
    _, pullback = torch.func.vjp(lambda f: response.magnetization(f, 0.7, radius), field)
    assert not pullback(field)[0].requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("dim", [1, 3])
def test_compiles_without_graph_breaks(dim):
    def function(field):
        m = SphereUnits().magnetization(field, 1.0, 1.3)
        product = SphereUnits().covariance_product(field, 1.0, 1.3, field)
        return m + product + SphereUnits().inverse(m, 1.0, 1.3) + SphereUnits().entropy(m, 1.3)[..., None]

    field = (0.2 * fields(dim, torch.float32)).requires_grad_()
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    expected, value = function(field), compiled(field)
    close(value, expected, rtol=1e-5, atol=1e-6)
    close(*(torch.autograd.grad(x.sum(), field)[0] for x in (value, expected)), rtol=1e-5, atol=1e-6)


@every_response
def test_empty_batches_give_empty_results(response):
    radius, field = radius_for(response, 5), torch.zeros(2, 0, 5)
    results = *functions(response, field, 1.0, radius), *duals(response, field, 1.0, radius)
    assert {tuple(result.shape) for result in results} == {(2, 0), (2, 0, 5)}
