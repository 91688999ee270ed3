"""The suite `native`: short calls, threads, neighbours and instruction sets are checked, measured and told."""

import dataclasses
import json
import os
import subprocess
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import implicit_attention as ia
from benchmarks import guard, measure, native, native_layers, native_tables, problems, report
from benchmarks.environment import environment
from benchmarks.problems import Setting, Shape
from benchmarks.targets import NATIVE

SMALL = Setting("gaussian", 1.0, 0.5, Shape(1, 2, 12, 8), seed=3)
WIDE = dataclasses.replace(SMALL, shape=Shape(1, 2, 72, 8))
DECODE = dataclasses.replace(SMALL, shape=Shape(1, 2, 1, 8, num_keys=70))
CASES = [
    *(native.Case("SHORT", problem) for problem in (SMALL, WIDE, DECODE)),
    *(native.Case(metric, WIDE) for metric in ("THREADS", "CONTENDED", "NEIGHBOUR")),
    native.Case("SETS", WIDE, "off"),
    native.Case("LAYER", SMALL),
]
two_cores = pytest.mark.skipif(native.unable("THREADS") is not None, reason=str(native.unable("THREADS")))


@pytest.fixture(scope="module")
def rows():
    """One row of every kind; the children of CONTENDED and SETS measure theirs in this process."""

    def apart(module, *arguments, variables=None):
        assert module == "benchmarks.native"
        printed = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "sched_setaffinity", lambda process, cores: None, raising=False)
            patch.setattr("builtins.print", printed.append)
            patch.setattr(native, "native_status", lambda: None)
            patch.delenv("IMPLICIT_ATTENTION_NATIVE", raising=False)
            native.main(*arguments)
        return json.loads(printed[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "unable", lambda metric: None)
        patch.setattr(native, "apart", apart)
        patch.setattr(native, "TURNS_PER_ROUND", 3)
        if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
            patch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
        return native.run(CASES, repeats=1, max_seconds=0.1)


@pytest.fixture
def run(rows):
    options = {"metrics": list(native.METRICS), "repeats": 1}
    where = {**environment(), "native": "avx2"}
    return report.document("native", rows, NATIVE, complete=True, quick=False, options=options, where=where)


def medians(clock):
    return {name: timing["median"] for name, timing in clock.items()}


# ------------------------------------------------------------------ rows


@pytest.mark.slow
def test_every_metric_is_measured_with_its_evidence(rows):
    assert [row["metric"] for row in rows] == [case.metric for case in CASES]
    for row in rows:
        assert not [found["error"] for found in row["evidence"].values() if "error" in found]
        assert set(row["ratios"]) <= set(native.NAMES[row["metric"]])
        assert all(value is not None and value > 0 for value in row["ratios"].values())
        assert all(part["converged"] == 1 for part in row["evidence"].values() if "converged" in part)
    for row in rows[:3]:
        ours = row["evidence"]["ours"]
        assert ours["status"] == {"CONVERGED": row["shape"]["batch"] * row["shape"]["heads"] * row["shape"]["length"]}
        assert ours["output_error"] < 1e-5
        assert ours["gradient_error"] < 1e-3


@pytest.mark.slow
def test_short_calls_are_compared_by_process_time(rows):
    row = rows[1]
    process, wall = medians(row["process_seconds"]), medians(row["seconds"])
    assert set(process) == set(wall)
    for name, (above, below) in native.SHORT.items():
        assert row["ratios"][name] == pytest.approx(process[above] / process[below])
        assert row["wall_ratios"][name] == pytest.approx(wall[above] / wall[below])


@pytest.mark.slow
def test_layers_are_compared_with_the_same_layer_of_one_step(rows):
    row = rows[7]
    process, found = medians(row["process_seconds"]), row["evidence"]["ours"]
    for name, (above, below) in native_layers.PAIRS.items():
        assert row["ratios"][name] == pytest.approx(process[above] / process[below])
    assert found["explicit_error"] < 1e-6
    assert found["gradient_error"] < 1e-3
    assert row["ratios"]["frames of a call"] <= 90


def test_a_layer_that_answers_wrongly_is_not_timed(monkeypatch):
    evidence = native_layers.evidence
    monkeypatch.setattr(native_layers, "evidence", lambda ours, *given: evidence(wrong(ours), *given))

    def wrong(layer):
        with torch.no_grad():
            layer.v_proj.weight += 0.1
        return layer

    (row,) = native.run([native.Case("LAYER", SMALL)], repeats=1, max_seconds=0.01)
    assert set(row["ratios"].values()) == {None}
    assert "wrong" in row["evidence"]["ours"]["error"]


def test_a_row_leaves_the_threads_as_they_were(monkeypatch):
    usual = torch.get_num_threads()
    monkeypatch.setitem(native.MEASURES, "THREADS", lambda case, **options: torch.set_num_threads(3) or {"ratios": {}})
    monkeypatch.setattr(native, "unable", lambda metric: None)
    native.run([native.Case("THREADS", SMALL)], repeats=1)
    assert torch.get_num_threads() == usual


@pytest.mark.slow
def test_threads_and_neighbours_are_quotients_of_medians(rows):
    speed, contended, neighbour = (medians(row["seconds"]) for row in rows[3:6])
    for label, name in native.THREADED.items():
        assert rows[3]["ratios"][label] == pytest.approx(speed[f"{name}, 1"] / speed[f"{name}, 2"])
        assert rows[4]["ratios"][label] == pytest.approx(contended[f"{name}, 2"] / contended[f"{name}, 1"])
        assert rows[5]["ratios"][label] == pytest.approx(neighbour[f"{name}, beside"] / neighbour[f"{name}, alone"])


@pytest.mark.slow
def test_an_evaluation_is_the_slope_between_two_budgets(rows):
    seconds = medians(rows[6]["seconds"])
    # No query rests before its budget is used, so that the budgets differ by as many evaluations.
    slope = (seconds[f"{native.MANY}"] - seconds[f"{native.FEW}"]) / (native.MANY - native.FEW)
    assert rows[6]["ratios"]["evaluation"] == pytest.approx(slope / seconds["sdpa_forward"], rel=0.2)
    assert rows[6]["implementation"] == environment().get("native")


def test_a_forced_set_reaches_the_process_that_is_measured(monkeypatch):
    seen = []

    def apart(module, *arguments, variables):
        seen.append(variables)
        return {"error": "exit status 1: no such set"}

    monkeypatch.setattr(native, "apart", apart)
    (row,) = native.run([native.Case("SETS", SMALL, "avx512")], repeats=1)
    assert seen == [{"IMPLICIT_ATTENTION_NATIVE": "avx512"}]
    assert row["ratios"] == {"evaluation": None, "solve": None, "training": None}
    assert row["evidence"]["ours"]["error"] == "not measured: exit status 1: no such set"
    assert "no such set" in native_tables.tables({"rows": [row]})[0].lines[0][-1]


@pytest.mark.parametrize(("forced", "answers"), [("avx2", None), ("avx2", "avx512"), ("off", "avx512")])
def test_what_was_forced_must_answer(monkeypatch, forced, answers):
    status = SimpleNamespace(isa=answers)
    monkeypatch.setenv("IMPLICIT_ATTENTION_NATIVE", forced)
    monkeypatch.setattr(native, "native_status", lambda: status)
    with pytest.raises(RuntimeError, match=f"'{forced}' was forced"):
        native.by_set(native.Case("SETS", SMALL), repeats=1, max_seconds=0.1)


def test_a_contended_process_is_pinned_to_one_core(monkeypatch, capsys):
    pinned = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 5}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: pinned.append(cores), raising=False)
    monkeypatch.setattr(native, "threads", lambda case, **options: {"pinned": len(pinned), **options})
    native.main("CONTENDED", json.dumps(dataclasses.asdict(DECODE)), "3", "0.5")
    assert pinned == [{2}]
    found = json.loads(capsys.readouterr().out)
    assert found == {"pinned": 1, "repeats": 3, "max_seconds": 0.5, "guarded": False}


def test_where_there_is_one_core_threads_are_not_measured(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
    (row,) = native.run([native.Case("NEIGHBOUR", SMALL)], repeats=1)
    assert row["ratios"] == {}
    assert "two cores are needed, got 1" in row["evidence"]["ours"]["error"]
    assert {target.judge([row])["verdict"] for target in NATIVE} == {"not measured"}
    assert "two cores" in native_tables.tables({"rows": [row]})[0].lines[0][-1]


def test_what_is_red_is_not_timed_and_misses_its_targets(monkeypatch):
    monkeypatch.setattr(guard, "red", lambda tests: "not timed, its tests are red: FAILED x")
    wanted = [case for case in native.settings_of(False) if case.metric in ("SHORT", "LAYER", "NEIGHBOUR")]
    made = native.run(wanted, repeats=1)
    assert {target.judge(made)["verdict"] for target in NATIVE} == {"missed"}
    assert not any(row["seconds"] for row in made)
    assert "FAILED x" in json.dumps(native_tables.tables({"rows": made}))


def test_the_tests_that_must_be_green_exist():
    assert all((guard.ROOT / path).exists() for path in native.TESTS)


# ------------------------------------------------------------------ evidence


def attention(query, keys, values, *, return_solution=False, wrong=None, **options):
    """Equilibrium attention, but for what is `wrong`; the explicit call is right."""
    if options.get("max_steps") == 0:
        return ia.equilibrium_attention(query, keys, values, **options)
    if wrong == "tolerance":
        options["solver"] = ia.Anderson(rtol=1e-2)
    output, solution = ia.equilibrium_attention(query, keys, values, return_solution=True, **options)
    if wrong == "output" and not return_solution:
        output = output * 1.001
    if wrong == "gradient":
        output = output + 0.1 * (keys - keys.detach()).sum()
    if wrong == "status":
        status = solution.status.clone()
        status[0, 0, 0] = ia.Status.MAX_STEPS
        solution = SimpleNamespace(value=solution.value, num_evals=solution.num_evals, status=status)
    return (output, solution) if return_solution else output


@pytest.mark.parametrize("wrong", ["output", "gradient", "status", "tolerance"])
def test_a_wrong_answer_has_no_ratio(monkeypatch, wrong):
    monkeypatch.setattr(native, "equilibrium_attention", partial(attention, wrong=wrong))
    monkeypatch.setattr(native, "TURNS_PER_ROUND", 1)
    (row,) = native.run([native.Case("SHORT", SMALL)], repeats=1, max_seconds=0.01)
    assert row["ratios"]["forward"] is None
    assert row["ratios"]["training"] is None
    assert "ours_forward" not in row["seconds"]
    assert "wrong" in row["evidence"]["ours"]["error"]
    assert row["ratios"]["explicit"] > 0
    assert native_tables.tables({"rows": [row]})[0].lines[0][2] == "-"


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_wrong_gradient_is_noticed(part):
    data = problems.draw(DECODE)
    values = torch.randn(data.keys.shape, generator=torch.Generator().manual_seed(1))
    leaves = [t.clone().requires_grad_() for t in (data.queries, data.keys, values)]
    output, solution = ia.equilibrium_attention(*leaves, return_solution=True, solver=ia.Anderson(rtol=1e-6))
    gradients = list(torch.autograd.grad((output * data.cotangent).sum(), leaves))
    assert native.gradient_error(data, values, solution.value, gradients) < 1e-4
    gradients[part] = 1.02 * gradients[part]
    assert native.gradient_error(data, values, solution.value, gradients) == pytest.approx(0.02, rel=0.05)


def test_the_gradient_agrees_with_unrolled_iterations():
    data = problems.draw(SMALL)
    queries, keys = (t[-1:, -1:].double().requires_grad_() for t in (data.queries, data.keys))
    values = torch.randn(keys.shape, dtype=torch.float64, requires_grad=True)
    z = queries
    for _ in range(3000):
        z = 0.5 * queries + 0.5 * F.scaled_dot_product_attention(z, keys, keys)
    output = F.scaled_dot_product_attention(z, keys, values)
    exact = torch.autograd.grad((output * data.cotangent[-1:, -1:]).sum(), (queries, keys, values))
    assert native.gradient_error(data, values.detach(), z.detach(), list(exact)) < 1e-9


def test_what_is_read_out_is_held_to_float64():
    data = problems.draw(DECODE)
    values = torch.randn(data.keys.shape, generator=torch.Generator().manual_seed(1))
    output = F.scaled_dot_product_attention(data.queries, data.keys, values)
    assert native.output_error(data, values, data.queries, output) < 1e-6
    assert native.output_error(data, values, data.queries, 1.01 * output) == pytest.approx(0.01, rel=1e-3)


def test_keys_of_another_number_are_drawn_as_before():
    data = problems.draw(DECODE)
    assert data.queries.shape == data.cotangent.shape == (1, 2, 1, 8)
    assert data.keys.shape == (1, 2, 70, 8)
    clustered = problems.draw(dataclasses.replace(DECODE, keys="clustered"))
    assert clustered.keys.shape == (1, 2, 70, 8)
    generator = torch.Generator().manual_seed(SMALL.seed)
    drawn = [torch.randn(1, 2, 12, 8, generator=generator) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(drawn, problems.draw(SMALL)[1:], strict=True))
    assert problems.setting_of(json.dumps(dataclasses.asdict(DECODE))) == DECODE


# ------------------------------------------------------------------ clocks and processes


def test_both_clocks_are_read(monkeypatch):
    called = []

    def sleeps():
        called.append(0)
        time.sleep(0.004)

    process, wall = measure.interleaved_clocks({"sleeps": sleeps}, rounds=5, turn_seconds=0.01)
    assert wall["sleeps"].turns == process["sleeps"].turns == 5
    assert wall["sleeps"].median >= 0.004
    assert process["sleeps"].median < wall["sleeps"].median / 2
    many = len(called)
    called.clear()
    _, wall = measure.interleaved_clocks({"sleeps": sleeps}, rounds=50, max_seconds=0.03, turn_seconds=0.01)
    assert wall["sleeps"].turns < 10
    assert len(called) < many + 15


def test_of_many_turns_the_quartiles_are_kept():
    assert measure.quartiles([5.0, 1.0, 3.0, 2.0, 400.0]) == measure.Timing(3.0, 2.0, 5.0, 5)
    assert measure.quartiles([7.0]) == measure.Timing(7.0, 7.0, 7.0, 1)


def test_turns_go_round():
    called = []
    functions = {name: lambda name=name: called.append(name) or time.sleep(0.002) for name in "ab"}
    measure.interleaved_clocks(functions, rounds=3, turn_seconds=0.001)
    assert "".join(called)[-4:] == "abab"


def test_another_process_answers_with_its_variables_or_its_error(tmp_path, monkeypatch):
    (tmp_path / "child.py").write_text(
        "import json, os, sys\nprint(json.dumps([sys.argv[1:], os.environ['GIVEN']]))\nassert sys.argv[1] == 'a'\n"
    )
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    assert measure.apart("child", "a", "b", variables={"GIVEN": "x"}) == [["a", "b"], "x"]
    assert "AssertionError" in measure.apart("child", "c", variables={"GIVEN": "x"})["error"]


@two_cores
def test_the_neighbour_spins_when_told_and_is_ended(monkeypatch):
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    def ticks():
        fields = Path(f"/proc/{started[0].pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    def waits(changes):
        before, end = ticks(), time.monotonic() + 10
        while changes and ticks() < before + 3 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)
        return ticks() - before

    monkeypatch.setattr(native.subprocess, "Popen", Popen)
    with native.spinning() as wake:
        wake(False)
        time.sleep(0.05)
        assert waits(changes=False) == 0
        wake(True)
        assert waits(changes=True) >= 3
        wake(False)
        time.sleep(0.05)
        assert waits(changes=False) == 0
    assert started[0].returncode is not None


# ------------------------------------------------------------------ targets and print


def test_every_target_has_its_rows_in_the_full_run():
    made = [
        {
            "metric": case.metric,
            **dataclasses.asdict(case.problem),
            "ratios": dict.fromkeys(native.NAMES[case.metric], 9.0),
        }
        for case in native.settings_of(False)
    ]
    assert [target.judge(made)["rows"] for target in NATIVE] == [1, 1, 1, 1, 1, 2, 1, 3, 3, 3, 3, 6, 1, 1]
    assert {case.metric for case in native.settings_of(True)} == set(native.METRICS)
    assert len({case.name for case in native.settings_of(False)}) == len(native.settings_of(False))
    assert native.settings_of(False)[-1].native == "off"


@pytest.mark.slow
def test_the_tables_hold_what_was_measured(run, rows):
    short, layers, threads, sets = native_tables.tables(run)
    assert [line[0] for line in short.lines] == ["H 2, N = M = 12", "H 2, N = M = 72", "H 2, N 1, M 70"]
    assert short.lines[1][1:5] == [report.number(rows[1]["ratios"][name]) for name in native.SHORT]
    assert short.lines[0][5] == report.number(rows[0]["wall_ratios"]["explicit"])
    assert [line[2:6] for line in threads.lines] == [
        [report.number(row["ratios"][label]) for label in native.THREADED] for row in rows[3:6]
    ]
    assert sets.lines[0][:2] == ["off", report.number(rows[6]["ratios"]["evaluation"])]
    (layer,) = layers.lines
    assert layer[0] == "H 2, N 12, width 16"
    assert layer[1:11] == [report.number(rows[7]["ratios"][name]) for name in native_layers.NAMES]
    assert "avx2" in report.machine(run)
    assert json.loads(json.dumps(run)) == run


@pytest.mark.slow
def test_a_run_that_does_not_say_what_answered_is_told_as_before(run):
    where = {key: value for key, value in run["environment"].items() if key != "native"}
    assert report.machine({**run, "environment": where}) == report.machine(run).replace("; avx2", "")
