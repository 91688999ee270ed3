"""Potentials of one's own in `equilibrium_attention` and in memories."""

from functools import partial

import pytest
import torch

from implicit_attention import (
    AnchoredEnergy,
    EnergyTransformer,
    ImplicitAttention,
    LogSumExp,
    MemoryLookup,
    Potential,
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


class Own(Potential):
    """A potential written elsewhere: a mean of the keys' logarithms, with beta as a layer gives it."""

    def __init__(self, keys, beta, *, mask=None, bias=None):
        self.keys, self.beta, self.mask = keys, torch.as_tensor(beta, dtype=keys.dtype), mask

    def columns(self):
        return self.beta[..., None, None]

    def value(self, z):
        scores = torch.log1p((self.columns() * (z @ self.keys.mT)).square())
        return (scores if self.mask is None else scores.where(self.mask, 0.0)).mean(-1)


class WithoutBeta(Own):
    def __init__(self, keys, *, mask=None, bias=None):
        super().__init__(keys, 1.0, mask=mask)


class WithoutMask(Own):
    def __init__(self, keys, beta):
        super().__init__(keys, beta)


class OfOneNumber(Own):
    def columns(self):
        return self.beta


class OfAFloat(Own):
    def __init__(self, keys, beta, *, mask=None, bias=None):
        super().__init__(keys, float(beta), mask=mask)


class Broken(Own):
    def __init__(self, keys, beta, *, mask=None, bias=None):
        super().__init__(keys, beta, mask=mask)
        self.named(keys)

    def named(self):
        pass


class Lost(Broken):
    def named(self, keys):
        raise RuntimeError("no such shape in the file")


def remembered(make, ask):
    memory = MemoryLookup(6, potential=make, beta=1.0)
    memory.store(torch.eye(6))
    return ask(memory)


#: What makes a user's potential, with the argument that holds it and whether the call has a mask.
MAKERS = {
    "layer": ("potential", False, lambda make: ImplicitAttention(6, 2, potential=make, readout="state")(X)),
    "explicit": (
        "potential",
        False,
        lambda make: ImplicitAttention(6, 2, potential=make, readout="state")(X, max_steps=0),
    ),
    "masked layer": (
        "potential",
        True,
        lambda make: ImplicitAttention(6, 2, potential=make, readout="state")(X, key_mask=torch.ones(2, 5) > 0),
    ),
    "causal layer": (
        "potential",
        True,
        lambda make: ImplicitAttention(6, 2, potential=make, readout="state", causal=True)(X),
    ),
    "function": ("potential", True, lambda make: equilibrium_attention(X, X, X, is_causal=True, potential=make)),
    "memory": ("potential", False, lambda make: remembered(make, lambda memory: memory.retrieve(X))),
    "energy of a memory": ("potential", False, lambda make: remembered(make, lambda memory: memory.energy(X))),
    "token energies": (
        "memory",
        True,
        lambda make: EnergyTransformer(6, 2, 3, 7, memory=make)(X, key_mask=torch.ones(2, 5) > 0),
    ),
}
X = random(2, 5, 6, seed=4).float()


@pytest.mark.parametrize("door", MAKERS)
def test_a_constructor_that_is_not_of_the_protocol_is_named_with_it(door):
    argument, masked, ask = MAKERS[door]
    taken = rf"`{argument}` must take \(\w+, beta, mask=.*\), got "
    with pytest.raises(TypeError, match=rf"{taken}WithoutBeta\(keys, \*, .*\); .* beta is a number, or .* \(H,\)"):
        ask(WithoutBeta)
    if masked:
        with pytest.raises(TypeError, match=rf"{taken}WithoutMask\(keys, beta\); "):
            ask(WithoutMask)
    elif door != "memory":
        ask(WithoutMask)
    if argument == "potential":
        with pytest.raises(TypeError, match=rf"{taken}LogSumExp\(keys \(5, 4\), beta 1, float32\); pass a class"):
            ask(LogSumExp(torch.ones(5, 4), 1.0))


@pytest.mark.parametrize("door", MAKERS)
def test_what_a_constructor_raises_of_its_own_is_left_alone(door):
    ask = MAKERS[door][2]
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        ask(Broken)
    with pytest.raises(RuntimeError, match=r"^no such shape in the file$"):
        ask(Lost)


@pytest.mark.parametrize("make", [OfOneNumber, OfAFloat, partial(OfOneNumber)], ids=["value", "constructor", "partial"])
@pytest.mark.parametrize("door", ["layer", "explicit", "masked layer", "causal layer"])
def test_a_potential_that_reads_one_beta_for_all_heads_is_told_its_shape(make, door):
    given = r"keys \(2, 2, 5, 3\), beta \(2,\), .*states \(2, 2, 5, 3\)"
    with pytest.raises(
        ValueError, match=rf"`potential` must take {given}, got .*Of.*, which raised: .*; beta has one "
    ):
        MAKERS[door][2](make)
    assert MAKERS[door][2](Own).shape == (2, 5, 6)
