"""The suite `scale`: processes that hold keys together are timed, counted, held to one process, and told."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from benchmarks import __main__ as command
from benchmarks import guard, problems, report, scale, scale_model, scale_tables, scale_team
from benchmarks.problems import Setting, Shape
from benchmarks.scale import Case
from benchmarks.targets import SCALE
from implicit_attention import AnchoredEnergy, Anderson, LogSumExp, solve

pytestmark = pytest.mark.slow

NUMBER = 4
#: Queries of dimension 8 are filled up to so many.
BLOCK = 16


def case(metric, queries, keys=1, dim=8, processes=(1, 2)):
    return Case(metric, Setting("gaussian", 2.0, 0.5, Shape(1, 1, queries, dim, keys)), processes)


CASES = (
    case("EVALUATION", BLOCK, 301),
    case("EVALUATION", BLOCK, 150),
    case("EVALUATION", 1, 301),
    case("SOLVE", 6, 301),
    case("TRAINING", 6, 101),
    case("COLLECTIVE", 4),
    case("COLLECTIVE", 64),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A quick run by the command, of small cases, from the file that it wrote."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale, "QUICK", CASES)
        out = tmp_path_factory.mktemp("results")
        command.measure("scale", quick=True, only=None, repeats=None, out=out)
        (path,) = out.glob("scale-partial-*.json")
        return json.loads(path.read_text())


@pytest.fixture
def rows(run):
    return run["rows"]


@pytest.fixture
def told(run):
    """The run as two cores would have told it."""
    return {**run, "rows": [{**row, "cores": 2} for row in run["rows"]]}


def medians(timings):
    return {name: timing["median"] for name, timing in timings.items()}


# ------------------------------------------------------------------ what was measured


def test_every_case_has_times_of_all_processes(rows):
    assert [row["metric"] for row in rows] == [case.metric for case in CASES]
    for row in rows:
        expected = {"2"} if row["metric"] == "COLLECTIVE" else {"1", "2", "fused"}
        assert set(row["seconds"]) == set(row["local_seconds"]) == expected
        assert all(0 <= row["local_seconds"][name]["median"] <= row["seconds"][name]["median"] for name in expected)


def test_ratios_are_quotients_of_medians(rows):
    for row in rows[:5]:
        seconds = medians(row["seconds"])
        assert row["ratios"]["sharded / fused"] == pytest.approx(seconds["1"] / seconds["fused"])
        if row["cores"] > 1:
            assert row["ratios"]["efficiency 2"] == pytest.approx(seconds["1"] / (2 * seconds["2"]))


def test_an_evaluation_sends_as_much_as_the_model_says(rows):
    for row in rows[:3]:
        for size in "12":
            found = row["evidence"][size]
            assert found["collectives"] == 1
            assert found["keys held"] == -(-row["shape"]["num_keys"] // int(size))
            sent = found["bytes"] * row["shape"]["length"] / BLOCK
            assert NUMBER * (row["shape"]["dim"] + 1) <= sent <= NUMBER * (row["shape"]["dim"] + 6)
            assert found["calls"] >= found["evaluations"] == scale.MANY + 1
            assert found["sent"] >= found["evaluations"] * found["bytes"] * row["shape"]["length"]
        assert row["ratios"]["bytes"] == row["evidence"]["2"]["bytes"]
        assert scale_tables.work_of(row).queries == BLOCK


def test_a_solve_is_right_on_all_processes(rows):
    for row in rows[3:5]:
        for size in "12":
            found = row["evidence"][size]
            assert found["converged"] == 1
            assert found["bits"]
            assert found["apart"] < 1e-5
            assert found["collectives"] == found["calls"] / found["evaluations"]
    forward, training = (row["evidence"]["2"] for row in rows[3:5])
    assert training["gradient apart"] < 1e-3
    assert training["backward bytes"] <= training["backward calls"] * rows[4]["shape"]["length"] * NUMBER * (8 + 6)
    assert training["backward calls"] > 0 == forward["backward calls"]
    assert "gradient apart" not in forward


def test_the_full_run_has_what_the_targets_ask_for():
    rows = []
    for full in scale.settings_of(False):
        ratios = {"SOLVE": {"efficiency 2": 1.0, "sharded / fused": 1.0, "collectives": 1.0}}
        ratios["EVALUATION"] = {"bytes": 280.0, **ratios["SOLVE"]}
        rows.append(scale.described(full) | {"ratios": ratios.get(full.metric, {})})
    judged = [target.judge(rows) for target in SCALE]
    assert [found["rows"] for found in judged] == [1, 2, 3, 3, 2, 2]
    assert {found["verdict"] for found in judged} == {"met"}
    assert {full.metric for full in scale.settings_of(True)} == set(scale.METRICS)
    names = [full.name for full in scale.settings_of(False)]
    assert len(set(names)) == len(names)


# ------------------------------------------------------------------ what is counted and checked


@contextmanager
def alone():
    """A team of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield scale_team.Team(0, {1: distributed.group.WORLD}, repeats=1, max_seconds=0.01)
    finally:
        distributed.destroy_process_group()


def test_collectives_are_counted_with_their_bytes():
    originals = {name: getattr(distributed, name) for name in scale_team.COLLECTIVES}
    with alone(), scale_team.counted() as traffic:
        numbers = torch.arange(6.0)
        distributed.all_reduce(numbers)
        distributed.all_reduce(tensor=numbers.double(), op=distributed.ReduceOp.MAX)
        distributed.broadcast(numbers[:2], 0)
        distributed.all_gather([torch.empty(3)], numbers[:3].clone())
    assert (traffic.calls, traffic.bytes) == (4, 6 * 4 + 6 * 8 + 2 * 4 + 3 * 4)
    assert traffic.seconds > 0
    assert {name: getattr(distributed, name) for name in scale_team.COLLECTIVES} == originals


def test_processes_that_seem_silent_are_no_result():
    with pytest.raises(RuntimeError, match="2 processes must exchange something"):
        scale.seen(scale_team.Traffic(), 2, evaluations=3)
    assert scale.seen(scale_team.Traffic(), 1, evaluations=3)["collectives"] == 0


@pytest.mark.parametrize("metric", ["SOLVE", "TRAINING"])
@pytest.mark.parametrize("wrong", [None, "keys", "gradient"])
def test_a_wrong_answer_has_no_ratio(monkeypatch, metric, wrong):
    def sharded(keys, beta, group):
        if wrong == "gradient":
            keys = keys + 0.5 * (keys - keys.detach())
        return LogSumExp(1.01 * keys if wrong == "keys" else keys, beta)

    monkeypatch.setattr(scale, "sharded", sharded)
    monkeypatch.setattr(scale_team, "TURN_SECONDS", 1e-3)
    one = case(metric, 6, 301, processes=(1,))
    with alone() as team:
        row = scale.described(one) | scale.solved(one, team)
    if wrong is None or (wrong, metric) == ("gradient", "SOLVE"):
        assert row["ratios"]["sharded / fused"] > 0
        return
    assert row["ratios"]["sharded / fused"] is None
    assert row["seconds"] == {}
    assert ("state" if wrong == "keys" else "gradient") in row["evidence"]["ours"]["error"]
    assert report.refusals({"rows": [row]})


def test_the_backward_pass_is_counted_by_itself(monkeypatch):
    class Told(torch.autograd.Function):
        @staticmethod
        def forward(ctx, keys):
            distributed.all_reduce(torch.zeros(2))
            return keys.clone()

        @staticmethod
        def backward(ctx, gradient):
            distributed.all_reduce(torch.zeros(3))
            return gradient

    monkeypatch.setattr(scale, "sharded", lambda keys, beta, group: LogSumExp(Told.apply(keys), beta))
    with alone() as team:
        found = scale.solved(case("TRAINING", 6, 101, processes=(1,)), team)["evidence"]["1"]
    assert (found["calls"], found["backward calls"], found["backward bytes"]) == (1, 1, 12)


def test_an_evaluation_of_other_keys_has_no_ratio(monkeypatch):
    monkeypatch.setattr(scale, "sharded", lambda keys, beta, group: LogSumExp(keys[..., 1:, :], beta))
    with alone() as team:
        row = scale.evaluation(case("EVALUATION", 6, 101, processes=(1,)), team)
    assert set(row["ratios"].values()) == {None}
    assert "fused" in row["evidence"]["ours"]["error"]


def test_queries_that_leave_a_budget_unused_are_refused():
    with pytest.raises(RuntimeError, match="every query must use up its 11 evaluations"):
        scale.evaluations_of(SimpleNamespace(num_evals=torch.tensor([11, 9])), 10)


@pytest.mark.parametrize(("wrong", "told"), [("status", "CONVERGED"), ("state", "float64"), (None, None)])
def test_a_solution_must_say_that_it_is_one_and_be_one(wrong, told):
    data = problems.draw(case("SOLVE", 6, 101).problem)
    energy = AnchoredEnergy(LogSumExp(data.keys, data.setting.beta), data.queries, data.setting.anchor)
    value = solve(energy, data.queries, solver=Anderson(rtol=1e-6)).value
    solution = SimpleNamespace(value=value + 0.01 * (wrong == "state"), converged=torch.tensor([wrong != "status"]))
    answer = scale.Answer(solution, None, None, scale_team.Traffic())
    with alone():
        error = scale.checked(data, answer, answer, distributed.group.WORLD).get("error")
    assert error is None if told is None else told in error


def test_other_states_on_another_process_are_found(monkeypatch):
    one = case("SOLVE", 6, 301, processes=(1,))
    monkeypatch.setattr(scale, "sharded", lambda keys, beta, group: LogSumExp(keys, beta))

    def gathers(everywhere, found, group):
        everywhere[:] = [found, (found[0] + 1e-7, None, None)]

    with alone() as team:
        monkeypatch.setattr(distributed, "all_gather_object", gathers)
        row = scale.solved(one, team)
    assert "other states" in row["evidence"]["ours"]["error"]


def test_what_is_red_is_not_timed_and_misses_its_targets(monkeypatch):
    monkeypatch.setattr(guard, "red", lambda tests: "not timed, its tests are red: FAILED x")
    rows = scale.run(scale.settings_of(False))
    assert {target.judge(rows)["verdict"] for target in SCALE} == {"missed"}
    assert scale_tables.tables({"rows": rows}) == []
    assert "FAILED x" in report.refusals({"rows": rows})[0]


def test_the_tests_that_must_be_green_exist():
    assert all((guard.ROOT / path).exists() for path in scale.TESTS)


# ------------------------------------------------------------------ print and page


def test_the_tables_hold_what_was_measured(told):
    evaluations, solves, messages = scale_tables.tables(told)
    machine, rows = scale_tables.machine_of(told), told["rows"]
    assert [line[:3] for line in evaluations.lines[:2]] == [[str(BLOCK), "301", "1"], [str(BLOCK), "301", "2"]]
    for line, row, size in zip(evaluations.lines, [row for row in rows[:3] for _ in "12"], "121212", strict=True):
        total, local = (1e3 * row[kind][size]["median"] / (scale.MANY + 1) for kind in ("seconds", "local_seconds"))
        assert line[3:6] == [f"{total:.2f}", f"{local:.2f}", f"{max(total - local, 0):.2f}"]
        assert line[-1] == f"{row['evidence'][size]['bytes']:g}"
        model = 1e3 * scale_tables.expected(row, machine, int(size)).total
        assert line[6:8] == [f"{model:.2f}", f"{total / model:.2f}"]
    assert [line[0] for line in solves.lines] == ["SOLVE", "SOLVE", "TRAINING", "TRAINING"]
    assert [line[:2] for line in messages.lines] == [["128", "2"], ["2048", "2"]]


def test_processes_that_share_cores_are_told_and_share_the_local_work(rows):
    row = {**rows[0], "cores": 1}
    machine = scale_model.Cluster("m", 1e9, 1e9, 1e-4, 1e9)
    alone, shared = (scale_tables.expected(row | {"cores": cores}, machine, 2) for cores in (2, 1))
    assert shared.local == pytest.approx(2 * alone.local)
    assert shared.collective == alone.collective
    assert "(2 on 1 cores)" in scale_tables._efficiency(row, 2)


def test_the_model_of_a_row_is_local_work_and_the_messages_that_were_counted(rows):
    found = {"sent": 3000, "calls": 15, "evaluations": 10}
    row = {**rows[0], "cores": 4, "evidence": {"2": found, "4": found}}
    machine = scale_model.Cluster("m", 1e9, 1e9, 1e-4, 1e6)
    two, four = (scale_tables.expected(row, machine, count) for count in (2, 4))
    assert two.local == pytest.approx(0.5 * (4 * BLOCK * 301 * 8 / 1e9 + 4 * 301 * 8 / 1e9))
    assert two.collective == pytest.approx(1.5 * (1e-4 + 200 / 1e6)), "a swap"
    assert four.collective == pytest.approx(1.5 * 6 * (1e-4 + 200 / 4 / 1e6)), "a ring"


def test_all_reduces_of_processes_that_share_cores_tell_nothing_of_the_network(told):
    assert scale_tables.machine_of(told) is not None
    assert scale_tables.machine_of({"rows": [{**row, "cores": 1} for row in told["rows"]]}) is None


def test_a_run_that_tells_too_little_has_tables_without_a_model(run, rows):
    assert scale_tables.machine_of({"rows": rows[:2]}) is None
    (table,) = scale_tables.tables({"rows": rows[:2]})
    assert {line[6] for line in table.lines} == {"-"}


def test_the_page_is_what_the_newest_run_says(tmp_path):
    text = scale.PAGE.read_text()
    copy = tmp_path / "page.md"
    copy.write_text(text)
    scale.rewrite(copy)
    assert copy.read_text() == text
    assert (scale.PAGE.parent / scale_tables.FIGURE).exists()


def test_the_page_tells_a_run_and_whether_the_machine_was_busy(told, tmp_path):
    copy = tmp_path / "page.md"
    copy.write_text(scale.PAGE.read_text())
    scale.rewrite(copy, tmp_path)
    assert "Not run yet." in copy.read_text()
    where = {**told["environment"], "load_average_at_start": [3.0, 1.0, 1.0]}
    path = report.write({**told, "complete": True, "environment": where}, tmp_path)
    scale.rewrite(copy, tmp_path)
    text = copy.read_text()
    assert path.name in text
    assert "Load average 3.0" in text
    assert "Not run yet." not in text
    assert (tmp_path / scale_tables.FIGURE).stat().st_size > 10_000
    assert text.count("| measured: one core") == 1 + len(scale_tables.SHOWN)
    _, lines = scale_tables.measured_table(told)
    assert len(lines) == sum(row["metric"] != "COLLECTIVE" for row in told["rows"])
    assert all(f"| {' | '.join(line)} |" in text for line in lines)
    readme = tmp_path / "README.md"
    readme.write_text(report.README.read_text())
    report.rewrite("scale", scale.NOTES, **command.options_of(scale), readme=readme, folder=tmp_path)
    text = readme.read_text()
    assert f"From `{tmp_path.name}/{path.name}`" in text
    for table in scale_tables.tables(told):
        assert all(f"| {' | '.join(line)} |" in text for line in table.lines)


def test_the_simulation_of_the_page_is_that_of_the_model():
    header, lines = scale_tables.simulated_table()
    assert [line[1] for line in lines] == ["10", "100", "1,000"] * 2
    work, cluster = scale_tables.LARGE, scale_model.ASSUMED[1]
    found = scale_model.simulated(work, cluster, 1000, "ring")
    alone = scale_model.simulated(work, cluster, 1, "ring")
    assert lines[-1][header.index("collective, ms, ring")] == scale_tables.milliseconds(found.collective)
    assert lines[-1][header.index("efficiency, ring")] == f"{alone.total / 1000 / found.total:.2f}"
    assert scale_tables.milliseconds(19.0987) == "19,099"
    assert scale_tables.milliseconds(1.5e-4) == "0.15"
