"""Diagnostics against dense linear algebra and against cases with known answers."""

import math

import pytest
import torch

from implicit_attention import AnchoredEnergy, FixedPointMap, LogSumExp, Picard, solve
from implicit_attention.diagnostics import (
    certified_error,
    diagnose,
    distinct_fixed_points,
    effective_keys,
    is_saddle,
    smallest_curvature,
    spectral_radius,
)
from implicit_attention.testing.numerics import dense_jacobian, random
from implicit_attention.testing.problems import hopfield_energy


def test_curvature_and_radius_equal_the_dense_eigenvalues():
    energy = hopfield_energy(batch=(2,), queries=4, keys=9, dim=6, sharpness=2.0, anchor=0.1)
    jacobian = dense_jacobian(energy, energy.field)
    eigenvalues = torch.linalg.eigvalsh(jacobian)
    torch.testing.assert_close(smallest_curvature(energy, energy.field), 1 - eigenvalues[..., -1])
    torch.testing.assert_close(spectral_radius(energy, energy.field), eigenvalues.abs().amax(-1))
    assert torch.equal(is_saddle(energy, energy.field), eigenvalues[..., -1] > 1)


def test_radius_of_a_map_that_is_no_gradient():
    weight = random(4, 4)
    problem = FixedPointMap(lambda z, w: torch.tanh(z @ w.mT), weight, event_ndim=1)
    z = random(3, 4, seed=1)
    expected = torch.linalg.eigvals(dense_jacobian(problem, z)).abs().amax(-1)
    torch.testing.assert_close(spectral_radius(problem, z), expected)
    with pytest.raises(ValueError, match=r"`problem` must have a symmetric Jacobian \(an energy\), got FixedPointMap"):
        smallest_curvature(problem, z)


def test_two_keys_make_a_saddle_between_them_when_beta_is_large():
    keys = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    middle = torch.zeros(1, 2, dtype=torch.float64)
    for beta, saddle in ((0.5, False), (2.0, True)):
        energy = AnchoredEnergy(LogSumExp(keys, beta), middle)
        assert smallest_curvature(energy, middle).item() == pytest.approx(1 - beta)
        assert is_saddle(energy, middle).item() is saddle


def test_distinct_fixed_points_are_counted_per_batch_entry():
    points = torch.tensor([[1.0, 0.0], [1.001, 0.0], [-1.0, 0.0], [0.0, 3.0], [float("nan"), 0.0]])
    assert distinct_fixed_points(points).item() == 3
    assert distinct_fixed_points(torch.stack([points, points[:1].expand(5, 2)])).tolist() == [3, 1]
    assert distinct_fixed_points(points, rtol=1e-4).item() == 4
    assert distinct_fixed_points(torch.zeros(1500, 3)).item() == 1
    with pytest.raises(ValueError, match="`value` must have a leading axis"):
        distinct_fixed_points(torch.zeros(3))


def test_small_beta_collapses_all_queries_to_one_point():
    cold, warm = (hopfield_energy(keys=32, queries=32, dim=8, sharpness=s) for s in (20.0, 0.3))
    assert distinct_fixed_points(solve(warm, warm.field, solver=Picard(rtol=1e-6)).value).item() == 1
    assert distinct_fixed_points(solve(cold, cold.field).value).item() > 8


def test_effective_keys_run_from_one_to_all():
    keys, z = random(2, 7, 5), random(2, 600, 5, seed=1)
    torch.testing.assert_close(effective_keys(LogSumExp(keys, 1e-9), z), torch.full((2, 600), 7.0).double())
    torch.testing.assert_close(effective_keys(LogSumExp(keys, 1e7), z), torch.ones(2, 600).double())
    mask = torch.ones(2, 600, 7, dtype=torch.bool)
    mask[0, 1] = False
    mask[1, 2, 3:] = False
    masked = effective_keys(LogSumExp(keys, 1e-9, mask=mask), z)
    assert masked[0, 1] == 0
    assert masked[1, 2].item() == pytest.approx(3)


def test_effective_keys_are_the_exponential_of_the_entropy():
    keys, z, beta = random(7, 5), random(3, 5, seed=1), 0.7
    p = (beta * z @ keys.T).softmax(-1)
    torch.testing.assert_close(effective_keys(LogSumExp(keys, beta), z), (-(p * p.log()).sum(-1)).exp())


def test_certified_error_bounds_the_true_error_and_is_tight():
    keys = 0.3 * random(2, 9, 6)
    field = random(2, 5, 6, seed=1)
    energy = AnchoredEnergy(LogSumExp(keys, 0.8), field, 0.3)
    truth = solve(energy, field, solver=Picard(rtol=1e-15, atol=1e-15)).value
    for steps in (1, 3, 6):
        rough = solve(energy, field, solver=Picard(max_steps=steps, rtol=0, atol=0))
        error = (rough.value - truth).norm(dim=-1)
        bound = certified_error(energy, rough)
        assert (error <= bound * (1 + 1e-9)).all()
        assert (bound < 3 * error).all()


def offset(shift, beta, dtype=torch.float32, anchor=0.5):
    """Keys and queries that have `shift` in common, whose neighbours are what matters; as they are in float32."""
    keys = (random(4, 40, 6, dtype=torch.float32) / 2 + shift).to(dtype)
    query = (random(4, 40, 6, seed=1, dtype=torch.float32) / 2 + shift).to(dtype)
    return AnchoredEnergy(LogSumExp(keys, beta), query, anchor)


@pytest.mark.parametrize("shift", [0.0, 30.0, 300.0, 3000.0])
def test_a_certificate_holds_in_float32_for_keys_that_have_much_in_common(shift):
    energy, exact = offset(shift, 0.3), offset(shift, 0.3, torch.float64)
    solution = solve(energy, energy.field, solver=Picard(rtol=1e-6))
    truth = solve(exact, solution.value.double(), solver=Picard(rtol=0, atol=1e-11, max_steps=1000)).value
    error = (solution.value.double() - truth).norm(dim=-1)
    bound = certified_error(energy, solution)
    assert bound.dtype == torch.float32
    assert bound.isfinite().all()
    assert (error <= bound).all()
    # Not by being of no use.
    assert (bound <= 3 * error + 1e-7 * (1 + shift)).all()


def test_a_certificate_of_queries_that_attend_to_nothing_and_of_keys_hidden_from_all():
    keys, query = random(70, 6) / 2 + 50, random(9, 6, seed=1)
    mask = torch.ones(9, 70, dtype=torch.bool)
    mask[:, 40:], mask[3] = False, False
    energy = AnchoredEnergy(LogSumExp(keys, 0.1, mask=mask), query, 0.5)
    solution = solve(energy, query, solver=Picard(max_steps=3, rtol=0, atol=0))
    truth = solve(energy, query, solver=Picard(rtol=1e-15, atol=1e-13, max_steps=1000), on_failure="ignore").value
    error, bound = (solution.value - truth).norm(dim=-1), certified_error(energy, solution)
    assert (error <= bound + 1e-12).all()
    assert bound[3] < 1e-9


@pytest.mark.parametrize("shift", [300.0, 3000.0])
def test_what_keys_have_in_common_makes_no_saddle(shift):
    energy, exact = offset(shift, 2.0), offset(shift, 2.0, torch.float64)
    z = energy.field
    assert not is_saddle(exact, z.double()).any()
    assert not is_saddle(energy, z).any()
    expected = smallest_curvature(exact, z.double())
    assert (smallest_curvature(energy, z).double() - expected).abs().max() < 2e-3
    v = random(*z.shape, seed=2, dtype=torch.float32)
    product, truth = (e.hessian_product(z.to(v.dtype), v) for e, v in ((energy, v), (exact, v.double())))
    assert (product.double() - truth).norm() < 1e-2 * truth.norm()


def test_no_certificate_where_the_map_may_not_contract():
    energy = hopfield_energy(queries=3, keys=20, dim=8, sharpness=4.0)
    assert certified_error(energy, solve(energy, energy.field)).isinf().all()
    problem = FixedPointMap(lambda z: z / 2, event_ndim=1)
    assert certified_error(problem, solve(problem, torch.zeros(3, 2))).isinf().all()


def test_energy_traces_fall():
    energy = hopfield_energy(queries=5, keys=20, dim=8, clustered=True)
    trace = solve(energy, energy.field, solver=Picard(), trace=True).trace.energy
    assert trace.shape[1] == 5
    assert (trace.diff(dim=0) <= 1e-12).all()


def test_diagnose_gathers_everything():
    energy = hopfield_energy(batch=(2,), queries=5, keys=20, dim=8, sharpness=3.0, anchor=0.2)
    found = diagnose(energy, solve(energy, energy.field))
    assert found.distinct.shape == (2,)
    assert found.saddle.sum() == 0
    assert (found.smallest_curvature > 0).all()
    assert found.effective_keys is not None
    problem = FixedPointMap(lambda z: z / 2, event_ndim=1)
    other = diagnose(problem, solve(problem, torch.ones(3, 2)))
    assert other.smallest_curvature.isnan().all()
    assert other.effective_keys is None
    assert other.spectral_radius.tolist() == pytest.approx([0.5] * 3)
    assert math.isinf(other.certified_error[0])
