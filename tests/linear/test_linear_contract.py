"""The four solvers through the contract that a user's own solver inherits."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from implicit_attention._norm import length
from implicit_attention.linear import CG, GMRES, MINRES, LinearSolver, Neumann, SweepState
from implicit_attention.linear._vectors import divide, dot, freeze
from implicit_attention.linear.base import fresh
from implicit_attention.testing.linear import LinearSolverContract


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
        return DescentState(**fresh(length(residual)), value=residual * 0, residual=residual)

    def step(self, matvec, state, active):
        product = matvec(state.residual)
        rate = divide(dot(state.residual, state.residual), dot(state.residual, product)).unsqueeze(-1)
        residual = state.residual - rate * product
        value = state.value + rate * state.residual
        new = DescentState(length(residual), state.verdict, state.negative_curvature, value, residual)
        return freeze(active, new, state)

    def correction(self, state):
        return state.value

    def default_max_steps(self, n):
        return 500


class TestAUsersSolver(LinearSolverContract):
    solver = SteepestDescent()
