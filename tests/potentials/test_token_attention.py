"""The attention of the Energy Transformer: all tokens of a sample as queries and keys, with weights."""

import energy_transformer_truth as truth
import pytest
import torch

from implicit_attention.potentials import TokenAttention
from implicit_attention.testing.numerics import check_close, random
from implicit_attention.testing.potential import Allocations, PotentialContract

tensor = truth.BETA.new_tensor


class TestPerHead(PotentialContract):
    """States of two samples of three tokens; two heads of width 4."""

    selects = False
    # A sample is one problem: nothing is taken apart by rows.
    test_select_takes_rows = None

    def make(self, dtype):
        weights = (0.5 * random(2, 4, 5, seed=s, dtype=dtype) for s in (6, 7))
        return TokenAttention(*weights, torch.tensor([0.5, 1.2], dtype=dtype), exclude_self=True)


class TestMasked(TestPerHead):
    """One token of the second sample attends to none."""

    def make(self, dtype):
        mask = tensor([[[1, 0, 1], [1, 1, 0], [0, 1, 1]], [[1, 1, 0], [0, 0, 0], [1, 0, 1]]]).bool()
        weights = (0.5 * random(2, 4, 5, seed=s, dtype=dtype) for s in (6, 7))
        return TokenAttention(*weights, 0.8, mask=mask)


def written_out(attention, z):
    """Phi with all pairs at once."""
    count, beta = z.shape[-2], torch.as_tensor(attention.beta, dtype=z.dtype).expand(2)[:, None]
    keys, queries = (torch.einsum("hyd,...nd->...hny", w, z) for w in (attention.w_key, attention.w_query))
    may = torch.ones(count, count, dtype=torch.bool) if attention.mask is None else attention.mask
    may = may & ~torch.eye(count, dtype=torch.bool) if attention.exclude_self else may
    scores = (beta[..., None] * queries @ keys.mT).masked_fill(~may[..., None, :, :], -torch.inf)
    reads = may.any(-1)[..., None, :]
    return (scores.masked_fill(~reads[..., None], 0.0).logsumexp(-1) / beta * reads).sum((-1, -2))


@pytest.mark.parametrize("count", [6, 515], ids=["dense", "tiled"])
@pytest.mark.parametrize("mask", [None, "pairs", "samples"])
@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("beta", [0.9, tensor([0.6, 1.4])], ids=["number", "per head"])
def test_value_and_derivatives_are_those_of_all_pairs(count, mask, exclude, beta):
    given = {"pairs": random(count, count, seed=1) > 0, "samples": random(2, count, count, seed=2) > 0}.get(mask)
    if given is not None:
        given[..., 2, :] = False
    weights, size = [0.6 * random(2, 3, 5, seed=s) for s in (6, 7)], 6 / count
    attention = TokenAttention(*weights, beta, mask=given, exclude_self=exclude)
    x, v = random(2, count, 5, seed=3), size * random(2, count, 5, seed=4)
    z = x.clone().requires_grad_()
    expected = written_out(attention, z)
    (gradient,) = torch.autograd.grad(expected.sum(), z, create_graph=True)
    (product,) = torch.autograd.grad((gradient * v).sum(), z)
    check_close(attention.value(x), expected.detach(), 1e-11)
    check_close(attention.mean(x), gradient.detach(), 1e-11)
    check_close(tuple(attention.evaluate(x)), (expected.detach(), gradient.detach()), 1e-11)
    check_close(attention.covariance_product(x, v), product, 1e-11)
    linear, leaves = attention.linearize(x), [w.clone().requires_grad_() for w in weights]
    for _ in range(2):
        check_close(linear.product(v), product, 1e-11)
    mean = TokenAttention(*leaves, beta, mask=given, exclude_self=exclude).mean(x)
    check_close(linear.vjp_tensors(v)[:2], torch.autograd.grad(mean, leaves, v), 1e-10)
    # Recorded, to the second order.
    (again,) = torch.autograd.grad(attention.mean(z), z, v, create_graph=True)
    check_close(again, product, 1e-11)
    (third,) = torch.autograd.grad((again * v).sum(), z)
    (slow,) = torch.autograd.grad((attention.covariance_product(z, v) * v).sum(), z)
    check_close(third, slow, 1e-10)
    if given is not None:
        assert attention.probabilities(x)[..., 2, :].eq(0).all()


def test_a_masked_token_is_as_if_left_out():
    attention, z = truth.attention(), random(2, 5, 4, seed=1)
    exists = torch.arange(5) != 2
    masked, kept = truth.attention(mask=exists[:, None] & exists), z[:, exists]
    check_close(masked.value(z), attention.value(kept), 1e-12)
    check_close(masked.mean(z)[:, exists], attention.mean(kept), 1e-12)
    assert masked.mean(z)[:, 2].eq(0).all()
    # A single token without itself has no pull.
    alone, one = truth.attention(exclude_self=True), z[:, :1]
    for found in (alone.value(one), alone.mean(one), alone.covariance_product(one, one)):
        assert found.eq(0).all()


def test_of_many_tokens_no_tensor_of_all_pairs_is_made_or_kept():
    """600 tokens: all pairs of two heads are 720,000 numbers."""
    attention = TokenAttention(random(2, 3, 5, seed=6), random(2, 3, 5, seed=7), 0.2)
    z, v, saved = random(1, 600, 5, seed=1), random(1, 600, 5, seed=2), []
    with Allocations() as seen:
        attention.value(z), attention.mean(z), attention.evaluate(z), attention.covariance_product(z, v)
        linear = attention.linearize(z)
        linear.product(v), linear.vjp_tensors(v)
    assert 600 * 5 < seen.largest < 2 * 600 * 600
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        attention.mean(z.requires_grad_())
    assert max(saved) < 2 * 600 * 600
