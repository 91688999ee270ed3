"""Synchronous dynamics against exact Markov chains, and replica exchange where a plain heat bath stays caught."""

import pytest
import torch
from solvable_models import ASYMMETRIC, ising_states
from solvable_models import DRIVE as FIELD

from implicit_attention.potentials import SphereUnits
from implicit_attention.spins import Enumeration, SpinSystem, TransferMatrix, stationary_law, thermodynamics
from implicit_attention.spins.sampling import heat_bath, replica_exchange, synchronous
from implicit_attention.testing.numerics import random

# 31 degrees of freedom make this as improbable as 4 is for a normal variable.
SURE = 4.5
# What is so rare that a run of 1e5 states meets it at most once leaves no scatter to speak of.
RARE = 3e-5


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def assert_near(value, error, truth, limit):
    """Within its own errors, which are all below `limit`."""
    assert float(error.max()) < limit
    apart = ((value - truth).abs() - RARE) / error
    assert bool((apart.nan_to_num(0.0) < SURE).all()), apart.max()


@pytest.mark.parametrize("diagonal", [0.0, 0.6])
@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_the_stationary_law_of_four_ising_spins(beta, diagonal):
    couplings = ASYMMETRIC + diagonal * torch.eye(4)
    law = stationary_law(couplings, FIELD, beta)
    system = SpinSystem(couplings, FIELD[:, None], beta)
    found = synchronous(system, chains=1024, burn_in=50, sweeps=400, generator=generator())
    m = law.magnetization
    assert_near(found.magnetization[:, 0], found.magnetization_error[:, 0], m, 5e-3)
    assert_near(found.correlations, found.correlations_error, law.correlations + torch.outer(m, m), 3e-3)
    assert_near(found.delayed_correlations, found.delayed_correlations_error, law.delayed, 3e-3)
    assert_near(found.entropy_production, found.entropy_production_error, law.entropy_production, 8e-3)
    energies = -(law.correlations + torch.outer(m, m)) * couplings / 2
    assert_near(found.energy, found.energy_error, energies.sum() - m @ FIELD, 5e-3)
    assert found.heat_capacity is None
    if beta == 0.5 and diagonal == 0:
        assert float(found.entropy_production) == pytest.approx(0.428999177720, abs=0.01)
        assert float(found.delayed_correlations[0, 1]) == pytest.approx(0.2335198195, abs=0.01)
        assert float(found.delayed_correlations[2, 0]) == pytest.approx(0.2858532337, abs=0.01)


def test_entropy_production_is_read_off_the_delayed_correlations():
    found = synchronous(SpinSystem(ASYMMETRIC, FIELD[:, None], 0.7), chains=64, sweeps=300, generator=generator())
    by_delayed = 0.7 * ((ASYMMETRIC - ASYMMETRIC.mT) * found.delayed_correlations).sum()
    # Up to what differs between the mean of the first and of the second of two states.
    assert float(found.entropy_production) == pytest.approx(float(by_delayed), abs=1e-3)


@pytest.mark.slow
def test_symmetric_couplings_give_perettos_law_not_boltzmanns():
    couplings = (ASYMMETRIC + ASYMMETRIC.mT) / 2
    system = SpinSystem(couplings, FIELD[:, None], measure="counting")
    run = {"chains": 2048, "burn_in": 30, "sweeps": 1000, "generator": generator()}
    together, in_turn = synchronous(system, **run), heat_bath(system, **run)
    peretto = torch.tensor([0.2264979423, -0.0046724193, 0.3024298889, 0.0396615162]).double()
    boltzmann = torch.tensor([0.2212950623, -0.0039868940, 0.3055311896, 0.0392669921]).double()
    assert_near(together.magnetization[:, 0], together.magnetization_error[:, 0], peretto, 1.5e-3)
    assert_near(in_turn.magnetization[:, 0], in_turn.magnetization_error[:, 0], boltzmann, 1.5e-3)
    for found, other in ((together, boltzmann), (in_turn, peretto)):
        assert float(((found.magnetization[:, 0] - other) / found.magnetization_error[:, 0]).abs().max()) > 4
    assert_near(together.entropy_production, together.entropy_production_error, 0.0, 2e-3)


def driven(dim, turn=None, beta=0.9, radius=1.4):
    """Site 0 in a field drives site 1, which does not answer: all averages in closed form."""
    strength, field = 0.8, torch.zeros(2, dim, dtype=torch.float64)
    field[0] = random(dim, seed=4)
    response, one = SphereUnits(), torch.zeros(1, dim, dtype=torch.float64)
    one[0, 0] = strength * radius
    gain = float(response.magnetization(one, beta, radius)[0, 0]) / radius
    first = response.magnetization(field[:1], beta, radius)[0]
    couplings = torch.tensor([[0.0, 0.0], [strength, 0.0]], dtype=torch.float64)
    if turn is not None:
        couplings = couplings[..., None, None] * turn
        second = gain * turn @ first
    else:
        second = gain * first
    system = SpinSystem(couplings, field, beta, radius=radius)
    # sigma = beta K <s'_1 . T s_0> less the same of independent spins, and s'_1 has the mean gain T s_0.
    entropy = beta * strength * gain * (radius**2 - first @ first)
    return system, torch.stack([first, second]), gain, entropy


@pytest.mark.parametrize("dim", [1, 2, 3, 6])
def test_a_driven_vector(dim):
    system, m, gain, entropy = driven(dim)
    found = synchronous(system, chains=512, burn_in=3, sweeps=100, generator=generator())
    assert_near(found.magnetization, found.magnetization_error, m, 0.02)
    delayed = torch.zeros(2, 2, dtype=torch.float64)
    delayed[1, 0] = gain * (system.radius**2 - m[0] @ m[0])
    assert_near(found.delayed_correlations, found.delayed_correlations_error, delayed, 0.02)
    assert_near(found.entropy_production, found.entropy_production_error, entropy, 0.03)


def test_a_driven_vector_coupled_by_a_matrix():
    turn = torch.linalg.qr(random(3, 3, seed=8)).Q
    system, m, gain, entropy = driven(3, turn)
    found = synchronous(system, chains=512, burn_in=3, sweeps=100, generator=generator())
    assert_near(found.magnetization, found.magnetization_error, m, 0.02)
    assert_near(found.entropy_production, found.entropy_production_error, entropy, 0.03)
    tau, rho = (float(v) for v in SphereUnits().covariance_parts(system.field[:1], system.beta, system.radius))
    u = m[0] / m[0].norm()
    expected = gain * (tau * turn.trace() + (rho - tau) * (u @ turn @ u))
    assert_near(found.delayed_correlations[1, 0], found.delayed_correlations_error[1, 0], expected, 0.02)


def test_a_vector_coupled_to_its_own_past():
    """One spin with a diagonal: uniform in the long run, and D_11 = R^2 A(beta J R^2)."""
    system = SpinSystem(torch.tensor([[0.7]]).double(), torch.zeros(1, 3).double(), 1.2)
    found = synchronous(system, chains=512, burn_in=30, sweeps=200, generator=generator())
    kappa = torch.tensor(1.2 * 0.7 * 3).double()
    assert_near(
        found.delayed_correlations[0, 0],
        found.delayed_correlations_error[0, 0],
        3 * (1 / kappa.tanh() - 1 / kappa),
        0.02,
    )
    assert_near(found.magnetization, found.magnetization_error, 0.0, 0.02)


def test_masked_sites_change_nothing_in_synchronous_dynamics():
    wide = torch.full((5, 5), torch.nan, dtype=torch.float64)
    wide[:4, :4] = ASYMMETRIC
    field = torch.cat([FIELD, FIELD.new_full((1,), torch.nan)])[:, None]
    system = SpinSystem(wide, field, mask=torch.arange(5) < 4)
    found = synchronous(system, chains=256, burn_in=30, sweeps=300, generator=generator())
    law = stationary_law(ASYMMETRIC, FIELD)
    assert_near(found.magnetization[:4, 0], found.magnetization_error[:4, 0], law.magnetization, 6e-3)
    assert_near(found.entropy_production, found.entropy_production_error, law.entropy_production, 2e-2)
    assert (found.magnetization[4] == 0).all()
    assert (found.delayed_correlations[4] == 0).all()
    assert (found.final[:, 4] == 0).all()


@pytest.mark.slow
def test_errors_of_dynamics_are_honest():
    """Deviations in units of their errors scatter by 1, with few chains and with many."""
    copies, law = 300, stationary_law(ASYMMETRIC, FIELD)
    system = SpinSystem(ASYMMETRIC, FIELD[:, None].expand(copies, 4, 1))
    for chains, sweeps, parts in ((1, 2000, 32), (64, 40, 32)):
        found = synchronous(system, chains=chains, burn_in=30, sweeps=sweeps, generator=generator(5))
        pulls = (
            (found.entropy_production - law.entropy_production) / found.entropy_production_error,
            (found.delayed_correlations - law.delayed)[:, 2, 0] / found.delayed_correlations_error[:, 2, 0],
        )
        for pull in pulls:
            assert float(pull.square().mean()) == pytest.approx((parts - 1) / (parts - 3), abs=0.4)
            assert abs(float(pull.mean())) < SURE / copies**0.5


def test_synchronous_runs_repeat_and_keep():
    system, run = SpinSystem(ASYMMETRIC, random(2, 4, 3)), {"chains": 5, "burn_in": 2, "sweeps": 9, "thin": 2}
    found = synchronous(system, **run, keep=True, generator=generator(3))
    again = synchronous(system, **run, generator=generator(3))
    assert torch.equal(found.final, again.final)
    assert torch.equal(found.entropy_production, again.entropy_production)
    assert found.trajectory.shape == (4, 5, 2, 4, 3)
    torch.testing.assert_close(found.magnetization, found.trajectory.mean((0, 1)))
    every = synchronous(system, **(run | {"thin": 1}), keep=True, generator=generator(3)).trajectory
    torch.testing.assert_close(found.trajectory, every[1::2], rtol=0, atol=0)
    # Both means of the delayed products are those of the states they are made of.
    new, old = every[1::2], every[:-1:2]
    products = torch.einsum("tcbid,tcbjd->bij", new, old) / 20
    expected = products - torch.einsum("bid,bjd->bij", new.mean((0, 1)), old.mean((0, 1)))
    torch.testing.assert_close(found.delayed_correlations, expected)


def wells(field=0.05):
    """A strong ferromagnet of eight spins whose wells are left once in exp(30) sweeps."""
    couplings = torch.full((8, 8), 1.0, dtype=torch.float64).fill_diagonal_(0.0)
    return SpinSystem(couplings, torch.full((8, 1), field, dtype=torch.float64), 2.0)


BETAS = [0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0]


def truth(system, betas, method):
    parts = [thermodynamics(system.at(system.field, system.couplings, beta), method) for beta in betas]
    names = ("magnetization", "correlations", "internal_energy", "heat_capacity")
    return [torch.stack([getattr(part, name) for part in parts]) for name in names]


def assert_thermal(found, expected, limit):
    names = ("magnetization", "correlations", "energy", "heat_capacity")
    for name, right in zip(names, expected, strict=True):
        assert_near(getattr(found, name), getattr(found, name + "_error"), right, limit)


@pytest.mark.slow
def test_two_wells():
    system = wells()
    found = replica_exchange(system, BETAS, chains=128, burn_in=300, sweeps=1000, generator=generator())
    expected = truth(system, BETAS, Enumeration())
    assert found.magnetization.shape == (8, 8, 1)
    assert found.final.shape == (128, 8, 8, 1)
    assert found.exchange_rate.shape == (7,)
    assert ((found.exchange_rate > 0.2) & (found.exchange_rate <= 1)).all()
    # At beta = 2 the energy hardly ever leaves its ground state: its rare excursions are no normal variable.
    for name, right in zip(("magnetization", "correlations"), expected[:2], strict=True):
        assert_near(getattr(found, name), getattr(found, name + "_error"), right, 0.05)
    warm = slice(0, 6)
    assert_near(found.energy[warm], found.energy_error[warm], expected[2][warm], 0.1)
    assert_near(found.heat_capacity[warm], found.heat_capacity_error[warm], expected[3][warm], 0.1)
    # A plain heat bath splits evenly between the wells, which are not even.
    caught = heat_bath(system, chains=128, burn_in=300, sweeps=1000, generator=generator())
    assert expected[0][-1].min() > 0.5
    assert caught.magnetization.max() < 0.4
    assert float(caught.effective_samples) < 4 * 128 < float(found.effective_samples[-1])


def test_frustrated_spins_at_falling_beta():
    couplings = torch.sign(random(2, 9, 9, seed=3)).triu(1)
    system = SpinSystem(couplings + couplings.mT, 0.1 * random(2, 9, 1, seed=4))
    betas = torch.tensor([1.0, 0.7, 0.5, 0.35, 0.2])
    found = replica_exchange(system, betas, chains=256, burn_in=100, sweeps=300, generator=generator())
    assert found.energy.shape == (5, 2)
    assert found.exchange_rate.shape == (4, 2)
    assert_thermal(found, truth(system, betas.double().tolist(), Enumeration()), 0.1)


def test_vectors_are_exchanged():
    couplings = torch.diag(torch.tensor([0.6, -0.5, 0.8]).double(), 1)
    field = torch.tensor([0.4, -0.2, 0.3, 0.1]).double()[:, None] * torch.tensor([0, 3**0.5, 0]).double()
    system = SpinSystem(couplings + couplings.mT, field)
    found = replica_exchange(
        system, (0.5, 1.0, 2.0), chains=256, burn_in=30, sweeps=150, exchange_every=2, generator=generator()
    )
    assert_thermal(found, truth(system, (0.5, 1.0, 2.0), TransferMatrix()), 0.1)


def test_the_exchange_rate_is_that_of_independent_states():
    """States at two temperatures are all but independent if exchanges are rare: the rate follows from the energies."""
    couplings = random(6, 6, seed=1)
    system = SpinSystem((couplings + couplings.mT) / 4, random(6, 1, seed=2))
    betas = torch.tensor([0.4, 1.3]).double()
    spins = ising_states(6)
    energies = -((spins @ system.couplings) * spins).sum(-1) / 2 - spins @ system.field[:, 0]
    law = (-betas[:, None] * energies).softmax(-1)
    ratio = ((betas[0] - betas[1]) * (energies[:, None] - energies)).exp().clamp(max=1)
    expected = law[0] @ ratio @ law[1]
    found = replica_exchange(
        system, betas, chains=512, burn_in=20, sweeps=200, exchange_every=10, generator=generator()
    )
    # Ten exchanges of 512 chains.
    assert float(found.exchange_rate) == pytest.approx(float(expected), abs=4 * (0.25 / 5120) ** 0.5)


def test_exchanges_are_made_as_often_as_asked():
    system = wells()
    never = replica_exchange(system, BETAS[:3], chains=4, burn_in=0, sweeps=5, exchange_every=9, generator=generator())
    assert never.exchange_rate.isnan().all()
    once = replica_exchange(system, BETAS[:3], chains=4, burn_in=0, sweeps=1, generator=generator())
    assert once.exchange_rate.isnan().tolist() == [True, False]
    # The burn-in is not counted.
    second = replica_exchange(system, BETAS[:3], chains=4, burn_in=1, sweeps=1, generator=generator())
    assert second.exchange_rate.isnan().tolist() == [False, True]


def test_replicas_repeat_and_do_not_spread_what_is_lost():
    field = 0.1 * random(3, 8, 1)
    system = SpinSystem(wells().couplings, field)
    run = {"chains": 3, "burn_in": 2, "sweeps": 6}
    first = replica_exchange(system, BETAS, **run, generator=generator(3))
    assert torch.equal(first.final, replica_exchange(system, BETAS, **run, generator=generator(3)).final)
    field = field.clone()
    field[1, 0] = torch.nan
    found = replica_exchange(SpinSystem(wells().couplings, field), BETAS, **run, generator=generator(3))
    assert found.energy.isnan().tolist() == [[False, True, False]] * 8
    assert found.exchange_rate[:, 1].isnan().all()
    assert torch.equal(found.energy[:, ::2], first.energy[:, ::2])
    assert torch.equal(found.exchange_rate[:, ::2], first.exchange_rate[:, ::2])


def test_couplings_are_not_mistaken_for_those_of_single_temperatures():
    """Matrices as couplings of N = D sites look like couplings per sample of a batch (T, ...) = (N, ...)."""
    turns = torch.linalg.qr(random(3, 3, 3, seed=5)).Q
    couplings = torch.einsum("ij,iab,jcb->ijac", torch.ones(3, 3).double() - torch.eye(3), turns, turns)
    system = SpinSystem(couplings, random(3, 3, 3))
    found = replica_exchange(system, [0.5, 0.6, 0.7], chains=4, burn_in=0, sweeps=2, generator=generator())
    assert found.energy.shape == (3, 3)


def test_systems_with_masked_sites_only():
    system = SpinSystem(torch.zeros(3, 3), torch.zeros(2, 3, 3), mask=torch.zeros(2, 3, dtype=torch.bool))
    for found in (
        heat_bath(system, sweeps=2, generator=generator()),
        synchronous(system, sweeps=2, generator=generator()),
    ):
        assert found.energy.tolist() == [0, 0]
        assert found.energy_error.tolist() == [0, 0]
        assert found.effective_samples.tolist() == [128, 128]
        assert (found.magnetization == 0).all()


def test_empty_batches():
    system = SpinSystem(torch.zeros(4, 4), torch.zeros(0, 4, 2))
    assert synchronous(system, chains=2, sweeps=2, generator=generator()).entropy_production.shape == (0,)
    found = replica_exchange(system, [1.0, 2.0], chains=2, sweeps=2, generator=generator())
    assert found.energy.shape == (2, 0)
    assert found.exchange_rate.shape == (1, 0)
