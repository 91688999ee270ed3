"""Sums over keys are evaluated in blocks of pairs where nothing differentiates them: the same numbers."""

import pytest
import torch

from implicit_attention.potentials import Entmax, NormalisedScores, Polynomial, masked_keys
from implicit_attention.testing.numerics import random

POTENTIALS = {
    "Polynomial": Polynomial,
    "NormalisedScores": NormalisedScores,
    "Entmax": Entmax,
    "Entmax of learned order": lambda keys, beta, **pairs: Entmax(
        keys, beta, alpha=torch.linspace(1.2, 1.8, keys.shape[-3], dtype=keys.dtype), **pairs
    ),
}
#: Leading axes of the keys under the states (2, 3, 24, 8), and shapes of a mask and a bias.
LEADS = [(2, 3), (1, 3), (2, 1), (1, 1)]
PAIRS = [(None, None), ((24, 20), None), (None, (2, 1, 24, 20)), ((3, 1, 20), (20,)), ((2, 3, 24, 20), (3, 24, 1))]


@pytest.mark.parametrize("name", POTENTIALS)
@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("pairs", PAIRS, ids=str)
def test_blocks_are_the_whole(name, lead, pairs, monkeypatch):
    keys, z = random(*lead, 20, 8), random(2, 3, 24, 8, seed=1)
    beta = 0.5 + torch.rand(lead[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask, bias = pairs
    given = {} if mask is None else {"mask": random(*mask, seed=2) > -0.5}
    given |= {} if bias is None else {"bias": random(*bias, seed=3)}
    phi = POTENTIALS[name](keys, beta, **given)
    expected = (phi.value(z), phi.mean(z), *phi.evaluate(z))
    blocks = []
    narrowed = masked_keys.MaskedKeys._narrowed
    monkeypatch.setattr(masked_keys.MaskedKeys, "_narrowed", lambda *args: blocks.append(args[1:]) or narrowed(*args))
    for size in (8 * 20, 24 * 20, 2 * 24 * 20):
        monkeypatch.setattr(masked_keys, "BLOCK", size)
        blocks.clear()
        found = (phi.value(z), phi.mean(z), *phi.evaluate(z))
        assert len(blocks) > 3
        for got, want in zip(found, expected, strict=True):
            # Torch takes powers by another loop where exponents lie otherwise in memory.
            tolerance = 1e-14 if name == "Entmax of learned order" else 0.0
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_what_is_differentiated_is_one_block(monkeypatch):
    monkeypatch.setattr(masked_keys, "BLOCK", 160)
    monkeypatch.setattr(masked_keys.MaskedKeys, "_narrowed", None)
    keys, z = random(2, 20, 8).requires_grad_(), random(2, 24, 8, seed=1)
    phi = Polynomial(keys, 0.5)
    phi.mean(z).sum().backward()
    assert keys.grad is not None
    torch.func.vjp(phi.mean, z)
    torch.vmap(Polynomial(keys.detach(), 0.5).mean)(z[None])
    # Rows in numbers that have other bits in other company.
    Polynomial(keys.detach(), 0.5).mean(random(2, 23, 8))


def test_potentials_that_hold_more_are_one_block(monkeypatch):
    class Own(Polynomial):
        pass

    monkeypatch.setattr(masked_keys, "BLOCK", 160)
    phi = Own(random(2, 20, 8), 0.5)
    phi.scale = torch.ones(2)
    monkeypatch.setattr(masked_keys.MaskedKeys, "_narrowed", None)
    assert phi.mean(random(2, 24, 8)).shape == (2, 24, 8)
