"""Landscapes of any energy of the plane: what is drawn, and the numbers behind it against known ones."""

import subprocess
import sys

import pytest
import torch
from figure_files import png

from implicit_attention import (
    AnchoredEnergy,
    EnergyFunction,
    LogSumExp,
    Picard,
    SquaredScores,
    solve,
)
from implicit_attention.diagnostics import StationaryPoints
from implicit_attention.plotting import landscape_figure, principal_figure
from implicit_attention.testing.numerics import random

KEYS = torch.tensor([(1.2, 0.3), (-0.8, 1.1), (-0.4, -1.3), (0.9, -0.9), (-1.3, -0.1), (0.2, 0.6)]).double()
ROOT = 2**0.5
STARTS = torch.tensor([(1.5, 1.5), (-1.5, 0.5), (0.0, -0.2)]).double()


def points(axes, name):
    """What is drawn under a name of the legend."""
    (line,) = [line for line in axes.lines if line.get_label() == name]
    return torch.as_tensor(line.get_xydata())


def names(axes):
    return set(axes.get_legend_handles_labels()[1])


def energy_of(beta=2 * ROOT, states=STARTS, anchor=0.0):
    return AnchoredEnergy(LogSumExp(KEYS, beta), states, anchor)


def by_hand(beta, z):
    return z.square().sum(-1) / 2 - (beta * z @ KEYS.T).logsumexp(-1) / beta


def test_everything_is_drawn_where_it_is():
    energy = energy_of()
    solution = solve(energy, STARTS, solver=Picard(), trace=True)
    figure = landscape_figure(energy, STARTS, trace=solution.trace, values=KEYS.flip(1), title="Six patterns")
    axes, bar = figure.axes
    assert figure.get_suptitle() == "Six patterns"
    assert (axes.get_xlabel(), axes.get_ylabel(), bar.get_ylabel()) == ("$z_1$", "$z_2$", "energy $E(z)$")
    assert axes.get_title() == ""
    torch.testing.assert_close(points(axes, "stored pattern"), KEYS)
    torch.testing.assert_close(points(axes, "its start"), STARTS)
    torch.testing.assert_close(points(axes, "its end"), solution.value)
    way = torch.cat([STARTS[:1], solution.trace.value[:, 0]])
    torch.testing.assert_close(points(axes, "way of a query"), way)
    read = (2 * ROOT * solution.value @ KEYS.T).softmax(-1) @ KEYS.flip(1)
    torch.testing.assert_close(points(axes, "value read out"), read)
    assert [len(points(axes, kind)) for kind in ("minimum", "saddle", "maximum")] == [3, 3, 1]
    (low, high), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    drawn = torch.cat([KEYS, STARTS, solution.value, read])
    assert low < drawn[:, 0].min() < drawn[:, 0].max() < high
    assert bottom < drawn[:, 1].min() < drawn[:, 1].max() < top
    assert png(figure)[:4] == b"\x89PNG"


def test_colours_are_heights_of_the_energy():
    figure = landscape_figure(energy_of(), STARTS, grid=81, reach=2.0)
    axes, bar = figure.axes
    line = torch.linspace(-2, 2, 81, dtype=torch.float64)
    x, y = torch.meshgrid(line, line, indexing="xy")
    heights = by_hand(2 * ROOT, torch.stack([x, y], -1))
    assert bar.get_ylim() == pytest.approx((heights.min().item(), heights.max().item()))
    assert (axes.get_xlim(), axes.get_ylim()) == ((-2, 2), (-2, 2))
    # The lowest colour lies around the lowest minimum, and nowhere at its mirror image.
    lowest = axes.collections[0].get_paths()[0]
    assert lowest.contains_point((-0.83133886, 0.95552432))
    assert not lowest.contains_point((0.95552432, -0.83133886))


def test_an_anchored_picture_is_of_one_query_and_says_whose():
    energy = energy_of(5 * ROOT, anchor=0.3)
    trace = solve(energy, STARTS, solver=Picard(atol=1e-12, rtol=1e-12), trace=True).trace
    for query in (0, 1):
        options = {"values": KEYS.flip(1), "reach": 2.0, "grid": 41}
        axes, bar = landscape_figure(energy, STARTS, trace=trace, query=query, **options).axes
        read = (5 * ROOT * trace.value[-1, query] @ KEYS.T).softmax(-1) @ KEYS.flip(1)
        torch.testing.assert_close(points(axes, "value read out"), read[None])
        assert f"query {query} (anchor 0.3)" in axes.get_title()
        torch.testing.assert_close(points(axes, "its start"), STARTS[query : query + 1])
        torch.testing.assert_close(points(axes, "its end"), trace.value[-1, query : query + 1])
        assert torch.cdist(trace.value[-1, query : query + 1], points(axes, "minimum")).min() < 1e-6
        line = torch.linspace(-2, 2, 41, dtype=torch.float64)
        z = torch.cartesian_prod(line, line)
        heights = z.square().sum(-1) / 2 - 0.3 * z @ STARTS[query]
        heights = heights - 0.7 * (5 * ROOT * z @ KEYS.T).logsumexp(-1) / (5 * ROOT)
        assert bar.get_ylim() == pytest.approx((heights.min().item(), heights.max().item()))


def test_a_query_apart_from_its_start_is_drawn():
    energy = energy_of(5 * ROOT, KEYS[:3], 0.3)
    axes = landscape_figure(energy, STARTS, query=2).axes[0]
    torch.testing.assert_close(points(axes, "query $x$"), KEYS[2:3])
    assert "query $x$" not in names(landscape_figure(energy, KEYS[:3], query=2).axes[0])


def test_starts_alone_and_points_that_are_given():
    nothing = StationaryPoints(KEYS[:0], KEYS[:0, 0], KEYS[:0], [])
    axes = landscape_figure(energy_of(), STARTS, fixed_points=nothing).axes[0]
    assert names(axes) == {"stored pattern", "start"}
    given = StationaryPoints(KEYS[:1], KEYS[:1, 0], KEYS[:1], ["maximum"])
    axes = landscape_figure(energy_of(), STARTS, fixed_points=given, patterns=KEYS[1:]).axes[0]
    torch.testing.assert_close(points(axes, "maximum"), KEYS[:1])
    torch.testing.assert_close(points(axes, "stored pattern"), KEYS[1:])


def test_a_function_of_your_own_and_a_potential_without_keys():
    well = EnergyFunction(lambda z: (z[..., 0].square() - 1).square() + z[..., 1].square(), event_ndim=1)
    axes = landscape_figure(well, torch.tensor([[0.3, 1.0]])).axes[0]
    assert names(axes) == {"start", "minimum", "saddle"}
    assert sorted(points(axes, "minimum")[:, 0].round(decimals=6).tolist()) == [-1, 1]
    bowl = AnchoredEnergy(SquaredScores(0.1 * KEYS, 1.0), STARTS)
    assert len(points(landscape_figure(bowl, STARTS).axes[0], "minimum")) == 1


def test_states_without_a_finite_energy_stay_empty():
    inside = EnergyFunction(lambda z: -(1 - z.square().sum(-1)).log(), event_ndim=1)
    figure = landscape_figure(inside, torch.tensor([[0.3, 0.1]]), reach=1.5)
    assert png(figure)[:4] == b"\x89PNG"
    assert len(points(figure.axes[0], "minimum")) == 1


def test_a_surface_lifts_everything_to_its_energy():
    energy = energy_of()
    trace = solve(energy, STARTS, solver=Picard(), trace=True).trace
    figure = landscape_figure(energy, STARTS, trace=trace, values=KEYS, kind="surface", grid=31)
    (axes,) = figure.axes
    assert axes.get_zlabel() == "energy $E(z)$"
    for name, states in (("its start", STARTS), ("stored pattern", KEYS), ("its end", trace.value[-1])):
        (line,) = [line for line in axes.lines if line.get_label() == name]
        x, y, height = (torch.tensor(part) for part in line.get_data_3d())
        torch.testing.assert_close(torch.stack([x, y], -1), states)
        torch.testing.assert_close(height, by_hand(2 * ROOT, states))
    assert png(figure)[:4] == b"\x89PNG"


def test_float32_and_strides_draw_the_same_picture():
    states = STARTS.float().T.contiguous().T
    energy = AnchoredEnergy(LogSumExp(KEYS.float(), 2 * ROOT), states)
    axes = landscape_figure(energy, states, values=KEYS.float()).axes[0]
    exact = landscape_figure(energy_of(), STARTS, values=KEYS).axes[0]
    for name in ("saddle", "value read out", "start"):
        torch.testing.assert_close(points(axes, name), points(exact, name), atol=1e-5, rtol=0)


NAN = torch.full((6, 2), torch.nan).double()
TRACE = solve(energy_of(), STARTS, trace=True).trace


@pytest.mark.slow
def test_without_matplotlib_the_line_that_installs_it_is_told():
    code = """
import sys
sys.modules["matplotlib"] = sys.modules["matplotlib.figure"] = None
import torch
from implicit_attention.plotting import landscape_figure
from implicit_attention import AnchoredEnergy, LogSumExp
try:
    landscape_figure(AnchoredEnergy(LogSumExp(torch.eye(2), 1.0), torch.eye(2)), torch.eye(2))
except ModuleNotFoundError as error:
    print(error)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "pip install matplotlib" in told


def test_principal_axes_hold_the_largest_part_of_the_variance():
    # Keys along axis 2, a path along axis 4 that is half as long, and a little of the rest.
    keys, path = 1e-3 * random(40, 6), 1e-3 * random(40, 6, seed=1)
    line = torch.linspace(-1, 1, 40, dtype=torch.float64)
    keys[:, 2] += 2 * line
    path[:, 4] += line
    figure = principal_figure(keys, path)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "principal axis 1 (80% of the variance)"
    assert axes.get_ylabel() == "principal axis 2 (20% of the variance)"
    stored = points(axes, "stored pattern")
    torch.testing.assert_close(stored[:, 0].abs(), (2 * line).abs(), atol=1e-2, rtol=0)
    assert stored[:, 1].abs().max() < 1e-2
    way = points(axes, "way of a query")
    torch.testing.assert_close(way[:, 1].abs(), line.abs(), atol=1e-2, rtol=0)
    torch.testing.assert_close(points(axes, "its start"), way[:1])
    torch.testing.assert_close(points(axes, "its end"), way[-1:])
    assert png(figure)[:4] == b"\x89PNG"


def test_principal_axes_in_the_plane_keep_distances():
    trace = TRACE.value
    (axes,) = principal_figure(KEYS, trace).axes
    torch.testing.assert_close(
        torch.cdist(points(axes, "stored pattern"), points(axes, "its end")), torch.cdist(KEYS, trace[-1])
    )
    # A single point has no axis of its own.
    (axes,) = principal_figure(KEYS[:1], KEYS[:1]).axes
    assert axes.get_xlabel() == "principal axis 1 (0% of the variance)"
