"""Bethe: exact on trees, and honest about messages that do not settle."""

import numpy as np
import pytest
import torch
from solvable_models import COUPLINGS, FIELD, STAR

from implicit_attention import Anderson, Picard, Status
from implicit_attention.spins import Bethe, Enumeration, SpinSystem, free_energy, magnetization, thermodynamics
from implicit_attention.testing.numerics import random

SCALARS = ("free_energy", "internal_energy", "entropy", "heat_capacity")


def tree(sites, batch, seed):
    """Random couplings on a random tree, with a diagonal: every site hangs on an earlier one."""
    parents = [int(p) for p in np.random.default_rng(seed).integers(0, range(1, sites))]
    couplings = torch.diag_embed(random(batch, sites, seed=seed))
    for i, parent in enumerate(parents, start=1):
        couplings[:, i, parent] = couplings[:, parent, i] = random(batch, seed=100 * seed + i)
    return couplings


@pytest.mark.parametrize("beta", [0.2, 1.0, 3.0])
def test_trees_are_exact_in_everything(beta):
    couplings, field = tree(7, 3, seed=2), random(3, 7, 1, seed=5)
    system = SpinSystem(couplings, field, beta, radius=1.2, measure="counting")
    bethe, exact = thermodynamics(system, Bethe()), thermodynamics(system, Enumeration())
    close = {"rtol": 1e-11, "atol": 1e-11}
    for name in (*SCALARS, "magnetization"):
        torch.testing.assert_close(getattr(bethe, name), getattr(exact, name), **close)
    torch.testing.assert_close(bethe.susceptibility(), exact.susceptibility(), **close)
    coupled = couplings != 0
    torch.testing.assert_close(bethe.correlations[coupled], exact.correlations[coupled], **close)


def test_correlations_of_uncoupled_pairs_are_in_the_susceptibility():
    system = SpinSystem(STAR, FIELD, 0.8)
    bethe, exact = thermodynamics(system, Bethe()), thermodynamics(system, Enumeration())
    m = bethe.magnetization[:, 0]
    by_response = bethe.susceptibility()[:, 0, :, 0] / 0.8 + torch.outer(m, m)
    torch.testing.assert_close(by_response, exact.correlations, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(bethe.correlations[1, 2], m[1] * m[2], rtol=1e-12, atol=1e-12)


def test_a_ring_is_off_by_what_goes_around_it():
    """At h = 0 a ring of N bonds has Z = prod cosh + prod sinh; the Bethe approximation is the first term."""
    n, beta, coupling = 6, 0.9, 0.8
    ring = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        ring[i, (i + 1) % n] = ring[(i + 1) % n, i] = coupling
    system = SpinSystem(ring, torch.zeros(n, 1, dtype=torch.float64), beta)
    bethe = -beta * free_energy(system, Bethe())
    around = np.log1p(np.tanh(beta * coupling) ** n)
    assert float(bethe) == pytest.approx(n * np.log(np.cosh(beta * coupling)), abs=1e-12)
    assert float(-beta * free_energy(system, Enumeration()) - bethe) == pytest.approx(around, abs=1e-12)


def test_low_temperature_does_not_overflow():
    found = thermodynamics(SpinSystem(STAR, FIELD, 1e3, measure="counting"), Bethe())
    truth = thermodynamics(SpinSystem(STAR, FIELD, 1e3, measure="counting"), Enumeration())
    torch.testing.assert_close(found.free_energy, truth.free_energy, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(found.magnetization, truth.magnetization, rtol=1e-10, atol=1e-10)


def unstable(couplings, field, beta):
    """Which samples are said to be on an unstable solution."""
    found = thermodynamics(SpinSystem(couplings, field, beta), Bethe(), check="stability", on_failure="ignore")
    return found.report.status == Status.UNSTABLE


@pytest.mark.parametrize("beta", [3.0, 10.0, 20.0, 100.0])
def test_trees_are_stable_however_strong_their_bonds_are(beta):
    for seed in range(5):
        couplings = tree(12, 10, seed=seed)
        assert not bool(unstable(couplings, 0.1 * random(10, 12, 1, seed=seed + 50), beta).any())
        assert not bool(unstable(couplings.sign(), torch.zeros(10, 12, 1).double(), beta).any())


@pytest.mark.parametrize("sites", [3, 4, 5])
@pytest.mark.parametrize("sign", [1, -1])
def test_without_a_field_all_coupled_sites_are_unstable_where_the_inverse_covariance_says_so(sites, sign):
    """Its smallest eigenvalue is 1 - (n - 1) r/(1 + r), or 1 + (n - 1) r^2/(1 - r^2) + r/(1 - r^2) > 0 for r < 0."""
    couplings = sign * (torch.ones(sites, sites) - torch.eye(sites)).double()
    critical = np.arctanh(1 / (sites - 2)) if sites > 3 else np.inf
    beta = torch.tensor([0.1, critical * (1 - 1e-6), critical * (1 + 1e-6), 5.0, 20.0, 300.0]).double()
    found = unstable(couplings, torch.zeros(6, sites, 1).double(), beta.nan_to_num(posinf=1.0))
    # A triangle becomes unstable at r = 1 only.
    assert found.tolist() == [False, False, *[sign > 0 and sites > 3] * 4]


def test_verdicts_are_those_of_the_dense_inverse_covariance():
    """Random graphs of bonds of either sign, or of one, with a small field and without."""
    kind = torch.arange(200)[:, None, None]
    bonds = 1.2 * random(200, 6, 6, seed=4) * (random(200, 6, 6, seed=5) > 0)
    bonds = torch.triu(bonds.where(kind < 100, bonds.abs()), 1)
    field = 0.02 * random(200, 6, 1, seed=7) * (kind % 2)
    couplings = bonds + bonds.mT
    found = thermodynamics(SpinSystem(couplings, field), Bethe(), check="none")
    m = found.magnetization
    spread = (1 - m.square()).sqrt()
    r = ((found.correlations - m @ m.mT) / (spread @ spread.mT)).where(couplings != 0, 0.0)
    off = r / (1 - r.square())
    inverse = torch.diag_embed(1 + (r * off).sum(-1)) - off
    lowest = torch.linalg.eigvalsh(inverse)[:, 0]
    assert 5 < int((lowest < 0).sum()) < 195
    assert torch.equal(unstable(couplings, field, 1.0), lowest < 0)


def test_log_partition_is_stationary_in_the_messages():
    """Loose messages leave an error of second order: half as many digits are missing."""
    system = SpinSystem(COUPLINGS, FIELD, 1.0)
    exact = free_energy(system, Bethe())
    loose = free_energy(system, Bethe(solver=Picard(rtol=1e-4, atol=0.0)))
    assert 0 < abs(float(loose - exact)) < 1e-8


def test_the_solver_is_obeyed():
    system = SpinSystem(COUPLINGS, FIELD, 1.0)
    found = thermodynamics(system, Bethe(solver=Picard(rtol=1e-12, atol=1e-12, damping=0.3)))
    default = thermodynamics(system, Bethe())
    assert found.report.num_steps > default.report.num_steps
    torch.testing.assert_close(found.heat_capacity, default.heat_capacity, rtol=1e-10, atol=1e-10)


def test_messages_that_do_not_settle_are_flagged_in_their_sample_alone():
    easy, field = COUPLINGS, FIELD.expand(3, 4, 1).clone()
    hard = 8 * random(4, 4, seed=3)
    couplings = torch.stack([easy, hard + hard.mT, easy])
    field[2, 1] = torch.nan
    solver = Anderson(rtol=1e-12, atol=1e-12, max_steps=3)
    few = thermodynamics(SpinSystem(couplings, field), Bethe(solver=solver), on_failure="ignore").report
    assert few.status.tolist() == [Status.MAX_STEPS, Status.MAX_STEPS, Status.NONFINITE]
    found = thermodynamics(SpinSystem(couplings[::2], field[::2]), Bethe(), on_failure="ignore")
    assert found.report.status.tolist() == [Status.CONVERGED, Status.NONFINITE]
    alone = thermodynamics(SpinSystem(easy, field[:1]), Bethe())
    for name in SCALARS:
        torch.testing.assert_close(getattr(found, name)[:1], getattr(alone, name), rtol=1e-15, atol=1e-15)
    assert found.free_energy[1].isnan()


def test_messages_that_contract_need_no_damped_steps_and_no_check():
    """On a regular graph of degree d they do while (d - 1) tanh K < 1."""
    couplings = torch.ones(5, 5).double() - torch.eye(5).double()
    beta = np.arctanh(1 / 3) * torch.tensor([0.2, 0.999, 1.001]).double()
    system = SpinSystem(couplings, 0.1 * random(3, 5, 1, seed=1), beta)
    assert Bethe().contracting(system).tolist() == [True, True, False]
    found = thermodynamics(system, Bethe()).report
    assert bool(found.converged.all())
    assert int(found.num_evals[0]) < 12
    masked = SpinSystem(couplings, system.field, beta, mask=torch.arange(5) < 4)
    assert Bethe().contracting(masked).all()
    signs = random(3, 5, 5, seed=2).sign().triu(1)
    frustrated = SpinSystem(signs + signs.mT, 0 * system.field, float(beta[1]))
    report = thermodynamics(frustrated, Bethe()).report
    assert report.statuses == ["CONVERGED"] * 3


def test_messages_are_said_to_contract_where_the_spectral_radius_is_below_1():
    """That of the map from changes of messages k -> i to those of i -> j, tanh |K_ij| for k != j."""
    bonds = 0.9 * random(40, 10, 10, seed=8) * (random(40, 10, 10, seed=9) > 0.5)
    couplings = bonds.triu(1) + bonds.triu(1).mT
    i, j = (~torch.eye(10, dtype=torch.bool)).nonzero().T
    follows = (j[None, :] == i[:, None]) & (i[None, :] != j[:, None])
    size = torch.tanh(couplings.abs())[:, i, j]
    maps = size[:, :, None] * follows * (size[:, None] > 0)
    radius, rows = torch.linalg.eigvals(maps).abs().amax(-1), maps.sum(-1).amax(-1)
    said = Bethe().contracting(SpinSystem(couplings, torch.zeros(40, 10, 1).double()))
    assert bool((radius[said] < 1).all())
    assert bool(said[radius < 0.83].all())
    assert int(said.sum()) > int((rows < 1).sum()) + 3
    assert int((~said).sum()) > 5


def test_a_sample_has_the_same_bits_beside_strong_bonds():
    couplings, field = random(3, 6, 6, seed=3).triu(1), random(3, 6, 1, seed=4)
    couplings = couplings / couplings.abs().amax((-2, -1), keepdim=True)
    couplings = couplings + couplings.mT
    first = []
    for scale in (1.0, 2.0, 40.0):
        others = torch.cat([couplings[:1], scale * couplings[1:]])
        first.append(magnetization(SpinSystem(others, field), Bethe(), on_failure="ignore")[0])
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], first[2])


@pytest.mark.parametrize("bond", [1.7, -1.7, 25.0, -30.0])
def test_derivatives_of_strongly_coupled_spins_without_a_field(bond):
    """Where messages are 0 their derivative is that of their size."""
    couplings = torch.tensor([[0.0, bond, 0.0], [bond, 0.0, 0.4], [0.0, 0.4, 0.0]], dtype=torch.float64)

    def mean(field, couplings):
        return magnetization(SpinSystem(couplings, field), Bethe())

    field = torch.zeros(3, 1).double().requires_grad_()
    chi = torch.func.jacrev(mean)(field, couplings)[:, 0, :, 0]
    first, second = np.tanh([bond, 0.4])
    rows = [[1, first, first * second], [first, 1, second], [first * second, second, 1]]
    expected = torch.tensor(rows, dtype=torch.float64)
    torch.testing.assert_close(chi, expected, rtol=0, atol=1e-10)
    if abs(bond) < 2:
        both = field, couplings.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda h, j: mean(h, (j + j.mT) / 2), both, atol=1e-6)
        assert torch.autograd.gradgradcheck(lambda h, j: mean(h, (j + j.mT) / 2), both, atol=1e-5)
