"""The example of learned energies: it runs, its tables are those of its results, and its page says what they say."""

import importlib
import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
PAGE, RESULTS = EXAMPLES.parent / "learned_energy.md", EXAMPLES / "learned_energy.json"


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as path:
        path.syspath_prepend(str(EXAMPLES))
        own = runpy.run_path(str(EXAMPLES / "learned_energy.py"), run_name="example")
        return SimpleNamespace(**(vars(importlib.import_module("_learned_energy")) | own))


@pytest.fixture
def results():
    return json.loads(RESULTS.read_text())


def rows_of(results, part, model, key="model"):
    return [row for run in results["runs"] for row in run[part] if row[key] == model]


@pytest.mark.slow
def test_a_quick_run_measures_everything(script, tmp_path, capsys):
    picture = tmp_path / "digits.png"
    found = script.main(["--quick", "--picture", str(picture)])
    assert picture.stat().st_size > 5000
    for table in script.tables(found).values():
        assert table in capsys.readouterr().out or table
    (run,) = found["runs"]
    by_name = {row["model"]: row for row in run["digits"]}
    # Twelve updates already take noise off.
    assert by_name["implicit"]["error"] < 0.8 * by_name["noisy image"]["error"]
    assert by_name["implicit"]["bytes"] < by_name["unrolled, 3 steps"]["bytes"] < by_name["unrolled, 10 steps"]["bytes"]
    assert {row["score"] for row in run["familiar"]} >= {"energy", "reconstruction error", "softmax confidence"}


def test_shuffled_images_hold_the_same_patches(script):
    x = torch.rand(5, 64)
    moved = script.shuffled(x, 0)

    def patches(x):
        return sorted(map(tuple, x.reshape(4, 2, 4, 2).transpose(1, 2).reshape(16, 4).tolist()))

    assert not torch.equal(moved, x)
    assert all(patches(a) == patches(b) for a, b in zip(moved, x, strict=True))


def test_the_energies_have_the_bound_that_is_claimed(script):
    torch.manual_seed(0)
    z, x = 100 * torch.randn(50, 64), torch.rand(50, 64)
    assert (script.Denoiser()(z, x) >= 0).all()
    bits, _ = script.asked(torch.randint(2, (50, 16)))
    energy = script.Parity()
    far = energy(1e4 * torch.randn(50, 16), bits)
    assert (far > 1e6).all()


def test_parities_are_asked_of_held_out_strings(script):
    x, y = script.asked(torch.tensor([[1, 1, 0, 1]]))
    assert y.tolist() == [[1, 0, 0, 1]]
    assert x[0].tolist() == [[1, 1], [1, 0], [-1, 0], [1, 0]]


def test_the_areas_under_the_curve_are_of_ranks(script):
    assert script.area(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0])) == 1
    assert script.area(torch.tensor([0.0, 3.0]), torch.tensor([1.0, 2.0])) == 0.5


def test_the_tables_are_those_of_the_results(script, results, monkeypatch, tmp_path):
    assert script.main(["--check"]) == results
    results["runs"][0]["digits"][-1]["error"] *= 2
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(results))
    monkeypatch.setitem(script.main.__globals__, "RESULTS", changed)
    with pytest.raises(SystemExit, match="run with --write"):
        script.main(["--check"])


def test_the_results_are_those_of_three_seeds_in_full(script, results):
    assert results["plan"] == script.Plan()._asdict()
    assert [run["seed"] for run in results["runs"]] == [0, 1, 2]
    assert results["sha256"] == script.images(0).sha256


def test_the_page_says_what_the_results_say(results):
    def errors(model, name="error"):
        return [row[name] / noise["error"] for row, noise in zip(rows_of(results, "digits", model), noisy, strict=True)]

    noisy = rows_of(results, "digits", "noisy image")
    best = [min(run["digits"], key=lambda row: row["error"])["model"] for run in results["runs"]]
    assert best == ["feed-forward"] * 3
    implicit, unrolled = errors("implicit"), errors("unrolled, 10 steps")
    assert all(abs(a - b) < 0.01 for a, b in zip(implicit, unrolled, strict=True))
    assert [row["far"] for row in rows_of(results, "digits", "implicit")] == [None] * 3
    assert min(row["converged"] for row in rows_of(results, "digits", "implicit")) == 1.0
    seconds = [
        sum(row["seconds"] for row in rows_of(results, "digits", name)) for name in ("implicit", "unrolled, 10 steps")
    ]
    assert f"at {seconds[0] / seconds[1]:.0f} times their training time" in " ".join(PAGE.read_text().split())
    bytes_held = [max(row["bytes"] for row in rows_of(results, "digits", m)) for m in ("implicit", "unrolled, 3 steps")]
    assert bytes_held[0] < bytes_held[1] / 10
    # Two of three are right at the length of the training as trained, and at longer ones when solved.
    rows = rows_of(results, "parity", "unrolled, 20 steps")
    assert sorted(row["as trained"]["strings"][0] for row in rows)[1:] == [1.0, 1.0]
    assert max(row["as trained"]["strings"][1] for row in rows) < 0.05
    assert sorted(row["solved"]["strings"][1] for row in rows)[1] > 0.7
    assert None not in [row["stopped"] for row in rows_of(results, "parity", "implicit")]
    areas = {run_["score"]: run_["areas"] for run in results["runs"] for run_ in run["familiar"]}
    assert areas["softmax confidence"]["shuffled patches"] < 0.9 < areas["energy"]["photograph"]
    assert areas["energy"]["photograph"] <= areas["nearest training image"]["photograph"]
