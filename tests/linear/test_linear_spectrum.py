"""Lanczos and Arnoldi against dense eigenvalues."""

import pytest
import torch

from implicit_attention.linear import extreme_eigenvalues, lanczos, spectral_radius
from implicit_attention.testing.linear import dense_map
from implicit_attention.testing.numerics import random

F64 = torch.float64


def symmetric(*batch, n=9, seed=0):
    matrix = random(*batch, n, n, seed=seed)
    return matrix + matrix.mT


def test_n_steps_give_the_whole_spectrum():
    matrix = symmetric(2, 3)
    result = lanczos(dense_map(matrix), random(2, 3, 9, seed=1), 9)
    torch.testing.assert_close(result.ritz_values, torch.linalg.eigvalsh(matrix), rtol=1e-10, atol=1e-10)
    assert result.error_bounds.max() < 1e-10


def test_basis_is_orthonormal_and_reduces_the_map():
    matrix = symmetric(2, n=30)
    result = lanczos(dense_map(matrix), random(2, 30, seed=1), 12)
    basis = result.basis
    assert basis.shape == (2, 12, 30)
    torch.testing.assert_close(basis @ basis.mT, torch.eye(12, dtype=F64).expand(2, 12, 12), rtol=0, atol=1e-13)
    tridiagonal = result.alphas.diag_embed() + result.betas.diag_embed(1) + result.betas.diag_embed(-1)
    torch.testing.assert_close(basis @ matrix @ basis.mT, tridiagonal, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [40, 1100])
def test_orthogonality_survives_a_spectrum_on_which_one_pass_loses_it(n):
    spectrum = torch.logspace(-12, 0, n, dtype=F64)
    basis = lanczos(lambda v: spectrum * v, random(2, n, seed=1), 30).basis
    torch.testing.assert_close(basis @ basis.mT, torch.eye(30, dtype=F64).expand(2, 30, 30), rtol=0, atol=1e-13)


def test_betas_vanish_where_an_invariant_subspace_is_complete():
    result = lanczos(dense_map(torch.diag(torch.tensor([1.0, 1, 1, 2, 2])).double()), random(5, seed=1), 5)
    assert (result.betas == 0).tolist() == [False, True, False, True]


def test_error_bounds_hold():
    matrix = symmetric(4, n=30)
    result = lanczos(dense_map(matrix), random(4, 30, seed=1), 8)
    distance = (result.ritz_values.unsqueeze(-1) - torch.linalg.eigvalsh(matrix).unsqueeze(-2)).abs().amin(-1)
    assert (distance <= result.error_bounds + 1e-12).all()
    assert result.error_bounds.max() > 1e-3


def test_error_bounds_are_the_residuals_of_the_ritz_vectors():
    matrix = symmetric(n=20)
    result = lanczos(dense_map(matrix), random(20, seed=1), 6)
    tridiagonal = result.alphas.diag() + result.betas.diag(1) + result.betas.diag(-1)
    vectors = torch.linalg.eigh(tridiagonal)[1].mT @ result.basis
    residual = vectors @ matrix - result.ritz_values.unsqueeze(-1) * vectors
    torch.testing.assert_close(result.error_bounds, residual.norm(dim=-1), rtol=1e-8, atol=1e-12)


def test_extremes_bracket_and_sharpen_with_steps():
    matrix, start = symmetric(3, n=60), random(3, 60, seed=1)
    exact = torch.linalg.eigvalsh(matrix)
    few, many = (extreme_eigenvalues(dense_map(matrix), start, steps) for steps in (5, 40))
    for smallest, largest in (few, many):
        assert (smallest.value >= exact[:, 0] - 1e-10).all()
        assert (largest.value <= exact[:, -1] + 1e-10).all()
    assert (many[0].value - exact[:, 0]).max() < 1e-6 < (few[0].value - exact[:, 0]).min()
    assert (many[1].error_bound < few[1].error_bound).all()


@pytest.mark.parametrize("matrix", [torch.eye(5), torch.zeros(5, 5), torch.diag(torch.tensor([1.0, 1, 2, 2, 3]))])
def test_invariant_subspaces_are_left_without_nan_and_with_true_ritz_values(matrix):
    matrix = torch.stack([matrix.double(), symmetric(n=5)])
    start = torch.ones(2, 5, dtype=F64)
    result = lanczos(dense_map(matrix), start, 5)
    torch.testing.assert_close(result.ritz_values, torch.linalg.eigvalsh(matrix), rtol=1e-10, atol=1e-10)
    eye = torch.eye(5, dtype=F64).expand(2, 5, 5)
    torch.testing.assert_close(result.basis @ result.basis.mT, eye, rtol=0, atol=1e-13)
    alone = lanczos(dense_map(matrix[1]), start[1], 5)
    assert torch.equal(result.ritz_values[1], alone.ritz_values)


def test_a_start_in_an_invariant_subspace_does_not_hide_the_rest():
    matrix = torch.diag(torch.arange(6, dtype=F64))
    smallest, largest = extreme_eigenvalues(dense_map(matrix), torch.eye(6, dtype=F64)[2], 6)
    torch.testing.assert_close(smallest.value, torch.zeros((), dtype=F64), rtol=0, atol=1e-12)
    torch.testing.assert_close(largest.value, torch.tensor(5.0, dtype=F64))


def test_spectral_radius_of_nonsymmetric_maps():
    matrix = random(4, 12, 12, seed=2)
    exact = torch.linalg.eigvals(matrix).abs().amax(-1)
    torch.testing.assert_close(spectral_radius(dense_map(matrix), random(4, 12, seed=1), 12), exact)
    half_turn = 0.7 * torch.tensor([[0.0, -1], [1, 0]], dtype=F64)
    assert abs(float(spectral_radius(dense_map(half_turn), torch.eye(2, dtype=F64)[0])) - 0.7) < 1e-12
    nilpotent = torch.diag(torch.ones(3, dtype=F64), 1)
    assert spectral_radius(dense_map(nilpotent), torch.ones(4, dtype=F64), 4) < 1e-3


def test_nan_stays_in_its_problem():
    matrix, start = symmetric(3), random(3, 9, seed=1)
    clean = lanczos(dense_map(matrix), start, 5).ritz_values
    radius = spectral_radius(dense_map(matrix), start, 5)
    matrix[1, 0, 0] = torch.nan
    sick = lanczos(dense_map(matrix), start, 5)
    assert sick.ritz_values[1].isnan().all()
    assert sick.error_bounds[1].isnan().all()
    assert torch.equal(sick.ritz_values[::2], clean[::2])
    poisoned = spectral_radius(dense_map(matrix), start, 5)
    assert poisoned[1].isnan()
    assert torch.equal(poisoned[::2], radius[::2])


def test_edges_of_shape():
    assert lanczos(dense_map(torch.zeros(0, 4, 4)), torch.zeros(0, 4), 3).ritz_values.shape == (0, 3)
    assert spectral_radius(dense_map(torch.zeros(0, 4, 4)), torch.zeros(0, 4), 3).shape == (0,)
    one = lanczos(dense_map(torch.tensor([[2.0]])), torch.tensor([5.0]), 10)
    assert one.ritz_values.tolist() == [2.0]
    assert one.betas.shape == (0,)
    zero_start = lanczos(dense_map(torch.diag(torch.tensor([1.0, 2.0]))), torch.zeros(2), 2)
    torch.testing.assert_close(zero_start.ritz_values, torch.tensor([1.0, 2.0]))


def test_the_global_generator_is_left_alone():
    before = torch.random.get_rng_state()
    lanczos(dense_map(symmetric()), random(9), 4)
    assert torch.equal(before, torch.random.get_rng_state())


def test_refusals():
    product = dense_map(symmetric())
    with pytest.raises(ValueError, match="`steps` must be >= 1, got 0"):
        lanczos(product, random(9), 0)
    with pytest.raises(TypeError, match="float"):
        lanczos(product, torch.ones(9, dtype=torch.int64), 3)
    with pytest.raises(ValueError, match="at least one entry"):
        spectral_radius(product, torch.zeros(2, 0), 3)
