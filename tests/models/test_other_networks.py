"""Recurrent networks as others write them: in `Equilibrium` they are their own loops, bit for bit."""

import pytest
import torch
from torch import nn

from implicit_attention import Equilibrium, PerSample, Shared


class Recursive(nn.Module):
    """Two levels, a carry, tokens as integers, rotary tables, a halting head (Wang et al., 2025)."""

    def __init__(self, dim=8, words=7, length=5):
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.low, self.high = (nn.TransformerEncoderLayer(dim, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.head, self.halt = nn.Linear(dim, words), nn.Linear(dim, 2)
        angle = torch.arange(float(length))[:, None] / 10 ** torch.arange(dim // 2)
        self.register_buffer("cos", angle.cos().repeat(1, 2))
        self.register_buffer("sin", angle.sin().repeat(1, 2))

    def turned(self, z, cos, sin):
        left, right = z.chunk(2, -1)
        return z * cos + torch.cat([-right, left], -1) * sin

    def cycle(self, carry, tokens, tables, padding, cycles):
        high, low = carry
        x = self.embed(tokens)
        for _ in range(cycles):
            low = self.low(self.turned(low + high + x, *tables), src_key_padding_mask=padding)
        return self.high(high + low, src_key_padding_mask=padding), low


class Level(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, carry, tokens, tables, padding, cycles):
        return self.net.cycle(carry, tokens, tables, padding, cycles)


def same(found, expected, parameters):
    """The same bits, and the same bits of the gradients."""
    assert len(found) == len(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    grads = [torch.autograd.grad(sum(t.square().sum() for t in part), parameters) for part in (found, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.fixture
def seeded():
    torch.manual_seed(0)


def arguments(net):
    tokens, padding = torch.randint(7, (5, 5)), torch.zeros(5, 5, dtype=torch.bool)
    padding[0, 3:] = True
    # As many samples as tokens: tables (N, D) look like (B, D).
    return tokens, padding, (net.cos, net.sin), torch.zeros(5, 5, 8)


def test_two_levels_with_integers_tables_masks_and_numbers(seeded):
    net = Recursive()
    tokens, padding, tables, zero = arguments(net)
    layer = Equilibrium(Level(net), event_ndim=2)
    found = layer(tokens, Shared(tables), PerSample(padding), 2, start=(zero, zero), steps=3)
    carry = zero, zero
    for _ in range(3):
        carry = net.cycle(carry, tokens, tables, padding, 2)
    same(found, carry, [p for p in net.parameters() if p not in {*net.head.parameters(), *net.halt.parameters()}])
    solved = layer(tokens, Shared(tables), PerSample(padding), 2, start=(zero, zero), on_failure="ignore")
    assert layer.last_solve.status.shape == (5,)
    assert solved[0].shape == zero.shape


def test_detached_carries_are_segments(seeded):
    net = Recursive()
    tokens, padding, tables, zero = arguments(net)
    layer, read = Equilibrium(Level(net), event_ndim=2), [*net.low.parameters(), *net.head.parameters()]
    given = tokens, Shared(tables), PerSample(padding), 2
    for high, _ in layer.segments(*given, count=3, steps=2, start=(zero, zero)):
        (net.head(high).square().mean() + net.halt(high[:, 0]).square().mean()).backward()
    ours = [parameter.grad.clone() for parameter in read]
    net.zero_grad()
    carry = zero, zero
    for _ in range(3):
        for _ in range(2):
            carry = net.cycle(carry, tokens, tables, padding, 2)
        (net.head(carry[0]).square().mean() + net.halt(carry[0][:, 0]).square().mean()).backward()
        carry = tuple(z.detach() for z in carry)
    for found, parameter in zip(ours, read, strict=True):
        assert torch.equal(found, parameter.grad)
