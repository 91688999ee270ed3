"""How near an answer is to where it breaks down."""

import math

import pytest
import torch

from implicit_attention import ConvergenceError, Picard, Status
from implicit_attention.spins import (
    AdaTAP,
    Bethe,
    Enumeration,
    MeanField,
    SaddlePoint,
    SpinSystem,
    TransferMatrix,
    free_energy,
    magnetization,
    stability,
    thermodynamics,
)
from implicit_attention.testing.numerics import random


def symmetric(n, seed=0, scale=0.5):
    couplings = scale * random(n, n, seed=seed)
    couplings = (couplings + couplings.mT) / 2
    return couplings - torch.diag(couplings.diagonal())


def close(value, truth, tolerance=1e-9):
    truth = torch.as_tensor(truth, dtype=torch.float64).expand(value.shape)
    torch.testing.assert_close(value, truth, rtol=tolerance, atol=tolerance)


@pytest.mark.by_name(slow=r"\[3")
@pytest.mark.parametrize("dim", [1, 3])
def test_a_curie_weiss_magnet_at_zero_field_is_known(dim):
    """All eigenvalues are 0 but one: J = 1/N for every pair."""
    beta, n = torch.tensor([0.5, 0.9, 1.5]).double(), 6
    system = SpinSystem(torch.full((n, n), 1 / n, dtype=torch.float64), torch.zeros(3, n, dim).double(), beta)
    found = stability(system, MeanField(), on_failure="ignore", starts=4)
    close(found.spectral_radius, beta)
    close(found.smallest_eigenvalue, 1 - beta)
    close(found.susceptibility[0][:2], beta[:2])
    close(found.susceptibility[1][:2], beta[:2] / (1 - beta[:2]))
    assert float(found.susceptibility[0][2]) < 0
    close(found.almeida_thouless, beta.square() * (n - 1) / n**2)


def test_below_the_transition_the_start_at_zero_is_the_wrong_branch():
    couplings = torch.full((6, 6), 1 / 6, dtype=torch.float64)
    system = SpinSystem(couplings, torch.zeros(2, 6, 1).double(), torch.tensor([0.5, 1.5]).double())
    found = stability(system, MeanField())
    assert found.report.status.tolist() == [Status.CONVERGED, Status.UNSTABLE]
    # Magnetizations up and down.
    assert found.branches.tolist() == [1, 2]
    close(found.excess[0], 0.0)
    m, beta = 0.858559636640, 1.5
    lowest = -(math.log(math.cosh(beta * m)) - beta * m * m / 2) * 6 / beta
    close(found.excess[1], -lowest)


@pytest.mark.by_name(slow=r"\[3")
@pytest.mark.parametrize("dim", [1, 3])
def test_eigenvalues_are_those_of_the_whole_matrices(dim):
    n = 5
    system = SpinSystem(symmetric(n), 0.5 * random(n, dim, seed=1), 0.8)
    for method in (MeanField(), SaddlePoint()):
        found = stability(system, method)
        thermo = thermodynamics(system, method)
        chi = torch.linalg.eigvalsh(thermo.susceptibility().reshape(n * dim, n * dim))
        close(found.susceptibility[0], chi[0], 1e-8)
        close(found.susceptibility[1], chi[-1], 1e-8)
    # A of the saddle point from its multipliers, of mean field from its susceptibility: chi = beta A^{-1}.
    multipliers = torch.diag(SaddlePoint().multipliers(system))
    close(found.smallest_eigenvalue, torch.linalg.eigvalsh(multipliers - 0.8 * system.couplings)[0], 1e-7)
    found = stability(system, MeanField())
    close(found.smallest_eigenvalue, 0.8 / found.susceptibility[1], 1e-8)


@pytest.mark.slow
def test_plain_iteration_converges_at_the_spectral_radius():
    system = SpinSystem(symmetric(6, scale=0.9), 0.3 * random(6, 2, seed=1), 0.7)
    rate = float(stability(system, MeanField(), starts=0).spectral_radius)
    assert 0.2 < rate < 1
    residuals = [
        float(
            thermodynamics(
                system, MeanField(solver=Picard(rtol=0, atol=1e-15, max_steps=k)), on_failure="ignore"
            ).report.residual
        )
        for k in (30, 40)
    ]
    assert (residuals[1] / residuals[0]) ** 0.1 == pytest.approx(rate, rel=0.02)


@pytest.mark.parametrize("block", [False, True])
def test_the_at_number_of_free_directions_is_that_of_the_squared_couplings(block):
    n, dim = 5, 3
    couplings = symmetric(n)
    field = torch.zeros(n, dim).double()
    given = couplings[..., None, None] * torch.eye(dim).double() if block else couplings
    found = stability(SpinSystem(given, field, 0.4), MeanField())
    close(found.almeida_thouless, 0.16 * torch.linalg.eigvalsh(couplings.square())[-1])


@pytest.mark.slow
def test_the_at_number_of_blocks_is_that_of_numbers_in_a_field_too():
    n, dim = 5, 3
    couplings, field = symmetric(n), random(n, dim, seed=1)
    found = [
        stability(SpinSystem(given, field, 0.4), MeanField()).almeida_thouless
        for given in (couplings, couplings[..., None, None] * torch.eye(dim).double())
    ]
    close(found[0], found[1])
    assert float(found[0]) < 0.95 * float(0.16 * torch.linalg.eigvalsh(couplings.square())[-1])


def test_masked_sites_do_not_count():
    mask = torch.tensor([True, True, False, True, True])
    couplings, field = symmetric(5), random(5, 2, seed=1)
    small = stability(SpinSystem(couplings[mask][:, mask], field[mask], 0.8), MeanField())
    field[2], couplings[2], couplings[:, 2] = (torch.nan,) * 3
    found = stability(SpinSystem(couplings, field, 0.8, mask=mask), MeanField())
    for name in ("spectral_radius", "smallest_eigenvalue", "almeida_thouless", "branches"):
        close(getattr(found, name).double(), getattr(small, name).double())
    close(torch.stack(found.susceptibility), torch.stack(small.susceptibility))


def test_methods_with_one_solution_have_one_branch():
    system = SpinSystem(symmetric(5), random(2, 5, 1, seed=1), 0.8)
    for method in (Enumeration(), SaddlePoint()):
        found = stability(system, method)
        assert found.branches.tolist() == [1, 1]
        close(found.free_energies[..., 0], free_energy(system, method))
        close(found.lowest, magnetization(system, method))
    for starts in (0, 1, 3):
        found = stability(system, Bethe(), starts=starts)
        assert found.free_energies.shape == found.first.shape == (2, starts + 1)
        # One branch: all starts lead to it.
        truth = magnetization(system, Bethe())[:, None].expand(2, starts + 1, 5, 1)
        torch.testing.assert_close(found.magnetizations, truth, rtol=0, atol=1e-8)
        assert found.first.tolist() == [[True] + starts * [False]] * 2


def test_a_sample_that_is_lost_is_told_and_leaves_the_others_alone():
    field = random(2, 5, 1, seed=1)
    alone = stability(SpinSystem(symmetric(5), field[:1], 0.8), MeanField())
    field[1, 3] = torch.nan
    with pytest.raises(ConvergenceError, match="MeanField failed for 1 of 2"):
        stability(SpinSystem(symmetric(5), field, 0.8), MeanField())
    found = stability(SpinSystem(symmetric(5), field, 0.8), MeanField(), on_failure="ignore")
    assert found.branches.tolist() == [1, 0]
    assert found.lowest[1].isnan().all()
    assert found.magnetizations[0].isfinite().all()
    for name in ("spectral_radius", "smallest_eigenvalue", "almeida_thouless", "excess"):
        value = getattr(found, name)
        assert value[1].isnan(), name
        close(value[0], getattr(alone, name)[0])


def test_starts_come_from_the_generator():
    system = SpinSystem(torch.full((6, 6), 1 / 6, dtype=torch.float64), torch.zeros(6, 1).double(), 1.5)
    one, same, other = (
        stability(system, MeanField(), starts=6, generator=torch.Generator().manual_seed(seed)).free_energies
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sites", "dim", "bonds", "closure"),
    [
        (5, 1, "all", Enumeration()),
        (24, 1, "chain", TransferMatrix()),
        (5, 3, "chain", TransferMatrix()),
        (24, 1, "star", Bethe()),
        (24, 1, "ring", Bethe()),
        (24, 1, "lattice", SaddlePoint(one_loop=True)),
        (9, 1, "lattice", Enumeration()),
        (24, 1, "all", AdaTAP()),
        (5, 3, "all", SaddlePoint(one_loop=True)),
    ],
)
def test_the_closure_to_trust_is_exact_where_it_can_be(sites, dim, bonds, closure):
    couplings = torch.zeros(sites, sites).double()
    if bonds == "all":
        couplings = symmetric(sites, scale=0.1)
    elif bonds == "chain":
        index = torch.arange(sites - 1)
        couplings[index, index + 1] = couplings[index + 1, index] = 0.3
    elif bonds == "ring":
        index = torch.arange(sites)
        couplings[index, index - 1] = couplings[index - 1, index] = 0.3
    elif bonds == "lattice":
        width = 3
        for site in range(sites):
            for other in (site + width, *([site + 1] if (site + 1) % width else [])):
                if other < sites:
                    couplings[site, other] = couplings[other, site] = 0.3
    else:
        couplings[0, 1:] = couplings[1:, 0] = 0.3
    field = random(sites, 1, seed=1) * torch.ones(dim).double()
    found = stability(SpinSystem(couplings, field, 0.5), MeanField(), starts=2)
    assert found.recommended_method == closure
    assert bool(found.reliable)


@pytest.mark.slow
def test_nothing_is_reliable_beyond_the_at_line():
    system = SpinSystem(symmetric(24, scale=1.0), 0.2 * random(24, 1, seed=1), 1.5)
    found = stability(system, AdaTAP(), on_failure="ignore")
    assert float(found.almeida_thouless) > 1
    assert not found.reliable


@pytest.mark.parametrize("batch", [(), (2,), (2, 20)])
def test_what_is_printed_is_a_line_per_sample_and_a_line_per_branch(batch):
    """Below the transition a magnet has two branches."""
    n = 6
    system = SpinSystem(torch.full((n, n), 1.5 / n).double(), torch.zeros(*batch, n, 1).double(), beta=1.0)
    found = stability(system, MeanField(), starts=4, on_failure="ignore")
    title, *lines = repr(found).splitlines()
    samples = found.branches.numel()
    assert title.startswith(f"Stability({samples} sample")
    assert "recommended Enumeration()" in title
    headers = [i for i, line in enumerate(lines) if line.startswith("sample")]
    per_sample = [line for line in lines[headers[0] + 2 : headers[1]] if line]
    per_branch = [line for line in lines[headers[1] + 2 :] if not line.startswith("and ")]
    assert len(per_sample) == min(samples, 24)
    assert len(per_branch) == min(int(found.branches.sum()), 24) > samples / 2
    assert all(line.split()[-1] == "no" for line in per_sample)
    assert f"{float(found.free_energies.flatten()[0]):.6g}" in per_branch[0]
    assert "tensor" not in repr(found)
    assert max(map(len, lines)) < 120
    if samples > 24:
        assert lines[-2:] == ["and 16 samples more", f"and {int(found.branches.sum()) - 24} branches more"]
