"""The contract of a linear solver: inherit `LinearSolverContract` in a pytest class and set `solver`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from ..linear import LinearSolution, LinearSolver
from ..solution import Status
from .numerics import check_close, random

Matvec = Callable[[Tensor], Tensor]


def dense_map(matrix: Tensor) -> Matvec:
    """x -> A x for matrices (*batch, n, n), each row computed alike whatever the size of the batch."""
    return lambda vector: (matrix * vector.unsqueeze(-2)).sum(-1)


def symmetric_matrices(*batch: int, eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """Random symmetric matrices (*batch, n, n) with these eigenvalues, (n,) or (*batch, n)."""
    basis = torch.linalg.qr(random(*batch, eigenvalues.shape[-1], eigenvalues.shape[-1], seed=seed))[0]
    matrix = torch.matmul(basis * eigenvalues.unsqueeze(-2), basis.mT)
    return (matrix + matrix.mT) / 2


def relative_residual(matrix: Tensor, b: Tensor, value: Tensor) -> Tensor:
    """|b - A x| / |b|, by a matrix product that the solver did not use."""
    error = torch.linalg.vector_norm(b - (matrix @ value.unsqueeze(-1)).squeeze(-1), dim=-1)
    return torch.div(error, torch.linalg.vector_norm(b, dim=-1))


class LinearSolverContract:
    """The contract of a `LinearSolver`; a subclass sets `solver`, with its default options."""

    solver: ClassVar[LinearSolver[Any]]

    def matrices(self, *batch: int, n: int = 5, seed: int = 0) -> Tensor:
        """Systems that every method solves: symmetric, spectrum in [0.5, 1.5]."""
        return symmetric_matrices(*batch, eigenvalues=torch.linspace(0.5, 1.5, n, dtype=torch.float64), seed=seed)

    def hard(self, n: int = 5) -> Tensor:
        """A slow system, (n, n), that every method solves."""
        return symmetric_matrices(eigenvalues=torch.linspace(0.1, 1.9, n, dtype=torch.float64), seed=9)

    def solve(self, matrix: Tensor, b: Tensor, **options: Any) -> LinearSolution:
        initial = options.pop("initial", None)
        return replace(self.solver, **options).solve(dense_map(matrix), b, initial=initial)

    def test_equals_the_dense_solution(self) -> None:
        matrix, b = self.matrices(2, 3), random(2, 3, 5, seed=1)
        solution = self.solve(matrix, b, rtol=1e-12)
        assert solution.converged.all()
        check_close(solution.value, torch.linalg.solve(matrix, b), 1e-10, 1e-10)

    def test_evidence_has_the_documented_shapes_and_types(self) -> None:
        b = random(2, 3, 5)
        solution = self.solve(self.matrices(2, 3), b)
        assert solution.value.shape == b.shape
        evidence = (*solution.record, solution.negative_curvature, solution.converged)
        assert {tensor.shape for tensor in evidence} == {(2, 3)}
        flags, count = torch.bool, torch.int64
        assert [t.dtype for t in evidence] == [torch.int8, b.dtype, b.dtype, count, count, flags, flags]
        assert not solution.negative_curvature.any()
        assert (solution.direction is not None) == self.solver.keeps_direction
        assert solution.direction is None or not solution.direction.any()

    def test_residual_is_that_of_the_value_returned(self) -> None:
        matrix, b = self.matrices(4), random(4, 5, seed=1)
        for max_steps in (1, 2, 200):
            solution = self.solve(matrix, b, max_steps=max_steps)
            truth = relative_residual(matrix, b, solution.value) * b.norm(dim=-1)
            check_close(solution.residual, truth, 1e-6, 1e-14)

    def test_converged_means_residual_within_tolerance(self) -> None:
        matrix, b = self.matrices(n=20), random(20, seed=1)
        steps = []
        for rtol, atol in ((1e-1, 0.0), (1e-4, 0.0), (1e-8, 0.0), (1e-8, 1.0), (0.0, 1e-4)):
            solution = self.solve(matrix, b, rtol=rtol, atol=atol)
            assert solution.converged
            assert solution.residual <= solution.tolerance
            torch.testing.assert_close(solution.tolerance, atol + rtol * b.norm())
            steps.append(int(solution.num_steps))
        assert steps[0] < steps[1] < steps[2] > steps[3]

    def test_every_row_of_a_batch_equals_its_own_solve_bit_for_bit(self) -> None:
        lowest = torch.tensor([0.9, 0.5, 0.3, 0.2, 0.1, 1.0]).double()
        eigenvalues = lowest.unsqueeze(-1) + (1.9 - lowest).unsqueeze(-1) * torch.linspace(0, 1, 24).double()
        matrix, b = symmetric_matrices(6, eigenvalues=eigenvalues), random(6, 24, seed=1)
        together = self.solve(matrix, b, rtol=1e-9, max_steps=400)
        assert len(set(together.num_steps.tolist())) > 3
        for row in range(6):
            alone = self.solve(matrix[row], b[row], rtol=1e-9, max_steps=400)
            check_close([t[row] for t in (together.value, *together.record)], [alone.value, *alone.record], 0.0)

    def test_an_early_problem_is_frozen_while_a_late_one_goes_on(self) -> None:
        matrix = torch.stack([torch.eye(5, dtype=torch.float64), self.hard()])
        b = random(2, 5, seed=1)
        solution = self.solve(matrix, b, rtol=1e-10, max_steps=500)
        assert solution.num_steps.tolist()[0] == 1 < solution.num_steps.tolist()[1]
        assert torch.equal(solution.value[0], self.solve(matrix[0], b[0]).value)
        check_close(solution.value[0], b[0], 1e-14, 1e-14)

    def test_nan_and_infinity_stay_in_their_problem(self) -> None:
        matrix, b = self.matrices(4), random(4, 5, seed=1)
        clean = self.solve(matrix, b)
        for poison in (torch.nan, torch.inf):
            sick_matrix, sick_b = matrix.clone(), b.clone()
            sick_matrix[1, 2, 3] = poison
            sick_b[3, 0] = poison
            solution = self.solve(sick_matrix, sick_b)
            assert solution.status.tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED, Status.NONFINITE]
            assert solution.value[1::2].isnan().all()
            check_close((solution.value[::2], solution.residual[::2]), (clean.value[::2], clean.residual[::2]), 0.0)

    def test_nan_in_the_guess_stays_in_its_problem(self) -> None:
        matrix, b = self.matrices(2), random(2, 5, seed=1)
        initial = torch.zeros_like(b)
        clean = self.solve(matrix, b, initial=initial)
        initial[0, 0] = torch.nan
        solution = self.solve(matrix, b, initial=initial)
        assert solution.status.tolist() == [Status.NONFINITE, Status.CONVERGED]
        assert torch.equal(solution.value[1], clean.value[1])

    def test_empty_batches_give_empty_results(self) -> None:
        for shape in ((0, 5), (2, 0, 5), (3, 0)):
            solution = self.solve(torch.zeros(*shape, shape[-1], dtype=torch.float64), random(*shape))
            assert solution.value.shape == shape
            assert solution.status.shape == solution.residual.shape == solution.num_steps.shape == shape[:-1]
            assert solution.converged.all()

    def test_one_problem_without_batch_axes(self) -> None:
        matrix, b = self.matrices(), random(5, seed=1)
        solution = self.solve(matrix, b)
        assert solution.value.shape == (5,)
        assert solution.status.shape == ()
        assert relative_residual(matrix, b, solution.value) <= 1e-6

    def test_one_unknown(self) -> None:
        solution = self.solve(torch.tensor([[[0.5]], [[1.5]]]).double(), torch.tensor([[1.0], [3.0]]).double())
        assert solution.converged.all()
        check_close(solution.value, torch.tensor([[2.0], [2.0]]).double(), 1e-5, 0.0)

    def test_zero_right_hand_side_gives_exactly_zero_without_a_step(self) -> None:
        matrix, b = self.matrices(2), random(2, 5, seed=1)
        b[0] = 0.0
        for initial in (None, torch.ones_like(b)):
            solution = self.solve(matrix, b, initial=initial)
            assert torch.equal(solution.value[0], torch.zeros(5).double())
            assert solution.num_steps[0] == solution.residual[0] == 0
            assert solution.converged.all()

    def test_starts_from_the_initial_guess(self) -> None:
        matrix, b = self.matrices(2), random(2, 5, seed=1)
        exact = torch.linalg.solve(matrix, b)
        done = self.solve(matrix, b, initial=exact)
        assert done.num_steps.tolist() == [0, 0]
        assert torch.equal(done.value, exact)
        near = self.solve(matrix, b, initial=exact + 1e-5 * random(2, 5, seed=2))
        assert near.converged.all()
        alone = self.solve(matrix, b)
        assert (near.num_steps < alone.num_steps).all()
        # A guess that is no nearer than 0 is left out, beside one that is.
        far = self.solve(matrix, b, initial=torch.stack([1e6 * exact[0], exact[1]]))
        assert torch.equal(far.value, torch.stack([alone.value[0], exact[1]]))
        assert far.num_steps.tolist() == [int(alone.num_steps[0]), 0]

    def test_exhausted_budget_is_reported_and_kept(self) -> None:
        b = random(2, 5, seed=1)
        matrix = torch.stack([self.hard(), torch.eye(5, dtype=torch.float64)])
        solution = self.solve(matrix, b, max_steps=2, rtol=1e-10)
        assert solution.status.tolist() == [Status.MAX_STEPS, Status.CONVERGED]
        assert solution.num_steps.tolist() == [2, 1]
        assert 0 < solution.residual[0] < b[0].norm() * 2

    def test_num_steps_counts_the_products_up_to_the_last_check(self) -> None:
        product, b = dense_map(self.hard(12)), random(12, seed=1)
        calls: list[int] = []

        def counted(vector: Tensor) -> Tensor:
            calls.append(1)
            return product(vector)

        for initial in (None, random(12, seed=2)):
            for max_steps in (1, 6, 7, 400):
                for check_every in (1, None):  # None is 1 on the CPU
                    calls.clear()
                    solver = replace(self.solver, max_steps=max_steps, check_every=check_every)
                    solution = solver.solve(counted, b, initial=initial)
                    assert solution.num_steps <= max_steps
                    assert len(calls) == int(solution.num_steps) + 1 + (initial is not None)
        product = dense_map(torch.eye(12, dtype=torch.float64))
        calls.clear()
        replace(self.solver, check_every=3).solve(counted, b)
        assert len(calls) == 2  # one step is enough, and is looked at; one more product is the last check

    def test_check_every_changes_no_value(self) -> None:
        matrix, b = self.matrices(3), random(3, 5, seed=1)
        reference = self.solve(matrix, b, check_every=1)
        for check_every in (2, 7):
            self.check_scaled(self.solve(matrix, b, check_every=check_every), reference, 1.0)

    def test_scaling_b_by_a_power_of_two_scales_the_answer_exactly(self) -> None:
        matrix, b = self.matrices(2), random(2, 5, seed=1)
        reference = self.solve(matrix, b)
        for scale in (2.0**-1000, 2.0**-100, 2.0**90, 2.0**1000):
            self.check_scaled(self.solve(matrix, b * scale), reference, scale)
        matrix, b = matrix.float(), b.float()
        reference = self.solve(matrix, b)
        for scale in (2.0**-110, 2.0**70, 2.0**122):
            self.check_scaled(self.solve(matrix, b * scale), reference, scale)
        # Numbers that have lost digits themselves: the largest right-hand sides and the smallest.
        for scale in (2.0**125, 2.0**-145):
            scaled = b / b.abs().amax(-1, keepdim=True) * scale
            solution = self.solve(matrix, scaled)
            assert (solution.converged & (solution.num_steps > 0)).all()
            exact = torch.linalg.solve(matrix.double(), scaled.double()) / scale
            check_close(solution.value.double() / scale, exact, 1e-4, 2.0**-149 / scale)

    @staticmethod
    def check_scaled(solution: LinearSolution, reference: LinearSolution, scale: float) -> None:
        """Value and record are the same bits, but for the power of two."""
        numbers, scaled = (
            [getattr(each, name) for name in ("value", "residual", "tolerance", "num_steps", "status")]
            for each in (reference, solution)
        )
        check_close(scaled, [t * scale if t.is_floating_point() else t for t in numbers], 0.0)

    def test_float32_reaches_its_smallest_tolerance(self) -> None:
        matrix, b = self.matrices(3, n=20), random(3, 20, seed=1)
        solution = self.solve(matrix.float(), b.float(), rtol=1e-6)
        assert solution.value.dtype == solution.residual.dtype == torch.float32
        assert solution.converged.all()
        assert (relative_residual(matrix, b, solution.value.double()) < 3e-6).all()

    def test_detached_and_indifferent_to_grad_mode(self) -> None:
        matrix, b = self.matrices(2), random(2, 5, seed=1)
        leaf = b.clone().requires_grad_()
        solution = self.solve(matrix.clone().requires_grad_(), leaf, initial=leaf)
        assert not solution.value.requires_grad
        assert torch.equal(solution.value, self.solve(matrix, b, initial=b).value)

    def test_arguments_are_left_unchanged(self) -> None:
        matrix, b, initial = self.matrices(2), random(2, 5, seed=1), random(2, 5, seed=2)
        copies = b.clone(), initial.clone()
        self.solve(matrix, b, initial=initial)
        check_close((b, initial), copies, 0.0)

    def test_refuses_what_it_cannot_do(self) -> None:
        b, matrix, solve = random(2, 5), self.matrices(2), self.solver.solve
        product = dense_map(matrix)
        calls: list[tuple[type[Exception], str, Callable[[], object]]] = [
            (ValueError, "float64", lambda: self.solve(matrix.float(), b.float(), rtol=1e-8)),
            (TypeError, r"b\.float\(\)", lambda: solve(product, b.half())),
            (TypeError, r"b\.float\(\)", lambda: solve(product, b.bfloat16())),
            (TypeError, "`b`", lambda: solve(product, b.long())),
            (TypeError, "`matvec`", lambda: solve(matrix, b)),  # type: ignore[arg-type]
            (ValueError, "`initial`", lambda: solve(product, b, initial=b[:1])),
            (ValueError, "`initial`", lambda: solve(product, b, initial=b.float())),
            (ValueError, "matvec", lambda: solve(lambda v: v[..., :1], b)),
            (ValueError, "matvec", lambda: solve(lambda v: v.float(), b)),
        ]
        for error, match, call in calls:
            with pytest.raises(error, match=match):
                call()

    def test_refuses_wrong_options(self) -> None:
        for name, wrong in (("rtol", -1.0), ("rtol", 2.0), ("atol", -1e-9), ("max_steps", 0), ("check_every", 0)):
            with pytest.raises(ValueError, match=f"`{name}`.*{wrong}"):
                replace(self.solver, **{name: wrong})  # type: ignore[arg-type]
        for name in ("rtol", "max_steps", "check_every"):
            with pytest.raises(TypeError, match=f"`{name}`"):
                replace(self.solver, **{name: "1"})  # type: ignore[arg-type]
