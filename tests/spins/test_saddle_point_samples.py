"""The saddle point of batches: symmetries, samples on their own, masks, precision, failures."""

import numpy as np
import pytest
import torch

from implicit_attention import ConvergenceError, Status
from implicit_attention.spins import AdaTAP, SaddlePoint, SpinSystem, free_energy, magnetization, thermodynamics
from implicit_attention.spins._matrix_inverse import inverse_and_logdet
from implicit_attention.testing.numerics import random, relative_error

pytestmark = pytest.mark.cases(2)

LEADING = SaddlePoint()
METHODS = [SaddlePoint(shared=shared, one_loop=loop) for shared in (False, True) for loop in (False, True)]
NAMES = ["leading", "one_loop", "shared", "shared_one_loop"]


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def disordered(*batch, n=3, d=5, seed=0, scale=0.7, dtype=torch.float64, beta=1.3, **options):
    """A diagonal, a field, R^2 != D."""
    couplings = scale * random(*batch, n, n, seed=seed)
    field = random(*batch, n, d, seed=seed + 1)
    options = {"radius": 1.7, **options}
    return SpinSystem((couplings + couplings.mT).to(dtype), field.to(dtype), beta, **options)


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_permuting_sites_and_turning_axes_permutes_and_turns_the_answer(method):
    system = disordered(2, n=4)
    order, turn = torch.tensor([2, 0, 3, 1]), torch.linalg.qr(random(5, 5, seed=9))[0]
    permuted = SpinSystem(system.couplings[:, order][:, :, order], system.field[:, order], 1.3, radius=1.7)
    turned = SpinSystem(system.couplings, system.field @ turn, 1.3, radius=1.7)
    value, m = free_energy(system, method), magnetization(system, method)
    torch.testing.assert_close(free_energy(permuted, method), value, rtol=1e-12, atol=0)
    torch.testing.assert_close(magnetization(permuted, method), m[:, order], rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(free_energy(turned, method), value, rtol=1e-12, atol=0)
    torch.testing.assert_close(magnetization(turned, method), m @ turn, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_one_sample_changes_no_other(method):
    """An easy sample, one far below its transition, one that is not a number, one of strong fields: all as if alone."""
    couplings, field = random(5, 6, 6, seed=2), random(5, 6, 4, seed=3)
    couplings = (couplings + couplings.mT) * double([0.1, 20.0, 1.0, 0.1, 0.3])[:, None, None]
    field = field * double([1.0, 0.0, 1.0, 100.0, 0.5])[:, None, None]
    couplings[2, 0, 1] = couplings[2, 1, 0] = torch.nan
    beta = double([0.5, 30.0, 1.0, 1.0, 2.0])
    found = thermodynamics(SpinSystem(couplings, field, beta), method, on_failure="ignore")
    assert found.report.status.tolist() == [0, 0, Status.NONFINITE, 0, 0]
    assert found.free_energy[2].isnan()
    for i in (0, 1, 3, 4):
        same = [i] * 5
        alone = thermodynamics(SpinSystem(couplings[same], field[same], beta[same]), method)
        for name in ("free_energy", "magnetization", "correlations", "heat_capacity", "entropy"):
            assert torch.equal(getattr(found, name)[i], getattr(alone, name)[i]), f"{name} of {i}"
        for name in ("num_evals", "num_steps", "residual"):
            assert torch.equal(getattr(found.report, name)[i], getattr(alone.report, name)[i]), f"{name} of {i}"


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
@pytest.mark.parametrize("block", [False, True], ids=["numbers", "matrices"])
def test_masked_sites_change_nothing(method, block):
    couplings, field = random(5, 5, seed=1), random(2, 5, 3, seed=2)
    if block:
        couplings = random(5, 5, 3, 3, seed=1) / 3
        couplings = couplings + couplings.permute(1, 0, 3, 2)
    else:
        couplings = couplings + couplings.mT
    mask = torch.tensor([True, False, True, True, False])
    short = SpinSystem(couplings[mask][:, mask], field[:, mask], 0.8)
    couplings[~mask], couplings[:, ~mask], field[:, ~mask] = (torch.nan,) * 3
    found, truth = (thermodynamics(s, method) for s in (SpinSystem(couplings, field, 0.8, mask=mask), short))
    torch.testing.assert_close(found.free_energy, truth.free_energy, rtol=1e-14, atol=0)
    torch.testing.assert_close(found.heat_capacity, truth.heat_capacity, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.magnetization[:, mask], truth.magnetization, rtol=1e-12, atol=1e-14)
    assert bool((found.magnetization[:, ~mask] == 0).all())
    assert bool(found.correlations.isfinite().all())
    nothing = SpinSystem(couplings, field, 0.8, mask=torch.zeros(5, dtype=torch.bool))
    assert method.log_partition(nothing).value.tolist() == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_single_precision_is_as_good_as_its_rounding(method):
    wide, narrow = (disordered(3, n=20, scale=0.2, dtype=dtype) for dtype in (torch.float64, torch.float32))
    found, truth = thermodynamics(narrow, method), thermodynamics(wide, method)
    for name in ("free_energy", "magnetization", "correlations", "heat_capacity"):
        assert getattr(found, name).dtype == torch.float32
        assert relative_error(getattr(found, name), getattr(truth, name)) < 1e-5, name


@pytest.mark.slow
def test_single_precision_never_asks_for_more_than_it_resolves():
    generator = np.random.default_rng(1)
    for k in range(100):
        n, beta = int(generator.integers(2, 65)), float(10 ** generator.uniform(-2, 2))
        system = disordered(n=n, d=4, seed=k, scale=n**-0.5, beta=beta, radius="sqrt_dim")
        if k % 2:
            system.field.zero_()
        narrow = SpinSystem(system.couplings.float(), system.field.float(), beta)
        value, evidence = LEADING.log_partition(narrow)
        assert int(evidence.status) == Status.CONVERGED, evidence
        truth = LEADING.log_partition(system).value
        assert abs(float(value) - float(truth)) < 3e-4 * (1 + abs(float(truth)))


def test_the_tolerance_is_what_was_asked_or_what_the_dtype_resolves():
    for dtype, rtol, resolved in [
        (torch.float64, 1e-12, 1e-12),
        (torch.float32, 1e-3, 1e-3),
        (torch.float32, 0.0, 2e-5),
    ]:
        evidence = SaddlePoint(rtol=rtol).log_partition(disordered(3, n=20, scale=0.2, dtype=dtype)).report
        assert bool(evidence.converged.all())
        assert bool((evidence.tolerance >= rtol).all())
        assert bool((evidence.tolerance <= max(resolved, torch.finfo(dtype).tiny)).all())


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_edges(method):
    alone = SpinSystem(torch.zeros(1, 1), torch.zeros(1, 1), 1.0)
    assert float(method.log_partition(alone).value) == 0.0
    empty = SpinSystem(torch.zeros(3, 3), torch.zeros(0, 3, 2), 1.0)
    found = thermodynamics(empty, method)
    assert found.free_energy.shape == found.report.status.shape == (0,)
    assert found.magnetization.shape == (0, 3, 2)
    one = disordered()
    several = SpinSystem(one.couplings, one.field.expand(3, 2, 3, 5), double([0.5, 1.0, 2.0])[:, None])
    value = free_energy(several, method)
    assert value.shape == (3, 2)
    for i, beta in enumerate((0.5, 1.0, 2.0)):
        alone = free_energy(SpinSystem(one.couplings, one.field, beta), method)
        # To the rounding error of the terms of log Z/D, of order 1, which cancel in it.
        torch.testing.assert_close(value[i], alone.expand(2), rtol=0, atol=4 * 2.0**-52 * one.dim / beta)


def test_failures_are_told():
    hard = disordered(2, n=20, scale=5.0)
    with pytest.raises(ConvergenceError, match="raise max_steps"):
        free_energy(hard, SaddlePoint(max_steps=2))
    evidence = SaddlePoint(max_steps=2).log_partition(hard).report
    assert evidence.status.tolist() == [Status.MAX_STEPS] * 2
    # The guess, the start and two steps.
    assert evidence.num_evals.tolist() == [4, 4]
    loose = SaddlePoint(rtol=1e-2).log_partition(hard).report
    assert bool(loose.converged.all() & (loose.residual > 1e-8).any() & (loose.residual <= 1e-2).all())
    for refused in (LEADING.multipliers, lambda system: free_energy(system, LEADING)):
        with pytest.raises(ValueError, match="symmetric"):
            refused(SpinSystem(random(3, 3), random(3, 2), 1.0))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"shared": 1}, TypeError, "`shared` must be True or False"),
        ({"one_loop": "yes"}, TypeError, "`one_loop` must be True or False"),
        ({"rtol": -1.0}, ValueError, "`rtol` must be >= 0"),
        ({"max_steps": 0}, ValueError, "`max_steps` must be >= 1"),
    ],
)
def test_wrong_options_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        SaddlePoint(**options)


def magnets(sites, dim, *, count, seed, dtype=torch.float64):
    """From far above to far below their transition, a fifth without a field, the others in one of any size; equal
    couplings of either sign, and random ones: of either sign, all positive, all negative."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, sites, sites, dtype=torch.float64, generator=generator)
    kinds = torch.stack([drawn, drawn.abs(), -drawn.abs(), torch.ones_like(drawn), -torch.ones_like(drawn)])
    couplings = kinds[torch.arange(count) % 5, torch.arange(count)] / sites
    couplings = torch.tril(couplings, -1) + torch.tril(couplings, -1).mT
    exponent = torch.rand(2, count, dtype=torch.float64, generator=generator)
    beta, size = 10 ** (4 * exponent[0] - 1.2), 10 ** (-14 * exponent[1])
    size[torch.arange(count) // 5 % 5 == 0] = 0.0
    field = size[:, None, None] * torch.randn(count, sites, dim, dtype=torch.float64, generator=generator)
    return SpinSystem(couplings.to(dtype), field.to(dtype), beta.to(dtype))


def spherical(system):
    """log Z of the spherical model by bisection for the one multiplier, in the basis of the eigenvectors of J."""
    beta, n, d = system.beta[:, None], system.num_sites, system.dim
    values, vectors = torch.linalg.eigh(system.couplings)
    square = (vectors.mT @ (beta[..., None] * system.field / d**0.5)).square().sum(-1)
    below = beta * (values.amax(-1, keepdim=True) - values)
    low = torch.zeros_like(beta)
    high = n + 2 * square.sum(-1, keepdim=True).sqrt() + 10
    for _ in range(150):
        middle = (low + high) / 2
        long = (1 / (middle + below) + square / (middle + below) ** 2).mean(-1, keepdim=True) > 1
        low, high = torch.where(long, middle, low), torch.where(long, high, middle)
    multiplier = low[:, 0] + (beta * values).amax(-1)
    return d / 2 * (n * (multiplier - 1) - (low + below).log().sum(-1) + (square / (low + below)).sum(-1)), multiplier


@pytest.mark.parametrize("sites", [2, 3, 5, 8, 12])
def test_of_a_thousand_small_magnets_each_has_the_answer_of_bisection(sites):
    """Cold magnets have trial steps at which a pivot of Cholesky's factorization is exactly 0."""
    for dim in (1, 3):
        system = magnets(sites, dim, count=500, seed=sites)
        value, evidence = SaddlePoint(shared=True).log_partition(system)
        truth, multiplier = spherical(system)
        assert bool((evidence.status == Status.CONVERGED).all())
        assert bool(((value - truth).abs() <= 1e-11 * (1 + sites * dim * multiplier)).all())


@pytest.mark.parametrize("method", [*METHODS, AdaTAP()], ids=[*NAMES, "adaptive_tap"])
def test_no_cold_magnet_fails_its_batch_in_float32(method):
    system = magnets(5, 3, count=300, seed=1, dtype=torch.float32)
    found = thermodynamics(system, method)
    assert bool((found.report.status == Status.CONVERGED).all())
    assert bool(found.heat_capacity.isfinite().all())


def test_what_cannot_be_factorised_has_no_log_determinant_and_changes_no_other():
    singular, negative, fit = torch.ones(2, 2), -torch.eye(2), double([[2.0, 1.0], [1.0, 2.0]]).float()
    inverse, logdet, positive = inverse_and_logdet(torch.stack([singular, negative, fit]))
    assert positive.tolist() == [False, False, True]
    assert logdet.isnan().tolist() == [True, True, False]
    torch.testing.assert_close(inverse[2], torch.linalg.inv(fit))
    torch.testing.assert_close(logdet[2], torch.linalg.det(fit).log())


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_single_precision_is_as_good_in_the_cold(method):
    """A is singular to 1/beta there, and the heat capacity has two more powers of it."""
    beta = double([1.0, 100.0, 1000.0, 10000.0])
    couplings = random(4, 24, 24, seed=6).float().double()
    couplings, field = (couplings + couplings.mT) / 8, 0.1 * random(4, 24, 16, seed=7).float().double()
    wide = thermodynamics(SpinSystem(couplings, field, beta), method)
    narrow = thermodynamics(SpinSystem(couplings.float(), field.float(), beta.float()), method)
    for name in ("log_partition", "internal_energy", "heat_capacity", "magnetization"):
        found, truth = getattr(narrow, name), getattr(wide, name)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), truth, rtol=2e-6, atol=1e-6)
