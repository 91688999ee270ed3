"""SelfAttention, the potential of all tokens of a sample together: the contract, its bounds, sums with others."""

import math

import pytest
import torch

from implicit_attention import AnchoredEnergy, Anderson, LogSumExp, Potential, SelfAttentionEnergy, solve
from implicit_attention.potentials import SelfAttention
from implicit_attention.testing.energy import EnergyContract
from implicit_attention.testing.numerics import random
from implicit_attention.testing.potential import PotentialContract


def tensors(dtype):
    """Beta, mask and bias, shaped to break wrong axes; one token of the second sample attends to nothing."""
    mask = random(2, 3, 3, seed=9) > -0.5
    mask[1, 2] = False
    return torch.tensor([0.3, 0.5], dtype=dtype), {"mask": mask, "bias": random(2, 3, 3, seed=4, dtype=dtype)}


class TestPlain(PotentialContract):
    selects = False

    def make(self, dtype):
        return SelfAttention(torch.tensor(0.6, dtype=dtype))


class TestNested(PotentialContract):
    selects = False

    def make(self, dtype):
        beta, masks = tensors(dtype)
        turned = SelfAttention(0.4).of(0.5 * random(2, 4, 5, seed=2, dtype=dtype))
        return torch.tensor([0.5, 1.5], dtype=dtype) * (SelfAttention(beta, **masks) + 0.3 * turned)


class Confinement(Potential):
    """-|X|^4/4 of a sample, by its value alone."""

    event_ndim = 2

    def value(self, z):
        return -z.square().sum((-1, -2)).square() / 4


class TestEnergyOfASum(EnergyContract):
    def make(self):
        beta, masks = tensors(torch.float64)
        phi = SelfAttention(beta, **masks) + 0.1 * SelfAttention(1.0)
        return AnchoredEnergy(phi, random(2, 3, 5, seed=3), torch.tensor([0.7, 0.8]).double())


class TestEnergyWithAPartByItsValue(EnergyContract):
    def make(self):
        return AnchoredEnergy(SelfAttention(0.3) + 0.01 * Confinement(), random(2, 3, 5, seed=3), 0.7)


def test_the_energy_of_self_attention_is_anchored_like_any_other():
    field, x = random(2, 3, 5, seed=3), random(2, 3, 5)
    beta, masks = tensors(torch.float64)
    short = SelfAttentionEnergy(field, beta, 0.4, weight=0.6, **masks)
    long = AnchoredEnergy(0.6 * SelfAttention(beta, **masks), field, 0.4)
    assert torch.equal(short.energy(x), long.energy(x))
    assert torch.equal(short.gradient(x), long.gradient(x))
    assert [name for name, _ in short.named_tensors()][-1] == "field"
    plain, weighted = SelfAttentionEnergy(field, beta, **masks), SelfAttentionEnergy(field, beta, weight=0.6, **masks)
    assert torch.equal(plain.probabilities(x), weighted.probabilities(x))


def test_the_value_is_a_sum_over_tokens():
    x = random(2, 3, 5)
    beta, masks = tensors(torch.float64)
    phi, samples = SelfAttention(beta, **masks), zip(x, beta, *masks.values(), strict=True)
    each = [(LogSumExp(one, float(b), mask=mask, bias=bias), one) for one, b, mask, bias in samples]
    torch.testing.assert_close(phi.value(x), torch.stack([own.value(one).sum() for own, one in each]))
    torch.testing.assert_close(phi.probabilities(x), torch.stack([own.probabilities(one) for own, one in each]))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_bounded_below_up_to_one_over_one_plus_root_n(count):
    limit = 1 / (1 + math.sqrt(count))
    masked = SelfAttention(1.0, mask=torch.ones(count, count, dtype=torch.bool))
    assert (masked.bounded_below(0.99 * limit), masked.bounded_below(1.01 * limit)) == (True, None)
    # Without mask the number of tokens is not known, but nobody has less than one.
    assert (SelfAttention(1.0).bounded_below(0.49), SelfAttention(1.0).bounded_below(0.51)) == (None, False)
    assert (2 * masked).bounded_below(0.49 * limit)


def test_gradients_of_an_equilibrium_of_a_sum():
    field, w = random(2, 3, 4, seed=3).requires_grad_(), (0.4 * random(4, 4)).requires_grad_()
    weight = torch.tensor([0.2, 0.3], dtype=torch.float64, requires_grad=True)

    def state(field, w, weight):
        phi = weight * (SelfAttention(0.4) + SelfAttention(0.6).of(w))
        tight = Anderson(rtol=0.0, atol=1e-13, max_steps=500)
        return solve(AnchoredEnergy(phi, field, 0.5), field.detach(), solver=tight).value

    assert torch.autograd.gradcheck(state, (field, w, weight), fast_mode=True)
    assert torch.autograd.gradgradcheck(state, (field, w, weight), fast_mode=True)
