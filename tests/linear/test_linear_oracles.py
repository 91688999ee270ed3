"""Each method against dense algebra and SciPy, and in the cases that only it, or not even it, can solve."""

import numpy as np
import pytest
import scipy.sparse.linalg
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


def counted_scipy(method, matrix, b, **options):
    """(solution, number of products) of a scipy.sparse.linalg method."""
    calls = []

    def product(vector):
        calls.append(1)
        return matrix.numpy() @ vector

    operator = scipy.sparse.linalg.LinearOperator(matrix.shape, matvec=product, dtype=np.float64)
    value, code = getattr(scipy.sparse.linalg, method)(operator, b.numpy(), **options)
    assert code == 0
    return torch.from_numpy(value), len(calls)


@pytest.mark.parametrize("ours", [CG, MINRES])
def test_symmetric_methods_match_scipy_in_value_and_cost(ours):
    matrix, b = symmetric_matrices(eigenvalues=spread(40)), random(40, seed=1)
    options = {"rtol": 1e-8} if ours is CG else {"rtol": 1e-10}
    expected, calls = counted_scipy(ours.__name__.lower(), matrix, b, **options)
    solution = ours(rtol=1e-8).solve(dense_map(matrix), b)
    assert solution.converged
    torch.testing.assert_close(solution.value, expected, rtol=1e-6, atol=1e-6)
    assert solution.num_steps <= calls + 2


def test_cg_iterates_are_those_of_scipy():
    matrix, b = symmetric_matrices(eigenvalues=spread(20)), random(20, seed=1)
    iterates = []
    scipy.sparse.linalg.cg(matrix.numpy(), b.numpy(), rtol=0, maxiter=6, callback=lambda x: iterates.append(x.copy()))
    for step, iterate in enumerate(iterates, start=1):
        solution = CG(rtol=1e-12, max_steps=step).solve(dense_map(matrix), b)
        torch.testing.assert_close(solution.value, torch.from_numpy(iterate), rtol=1e-10, atol=1e-12)


def test_gmres_matches_scipy_in_value_and_cost():
    matrix, b = torch.eye(40, dtype=F64) + 0.1 * random(40, 40, seed=2), random(40, seed=1)
    expected, calls = counted_scipy("gmres", matrix, b, rtol=1e-8, restart=40)
    solution = GMRES(rtol=1e-8, restart=40).solve(dense_map(matrix), b)
    assert solution.converged
    torch.testing.assert_close(solution.value, expected, rtol=1e-6, atol=1e-6)
    assert abs(int(solution.num_steps) - calls) <= 2


def test_gmres_of_long_vectors_near_the_identity():
    # Each product is nearly in the span of those before, from which one pass does not free it.
    diagonal, b = 1 + 0.05 * spread(1100), random(2, 1100, seed=1)
    solution = GMRES(rtol=1e-12).solve(lambda v: diagonal * v, b)
    assert solution.converged.all()
    torch.testing.assert_close(solution.value, b / diagonal, rtol=1e-10, atol=1e-11)


def test_minres_and_gmres_minimise_the_residual_over_the_krylov_space():
    matrix, b = symmetric_matrices(eigenvalues=spread(12, -2.0, 3.0)), random(12, seed=1)
    for step in range(1, 8):
        krylov = torch.stack([torch.linalg.matrix_power(matrix, k) @ b for k in range(step)], -1)
        krylov = torch.linalg.qr(krylov)[0]
        least = b - matrix @ krylov @ torch.linalg.lstsq(matrix @ krylov, b.unsqueeze(-1)).solution.squeeze(-1)
        for method in (MINRES, GMRES):
            residual = method(rtol=1e-12, max_steps=step).solve(dense_map(matrix), b).residual
            torch.testing.assert_close(residual, least.norm(), rtol=1e-8, atol=0)


def test_neumann_sums_the_series():
    matrix, b = symmetric_matrices(eigenvalues=spread(6, 0.3, 1.7)), random(6, seed=1)
    power, total = b, b * 0
    for step in range(1, 9):
        total, power = total + power, power - matrix @ power
        torch.testing.assert_close(Neumann(rtol=1e-12, max_steps=step).solve(dense_map(matrix), b).value, total)


# Rounding


def test_a_recurrence_that_drifts_is_refined_or_reported():
    eigenvalues = torch.logspace(-4, 0, 30, dtype=F64)
    matrix, b = symmetric_matrices(3, eigenvalues=eigenvalues), random(3, 30, seed=1)
    for method in (CG, MINRES, GMRES):
        solution = method(rtol=1e-6).solve(dense_map(matrix.float()), b.float())
        truth = relative_residual(matrix.float().double(), b.float().double(), solution.value.double())
        assert (solution.status == Status.CONVERGED).tolist() == (truth <= 1e-5).tolist()
        assert (solution.status != Status.CONVERGED).any()
        assert (solution.status[truth > 1e-5] == Status.STALLED).all()


def test_refinement_pays_for_a_drifted_recurrence():
    matrix, b = symmetric_matrices(eigenvalues=torch.logspace(-9, 0, 12, dtype=F64)), random(12, seed=1)
    refined = MINRES(rtol=1e-4, max_steps=500).solve(dense_map(matrix), b)
    assert refined.converged
    assert relative_residual(matrix, b, refined.value) <= 1e-4


def test_an_invariant_subspace_ends_a_sweep_even_without_a_tolerance():
    matrix, b = diagonal(1, 1, 1, 1, 1, 2, 2, 2, 2, 2), random(4, 10, seed=1)
    for method in (MINRES, GMRES):
        solution = method(rtol=0.0).solve(dense_map(matrix), b)
        assert solution.num_steps.max() < 15
        assert solution.residual.max() < 1e-14


def test_matvec_may_use_autograd_itself():
    matrix, b = symmetric_matrices(2, eigenvalues=spread(8)), random(2, 8, seed=1)

    def energy(z):
        return 0.5 * (z * dense_map(matrix)(z)).sum()

    def product(vector):
        return torch.func.vjp(torch.func.grad(energy), b)[1](vector)[0]  # the Hessian is symmetric

    torch.testing.assert_close(
        CG(rtol=1e-10).solve(product, b).value, torch.linalg.solve(matrix, b), rtol=1e-7, atol=1e-7
    )
