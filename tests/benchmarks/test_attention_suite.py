"""The suite `attention` compares at equal residual, measures memory as a process has it, and draws its numbers."""

import dataclasses
import io
import json

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import __main__ as command
from benchmarks import attention, baselines, compiled_kernels, figures, guard, memory, problems, report
from benchmarks.compare import CONVERGED
from benchmarks.environment import environment
from benchmarks.measure import Timing
from benchmarks.problems import Setting, Shape
from benchmarks.targets import ATTENTION

TINY = Shape(batch=1, heads=2, length=40, dim=9)
CASES = [
    attention.Case("LENGTH", Setting("gaussian", 2.0, 0.0, TINY)),
    attention.Case("LENGTH", Setting("gaussian", 2.0, 0.0, dataclasses.replace(TINY, length=80))),
    attention.Case("LENGTH", Setting("clustered", 2.0, 0.5, TINY)),
    attention.Case("STEPS", Setting("gaussian", 2.0, 0.0, TINY), (1, 4)),
    attention.Case("C4", Setting("gaussian", 2.0, 0.0, TINY), (5, 20)),
]
PEAKS = {"sdpa": 100, "ours": 120, "ours 5": 110, "ours 20": 132, "unrolled 5": 300, "unrolled 20": 900}


def peak_of(setting, name):
    return {"peak_bytes": 2**20 * PEAKS[name], "evaluations_mean": 7.0, "converged": 1.0}


@pytest.fixture(scope="module")
def rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "peak_of", peak_of)
        return attention.run(CASES, repeats=1, max_seconds=0.2)


@pytest.fixture
def run(rows):
    options = {"metrics": list(attention.METRICS), "repeats": 1}
    where = environment()
    return report.document("attention", rows, ATTENTION, complete=True, quick=False, options=options, where=where)


# ------------------------------------------------------------------ rows


@pytest.mark.slow
def test_every_solver_is_timed_at_the_same_residual(rows):
    for row in rows[:3]:
        assert {"sdpa_math", "sdpa_flash"} <= set(row["seconds"])
        assert set(attention.SOLVERS.values()) <= set(row["seconds"])
        for name in ("ours_forward", "picard", "torchdeq_fixed_point_iter"):
            assert row["evidence"][name]["converged"] >= CONVERGED, name
        assert row["evidence"]["picard"]["evaluations_max"] == row["picard"]["most"]
        assert row["device"] == "cpu"


def test_a_kernel_that_does_not_run_here_is_named_with_its_reason(rows):
    for row in rows[:3]:
        assert "cudnn" in row["evidence"]["sdpa_cudnn"]["label"]
        assert "RuntimeError" in row["evidence"]["sdpa_cudnn"]["error"]
        assert "sdpa_cudnn" not in row["seconds"]


def test_ratios_are_to_the_fastest_kernel(rows):
    seconds = {name: timing["median"] for name, timing in rows[0]["seconds"].items()}
    best = min(value for name, value in seconds.items() if name.startswith("sdpa_"))
    assert seconds[rows[0]["best_sdpa"]] == best
    assert rows[0]["ratios"]["ours"] == pytest.approx(seconds["ours_forward"] / best)
    assert rows[0]["ratios"]["torchdeq anderson"] == pytest.approx(seconds["torchdeq_anderson"] / best)


def test_fixed_budgets_are_kept_and_priced(monkeypatch):
    times = {"sdpa": 2.0, "ours 1": 3.0, "ours 4": 12.0, "picard 1": 2.0, "picard 4": 8.0}
    made = {name: Timing(seconds, seconds, seconds, 1) for name, seconds in times.items()}
    monkeypatch.setattr(attention, "interleaved", lambda functions, first, **options: {n: made[n] for n in functions})
    (row,) = attention.run(CASES[3:4], repeats=1)
    evaluations = {name: found["evaluations_mean"] for name, found in row["evidence"].items()}
    assert evaluations == {"sdpa": 1, "picard 1": 1, "picard 4": 4, "ours 1": 1, "ours 4": 4}
    assert row["ratios"]["per evaluation"] == pytest.approx((12 - 3) / (4 - 1) / 2)
    assert row["ratios"]["ours / Picard"] == pytest.approx(12 / 8)


def test_a_limited_training_step_has_a_gradient_and_its_evaluations():
    data = problems.draw(Setting("gaussian", 2.0, 0.5, TINY))
    found = baselines.limited(data, 3, training=True)()
    assert int(found.evaluations.max()) == 3
    assert all(float(gradient.norm()) > 0 for gradient in found.gradients)


def test_c4_is_the_quotient_of_the_peaks(rows):
    assert rows[4]["ratios"] == {
        "C4": pytest.approx(1.2),
        "C4 growth": pytest.approx(1.2),
        "unrolled": pytest.approx(9.0),
        "unrolled growth": pytest.approx(3.0),
    }


def test_the_median_of_several_processes_counts(monkeypatch):
    peaks = {name: iter([30.0, 10.0, 20.0]) for name in PEAKS}
    measured = []

    def peak_of(setting, name):
        measured.append(name)
        return {"peak_bytes": next(peaks[name]), "evaluations_mean": 7.0, "converged": 1.0}

    monkeypatch.setattr(memory, "peak_of", peak_of)
    (row,) = attention.run([CASES[4]], repeats=3)
    assert row["evidence"]["ours"]["peak_bytes"] == 20
    assert row["evidence"]["ours"]["runs"] == [30, 10, 20]
    assert row["evidence"]["unrolled 5"]["peak_bytes"] == 30
    assert len(measured) == 4 * 3 + 2


def test_memory_of_a_wrong_answer_has_no_ratio_and_misses(monkeypatch):
    monkeypatch.setattr(memory, "peak_of", lambda setting, name: {**peak_of(setting, name), "converged": 0.5})
    long = dataclasses.replace(CASES[4], problem=dataclasses.replace(CASES[4].problem, shape=Shape(length=4096)))
    (row,) = attention.run([long], repeats=1)
    assert row["ratios"]["C4"] is None
    verdicts = {target.ratio: target.judge([row]) for target in ATTENTION if target.id == "C4"}
    assert verdicts["C4"]["verdict"] == "missed"
    assert verdicts["C4"]["wrong"] == 1
    assert verdicts["C4 growth"]["verdict"] == "met"
    assert verdicts["C4 growth"]["reached"] is False


def test_c4_is_judged_at_its_own_length_only(rows):
    assert {t.judge(rows)["verdict"] for t in ATTENTION if t.id == "C4"} == {"not measured"}


def test_what_is_red_is_not_measured(monkeypatch):
    monkeypatch.setattr(guard, "red", lambda tests: "not timed, its tests are red: FAILED x" if tests else None)
    monkeypatch.setattr(memory, "peak_of", peak_of)
    lengths, steps, peaks = attention.run([CASES[0], CASES[3], CASES[4]], repeats=1, max_seconds=0.1)
    assert "ours_forward" not in lengths["seconds"]
    assert lengths["ratios"]["ours"] is None
    assert lengths["ratios"]["Picard"] > 0
    assert not [name for name in steps["seconds"] if name.startswith("ours")]
    assert steps["ratios"]["per evaluation"] is None
    assert peaks["ratios"]["C4"] is None
    assert peaks["ratios"]["unrolled"] == pytest.approx(9.0)


# ------------------------------------------------------------------ memory


def test_the_high_water_mark_is_that_of_the_step():
    before = memory.begin("cpu")
    kept = torch.ones(2**25)
    del kept
    # The system counts pages in batches.
    assert memory.peak("cpu") - before > 0.9 * 2**27
    before = memory.begin("cpu")
    assert memory.peak("cpu") - before < 2**25


@pytest.mark.nightly
def test_unrolled_memory_grows_by_what_a_step_keeps():
    setting = Setting("gaussian", 2.0, 0.0, Shape(1, 4, 512, 64))
    few, many = (memory.peak_of(setting, f"unrolled {steps}") for steps in (2, 42))
    state = 4 * 4 * 512 * 64
    assert few["evaluations_mean"] == 2
    assert 30 * state < many["peak_bytes"] - few["peak_bytes"] < 160 * state


@pytest.mark.slow
def test_a_process_that_breaks_off_says_why():
    assert "nonsense" in memory.peak_of(Setting("gaussian", 2.0, 0.0, TINY), "nonsense")["error"]


# ------------------------------------------------------------------ report


def test_the_tables_hold_what_was_measured(run):
    console = Console(width=250, record=True, file=io.StringIO())
    report.show(run, attention.NOTES, console, attention.tables)
    shown = console.export_text()
    for text in ("gaussian, 2, 0", "clustered, 2, 0.5", "unrolled 20", "132.0"):
        assert text in shown, text
    assert json.loads(json.dumps(run)) == run


@pytest.mark.slow
def test_the_figures_show_the_numbers_of_the_run(run, tmp_path):
    drawn = figures.attention_figures(run, tmp_path)
    assert [name for name, _ in drawn] == ["attention.png", "attention_length.png"]
    assert all((tmp_path / name).stat().st_size > 10_000 for name, _ in drawn)
    figure = figures.overview(run)
    assert isinstance(figure, Figure)
    by_length, by_steps, by_memory = figure.axes
    lines = {container.get_label(): container.lines[0] for container in by_length.containers}
    ours = lines["equilibrium, ours"]
    assert list(ours.get_xdata()) == [40, 80]
    medians = [1000 * row["seconds"]["ours_forward"]["median"] for row in run["rows"][:2]]
    assert list(ours.get_ydata()) == pytest.approx(medians)
    assert [len(container.lines[0].get_xdata()) for container in by_steps.containers] == [2, 2]
    assert [list(container.lines[0].get_ydata()) for container in by_memory.containers] == [[110, 132], [300, 900]]
    assert {axes.get_xlabel() for axes in figure.axes} == {"sequence length N = M", "evaluations"}
    assert all("ms" in axes.get_ylabel() or "MiB" in axes.get_ylabel() for axes in figure.axes)


def test_an_unsolved_problem_has_an_open_marker(run):
    run = json.loads(json.dumps(run))
    for row in run["rows"][:2]:
        for found in row["evidence"].values():
            found["converged"] = 1.0
    row["evidence"]["torchdeq_anderson"]["converged"] = 0.9
    (left,) = [line for line in figures.overview(run).axes[0].get_lines() if line.get_markerfacecolor() == "white"]
    assert list(left.get_xdata()) == [80]


@pytest.mark.slow
def test_runs_on_a_gpu_and_on_a_cpu_have_their_own_newest(run, tmp_path):
    cuda = {**run, "environment": {**run["environment"], "device": "cuda"}}
    paths = {device: report.write(each, tmp_path) for device, each in (("cpu", run), ("cuda", cuda))}
    assert all(report.newest("attention", tmp_path, device)[0] == path for device, path in paths.items())
    assert figures.attention_figures(cuda, tmp_path)[0][0] == "attention_cuda.png"


def test_the_command_runs_the_metrics_that_it_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(attention, "settings_of", lambda quick: tuple(CASES))
    done = CliRunner().invoke(command.app, ["attention", "--quick", "--only", "steps", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("attention-partial-*.json")
    assert {row["metric"] for row in json.loads(path.read_text())["rows"]} == {"STEPS"}


def test_a_card_counts_memory_in_this_process():
    setting = Setting("gaussian", 2.0, 0.0, TINY, device="cuda")

    def needed(found, name):
        if name == "too much":
            raise torch.OutOfMemoryError("no room")
        return {"peak_bytes": 7, "of": (found, name)}

    assert memory.found_apart("no.module", setting, "step", needed) == {"peak_bytes": 7, "of": (setting, "step")}
    assert memory.found_apart("no.module", setting, "too much", needed) == {"error": "OutOfMemoryError: no room"}


# ------------------------------------------------------------------ kernels as a compiler has them


def test_the_command_shows_what_the_compiler_made(tmp_path, monkeypatch):
    loop = {"instructions": 9, **dict.fromkeys(compiled_kernels.COUNTED, 3)}
    made = {"rows": 64, "keys": 32, "warps": 4, "stages": 2, "registers": 99, "stack": 0, "shared": 2048, "programs": 5}

    def apart(module, arch, *names, variables):
        assert (module, arch, variables) == ("benchmarks.compiled_kernels", "sm_80", {"TRITON_INTERPRET": "0"})
        return {name: {**made, "loop": loop} for name in names}

    monkeypatch.setattr(compiled_kernels, "apart", apart)
    done = CliRunner().invoke(command.app, ["kernels", "--compile", "sm_80", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("kernels_sm_80-*.json")
    run = json.loads(path.read_text())
    assert len(run["rows"]) == len(compiled_kernels.CASES) == 95
    ((_, intro, header, lines),) = compiled_kernels.tables(run)
    assert "for sm_80" in intro
    assert dict(zip(header, lines[0], strict=True))["tile"] == "64 x 32"
    assert "kernels for sm_80" in done.output
    done = CliRunner().invoke(command.app, ["kernels", "--compile", "sm_1", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "sm_100a, got sm_1" in done.output


def test_a_compiler_that_fails_says_so(monkeypatch):
    monkeypatch.setattr(compiled_kernels, "apart", lambda *a, **k: {"error": "exit status 1: no room"})
    with pytest.raises(RuntimeError, match="could not be compiled for sm_80: exit status 1: no room"):
        compiled_kernels.rows_for("sm_80", compiled_kernels.CASES)
