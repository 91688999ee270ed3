"""The contract of a solver: inherit `SolverContract` and name the solver and the problems beyond its method."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from .._solve import solve
from ..energies import AnchoredEnergy
from ..failure import ConvergenceError
from ..potentials import LogSumExp, SquaredScores
from ..problem import FixedPointMap, PerSample, Problem
from ..solution import Solution, Status
from ..solvers import Solver
from .numerics import check_close, random
from .problems import Case, fixed_point_cases, hopfield_energy

CASES = {case.name: case for case in fixed_point_cases()}


def recomputed_residual(problem: Problem, solution: Solution) -> Tensor:
    z = solution.value.detach()
    step = (problem.fixed_point_map(z) - z).reshape(*solution.residual.shape, -1)
    residual: Tensor = torch.linalg.vector_norm(step, dim=-1)
    return residual


class SolverContract:
    """Tests that every solver passes."""

    solver: ClassVar[Solver]
    #: Names of cases that the method cannot solve; it must then say so.
    beyond: ClassVar[frozenset[str]] = frozenset()
    #: Whether maps without an energy can be solved.
    needs_energy: ClassVar[bool] = False
    #: Whether the result of a problem is the same, bit for bit, whatever its neighbours.
    bitwise: ClassVar[bool] = True
    #: Whether one `num_steps` is at most one evaluation more than `num_evals`.
    counts_every_evaluation: ClassVar[bool] = True

    def to(self, rtol: float = 0.0, atol: float = 1e-6, **options: Any) -> Solver:
        """The solver under test with these tolerances."""
        return dataclasses.replace(self.solver, rtol=rtol, atol=atol, **options)

    def solved(self, problem: Problem, initial: Tensor, *tolerances: float, **options: Any) -> Solution:
        """The solution with these relative and absolute tolerances, failed or not."""
        return solve(problem, initial, solver=self.to(*tolerances, **options), on_failure="ignore")

    def energy(self, dtype: torch.dtype = torch.float64, anchor: float = 0.5, seed: int = 0) -> AnchoredEnergy:
        keys, field = random(2, 7, 5, seed=seed, dtype=dtype), random(2, 3, 5, seed=seed + 1, dtype=dtype)
        return AnchoredEnergy(LogSumExp(keys, 0.5), field, anchor)

    def check_evidence(self, problem: Problem, solution: Solution) -> None:
        measured = recomputed_residual(problem, solution)
        finite = torch.isfinite(measured)
        eps = torch.finfo(measured.dtype).eps
        scale = solution.value.detach().reshape(*measured.shape, -1).norm(dim=-1)
        assert bool(((measured - solution.residual).abs() <= 1e3 * eps * (1 + scale))[finite].all())
        reached = solution.residual <= solution.tolerance
        assert bool((reached | ~solution.converged).all())
        assert bool((solution.num_evals > solution.num_steps).all()) or not self.counts_every_evaluation

    @pytest.mark.parametrize("name", list(CASES))
    def test_known_problems(self, name: str) -> None:
        if self.needs_energy:
            with pytest.raises(ValueError, match="energy"):
                solve(CASES[name].problem, CASES[name].initial, solver=self.solver)
            return
        case: Case = CASES[name]
        solution = self.solved(case.problem, case.initial)
        self.check_evidence(case.problem, solution)
        if name in self.beyond:
            assert solution.failed.all()
            return
        assert solution.converged.all(), solution.message(0)
        if case.answer is not None:
            # Geometric decay contracts by .999 per step: a residual of 1e-6 is then an error of 1e-3.
            tolerance = 2e-3 if name == "geometric decay" else 1e-5
            check_close(solution.value, case.answer, 0.0, tolerance)

    def test_quadratic_energy_has_its_closed_form(self) -> None:
        keys, field = 0.3 * random(2, 7, 5), random(2, 3, 5, seed=1)
        energy = AnchoredEnergy(SquaredScores(keys, 0.5), field, 0.4)
        solution = solve(energy, field, solver=self.to(atol=1e-10, max_steps=2000))
        matrix = torch.eye(5, dtype=torch.float64) - 0.6 * 0.5 * keys.mT @ keys
        exact = torch.linalg.solve(matrix, 0.4 * field.mT).mT
        torch.testing.assert_close(solution.value, exact, rtol=1e-8, atol=1e-8)
        self.check_evidence(energy, solution)

    def test_evidence_of_an_attention_energy(self) -> None:
        energy = hopfield_energy(batch=(2,), queries=9, keys=20, dim=8, anchor=0.3)
        solution = solve(energy, energy.field, solver=self.to(rtol=1e-6, atol=0.0, max_steps=2000))
        assert solution.status.eq(Status.CONVERGED).all()
        assert solution.value.shape == energy.field.shape
        assert solution.status.shape == solution.num_evals.shape == (2, 9)
        assert solution.energy is not None
        torch.testing.assert_close(solution.energy, energy.energy(solution.value))
        self.check_evidence(energy, solution)

    @pytest.mark.parametrize(
        ("dtype", "scale"),
        [(torch.float32, 1e-25), (torch.float32, 1e25), (torch.float64, 1e-200), (torch.float64, 1e200)],
        ids=str,
    )
    def test_numbers_whose_squares_are_none_are_judged_by_their_size(self, dtype: torch.dtype, scale: float) -> None:
        keys, field = 0.3 * random(2, 7, 5), random(2, 3, 5, seed=1)

        def linear(dtype: torch.dtype, scale: float) -> Problem:
            potential = SquaredScores(keys.to(dtype), 0.5)
            return AnchoredEnergy(potential, scale * field.to(dtype), 0.4, unbounded="ignore")

        def memory(dtype: torch.dtype, scale: float) -> Problem:
            # Of keys so small all weights are alike.
            return AnchoredEnergy(LogSumExp(scale * keys.to(dtype), 0.5), scale * field.to(dtype), 0.4)

        def halved(dtype: torch.dtype, scale: float) -> Problem:
            return FixedPointMap(lambda z: z / 2 + scale * field.to(dtype), event_ndim=1)

        for make in (linear, *((memory,) if scale < 1 else ()), *(() if self.needs_energy else (halved,))):
            start = scale * field.to(dtype)
            solution = self.solved(make(dtype, scale), start, 1e-4, 0.0, max_steps=2000)
            z, wide = solution.value.double() / scale, make(torch.float64, 1.0 if make is not memory else scale)
            mapped = wide.fixed_point_map(z) if make is not memory else wide.fixed_point_map(z * scale) / scale
            true, size = (torch.linalg.vector_norm(t, dim=-1) for t in (mapped - z, mapped))
            rounding = 1e2 * torch.finfo(dtype).eps * (1 + size)
            reported = solution.residual.double() / scale
            assert bool((solution.relative_residual <= 2e-4).all()), make.__name__
            assert bool(((reported - true).abs() <= rounding)[solution.converged].all()), make.__name__
            assert solution.converged.all(), (make.__name__, solution.message(0, 0))
            assert bool((true <= 1e-4 * size + rounding).all()), make.__name__

    def test_already_converged(self) -> None:
        energy = self.energy()
        first = solve(energy, energy.field, solver=self.to(atol=1e-10, max_steps=2000))
        again = solve(energy, first.value, solver=self.to(atol=1e-8))
        assert again.converged.all()
        torch.testing.assert_close(again.value, first.value, rtol=0, atol=1e-8)

    def test_exhausted(self) -> None:
        energy = hopfield_energy(queries=5, keys=20, dim=8, sharpness=2.0, clustered=True)
        solution = self.solved(energy, energy.field, 0.0, 1e-13, max_steps=1)
        assert solution.failed.all()
        assert "max_steps" in solution.message(0) or "rtol" in solution.message(0)
        self.check_evidence(energy, solution)
        with pytest.raises(ConvergenceError, match=r"failed for 5 of 5 problems, first at 0, 1, 2, \.\.\."):
            solve(energy, energy.field, solver=self.to(0.0, 1e-13, max_steps=1))

    def test_no_step_and_fixed_budget_are_no_failures(self) -> None:
        energy = self.energy()
        explicit = solve(energy, energy.field, solver=self.to(max_steps=0))
        assert explicit.status.eq(Status.EXPLICIT).all()
        assert torch.equal(explicit.value, energy.field)
        self.check_evidence(energy, explicit)
        budget = solve(energy, energy.field, solver=self.to(rtol=0.0, atol=0.0, max_steps=3))
        assert budget.status.eq(Status.BUDGET).all()
        assert not torch.equal(budget.value, energy.field)
        self.check_evidence(energy, budget)

    def test_divergence_is_said_and_returns_the_best_state(self) -> None:
        keys, field = 3 * random(2, 7, 5), random(2, 3, 5, seed=1)
        problem: Problem = AnchoredEnergy(SquaredScores(keys, 1.0), field, 0.5, unbounded="ignore")
        if not self.needs_energy:
            problem = FixedPointMap(lambda x: x + x.square() + 1, event_ndim=1)
        solution = self.solved(problem, field)
        assert solution.failed.all()
        assert solution.value.isfinite().all()
        start = recomputed_residual(problem, dataclasses.replace(solution, value=field))
        assert bool((solution.residual <= start * (1 + 1e-12)).all())
        self.check_evidence(problem, solution)

    def test_not_a_number_stays_where_it_was_born(self) -> None:
        energy = self.energy()
        field = energy.field.clone()
        field[0, 1, 2] = torch.nan
        broken = AnchoredEnergy(energy.potential, field, 0.5)
        clean = solve(energy, energy.field, solver=self.to())
        solution = self.solved(broken, field)
        assert solution.status[0, 1] == Status.NONFINITE
        assert solution.value[0, 1].isnan().any()
        assert "NaN" in solution.message(0, 1)
        others = field.isfinite().all(-1)
        assert torch.equal(solution.status[others], clean.status[others])
        if self.bitwise:
            assert torch.equal(solution.value[others], clean.value[others])
        torch.testing.assert_close(solution.value[others], clean.value[others])
        with pytest.raises(ConvergenceError, match=r"1 of 6 problems, first at \(0, 1\)"):
            solve(broken, field, solver=self.to())

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    @pytest.mark.parametrize(("count", "dim"), [(40, 16), (41, 7), (101, 9)])
    def test_easy_problems_do_not_move_with_hard_neighbours(self, count: int, dim: int, dtype: torch.dtype) -> None:
        sizes: dict[str, Any] = {"queries": 70, "keys": count, "dim": dim, "dtype": dtype}
        energy = hopfield_energy(**sizes, sharpness=3.0, clustered=True, anchor=0.3)
        field = energy.field.clone()
        field[35:] = energy.potential.tensors()[0][:35]
        mixed, alone, some = (
            self.solved(AnchoredEnergy(energy.potential, fields, 0.3), fields, 1e-5, 0.0)
            for fields in (energy.field, field, field[:35])
        )
        for other in (mixed, some):
            if self.bitwise:
                check_close((alone.value[:35], alone.num_evals[:35]), (other.value[:35], other.num_evals[:35]), 0.0)
            torch.testing.assert_close(alone.value[:35], other.value[:35], rtol=1e-3, atol=1e-3)

    def test_problems_that_read_each_other_are_measured_together(self) -> None:
        if self.needs_energy:
            return
        x, slope = random(9, 4), torch.full((9, 1), 0.02, dtype=torch.float64)
        slope[::3] = 0.4
        tables = PerSample(x), PerSample(slope)

        def mapped(z: Tensor, x: Tensor, slope: Tensor) -> Tensor:
            return x + slope * torch.sin(z) + 0.3 * z.mean(0)

        for inputs in (tables, (x, slope)):
            problem = FixedPointMap(mapped, *inputs, event_ndim=1)
            solution = self.solved(problem, torch.zeros_like(x), 1e-8, 0.0)
            check_close(solution.residual, recomputed_residual(problem, solution), 1e-13)
            assert (solution.residual <= solution.tolerance)[solution.converged].all()

    def test_a_state_that_is_not_finite_is_never_returned_as_an_answer(self) -> None:
        energy = self.energy()
        initial = energy.field.clone()
        initial[0, 1, 2] = torch.inf
        initial[1, 2, 0] = torch.nan
        mask = torch.ones(2, 3, 7, dtype=torch.bool)
        mask[1, 2] = False
        masked = AnchoredEnergy(LogSumExp(energy.potential.tensors()[0], 0.5, mask=mask), energy.field, 0.5)
        solution = self.solved(masked, initial)
        bad = solution.status == Status.NONFINITE
        assert bad.nonzero().tolist() == [[0, 1], [1, 2]]
        assert solution.value[bad].isnan().all()

    def test_empty_batches_return_empty_results(self) -> None:
        for shape in ((0, 3, 5), (2, 0, 5)):
            field = torch.zeros(shape, dtype=torch.float64)
            energy = AnchoredEnergy(LogSumExp(random(shape[0], 7, 5), 0.5), field, 0.5)
            solution = solve(energy, field, solver=self.solver)
            assert solution.value.shape == shape
            assert solution.status.shape == solution.num_evals.shape == shape[:2]
            assert "no problems" in repr(solution)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_low_precision_inputs_keep_a_float32_state(self, dtype: torch.dtype) -> None:
        energy = self.energy(dtype)
        solution = solve(energy, energy.field, solver=self.to(1e-5, 0.0, max_steps=2000))
        assert solution.value.dtype == solution.residual.dtype == torch.float32
        assert solution.converged.all()
        exact = energy.replace(*(t.double() for t in energy.tensors()))
        truth = solve(exact, energy.field.double(), solver=self.to(1e-10, 0.0, max_steps=2000))
        torch.testing.assert_close(solution.value.double(), truth.value, rtol=1e-3, atol=1e-3)

    def test_looking_less_often_changes_nothing(self) -> None:
        energy = hopfield_energy(queries=40, keys=20, dim=8, sharpness=2.0, clustered=True, anchor=0.2)
        often, seldom = (self.solved(energy, energy.field, 1e-6, 0.0, check_every=every) for every in (1, 7))
        check_close((seldom.value, seldom.record), (often.value, often.record), 0.0)

    def test_trace_tells_the_course(self) -> None:
        energy = self.energy()
        solution = solve(energy, energy.field, solver=self.to(max_steps=1000), trace=True)
        trace = solution.trace
        assert trace is not None
        assert trace.energy is not None
        assert trace.residual.shape == trace.energy.shape == trace.num_evals.shape == (len(trace.value), 2, 3)
        torch.testing.assert_close(trace.residual[-1], solution.residual)
        check_close((trace.value[0], trace.value[-1]), (energy.field, solution.value), 0.0)
        assert bool((trace.residual.diff(dim=0) <= 0).all())
        assert bool((trace.num_evals.diff(dim=0) >= 0).all())
        untraced = solve(energy, energy.field, solver=self.to(max_steps=1000))
        torch.testing.assert_close(solution.value, untraced.value)

    @pytest.mark.parametrize(("event_ndim", "shape"), [(0, ()), (0, (4,)), (2, (2, 3))], ids=str)
    def test_problems_of_any_number_of_axes(self, event_ndim: int, shape: tuple[int, ...]) -> None:
        if self.needs_energy:
            return
        start = torch.full(shape, 0.5, dtype=torch.float64)
        solution = self.solved(FixedPointMap(torch.cos, event_ndim=event_ndim), start, 0.0, 1e-9, max_steps=2000)
        torch.testing.assert_close(solution.value, torch.full_like(start, 0.7390851332151607))
        assert solution.status.shape == shape[: len(shape) - event_ndim]
        assert solution.message(*(0 for _ in solution.status.shape)).startswith("converged")

    def test_tolerances_and_max_steps_change_behaviour(self) -> None:
        energy = hopfield_energy(queries=8, keys=20, dim=8, anchor=0.3)
        loose, tight, absolute = (
            solve(energy, energy.field, solver=self.to(*tolerances, max_steps=2000))
            for tolerances in ((1e-2, 0.0), (1e-8, 0.0), (0.0, 1e-3))
        )
        assert bool((loose.num_evals < tight.num_evals).any())
        assert float(tight.residual.max()) < float(loose.residual.max())
        assert float(absolute.tolerance.max()) == pytest.approx(1e-3)

    def test_options_are_checked_and_copies_are_equal(self) -> None:
        for bad in ({"rtol": -1.0}, {"atol": float("nan")}, {"max_steps": -1}, {"check_every": 0}):
            with pytest.raises(ValueError, match=f"`{next(iter(bad))}` must"):
                dataclasses.replace(self.solver, **bad)
        with pytest.raises(TypeError, match="`max_steps` must be an integer"):
            dataclasses.replace(self.solver, max_steps=2.5)  # type: ignore[arg-type]
        assert copy.deepcopy(self.solver) == self.solver == pickle.loads(pickle.dumps(self.solver))
