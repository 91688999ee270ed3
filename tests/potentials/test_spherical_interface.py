"""One-site responses as functions of tensors: sites apart, precision, transforms, shapes, wrong arguments."""

import functools
import math

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

# Forward mode loads torch's own scripted formulas.
FORWARD_MODE = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
RESPONSES = [SphereUnits(), AmosResponse(), SaddlePointResponse(), LargeDResponse()]
every_response = pytest.mark.parametrize("response", RESPONSES, ids=lambda r: type(r).__name__)
close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)

BETA = torch.tensor([0.7, 1.3], dtype=torch.float64)


def radius_for(response, dim):
    """The radius that `response` takes; otherwise one at which no power of it drops out."""
    return math.sqrt(dim / 2 - 1) if isinstance(response, LargeDResponse) else 1.2 * math.sqrt(dim)


def fields(dim, seed=0, dtype=torch.float64):
    """(2, 3, D), one of them zero and one strong."""
    field = random(2, 3, dim, seed=seed, dtype=dtype)
    field[0, 1] = 0
    field[1, 2] *= 10
    return field


@every_response
@pytest.mark.parametrize("dim", [1, 3, 5])
def test_sites_do_not_see_each_other(response, dim):
    if isinstance(response, LargeDResponse) and dim < 3:
        dim = 4
    radius, field = radius_for(response, dim), 0.2 * fields(dim)
    m = response.magnetization(field, BETA, radius)
    poisoned, outside = field.clone(), m.clone()
    poisoned[:, 1] = torch.nan
    outside[0, 1], outside[1, 1] = 2 * radius, torch.nan
    pairs = [
        (lambda x, b: response.log_partition(x, b, radius), field, poisoned),
        (lambda x, b: response.magnetization(x, b, radius), field, poisoned),
        (lambda x, b: response.covariance_product(x, b, radius, x), field, poisoned),
        (lambda x, b: torch.stack(response.covariance_parts(x, b, radius), -1), field, poisoned),
        (lambda x, b: response.inverse(x, b, radius), m, outside),
        (lambda x, b: response.entropy(x, radius), m, outside),
    ]
    for function, clean, dirty in pairs:
        whole, spoilt = function(clean, BETA), function(dirty, BETA)
        assert torch.equal(whole[:, [0, 2]], spoilt[:, [0, 2]])
        assert bool(spoilt[:, 1].isnan().all())
        # Alone, a site gives what it gives among others.
        for i in range(2):
            torch.testing.assert_close(
                function(clean[i : i + 1, 2:], BETA[i : i + 1])[0, 0], whole[i, 2], rtol=1e-15, atol=0
            )
    # A gradient is not spoilt either.
    leaf = poisoned.requires_grad_()
    (gradient,) = torch.autograd.grad(response.log_partition(leaf, BETA, radius).sum(), leaf)
    assert bool(gradient[:, [0, 2]].isfinite().all())


@every_response
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_the_float64_result_rounded(response, dtype):
    dim = 6
    radius, field = radius_for(response, dim), fields(dim).to(dtype)
    beta = BETA.to(dtype)
    units = 8 if dtype == torch.float32 else 1
    tolerance = {"rtol": units * torch.finfo(dtype).eps, "atol": units * torch.finfo(dtype).eps / 1e3}

    def results(field, beta):
        m = (0.1 * field).to(field.dtype)
        yield response.log_partition(field, beta, radius)
        yield response.magnetization(field, beta, radius)
        yield from response.covariance_parts(field, beta, radius)
        yield from response.covariance_terms(field, beta, radius)
        yield response.inverse(m[:, :2] / 4, beta, radius)
        yield response.entropy(m[:, :2] / 4, radius)

    exact = results(field.double(), beta.double())
    for value, truth in zip(results(field, beta), exact, strict=True):
        assert value.dtype == dtype
        if value.shape[1] == 2:  # the magnetizations above were rounded in `dtype`
            assert ((value.double() - truth).norm() / truth.norm()).item() < 4 * torch.finfo(dtype).eps
        else:
            torch.testing.assert_close(value.double(), truth, **tolerance)


@every_response
def test_beta_broadcasts_over_the_leading_axes(response):
    field, radius = random(2, 4, 3, 5), radius_for(response, 5)
    beta = torch.tensor([0.3, 1.0, 1.7, 2.0], dtype=torch.float64)
    m = response.magnetization(field, beta, radius)
    for head in range(4):
        close(m[:, head], response.magnetization(field[:, head], beta[head].item(), radius))
    close(response.inverse(m, beta, radius), field, rtol=1e-11)


@FORWARD_MODE
@every_response
def test_transforms_of_torch_func(response):
    radius, field = radius_for(response, 5), fields(5)
    per_site = torch.vmap(torch.vmap(lambda f: response.magnetization(f[None], 0.7, radius)[0]))(field)
    close(per_site, response.magnetization(field, 0.7, radius))

    def total(f, beta):
        return response.log_partition(f, beta, radius).sum() + response.entropy(0.1 * f / (1 + f**2), radius).sum()

    hessian = torch.func.jacfwd(torch.func.jacrev(total))(field, 0.7)
    close(hessian, torch.func.jacrev(torch.func.jacrev(total))(field, 0.7))
    by_beta = torch.func.vmap(torch.func.grad(total, argnums=1), in_dims=(None, 0))(field, BETA)
    close(by_beta[1], torch.func.grad(total, argnums=1)(field, BETA[1]))


@pytest.mark.slow
@pytest.mark.parametrize("dim", [1, 3])
def test_compiles_without_graph_breaks(dim):
    response, radius = SphereUnits(), 1.3
    field = 0.2 * fields(dim, dtype=torch.float32)

    def function(field):
        m = response.magnetization(field, 1.0, radius)
        product = response.covariance_product(field, 1.0, radius, field)
        return m + product + response.inverse(m, 1.0, radius) + response.entropy(m, radius)[..., None]

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    mine, theirs = field.clone().requires_grad_(), field.clone().requires_grad_()
    expected, value = function(mine), compiled(theirs)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value.sum(), theirs), torch.autograd.grad(expected.sum(), mine))


@every_response
def test_empty_batches_give_empty_results(response):
    radius = radius_for(response, 5)
    for shape in ((0, 3, 5), (2, 0, 5)):
        field = torch.zeros(shape)
        assert response.log_partition(field, 1.0, radius).shape == shape[:-1]
        assert response.magnetization(field, 1.0, radius).shape == shape
        assert response.covariance_product(field, 1.0, radius, field).shape == shape
        assert response.inverse(field, 1.0, radius).shape == shape
        assert response.entropy(field, radius).shape == shape[:-1]


@every_response
def test_a_field_whose_square_overflows_is_not_reported_as_no_field(response):
    field = torch.full((1, 5), 1e30)
    assert bool(response.magnetization(field, 1.0, radius_for(response, 5)).isnan().all())


def test_a_large_d_response_has_one_radius():
    field, response = torch.ones(1, 8), LargeDResponse()
    response.magnetization(field, 1.0, torch.tensor(3.0).sqrt().item())
    with pytest.raises(
        ValueError, match=r"`radius` must be sqrt\(D/2 - 1\) = 1.73205 for .* at D = 8, got 2.0; use Sphere"
    ):
        response.magnetization(field, 1.0, 2.0)
    for call in (
        lambda f: response.log_partition(f, 1.0, 1.0),
        lambda f: response.covariance_parts(f, 1.0, 1.0),
        lambda f: response.inverse(f, 1.0, 1.0),
        lambda f: response.entropy(f, 1.0),
    ):
        with pytest.raises(ValueError, match=r"must have more than 2 dimensions .*, got D = 2; use SphereUnits"):
            call(torch.zeros(3, 2))


@every_response
def test_wrong_arguments_are_named(response):
    field, radius = torch.ones(2, 3, 5), radius_for(response, 5)
    with pytest.raises(TypeError, match=r"`field` must be a torch\.Tensor"):
        response.magnetization([1.0], 1.0, radius)
    with pytest.raises(TypeError, match="`field` must have a floating-point dtype"):
        response.magnetization(field.long(), 1.0, radius)
    with pytest.raises(ValueError, match="`field` must have at least 2 axes"):
        response.magnetization(field[0, 0], 1.0, radius)
    with pytest.raises(ValueError, match="`field` must have at least one dimension"):
        response.magnetization(field[..., :0], 1.0, radius)
    with pytest.raises(ValueError, match="`radius` must be > 0"):
        response.magnetization(field, 1.0, -1.0)
    with pytest.raises(TypeError, match="`radius` must be a number"):
        response.entropy(field, torch.tensor(1.0))
    with pytest.raises(ValueError, match="`beta` must be > 0"):
        response.log_partition(field, 0.0, radius)
    with pytest.raises(ValueError, match=r"`beta` must be > 0 everywhere, got -1\.0"):
        response.log_partition(field, torch.tensor([1.0, -1.0]), radius)
    with pytest.raises(ValueError, match="`beta` must broadcast to the leading axes of `field`"):
        response.log_partition(field, torch.ones(3), radius)
    with pytest.raises(ValueError, match="`beta` must broadcast to the leading axes of `magnetization`"):
        response.inverse(field, torch.ones(3), radius)
    with pytest.raises(ValueError, match="`beta` must have the dtype of `field`"):
        response.log_partition(field, BETA, radius)
    with pytest.raises(ValueError, match="`v` must broadcast with the shape of `field`"):
        response.covariance_product(field, 1.0, radius, torch.ones(2, 3, 4))


def test_a_response_says_what_it_must_define():
    field = torch.ones(1, 3)
    for name in ("log_partition", "magnetization", "covariance_parts"):
        with pytest.raises(NotImplementedError):
            getattr(SphericalLaw(), name)(field, 1.0, 1.0)
