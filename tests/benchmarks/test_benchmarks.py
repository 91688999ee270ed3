"""The benchmarks run, check what they time, and report what they measured."""

import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import baselines, measure, problems, report, solve  # noqa: E402
from benchmarks.environment import environment  # noqa: E402
from benchmarks.targets import SOLVE, Target  # noqa: E402

TINY = problems.Shape(batch=1, heads=2, length=40, dim=9)
SETTINGS = [
    problems.Setting("gaussian", 2.0, 0.0, shape=TINY),
    problems.Setting("clustered", 2.0, 0.5, shape=TINY),
]


@pytest.fixture(scope="module")
def rows():
    metrics = [metric for metric in solve.METRICS if metric != "C7"]
    return solve.run(SETTINGS, metrics=metrics, repeats=1, max_seconds=0.2)


@pytest.fixture
def run(rows):
    return report.document(
        "solve",
        rows,
        SOLVE,
        complete=True,
        quick=False,
        options={"metrics": list(solve.METRICS), "repeats": 1},
        where=environment(),
    )


def _keys(value):
    """The names in a nested document."""
    if isinstance(value, dict):
        return set(value) | {name for inner in value.values() for name in _keys(inner)}
    return {name for inner in value for name in _keys(inner)} if isinstance(value, list) else set()


def test_every_metric_is_measured_with_its_evidence(rows):
    assert [row["name"] for row in rows] == [setting.name for setting in SETTINGS]
    for row in rows:
        assert set(row["ratios"]) == {
            "C1", "C2 anderson", "C2 fpi", "C2 anderson entry", "C2 fpi entry", "C3", "C5", "C5 memory",
        }  # fmt: skip
        assert all(value is not None and value > 0 for value in row["ratios"].values())
        assert set(row["seconds"]) == set(baselines.CONTENDERS)
        assert all(t["low"] <= t["median"] <= t["high"] and t["turns"] >= 1 for t in row["seconds"].values())
        ours = row["evidence"]["ours_training"]
        assert ours["converged"] == 1
        assert ours["residual_max"] <= 1.02e-4
        assert ours["gradient_error"] < 1e-4
        assert 1 <= ours["evaluations_mean"] <= ours["evaluations_max"]
        assert row["evidence"]["unrolled"]["converged"] == 1
        assert row["peak_memory_bytes"]["unrolled"] > row["peak_memory_bytes"]["sdpa_training"] > 0


def test_ratios_are_quotients_of_the_medians(rows):
    row = rows[0]
    seconds = {name: timing["median"] for name, timing in row["seconds"].items()}
    assert row["ratios"]["C1"] == pytest.approx(
        seconds["ours_forward"] / (row["picard"]["mean"] * seconds["sdpa_forward"])
    )
    assert row["ratios"]["C2 fpi"] == pytest.approx(seconds["torchdeq_fixed_point_iter"] / seconds["ours_forward"])
    assert row["ratios"]["C3"] == pytest.approx(seconds["ours_training"] / seconds["sdpa_training"])
    assert row["ratios"]["C5"] == pytest.approx(seconds["unrolled"] / seconds["ours_training"])


def test_a_wrong_answer_is_not_timed_and_misses_its_targets(monkeypatch):
    def wrong(data, queries, keys):
        return queries * 1.0, torch.ones(queries.shape[:-1])

    monkeypatch.setattr(baselines, "_solve", wrong)
    (row,) = solve.run(SETTINGS[:1], metrics=["C1"], repeats=1, max_seconds=0.1)
    assert "wrong" in row["evidence"]["ours_forward"]["error"]
    assert "ours_forward" not in row["seconds"]
    assert row["ratios"]["C1"] is None
    verdicts = [target.judge([row]) for target in SOLVE if target.id == "C1"]
    assert {(verdict["verdict"], verdict["wrong"]) for verdict in verdicts} == {("missed", 1)}


def test_a_wrong_gradient_is_noticed():
    data = problems.draw(SETTINGS[1])
    counts = baselines.picard_counts(data)
    found = baselines.CONTENDERS["ours_training"].make(data, counts)()
    by_queries, by_keys = found.gradients
    assert problems.gradient_error(data, found.state, by_queries, by_keys) < 1e-4
    assert problems.gradient_error(data, found.state, by_queries, 1.02 * by_keys) > 1e-2
    assert problems.gradient_error(data, found.state, 1.05 * by_queries, by_keys) > 1e-2


def test_picard_is_counted_per_query():
    data = problems.draw(SETTINGS[0])
    counts = baselines.picard_counts(data)
    state = baselines.unrolled(data, counts.most)().state
    assert problems.evidence(data, state)["converged"] == 1
    assert problems.evidence(data, baselines.unrolled(data, counts.most - 2)().state)["converged"] < 1
    assert counts.mean < counts.most
    assert counts.for_99_percent <= counts.most
    assert counts.unfinished == 0


@pytest.mark.parametrize(
    ("statistic", "sense", "bound", "measured", "verdict"),
    [
        ("worst", "<=", 4.0, 4.0, "met"),
        ("worst", "<=", 3.9, 4.0, "missed"),
        ("geometric mean", "<=", 2.1, 2.0, "met"),
        ("worst", ">=", 1.0, 1.0, "met"),
        ("geometric mean", ">=", 2.1, 2.0, "missed"),
    ],
)
def test_verdicts(statistic, sense, bound, measured, verdict):
    rows = [{"ratios": {"C": 1.0}}, {"ratios": {"C": 4.0}}, {"ratios": {}}]
    judged = Target("C", "a ratio", "C", statistic, sense, bound).judge(rows)
    assert judged["measured"] == pytest.approx(measured)
    assert judged["verdict"] == verdict
    assert judged["rows"] == 2


def test_import_times_come_from_fresh_processes():
    times = measure.import_times(("json", "string"), repeats=2)
    assert all(timing.turns == 2 and 0 < timing.low <= timing.high < 5 for timing in times.values())
    with pytest.raises(ValueError, match="no_such_module"):
        measure.import_times(("no_such_module",), repeats=1)


def test_the_document_holds_what_a_reader_needs_and_is_never_overwritten(run, tmp_path):
    first, second = report.write(run, tmp_path), report.write(run, tmp_path)
    assert first != second
    read = json.loads(first.read_text())
    assert read == json.loads(json.dumps(run))
    assert {"schema", "suite", "finished", "complete", "quick", "options", "environment", "targets", "rows"} <= set(
        read
    )
    assert {"cpu", "cores", "threads", "libraries", "device", "shape", "dtype", "tolerance", "verdict"} <= _keys(read)
    assert {"residual_max", "converged", "evaluations_mean", "evaluations_max", "median", "low", "high"} <= _keys(read)
    assert str(Path.home()) not in first.read_text()
    assert report.newest("solve", tmp_path) is not None


def test_the_readme_table_is_made_from_the_newest_complete_run(run, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- results of solve -->\nold\n<!-- end of solve -->\nafter\n")
    results = tmp_path / "results"
    assert report.rewrite("solve", solve.NOTES, readme=readme, folder=results) is None
    report.write({**run, "finished": "2020-01-01T00:00:00+00:00"}, results)
    latest = report.write({**run, "finished": "2030-01-01T00:00:00+00:00"}, results)
    report.write({**run, "finished": "2031-01-01T00:00:00+00:00", "complete": False}, results)
    assert report.rewrite("solve", solve.NOTES, readme=readme, folder=results) == latest
    text = readme.read_text()
    assert "old" not in text
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert latest.name in text
    assert "| C3 |" in text
    assert "| clustered, 2, 0.5 |" in text
    report.rewrite("solve", solve.NOTES, readme=readme, folder=results)
    assert readme.read_text() == text


def test_the_terminal_says_what_was_left_out(run):
    console = Console(width=200, record=True, file=io.StringIO())
    report.show({**run, "complete": False}, solve.NOTES, console)
    shown = console.export_text()
    assert "NOT the full run: 2 settings" in shown
    assert "missed" in shown or "met" in shown


def test_the_command_writes_only_where_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(solve, "settings_of", lambda quick: tuple(SETTINGS[:1]))
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    runner = CliRunner()
    done = runner.invoke(command.app, ["solve", "--quick", "--only", "C1", "--repeats", "1"])
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "results").exists()
    done = runner.invoke(command.app, ["solve", "--quick", "--only", "c1", "--repeats", "1", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["options"]["metrics"] == ["C1"]
    refused = runner.invoke(command.app, ["solve", "--only", "C9"])
    assert refused.exit_code == 2
    assert "C9" in refused.output


def test_the_full_run_has_the_sixteen_settings_of_the_targets():
    assert len(set(problems.FULL)) == 16
    assert {(s.keys, s.sharpness, s.anchor) for s in problems.FULL} == {
        (keys, sharpness, anchor)
        for keys in ("gaussian", "clustered")
        for sharpness in (1, 2, 4, 8)
        for anchor in (0, 0.5)
    }
    assert {s.shape for s in problems.FULL} == {problems.Shape(2, 8, 512, 64)}
    assert {target.id for target in SOLVE} == set(solve.METRICS)
    assert dataclasses.replace(problems.FULL[0], sharpness=8.0).beta == 1.0
