import runpy
from pathlib import Path

import pytest
import torch
from figure_files import png

from implicit_attention.plotting import driven_figure
from implicit_attention.spins import KineticPlefka, drive
from implicit_attention.testing.numerics import random


def path(dim, *batch, sites=3, steps=6, **options):
    fields = 0.7 * random(steps, *batch, sites, dim, seed=1)
    return drive(KineticPlefka(), 0.3 * random(sites, sites), fields, **options)


def drawn(axes):
    """What lines show, by name."""
    return {line.get_label(): torch.as_tensor(line.get_ydata()) for line in axes.lines}


@pytest.mark.slow
def test_every_number_of_a_path_of_ising_spins_is_drawn():
    found = path(1)
    figure = driven_figure(found, title="Three spins")
    field, m, cost, distance, relaxation = figure.axes
    for site in range(3):
        torch.testing.assert_close(drawn(field)[f"site {site + 1}"], found.fields[:, site, 0])
        torch.testing.assert_close(drawn(m)[f"site {site + 1}"], found.states[:, site, 0])
    assert field.lines[0].get_xdata().tolist() == [1, 2, 3, 4, 5, 6]
    assert m.lines[0].get_xdata().tolist() == [0, 1, 2, 3, 4, 5, 6]
    torch.testing.assert_close(drawn(cost)["sigma, all"], found.entropy_production)
    torch.testing.assert_close(drawn(cost)["housekeeping"], found.housekeeping)
    torch.testing.assert_close(drawn(cost)["field change"], found.field_change)
    torch.testing.assert_close(drawn(distance)["mismatch"], found.mismatch)
    torch.testing.assert_close(drawn(relaxation)["relaxation time"], found.relaxation_time)
    for axes in (field, m, cost, distance):
        names = [text.get_text() for text in axes.get_legend().get_texts()]
        assert names == [*drawn(axes), *(["relaxation time"] if axes is distance else [])]
    assert [axes.get_xlabel() for axes in (cost, distance)] == ["step", "step"]
    assert relaxation.get_ylabel() == "relaxation time, steps"
    assert figure.get_suptitle() == "Three spins"
    assert png(figure)[:4] == b"\x89PNG"


def test_vectors_are_drawn_along_the_axis_on_which_they_vary_most():
    axis = torch.tensor([0.6, 0.0, -0.8], dtype=torch.float64)
    strength = random(6, 3, 1, seed=1)
    found = drive(KineticPlefka(), 0.3 * random(3, 3), strength * axis)
    figure = driven_figure(found)
    torch.testing.assert_close(drawn(figure.axes[0])["site 1"], -strength[:, 0, 0])
    assert figure.axes[0].get_ylabel() == "field h, along the main axis"


def test_one_sample_of_a_batch_and_the_first_of_many_sites():
    found = path(1, 2, 2, sites=9)
    figure = driven_figure(found, sample=2)
    assert list(drawn(figure.axes[0])) == [f"site {i}" for i in range(1, 7)]
    assert figure.get_suptitle() == "Driven spins\nthe first 6 of 9 sites"
    torch.testing.assert_close(drawn(figure.axes[2])["sigma, all"], found.entropy_production[:, 1, 0])


def test_without_stationary_states_there_are_three_panels():
    figure = driven_figure(path(2, stationary=False))
    assert [axes.axison for axes in figure.axes] == [True, True, True, False]
    assert list(drawn(figure.axes[2])) == ["sigma, all"]
    assert png(figure)


@pytest.mark.slow
def test_what_is_not_finite_is_a_gap():
    fields = 0.5 * random(5, 2, 1, seed=1)
    fields[3] = torch.nan
    found = drive(KineticPlefka(), torch.tensor([[0.0, 3.0], [3.0, 0.0]]).double(), fields, on_failure="ignore")
    assert png(driven_figure(found))
    assert drawn(driven_figure(found).axes[2])["sigma, all"].isnan().tolist() == [False] * 3 + [True] * 2
    fields[0] = torch.nan
    assert png(driven_figure(drive(KineticPlefka(), torch.zeros(2, 2).double(), fields, on_failure="ignore")))


def test_what_the_guide_says_of_its_picture():
    script = Path(__file__).parents[2] / "docs" / "spin_layers" / "driven.py"
    path = runpy.run_path(str(script))["path"]()
    turning, staying, weak = slice(10, 17), slice(26, 32), slice(42, 48)
    lag = path.mismatch[turning]
    assert float(lag.max() / lag.min()) < 1.01
    assert bool((path.field_change[turning] > 2 * path.housekeeping[turning]).all())
    assert bool((path.field_change[staying].abs() < 1e-2 * path.housekeeping[staying]).all())
    assert bool((path.relaxation_time[weak] > 2 * path.relaxation_time[staying]).all())
    assert bool((path.housekeeping[weak] > 2 * path.housekeeping[staying]).all())
