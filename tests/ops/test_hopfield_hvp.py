"""`hopfield_hvp` against the second derivative of the energy."""

import pytest
import torch
from hopfield_cases import CASES, make, pairs, written_out

from implicit_attention import AnchoredEnergy, LogSumExp
from implicit_attention.ops import hopfield_hvp
from implicit_attention.ops.dispatch import laid_out
from implicit_attention.ops.hopfield_hvp import sdpa
from implicit_attention.testing.numerics import random, relative_error
from implicit_attention.testing.potential import Allocations

IMPLEMENTATIONS = pytest.mark.parametrize("impl", ["reference", "auto"])


def vectors(query, *seeds):
    return [random(*query.shape, seed=seed, dtype=query.dtype) for seed in seeds]


@IMPLEMENTATIONS
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_derivative_of_the_gradient(case, impl):
    query, keys, options = make(case)
    z, v = vectors(query, 3, 4)
    found = hopfield_hvp(query, keys, z, v, **options, impl=impl)
    z.requires_grad_()
    gradient = z - written_out(z, query, keys, **options)[0]
    # The Hessian is symmetric, so that its product from the left is the one from the right.
    expected = torch.autograd.grad(gradient, z, v)[0] if z.numel() else v
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


@IMPLEMENTATIONS
@pytest.mark.parametrize("case", ["plain", "causal and padded", "grouped and masked", "anchor and beta of everything"])
def test_it_is_that_of_the_energy(case, impl):
    query, keys, options = make(case)
    z, v = vectors(query, 3, 4)
    bias = pairs(query, keys, options.get("mask"), options.get("is_causal", False))
    energy = AnchoredEnergy(LogSumExp(keys, options["beta"], bias=bias), query, options["anchor"])
    _, expected = torch.autograd.functional.hvp(lambda x: energy.energy(x).sum(), z, v)
    torch.testing.assert_close(hopfield_hvp(query, keys, z, v, **options, impl=impl), expected, rtol=1e-10, atol=1e-11)


@IMPLEMENTATIONS
@pytest.mark.parametrize("case", CASES)
def test_it_is_symmetric(case, impl):
    query, keys, options = make(case)
    z, u, v = vectors(query, 3, 4, 5)
    left = (u * hopfield_hvp(query, keys, z, v, **options, impl=impl)).sum(-1)
    right = (v * hopfield_hvp(query, keys, z, u, **options, impl=impl)).sum(-1)
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("size", [1, 70 * 8, 2000])
@pytest.mark.parametrize(
    "case", ["plain", "causal and padded", "grouped and masked", "one memory", "anchor of each head"]
)
def test_tiles_change_nothing(case, size):
    query, keys, options = make(case)
    query = torch.cat([query] * 2, -2)
    if options.get("mask") is not None and options["mask"].shape[-2] > 1:
        options["mask"] = torch.cat([options["mask"]] * 2, -2)
    problem = laid_out(query, keys, **{"mask": None, "is_causal": False, **options})
    z, v = vectors(query, 3, 4)
    whole = sdpa.hessian_product(problem, z, v, size=10**9)
    torch.testing.assert_close(sdpa.hessian_product(problem, z, v, size=size), whole, rtol=1e-12, atol=1e-13)


def test_a_tile_bounds_the_memory():
    query, keys = random(512, 8), random(512, 8, seed=1)
    problem = laid_out(query, keys, beta=0.3, anchor=0.5, mask=None, is_causal=False)
    with Allocations() as seen:
        sdpa.hessian_product(problem, query, query, size=2**13)
    assert seen.largest <= 2**13


def test_a_query_that_attends_to_nothing_has_the_identity():
    query, keys, options = make("a query that attends to nothing")
    z, v = vectors(query, 3, 4)
    for impl in ("reference", "sdpa"):
        found = hopfield_hvp(query, keys, z, v, **options, impl=impl)
        assert torch.equal(found[..., 4, :], v[..., 4, :])
        assert not torch.equal(found[..., 3, :], v[..., 3, :])


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_low_precision(dtype, impl):
    query, keys, options = make("key padding", dtype)
    z, v = vectors(query, 3, 4)
    found = hopfield_hvp(query, keys, z, v, **options, impl=impl)
    truth = hopfield_hvp(query.double(), keys.double(), z.double(), v.double(), **options, impl="reference")
    assert found.dtype == torch.float32
    assert relative_error(found, truth) < 1e-6


@IMPLEMENTATIONS
def test_what_was_measured_may_be_given_and_changes_nothing(impl):
    query, keys, options = make("plain")
    z, v = vectors(query, 3, 4)
    _, mean, logsumexp = written_out(z, query, keys, **options)
    found = hopfield_hvp(query, keys, z, v, **options, mean=mean, logsumexp=logsumexp, impl=impl)
    torch.testing.assert_close(found, hopfield_hvp(query, keys, z, v, **options, impl=impl), rtol=1e-12, atol=1e-13)
