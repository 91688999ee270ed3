"""The suite `train` runs, with gradients that are checked, and a block that learns by both."""

import dataclasses
import io
import json

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import __main__ as command
from benchmarks import (
    baselines,
    block,
    block_compiled,
    block_equilibrium,
    block_forward,
    by_hand,
    figures,
    guard,
    problems,
    report,
    train,
)
from benchmarks.block import BlockSetting
from benchmarks.block_compiled import CompiledSetting
from benchmarks.block_equilibrium import EquilibriumSetting
from benchmarks.block_forward import ForwardSetting
from benchmarks.block_memory import MemorySetting
from benchmarks.decoding import DecodingSetting
from benchmarks.environment import environment
from benchmarks.llama import NAMES, SMALL, LlamaSetting
from benchmarks.problems import Setting, Shape
from benchmarks.targets import TRAIN
from implicit_attention import Anderson, Equilibrium, Picard, Status
from implicit_attention.layers import compiled_graphs

pytestmark = pytest.mark.slow

TINY = Shape(batch=1, heads=2, length=40, dim=9)
BLOCK = BlockSetting(batch=1, length=12, dim=16, heads=2)
COMPILED = CompiledSetting(batch=3, length=6, dim=8, heads=2)
EQUILIBRIUM = EquilibriumSetting(batch=3, length=12, dim=16, heads=2)
CONVOLUTION = EquilibriumSetting(batch=2, length=4, dim=8, heads=2, kind="convolution")
CASES = [
    train.Case("STEP", Setting("clustered", 2.0, 0.0, TINY)),
    train.Case("LENGTH", Setting("gaussian", 2.0, 0.5, TINY)),
    train.Case("LENGTH", Setting("gaussian", 2.0, 0.5, Shape(1, 2, 80, 9))),
    train.Case("BLOCK", BLOCK),
    train.Case("EQUILIBRIUM", EQUILIBRIUM),
    train.Case("EQUILIBRIUM", CONVOLUTION),
    train.Case("FORWARD", ForwardSetting(batch=3, length=6, dim=16, heads=2)),
    train.Case("COMPILED", COMPILED),
    train.Case("MEMORY", MemorySetting(batch=2, length=128, dim=32)),
    train.Case("DECODING", DecodingSetting(past=6, dim=8, heads=2, depth=1, evaluations=4)),
    train.Case("LLAMA", LlamaSetting(1024, **SMALL)),
    train.Case("LLAMA", LlamaSetting(**SMALL, memory=(512, 1024))),
]


@pytest.fixture(scope="module")
def rows():
    with pytest.MonkeyPatch.context() as patch:
        # Graphs that are recorded only: code takes a minute to make.
        patch.setattr(compiled_graphs, "BACKEND", "eager")
        patch.setattr(block_compiled, "BACKEND", "eager")
        return train.run(CASES, repeats=1, max_seconds=0.2)


@pytest.fixture
def run(rows):
    options = {"metrics": list(train.METRICS), "repeats": 1}
    return report.document("train", rows, TRAIN, complete=True, quick=False, options=options, where=environment())


def test_all_train_at_the_same_residual_with_their_gradients_checked(rows):
    for row in rows[:3]:
        assert set(row["ratios"]) == set(train.RATIOS)
        assert all(value > 0 for value in row["ratios"].values())
        assert row["evidence"]["ours_training"]["converged"] == row["evidence"]["unrolled"]["converged"] == 1
        # It gives up after 100 evaluations.
        assert row["evidence"]["torchdeq_training_fixed_point_iter"]["converged"] > 0.95
        assert row["evidence"]["ours_training"]["gradient_error"] < 1e-3
        seconds = {name: timing["median"] for name, timing in row["seconds"].items()}
        assert row["ratios"]["ours / SDPA"] == pytest.approx(seconds["ours_training"] / seconds["sdpa_training"])
        assert row["ratios"]["unrolled / ours"] == pytest.approx(seconds["unrolled"] / seconds["ours_training"])


def test_the_gradient_of_torchdeq_is_the_implicit_one():
    data = problems.draw(Setting("gaussian", 1.0, 0.5, TINY, rtol=1e-6))
    counts = baselines.picard_counts(data)
    found = baselines.CONTENDERS["torchdeq_training_fixed_point_iter"].make(data, counts)()
    assert problems.gradient_error(data, found.state, *found.gradients) < 1e-4


def test_torchdeq_starts_where_all_start(monkeypatch):
    monkeypatch.setattr(baselines, "TORCHDEQ_CAP", 1)
    data = problems.draw(CASES[1].problem)
    counts = baselines.picard_counts(data)
    found = baselines.CONTENDERS["torchdeq_training_fixed_point_iter"].make(data, counts)()
    # Its one step, and one more that carries the gradient.
    torch.testing.assert_close(found.state, baselines.picard(data, 2)().state)


def test_equilibria_that_were_not_found_are_not_timed(monkeypatch):
    monkeypatch.setattr(block, "CONVERGED", 2.0)
    row = block.block_row(BLOCK, repeats=1, max_seconds=0.1)
    assert row["seconds"] == {}
    assert row["ratios"] == {"block": None}
    assert report.refusals({"rows": [{"name": "block", **row}]})


def test_a_wrong_gradient_of_ours_is_not_timed(monkeypatch):
    def wrong(data, queries, keys):
        with torch.no_grad():
            state = baselines.picard(data, 400)().state
        return state + 0 * queries + 1e-3 * (keys - keys.detach()), torch.ones(queries.shape[:-1])

    monkeypatch.setattr(baselines, "_solve", wrong)
    (row,) = train.run(CASES[:1], repeats=1, max_seconds=0.1)
    assert row["evidence"]["ours_training"]["converged"] == 1
    assert "wrong" in row["evidence"]["ours_training"]["error"]
    assert row["ratios"]["ours / SDPA"] is None
    assert row["ratios"]["unrolled / ours"] is None


def test_the_block_solves_and_learns(rows):
    (row,) = [row for row in rows if row["metric"] == "BLOCK"]
    assert row["evidence"]["equilibrium"]["converged"] == 1
    assert row["evidence"]["equilibrium"]["evaluations_mean"] > 1
    assert row["evidence"]["explicit"]["evaluations_max"] == 0
    seconds = {name: timing["median"] for name, timing in row["seconds"].items()}
    assert row["ratios"]["block"] == pytest.approx(seconds["equilibrium"] / seconds["explicit"])
    made = block.Block(16, 2)
    x = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(made(x, None), made(x, 0))
    made(x, None).square().mean().backward()
    assert all(parameter.grad is not None for parameter in made.parameters())


def test_what_is_red_is_not_timed(monkeypatch):
    monkeypatch.setattr(guard, "red", lambda tests: f"not timed, its tests are red: {tests[0]}" if tests else None)
    step, layer = train.run([CASES[0], CASES[3]], repeats=1, max_seconds=0.1)
    assert "ours_training" not in step["seconds"]
    assert step["ratios"]["ours / SDPA"] is None
    assert layer["ratios"] == {"block": None}
    assert "test_attention" in layer["evidence"]["equilibrium"]["error"]
    made = {"rows": [step, layer]}
    assert sum("its tests are red" in reason for reason in report.refusals(made)) == 2


@pytest.mark.parametrize("kind", ["block", "convolution"])
def test_a_block_as_a_fixed_point_is_held_against_torchdeq_at_equal_residuals(rows, kind):
    (row,) = [row for row in rows if row["metric"] == "EQUILIBRIUM" and row["kind"] == kind]
    for name in (*block_equilibrium.OURS, "by hand", "torchdeq anderson", "torchdeq fixed_point_iter"):
        found = row["evidence"][name]
        assert max(found["state_residual"], found["adjoint_residual"]) <= EQUILIBRIUM.rtol
        assert min(found["evaluations"], found["products"]) >= 3
    assert set(row["ratios"]) == {*block_equilibrium.RATIOS, block_equilibrium.FASTEST}
    seconds = {name: timing["median"] for name, timing in row["seconds"].items()}
    rivals = [value for name, value in seconds.items() if name.startswith("torchdeq")]
    faster = min(seconds[name] for name in block_equilibrium.OURS)
    assert row["ratios"]["ours / torchdeq"] == pytest.approx(faster / min(rivals))
    # The same two methods, written down a second time; samples that have ended leave ours.
    assert 0 <= row["evidence"]["by hand"]["evaluations"] - row["evidence"]["ours"]["evaluations"] + 1 <= 2
    assert row["evidence"]["by hand"]["products"] == row["evidence"]["ours"]["products"]
    assert row["ratios"]["ours / bare"] == pytest.approx(seconds["ours"] / seconds["bare"])


SOLVERS = {"picard": Picard(rtol=1e-3), "anderson": Anderson(history=2, rtol=1e-3)}
BY_HAND = {"picard": "by hand", "anderson": "anderson by hand"}


@pytest.mark.parametrize("name", SOLVERS)
def test_a_forward_pass_is_held_against_as_many_evaluations(rows, name):
    (row,) = [row for row in rows if row["metric"] == "FORWARD"]
    data, hand = block_equilibrium.draw(EquilibriumSetting(batch=3, length=6, dim=16, heads=2)), BY_HAND[name]
    with torch.no_grad():
        layer = Equilibrium(data.block, solver=SOLVERS[name])
        state, end = layer(data.x), block_forward.loops(data, 1e-3)[hand]()
    report = layer.last_solve
    torch.testing.assert_close(end.value, state, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(end.residual, report.residual, rtol=1e-3, atol=1e-6)
    assert end.evaluations.tolist() == report.num_evals.tolist()
    for found in (row["evidence"][name], row["evidence"][hand]):
        assert found["evaluations"] == int(report.num_evals.max())
        assert 1e-4 < found["state_residual"] <= 1e-3
    seconds = {name: timing["median"] for name, timing in row["process_seconds"].items()}
    for one in (name, hand, f"{name} by torch"):
        assert row["ratios"][f"{one} / bare"] == pytest.approx(seconds[one] / seconds[f"bare {name}"])


def test_decoding_is_held_against_as_many_plain_steps(rows):
    (row,) = [row for row in rows if row["metric"] == "DECODING"]
    seconds = {name: timing["median"] for name, timing in row["process_seconds"].items()}
    for name in ("solve", "steps"):
        assert row["evidence"][name]["off"] < 1e-5
        assert row["ratios"][f"{name} / plain"] == pytest.approx(seconds[name] / seconds["plain"])
    # Keys and values of 8 tokens in float32.
    assert row["evidence"]["cache"]["bytes"] == [2 * 8 * 8 * 4] * 2
    assert row["ratios"]["cache bytes"] == 1


class Kinks(torch.nn.Module):
    """A map with kinks, across which mixed steps lead far away and are taken back."""

    def forward(self, z, x):
        return 0.98 * (z.abs() - 1).abs() + x


@pytest.mark.parametrize("steps", [8, 200])
def test_a_loop_by_hand_takes_steps_back_and_ends_as_the_layer_does(monkeypatch, steps):
    x = torch.randn(12, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[5, 0, 0] = torch.nan
    data = block_equilibrium.Data(Kinks(), x, x)
    solver = dataclasses.replace(SOLVERS["anderson"], max_steps=steps)
    layer = Equilibrium(data.block, solver=solver, on_failure="ignore")
    monkeypatch.setattr(block_forward, "MOST", steps + 1)
    loop = block_forward.loops(data, 1e-3)["anderson by hand"]
    with torch.no_grad():
        found, end = layer(x), loop()
        report = layer.last_solve
        assert end.evaluations.tolist() == report.num_evals.tolist()
        assert end.evaluations[5] == 1
        assert end.converged.tolist() == report.converged.tolist()
        assert end.active.tolist() == (report.status == Status.MAX_STEPS).tolist()
        assert end.active.any() == (steps < 200)
        finite = report.residual < torch.inf
        torch.testing.assert_close(end.value[finite], found[finite], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(end.residual[finite], report.residual[finite], rtol=1e-2, atol=1e-5)
        # Nothing would be tested if no step were taken back.
        monkeypatch.setattr(by_hand, "GROWTH", 1e300)
        assert not np.allclose(loop().residual[finite], end.residual[finite])


class ArcSine(torch.nn.Module):
    """A map that ends at 1: mixed steps beyond it meet numbers that are not finite, and are taken back."""

    def forward(self, z, x):
        return 0.9 * torch.asin(z) * x + 0.05


def test_a_loop_by_hand_takes_back_steps_that_are_not_finite():
    x = 1.3 * torch.rand(8, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    layer = Equilibrium(ArcSine(), solver=Anderson(history=2, rtol=1e-3, max_steps=15), on_failure="ignore")
    with torch.no_grad():
        state = layer(x)
        end = by_hand.anderson(lambda z: layer.block(z, x), torch.zeros_like(x), 1e-3, history=2, most=16)
    report = layer.last_solve
    assert end.evaluations.tolist() == report.num_evals.tolist()
    assert end.converged.tolist() == report.converged.tolist()
    torch.testing.assert_close(end.value, state, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(end.residual, report.residual, rtol=1e-5, atol=1e-6)


def test_the_residuals_of_a_block_are_measured(rows):
    data = block_equilibrium.draw(EQUILIBRIUM)
    tight = block_equilibrium.measured(data, block_equilibrium.ours(data, rtol=1e-5))
    loose = block_equilibrium.measured(data, block_equilibrium.ours(data, rtol=1e-2))
    assert max(tight["state_residual"], tight["adjoint_residual"]) < 2e-5
    assert min(loose["state_residual"], loose["adjoint_residual"]) > 1e-4
    assert loose["evaluations"] < tight["evaluations"]

    def wrong(block):
        state = block_equilibrium.ours(data, rtol=1e-5)(block)
        block.shift.grad *= 1.1
        return state

    assert block_equilibrium.measured(data, wrong)["adjoint_residual"] > 0.01


def test_a_block_whose_residuals_are_too_large_is_not_timed(monkeypatch):
    above = {"evaluations": 4, "products": 4, "state_residual": 1.01 * EQUILIBRIUM.rtol, "adjoint_residual": 0.0}
    monkeypatch.setattr(block_equilibrium, "measured", lambda data, training: above)
    row = block_equilibrium.equilibrium_row(EQUILIBRIUM, repeats=1, max_seconds=0.1)
    assert row["seconds"] == {}
    assert row["ratios"] == {"ours / torchdeq": None, "ours / bare": None}
    assert report.refusals({"rows": [{"name": "block", **row}]})


def test_a_compiled_block_is_held_against_the_same_layer_at_equal_residuals(rows):
    (row,) = [row for row in rows if row["metric"] == "COMPILED"]
    for found in row["evidence"].values():
        assert found["residual"] <= COMPILED.rtol
        assert found["converged"] == 1
        assert found["evaluations"] == row["evidence"]["eager"]["evaluations"] > 3
        assert found["gradient_difference"] < 1e-3
    seconds = {name: timing["median"] for name, timing in row["seconds"].items()}
    for way in ("step", "forward"):
        assert row["ratios"][f"compiled {way} / eager"] == pytest.approx(
            seconds[f"compiled {way}"] / seconds[f"eager {way}"]
        )


def test_a_compiled_block_whose_residual_is_too_large_is_not_timed(monkeypatch):
    right = block_compiled.measured
    above = {"residual": 1.01 * COMPILED.rtol}
    monkeypatch.setattr(block_compiled, "measured", lambda *given: right(*given) | above)
    monkeypatch.setattr(compiled_graphs, "BACKEND", "eager")
    monkeypatch.setattr(block_compiled, "BACKEND", "eager")
    row = block_compiled.compiled_row(COMPILED, repeats=1, max_seconds=0.1)
    assert row["seconds"] == {}
    assert set(row["ratios"].values()) == {None}
    assert report.refusals({"rows": [{"name": "compiled", **row}]})


def test_memory_of_a_block_is_that_of_one_evaluation(rows):
    (row,) = [row for row in rows if row["metric"] == "MEMORY"]
    assert set(row["ratios"]) == {
        "memory growth",
        "unrolled / ours",
        "memory growth, reversible",
        "reversible / unrolled",
    }
    assert all(found["peak_bytes"] > 0 for found in row["evidence"].values())


def test_a_llama_is_timed_beside_torchs_attention_and_its_memory_measured_apart(rows):
    times, memory = (row for row in rows if row["metric"] == "LLAMA")
    assert times["evidence"]["equilibrium"]["converged"] == 1
    assert times["evidence"]["equilibrium"]["adjoints_converged"]
    assert times["evidence"]["explicit"]["relative_error"] < 1e-5
    seconds = {name: timing["median"] for name, timing in times["seconds"].items()}
    ratio = seconds["equilibrium, training"] / seconds["sdpa, training"]
    assert times["ratios"]["training / sdpa"] == pytest.approx(ratio)
    assert set(memory["evidence"]) == {f"{name}, {tokens} tokens" for name in NAMES for tokens in (512, 1024)}
    peaks = {name: found["peak_bytes"] for name, found in memory["evidence"].items()}
    grown = peaks["equilibrium, 1024 tokens"] / peaks["equilibrium, 512 tokens"] / 2
    assert memory["ratios"]["memory growth"] == pytest.approx(grown)
    titles = [table.title for table in train.tables({"rows": rows})]
    assert titles[-2:] == ["Llama", "memory of a Llama"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_block_as_a_fixed_point_on_a_gpu():
    setting = dataclasses.replace(EQUILIBRIUM, length=64, dim=64, rtol=1e-2, dtype="bfloat16", device="cuda")
    row = block_equilibrium.equilibrium_row(setting, repeats=1, max_seconds=1.0)
    assert all(row["evidence"][name]["peak_bytes"] > 0 for name in ("ours", "stack", "bare"))
    assert row["ratios"]["ours / torchdeq"] > 0


def test_the_report_holds_what_was_measured(run, tmp_path):
    console = Console(width=300, record=True, file=io.StringIO())
    report.show(run, train.NOTES, console, train.tables)
    shown = console.export_text()
    for text in ("clustered, 2, 0", "gradient error, fpi", "equilibrium / one step"):
        assert text in shown, text
    readme = tmp_path / "README.md"
    readme.write_text("<!-- results of train -->\nold\n<!-- end of train -->\n")
    path = report.write(run, tmp_path / "results")
    options = {"tables": train.tables, "figures": train.figures, "readme": readme, "folder": tmp_path / "results"}
    assert report.rewrite("train", train.NOTES, **options) == path
    assert "old" not in readme.read_text()
    assert "](figures/train.png)" in readme.read_text()
    assert (tmp_path / "figures" / "train.png").stat().st_size > 10_000
    assert json.loads(path.read_text())["rows"] == json.loads(json.dumps(run["rows"]))


def test_the_figure_has_no_line_for_what_was_not_timed(run, tmp_path):
    run = json.loads(json.dumps(run))
    for row in run["rows"]:
        row["seconds"].pop("unrolled", None)
    assert figures.train_figures(run, tmp_path)
    assert figures.train_figures({**run, "rows": run["rows"][3:]}, tmp_path) == []


def test_the_command_runs_the_metrics_that_it_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(train, "settings_of", lambda quick: tuple(CASES))
    done = CliRunner().invoke(command.app, ["train", "--quick", "--only", "block", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("train-partial-*.json")
    assert {row["metric"] for row in json.loads(path.read_text())["rows"]} == {"BLOCK"}
