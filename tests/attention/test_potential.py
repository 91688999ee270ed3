"""Potentials of one's own in `equilibrium_attention` and in memories."""

from functools import partial

import pytest
import torch

from implicit_attention import (
    AnchoredEnergy,
    LogSumExp,
    MemoryLookup,
    SquaredScores,
    UnsupportedImplementation,
    equilibrium_attention,
    solve,
)
from implicit_attention.potentials import Softmax1


def random(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("pairs", ["none", "mask", "bias", "causal"])
def test_the_function_solves_and_reads_out_by_the_potential(pairs):
    query, key, value = (random(2, 3, n, d, seed=d).requires_grad_() for n, d in ((4, 5), (6, 5), (6, 7)))
    mask, given = None, {}
    if pairs == "mask":
        mask = random(4, 6, seed=1) > 0
        given = {"mask": mask}
    elif pairs == "bias":
        mask = random(3, 1, 6, seed=1)
        given = {"bias": mask}
    elif pairs == "causal":
        given = {"mask": torch.ones(4, 6, dtype=torch.bool).tril()}
    output = equilibrium_attention(
        query, key, value, mask, is_causal=pairs == "causal", scale=0.4, potential=Softmax1, max_steps=100
    )
    phi = Softmax1(key, 0.4, **given)
    expected = phi.readout(solve(AnchoredEnergy(phi, query, 0.5), query.detach()).value, value)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    found, truth = (torch.autograd.grad(out.square().sum(), (query, key, value)) for out in (output, expected))
    torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-9)
    other = equilibrium_attention(query, key, value, mask, is_causal=pairs == "causal", scale=0.4)
    assert not torch.allclose(output, other)


def test_what_makes_no_potential_is_refused():
    x = torch.eye(3)
    with pytest.raises(TypeError, match="`potential` must make a Potential"):
        equilibrium_attention(x, x, x, potential=lambda keys, beta: None)
    with pytest.raises(UnsupportedImplementation, match="SquaredScores has no attention weights"):
        equilibrium_attention(x, x, x, potential=partial(SquaredScores))


def test_a_memory_asks_the_potential_that_it_is_given():
    patterns, targets = 2 * random(6, 4, seed=1), random(6, 2, seed=2)
    held = [MemoryLookup(4, beta=2.0, similarity="dot", **given).double() for given in ({}, {"potential": Softmax1})]
    for memory in held:
        memory.store(patterns, targets)
    query = patterns[:3] + 0.3 * random(3, 4, seed=3)
    phi = Softmax1(patterns, 2.0)
    state = solve(AnchoredEnergy(phi, query, 0.0), query).value
    torch.testing.assert_close(held[1].retrieve(query), state, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(held[1](query), phi.readout(state, targets), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(held[1].energy(query), AnchoredEnergy(phi, query, 0.0).energy(query))
    assert not torch.equal(held[0].retrieve(query), held[1].retrieve(query))


def test_a_memory_with_a_potential_needs_a_temperature_and_may_be_empty():
    with pytest.raises(ValueError, match="`beta` must be a number or 'learned' with potential="):
        MemoryLookup(4, potential=LogSumExp)
    empty = MemoryLookup(4, beta=1.0, potential=LogSumExp)
    assert torch.equal(empty.retrieve(torch.ones(2, 4)), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="`store` must be called"):
        MemoryLookup(4, beta=1.0).retrieve(torch.ones(2, 4))
