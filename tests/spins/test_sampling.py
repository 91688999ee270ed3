"""Sequential heat bath against exact averages, and standard errors against the scatter that they speak of."""

import networkx
import numpy as np
import pytest
import torch
from solvable_models import ALONG, CHAIN, COUPLINGS, FIELD, four, four_vectors
from work import Work

from implicit_attention.spins import Bonds, Enumeration, SpinSystem, TransferMatrix, thermodynamics
from implicit_attention.spins.sampling import Samples, heat_bath
from implicit_attention.testing.numerics import random

pytestmark = pytest.mark.cases(2)

AVERAGES = ("magnetization", "correlations", "energy", "heat_capacity")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def ising_truth(system):
    exact = thermodynamics(system, Enumeration())
    return exact.magnetization, exact.correlations, exact.internal_energy, exact.heat_capacity


def chain(dim, beta=1.2, axis=None, radius="sqrt_dim"):
    """A chain of four vectors in fields along one direction, and its exact averages."""
    axis = torch.eye(dim, dtype=torch.float64)[0] if axis is None else axis
    system = SpinSystem(CHAIN, ALONG[:, None] * axis * dim**0.5, beta, radius=radius)
    exact = thermodynamics(system, TransferMatrix())
    return system, (exact.magnetization, exact.correlations, exact.internal_energy, exact.heat_capacity)


def deviations(found: Samples, truth):
    """All averages less the truth in standard errors; numbers without scatter have to be right."""
    parts = []
    for name, exact in zip(AVERAGES, truth, strict=True):
        value, error = getattr(found, name), getattr(found, name + "_error")
        sure = error < 1e-12
        torch.testing.assert_close(value[sure], exact.expand_as(value)[sure].to(value), rtol=1e-12, atol=1e-12)
        parts.append(((value - exact) / error)[~sure])
    return torch.cat([p.flatten() for p in parts])


def assert_right(found, truth):
    # 31 degrees of freedom make 4.5 as improbable as 4 is for a normal variable.
    assert deviations(found, truth).abs().max() < 4.5


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_four_ising_spins(beta):
    system = four(beta)
    found = heat_bath(system, chains=1024, burn_in=50, sweeps=400, generator=generator())
    assert_right(found, ising_truth(system))
    assert found.energy_error < 2e-3
    exact = {1.0: [0.1428041181, -0.0093881480, 0.2736346912, 0.1582063146]}
    if beta in exact:
        assert (
            (found.magnetization[:, 0] - torch.tensor(exact[1.0])).abs() < 4.5 * found.magnetization_error[:, 0]
        ).all()
        covariance = found.correlations - torch.outer(found.magnetization[:, 0], found.magnetization[:, 0])
        assert covariance[0, 1] == pytest.approx(0.2478560902, abs=5 * float(found.correlations_error[0, 1]))
        assert covariance[2, 3] == pytest.approx(0.3169427602, abs=5 * float(found.correlations_error[2, 3]))


def test_four_vectors_in_three_dimensions():
    """Numbers per D in units of m/sqrt(D), from 2e7 samples of another program, with its own errors."""
    found = heat_bath(four_vectors(), chains=2048, burn_in=30, sweeps=400, generator=generator())

    def near(value, error, truth, other):
        assert ((value - torch.tensor(truth)).abs() < 4 * (error**2 + other**2).sqrt()).all()
        assert (error < 2e-3).all()

    near(found.magnetization[0] / 3**0.5, found.magnetization_error[0] / 3**0.5, [0.335588, 0.003086, 0.292194], 2e-4)
    near(found.correlations[0, 1] / 3, found.correlations_error[0, 1] / 3, 0.202847, 2e-4)
    near(found.correlations[2, 3] / 3, found.correlations_error[2, 3] / 3, 0.313908, 2e-4)
    near(found.energy / 3, found.energy_error / 3, -0.927267, 8e-5)
    near(found.heat_capacity / 3, found.heat_capacity_error / 3, 0.7986, 1e-3)
    assert found.correlations.diagonal().numpy() == pytest.approx(3.0, rel=1e-12)


@pytest.mark.parametrize(("dim", "radius"), [(2, "sqrt_dim"), (3, 1.3), (5, "bessel"), (16, "sqrt_dim")])
def test_chains_of_vectors(dim, radius):
    axis = random(dim, seed=3)
    system, truth = chain(dim, axis=axis / axis.norm(), radius=radius)
    assert_right(heat_bath(system, chains=512, burn_in=30, sweeps=120, generator=generator()), truth)


def test_matrices_as_couplings():
    """J_ij = K_ij Q_i Q_j^T with h_i = Q_i g_i is the chain of K and g with its spins turned by Q_i."""
    system, (m, _, energy, capacity) = chain(3)
    turns = torch.linalg.qr(random(4, 3, 3, seed=5)).Q
    couplings = torch.einsum("ij,iab,jcb->ijac", CHAIN, turns, turns)
    turned = SpinSystem(couplings, torch.einsum("iab,ib->ia", turns, system.field), 1.2)
    found = heat_bath(turned, chains=512, burn_in=30, sweeps=120, generator=generator())
    m = torch.einsum("iab,ib->ia", turns, m)
    assert_right(found, (m, found.correlations, energy, capacity))
    plain = heat_bath(system, chains=512, burn_in=30, sweeps=120, generator=generator())
    # Of <s_i . s_j> itself: on the diagonal R^2, elsewhere that of turned spins.
    assert found.correlations.diagonal().numpy() == pytest.approx(3.0, rel=1e-12)
    drawn = torch.einsum("iba,cib->cia", turns, found.final)
    assert abs(float((drawn[:, 0] * drawn[:, 1]).sum(-1).mean() - plain.correlations[0, 1])) < 4 * 3 / 512**0.5


def test_matrices_of_one_number_are_numbers():
    system = SpinSystem(COUPLINGS, FIELD.expand(2, 4, 1))
    block = SpinSystem(COUPLINGS[..., None, None], FIELD.expand(2, 4, 1))
    run = {"chains": 8, "burn_in": 2, "sweeps": 5}
    assert torch.equal(
        heat_bath(system, **run, generator=generator()).energy, heat_bath(block, **run, generator=generator()).energy
    )


def test_more_sites_than_are_treated_at_a_time():
    couplings = random(11, 11, seed=2) / 11**0.5
    system = SpinSystem(couplings + couplings.mT, 0.3 * random(11, 1, seed=3), 0.8, radius=1.1)
    found = heat_bath(system, chains=512, burn_in=50, sweeps=300, generator=generator())
    assert_right(found, ising_truth(system))


def test_every_sample_has_its_own_couplings_and_beta():
    couplings = 0.5 * random(2, 3, 3, 3, seed=2)
    beta = torch.tensor([[0.3], [1.4]], dtype=torch.float64)
    system = SpinSystem(couplings + couplings.mT, random(2, 3, 3, 1, seed=3), beta)
    found = heat_bath(system, chains=256, burn_in=30, sweeps=400, generator=generator())
    assert found.magnetization.shape == (2, 3, 3, 1)
    assert found.final.shape == (256, 2, 3, 3, 1)
    assert_right(found, ising_truth(system))


@pytest.mark.parametrize("dim", [1, 3])
def test_a_diagonal_is_a_constant(dim):
    run = {"chains": 40, "burn_in": 5, "sweeps": 30}
    couplings, field = COUPLINGS.clone(), random(4, dim, seed=1)
    plain = heat_bath(SpinSystem(couplings, field, radius=1.5), **run, generator=generator())
    own = torch.tensor([0.3, -2.0, 5.0, 0.1], dtype=torch.float64)
    for given in (couplings + own.diag(), (couplings + own.diag())[..., None, None] * torch.eye(dim).double()):
        found = heat_bath(SpinSystem(given, field, radius=1.5), **run, generator=generator())
        torch.testing.assert_close(found.final, plain.final, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.energy, plain.energy - own.sum() * 1.5**2 / 2, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.heat_capacity, plain.heat_capacity, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("per_sample", [False, True])
def test_masked_sites_change_nothing(per_sample):
    wide = torch.full((6, 6), torch.nan, dtype=torch.float64)
    wide[1:5, 1:5] = COUPLINGS
    field = torch.full((2, 6, 1), torch.nan, dtype=torch.float64)
    field[:, 1:5] = FIELD
    mask = torch.tensor([False, True, True, True, True, False])
    if per_sample:
        # The last site of the second sample exists, on its own, in a field of 1.
        wide[5], wide[:, 5], field[1, 5] = 0.0, 0.0, 1.0
        mask = torch.stack([mask, mask])
        mask[1, 5] = True
    system = SpinSystem(wide, field, mask=mask)
    found = heat_bath(system, chains=512, burn_in=30, sweeps=300, generator=generator())
    assert_right(found, ising_truth(system))
    assert (found.magnetization[:, 0] == 0).all()
    assert (found.final[:, :, 0] == 0).all()
    assert (found.correlations[:, 0] == 0).all()
    if per_sample:
        assert (found.magnetization[0, 5] == 0).all()
        assert float(found.magnetization[1, 5]) == pytest.approx(np.tanh(1), abs=0.01)


@pytest.mark.parametrize("per_sample", [False, True])
def test_clamped_spins_are_a_field_for_the_others(per_sample):
    clamp = torch.tensor([True, False, False, True])
    start = torch.tensor([-1.0, 1.0, 1.0, 1.0], dtype=torch.float64)[:, None]
    system = SpinSystem(COUPLINGS, FIELD.expand(2, 4, 1), 1.5)
    if per_sample:
        clamp = torch.stack([clamp, torch.zeros(4, dtype=torch.bool)])
    found = heat_bath(system, chains=512, burn_in=30, sweeps=300, start=start, clamp=clamp, generator=generator())
    free = [1, 2]
    felt = FIELD[free] + COUPLINGS[free][:, [0, 3]] @ start[[0, 3]]
    truth = ising_truth(SpinSystem(COUPLINGS[free][:, free], felt, 1.5))
    error = found.magnetization_error[0, free]
    assert ((found.magnetization[0, free] - truth[0]).abs() < 4.5 * error).all()
    assert (found.magnetization[0, [0, 3]] == start[[0, 3]]).all()
    assert (found.final[:, 0, [0, 3]] == start[[0, 3]]).all()
    if per_sample:
        exact = ising_truth(SpinSystem(COUPLINGS, FIELD, 1.5))[0]
        assert ((found.magnetization[1] - exact).abs() < 4.5 * found.magnetization_error[1]).all()


def test_clamped_vectors_stay_and_act():
    start = torch.tensor([[0.6, 0.8, 0.0], [1.0, 0, 0]], dtype=torch.float64) * 3**0.5
    couplings = torch.tensor([[0.0, 0.9], [0.9, 0.0]], dtype=torch.float64)
    system = SpinSystem(couplings, torch.zeros(2, 3, dtype=torch.float64), 1.1)
    clamp = torch.tensor([True, False])
    found = heat_bath(system, burn_in=1, sweeps=300, start=start, clamp=clamp, generator=generator())
    kappa = 1.1 * 3 * 0.9
    expected = (1 / np.tanh(kappa) - 1 / kappa) * start[0]
    assert ((found.magnetization[1] - expected).abs() < 4.5 * found.magnetization_error[1]).all()
    torch.testing.assert_close(found.final[:, 0], start[0].expand(64, 3), rtol=1e-14, atol=1e-14)


# Standard errors: the deviation in units of its error has to scatter by 1.


def slow(copies):
    """A ferromagnet whose sweeps are correlated over about ten, so often that its errors can be checked."""
    couplings = torch.full((5, 5), 0.33, dtype=torch.float64).fill_diagonal_(0.0)
    field = torch.full((5, 1), 0.02, dtype=torch.float64)
    return SpinSystem(couplings, field.expand(copies, 5, 1)), ising_truth(SpinSystem(couplings, field))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chains", "sweeps", "parts"), [(1, 3200, 32), (5, 1000, 30), (20, 100, 20), (40, 60, 20), (64, 60, 32)]
)
def test_errors_are_honest(chains, sweeps, parts):
    copies = 300
    system, truth = slow(copies)
    found = heat_bath(system, chains=chains, burn_in=100, sweeps=sweeps, generator=generator(7))
    # The square of a Student variable with n degrees of freedom has the mean n/(n - 2).
    expected = (parts - 1) / (parts - 3)
    for name, exact in zip(AVERAGES, truth, strict=True):
        value, error = getattr(found, name), getattr(found, name + "_error")
        while value.ndim > 1:
            # One pair and one site of each copy: they are not independent.
            value, error, exact = value[..., -1], error[..., -1], exact[..., -1]
            if name == "correlations" and value.ndim == 2:
                value, error, exact = value[:, 0], error[:, 0], exact[0]
                break
        pull = (value - exact) / error
        # Four standard deviations of a mean over 300 of what varies by sqrt(2) and more.
        assert float(pull.square().mean()) == pytest.approx(expected, abs=0.4), name
        assert abs(float(pull.mean())) < 4.5 / copies**0.5, name


@pytest.mark.slow
def test_effective_samples_count_independent_states():
    free = SpinSystem(torch.zeros(3, 3, dtype=torch.float64), random(200, 3, 2, seed=1), 0.7)
    found = heat_bath(free, chains=96, burn_in=1, sweeps=20, generator=generator())
    assert found.num_samples == 96 * 20
    # The lesser of two estimates from 31 degrees of freedom each.
    assert 0.6 < float(found.effective_samples.median()) / found.num_samples < 1.1
    system, _ = slow(50)
    correlated = heat_bath(system, chains=96, burn_in=100, sweeps=200, generator=generator())
    assert 0.03 < float(correlated.effective_samples.median()) / correlated.num_samples < 0.3


def test_chains_that_do_not_mix_are_seen():
    """Two wells at low temperature: every chain is its own and only sample."""
    couplings = torch.ones(8, 8, dtype=torch.float64).fill_diagonal_(0.0)
    system = SpinSystem(couplings, torch.zeros(8, 1, dtype=torch.float64), 2.0)
    found = heat_bath(system, chains=256, sweeps=200, generator=generator())
    assert 100 < float(found.effective_samples) < 500
    assert found.magnetization.abs().max() < 4.5 * found.magnetization_error.max()
    # 24 chains in one well and 8 in the other: a variance of 1 - 1/4, and 32 numbers with one mean.
    start = torch.where(torch.arange(32) < 8, -1.0, 1.0).double()[:, None, None].expand(32, 8, 1)
    frozen = heat_bath(system, chains=32, sweeps=20, start=start, generator=generator())
    assert (frozen.magnetization == 0.5).all()
    assert float(frozen.effective_samples) == pytest.approx(31, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("chains", "sweeps"), [(2, 1), (5, 1), (1, 3)])
def test_errors_of_few_numbers(chains, sweeps):
    """The scatter of so many parts, with one degree of freedom taken by their mean."""
    system = SpinSystem(COUPLINGS, random(4, 3), 0.8)
    run = {"chains": chains, "burn_in": 2, "sweeps": sweeps, "keep": True}
    found = heat_bath(system, **run, generator=generator())
    parts = found.trajectory.flatten(0, 1)
    count = len(parts)
    torch.testing.assert_close(found.magnetization_error, parts.std(0) / count**0.5)
    pair = (parts @ parts.mT).std(0) / count**0.5
    torch.testing.assert_close(found.correlations_error, pair, rtol=1e-9, atol=1e-14)


def test_one_number_has_no_error():
    found = heat_bath(SpinSystem(COUPLINGS, FIELD), chains=1, burn_in=0, sweeps=1, generator=generator())
    for name in AVERAGES:
        assert getattr(found, name + "_error").isinf().all()


# The run.


def test_averages_are_those_of_the_states_that_were_measured():
    couplings = random(2, 4, 4, seed=1)
    system = SpinSystem(0.3 * (couplings + couplings.mT), random(2, 4, 3), 1.3)
    for chains in (3, 37):
        found = heat_bath(system, chains=chains, burn_in=3, sweeps=11, thin=2, keep=True, generator=generator())
        states = found.trajectory
        assert states.shape == (5, chains, 2, 4, 3)
        assert found.num_samples == 5 * chains
        torch.testing.assert_close(found.magnetization, states.mean((0, 1)))
        products = torch.einsum("tcbid,tcbjd->bij", states, states) / found.num_samples
        torch.testing.assert_close(found.correlations, products)
        pair = torch.einsum("tcbid,bij,tcbjd->tcb", states, system.couplings, states) / 2
        energies = -pair - (states * system.field).sum((-1, -2))
        torch.testing.assert_close(found.energy, energies.mean((0, 1)))
        capacity = 1.3**2 * energies.flatten(0, 1).var(0, correction=0)
        torch.testing.assert_close(found.heat_capacity, capacity)
    assert heat_bath(system, chains=2, burn_in=0, sweeps=2, generator=generator()).trajectory is None


def test_a_run_can_be_continued():
    system = SpinSystem(COUPLINGS, random(2, 4, 3), 1.3)
    source = generator()
    first = heat_bath(system, chains=5, burn_in=2, sweeps=3, generator=source)
    second = heat_bath(system, chains=5, burn_in=0, sweeps=4, start=first.final, keep=True, generator=source)
    whole = heat_bath(system, chains=5, burn_in=2, sweeps=7, keep=True, generator=generator())
    torch.testing.assert_close(second.trajectory, whole.trajectory[3:], rtol=1e-12, atol=1e-12)


def test_the_generator_alone_decides():
    system, run = SpinSystem(COUPLINGS, random(2, 4, 4)), {"chains": 5, "burn_in": 2, "sweeps": 3}
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = heat_bath(system, **run, generator=generator(3))
    again = heat_bath(system, **run, generator=generator(3))
    assert torch.equal(first.final, again.final)
    assert torch.equal(first.energy_error, again.energy_error)
    assert not torch.equal(first.final, heat_bath(system, **run, generator=generator(4)).final)
    assert torch.equal(before, torch.get_rng_state())


def test_progress_is_told_after_every_sweep():
    seen = []
    run = {"chains": 2, "burn_in": 2, "sweeps": 3}
    heat_bath(SpinSystem(COUPLINGS, FIELD), **run, generator=generator(), progress=lambda *now: seen.append(now))
    assert seen == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]


def test_a_lost_sample_changes_no_other():
    field = random(4, 4, 1).clone()
    beta = torch.tensor([1.0, 0.5, 1.0, 2.0]).double()
    run = {"chains": 6, "burn_in": 2, "sweeps": 5}
    whole = heat_bath(SpinSystem(COUPLINGS, field, beta), **run, generator=generator())
    field[1, 2], field[3, 0] = torch.nan, torch.inf
    found = heat_bath(SpinSystem(COUPLINGS, field, beta), **run, generator=generator())
    for name in (*AVERAGES, "energy_error", "effective_samples"):
        value, truth = getattr(found, name), getattr(whole, name)
        assert value[[1, 3]].isnan().all(), name
        assert torch.equal(value[[0, 2]], truth[[0, 2]]), name
    assert found.final[:, [1, 3]].isnan().all()
    assert torch.equal(found.final[:, [0, 2]], whole.final[:, [0, 2]])


def test_a_start_that_is_not_finite_loses_its_sample():
    start = torch.ones(2, 4, 1, dtype=torch.float64)
    start[1, 2] = torch.nan
    system = SpinSystem(COUPLINGS, FIELD.expand(2, 4, 1))
    found = heat_bath(system, burn_in=0, sweeps=5, start=start, generator=generator())
    assert found.energy.isnan().tolist() == [False, True]


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_half_and_single_precision(dim):
    field, run = random(4, dim), {"chains": 4, "burn_in": 3, "sweeps": 50}
    half = heat_bath(SpinSystem(COUPLINGS.bfloat16(), field.bfloat16()), **run, generator=generator())
    single = heat_bath(SpinSystem(COUPLINGS.bfloat16().float(), field.bfloat16().float()), **run, generator=generator())
    assert half.final.dtype == torch.float32
    assert half.energy.dtype == torch.float64
    assert torch.equal(half.final, single.final)
    torch.testing.assert_close(single.final.norm(dim=-1), torch.full((4, 4), dim**0.5), rtol=2e-6, atol=0)


def test_no_graph_and_no_gradient():
    field = random(4, 3).requires_grad_()
    found = heat_bath(SpinSystem(COUPLINGS, field), chains=2, burn_in=1, sweeps=2, generator=generator())
    assert not found.magnetization.requires_grad
    assert not found.final.requires_grad


def test_low_temperature_finds_the_ground_state_of_a_chain():
    """Spins of a chain at beta = 1e5 without a field: neighbours are parallel or antiparallel."""
    system = SpinSystem(CHAIN, torch.zeros(4, 3, dtype=torch.float64), 1e5)
    start = torch.tensor([1.0, 1.0, -1.0, -1.0]).double()[:, None] * torch.tensor([1.0, 0, 0]).double() * 3**0.5
    found = heat_bath(system, chains=128, burn_in=300, sweeps=200, start=start, generator=generator())
    # Two quadratic degrees of freedom per bond, each of energy 1/(2 beta).
    ground = -3 * (0.6 + 0.5 + 0.8)
    assert float(found.energy - ground) == pytest.approx(3e-5, abs=4 * float(found.energy_error))
    assert found.energy_error < 1e-6
    assert float(found.heat_capacity) == pytest.approx(3.0, abs=4.5 * float(found.heat_capacity_error))


def test_an_empty_batch_has_empty_results():
    for dim in (1, 3, 4):
        system = SpinSystem(COUPLINGS, torch.zeros(0, 4, dim, dtype=torch.float64))
        found = heat_bath(system, chains=3, burn_in=1, sweeps=2, generator=generator())
        assert found.magnetization.shape == (0, 4, dim)
        assert found.final.shape == (3, 0, 4, dim)
        assert "nan" in repr(found)


# Couplings on the bonds of a graph: all sites of a colour at once.

#: With an odd cycle and without one, with loops, a site that nothing joins, a hub, and no bonds.
GRAPHS = {
    "house": (7, [[0, 1], [2, 1], [2, 3], [3, 4], [4, 5], [5, 0], [2, 5], [4, 4]]),
    "triangle": (3, [[0, 1], [1, 2], [2, 0]]),
    "star": (6, [[5, k] for k in range(5)]),
    "torus": (9, [[i, k] for i in range(9) for k in (i // 3 * 3 + (i + 1) % 3, (i + 3) % 9)]),
    "nothing": (2, []),
}


def on_graph(name, batch=(), dim=1, own=False):
    """Bonds, and a field for them."""
    sites, pairs = GRAPHS[name]
    values = 0.6 * random(*(batch if own else ()), len(pairs), seed=1)
    return Bonds(torch.tensor(pairs).long().reshape(-1, 2), values, sites), 0.5 * random(*batch, sites, dim, seed=2)


def along(bonds, correlations):
    """Those of the bonds, of all pairs."""
    i, j = bonds.pairs.unbind(-1)
    return correlations[..., i, j]


def bond_truth(bonds, system):
    m, correlations, *energies = ising_truth(system)
    return m, along(bonds, correlations), *energies


@pytest.mark.cases(len(GRAPHS))
@pytest.mark.parametrize("name", GRAPHS)
def test_bonds_against_enumeration(name):
    bonds, field = on_graph(name, (2,), own=True)
    beta = torch.tensor([0.6, 1.3]).double()
    found = heat_bath(SpinSystem(bonds, field, beta), chains=512, burn_in=50, sweeps=400, generator=generator())
    assert found.correlations.shape == found.correlations_error.shape == (2, len(GRAPHS[name][1]))
    assert_right(found, bond_truth(bonds, SpinSystem(bonds.dense(), field, beta)))
    assert found.energy_error.max() < 1e-2


def test_vectors_and_matrices_on_bonds():
    """A chain, and the same with its spins turned by Q_i and one bond from its second site to its first."""
    system, (m, correlations, energy, capacity) = chain(3)
    run = {"chains": 512, "burn_in": 30, "sweeps": 120, "generator": generator()}
    bonds = Bonds.of(CHAIN)
    truth = (m, along(bonds, correlations), energy, capacity)
    assert_right(heat_bath(SpinSystem(bonds, system.field, 1.2), **run), truth)
    turns = torch.linalg.qr(random(4, 3, 3, seed=5)).Q
    pairs = torch.tensor([[0, 1], [2, 1], [2, 3]])
    values = CHAIN[pairs[:, 0], pairs[:, 1], None, None] * turns[pairs[:, 0]] @ turns[pairs[:, 1]].mT
    bonds, field = Bonds(pairs, values, 4), torch.einsum("iab,ib->ia", turns, system.field)
    found = heat_bath(SpinSystem(bonds, field, 1.2), **run)
    m = torch.einsum("iab,ib->ia", turns, m)
    assert_right(found, (m, found.correlations, energy, capacity))
    dense = heat_bath(SpinSystem(bonds.dense(), field, 1.2), **run)
    error = (found.correlations_error**2 + along(bonds, dense.correlations_error) ** 2).sqrt()
    assert ((found.correlations - along(bonds, dense.correlations)).abs() < 4.5 * error).all()


def test_averages_of_bonds_are_those_of_the_states():
    bonds, field = on_graph("house", (2,), dim=3)
    for given in (bonds, Bonds(bonds.pairs[:7], 0.3 * random(7, 3, 3, seed=4), 7)):
        for run in ({"chains": 3, "sweeps": 11}, {"chains": 70, "sweeps": 4}):
            found = heat_bath(SpinSystem(given, field, 0.7), **run, burn_in=2, thin=2, keep=True, generator=generator())
            states = found.trajectory
            assert states.shape == (run["sweeps"] // 2, run["chains"], 2, 7, 3)
            torch.testing.assert_close(found.magnetization, states.mean((0, 1)))
            products = torch.einsum("tcbid,tcbjd->bij", states, states) / found.num_samples
            torch.testing.assert_close(found.correlations, along(given, products))
            whole = given.dense() if given.values.ndim > 1 else given.dense()[..., None, None] * torch.eye(3).double()
            energies = -torch.einsum("tcbid,ijde,tcbje->tcb", states, whole, states) / 2
            energies -= (states * field).sum((-1, -2))
            torch.testing.assert_close(found.energy, energies.mean((0, 1)))
            capacity = 0.7**2 * energies.flatten(0, 1).var(0, correction=0)
            torch.testing.assert_close(found.heat_capacity, capacity)


def test_graphs_of_their_own_with_sites_that_do_not_exist():
    """As a batch, padded by bonds of value 0 and by sites whose numbers are NaN."""
    names = ("house", "triangle", "star", "nothing")
    pairs, values = torch.zeros(4, 8, 2).long(), torch.zeros(4, 8).double()
    field, truth = torch.full((4, 7, 1), torch.nan).double(), [torch.zeros(4, 7, 1), torch.zeros(4, 7, 7), [], []]
    mask = torch.zeros(4, 7, dtype=torch.bool)
    for k, name in enumerate(names):
        bonds, own = on_graph(name)
        count, sites = len(bonds.pairs), len(own)
        pairs[k, :count], values[k, :count], field[k, :sites], mask[k, :sites] = bonds.pairs, bonds.values, own, True
        exact = ising_truth(SpinSystem(bonds.dense(), own))
        truth[0][k, :sites], truth[1][k, :sites, :sites] = exact[:2]
        truth[2].append(exact[2])
        truth[3].append(exact[3])
    # A bond to a site that does not exist.
    pairs[1, 3], values[1, 3] = torch.tensor([6, 2]), torch.nan
    bonds = Bonds(pairs, values, 7)
    run = {"chains": 512, "burn_in": 50, "sweeps": 400, "generator": generator()}
    found = heat_bath(SpinSystem(bonds, field, mask=mask), **run)
    i, j = bonds.pairs.unbind(-1)
    correlations = truth[1][torch.arange(4)[:, None], i, j]
    assert_right(found, (truth[0], correlations, torch.stack(truth[2]), torch.stack(truth[3])))


def test_clamped_spins_on_bonds():
    bonds, field = on_graph("house", (2,))
    clamp = torch.tensor([[0, 1, 0, 0, 1, 0, 1], [0, 0, 0, 0, 0, 0, 0]]).bool()
    start = torch.tensor([1.0, -1, 1, 1, 1, 1, -1]).double()[:, None]
    run = {"chains": 512, "burn_in": 30, "sweeps": 300, "start": start, "clamp": clamp}
    found = heat_bath(SpinSystem(bonds, field, 1.2), **run, generator=generator())
    assert (found.final[:, 0, clamp[0]] == start[clamp[0]]).all()
    free, dense = ~clamp[0], bonds.dense()
    felt = field[0, free] + dense[free][:, clamp[0]] @ start[clamp[0]]
    truth = ising_truth(SpinSystem(dense[free][:, free], felt, 1.2))[0]
    assert ((found.magnetization[0, free] - truth).abs() < 4.5 * found.magnetization_error[0, free]).all()
    truth = ising_truth(SpinSystem(dense, field[1], 1.2))[0]
    assert ((found.magnetization[1] - truth).abs() < 4.5 * found.magnetization_error[1]).all()


def test_loops_are_a_constant():
    bonds, field = on_graph("triangle", dim=3)
    run = {"chains": 40, "burn_in": 5, "sweeps": 30}
    plain = heat_bath(SpinSystem(bonds, field, radius=1.5), **run, generator=generator())
    pairs = torch.cat([torch.tensor([[2, 2]]), bonds.pairs])
    numbers = torch.cat([torch.tensor([3.0]).double(), bonds.values])
    turned = random(3, 3, seed=1)
    for values in (numbers, numbers[:, None, None] * torch.eye(3).double()):
        if values.ndim > 1:
            # What is antisymmetric at a site has no energy.
            values[0] += turned - turned.mT
        found = heat_bath(SpinSystem(Bonds(pairs, values, 3), field, radius=1.5), **run, generator=generator())
        torch.testing.assert_close(found.final, plain.final, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.energy, plain.energy - 3 * 1.5**2 / 2, rtol=1e-12, atol=1e-12)
        assert found.correlations[0] == pytest.approx(1.5**2, rel=1e-12)
    values[0, 0, 0] += 1
    with pytest.raises(ValueError, match="multiples of the unit matrix on the diagonal for heat_bath, got entr"):
        heat_bath(SpinSystem(Bonds(pairs, values, 3), field), generator=generator())


@pytest.mark.parametrize("own", [False, True])
def test_a_lost_sample_on_bonds_changes_no_other(own):
    bonds, field = on_graph("house", (3,), own=True)
    pairs = bonds.pairs.expand(3, -1, -1) if own else bonds.pairs
    broken, far = bonds.values.clone(), field.clone()
    broken[0, 3], far[2, 1] = torch.nan, 1e200
    run = {"chains": 6, "burn_in": 2, "sweeps": 5, "keep": True}
    whole = heat_bath(SpinSystem(Bonds(pairs, bonds.values, 7), field), **run, generator=generator())
    found = heat_bath(SpinSystem(Bonds(pairs, broken, 7), far), **run, generator=generator())
    for name in (*AVERAGES, "energy_error", "correlations_error", "effective_samples"):
        value, truth = getattr(found, name), getattr(whole, name)
        assert value[[0, 2]].isnan().all(), name
        assert torch.equal(value[1], truth[1]), name
    assert torch.equal(found.trajectory[:, :, 1], whole.trajectory[:, :, 1])


def test_half_precision_and_runs_that_go_on_on_bonds():
    bonds, field = on_graph("torus", (2,), dim=3)
    rounded = Bonds(bonds.pairs, bonds.values.bfloat16(), 9), field.bfloat16()
    found = heat_bath(SpinSystem(*rounded), chains=4, burn_in=1, sweeps=2, generator=generator())
    assert (found.final.dtype, found.correlations.dtype) == (torch.float32, torch.float64)
    system, source = SpinSystem(bonds, field), generator()
    first = heat_bath(system, chains=5, burn_in=2, sweeps=3, generator=source)
    second = heat_bath(system, chains=5, burn_in=0, sweeps=4, start=first.final, keep=True, generator=source)
    whole = heat_bath(system, chains=5, burn_in=2, sweeps=7, keep=True, generator=generator())
    torch.testing.assert_close(second.trajectory, whole.trajectory[3:], rtol=1e-12, atol=1e-12)


def test_no_matrix_of_all_pairs_is_made_by_the_heat_bath():
    sites = torch.arange(400)
    bonds = Bonds(torch.stack([sites, sites.roll(-1)], -1), 0.3 * random(400, seed=1), 400)
    with Work() as work:
        heat_bath(SpinSystem(bonds, random(400, 1, seed=2)), chains=1, burn_in=1, sweeps=40, generator=generator())
    assert 0 < work.largest < 400**2 / 5
    assert work.operations < 400 * 41


class Draws(Work):
    """Counts the tensors of random numbers that are drawn."""

    draws = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.draws += function.overloadpacket is torch.ops.aten.uniform_
        return super().__torch_dispatch__(function, types, arguments, options)


def test_few_colours():
    """Two where there is no odd cycle, few elsewhere, and those of a part whatever is beside it."""
    graphs = [networkx.grid_2d_graph(20, 20), networkx.star_graph(50), networkx.empty_graph(3)]
    graphs += [networkx.cycle_graph(9), networkx.complete_graph(12), networkx.random_regular_graph(3, 200, seed=0)]
    graphs += [networkx.triangular_lattice_graph(9, 9), networkx.barbell_graph(3, 4)]
    graphs += [networkx.disjoint_union_all(graphs)]
    most = [2, 2, 1, 3, 12, 4, 7, 4, 12]
    for graph, count in zip(graphs, most, strict=True):
        numbered = networkx.convert_node_labels_to_integers(graph)
        numbered.add_edge(0, 0)
        system = SpinSystem(Bonds.of(numbered), torch.zeros(len(graph), 1))
        start = torch.ones(len(graph), 1)
        with Draws() as work:
            heat_bath(system, chains=1, burn_in=0, sweeps=1, start=start, generator=generator())
        assert 0 < work.draws <= count
