"""Basins of the plane: counts against known ones, and what each solver does there."""

import io

import pytest
import torch

from implicit_attention import AnchoredEnergy, Anderson, EnergyFunction, LogSumExp, Picard, solve
from implicit_attention.plotting import basins, basins_figure

KEYS = torch.tensor([(1.2, 0.3), (-0.8, 1.1), (-0.4, -1.3), (0.9, -0.9), (-1.3, -0.1), (0.2, 0.6)]).double()
ROOT = 2**0.5
#: What stands for the number of an attractor.
UNSOLVED, SADDLE = -1, -2
#: By sharpness: positions, energies and numbers of starts of an 81 x 81 grid; minima, saddles, maxima.
TABLE = {
    0.1: ([(-0.03672948, -0.05488961)], [-12.67163703], [6561], (1, 0, 0)),
    0.5: ([(-0.06239525, -0.09071256)], [-2.53723080], [6561], (1, 0, 0)),
    1.0: (
        [(0.08681461, -0.65879470), (-0.73242352, 0.32337805)],
        [-1.29271984, -1.30456149],
        [3874, 2687],
        (2, 1, 0),
    ),
    2.0: (
        [(-0.83133886, 0.95552432), (0.75991346, -0.83553592), (-0.34753133, -1.23178394)],
        None,
        [2569, 2523, 1469],
        (3, 3, 1),
    ),
    5.0: (None, None, [1659, 1491, 1321, 1169, 921], (5, 5, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", TABLE)
def test_plain_steps_end_at_the_known_attractors(sharpness):
    places, energies, counts, kinds = TABLE[sharpness]
    beta = sharpness * ROOT
    found = basins(AnchoredEnergy(LogSumExp(KEYS, beta), KEYS))
    assert found.counts.tolist() == pytest.approx(counts, rel=0.02)
    assert found.counts.sum() == found.index.numel()
    if places is not None:
        torch.testing.assert_close(found.attractors, torch.tensor(places).double(), atol=1e-6, rtol=0)
    if energies is not None:
        torch.testing.assert_close(found.energies, torch.tensor(energies).double(), atol=1e-6, rtol=0)
    z = found.attractors
    torch.testing.assert_close(found.energies, z.square().sum(-1) / 2 - (beta * z @ KEYS.T).logsumexp(-1) / beta)
    assert tuple(found.points.kind.count(kind) for kind in ("minimum", "saddle", "maximum")) == kinds
    assert kinds[0] - kinds[1] + kinds[2] == 1


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", [1.0, 5.0])
def test_every_start_ends_where_repeated_attention_takes_it(sharpness):
    beta = sharpness * ROOT
    found = basins(AnchoredEnergy(LogSumExp(KEYS, beta), KEYS), grid=41)
    z = found.starts
    line = torch.linspace(-2, 2, 41, dtype=torch.float64)
    assert torch.equal(z[3, 7], torch.stack([line[7], line[3]]))
    for _ in range(1000):
        z = (beta * z @ KEYS.T).softmax(-1) @ KEYS
    assert (z - found.attractors[found.index]).abs().max() < 1e-6


def well():
    """Minima at (+-1, 0) and a saddle between them, on which the line x = 0 ends."""
    return EnergyFunction(lambda z: ((z[..., 0].square() - 1).square() + z[..., 1].square()) / 8, event_ndim=1)


def test_starts_on_a_ridge_end_on_its_saddle():
    found = basins(well(), grid=7, reach=1.5)
    assert (found.index[:, 3] == SADDLE).all()
    assert found.counts.tolist() == [21, 21]
    assert sorted(found.attractors[:, 0].round(decimals=6).tolist()) == [-1, 1]
    left = found.index[:, :3].unique().item()
    torch.testing.assert_close(found.attractors[left], torch.tensor([-1.0, 0.0]).double(), atol=1e-6, rtol=0)


def test_starts_that_have_not_arrived_are_told():
    few = basins(well(), grid=11, reach=1.5, steps=3)
    assert (few.index == UNSOLVED).sum() > 60
    assert few.counts.sum() + (few.index == UNSOLVED).sum() + (few.index == SADDLE).sum() == 121


def panels(figure):
    """Panels by the first line of their title."""
    return {axes.get_title().splitlines()[0]: axes for axes in figure.axes if axes.get_title()}


@pytest.mark.slow
def test_the_figure_shows_what_each_solver_spends_and_where_it_fails():
    energy = AnchoredEnergy(LogSumExp(KEYS, 2 * ROOT), KEYS)
    figure = basins_figure(energy, grid=21)
    drawn = panels(figure)
    assert list(drawn) == ["where plain steps end", "plain steps", "Anderson", "Anderson, no guard"]
    starts = basins(energy, grid=21).starts.flatten(0, 1)
    rows = AnchoredEnergy(LogSumExp(KEYS, 2 * ROOT), starts)
    for name, solver in (("plain steps", Picard()), ("Anderson", Anderson())):
        spent = solve(rows, starts, solver=solver, on_failure="ignore").num_evals.view(21, 21)
        shown = torch.as_tensor(drawn[name].images[0].get_array())
        assert torch.equal(shown.to(spent.dtype), spent)
        assert f"median {int(spent.median())} evaluations" in drawn[name].get_title()
        # No start is covered: all reach a minimum.
        assert len(drawn[name].images) == 1
    unguarded = drawn["Anderson, no guard"]
    run = solve(rows, starts, solver=Anderson(guard="none"), on_failure="ignore")
    curvature = torch.stack([rows.hessian_product(run.value, v.expand_as(starts)) for v in torch.eye(2).double()], -1)
    saddles = run.converged & (torch.linalg.eigvalsh(curvature)[:, 0] < 0)
    covered = torch.as_tensor(unguarded.images[1].get_array().filled(0)).flatten() > 0
    assert saddles.sum() > 10
    assert torch.equal(covered, saddles)
    assert f"{float(saddles.double().mean()):.1%} on saddles" in unguarded.get_title()
    assert {axes.get_xlabel() for axes in drawn.values()} == {"$z_1$ of the start"}
    assert figure.axes[-1].get_ylabel() == "evaluations of f"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["minimum", "saddle", "maximum", "ends on a saddle or a maximum", "does not converge"]
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    assert stream.getvalue()[:4] == b"\x89PNG"


def test_starts_that_a_solver_leaves_unsolved_are_covered():
    solvers = {"many steps": Picard(max_steps=60, rtol=1e-300, atol=1e-300)}
    energy = AnchoredEnergy(LogSumExp(KEYS, 2 * ROOT), KEYS)
    axes = panels(basins_figure(energy, solvers=solvers, grid=21))["many steps"]
    covered = torch.as_tensor(axes.images[1].get_array().filled(0)) > 0
    starts = basins(energy, grid=21).starts.flatten(0, 1)
    rows = AnchoredEnergy(LogSumExp(KEYS, 2 * ROOT), starts)
    run = solve(rows, starts, solver=solvers["many steps"], on_failure="ignore")
    # Most lie near a minimum already, which is not enough for a tolerance that few can reach.
    assert torch.equal(covered.flatten(), ~run.converged)
    assert run.converged.double().mean() < 0.5
    assert f"{covered.double().mean():.1%} not converged" in axes.get_title()


def test_an_anchored_figure_says_whose_energy_it_is():
    energy = AnchoredEnergy(LogSumExp(KEYS, 2 * ROOT), KEYS, 0.2)
    figure = basins_figure(energy, solvers={"plain steps": Picard()}, grid=9)
    assert "energy of query 0" in figure.axes[0].get_title()
    shared = basins_figure(AnchoredEnergy(LogSumExp(KEYS, 2.0), KEYS), solvers={"plain steps": Picard()}, grid=9)
    assert "query" not in shared.axes[0].get_title()
    # It is the first row's.
    first = basins(AnchoredEnergy(LogSumExp(KEYS, 2 * ROOT), KEYS[:1], 0.2), grid=9)
    torch.testing.assert_close(basins(energy, grid=9).attractors, first.attractors)
