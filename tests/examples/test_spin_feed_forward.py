"""The example on what a feed-forward net can stand for: it runs, and its page shows what was measured."""

import json
import runpy
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(EXAMPLES / "spin_feed_forward.py"), run_name="example")


def test_it_runs_and_prints_a_row_for_every_block(script, capsys):
    result = script["main"](["--quick", "--seeds", "0"])
    ((run),) = result["runs"]
    assert len(run["blocks"]) == 3
    for row in run["blocks"]:
        assert row["size"] > 0.05
        assert abs(row["constant"]) < 0.05 < row["linear map"] < 1
    printed = capsys.readouterr().out
    assert "one seed decides nothing" in printed
    assert f"{100 * run['blocks'][1]['linear map']:.1f}" in printed


def test_a_fit_explains_what_it_can(script):
    torch.manual_seed(0)
    field, held = torch.randn(300, 16, 32), torch.randn(40, 16, 32)
    plan, turn = script["Plan"](fit_epochs=30), torch.randn(32, 32) / 32**0.5
    straight = script["explained"]((field, 3 + field @ turn), (held, 3 + held @ turn), plan)
    assert straight["linear map"] > 0.9999
    assert straight["net"] > 0.9
    assert abs(straight["constant"]) < 0.01

    def mean(x):
        return x.mean(-2, keepdim=True).expand_as(x)

    foreign = script["explained"]((field, mean(field)), (held, mean(held)), plan)
    assert foreign["net with the mean field"] > 0.6 > 0.2 > foreign["net"]
    noise = script["explained"]((field, torch.randn(300, 16, 32)), (held, torch.randn(40, 16, 32)), plan)
    assert max(noise.values()) < 0.05


@pytest.mark.parametrize(
    ("net", "linear", "control", "expected"),
    [
        (
            [0.97, 0.96, 0.98],
            [0.5, 0.5, 0.6],
            [0.97, 0.98, 0.97],
            ("could stand for the answer", "explains less", "as much"),
        ),
        ([0.7, 0.71, 0.69], [0.5, 0.5, 0.6], [0.8, 0.82, 0.81], ("for a part of", "explains less", "explains more")),
        ([0.1, 0.12, 0.11], [0.1, 0.12, 0.11], [0.1, 0.12, 0.11], ("could not stand", "as much", "as much")),
        ([0.99], [0.1], [0.99], ("one seed decides nothing",)),
    ],
)
def test_the_verdict_needs_more_than_chance(script, net, linear, control, expected):
    runs = [
        {"blocks": [{"net": a, "linear map": b, "net with the mean field": c}] * 3}
        for a, b, c in zip(net, linear, control, strict=True)
    ]
    said = script["verdict"](runs)
    for part, words in zip(said.split("; "), expected, strict=True):
        assert words in part


def test_the_page_shows_the_results(script):
    script["main"](["--check"])
    results = json.loads((EXAMPLES / "spin_feed_forward.json").read_text())
    assert len({run["seed"] for run in results["runs"]}) == 3
    # Three minutes in all.
    assert sum(run["seconds"] for run in results["runs"]) < 180
    assert all(run["accuracy"] > 0.8 for run in results["runs"])
    page = (EXAMPLES.parent / "examples.md").read_text()
    assert script["verdict"](results["runs"]) in page
    changed = {**results, "runs": [{**run, "accuracy": 0.0} for run in results["runs"]]}
    assert script["updated"](page, script["page_table"](changed)) != page
