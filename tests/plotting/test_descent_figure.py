"""The two ways down an energy, and what the page of the Energy Transformer says of its committed runs."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from figure_files import png

from implicit_attention.plotting import descent_figure

FOLDER = Path(__file__).parents[2] / "docs" / "energy_transformer"
STEPS, SPENT = torch.arange(4), torch.tensor([1, 2, 5])
FALLING = torch.tensor([0.0, -2.0, -2.5, -2.75])
LINE = FALLING[:3]


def test_every_number_is_drawn_against_the_evaluations_that_it_took():
    own = torch.tensor([3.0, 1.0, -1.0], dtype=torch.float64)
    figure = descent_figure(
        {"memory": (STEPS, FALLING), "both": (STEPS, 2 * FALLING)},
        {"both": (SPENT, LINE, own), "memory": (SPENT, 3 * LINE, own)},
        title="Two",
    )
    first, second, below, _ = figure.axes
    assert [axes.get_title() for axes in (first, second)] == ["memory", "both"]
    steps, solved, end, reached = first.lines
    assert steps.get_xydata().tolist() == [[1, 0], [2, -2], [3, -2.5], [4, -2.75]]
    assert solved.get_xydata().tolist() == [[1, 0], [2, -6], [5, -7.5]]
    assert end.get_xydata().tolist() == [[5, -7.5]]
    assert list(reached.get_ydata()) == [-7.5, -7.5]
    assert second.lines[0].get_ydata().tolist() == [0, -4, -5, -5.5]
    assert below.lines[0].get_xydata().tolist() == [[1, 4], [2, 2]]
    assert (below.get_xscale(), below.get_yscale(), first.get_yscale()) == ("log", "log", "linear")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "published steps",
        "solve for the equilibrium",
    ]
    assert figure.get_suptitle() == "Two"
    assert png(figure)[:4] == b"\x89PNG"


# The page of the Energy Transformer.


def test_what_the_page_says_of_the_descent():
    run = json.loads((FOLDER / "energies.json").read_text())
    assert len(runpy.run_path(str(FOLDER / "energies.py"))["figure"](run).axes) == 6
    for name, ways in run.items():
        steps, solved = ways["published"], ways["equilibrium"]
        assert steps["step"][-1] == 3000
        assert steps["largest rise"] < 0
        below = solved["published energy"][-1] < steps["energy"][-1]
        assert below == (name != "attention")
        assert solved["relative residual"] <= 1e-8
        # Steps of x end at a constant length, those of g fall faster than 1/steps.
        middle = steps["step"].index(min(steps["step"], key=lambda step: abs(step - 300)))
        assert 1 < steps["step of x"][-1] / steps["step of x"][middle] < 1.05
        fall = steps["step of g"][middle] / steps["step of g"][-1] * steps["step"][middle] / 3000
        assert 1 < fall < 2
    assert run["attention + memory"]["published"]["size of x"][-1] > 1e6
    assert run["attention"]["equilibrium"]["size of x"] < 1.01
    spent = [run[name]["equilibrium"]["evaluations"][-1] for name in ("memory", "attention + memory")]
    assert spent == [115, 94]


def test_the_committed_descent_can_be_repeated():
    script = runpy.run_path(str(FOLDER / "energies.py"))
    run = json.loads((FOLDER / "energies.json").read_text())
    parts, tokens = script["potentials"]()
    again = script["course"](parts["attention"], tokens, 10)
    for name in ("energy", "size of x", "step of x", "step of g"):
        steps = again["published"]["step"]
        assert again["published"][name] == pytest.approx(run["attention"]["published"][name][: len(steps)], rel=1e-9)
    assert again["equilibrium"]["energy"] == pytest.approx(run["attention"]["equilibrium"]["energy"], rel=1e-9)


def test_what_the_page_says_of_five_scales():
    rows = json.loads((FOLDER / "scales.json").read_text())["rows"]
    assert len(rows) == 25
    ratios = []
    for row in rows:
        for name in ("plain", "default"):
            assert row[name]["status"] == "CONVERGED"
            assert row[name]["curvature"] > 0
        ratios.append(row["default"]["evaluations"] / row["plain"]["evaluations"])
    assert (round(min(ratios), 2), round(max(ratios), 3)) == (0.14, 0.875)
    apart = [row["default"]["energy"] / row["plain"]["energy"] - 1 for row in rows]
    assert any(x > 1e-9 for x in apart)
    assert any(x < -1e-9 for x in apart)


@pytest.mark.slow
def test_the_committed_scales_can_be_repeated():
    script = runpy.run_path(str(FOLDER / "scales.py"))
    committed = json.loads((FOLDER / "scales.json").read_text())["rows"][0]
    again = script["solved"](0, 0)
    for name in ("plain", "default"):
        for key in ("status", "evaluations"):
            assert again[name][key] == committed[name][key]
        assert again[name]["energy"] == pytest.approx(committed[name]["energy"], rel=1e-12)
        assert again[name]["curvature"] == pytest.approx(committed[name]["curvature"], abs=1e-6)
