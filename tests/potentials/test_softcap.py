"""SoftcapLogSumExp: the potential contract, capped attention as read-out, and what capping changes."""

import math

import pytest
import torch

from implicit_attention import AnchoredEnergy, Anderson, Implicit, LogSumExp, solve
from implicit_attention.diagnostics import effective_keys
from implicit_attention.linear import CG
from implicit_attention.potentials import SoftcapLogSumExp
from implicit_attention.testing.numerics import random
from implicit_attention.testing.potential import PotentialContract

KEYS = (2, 7, 5)
CAP = 1.5  # below most scores, so that it is felt


def empty_row() -> torch.Tensor:
    mask = random(2, 3, 7, seed=9) > 0
    mask[0, 1] = False
    return mask


class TestPlain(PotentialContract):
    def make(self, dtype):
        return SoftcapLogSumExp(random(*KEYS, dtype=dtype), 0.7, CAP)


class TestTensorBeta(PotentialContract):
    def make(self, dtype):
        beta = torch.tensor([0.5, 1.3], dtype=torch.float64).to(dtype)
        return SoftcapLogSumExp(random(*KEYS, dtype=dtype), beta, CAP)


class TestMaskAndBias(PotentialContract):
    def make(self, dtype):
        bias = random(2, 3, 7, seed=4, dtype=dtype)
        return SoftcapLogSumExp(random(*KEYS, dtype=dtype), 0.7, CAP, mask=empty_row(), bias=bias)


def written_out(z, keys, values, beta, cap):
    """Capped attention as its authors write it."""
    scores = z @ keys.mT * beta
    return (cap * torch.tanh(scores / cap)).softmax(-1) @ values


def test_the_read_out_is_capped_attention():
    z, keys, values = random(2, 3, 5), random(2, 7, 5, seed=1), random(2, 7, 4, seed=2)
    potential = SoftcapLogSumExp(keys, 0.9, CAP)
    torch.testing.assert_close(potential.readout(z, values), written_out(z, keys, values, 0.9, CAP), rtol=1e-12, atol=0)
    # Its mean is not that read-out over the keys, whose Jacobian is not symmetric.
    assert (potential.mean(z) - potential.readout(z, keys)).abs().max() > 0.05


def test_a_large_cap_is_no_cap():
    z, keys = random(2, 3, 5), random(2, 7, 5, seed=1)
    capped, plain = SoftcapLogSumExp(keys, 0.9, 1e7), LogSumExp(keys, 0.9)
    torch.testing.assert_close(capped.value(z), plain.value(z), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(capped.mean(z), plain.mean(z), rtol=1e-12, atol=1e-12)


def test_the_cap_bounds_how_far_weights_differ():
    # Scores between -cap and cap: no weight is more than exp(2 cap) times another.
    potential = SoftcapLogSumExp(random(2, 50, 5, seed=1), 100.0, 0.5)
    weights = potential.probabilities(random(2, 3, 5))
    assert (weights.amax(-1) / weights.amin(-1)).max() <= math.e + 1e-9
    assert effective_keys(potential, random(2, 3, 5)).min() > 40


def test_equilibria_are_stationary_and_minima():
    query, keys = random(2, 3, 5), 2 * random(2, 7, 5, seed=1)
    energy = AnchoredEnergy(SoftcapLogSumExp(keys, 0.9, CAP), query, 0.3)
    solution = solve(energy, query)
    assert solution.converged.all()
    z = solution.value.requires_grad_()
    gradient = torch.autograd.grad(energy.energy(z).sum(), z)[0]
    assert gradient.norm(dim=-1).max() <= solution.tolerance.max()


@pytest.mark.slow
def test_gradients_of_an_equilibrium():
    query, keys = random(2, 2, 3).requires_grad_(), random(2, 4, 3, seed=1).requires_grad_()
    beta = torch.tensor([0.5, 0.8], dtype=torch.float64, requires_grad=True)

    def state(query, keys, beta):
        energy = AnchoredEnergy(SoftcapLogSumExp(keys, beta, CAP), query, 0.5)
        tight = Anderson(rtol=1e-13, atol=1e-13)
        return solve(energy, query.detach(), solver=tight, adjoint=Implicit(CG(rtol=1e-12))).value

    assert torch.autograd.gradcheck(state, (query, keys, beta))
    assert torch.autograd.gradgradcheck(state, (query, keys, beta))


def test_rows_can_be_selected():
    potential = SoftcapLogSumExp(random(*KEYS), 0.7, CAP, mask=random(2, 3, 7, seed=9) > 0)
    index = torch.tensor([[2, 0], [1, 1]])
    z = random(2, 3, 5)
    rows = potential.select(index)
    chosen = z.gather(-2, index[..., None].expand(2, 2, 5))
    expected = potential.mean(z).gather(-2, index[..., None].expand(2, 2, 5))
    torch.testing.assert_close(rows.mean(chosen), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("cap", [0.0, -1.0, float("inf")])
def test_a_cap_is_positive_and_finite(cap):
    with pytest.raises(ValueError, match="`cap` must be > 0"):
        SoftcapLogSumExp(random(*KEYS), 0.7, cap)
