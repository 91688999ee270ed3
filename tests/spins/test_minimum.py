"""The minimum that the saddle point is made of: derivatives of all orders in every mode, and where spins are cold."""

import itertools
import math

import numpy as np
import pytest
import torch

from implicit_attention import Status
from implicit_attention.spins import SaddlePoint, SpinSystem, magnetization
from implicit_attention.testing.numerics import random

METHODS = [SaddlePoint(shared=shared, one_loop=loop) for shared in (False, True) for loop in (False, True)]
NAMES = ["leading", "one_loop", "shared", "shared_one_loop"]
N, D = 3, 2


def parameters(block=False):
    couplings = random(N, N, D, D, seed=1) / 4 if block else random(N, N, seed=1) / 2
    return couplings.requires_grad_(), random(2, N, D, seed=2).requires_grad_(), (1 + random(2) ** 2).requires_grad_()


def system_of(couplings, field, beta):
    twin = couplings.permute(1, 0, 3, 2) if couplings.ndim == 4 else couplings.mT
    return SpinSystem(couplings + twin, field, beta, radius=1.2)


def along(method, block=False):
    """log Z along a line in couplings, field and beta at once."""
    couplings, field, beta = (t.detach() for t in parameters(block))
    ways = (random(*couplings.shape, seed=4) / 3, random(2, N, D, seed=5), 0.4)

    def log_z(x):
        moved = (t + x * way for t, way in zip((couplings, field, beta), ways, strict=True))
        return method.log_partition(system_of(*moved)).value.sum()

    return log_z


@pytest.mark.cases(2)
@pytest.mark.by_name(slow=r"\[(?!numbers)")
@pytest.mark.parametrize("method", METHODS, ids=NAMES)
@pytest.mark.parametrize("block", [False, True], ids=["numbers", "matrices"])
def test_four_derivatives_are_those_of_the_value(method, block):
    derivatives = [along(method, block)]
    for _ in range(4):
        derivatives.append(torch.func.grad(derivatives[-1]))
    points = 0.1 * np.cos((np.arange(25) + 0.5) * np.pi / 25)
    values = [float(derivatives[0](torch.tensor(x))) for x in points]
    fit = np.polynomial.Chebyshev.fit(points, values, 14, domain=[-0.1, 0.1])
    zero = torch.zeros((), dtype=torch.float64)
    for order, tolerance in [(1, 1e-9), (2, 1e-8), (3, 1e-6), (4, 1e-4)]:
        found, truth = float(derivatives[order](zero)), float(fit.deriv(order)(0.0))
        assert abs(found - truth) < tolerance * (1 + abs(truth)), order
    step = 1e-3
    for order in range(1, 5):
        ahead = [float(derivatives[order - 1](zero + k * step)) for k in (-2, -1, 1, 2)]
        difference = (ahead[0] - 8 * ahead[1] + 8 * ahead[2] - ahead[3]) / (12 * step)
        found = float(derivatives[order](zero))
        assert abs(found - difference) < 1e-8 * (1 + abs(found)), order


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_a_failed_sample_has_the_gradient_of_fixed_multipliers(method):
    couplings, field, beta = (t.detach() for t in parameters())
    hurried = SaddlePoint(shared=method.shared, one_loop=method.one_loop, max_steps=1)
    m = magnetization(system_of(8 * couplings, field, beta), hurried, on_failure="ignore")
    assert bool(m.isfinite().all())


def forward(function):
    return lambda x: torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]


@pytest.mark.by_name(slow=r"\[(?!shared\])")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_forward_and_reverse_mode_agree_however_they_are_nested(method):
    log_z, x = along(method), torch.zeros((), dtype=torch.float64)
    reverse = torch.func.grad
    for order in (1, 2, 3):
        truth = log_z
        for _ in range(order):
            truth = reverse(truth)
        for modes in itertools.product((reverse, forward), repeat=order):
            function = log_z
            for mode in modes:
                function = mode(function)
            torch.testing.assert_close(function(x), truth(x), rtol=1e-9, atol=1e-9)


# Cold spins in strong fields, of few dimensions: the edge of the domain is near all the way.


def cold_systems(count, *, seed=0):
    generator = np.random.default_rng(seed)
    for k in range(count):
        n, d = int(generator.integers(20, 65)), (1, 3)[k % 2]
        couplings = generator.standard_normal((n, n))
        couplings = (couplings + couplings.T) / math.sqrt(2) * (10 / math.sqrt(n) if k % 4 < 2 else 1.0)
        if k % 3:
            np.fill_diagonal(couplings, 0)
        field = 10.0 ** (k % 2) * generator.standard_normal((n, d))
        yield SpinSystem(torch.as_tensor(couplings), torch.as_tensor(field), float(10 ** generator.uniform(0.5, 2)))


@pytest.mark.by_name(slow=r"\[150-")
@pytest.mark.parametrize("method", [SaddlePoint(), SaddlePoint(shared=True)], ids=["per_site", "shared"])
@pytest.mark.parametrize("count", [30, 150])
def test_cold_spins_in_strong_fields_are_solved(method, count):
    for system in cold_systems(count):
        _, evidence = method.log_partition(system)
        assert int(evidence.status) == Status.CONVERGED, evidence
        assert int(evidence.num_evals) <= 60


def test_the_magnetization_of_cold_spins_is_that_of_an_explicit_inverse():
    for system in cold_systems(8, seed=1):
        m = magnetization(system, SaddlePoint())
        a = torch.diag(SaddlePoint().multipliers(system)) - system.beta * system.couplings
        assert bool((torch.linalg.eigvalsh(a) > 0).all())
        inverse = torch.linalg.inv(a)
        torch.testing.assert_close(m, system.beta * inverse @ system.field, rtol=1e-7, atol=1e-9)
        lengths = inverse.diagonal() + m.square().sum(-1) / system.dim
        torch.testing.assert_close(lengths, torch.ones_like(lengths), rtol=1e-7, atol=0)
