"""Solves of energies without a lower bound: they end DIVERGED, and no energy that has one is given up."""

import dataclasses
import functools

import pytest
import torch

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    Broyden,
    GradientDescent,
    Implicit,
    LogSumExp,
    NewtonKrylov,
    Picard,
    SquaredScores,
    Status,
    Unrolled,
    solve,
)
from implicit_attention.potentials import Exponential, Polynomial
from implicit_attention.testing.numerics import random

pytestmark = pytest.mark.cases(4)

SOLVERS = {
    "anderson": Anderson(),
    "anderson, history 5": Anderson(history=5),
    "broyden": Broyden(),
    "newton": NewtonKrylov(),
    "descent": GradientDescent(),
    "picard": Picard(),
    "no guard": Anderson(guard="none"),
    "residual guard": Anderson(guard="residual"),
}
each_solver = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def keys_of(dtype):
    """Keys (2, 7, 5) of spectral norm 1."""
    keys = random(2, 7, 5)
    return (keys / torch.linalg.matrix_norm(keys, ord=2)[:, None, None]).to(dtype)


def statuses(potential, anchor, solver, dtype, rows=6):
    field = random(2, rows, 5, seed=3).to(dtype)
    energy = AnchoredEnergy(potential, field, anchor, unbounded="ignore")
    solution = solve(energy, field, solver=solver, on_failure="ignore")
    return {Status(code).name for code in solution.status.unique().tolist()}, solution


GUARDED = [name for name in SOLVERS if "guard" not in name]


@each_dtype
@pytest.mark.parametrize("name", GUARDED)
@pytest.mark.parametrize("factor", [1.01, 1.5, 10.0, 1e3], ids=str)
def test_squares_beyond_their_limit_end_diverged(factor, name, dtype):
    # Near the limit all steps are made, and one anchor is enough.
    for anchor in (0.0, 0.3)[factor < 1.1 :]:
        potential = SquaredScores(keys_of(dtype), factor / (1 - anchor))
        assert statuses(potential, anchor, SOLVERS[name], dtype)[0] == {"DIVERGED"}


@each_dtype
@pytest.mark.parametrize("name", ["no guard", "residual guard"])
def test_without_a_guard_of_the_energy_the_saddle_may_be_found(name, dtype):
    for factor in (1.01, 1.5, 10.0, 1e3):
        found, _ = statuses(SquaredScores(keys_of(dtype), factor / 0.7), 0.3, SOLVERS[name], dtype)
        assert found <= {"CONVERGED", "DIVERGED"}


@each_dtype
@each_solver
@pytest.mark.parametrize("factor", [0.5, 0.9, 0.99, 1.0], ids=str)
def test_squares_within_their_limit_are_not_given_up(factor, solver, dtype):
    found, _ = statuses(SquaredScores(keys_of(dtype), factor / 0.7), 0.3, solver, dtype)
    assert "DIVERGED" not in found


@each_dtype
@pytest.mark.parametrize("name", GUARDED)
@pytest.mark.parametrize("make", [functools.partial(Polynomial, degree=3), Exponential], ids=["cubes", "exponential"])
def test_what_grows_faster_ends_in_a_local_minimum_or_diverged(make, name, dtype):
    found, solution = statuses(make(keys_of(dtype), 1.0), 0.3, SOLVERS[name], dtype, rows=20)
    slow = {"MAX_STEPS"} if name == "descent" else set()
    assert {"DIVERGED"} <= found <= {"CONVERGED", "DIVERGED"} | slow
    # What ran out of steps is still on its way to a local minimum: with more of them it gets there.
    left = solution.status == Status.MAX_STEPS
    if left.any():
        longer = statuses(make(keys_of(dtype), 1.0), 0.3, GradientDescent(max_steps=2000), dtype, rows=20)[1]
        assert (longer.status[left] != Status.MAX_STEPS).all()


@each_solver
def test_a_cut_short_descent_to_a_local_minimum_is_not_called_diverged(solver):
    keys, field = keys_of(torch.float64), 0.1 * random(2, 6, 5, seed=3)
    energy = AnchoredEnergy(Polynomial(keys, 1.0, degree=3), field, 0.3, unbounded="ignore")
    short = dataclasses.replace(solver, max_steps=1, rtol=1e-12)
    assert solve(energy, field, solver=short, on_failure="ignore").status.unique().tolist() == [Status.MAX_STEPS]


@each_solver
def test_a_start_near_a_maximum_is_not_given_up(solver):
    """The state grows by 1e10 along negative curvature, and E falls to 1e20 times what it was: and has a minimum."""
    keys = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    start = torch.tensor([[1e-10, 0.0]], dtype=torch.float64)
    energy = AnchoredEnergy(LogSumExp(keys, 4.0), start)
    status = solve(energy, start, solver=solver, on_failure="ignore").status
    assert status.item() != Status.DIVERGED


def test_in_vmap_the_status_tells():
    keys, field = keys_of(torch.float64), random(6, 5, seed=3)

    def status(keys, beta):
        return solve(AnchoredEnergy(SquaredScores(keys, beta), field, 0.3), field, on_failure="ignore").status

    found = torch.vmap(status)(keys, torch.tensor([0.5, 5.0], dtype=torch.float64))
    assert found[0].tolist() == [Status.CONVERGED] * 6
    assert found[1].tolist() == [Status.DIVERGED] * 6


@each_solver
def test_neighbours_are_solved_as_they_are_alone(solver):
    keys = keys_of(torch.float64)
    field, beta = random(2, 70, 5, seed=3), torch.tensor([0.4, 5.0], dtype=torch.float64)
    both = AnchoredEnergy(SquaredScores(keys, beta), field, 0.3, unbounded="ignore")
    solution = solve(both, field, solver=solver, on_failure="ignore")
    alone = solve(AnchoredEnergy(SquaredScores(keys[:1], beta[:1]), field[:1], 0.3), field[:1], solver=solver)
    # To rounding, as rows that end earlier leave the others in products of another size.
    torch.testing.assert_close(solution.value[:1], alone.value, rtol=1e-14, atol=1e-15)
    assert torch.equal(solution.status[:1], alone.status)
    assert torch.equal(solution.num_steps[:1], alone.num_steps)


@pytest.mark.parametrize("name", ["newton", "broyden", "anderson"])
def test_a_solve_that_starts_at_the_saddle_says_so_in_its_gradient(name):
    keys, field = keys_of(torch.float64), random(2, 6, 5, seed=3).requires_grad_()
    matrix = torch.eye(5).double() - 0.7 * 2.0 * keys.mT @ keys
    saddle = torch.linalg.solve(matrix, 0.3 * field.detach().mT).mT
    energy = AnchoredEnergy(SquaredScores(keys, 2.0), field, 0.3, unbounded="ignore")
    solution = solve(energy, saddle, solver=SOLVERS[name], adjoint=Implicit(), on_failure="ignore")
    assert solution.status.unique().tolist() == [Status.CONVERGED]
    # Of a random direction, so that the backward solve meets the one of negative curvature.
    (solution.value * random(2, 6, 5, seed=8)).sum().backward()
    assert solution.adjoint.negative_curvature.all()


def test_budgets_steps_of_none_and_courses_are_as_they_were():
    keys, field = keys_of(torch.float64), random(2, 6, 5, seed=3)
    energy = AnchoredEnergy(SquaredScores(keys, 2.0), field, 0.3, unbounded="ignore")

    def status(solver, **options):
        solution = solve(energy, field, solver=solver, on_failure="ignore", **options)
        return Status(solution.status.unique().item()).name

    assert status(Picard(rtol=0, atol=0, max_steps=3)) == "BUDGET"
    assert status(Picard(max_steps=0)) == "EXPLICIT"
    assert status(Picard(), adjoint=Unrolled()) == "DIVERGED"
    assert status(Anderson(), trace=True) == "DIVERGED"
    # Far below what steps of a given number can reach, these too are given up.
    assert status(Picard(rtol=0, atol=0, max_steps=400)) == "DIVERGED"


def test_the_message_says_what_happened_and_what_helps():
    keys, field = keys_of(torch.float64), random(2, 6, 5, seed=3)
    energy = AnchoredEnergy(SquaredScores(keys, 2.0), field, 0.3, unbounded="ignore")
    solution = solve(energy, field, on_failure="ignore")
    for words in ("an energy without a lower bound fell without end", "lower beta or raise the anchor"):
        assert words in solution.message(0, 0)
    assert torch.isfinite(solution.value).all()
    residual = (energy.fixed_point_map(solution.value) - solution.value).norm(dim=-1)
    torch.testing.assert_close(solution.residual, residual, rtol=1e-12, atol=0)
