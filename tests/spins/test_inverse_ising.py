"""Inverse Ising: the couplings behind known moments, to the order that is claimed, and through the direct problem."""

import math

import pytest
import torch
from solvable_models import ising_states
from work import Work

from implicit_attention.spins import (
    Bethe,
    Bonds,
    Enumeration,
    SpinSystem,
    fit_ising,
    fit_ising_moments,
    free_energy,
    thermodynamics,
)
from implicit_attention.testing.numerics import random

METHODS = ("mean_field", "tap", "adaptive_tap")


def problem(strength, *, sites=5, batch=(), seed=0):
    """Couplings of this strength without a diagonal, and fields of order one."""
    couplings = random(*batch, sites, sites, seed=seed)
    couplings = strength * (couplings + couplings.mT) / 2
    couplings = couplings - torch.diag_embed(couplings.diagonal(dim1=-2, dim2=-1))
    return couplings, 0.6 * random(*batch, sites, 1, seed=seed + 1)


def moments(couplings, field):
    """m and C by adding up all states."""
    found = thermodynamics(SpinSystem(couplings, field, radius=1.0), Enumeration())
    return found.magnetization[..., 0], found.susceptibility()[..., :, 0, :, 0]


def test_each_theory_is_the_inverse_of_its_own_direct_equations():
    """The fixed point and its response, both written out, give the moments back."""
    m = 0.4 * torch.tanh(random(4, seed=3))
    noise = 0.1 * random(4, 4, seed=4)
    covariance = noise @ noise.mT
    covariance = covariance - torch.diag(covariance.diagonal()) + torch.diag(1 - m.square())
    for method in METHODS:
        fit = fit_ising_moments(m, covariance, method=method)
        couplings, field = fit.couplings, fit.field[:, 0]
        variance = 1 - m.square()
        if method == "adaptive_tap":
            cavity = torch.linalg.inv(covariance).diagonal() - 1 / variance  # V_i
            torch.testing.assert_close(torch.atanh(m), field + couplings @ m - cavity * m)
            response = torch.linalg.inv(torch.diag(cavity + 1 / variance) - couplings)
            torch.testing.assert_close(response, covariance)
            continue

        def direct(x, couplings=couplings, method=method):
            reaction = x * (couplings.square() @ (1 - x.square())) if method == "tap" else 0.0
            return torch.atanh(x) - couplings @ x + reaction

        torch.testing.assert_close(direct(m), field)
        others = ~torch.eye(4, dtype=torch.bool)
        slope = torch.func.jacrev(direct)(m)
        torch.testing.assert_close(slope[others], torch.linalg.inv(covariance)[others])


def test_samples_of_a_system_lead_back_to_it():
    couplings, field = problem(0.15, sites=4)
    spins = ising_states(4)
    weight = 0.5 * ((spins @ couplings) * spins).sum(-1) + spins @ field[:, 0]
    # As many copies of every state as its probability says: samples without noise, up to 1/200000.
    copies = (200_000 * weight.softmax(0)).round().long()
    fit = fit_ising(spins.repeat_interleave(copies, 0), method="tap", pseudocount=0.0)
    exact = fit_ising_moments(*moments(couplings, field), method="tap")
    torch.testing.assert_close(fit.couplings, exact.couplings, rtol=0, atol=1e-4)
    torch.testing.assert_close(fit.field, exact.field, rtol=0, atol=1e-4)
    assert float((fit.couplings - couplings).abs().max()) < 0.02
    assert (fit.beta, fit.radius, fit.measure) == (1.0, 1.0, "counting")


def test_a_pseudocount_is_the_chance_that_every_spin_is_drawn_anew():
    """All ways to redraw some of three spins, written out."""
    samples = torch.tensor([[1.0, 1, -1], [1, -1, -1], [1, 1, 1], [1, 1, -1], [1, -1, 1]]).double()
    a = 2.0 / (len(samples) + 2.0)
    rows, weights = [], []
    for fresh in ising_states(3) > 0:
        for new in ising_states(3):
            rows.append(torch.where(fresh, new, samples))
            share = a ** int(fresh.sum()) * (1 - a) ** int((~fresh).sum()) / 8 / len(samples)
            weights.append(torch.full((len(samples),), share, dtype=torch.float64))
    rows, weights = torch.cat(rows), torch.cat(weights)
    m = weights @ rows
    covariance = rows.mT @ (weights[:, None] * rows) - torch.outer(m, m)
    expected = fit_ising_moments(m, covariance, method="mean_field")
    fit = fit_ising(samples, method="mean_field", pseudocount=2.0)
    torch.testing.assert_close(fit.couplings, expected.couplings)
    torch.testing.assert_close(fit.field, expected.field)
    # The first spin never changes: it is coupled to nothing, and its field gives the odds of the pseudocount.
    assert fit.couplings[0].abs().max() < 1e-15
    assert float(fit.field[0]) == pytest.approx(math.atanh(1 - a), rel=1e-12)


def test_shrinkage_takes_covariances_away():
    m, covariance = moments(*problem(0.2))
    half = fit_ising_moments(m, covariance, shrinkage=0.5)
    own = torch.diag(covariance.diagonal())
    by_hand = fit_ising_moments(m, (covariance + own) / 2)
    torch.testing.assert_close(half.couplings, by_hand.couplings)
    alone = fit_ising_moments(m, covariance, shrinkage=1.0)
    assert (alone.couplings == 0).all()
    torch.testing.assert_close(alone.field[:, 0], torch.atanh(m))


def test_the_tap_root_stays_finite_without_magnetizations():
    couplings, _ = problem(0.1)
    m, covariance = moments(couplings, torch.zeros(5, 1, dtype=torch.float64))
    naive = fit_ising_moments(m, covariance, method="mean_field")
    tap = fit_ising_moments(m, covariance, method="tap")
    torch.testing.assert_close(tap.couplings, naive.couplings, rtol=1e-12, atol=1e-15)


def test_samples_of_a_batch_are_fitted_alone_and_nan_stays_where_it_is():
    m, covariance = moments(*problem(0.1, batch=(3,)))
    m = m.clone()
    m[1, 2] = torch.nan
    for method in METHODS:
        together = fit_ising_moments(m, covariance, method=method)
        for b in (0, 2):
            alone = fit_ising_moments(m[b], covariance[b], method=method)
            torch.testing.assert_close(together.couplings[b], alone.couplings, rtol=1e-14, atol=1e-15)
            torch.testing.assert_close(together.field[b], alone.field, rtol=1e-14, atol=1e-15)
        assert together.field[1].isnan().any()
        status = thermodynamics(together, Bethe(), on_failure="ignore").report.failed
        assert status.tolist() == [False, True, False]


def test_a_nan_among_samples_reaches_its_own_fit_only():
    samples = torch.sign(random(2, 30, 4, seed=5))
    broken = samples.clone()
    broken[1, 3, 2] = torch.nan
    fit, whole = fit_ising(broken), fit_ising(samples)
    assert torch.equal(fit.couplings[0], whole.couplings[0])
    assert fit.couplings[1].isnan().any()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_derivatives(method, check):
    m, covariance = moments(*problem(0.1, sites=3, batch=(2,)))

    def fitted(m, covariance):
        fit = fit_ising_moments(m, covariance, method=method, shrinkage=0.1)
        return fit.couplings, fit.field

    assert check(fitted, [m.detach().requires_grad_(), covariance.detach().requires_grad_()])


def test_vmap_agrees_with_a_batch():
    m, covariance = moments(*problem(0.1, batch=(3,)))
    batch = fit_ising_moments(m, covariance)
    mapped = torch.vmap(lambda a, b: fit_ising_moments(a, b).couplings)(m, covariance)
    torch.testing.assert_close(mapped, batch.couplings, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_are_answered_in_single(dtype):
    samples = torch.sign(random(40, 5, seed=2))
    fit, exact = fit_ising(samples.to(dtype)), fit_ising(samples)
    assert fit.couplings.dtype == torch.float32
    torch.testing.assert_close(fit.couplings.double(), exact.couplings, rtol=1e-4, atol=1e-5)
    assert torch.isfinite(free_energy(fit, Bethe()))


EYE = torch.eye(3, dtype=torch.float64)
ZERO = torch.zeros(3, dtype=torch.float64)


def test_pairs_too_strong_for_tap_are_refused_with_the_remedy():
    m = torch.tensor([0.9, -0.9], dtype=torch.float64)
    covariance = torch.diag(1 - m.square())
    covariance[0, 1] = covariance[1, 0] = 0.15
    with pytest.raises(ValueError, match=r"8 m_i m_j .*<= 1 for method='tap'.*larger pseudocount.*adaptive_tap"):
        fit_ising_moments(m, covariance, method="tap")
    assert torch.isfinite(fit_ising_moments(m, covariance, method="adaptive_tap").couplings).all()
    # Where the host may not look, it is the answer that says so.
    assert torch.vmap(lambda c: fit_ising_moments(m, c).couplings)(covariance[None]).isnan().any()


# Couplings on the bonds of a graph.

#: Trees of six sites, of which the second leaves two sites alone.
TREES = torch.tensor([[[0, 1], [2, 1], [2, 3], [4, 1], [4, 5]], [[0, 1], [0, 2], [3, 0], [1, 2], [2, 3]]])
TREE = TREES[0]


def pair_moments(pairs, values, field, method):
    """m, and the covariances of the pairs."""
    found = thermodynamics(SpinSystem(Bonds(pairs, values, field.shape[-2]).dense(), field, radius=1.0), method)
    m, (i, j) = found.magnetization[..., 0], pairs.unbind(-1)
    return m, found.correlations[..., i, j] - m[..., i] * m[..., j]


def test_the_couplings_of_a_tree_are_exact():
    values, field = random(3, 5, seed=1), random(3, 6, 1, seed=2)
    fit = fit_ising_moments(*pair_moments(TREE, values, field, Enumeration()), method="bethe", pairs=TREE)
    torch.testing.assert_close(fit.couplings, values, rtol=0, atol=1e-10)
    torch.testing.assert_close(fit.field, field, rtol=0, atol=1e-10)
    assert (fit.graph.ends.mT.equal(TREE), fit.beta, fit.radius, fit.measure) == (True, 1.0, 1.0, "counting")
    alone = fit_ising_moments(fit.field[..., 0].tanh(), 0 * values, method="bethe", pairs=TREE)
    torch.testing.assert_close(alone.field, fit.field, rtol=0, atol=1e-10)
    assert float(alone.couplings.abs().max()) < 1e-14


def test_graphs_with_loops_have_the_couplings_by_which_bethe_gives_their_moments():
    for pairs in (torch.cat([TREE, torch.tensor([[0, 5], [3, 5]])]), TREES[1]):
        values, field = 0.4 * random(len(pairs), seed=1), random(6, 1, seed=2)
        fit = fit_ising_moments(*pair_moments(pairs, values, field, Bethe()), method="bethe", pairs=pairs)
        torch.testing.assert_close(fit.couplings, values, rtol=0, atol=1e-9)
        torch.testing.assert_close(fit.field, field, rtol=0, atol=1e-9)


def test_samples_on_a_graph_have_the_moments_of_the_fit():
    samples = torch.sign(random(2, 60, 6, seed=3))
    keep = 60 / 64
    fit = fit_ising(samples, method="bethe", pairs=TREES, pseudocount=4.0, shrinkage=0.25)
    m = keep * samples.mean(-2)
    for k, pairs in enumerate(TREES):
        covariance = 0.75 * keep**2 * torch.cov(samples[k].mT, correction=0)[pairs.unbind(-1)]
        one = fit_ising_moments(m[k], covariance, method="bethe", pairs=pairs)
        torch.testing.assert_close(fit.couplings[k], one.couplings, rtol=0, atol=1e-12)
        torch.testing.assert_close(fit.field[k], one.field, rtol=0, atol=1e-12)
    found = thermodynamics(fit, Bethe())
    torch.testing.assert_close(found.magnetization[0, :, 0], m[0], rtol=0, atol=1e-10)


def test_a_graph_is_fitted_without_all_pairs():
    sites = torch.arange(400).reshape(20, 20)
    pairs = torch.cat([torch.stack([sites, sites.roll(-1, axis)], -1).flatten(0, 1) for axis in (0, 1)])
    with Work() as work:
        fit_ising(torch.sign(random(20, 400, seed=1)), method="bethe", pairs=pairs)
    # As many numbers as the samples have, at both ends of a bond.
    assert work.largest == 2 * 20 * 400


def test_a_spin_that_is_not_finite_and_a_pair_that_is_none_stay_in_their_sample():
    m, covariance = pair_moments(TREE, 0.5 * random(3, 5, seed=1), random(3, 6, 1, seed=2), Enumeration())
    whole = fit_ising_moments(m, covariance, method="bethe", pairs=TREE)
    m = m.clone()
    m[1, 2] = torch.nan
    fit = fit_ising_moments(m, covariance, method="bethe", pairs=TREE)
    assert fit.couplings[1].isnan().any()
    for part, right in ((fit.couplings, whole.couplings), (fit.field, whole.field)):
        torch.testing.assert_close(part[::2], right[::2], rtol=1e-14, atol=1e-14)
    mapped = torch.vmap(lambda a, c: fit_ising_moments(a, c, method="bethe", pairs=TREE).field)(m, 0.5 * covariance)
    assert mapped.isfinite().flatten(1).all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_derivatives_on_a_graph(check):
    m, covariance = pair_moments(TREE, 0.5 * random(2, 5, seed=1), random(2, 6, 1, seed=2), Enumeration())

    def fitted(m, covariance):
        fit = fit_ising_moments(m, covariance, method="bethe", pairs=TREES, shrinkage=0.1)
        return fit.couplings, fit.field

    assert check(fitted, [m.detach().requires_grad_(), 0.3 * covariance.detach().requires_grad_()])


@pytest.mark.parametrize(
    ("pairs", "method", "error", "message"),
    [
        (None, "bethe", TypeError, r"`pairs` must be a tensor of integers \(E, 2\) for method='bethe', got None"),
        ([[0, 1]], "bethe", TypeError, "got list; pass the two sites of every bond"),
        (torch.tensor([[0, 1]]), "tap", ValueError, "`pairs` must be left out unless method='bethe', got pairs with"),
        (torch.tensor([[0.0, 1.0]]), "bethe", TypeError, "`pairs` must be a tensor of integers, got torch.float32"),
        (torch.tensor([0, 1]), "bethe", ValueError, r"`pairs` must have shape \(E, 2\) or .* got shape \(2,\)"),
        (torch.tensor([[0, 3]]), "bethe", ValueError, r"`pairs` must be in \[0, 2\], got 3"),
        (torch.tensor([[0, 1], [1, 0]]), "bethe", ValueError, r"a bond in one direction, got \(0, 1\) and \(1, 0\)"),
        (torch.tensor([[0, 1], [0, 1]]), "bethe", ValueError, "two sites, each pair once, got a pair given twice, or"),
        (torch.tensor([[0, 1], [2, 2]]), "bethe", ValueError, "two sites, each pair once, got .* a site with itself"),
        (torch.tensor([[[0, 1]], [[0, 2]]]), "bethe", ValueError, r"`pairs` must broadcast to the axes that number"),
    ],
)
def test_wrong_pairs_are_refused(pairs, method, error, message):
    with pytest.raises(error, match=message):
        fit_ising(torch.ones(4, 3), method=method, pairs=pairs)
    with pytest.raises(error, match=message):
        fit_ising_moments(ZERO, EYE, method=method, pairs=pairs)


def test_moments_that_are_none_of_a_pair_are_refused():
    pairs, m = torch.tensor([[0, 1]]), torch.tensor([0.5, 0.0, 0.0]).double()
    with pytest.raises(ValueError, match=r"`covariance` must leave each state of a pair a probability > 0, got"):
        fit_ising_moments(m, torch.tensor([0.6]).double(), method="bethe", pairs=pairs)
    with pytest.raises(ValueError, match=r"`covariance` must have shape \(\*batch, E\) = \(1,\), got \(3, 3\)"):
        fit_ising_moments(m, EYE, method="bethe", pairs=pairs)
    samples = torch.tensor([[1.0, 1, 1], [-1, -1, 1]]).double()
    with pytest.raises(ValueError, match="a state that never occurs; use a larger pseudocount or shrinkage"):
        fit_ising(samples[:, :2], method="bethe", pairs=pairs, pseudocount=0.0)
    assert float(fit_ising(samples, method="bethe", pairs=pairs).couplings) > 0
