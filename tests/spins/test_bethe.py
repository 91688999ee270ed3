"""Bethe: exact on trees, the known numbers elsewhere, and honest about messages that do not settle."""

import re

import numpy as np
import pytest
import torch

from implicit_attention import Anderson, Picard, Status
from implicit_attention.spins import Bethe, Enumeration, SpinSystem, free_energy, magnetization, thermodynamics
from implicit_attention.testing.numerics import random

FIELD = torch.tensor([[0.20], [-0.10], [0.30], [0.05]], dtype=torch.float64)
SCALARS = ("free_energy", "internal_energy", "entropy", "heat_capacity")


def pairs(**values):
    """Symmetric couplings of four sites, from entries such as J12=0.3."""
    couplings = torch.zeros(4, 4, dtype=torch.float64)
    for name, value in values.items():
        i, j = (int(digit) - 1 for digit in name[1:])
        couplings[i, j] = couplings[j, i] = value
    return couplings


COUPLINGS = pairs(J12=0.30, J13=-0.20, J14=0.10, J23=0.25, J24=-0.15, J34=0.40)
STAR = pairs(J12=0.7, J13=-0.5, J14=0.9)


def tree(sites, batch, seed):
    """Random couplings on a random tree, with a diagonal: every site hangs on an earlier one."""
    parents = [int(p) for p in np.random.default_rng(seed).integers(0, range(1, sites))]
    couplings = torch.diag_embed(random(batch, sites, seed=seed))
    for i, parent in enumerate(parents, start=1):
        couplings[:, i, parent] = couplings[:, parent, i] = random(batch, seed=100 * seed + i)
    return couplings


@pytest.mark.parametrize(
    ("beta", "free", "m"),
    [
        (1.0, -3.019265018365, [0.1386388768, -0.0097197215, 0.2593715437, 0.1500150834]),
        (2.0, -1.835106495364, None),
    ],
)
def test_four_spins(beta, free, m):
    found = thermodynamics(SpinSystem(COUPLINGS, FIELD, beta, measure="counting"), Bethe())
    assert float(found.free_energy) == pytest.approx(free, abs=6e-13)
    if m is not None:
        np.testing.assert_allclose(found.magnetization.flatten(), m, rtol=0, atol=6e-11)


def test_a_star_is_exact():
    found = thermodynamics(SpinSystem(STAR, FIELD, measure="counting"), Bethe())
    assert float(found.log_partition) == pytest.approx(3.519584901386, abs=6e-13)
    truth = [0.0400270862, -0.0394556085, 0.2160908170, 0.0529932193]
    np.testing.assert_allclose(found.magnetization.flatten(), truth, rtol=0, atol=6e-11)


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
    system = SpinSystem(couplings, field, beta)
    solution = Bethe().solution(system, Bethe().start(system))
    return Bethe().unstable(system, solution.value.detach())


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
    system = SpinSystem(bonds + bonds.mT, field, 1.0)
    state = Bethe().solution(system, Bethe().start(system)).value
    couplings = system.couplings
    total = system.field[..., 0] + state.sum(-2)
    cavity = total[..., :, None] - state.mT
    spins = torch.tensor([1.0, -1.0]).double()
    s, t = spins[:, None], spins
    weight = couplings[..., None, None] * s * t + cavity[..., None, None] * s + cavity.mT[..., None, None] * t
    law = weight.flatten(-2).softmax(-1).unflatten(-1, (2, 2))
    one, other = (law * s).sum((-2, -1)), (law * t).sum((-2, -1))
    r = ((law * s * t).sum((-2, -1)) - one * other) / ((1 - one.square()) * (1 - other.square())).sqrt()
    off = r / (1 - r.square())
    inverse = torch.diag_embed(1 + (r * off).sum(-1)) - off
    lowest = torch.linalg.eigvalsh(inverse)[:, 0]
    assert 5 < int((lowest < 0).sum()) < 195
    assert torch.equal(Bethe().unstable(system, state), lowest < 0)


def outputs(field, couplings, beta):
    system = SpinSystem((couplings + couplings.mT) / 2, field, beta)
    found = thermodynamics(system, Bethe())
    return *(getattr(found, n) for n in (*SCALARS, "magnetization", "correlations")), found.susceptibility()


@pytest.mark.slow
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_derivatives_of_every_output(check):
    beta = torch.tensor([0.6, 1.1], dtype=torch.float64)
    inputs = [random(2, 3, 1, seed=1), 0.3 * random(2, 3, 3), beta]
    # Along random directions: every entry by itself would take a minute.
    assert check(outputs, [t.requires_grad_() for t in inputs], fast_mode=True)


def test_magnetization_is_the_slope_of_its_own_free_energy():
    couplings, field = COUPLINGS.clone().requires_grad_(), FIELD.clone().requires_grad_()
    (slope,) = torch.autograd.grad(-free_energy(SpinSystem(couplings, field, 1.3), Bethe()), field)
    torch.testing.assert_close(magnetization(SpinSystem(couplings, field, 1.3), Bethe()), slope)

    def follow(h):
        return COUPLINGS * torch.tanh(1 + h @ h.mT)

    (slope,) = torch.autograd.grad(-free_energy(SpinSystem(follow, field, 1.3), Bethe()), field)
    torch.testing.assert_close(magnetization(SpinSystem(follow, field, 1.3), Bethe()), slope)


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
    with pytest.raises(TypeError, match=re.escape("`solver` must be None or a Solver, got 'anderson'")):
        Bethe(solver="anderson")


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


def test_a_sample_does_not_depend_on_its_neighbours():
    couplings = random(5, 4, 4, seed=3) * torch.tensor([0.1, 0.3, 0.5, 0.2, 0.05]).double()[:, None, None]
    couplings, field = couplings + couplings.mT, random(5, 4, 1, seed=4)
    together = thermodynamics(SpinSystem(couplings, field), Bethe())
    for b in range(5):
        alone = thermodynamics(SpinSystem(couplings[b], field[b]), Bethe())
        torch.testing.assert_close(together.free_energy[b], alone.free_energy, rtol=1e-15, atol=1e-15)
        torch.testing.assert_close(together.magnetization[b], alone.magnetization, rtol=4e-15, atol=1e-15)
        assert together.report.num_evals[b] == alone.report.num_evals


def test_masked_sites_change_nothing():
    wide = torch.full((6, 6), torch.nan, dtype=torch.float64)
    wide[:4, :4] = COUPLINGS
    field = torch.cat([FIELD, torch.full((2, 1), torch.nan, dtype=torch.float64)])
    masked = SpinSystem(wide, field, measure="counting", mask=torch.arange(6) < 4)
    found = thermodynamics(masked, Bethe())
    without = thermodynamics(SpinSystem(COUPLINGS, FIELD, measure="counting"), Bethe())
    for name in SCALARS:
        torch.testing.assert_close(getattr(found, name), getattr(without, name), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(found.magnetization[:4], without.magnetization, rtol=1e-13, atol=1e-13)
    assert (found.magnetization[4:] == 0).all()


def test_couplings_may_be_blocks_of_one_number():
    plain = free_energy(SpinSystem(COUPLINGS, FIELD.expand(2, 4, 1)), Bethe())
    block = free_energy(SpinSystem(COUPLINGS[..., None, None], FIELD.expand(2, 4, 1)), Bethe())
    torch.testing.assert_close(block, plain, rtol=0, atol=0)


def test_single_precision_is_solved_to_its_own_digits():
    single = thermodynamics(SpinSystem(COUPLINGS.float(), FIELD.float()), Bethe())
    double = thermodynamics(SpinSystem(COUPLINGS, FIELD), Bethe())
    for name in (*SCALARS, "magnetization"):
        truth = getattr(double, name)
        torch.testing.assert_close(getattr(single, name).double(), truth, rtol=1e-5, atol=1e-6)


def test_vmap_and_grad_compose():
    fields = random(3, 4, 1, seed=4)

    def value(field):
        return magnetization(SpinSystem(COUPLINGS, field), Bethe()).square().sum()

    mapped = torch.vmap(torch.func.grad(value))(fields)
    live = fields.clone().requires_grad_()
    (truth,) = torch.autograd.grad(sum(value(f) for f in live), live)
    torch.testing.assert_close(mapped, truth, rtol=1e-10, atol=1e-10)


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match="`system` must have spins of dimension 1 for Bethe, got D = 2"):
        free_energy(SpinSystem(torch.zeros(3, 3), torch.zeros(3, 2)), Bethe())
    with pytest.raises(ValueError, match="`couplings` must be symmetric"):
        free_energy(SpinSystem(torch.ones(3, 3).triu(), torch.zeros(3, 1)), Bethe())


def test_an_empty_batch_has_empty_results():
    assert thermodynamics(SpinSystem(COUPLINGS, FIELD.new_zeros(0, 4, 1)), Bethe()).magnetization.shape == (0, 4, 1)


def test_a_lost_sample_that_the_loss_leaves_out_spoils_no_shared_gradient():
    couplings = STAR.clone().requires_grad_()
    field = torch.zeros(2, 4, 1, dtype=torch.float64)
    field[0, :, 0], field[1, 2] = 0.3, torch.nan
    found = thermodynamics(SpinSystem(couplings, field), Bethe(), on_failure="ignore")
    assert found.report.status.tolist() == [Status.CONVERGED, Status.NONFINITE]
    assert found.free_energy[1].isnan()
    (found.heat_capacity[0] + found.magnetization[0].sum()).backward()
    assert torch.isfinite(couplings.grad).all()
    assert couplings.grad.abs().max() > 0
