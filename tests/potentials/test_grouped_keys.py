"""Keys that broadcast over leading axes of the queries: the same numbers as with copied keys, without the copies."""

import math

import pytest
import torch

from implicit_attention import AnchoredEnergy, LogSumExp, solve
from implicit_attention.testing.numerics import check_close, random
from implicit_attention.testing.potential import Allocations

GROUPED = pytest.mark.parametrize(
    ("batch", "lead"),
    [((2, 3, 4), (2, 3, 1)), ((2, 3, 4), (3, 1)), ((2, 3), (3,)), ((2,), ()), ((2, 3), ()), ((2, 3, 4), (2, 1, 4))],
)
COUNTS = pytest.mark.parametrize("count", [7, 70])  # without and with the flash kernels


def pair_options(form, batch, count):
    full = random(*batch, 5, count, seed=2)
    return {
        "padding": {"mask": full[..., :1, :] > 0},
        "causal": {"mask": torch.ones(5, count, dtype=torch.bool).tril()},
        "bias": {"bias": full},
        "mask and bias": {"mask": full[:1, ..., :] > -0.5, "bias": full[..., -1:, :]},
    }.get(form, {})


@GROUPED
@COUNTS
@pytest.mark.parametrize("form", ["plain", "beta", "padding", "causal", "bias", "mask and bias"])
def test_keys_broadcast_over_leading_axes(batch, lead, count, form):
    beta = random(*batch, seed=3).exp() if form == "beta" else 0.7
    keys, options = random(*lead, count, 6), pair_options(form, batch, count)
    z, v = random(*batch, 5, 6, seed=1), random(*batch, 5, 6, seed=4)
    shared = LogSumExp(keys, beta, **options)
    whole = LogSumExp(keys.expand(*batch, count, 6).contiguous(), beta, **options)
    ours, theirs = (
        (
            p.value(z),
            p.mean(z),
            *p.evaluate(z),
            p.covariance_product(z, v),
            p.probabilities(z),
            p.linearize(z).product(v),
        )
        for p in (shared, whole)
    )
    check_close(ours, theirs, 1e-12, 1e-13)
    by_keys, *by_others = shared.linearize(z).vjp_tensors(v)
    by_copies, *expected = whole.linearize(z).vjp_tensors(v)
    check_close((by_keys, *by_others), (by_copies.sum_to_size(keys.shape), *expected), 1e-12, 1e-13)


@GROUPED
@COUNTS
@pytest.mark.parametrize("form", ["plain", "padding", "causal"])
def test_keys_that_broadcast_are_not_copied(batch, lead, count, form):
    """64 dimensions and few queries: a copy of the keys along any folded axis would be the largest tensor."""
    keys = random(*lead, count, 64)
    mask = {"padding": random(*lead[:1], *(1,) * len(lead[1:]), 1, count) > -1}.get(form)
    mask = torch.ones(3, count, dtype=torch.bool).tril() if form == "causal" else mask
    potential, z = LogSumExp(keys, 0.7, mask=mask), random(*batch, 3, 64, seed=1)
    tracked = LogSumExp(keys.requires_grad_(), 0.7, mask=mask)
    with Allocations() as seen:
        for method in (potential.value, potential.mean, potential.evaluate, potential.probabilities):
            with torch.no_grad():
                method(z)
        linear = potential.linearize(z)
        linear.product(z)
        linear.vjp_tensors(z)
        torch.autograd.grad(tracked.mean(z), keys, z)
        if form != "causal":
            # With a mask of its own for each query, the kernels' gradient is a sum over samples.
            torch.autograd.grad(tracked.readout(z, keys), keys, z)
    # Zeros align rows.
    even = count + count % 2
    assert seen.largest <= max(64 * even * math.prod(lead), 64 * 3 * math.prod(batch), even * 3 * math.prod(batch))


LARGEST = {(2, 1, 1, 1, 128): 0, (64, 128): 0, (3, 1, 64, 128): 12, (2, 1, 1, 64, 128): 8, (2, 3, 4, 64, 128): 0}


@pytest.mark.parametrize(("shape", "largest"), LARGEST.items())
def test_masks_are_repeated_along_folded_axes_at_most(shape, largest):
    """z (2, 3, 4, 64, 6), keys (2, 3, 1, 128, 6): what is made of a mask for the kernels, in matrices (64, 128)."""
    bias = random(*shape)
    potential = LogSumExp(random(2, 3, 1, 128, 6), 0.7, bias=bias)
    with Allocations() as seen:
        potential.evaluate(random(2, 3, 4, 64, 6, seed=1))
    assert seen.largest <= max(largest * 64 * 128, bias.numel(), 2 * 3 * 4 * 64 * 6)


@pytest.mark.parametrize("shape", [(2, 3, 4), (3,)], ids=["grouped", "shared"])
@pytest.mark.parametrize("queries", [50, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_row_solved_alone_has_the_bits_it_has_among_others(shape, queries, dtype):
    """Rows that share keys are one product, whose number of rows must not change a row."""
    lead = (2, 3, 1) if len(shape) == 3 else ()
    keys, x = random(*lead, 96, 16, dtype=dtype), random(*shape, queries, 16, seed=1, dtype=dtype)
    beta = random(3, 4 if lead else 1, seed=2, dtype=dtype).exp() if lead else 0.5
    potential = LogSumExp(keys, beta)
    whole = solve(AnchoredEnergy(potential, x, 0.3), x)
    for rows in (slice(0, 1), slice(7, 40), slice(queries - 2, None)):
        alone = solve(AnchoredEnergy(potential, x[..., rows, :], 0.3), x[..., rows, :])
        assert torch.equal(alone.value, whole.value[..., rows, :])
        assert torch.equal(alone.num_steps, whole.num_steps[..., rows])
