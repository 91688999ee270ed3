"""Synchronous dynamics against exact Markov chains."""

import pytest
import torch
from solvable_models import ASYMMETRIC
from solvable_models import DRIVE as FIELD

from implicit_attention.potentials import SphereUnits
from implicit_attention.spins import Bonds, SpinSystem, stationary_law
from implicit_attention.spins.sampling import heat_bath, synchronous
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


def test_graphs_of_a_batch_of_two_axes():
    pairs = torch.tensor([[[0, 1], [1, 2]], [[2, 0], [0, 1]]]).expand(2, 2, 2, 2)
    bonds, field = Bonds(pairs, random(2, 2, 2, seed=1), 3), random(2, 2, 3, 1, seed=2)
    run = {"chains": 20, "burn_in": 2, "sweeps": 5}
    for given in (bonds, Bonds(pairs[0], bonds.values[0], 3)):
        found, right = (
            synchronous(SpinSystem(given, field), **run, generator=generator()) for given in (given, given.dense())
        )
        torch.testing.assert_close(found.final, right.final, rtol=0, atol=1e-12)
        torch.testing.assert_close(found.energy, right.energy, rtol=0, atol=1e-12)
        drawn = heat_bath(SpinSystem(given, field), **run, generator=generator())
        assert drawn.correlations.shape == (2, 2, 2)
        assert drawn.energy.isfinite().all()


def test_dynamics_on_bonds_is_that_of_the_matrix():
    """With loops, masks, graphs of their own and a site that nothing joins, number for number."""
    pairs = torch.tensor([[0, 1], [2, 1], [2, 3], [3, 0], [1, 3], [2, 2]])
    both = torch.stack([pairs, torch.tensor([[0, 4], [4, 3], [0, 0], [2, 1], [0, 0], [0, 0]])])
    mask = torch.tensor([[True] * 5, [True, True, False, True, True]])
    for dim in (1, 3):
        field = random(2, 5, dim, seed=2)
        shared, own = 0.5 * random(6, seed=1), 0.5 * random(2, 6, seed=1)
        own[1, 2], own[1, 4:] = 0.2, 0.0
        matrices = 0.3 * random(6, dim, dim, seed=3)
        for graph, values in ((pairs, shared), (pairs, own), (both, own), (pairs, matrices)):
            bonds = Bonds(graph, values, 5)
            for chains, sweeps in ((40, 4), (3, 20)):
                run = {"chains": chains, "burn_in": 2, "sweeps": sweeps}
                found, right = (
                    synchronous(SpinSystem(given, field, 0.9, mask=mask), **run, generator=generator(3))
                    for given in (bonds, bonds.dense() if dim > 1 or values.ndim < 3 else bonds.dense()[..., 0, 0])
                )
                for name in ("magnetization", "energy", "entropy_production", "final"):
                    for end in ("", "_error") if name != "final" else ("",):
                        one, other = getattr(found, name + end), getattr(right, name + end)
                        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
                assert found.delayed_correlations.shape == (2, 2, bonds.pairs.shape[-2])
                batch, (i, j) = torch.arange(2)[:, None], bonds.pairs.expand(2, -1, 2).unbind(-1)
                for end in ("", "_error"):
                    pair, delayed = (getattr(right, name + end) for name in ("correlations", "delayed_correlations"))
                    torch.testing.assert_close(getattr(found, "correlations" + end), pair[batch, i, j])
                    expected = torch.stack([delayed[batch, i, j], delayed[batch, j, i]], 1)
                    torch.testing.assert_close(getattr(found, "delayed_correlations" + end), expected)
