"""The benchmarks run, check what they time, and report what they measured."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import __main__ as command
from benchmarks import baselines, guard, measure, problems, report, solve, spins
from benchmarks.compare import CONVERGED
from benchmarks.environment import commit, environment
from benchmarks.puzzles import guide
from benchmarks.targets import SOLVE, SPINS, Target
from implicit_attention import Status

#: The guard itself, which conftest.py replaces for all other tests.
RED = guard.red

TINY = problems.Shape(batch=1, heads=2, length=72, dim=9)
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


@pytest.mark.slow
def test_every_metric_is_measured_with_its_evidence(rows):
    assert [row["name"] for row in rows] == [setting.name for setting in SETTINGS]
    for row in rows:
        assert set(row["ratios"]) == {
            "C1", "C2 anderson", "C2 fpi", "C2 anderson entry", "C2 fpi entry", "C3", "C5", "C5 memory",
        }  # fmt: skip
        assert all(value is not None and value > 0 for value in row["ratios"].values())
        contenders = {name for pairs in solve.RATIOS.values() for pair in pairs.values() for name in pair}
        assert set(row["seconds"]) == contenders <= set(baselines.CONTENDERS)
        assert all(t["low"] <= t["median"] <= t["high"] and t["turns"] >= 1 for t in row["seconds"].values())
        ours = row["evidence"]["ours_training"]
        assert ours["converged"] >= CONVERGED
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


def test_every_query_must_be_converged(monkeypatch):
    right = baselines._solve

    def unfinished(data, queries, keys):
        state, evaluations, status = right(data, queries, keys)
        status = status.clone()
        status[0, 0, 3] = Status.MAX_STEPS
        return state, evaluations, status

    monkeypatch.setattr(baselines, "_solve", unfinished)
    (row,) = solve.run(SETTINGS[:1], metrics=["C1"], repeats=1, max_seconds=0.1)
    assert row["evidence"]["ours_forward"]["converged"] == 1
    assert row["evidence"]["ours_forward"]["status"] == {"CONVERGED": 143, "MAX_STEPS": 1}
    assert "wrong" in row["evidence"]["ours_forward"]["error"]
    assert row["ratios"] == {"C1": None}


def test_the_check_is_the_same_in_parts(monkeypatch):
    data = problems.draw(SETTINGS[1])
    state = baselines.unrolled(data, 12)().state
    whole = problems.evidence(data, state)
    assert 0 < whole["converged"] < 1
    monkeypatch.setattr(problems, "CHUNK", 7)
    assert problems.evidence(data, state) == pytest.approx(whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_query_that_is_above_its_tolerance_counts_as_such(dtype):
    setting = dataclasses.replace(SETTINGS[0], dtype=dtype)
    data = problems.draw(setting)
    state = baselines.unrolled(problems.draw(SETTINGS[0]), 60)().state.double()
    for _ in range(60):
        state = problems.mapped(data, state)
    assert problems.evidence(data, state)["converged"] == 1
    # Moved away from its solution until its residual is a little below and above the tolerance.
    query, moved = (0, 1, 3), {}
    for part in (0.99, 1.01):
        low, high = 0.0, 1.0
        for _ in range(60):
            away = state.clone()
            away[query] *= 1 + (low + high) / 2
            f = problems.mapped(data, away)[query]
            aim = part * (problems.ATOL + setting.rtol * f.norm())
            low, high = ((low + high) / 2, high) if (f - away[query]).norm() < aim else (low, (low + high) / 2)
        moved[part] = problems.evidence(data, away)["converged"]
    assert moved == {0.99: 1.0, 1.01: 1 - 1 / state[..., 0].numel()}


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


def test_an_ambition_decides_nothing():
    rows = [{"ratios": {"C": 1.5}}]
    target = Target("C", "a ratio", "C", "worst", "<=", 2.0, ambition=1.0)
    judged = target.judge(rows)
    assert (judged["verdict"], judged["reached"]) == ("met", False)
    assert dataclasses.replace(target, ambition=1.5).judge(rows)["reached"] is True
    assert dataclasses.replace(target, ambition=None).judge(rows)["reached"] is None
    assert report.ambition(judged) == "<= 1: not reached"


def test_rows_count_for_targets_of_their_device():
    target = Target("G", "a ratio", "G", "worst", "<=", 2.0, device="cuda")
    here, there = {"ratios": {"G": 1.0}}, {"ratios": {"G": 1.0}, "device": "cuda"}
    assert target.judge([here])["verdict"] == "not measured"
    assert target.judge([here, there])["rows"] == 1
    assert target.judge([there])["verdict"] == "met"
    assert dataclasses.replace(target, device="cpu").judge([there])["verdict"] == "not measured"


def test_a_turn_is_timed_by_the_clock_of_the_device(monkeypatch):
    monkeypatch.setitem(measure.TURNS, "cuda", lambda function, at_least: 0.7)
    functions, first = {"f": lambda: None}, {"f": 0.0}
    assert measure.interleaved(functions, first, repeats=3, device="cuda")["f"] == measure.Timing(0.7, 0.7, 0.7, 3)
    assert measure.interleaved(functions, first, repeats=1)["f"].median < 0.5


def test_a_turn_on_a_gpu_is_one_stretch_between_two_events(monkeypatch):
    calls = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            self.at = len(calls)

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 2.0 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    seconds = measure.TURNS["cuda"](lambda: calls.append(0), 0.01)
    assert seconds == pytest.approx(0.002)
    assert len(calls) == 1 + 5


def test_import_times_come_from_fresh_processes():
    times = measure.import_times(("json", "string"), repeats=2)
    assert all(timing.turns == 2 and 0 < timing.low <= timing.high < 5 for timing in times.values())
    assert times["string"].low > times["json"].low  # one after the other
    with pytest.raises(ValueError, match="no_such_module"):
        measure.import_times(("no_such_module",), repeats=1)


# ------------------------------------------------------------------ nothing is timed whose tests are red


@pytest.fixture
def folder(tmp_path):
    """Three files of tests; the first notes every run of it."""
    (tmp_path / "test_good.py").write_text("def test_it():\n    open('runs', 'a').write('x')\n")
    (tmp_path / "test_bad.py").write_text("def test_it():\n    assert 1 == 2\n")
    slow = "import pytest\n@pytest.mark.slow\ndef test_it():\n    assert 1 == 2\ndef test_other():\n    pass\n"
    (tmp_path / "test_slow.py").write_text(slow)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    RED.cache_clear()
    return tmp_path


def test_green_tests_let_it_pass_and_run_once(folder, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")
    assert RED(("test_good.py", "test_slow.py"), folder) is None
    assert RED(("test_good.py", "test_slow.py"), folder) is None
    assert (folder / "runs").read_text() == "x"


@pytest.mark.slow
def test_a_marker_chooses_the_tests_that_count(folder):
    # pytest ends with an error where it selects nothing.
    assert "deselected" in RED(("test_good.py",), folder, marker="slow")
    assert "FAILED" in RED(("test_slow.py",), folder, marker="slow")


def test_on_a_card_a_call_is_compiled_before_it_is_timed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    calls = []
    assert measure.once(lambda: calls.append(len(calls)) or len(calls), "cuda")[0] == 2
    assert measure.once(lambda: calls.append(0) or len(calls))[0] == 3


def test_outside_git_a_variable_names_the_commit(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.environment.ROOT", tmp_path)
    assert commit() == {"commit": None, "uncommitted_changes": None}
    monkeypatch.setenv("COMMIT", "abc")
    assert commit() == {"commit": "abc", "uncommitted_changes": None}


def test_red_tests_are_named(folder):
    assert "test_bad.py::test_it" in RED(("test_good.py", "test_bad.py"), folder)


@pytest.mark.slow
def test_a_missing_test_is_red(folder):
    assert "test_gone.py" in RED(("test_gone.py",), folder)


def test_without_tests_there_is_nothing_to_refuse(monkeypatch):
    monkeypatch.setattr(guard.subprocess, "run", lambda *arguments, **options: pytest.fail("something was run"))
    assert RED(()) is None


def test_the_library_is_never_timed_without_tests():
    for name, contender in baselines.CONTENDERS.items():
        assert bool(contender.tests) == name.startswith("ours")
    paths = {path for contender in baselines.CONTENDERS.values() for path in contender.tests}
    paths |= {path for tests in spins.TESTS.values() for path in tests} | set(solve.IMPORT_TESTS)
    assert all((guard.ROOT / path).exists() for path in paths)
    assert set(spins.TESTS) == set(spins.METRICS)


def test_what_is_red_is_not_timed_and_misses_its_targets(monkeypatch):
    monkeypatch.setattr(guard, "red", lambda tests: "not timed, its tests are red: FAILED x" if tests else None)
    row, imported = solve.run(SETTINGS[:1], metrics=["C1", "C2", "C7"], repeats=1, max_seconds=0.1)
    assert "ours_forward" not in row["seconds"]
    assert "sdpa_forward" in row["seconds"]
    assert row["ratios"]["C1"] is None
    assert imported["ratios"] == {"C7": None}
    verdicts = [target.judge([row, imported]) for target in SOLVE if target.id in ("C1", "C2", "C7")]
    assert {verdict["verdict"] for verdict in verdicts} == {"missed"}
    assert report.refusals({"rows": [row, imported]}) == [
        f"2 rows, {row['name']} first: not timed, its tests are red: FAILED x"
    ]
    options = {"metrics": ["C1", "C2", "C7"], "repeats": 1}
    rows, where = [row, imported], environment()
    made = report.document("solve", rows, SOLVE, complete=True, quick=False, options=options, where=where)
    assert "2 rows" in report.markdown(made, "a file", ())


def test_red_spin_systems_are_not_timed_either(monkeypatch):
    monkeypatch.setattr(guard, "red", lambda tests: "not timed, its tests are red: FAILED x")
    rows = spins.run(spins.settings_of(True), repeats=1)
    assert {row["metric"] for row in rows} == set(spins.METRICS)
    assert not any(row["seconds"] for row in rows)
    # A few rows are of full runs alone.
    verdicts = [target.judge(rows)["verdict"] for target in SPINS]
    assert {*verdicts} <= {"missed", "not measured"}
    assert "missed" in verdicts
    assert spins.tables({"rows": rows}) == []


# ------------------------------------------------------------------ documents


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
    assert {"device", "gpu", "libraries"} <= set(read["environment"])
    assert str(Path.home()) not in first.read_text()
    assert report.newest("solve", tmp_path) is not None


def test_the_readme_table_is_made_from_the_newest_complete_run(run, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- results of solve -->\na stale table\n<!-- end of solve -->\nafter\n")
    results = tmp_path / "results"
    assert report.rewrite("solve", solve.NOTES, readme=readme, folder=results) is None
    report.write({**run, "finished": "2020-01-01T00:00:00+00:00"}, results)
    latest = report.write({**run, "finished": "2030-01-01T00:00:00+00:00"}, results)
    report.write({**run, "finished": "2031-01-01T00:00:00+00:00", "complete": False}, results)
    assert report.rewrite("solve", solve.NOTES, readme=readme, folder=results) == latest
    text = readme.read_text()
    assert "a stale table" not in text
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert latest.name in text
    assert "| C3 |" in text
    assert "| clustered, 2, 0.5 |" in text
    report.rewrite("solve", solve.NOTES, readme=readme, folder=results)
    assert readme.read_text() == text


def test_older_runs_are_read_without_contenders_that_are_gone(run, tmp_path):
    older = json.loads(json.dumps(run))
    for row in older["rows"]:
        row["ratios"]["C1 tiled"] = 1.2
        row["seconds"]["ours_tiled_forward"] = row["seconds"]["ours_forward"]
    report.write(older, tmp_path)
    assert report.newest("solve", tmp_path)[1]["rows"] == json.loads(json.dumps(run["rows"]))


def test_the_committed_tables_are_those_of_the_newest_runs(tmp_path):
    text = report.README.read_text()
    copy = tmp_path / "README.md"
    copy.write_text(text)
    for name, suite in command.SUITES.items():
        report.rewrite(name, suite.NOTES, **command.options_of(suite), readme=copy)
    assert copy.read_text() == text


def test_the_tables_of_the_guide_are_those_of_the_newest_runs(tmp_path):
    pages = guide.PAGE, guide.README
    copies = [tmp_path / page.name for page in pages]
    for page, copy in zip(pages, copies, strict=True):
        copy.write_text(page.read_text())
    guide.rewrite(*copies)
    assert [copy.read_text() for copy in copies] == [page.read_text() for page in pages]
    guide.rewrite(*copies, folder=tmp_path)
    assert copies[0].read_text().count("Not run yet.") == 3
    assert copies[1].read_text().count("| not run | not run | not run | not run |") == len(guide.SHORT)


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
