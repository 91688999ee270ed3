"""Causal sequences by the place of the first query: the numbers of a mask, which is not written."""

import pytest
import torch

from implicit_attention import LogSumExp
from implicit_attention.potentials import as_distribution
from implicit_attention.testing.numerics import check_derivatives
from implicit_attention.testing.potential import Allocations

# Keys below and above the number from which torch's kernels are used.
COUNTS = (9, 80)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def lower(first, rows, count):
    return torch.arange(count) <= torch.arange(first, first + rows)[:, None]


def both(shape, count, first, dtype=torch.float64, of_keys=None, **options):
    """The potential by its offset and by a mask, with states and values."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_()

    lead, rows = shape[:-1], shape[-1]
    of_keys = lead if of_keys is None else of_keys
    keys, z, values = drawn(*of_keys, count, 8), drawn(*lead, rows, 8), drawn(*of_keys, count, 5)
    by_offset = LogSumExp(keys, 0.7, query_offset=first)
    return by_offset, LogSumExp(keys, 0.7, mask=lower(first, rows, count)), z, values


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("rows", "first"), [(1, 0), (1, 8), (5, 0), (9, 0), (5, 3), (80, 0), (70, 10), (30, 8), (90, 7)]
)
@pytest.mark.parametrize(("lead", "of_keys"), [((), ()), ((2, 3), (2, 3)), ((2, 3), (2, 1)), ((2,), ())])
def test_all_numbers_are_those_of_the_mask(lead, of_keys, rows, first, count, dtype):
    by_offset, by_mask, z, values = both((*lead, rows), count, first, dtype, of_keys)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for name in ("value", "mean", "probabilities"):
        torch.testing.assert_close(getattr(by_offset, name)(z), getattr(by_mask, name)(z), **close)
    u = torch.randn_like(z)
    with torch.no_grad():
        torch.testing.assert_close(by_offset.evaluate(z), by_mask.evaluate(z), **close)
        torch.testing.assert_close(by_offset.covariance_product(z, u), by_mask.covariance_product(z, u), **close)
        ours, theirs = by_offset.linearize(z), by_mask.linearize(z)
        torch.testing.assert_close(ours.product(u), theirs.product(u), **close)
        torch.testing.assert_close(ours.vjp_tensors(u)[0], theirs.vjp_tensors(u)[0], **close)
        torch.testing.assert_close(by_offset.readout(z, values), by_mask.readout(z, values), **close)
        pair = [each.readout_with_logsumexp(z, values) for each in (by_offset, by_mask)]
        torch.testing.assert_close(*pair, **close)
    inputs, weight = (z, by_offset.keys, values), torch.arange(5, dtype=dtype)
    for again in (False, True):
        found = [
            torch.autograd.grad((p.readout(z, values) * weight).sum(), inputs, create_graph=again)
            for p in (by_offset, by_mask)
        ]
        torch.testing.assert_close(*found, **close)


@pytest.mark.parametrize("count", COUNTS)
def test_gradients_of_gradients_are_exact(count):
    by_offset, _, z, values = both((3,), count, count - 4)
    # The gradient of the read-out to all of keys and values would take a minute.
    check_derivatives(lambda z: by_offset.readout(z, values[:, :2]), (z,))


@pytest.mark.parametrize("count", COUNTS)
def test_what_a_query_does_not_reach_does_not_reach_it(count):
    by_offset, _, z, values = both((5,), count, 2)
    spoiled = by_offset.keys.detach().clone()
    spoiled[5] = torch.nan
    potential = LogSumExp(spoiled, 0.7, query_offset=2)
    spoiled_values = values.detach().clone()
    spoiled_values[6] = torch.inf
    clean = by_offset.mean(z), by_offset.readout(z, values)
    found = potential.mean(z), potential.readout(z, spoiled_values)
    for ours, expected, lost in zip(found, clean, (3, 3), strict=True):
        assert ours[lost:].isnan().any(-1).all()
        torch.testing.assert_close(ours[:lost], expected[:lost], rtol=1e-12, atol=1e-12)
    only_values = by_offset.readout(z, spoiled_values)
    torch.testing.assert_close(only_values[:4], clean[1][:4], rtol=1e-12, atol=1e-12)
    assert not only_values[4].isfinite().all()


def test_restriction_to_some_queries_keeps_their_places():
    by_offset, by_mask, z, _ = both((2, 9), 20, 4)
    index = torch.tensor([[8, 0, 3], [1, 1, 7]])
    rows = z.gather(1, index[..., None].expand(-1, -1, 8))
    torch.testing.assert_close(by_offset.select(index).mean(rows), by_mask.select(index).mean(rows))


@pytest.mark.parametrize("first", [0, 100])
def test_no_tensor_of_pairs_is_made(first):
    rows, count = 300, 300 + first
    keys, z = torch.randn(count, 8, requires_grad=True), torch.randn(rows, 8, requires_grad=True)
    potential = LogSumExp(keys, 0.5, query_offset=first)
    with Allocations() as seen:
        potential.readout(z, keys).sum().backward()
    assert seen.largest <= 2 * count * 8


def test_distributions_over_the_keys_that_a_query_reaches():
    by_offset, by_mask, z, _ = both((5,), 9, 2)
    ours, theirs = (as_distribution(p, tilt=z.detach()) for p in (by_offset, by_mask))
    x = torch.randn(5, 8, dtype=torch.float64)
    torch.testing.assert_close(ours.log_prob(x), theirs.log_prob(x))
