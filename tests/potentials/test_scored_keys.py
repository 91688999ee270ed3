"""What all sums over keys share: read-outs that merge, restriction to rows, and what counts as attention."""

import pytest
import torch

from implicit_attention import LogSumExp, SquaredScores
from implicit_attention.potentials import (
    Exponential,
    GaussianMixture,
    NormalisedScores,
    Polynomial,
    ReadsOut,
    SelfAttention,
    SoftcapLogSumExp,
    Softmax1,
)
from implicit_attention.testing.numerics import check_close, check_derivatives, random
from implicit_attention.testing.potential import Allocations

KINDS = pytest.mark.parametrize(
    "make", [LogSumExp, lambda k, b, **o: SoftcapLogSumExp(k, b, 1.5, **o)], ids=["log-sum-exp", "capped"]
)
COUNTS = pytest.mark.parametrize("count", [8, 140], ids=["few", "many"])


def problem(count, dtype=torch.float64):
    """Keys, values, beta, mask and bias: one query attends to the first half only, one to nothing."""
    keys, values = random(2, count, 5, dtype=dtype), random(2, count, 4, seed=1, dtype=dtype)
    beta, mask = torch.tensor([0.5, 1.3], dtype=dtype), random(2, 3, count, seed=9) > -1
    mask[0, 1], mask[1, 2, count // 2 :] = False, False
    return keys, values, beta, mask, random(3, count, seed=4, dtype=dtype)


@KINDS
@COUNTS
def test_two_halves_of_the_keys_merge_to_the_whole(make, count):
    keys, values, beta, mask, bias = problem(count)
    z, half = random(2, 3, 5, seed=2), count // 2
    whole = make(keys, beta, mask=mask, bias=bias)
    parts = [
        make(keys[:, part], beta, mask=mask[..., part], bias=bias[:, part]).readout_with_logsumexp(z, values[:, part])
        for part in (slice(0, half), slice(half, None))
    ]
    outs, logs = (torch.stack(part) for part in zip(*parts, strict=True))
    # A query that attends to nothing anywhere.
    out, logsumexp = (logs.softmax(0).nan_to_num(0.0)[..., None] * outs).sum(0), logs.logsumexp(0)
    check_close(out, whole.readout(z, values), 1e-12)
    check_close((out, logsumexp), tuple(whole.readout_with_logsumexp(z, values)), 1e-12)
    assert logsumexp[0, 1] == -torch.inf
    kept = logsumexp > -torch.inf
    check_close((logsumexp / beta[:, None])[kept], whole.value(z)[kept], 1e-12)


@KINDS
def test_both_have_derivatives_of_every_order(make):
    keys, values, beta, mask, bias = problem(8)
    mask[0, 1, 0] = True  # finite differences know no -inf
    tensors = [t.requires_grad_() for t in (random(2, 3, 5, seed=2), keys, values, beta, bias)]
    read = lambda z, k, v, b, bias: make(k, b, mask=mask, bias=bias).readout_with_logsumexp(z, v)  # noqa: E731
    check_derivatives(read, tensors, fast_mode=True)


@KINDS
@COUNTS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_read_out_in_float32(make, count, dtype):
    keys, values, beta, mask, bias = problem(count, dtype)
    z = random(2, 3, 5, seed=2, dtype=dtype)
    narrow = make(keys, beta, mask=mask, bias=bias)
    wide = make(keys.float(), beta.float(), mask=mask, bias=bias.float())
    both = (narrow, dtype), (wide, torch.float32)
    found, expected = ([*p.readout_with_logsumexp(z.to(t), values.to(t))] for p, t in both)
    if count == 8:
        # Without torch's kernels, the output alone too.
        found.append(narrow.readout(z, values))
        expected.append(wide.readout(z.float(), values.float()))
    for got, exact in zip(found, expected, strict=True):
        assert torch.equal(got, exact.to(dtype))


def test_without_derivatives_the_weights_are_not_stored():
    keys, z = random(2, 3, 128, 5), random(2, 3, 128, 5, seed=1)
    with Allocations() as seen:
        LogSumExp(keys, 0.7).readout_with_logsumexp(z, random(2, 3, 128, 9, seed=2))
    assert seen.largest < 2 * 3 * 128 * 128


def test_a_kernel_without_second_derivatives_is_not_asked_where_values_alone_require_grad():
    potential, z = LogSumExp(random(70, 2), 0.7), random(2, 2, seed=2)
    values = random(70, 1, seed=1).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda v: potential.readout_with_logsumexp(z, v.sin())[0], values)


# Rows.


def test_the_same_rows_of_every_batch_entry_leave_a_mask_as_small_as_it_is():
    mask, bias = random(1, 9, 7) > 0, random(7)
    potential = LogSumExp(random(6, 7, 5), 0.7, mask=mask, bias=bias)
    rows = torch.tensor([4, 0, 4])
    chosen = potential.select(rows.expand(6, 3))
    assert torch.equal(chosen.mask, mask[:, rows])
    assert chosen.bias is bias
    other = torch.stack([rows, rows.flip(0)] * 3)
    assert torch.equal(potential.select(other).mask, torch.stack([mask[0, r] for r in other]))
    assert potential.select(rows[:0].expand(6, 0)).mask.shape == (1, 0, 7)
    plain = LogSumExp(random(6, 7, 5), 0.7)
    assert plain.select(other) is plain


# What counts as attention.


def test_what_has_weights_and_a_read_out():
    keys = random(7, 5)
    for potential in (LogSumExp(keys, 1.0), SoftcapLogSumExp(keys, 1.0, 2.0), Softmax1(keys, 1.0)):
        assert isinstance(potential, ReadsOut)
        assert issubclass(type(potential), ReadsOut)
    mixture = GaussianMixture(keys, torch.eye(5).double(), torch.zeros(7).double())
    # A sum or a multiple of potentials has no weights of its own.
    sums = [kind(keys, 1.0) for kind in (SquaredScores, NormalisedScores, Polynomial, Exponential)]
    for potential in (*sums, mixture, SelfAttention(1.0), 2 * LogSumExp(keys, 1.0)):
        assert not isinstance(potential, ReadsOut)

    class Changed(LogSumExp):
        def value(self, z):
            return 2 * super().value(z)

    assert not issubclass(Changed, ReadsOut)
    assert Changed.readout_with_logsumexp is None
    assert not isinstance(Changed(keys, 1.0), ReadsOut)


def test_a_family_of_ones_own_is_a_function_of_the_scores():
    """A subclass of the family that computes something else loses what the family says again."""

    class Shifted(LogSumExp):
        readout = LogSumExp.readout

        def value(self, z):
            return 2 * super().value(z)

    keys, values, z = random(2, 7, 5), random(2, 7, 4, seed=1), random(2, 3, 5, seed=2)
    mine, once = Shifted(keys, 0.5), LogSumExp(keys, 0.5)
    torch.testing.assert_close(mine.mean(z), 2 * once.mean(z))
    torch.testing.assert_close(mine.readout(z, values), once.readout(z, values))

    class Changed(Shifted):
        def value(self, z):
            return super().value(z).square()

    assert Changed.readout is None
