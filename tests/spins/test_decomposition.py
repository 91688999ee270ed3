"""What a magnetization is made of, and how F grows with the number of sites."""

import math

import numpy as np
import pytest
import torch

from implicit_attention import ConvergenceError
from implicit_attention.potentials import AmosResponse
from implicit_attention.spins import (
    Bethe,
    Enumeration,
    MeanField,
    SaddlePoint,
    SpinSystem,
    decompose,
    extensivity,
    free_energy,
    magnetization,
    stability,
)
from implicit_attention.testing.numerics import random

N, D = 4, 3
METHODS = {
    "mean field": (MeanField(), D),
    "amos": (MeanField(response=AmosResponse()), D),
    "saddle point": (SaddlePoint(), D),
    "one loop": (SaddlePoint(one_loop=True), D),
    "enumeration": (Enumeration(), 1),
    "bethe": (Bethe(), 1),
}


def symmetric(n=N, seed=0, scale=0.3):
    couplings = scale * random(n, n, seed=seed)
    couplings = (couplings + couplings.mT) / 2
    return couplings - torch.diag(couplings.diagonal())


def close(value, truth, tolerance=1e-11):
    torch.testing.assert_close(value, truth, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("function", [False, True])
def test_the_parts_sum_to_the_magnetization(name, function):
    method, dim = METHODS[name]
    weight = symmetric()

    def couplings(h):
        return weight * torch.tanh(h @ h.mT)

    field = 0.5 * random(2, N, dim, seed=1)
    system = SpinSystem(couplings if function else weight, field, 0.8)
    parts = decompose(system, method)
    direct, through = magnetization(system, method, split=True)
    close(parts.total, direct + through)
    close(parts.coupling_function, through, 0.0)
    assert bool(through.any()) == function
    # The gain is a number: the parts are parallel to what causes them.
    close(parts.field, parts.gain[..., None] * field)
    close(parts.coupling, parts.gain[..., None] * system.coupled(direct))


def test_only_naive_mean_field_has_no_onsager_term():
    system = SpinSystem(symmetric(), 0.5 * random(2, N, 1, seed=1), 0.8)
    assert float(decompose(system, MeanField()).onsager.abs().max()) < 1e-10
    assert float(decompose(system, Enumeration()).onsager.abs().max()) > 1e-2


def test_of_steepest_descent_the_onsager_term_is_parallel_to_the_spin():
    parts = decompose(SpinSystem(symmetric(), random(N, D, seed=1), 1.2), SaddlePoint())
    m = parts.total
    across = parts.onsager - (parts.onsager * m).sum(-1, keepdim=True) / m.square().sum(-1, keepdim=True) * m
    assert float(across.abs().max()) < 1e-9
    assert float(parts.onsager.abs().max()) > 1e-2


def test_masked_sites_have_no_parts():
    mask = torch.tensor([True, True, False, True])
    field, couplings = random(N, D, seed=1), symmetric()
    parts = decompose(SpinSystem(couplings, field, 1.0, mask=mask), MeanField())
    kept = SpinSystem(couplings[mask][:, mask], field[mask], 1.0)
    for name in ("field", "coupling", "onsager", "coupling_function", "total"):
        value = getattr(parts, name)
        close(value[mask], getattr(decompose(kept, MeanField()), name))
        assert not value[~mask].any()


def test_the_parts_can_be_differentiated():
    field = (0.5 * random(3, 2, seed=1)).requires_grad_()
    couplings = symmetric(3).requires_grad_()
    beta = torch.tensor(0.8).double().requires_grad_()

    def parts(field, couplings, beta):
        found = decompose(SpinSystem((couplings + couplings.mT) / 2, field, beta), SaddlePoint())
        return found.field, found.coupling, found.onsager

    assert torch.autograd.gradcheck(parts, (field, couplings, beta))


def test_a_failure_is_told_and_a_length_beyond_the_radius_is_nan():
    with pytest.raises(ConvergenceError, match="SaddlePoint failed"):
        decompose(SpinSystem(symmetric(), random(N, D, seed=1), 1.0), SaddlePoint(max_steps=1))
    field = random(2, N, D, seed=1)
    field[1, 0] = torch.nan
    parts = decompose(SpinSystem(symmetric(), field, 1.0), SaddlePoint(), on_failure="ignore")
    assert parts.total[0].isfinite().all()
    assert parts.total[1].isnan().all()


# Extensivity.


@pytest.mark.parametrize(
    ("method", "power", "exponent"), [(SaddlePoint(), 0.5, 1.0), (MeanField(), 0.5, 1.0), (SaddlePoint(), 0.0, 1.7)]
)
def test_free_energies_are_extensive_at_couplings_of_order_one_over_root_n_d(method, power, exponent):
    sizes = (16, 32, 64)

    def make(n):
        noise = torch.randn(16, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
        couplings = (noise + noise.mT) / math.sqrt(2) / (n * D) ** power
        return SpinSystem(couplings, 0.5 * random(16, n, D, seed=n), 1.0)

    per_site = extensivity(make, method, sizes)
    fitted = np.polyfit(np.log(sizes), np.log(-per_site.numpy() * sizes), 1)[0]
    assert fitted == pytest.approx(exponent, abs=0.05)


def test_extensivity_says_what_it_needs():
    def make(n):
        return SpinSystem(symmetric(3), random(3, 1, seed=1))

    with pytest.raises(ValueError, match="`sizes` must have at least two entries"):
        extensivity(make, MeanField(), (3,))
    with pytest.raises(ValueError, match="`make` must return 4 sites for N = 4"):
        extensivity(make, MeanField(), (3, 4))
    value = extensivity(make, MeanField(), (3, 3))[0]
    close(value, free_energy(make(3), MeanField()) / 3)


@pytest.mark.parametrize("method", [MeanField(), Enumeration()], ids=repr)
@pytest.mark.parametrize("beta", [50.0, 200.0])
def test_spins_that_saturate_are_taken_apart_like_others(method, beta):
    couplings = random(5, 5, seed=3)
    couplings = (couplings + couplings.mT) * (1 - torch.eye(5)) / 2
    system = SpinSystem(couplings, random(5, 1, seed=4), beta)
    m = magnetization(system, method)
    assert bool((m.abs() == 1).any())
    parts = decompose(system, method)
    torch.testing.assert_close(parts.total, m, rtol=0, atol=1e-11)
    frozen = m.abs() == 1
    assert bool((parts.onsager[frozen] == 0).all())
    torch.testing.assert_close(parts.gain[frozen[:, 0]], 1 / (system.field + couplings @ m)[frozen].abs())
    found = stability(system, method)
    for number in (found.spectral_radius, found.smallest_eigenvalue, found.almeida_thouless):
        assert bool(number.isfinite())
    assert float(found.spectral_radius) < 1e-6
    assert float(found.smallest_eigenvalue) > 1e6
