"""The loop and the vector algebra under it, where no real method reaches."""

from dataclasses import dataclass, replace

import pytest
import torch

from implicit_attention import Status
from implicit_attention._norm import norm
from implicit_attention.linear import LinearSolver, SweepState
from implicit_attention.linear._vectors import divide, freeze, normalised, orthogonalise
from implicit_attention.linear.base import fresh
from implicit_attention.testing.numerics import random

F64 = torch.float64


@dataclass(frozen=True)
class LiarState(SweepState):
    residual: torch.Tensor


@dataclass(frozen=True)
class Liar(LinearSolver[LiarState]):
    """Steps the wrong way and claims a residual of zero."""

    symmetric = False

    def begin(self, residual):
        return LiarState(**fresh(residual.norm(dim=-1)), residual=residual)

    def step(self, matvec, state, active):
        matvec(state.residual)
        return freeze(active, replace(state, residual_norm=state.residual_norm * 0), state)

    def correction(self, state):
        return -state.residual


class BoldLiar(Liar):
    monotone = False


def test_a_claim_of_convergence_is_checked_and_a_harmful_sweep_undone():
    b = random(2, 3)
    solution = Liar().solve(lambda v: v, b)
    assert solution.status.tolist() == [Status.STALLED] * 2
    assert torch.equal(solution.value, torch.zeros_like(b))
    torch.testing.assert_close(solution.residual, b.norm(dim=-1))


def test_a_method_that_is_not_monotone_keeps_its_first_sweep_only():
    b = random(2, 3)
    solution = BoldLiar().solve(lambda v: v, b)
    assert solution.status.tolist() == [Status.STALLED] * 2
    assert torch.equal(solution.value, -b)
    torch.testing.assert_close(solution.residual, 2 * b.norm(dim=-1))


@pytest.mark.parametrize("n", [6, 1500])
def test_second_pass_makes_the_remainder_orthogonal(n):
    basis = torch.linalg.qr(random(2, n, 3))[0].mT
    vector = basis.sum(-2) + 1e-9 * random(2, n, seed=1) / n**0.5
    coordinates, remainder, size, height = orthogonalise(basis.unbind(-2), vector)
    cosines = (basis * remainder.unsqueeze(-2)).sum(-1) / remainder.norm(dim=-1, keepdim=True)
    assert cosines.abs().max() < 1e-14
    torch.testing.assert_close((size, height), (vector.norm(dim=-1), remainder.norm(dim=-1)))
    torch.testing.assert_close((basis * coordinates.unsqueeze(-1)).sum(-2) + remainder, vector, rtol=1e-14, atol=1e-14)


def test_norm_neither_overflows_nor_underflows():
    direction = torch.tensor([3.0, 4.0])
    for scale in (1e-36, 1.0, 1e36):
        torch.testing.assert_close(norm(direction * scale), torch.tensor(5.0 * scale), rtol=1e-6, atol=0)


def test_normalised_divides_by_a_power_of_two():
    vector = random(5, 4)
    vector[0] = 0.0
    unit, scale = normalised(vector)
    assert torch.equal(unit * scale.unsqueeze(-1), vector)
    assert (torch.frexp(scale).mantissa == 0.5).all()
    assert ((unit[1:].abs().amax(-1) >= 0.5) & (unit[1:].abs().amax(-1) < 1)).all()
    assert scale[0] == 1


def test_divide_by_zero_is_zero():
    assert divide(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 2.0])).tolist() == [0.0, 0.5]
