"""AnchoredEnergy over every potential: the energy contract, its bounds, its arguments."""

import pytest
import torch

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    Broyden,
    LogSumExp,
    Picard,
    Potential,
    SquaredScores,
    solve,
)
from implicit_attention.testing.energy import EnergyContract
from implicit_attention.testing.numerics import random


class TestLogSumExp(EnergyContract):
    def make(self):
        return AnchoredEnergy(LogSumExp(random(2, 7, 5), 0.6), random(2, 3, 5, seed=3), 0.3)


class TestTensorAnchor(EnergyContract):
    def make(self):
        anchor = torch.tensor([0.2, 0.9], dtype=torch.float64)
        beta = torch.tensor([0.5, 1.1], dtype=torch.float64)
        return AnchoredEnergy(LogSumExp(random(2, 7, 5), beta), random(2, 3, 5, seed=3), anchor)


class TestMasked(EnergyContract):
    def make(self):
        mask = random(2, 3, 7, seed=9) > 0
        mask[0, 1] = False
        potential = LogSumExp(random(2, 7, 5), 0.6, mask=mask, bias=random(2, 3, 7, seed=5))
        return AnchoredEnergy(potential, random(2, 3, 5, seed=3), 0.3)


class TestQuadratic(EnergyContract):
    def make(self):
        return AnchoredEnergy(SquaredScores(0.3 * random(2, 7, 5), 0.4), random(2, 3, 5, seed=3), 0.3)


class ValueOnly(Potential):
    def __init__(self, weights):
        self.weights = weights

    def value(self, z):
        return (z @ self.weights).square().log1p().sum(-1)


class TestNonConvexPotentialGivenByItsValue(EnergyContract):
    def make(self):
        return AnchoredEnergy(ValueOnly(random(5, 4)), random(2, 3, 5, seed=3), 0.3)


def test_anchor_one_is_the_field_and_anchor_zero_forgets_it():
    keys, field = random(2, 7, 5), random(2, 3, 5, seed=3)
    potential = LogSumExp(keys, 0.6)
    z = random(2, 3, 5, seed=4)
    torch.testing.assert_close(AnchoredEnergy(potential, field, 1.0).fixed_point_map(z), field)
    torch.testing.assert_close(AnchoredEnergy(potential, field, 0.0).fixed_point_map(z), potential.mean(z))


def test_one_step_from_the_query_is_softmax_attention():
    keys, query = random(2, 7, 5), random(2, 3, 5, seed=3)
    energy = AnchoredEnergy(LogSumExp(keys, 0.6), query)
    one = solve(energy, query, solver=Picard(max_steps=1, rtol=0, atol=0))
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, keys, scale=0.6)
    torch.testing.assert_close(one.value, expected)


def test_energy_of_a_hopfield_mixture_matches_ground_truth():
    keys = torch.tensor([[1.0, 0.5], [-0.5, 1.2], [0.3, -1.0]], dtype=torch.float64)
    start = torch.tensor([[0.2, 0.1]], dtype=torch.float64)
    energy = AnchoredEnergy(LogSumExp(keys, 1.0), start)
    solution = solve(energy, start, solver=Picard(rtol=0, atol=1e-13))
    assert solution.value[0].tolist() == pytest.approx([0.2415214765, 0.5878474157], abs=1e-9)
    assert solution.energy.item() == pytest.approx(-1.209001656387, abs=1e-11)


def by_hand(keys, beta, field, anchor, pull):
    """The equilibrium in float64, `pull` being 1 - anchor: z and what it moved from the field."""
    keys, field, z = keys.double(), field.double(), field.double()
    for _ in range(300):
        z = anchor * field + pull * ((beta * z @ keys.mT).softmax(-1) @ keys)
    return z, z - field


@pytest.mark.parametrize("solver", [Broyden(rtol=1e-6), Anderson(rtol=1e-6), Anderson(rtol=1e-6, history=3)])
def test_a_tensor_anchor_near_one_keeps_the_field_beside_large_keys(solver):
    keys, field = 1e8 * random(2, 7, 5, dtype=torch.float32), random(2, 3, 5, seed=3, dtype=torch.float32)
    anchor = torch.tensor(1 - 2**-24, dtype=torch.float32)
    energy = AnchoredEnergy(LogSumExp(keys, 1e-9), field, anchor)
    expected, _ = by_hand(keys, 1e-9, field, anchor.item(), 2**-24)
    torch.testing.assert_close(solve(energy, field, solver=solver).value.double(), expected, rtol=1e-5, atol=1e-5)
    ends = AnchoredEnergy(LogSumExp(keys, 1e-9), field, torch.tensor([0.0, 1.0]))
    assert torch.equal(ends.fixed_point_map(field)[0], ends.potential.mean(field)[0])
    assert torch.equal(ends.fixed_point_map(field)[1], field[1])


@pytest.mark.parametrize("solver", [Anderson(rtol=1e-6), Picard(rtol=1e-6), Broyden(rtol=1e-6)])
def test_a_float_anchor_near_one_keeps_the_digits_of_what_is_left(solver):
    keys, field = 1e4 * random(2, 70, 5, dtype=torch.float32), random(2, 3, 5, seed=3, dtype=torch.float32)
    keys.requires_grad_()
    value = solve(AnchoredEnergy(LogSumExp(keys, 1e-4), field, 1 - 1e-6), field, solver=solver).value
    _, moved = by_hand(keys.detach(), 1e-4, field, 1 - 1e-6, 1e-6)
    # Rounding of the state itself is 1e-7 of the field, 1e-5 of what it was moved by.
    torch.testing.assert_close((value.detach() - field).double(), moved, rtol=1e-4, atol=1e-6)
    (by_keys,) = torch.autograd.grad(value.sum(), keys)
    wide = AnchoredEnergy(LogSumExp(keys.detach().double().requires_grad_(), 1e-4), field.double(), 1 - 1e-6)
    solved = solve(wide, wide.field, solver=Anderson(rtol=1e-12))
    (expected,) = torch.autograd.grad(solved.value.sum(), wide.potential.keys)
    torch.testing.assert_close(by_keys.double(), expected, rtol=1e-4, atol=1e-10)


def test_a_subclass_may_set_the_attributes_by_itself():
    class Own(AnchoredEnergy):
        def __init__(self, potential, field, anchor):
            self.potential, self.field, self.anchor = potential, field, anchor

    keys, query = random(6, 4, seed=1), random(5, 4, seed=2)
    own, energy = (kind(LogSumExp(keys, 0.7), query, 0.4) for kind in (Own, AnchoredEnergy))
    assert own.bottomless() is None
    index = torch.tensor([1, 3])
    torch.testing.assert_close(own.select(index).fixed_point_map(query[index]), energy.fixed_point_map(query)[index])
    torch.testing.assert_close(solve(own, query).value, solve(energy, query).value)
