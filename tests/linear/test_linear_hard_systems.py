"""Indefinite, singular, non-symmetric and divergent systems: solved, or reported as what they are."""

import pytest
import torch

from implicit_attention import Status
from implicit_attention.linear import CG, GMRES, MINRES, Neumann
from implicit_attention.testing.linear import dense_map, relative_residual, symmetric_matrices
from implicit_attention.testing.numerics import random

F64 = torch.float64


def diagonal(*entries):
    return torch.diag(torch.tensor(entries, dtype=F64))


def spread(n, low=0.1, high=3.0):
    return torch.linspace(low, high, n, dtype=F64)


# Negative curvature


def indefinite(seed):
    return symmetric_matrices(eigenvalues=torch.cat([spread(10), -spread(2)]), seed=seed)


def test_cg_stops_at_negative_curvature_and_returns_a_direction_of_it():
    matrix = torch.stack([indefinite(1), symmetric_matrices(eigenvalues=spread(12)), indefinite(2)])
    solution = CG().solve(dense_map(matrix), random(3, 12, seed=1))
    assert solution.negative_curvature.tolist() == [True, False, True]
    assert solution.status.tolist() == [Status.STALLED, Status.CONVERGED, Status.STALLED]
    direction = solution.direction[::2]
    assert (direction * dense_map(matrix[::2])(direction)).sum(-1).max() < 0
    torch.testing.assert_close(direction.norm(dim=-1), torch.ones(2, dtype=F64))
    assert not solution.direction[1].any()


def test_cg_keeps_the_iterate_that_it_had_when_it_met_negative_curvature():
    matrix, b = indefinite(1), random(12, seed=1)
    solution = CG().solve(dense_map(matrix), b)
    met_after = int(solution.num_steps)
    assert met_after > 1
    before = CG(max_steps=met_after - 1).solve(dense_map(matrix), b)
    assert not before.negative_curvature
    assert torch.equal(solution.value, before.value)


def test_zero_curvature_counts_as_negative_only_if_it_proves_an_indefinite_matrix():
    b = torch.ones(2, dtype=F64)
    saddle, flat = CG().solve(dense_map(diagonal(1, -1)), b), CG().solve(dense_map(diagonal(0, 0)), b)
    assert saddle.negative_curvature
    assert not flat.negative_curvature
    assert saddle.status == flat.status == Status.STALLED


@pytest.mark.parametrize("seed", range(5))
def test_rounding_on_a_singular_semidefinite_matrix_is_not_called_negative(seed):
    eigenvalues = torch.cat([torch.zeros(3, dtype=F64), spread(9)])
    matrix = symmetric_matrices(4, eigenvalues=eigenvalues, seed=seed)
    b = random(4, 12, seed=seed + 1)
    for method in (CG, MINRES):
        assert not method(rtol=1e-10).solve(dense_map(matrix), b).negative_curvature.any()


def test_minres_solves_indefinite_systems_and_flags_them():
    matrix = torch.stack([indefinite(1), symmetric_matrices(eigenvalues=spread(12)), indefinite(2)])
    b = random(3, 12, seed=1)
    solution = MINRES(rtol=1e-10).solve(dense_map(matrix), b)
    assert solution.converged.all()
    assert solution.negative_curvature.tolist() == [True, False, True]
    assert solution.direction is None
    torch.testing.assert_close(solution.value, torch.linalg.solve(matrix, b), rtol=1e-7, atol=1e-7)


def test_minres_flags_a_residual_of_negative_curvature_at_the_step_that_reads_it():
    matrix, b = indefinite(3), random(12, seed=4)
    product = dense_map(matrix)
    for step in range(1, 12):
        residuals = [b] + [
            b - product(MINRES(rtol=1e-12, max_steps=k).solve(product, b).value) for k in range(1, step)
        ]  # r_0 ... r_{step - 1}
        met = any(float(r @ product(r)) <= 0 for r in residuals)
        assert bool(MINRES(rtol=1e-12, max_steps=step).solve(product, b).negative_curvature) == met


# Singular and non-symmetric systems


def test_consistent_singular_systems_are_solved():
    matrix, b = diagonal(1, 2, 0), torch.tensor([1.0, 1, 0], dtype=F64)
    for method in (CG, MINRES, GMRES):
        solution = method().solve(dense_map(matrix), b)
        assert solution.converged
        torch.testing.assert_close(solution.value, torch.tensor([1, 0.5, 0], dtype=F64))


def test_inconsistent_singular_systems_end_as_stalled_least_squares():
    matrix, b = diagonal(1, 2, 0), torch.ones(3, dtype=F64)
    for method in (MINRES, GMRES):
        solution = method().solve(dense_map(matrix), b)
        assert solution.status == Status.STALLED
        torch.testing.assert_close(solution.residual, torch.tensor(1.0, dtype=F64))
    large = symmetric_matrices(eigenvalues=torch.cat([torch.zeros(1, dtype=F64), spread(29, 0.5, 2.0)]))
    b = random(30, seed=1)
    solution = MINRES().solve(dense_map(large), b)
    least = b - large @ (torch.linalg.pinv(large, hermitian=True, rtol=1e-10) @ b)
    assert solution.status == Status.STALLED
    torch.testing.assert_close(solution.residual, least.norm(), rtol=1e-10, atol=0)


def test_zero_matrix_stalls_without_nan():
    for method in (CG, MINRES, GMRES):
        solution = method().solve(dense_map(torch.zeros(2, 4, 4, dtype=F64)), random(2, 4))
        assert solution.status.tolist() == [Status.STALLED] * 2
        assert not solution.value.any()


def test_gmres_solves_rotations_and_general_matrices():
    quarter = torch.tensor([[0.0, -1], [1, 0]], dtype=F64)
    solution = GMRES().solve(dense_map(quarter), torch.tensor([1.0, 2], dtype=F64))
    torch.testing.assert_close(solution.value, torch.tensor([2.0, -1], dtype=F64))
    matrix, b = random(5, 20, 20, seed=2), random(5, 20, seed=3)
    solution = GMRES(rtol=1e-11).solve(dense_map(matrix), b)
    assert solution.converged.all()
    assert relative_residual(matrix, b, solution.value).max() < 1e-11
    torch.testing.assert_close(solution.value, torch.linalg.solve(matrix, b), rtol=1e-7, atol=1e-7)


def test_gmres_breakdown_of_one_problem_leaves_the_others_alone():
    b = random(3, 6, seed=1)
    general = random(6, 6, seed=2)
    matrix = torch.stack([torch.eye(6, dtype=F64), general, torch.zeros(6, 6, dtype=F64)])
    solution = GMRES(rtol=1e-10).solve(dense_map(matrix), b)
    assert solution.status.tolist() == [Status.CONVERGED, Status.CONVERGED, Status.STALLED]
    assert solution.num_steps.tolist()[0] == 1
    assert torch.equal(solution.value[1], GMRES(rtol=1e-10).solve(dense_map(general), b[1]).value)


def test_restart_changes_cost_and_stagnation_is_stalled():
    shift, b = torch.roll(torch.eye(6, dtype=F64), 1, 0), torch.eye(6, dtype=F64)[0]
    assert GMRES(restart=6).solve(dense_map(shift), b).num_steps == 6
    stagnant = GMRES(restart=5).solve(dense_map(shift), b)
    assert stagnant.status == Status.STALLED
    assert stagnant.num_steps == 5
    matrix, b = torch.eye(40, dtype=F64) + 0.1 * random(40, 40, seed=2), random(40, seed=1)
    short, full = GMRES(restart=5).solve(dense_map(matrix), b), GMRES(restart=40).solve(dense_map(matrix), b)
    assert short.converged
    assert short.num_steps > full.num_steps
    with pytest.raises(ValueError, match="restart"):
        GMRES(restart=0)


def test_neumann_reports_divergence_and_returns_its_best():
    matrix = torch.stack([diagonal(3, 1), diagonal(0.5, 1), diagonal(1e200, 1)])
    solution = Neumann().solve(dense_map(matrix), torch.ones(3, 2, dtype=F64))
    assert solution.status.tolist() == [Status.DIVERGED, Status.CONVERGED, Status.DIVERGED]
    assert solution.value.isfinite().all()
    assert (solution.residual <= 2**0.5).all()


def test_rotation_never_converges_under_neumann_and_says_so():
    quarter = torch.tensor([[1.0, 1], [-1, 1]], dtype=F64)  # I - A rotates by a quarter turn
    solution = Neumann(max_steps=50).solve(dense_map(quarter), torch.ones(2, dtype=F64))
    assert solution.status == Status.MAX_STEPS
    assert solution.num_steps == 50
