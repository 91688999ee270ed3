"""The saddle point of batches: symmetries, samples on their own, masks, precision, failures."""

import numpy as np
import pytest
import torch

from implicit_attention import ConvergenceError, Status
from implicit_attention.spins import AdaTAP, SaddlePoint, SpinSystem, free_energy, thermodynamics
from implicit_attention.testing.numerics import random

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
    with pytest.raises(ValueError, match="symmetric"):
        LEADING.multipliers(SpinSystem(random(3, 3), random(3, 2), 1.0))


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
