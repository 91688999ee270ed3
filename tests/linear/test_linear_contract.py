"""The four solvers, and one of a user, through the contract; and what the loop does with methods that lie."""

from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from implicit_attention import Status, linear
from implicit_attention.linear import CG, GMRES, MINRES, LinearSolver, Neumann, SweepState
from implicit_attention.testing.linear import LinearSolverContract
from implicit_attention.testing.numerics import random


class TestCG(LinearSolverContract):
    solver = CG()


class TestMINRES(LinearSolverContract):
    solver = MINRES()


class TestGMRES(LinearSolverContract):
    solver = GMRES()


class TestGMRESRestarted(LinearSolverContract):
    solver = GMRES(restart=3)


class TestNeumann(LinearSolverContract):
    solver = Neumann()


def begun(residual):
    """The size of the residual, and that no problem has a verdict or negative curvature."""
    size = torch.linalg.vector_norm(residual, dim=-1)
    return size, torch.full_like(size, -1, dtype=torch.int8), torch.zeros_like(size, dtype=torch.bool)


@dataclass(frozen=True)
class DescentState(SweepState):
    value: Tensor
    residual: Tensor


@dataclass(frozen=True)
class SteepestDescent(LinearSolver[DescentState]):
    """A method written by a user: the whole of what `LinearSolver` asks for."""

    symmetric: ClassVar[bool] = True
    monotone: ClassVar[bool] = False

    def begin(self, residual):
        return DescentState(*begun(residual), value=residual * 0, residual=residual)

    def step(self, matvec, state, active):
        product, square = matvec(state.residual), state.residual.square().sum(-1)
        rate = torch.where(square > 0, square / (state.residual * product).sum(-1), 0.0)[..., None]
        residual, value = state.residual - rate * product, state.value + rate * state.residual
        size = torch.linalg.vector_norm(residual, dim=-1)
        new = replace(state, residual_norm=size, residual=residual, value=value)
        rows = {}
        for field in fields(new):
            after, before = getattr(new, field.name), getattr(state, field.name)
            rows[field.name] = torch.where(active if after.ndim == active.ndim else active[..., None], after, before)
        return replace(new, **rows)

    def correction(self, state):
        return state.value

    def default_max_steps(self, n):
        return 500


class TestAUsersSolver(LinearSolverContract):
    solver = SteepestDescent()


class Liar(SteepestDescent):
    """Steps the wrong way and claims a residual of zero."""

    symmetric = False
    monotone = True

    def step(self, matvec, state, active):
        matvec(state.residual)
        return replace(state, residual_norm=0 * state.residual_norm, value=-state.residual)


class BoldLiar(Liar):
    monotone = False


def test_a_claim_of_convergence_is_checked_and_a_harmful_sweep_undone_but_the_first_of_a_method_that_may_rise():
    b = random(2, 3)
    for method, value, residual in ((Liar(), 0 * b, b), (BoldLiar(), -b, 2 * b)):
        solution = method.solve(lambda v: v, b)
        assert solution.status.tolist() == [Status.STALLED] * 2
        torch.testing.assert_close(solution.value, value, rtol=0, atol=0)
        torch.testing.assert_close(solution.residual, residual.norm(dim=-1))


@dataclass(frozen=True, slots=True)
class Place(SweepState):
    value: Tensor
    residual: Tensor


class Relaxation(SteepestDescent):
    """Steps of half the residual, whose state has slots."""

    symmetric = False

    def begin(self, residual):
        return Place(*begun(residual), value=residual * 0, residual=residual)

    def step(self, matvec, state, active):
        residual = state.residual - matvec(state.residual) / 2
        value, size = state.value + state.residual / 2, residual.norm(dim=-1)
        new = replace(state, residual_norm=size, value=value, residual=residual)
        return linear.base.freeze(active, new, state)


def test_a_problem_that_has_ended_rests_whatever_holds_its_state():
    factors, b = torch.tensor([[1.9], [1.0], [0.3]]).double(), torch.ones(3, 1).double()
    found = Relaxation(rtol=1e-3, max_steps=30).solve(lambda v: factors * v, b)
    alone = [Relaxation(rtol=1e-3, max_steps=30).solve(lambda v, k=k: factors[k] * v, b[k : k + 1]) for k in range(3)]
    torch.testing.assert_close(found.value, torch.cat([each.value for each in alone]), rtol=0, atol=0)
