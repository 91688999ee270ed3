"""The saddle point's derivatives: all orders that are promised, by every way of asking for them."""

import numpy as np
import pytest
import torch

from implicit_attention.spins import SaddlePoint, SpinSystem, free_energy, magnetization, thermodynamics
from implicit_attention.testing.numerics import random

METHODS = [SaddlePoint(shared=shared, one_loop=loop) for shared in (False, True) for loop in (False, True)]
NAMES = ["leading", "one_loop", "shared", "shared_one_loop"]
N, D = 3, 2

pytestmark = [pytest.mark.cases(2), pytest.mark.parametrize("method", METHODS, ids=NAMES)]


def parameters(block=False):
    couplings = random(N, N, D, D, seed=1) / 4 if block else random(N, N, seed=1) / 2
    return couplings.requires_grad_(), random(2, N, D, seed=2).requires_grad_(), (1 + random(2) ** 2).requires_grad_()


def system_of(couplings, field, beta):
    twin = couplings.permute(1, 0, 3, 2) if couplings.ndim == 4 else couplings.mT
    return SpinSystem(couplings + twin, field, beta, radius=1.2)


@pytest.mark.parametrize("block", [False, True], ids=["numbers", "matrices"])
def test_free_energy_and_magnetization_have_their_gradients(method, block):
    def f(*inputs):
        return free_energy(system_of(*inputs), method)

    def m(*inputs):
        return magnetization(system_of(*inputs), method)

    for function in (f, m):
        assert torch.autograd.gradcheck(function, parameters(block), fast_mode=True)
        assert torch.autograd.gradgradcheck(function, parameters(block), fast_mode=True)


@pytest.mark.slow
def test_heat_capacity_and_correlations_have_their_gradients(method):
    def f(*inputs):
        found = thermodynamics(system_of(*inputs), method)
        v = torch.ones(2, N, D, dtype=torch.float64)
        return found.heat_capacity, found.correlations, found.susceptibility_product(v)

    assert torch.autograd.gradcheck(f, parameters(), fast_mode=True)
    assert torch.autograd.gradgradcheck(f, parameters(), fast_mode=True)


def along(method, block=False):
    """log Z along a line in couplings, field and beta at once."""
    couplings, field, beta = (t.detach() for t in parameters(block))
    ways = (random(*couplings.shape, seed=4) / 3, random(2, N, D, seed=5), 0.4)

    def log_z(x):
        moved = (t + x * way for t, way in zip((couplings, field, beta), ways, strict=True))
        return method.log_partition(system_of(*moved)).value.sum()

    return log_z


@pytest.mark.by_name(slow=r"\[(?!numbers)")
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


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_all_ways_of_differentiating_agree(method):
    log_z = along(method)
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    orders = [log_z(x)]
    for _ in range(3):
        orders.append(torch.autograd.grad(orders[-1], x, create_graph=True)[0])
    function = log_z
    for order in range(1, 4):
        function = torch.func.grad(function)
        torch.testing.assert_close(function(x.detach()), orders[order].detach(), rtol=1e-11, atol=1e-11)
    _, tangent = torch.func.jvp(log_z, (x.detach(),), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, orders[1].detach(), rtol=1e-11, atol=1e-11)
    both = torch.autograd.grad(log_z(x), x, torch.ones(2, dtype=torch.float64), is_grads_batched=True)[0]
    torch.testing.assert_close(both, orders[1].detach().expand(2), rtol=1e-11, atol=1e-11)


def test_vmap_is_a_batch(method):
    couplings, field, beta = (t.detach() for t in parameters())
    quick = SaddlePoint(shared=method.shared, one_loop=method.one_loop, max_steps=25)

    def log_z(field, beta):
        return quick.log_partition(system_of(couplings, field, beta)).value

    whole = log_z(field, beta)
    torch.testing.assert_close(torch.func.vmap(log_z)(field, beta), whole, rtol=1e-13, atol=0)
    rows = torch.func.vmap(torch.func.grad(log_z))(field, beta)
    m = magnetization(system_of(couplings, field, beta), method) * beta[:, None, None]
    torch.testing.assert_close(rows, m, rtol=1e-11, atol=1e-13)


def test_a_failed_sample_has_the_gradient_of_fixed_multipliers(method):
    couplings, field, beta = (t.detach() for t in parameters())
    hurried = SaddlePoint(shared=method.shared, one_loop=method.one_loop, max_steps=1)
    m = magnetization(system_of(8 * couplings, field, beta), hurried, on_failure="ignore")
    assert bool(m.isfinite().all())
