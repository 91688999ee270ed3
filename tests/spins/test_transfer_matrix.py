"""TransferMatrix: exact chains in any dimension, in all directions, against quadrature over every angle."""

import numpy as np
import pytest
import torch

from implicit_attention import Status
from implicit_attention.spins import (
    Bethe,
    Enumeration,
    SpinSystem,
    TransferMatrix,
    free_energy,
    thermodynamics,
)
from implicit_attention.testing.numerics import random

pytestmark = pytest.mark.cases(2)

BONDS = torch.tensor([0.6, -0.5, 0.8], dtype=torch.float64)
HATTED = torch.tensor([0.4, -0.2, 0.3, 0.1], dtype=torch.float64)
SCALARS = ("free_energy", "internal_energy", "entropy", "heat_capacity")


def chain(bonds, diagonal=0.0):
    """Couplings (*batch, N, N) of an open chain."""
    off = torch.diag_embed(bonds, offset=1)
    n = off.shape[-1]
    return off + off.mT + diagonal * torch.eye(n, dtype=off.dtype)


def on_axis(sizes, dim, seed=None):
    """Fields (*batch, N, D) of these sizes along one direction."""
    axis = torch.zeros(dim, dtype=sizes.dtype)
    axis[0] = 1.0
    if seed is not None:
        axis = torch.nn.functional.normalize(random(dim, seed=seed), dim=0)
    return sizes[..., None] * axis


def notes(dim, method=None):
    """The chain of four spins at beta = 1.2, in units of D and sqrt(D)."""
    field = on_axis(HATTED * dim**0.5, dim)
    return thermodynamics(SpinSystem(chain(BONDS), field, 1.2), method or TransferMatrix())


@pytest.mark.parametrize("dim", [3, 16, 64])
def test_sixty_and_eighty_nodes_agree(dim):
    few, many = (notes(dim, TransferMatrix(nodes=n)) for n in (60, 80))
    assert float(few.log_partition) / dim == pytest.approx(float(many.log_partition) / dim, abs=1e-14)
    torch.testing.assert_close(few.magnetization, many.magnetization, rtol=1e-12, atol=1e-12)


def test_without_fields_the_bonds_are_on_their_own():
    """log Z is the sum over bonds of log Z_1, sinh(k)/k in three dimensions."""
    found = thermodynamics(SpinSystem(chain(BONDS), torch.zeros(4, 3, dtype=torch.float64), 1.2), TransferMatrix())
    kappa = 1.2 * BONDS.abs() * 3
    torch.testing.assert_close(found.log_partition, (torch.sinh(kappa) / kappa).log().sum(), rtol=1e-14, atol=1e-14)
    assert float(found.log_partition) == pytest.approx(2.3006241140, abs=6e-11)
    assert found.magnetization.abs().max() < 1e-15


@pytest.mark.parametrize(("beta", "truth"), [(0.3, Enumeration()), (2.0, Enumeration()), (40.0, Bethe())])
def test_ising_chains_are_what_other_exact_methods_find(beta, truth):
    bonds, field = random(2, 5), random(2, 6, 1, seed=1)
    system = SpinSystem(chain(bonds, 0.4), field, beta, radius=1.3, measure="counting")
    found, exact = thermodynamics(system, TransferMatrix()), thermodynamics(system, truth)
    # C is a difference of numbers as large as this.
    rounding = 16 * torch.finfo(torch.float64).eps * float((beta * exact.internal_energy).abs().max()) ** 2
    for name in (*SCALARS, "magnetization"):
        atol = max(1e-11, rounding) if name == "heat_capacity" else 1e-11
        torch.testing.assert_close(getattr(found, name), getattr(exact, name), rtol=1e-11, atol=atol)
    torch.testing.assert_close(found.susceptibility(), exact.susceptibility(), rtol=1e-11, atol=1e-11)
    if isinstance(truth, Enumeration):
        torch.testing.assert_close(found.correlations, exact.correlations, rtol=1e-12, atol=1e-12)
    assert (found.report.num_steps == 2).all()


def circle(count):
    """Points on the circle with equal weights: a rule that is exact to rounding for smooth functions."""
    angle = 2 * torch.pi * torch.arange(count, dtype=torch.float64) / count
    return torch.stack([angle.cos(), angle.sin()], -1), torch.full((count,), 1 / count, dtype=torch.float64)


def sphere(count):
    """Points on the sphere: Gauss in height, equal weights around."""
    height, weight = (torch.as_tensor(a) for a in np.polynomial.legendre.leggauss(count))
    around, even = circle(2 * count)
    flat = (1 - height**2).sqrt()[:, None, None] * around
    points = torch.cat([flat, height[:, None, None].expand(-1, 2 * count, 1)], -1)
    return points.reshape(-1, 3), (weight[:, None] / 2 * even).reshape(-1)


def log_partition_by_angles(points, weights, couplings, field, beta):
    """log Z over all configurations, with any couplings and any fields."""
    n, dim = field.shape
    dots = dim * points @ points.mT
    total = torch.zeros((len(points),) * n, dtype=torch.float64)
    for i in range(n):
        shape = [len(points) if k == i else 1 for k in range(n)]
        total = total + (beta * dim**0.5 * points @ field[i] + weights.log()).reshape(shape)
        for j in range(i):
            shape = [len(points) if k in (i, j) else 1 for k in range(n)]
            total = total + (beta * (couplings[i, j] + couplings[j, i]) / 2 * dots).reshape(shape)
    return total.logsumexp(tuple(range(n))) + beta * dim * couplings.diagonal().sum() / 2


@pytest.mark.parametrize(
    ("rule", "sites", "dim"), [(circle(40), 3, 2), (sphere(12), 2, 3)], ids=["three on a circle", "two on a sphere"]
)
@pytest.mark.parametrize("strength", [0.0, 1.0], ids=["no field", "field"])
def test_everything_in_all_directions(rule, sites, dim, strength):
    """Susceptibility across the axis, correlations of pairs without a coupling, and one derivative of each of them."""
    beta = 0.8
    couplings = chain(torch.tensor([0.5, -0.7], dtype=torch.float64)[: sites - 1], 0.3)
    field = on_axis(strength * random(sites, seed=2), dim, seed=3)

    def log_z(field, couplings, beta):
        return log_partition_by_angles(*rule, couplings, field, beta)

    b = torch.tensor(beta, dtype=torch.float64)
    truth = {
        "free_energy": -log_z(field, couplings, b) / b,
        "magnetization": torch.func.grad(log_z)(field, couplings, b) / b,
        "correlations": 2 * torch.func.grad(log_z, argnums=1)(field, couplings, b) / b,
        "internal_energy": -torch.func.grad(log_z, argnums=2)(field, couplings, b),
        "heat_capacity": b**2 * torch.func.grad(torch.func.grad(log_z, argnums=2), argnums=2)(field, couplings, b),
    }
    found = thermodynamics(SpinSystem(couplings, field, beta), TransferMatrix())
    for name, value in truth.items():
        torch.testing.assert_close(
            getattr(found, name), value, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )

    def chi_by_angles(field, couplings):
        return torch.func.jacrev(torch.func.grad(log_z))(field, couplings, b) / b

    torch.testing.assert_close(found.susceptibility(), chi_by_angles(field, couplings), rtol=1e-10, atol=1e-11)
    v = random(sites, dim, sites, dim, seed=4)

    def loss(chi):
        return (chi * (v + v.permute(2, 3, 0, 1))).sum()

    bonds = chain(random(sites - 1, seed=5))
    inputs = [field.clone().requires_grad_(), couplings.clone().requires_grad_()]
    mine = thermodynamics(SpinSystem(inputs[1], inputs[0], beta), TransferMatrix()).susceptibility()
    by_field, by_couplings = torch.autograd.grad(loss(mine), inputs)
    true_field, true_couplings = torch.func.grad(lambda h, j: loss(chi_by_angles(h, j)), argnums=(0, 1))(
        field, couplings
    )
    torch.testing.assert_close(by_field, true_field, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close((by_couplings * bonds).sum(), (true_couplings * bonds).sum(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dim", [1, 3])
def test_masked_sites_cut_the_chain(dim):
    bonds, field = random(5), on_axis(random(6, seed=1), dim)
    couplings = chain(bonds)
    bad = field.clone()
    bad[2] = torch.nan
    couplings[2] = couplings[:, 2] = torch.nan
    mask = torch.tensor([True, True, False, True, True, True])
    found = thermodynamics(SpinSystem(couplings, bad, 0.7, mask=mask), TransferMatrix())
    left = thermodynamics(SpinSystem(chain(bonds[:1]), field[:2], 0.7), TransferMatrix())
    right = thermodynamics(SpinSystem(chain(bonds[3:]), field[3:], 0.7), TransferMatrix())
    for name in SCALARS:
        both = getattr(left, name) + getattr(right, name)
        torch.testing.assert_close(getattr(found, name), both, rtol=1e-12, atol=1e-12)
    m = torch.cat([left.magnetization, torch.zeros(1, dim).double(), right.magnetization])
    torch.testing.assert_close(found.magnetization, m, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("dim", "nodes"), [(3, 80), (256, 80), (1024, 200)])
def test_many_dimensions_and_strong_alignment_lose_no_digits(dim, nodes):
    found = notes(dim, TransferMatrix(nodes=nodes))
    again = notes(dim, TransferMatrix(nodes=nodes + 31))
    assert float(found.log_partition) == pytest.approx(float(again.log_partition), rel=1e-12)
    torch.testing.assert_close(found.magnetization, again.magnetization, rtol=1e-10, atol=1e-10)
    assert torch.isfinite(found.susceptibility_product(random(4, dim))).all()


def test_too_few_nodes_are_flagged_in_their_sample_alone():
    beta = torch.tensor([1.0, 2000.0], dtype=torch.float64)
    field = on_axis(HATTED, 3).expand(2, 4, 3).clone()
    found = thermodynamics(SpinSystem(chain(BONDS), field, beta), TransferMatrix(), on_failure="ignore")
    assert found.report.status.tolist() == [Status.CONVERGED, Status.MAX_STEPS]
    assert found.report.num_steps.tolist() == [80, 80]
    beta[1], field[1, 0, 0] = 1.0, torch.nan
    found = thermodynamics(SpinSystem(chain(BONDS), field, beta), TransferMatrix(), on_failure="ignore")
    assert found.report.status.tolist() == [Status.CONVERGED, Status.NONFINITE]
    alone = thermodynamics(SpinSystem(chain(BONDS), field[0]), TransferMatrix())
    torch.testing.assert_close(found.free_energy[0], alone.free_energy, rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(found.magnetization[0], alone.magnetization, rtol=1e-14, atol=1e-15)


def test_where_the_host_cannot_look_what_it_cannot_do_is_nan():
    fields = on_axis(HATTED, 3).expand(2, 4, 3).clone()
    fields[1, 1, 2] = 0.2

    def value(field):
        return TransferMatrix().log_partition(SpinSystem(chain(BONDS), field)).value

    assert torch.vmap(value)(fields).isnan().tolist() == [False, True]


def test_one_site():
    field = on_axis(torch.tensor([0.7], dtype=torch.float64), 3)
    kappa = 0.7 * 3**0.5
    value = -free_energy(SpinSystem(torch.zeros(1, 1).double(), field), TransferMatrix())
    assert float(value) == pytest.approx(np.log(np.sinh(kappa) / kappa), abs=1e-14)


def test_rounding_of_the_axis_is_no_second_direction():
    axis = torch.nn.functional.normalize(random(7, seed=1), dim=0)
    system = SpinSystem(chain(BONDS), HATTED[:, None] * axis)
    rotated = SpinSystem(chain(BONDS), system.field @ torch.linalg.qr(random(7, 7))[0])
    torch.testing.assert_close(
        free_energy(system, TransferMatrix()), free_energy(rotated, TransferMatrix()), rtol=1e-13, atol=1e-13
    )
