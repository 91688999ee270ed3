"""solve(callback=, verbose=): what is told of every step, and where nothing could be."""

import pytest
import torch

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    Broyden,
    FixedPointMap,
    GradientDescent,
    Implicit,
    LogSumExp,
    NewtonKrylov,
    Phantom,
    Picard,
    Unrolled,
    UnsupportedImplementation,
    solve,
)
from implicit_attention.solvers import SciPy, TorchDEQ
from implicit_attention.testing.numerics import random


class Told:
    def __init__(self):
        self.steps, self.residuals, self.active = [], [], []

    def __call__(self, step, residual, active):
        self.steps.append(step)
        self.residuals.append(residual)
        self.active.append(active)


def energy(rows=3, grad=False):
    return AnchoredEnergy(
        LogSumExp(random(2, 7, 5).requires_grad_(grad), 1.5), random(2, rows, 5, seed=1).requires_grad_(grad), 0.2
    )


@pytest.mark.parametrize("solver", [Picard(), Anderson(), Broyden(), NewtonKrylov(), GradientDescent(max_steps=2000)])
@pytest.mark.parametrize("rows", [3, 40])
def test_what_is_told_is_the_trace_and_changes_nothing(solver, rows):
    problem, told = energy(rows), Told()
    found = solve(problem, problem.field, solver=solver, callback=told)
    traced = solve(problem, problem.field, solver=solver, trace=True)
    assert told.steps == list(range(len(traced.trace.residual)))
    assert torch.equal(torch.stack(told.residuals), traced.trace.residual)
    assert torch.equal(told.residuals[-1], found.residual)
    plain = solve(problem, problem.field, solver=solver)
    torch.testing.assert_close(found.value, plain.value, rtol=1e-12, atol=1e-13)
    assert torch.equal(found.num_evals, plain.num_evals)
    assert not told.active[-1].any()
    # Unfinished are those with steps left to make.
    for step, active in zip(told.steps, told.active, strict=True):
        assert torch.equal(active, found.num_steps > step)


def test_plain_numbers_of_a_geometric_series():
    rates = torch.tensor([[0.1], [0.5]], dtype=torch.float64)
    told = Told()
    problem = FixedPointMap(lambda z: rates * z + 1 - rates, event_ndim=1)
    solver = Picard(atol=1e-2, rtol=0.0, max_steps=9)
    solve(problem, torch.zeros(2, 1, dtype=torch.float64), solver=solver, callback=told)
    # (1 - a) a^n.
    assert [r.tolist() for r in told.residuals[:3]] == [
        pytest.approx([0.9, 0.5]),
        pytest.approx([0.09, 0.25]),
        pytest.approx([0.009, 0.125]),
    ]
    assert [a.tolist() for a in told.active] == [[True, True]] * 2 + [[False, True]] * 4 + [[False, False]]


@pytest.mark.parametrize("adjoint", [Implicit(), Unrolled(), Phantom(3)])
def test_gradients_are_the_same(adjoint):
    gradients = []
    for callback in (None, Told()):
        problem = energy(grad=True)
        solve(problem, problem.field, adjoint=adjoint, callback=callback).value.sin().sum().backward()
        gradients.append((problem.field.grad, problem.potential.keys.grad))
    for plain, told in zip(*gradients, strict=True):
        torch.testing.assert_close(told, plain, rtol=1e-5, atol=1e-7)
    assert callback.steps[0] == 0
    assert len(callback.steps) == len(set(callback.steps))


def test_solves_that_an_operation_would_do_are_told_of():
    keys, query, told = random(64, 16, dtype=torch.float32), random(2, 3, 16, seed=1, dtype=torch.float32), Told()
    problem = AnchoredEnergy(LogSumExp(keys.expand(2, 64, 16).contiguous(), 0.25), query, 0.5)
    found = solve(problem, query, callback=told)
    assert len(told.steps) == int(found.num_evals.max())
    torch.testing.assert_close(found.value, solve(problem, query).value, rtol=1e-4, atol=1e-5)


def test_what_it_raises_ends_the_solve():
    problem = energy()

    def stop(step, residual, active):
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        solve(problem, problem.field, solver=Picard(rtol=0, atol=0, max_steps=9), callback=stop)


def test_what_is_told_may_be_changed():
    problem = energy()

    def spoil(step, residual, active):
        residual.zero_()
        active.zero_()

    found = solve(problem, problem.field, callback=spoil)
    assert torch.equal(found.num_evals, solve(problem, problem.field).num_evals)


def test_verbose_prints_lines(capsys):
    problem = energy()
    solve(problem, problem.field, solver=Picard(rtol=0, atol=0, max_steps=6), verbose=True)
    way, *lines = capsys.readouterr().out.splitlines()
    assert way.startswith("torch: evaluate, step")
    assert [line.split(":")[0] for line in lines] == [f"step {i}" for i in range(7)]
    assert "6 of 6 unfinished, residual" in lines[0]
    told = Told()
    solve(problem, problem.field, solver=Picard(rtol=0, atol=0, max_steps=6), verbose=3, callback=told)
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 3", "step 6"]
    assert told.steps == list(range(7))
    solve(problem, problem.field)
    assert capsys.readouterr().out == ""


def test_half_precision_and_single_problems():
    told = Told()
    solve(FixedPointMap(torch.cos, event_ndim=1), torch.zeros(1).bfloat16(), callback=told)
    assert told.residuals[0].shape == ()


def test_where_nothing_could_be_told_it_is_refused():
    problem, told = energy(), Told()
    for solver in (SciPy(), TorchDEQ("broyden")):
        with pytest.raises(ValueError, match=f"`callback` must be left out for {type(solver).__name__}"):
            solve(problem, problem.field, solver=solver, callback=told)
    with pytest.raises(ValueError, match=r"`verbose` must be left out inside torch\.func"):
        torch.vmap(lambda z: solve(FixedPointMap(torch.cos, event_ndim=1), z, verbose=1).value)(torch.zeros(2, 3, 1))
    single = AnchoredEnergy(LogSumExp(random(7, 5).float(), 1.5), random(3, 5, seed=1).float(), 0.2)
    with pytest.raises(UnsupportedImplementation, match="no step is kept, for a trace, a callback"):
        solve(single, single.field, impl="native", callback=told)
    with pytest.raises(TypeError, match="`callback` must be callable, got int"):
        solve(problem, problem.field, callback=3)
    for wrong, error in ((-1, ValueError), (0.5, TypeError), ("yes", TypeError)):
        with pytest.raises(error, match="`verbose` must be"):
            solve(problem, problem.field, verbose=wrong)
