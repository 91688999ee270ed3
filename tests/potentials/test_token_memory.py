"""A potential of single rows as one of all tokens of a sample."""

import energy_transformer_truth as truth
import pytest
import torch

from implicit_attention import AnchoredEnergy, LogSumExp, solve
from implicit_attention.potentials import Entmax, Polynomial, Potential, SelfAttention, TokenMemory
from implicit_attention.testing.numerics import random
from implicit_attention.testing.potential import PotentialContract

G = truth.norm().mean(truth.TOKENS)


class TestSoftmax(PotentialContract):
    selects = False
    test_select_takes_rows = None

    def keys(self, dtype: torch.dtype) -> torch.Tensor:
        return random(7, 5, seed=4, dtype=dtype)

    def make(self, dtype: torch.dtype) -> TokenMemory:
        mask = torch.tensor([[True], [False], [True]])
        return TokenMemory(LogSumExp(self.keys(dtype), 0.7, mask=mask.expand(3, 7)))


class TestRectified(TestSoftmax):
    def make(self, dtype: torch.dtype) -> TokenMemory:
        return TokenMemory(Polynomial(self.keys(dtype), 0.7))


class TestSparse(TestSoftmax):
    def make(self, dtype: torch.dtype) -> TokenMemory:
        return TokenMemory(Entmax(self.keys(dtype), 0.7))


@pytest.mark.parametrize(
    ("memory", "energy"),
    [
        (Polynomial(truth.MEMORIES, 1.0), -6.237524245484),
        (LogSumExp(truth.MEMORIES, 0.9), -7.105528543152),
    ],
    ids=["rectified", "softmax"],
)
def test_numbers_of_the_ground_truth(memory: Potential, energy: float) -> None:
    assert abs(float(-TokenMemory(memory).value(G)) - energy) < 1e-9


def test_a_padded_token_of_the_ground_truth() -> None:
    """Token 2 is neither query nor key of the attention, and reads no memory."""
    exists = torch.tensor([True, True, False])
    attention = truth.attention(mask=exists[:, None] & exists)
    memory = TokenMemory(Polynomial(truth.MEMORIES, 1.0, mask=exists[:, None]))
    phi = attention + memory
    assert abs(float(-phi.value(G)) + 14.224269940289) < 1e-9
    assert torch.equal(phi.mean(G)[2], torch.zeros(4, dtype=torch.float64))


def test_it_adds_to_potentials_of_all_tokens() -> None:
    keys, tokens = random(6, 5, seed=1), random(2, 4, 5, seed=2)
    phi = 0.2 * SelfAttention(0.5) + 0.3 * TokenMemory(LogSumExp(keys, 0.5))
    assert phi.event_ndim == 2
    expected = 0.2 * SelfAttention(0.5).mean(tokens) + 0.3 * LogSumExp(keys, 0.5).mean(tokens)
    torch.testing.assert_close(phi.mean(tokens), expected)
    assert solve(AnchoredEnergy(phi, tokens, anchor=0.5), tokens).converged.tolist() == [True, True]


def test_what_its_part_knows_it_knows() -> None:
    convex, memory = TokenMemory(LogSumExp(random(6, 5, seed=1), 0.5)), LogSumExp(random(6, 5, seed=1), 0.5)
    assert convex.convex
    assert torch.equal(convex.lipschitz(), memory.lipschitz())
    assert convex.bounded_below(1.0) is True
    assert TokenMemory(Polynomial(3 * random(6, 5, seed=1), 1.0)).bounded_below(1.0) is False
