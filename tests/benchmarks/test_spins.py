"""The suite `spins` runs, checks what it times without the library, and counts what fails."""

import dataclasses
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import (  # noqa: E402
    by_hand,
    report,
    spin_baseline,
    spin_random,
    spin_scaling,
    spin_small,
    spin_timed,
    spin_verdict,
    spins,
)
from benchmarks.environment import environment  # noqa: E402
from benchmarks.spin_problems import (  # noqa: E402
    FIELDS,
    Many,
    Sized,
    Timed,
    draw,
    one_system,
    random_systems,
)
from benchmarks.spin_small import Frames, Small  # noqa: E402
from benchmarks.targets import SPINS  # noqa: E402
from implicit_attention.spins import DynamicalMethod, GaussianClosure, SaddlePoint, SpinSystem, TransferMatrix  # noqa: E402

TINY = Timed(1.0, batch=2, sites=12, dim=5)
SETTINGS = [
    TINY,
    dataclasses.replace(TINY, dtype="float32"),
    Sized("SaddlePoint()", (8, 16)),
    Sized("Enumeration()", (4,)),
    Many("SaddlePoint()", 4, per_group=8),
    Many("Bethe()", 2, per_group=2),
    Small("MeanField()", 1, 6, 4),
    Small("TAP()", 2, 5, 3),
    Frames(3, sites=4),
]


@pytest.fixture(scope="module")
def rows():
    return spins.run(SETTINGS, repeats=1, max_seconds=0.2)


@pytest.fixture
def run(rows):
    options = {"metrics": list(spins.METRICS), "repeats": 1}
    where = environment()
    return report.document("spins", rows, SPINS, complete=True, quick=False, options=options, where=where)


@pytest.mark.slow
def test_every_setting_has_its_row_with_evidence(rows):
    assert [row["name"] for row in rows] == [setting.name for setting in SETTINGS]
    assert [row["metric"] for row in rows] == [setting.metric for setting in SETTINGS]
    for row, bound in zip(rows[:2], (1e-8, 1e-3), strict=True):
        assert set(row["seconds"]) == {*spin_timed.CONTENDERS, "matrices"}
        assert {*spin_timed.RATIOS, "C6 failures"} == set(row["ratios"])
        assert all(value > 0 for name, value in row["ratios"].items() if name != "C6 failures")
        for name in ("ours", "inverses", "inverses_guess", "inverses_constant"):
            found = row["evidence"][name]
            assert max(found["residual_max"], found["gradient_error"], found["value_error"]) < bound
        assert row["evidence"]["ours"]["failed"] == row["evidence"]["inverses"]["failed"] == 0
    assert [point["sites"] for point in rows[2]["evidence"]["points"]] == [8, 16]
    assert rows[4]["evidence"]["systems"] == 32
    assert rows[4]["ratios"] == {"failures": 0.0}
    assert rows[4]["evidence"]["largest_length_error"] < 1e-8
    assert rows[5]["evidence"]["refused"] == 2
    by_hand = {"forward / by hand", "forward / by hand, evidence"}
    assert set(rows[6]["ratios"]) == by_hand | {"forward / published", "forward / published, evidence"}
    assert set(rows[7]["ratios"]) == by_hand
    for row in rows[6:8]:
        assert all(value > 0 for value in row["ratios"].values())
        assert 0 < row["evidence"]["ours"]["residual"] < 1e-10
    assert rows[8]["ratios"]["frames, D 3"] > 1000


def test_the_ratio_is_that_of_the_medians(rows):
    seconds = {name: timing["median"] for name, timing in rows[0]["seconds"].items()}
    assert rows[0]["ratios"]["C6"] == pytest.approx(seconds["inverses"] / seconds["ours"])


def test_metrics_that_are_not_wanted_are_left_out():
    assert [row["metric"] for row in spins.run(SETTINGS[3:4] + SETTINGS[5:], metrics=["SCALING"])] == ["SCALING"]


# ------------------------------------------------------------------ what answers are checked by


def test_the_reference_has_the_slopes_of_its_free_energy():
    data = draw(TINY)
    truth = spin_baseline.reference(data)
    inputs, ways = data[1:], [torch.randn_like(t) for t in data[1:]]
    ways[1] = ways[1] + ways[1].mT
    slope = sum((way * gradient).sum() for way, gradient in zip(ways, truth.gradients, strict=True))

    def free(step):
        field, couplings, beta = (t + step * way for t, way in zip(inputs, ways, strict=True))
        return spin_baseline.reference(data._replace(field=field, couplings=couplings, beta=beta)).free_energy.sum()

    difference = (8 * (free(1e-4) - free(-1e-4)) - (free(2e-4) - free(-2e-4))) / 12e-4
    torch.testing.assert_close(slope, difference, rtol=1e-8, atol=1e-8)


def test_a_wrong_answer_is_noticed():
    data = draw(TINY)
    truth = spin_baseline.reference(data)
    assert spin_baseline.evidence(data, truth, truth)["residual_max"] < 1e-12
    for index in range(3):
        off = list(truth.gradients)
        off[index] = 1.01 * off[index]
        found = spin_baseline.evidence(data, truth._replace(gradients=tuple(off)), truth)
        assert found["gradient_error"] == pytest.approx(0.01)
    off = truth._replace(free_energy=1.01 * truth.free_energy)
    assert spin_baseline.evidence(data, off, truth)["value_error"] == pytest.approx(0.01)


def test_a_wrong_answer_is_not_timed_and_misses_its_targets(monkeypatch):
    monkeypatch.setattr(spin_timed, "METHOD", SaddlePoint(shared=True))
    (row,) = spins.run([TINY], repeats=1, max_seconds=0.1)
    assert "wrong" in row["evidence"]["ours"]["error"]
    assert "ours" not in row["seconds"]
    assert row["ratios"]["C6"] is None
    verdicts = [target.judge([row]) for target in SPINS if target.ratio == "C6"]
    assert {(verdict["verdict"], verdict["wrong"]) for verdict in verdicts} == {("missed", 1)}


def test_the_rival_starts_where_the_library_does_and_stops_where_it_is_told():
    data = draw(TINY)
    problem = spin_baseline.Convex.of(*data[1:])
    ours = SaddlePoint()._problem(SpinSystem(data.couplings, data.field, data.beta))[0]
    cold = type(ours)(ours.couplings / 100, ours.field, ours.tie, ours.live)
    rival = spin_baseline.Convex(problem.couplings / 100, problem.field)
    torch.testing.assert_close(rival.start(), cold.start())
    for tolerance in (1e-2, 1e-10):
        found = spin_baseline.newton(problem, tolerance)
        excess = problem.moments(found.multipliers)[2].abs().amax()
        assert found.solved
        assert excess <= tolerance
    assert spin_baseline.newton(problem, 1e-10).steps > spin_baseline.newton(problem, 1e-2).steps


def test_a_rival_that_cannot_reach_its_tolerance_says_so():
    assert not spin_baseline.newton(spin_baseline.Convex.of(*draw(TINY)[1:]), 0.0).solved


def test_lengths_are_checked_by_an_explicit_inverse(monkeypatch):
    system = random_systems(Many("SaddlePoint()", 1, per_group=4))[0]
    for method in (SaddlePoint(), SaddlePoint(shared=True)):
        assert float(spin_random.lengths_off(system, method).max()) < 1e-8
    found = SaddlePoint().multipliers(system)
    for factor, least in ((1.01, 1e-3), (-1.0, float("inf"))):
        monkeypatch.setattr(SaddlePoint, "multipliers", lambda self, system, factor=factor: factor * found)
        assert float(spin_random.lengths_off(system, SaddlePoint()).min()) >= least


def test_a_wrong_answer_that_calls_itself_converged_counts_as_a_failure(monkeypatch):
    right = SaddlePoint.multipliers
    monkeypatch.setattr(SaddlePoint, "multipliers", lambda self, system: 1.01 * right(self, system))
    row = spin_random.measured(Many("SaddlePoint()", 1, per_group=4))
    assert row["evidence"]["failed"] == 0
    assert row["ratios"]["failures"] == 4.0
    target = next(target for target in SPINS if target.id == "RANDOM")
    assert target.judge([row])["verdict"] == "missed"


def test_a_length_that_is_off_by_more_than_the_tolerance_counts_as_a_failure(monkeypatch):
    def above(system, method):
        return 1.01 * method.log_partition(system).report.tolerance

    monkeypatch.setattr(spin_random, "lengths_off", above)
    assert spin_random.measured(Many("SaddlePoint()", 1, per_group=4))["ratios"]["failures"] == 4.0


@pytest.mark.slow
def test_loops_by_hand_end_where_the_forward_does():
    system = spin_small.glass((3,), 7, 4, 1)
    for method in spin_small.METHODS.values():
        f = method.problem(system).fixed_point_map
        functions, found = spin_small.compared(method, system, f)
        assert "anderson" in functions
        answer = method.answer(system)
        for name in set(functions) & set(spin_small.LOOPS):
            z, evaluations = functions[name]()
            assert evaluations == found[f"{name} evaluations"]
            assert spin_small.residual(f(z), z) <= found["residual"]
            torch.testing.assert_close(method.magnetization_at(system, z), answer.magnetization, rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(functions["ours"](), answer.magnetization, rtol=0, atol=0)


@pytest.mark.slow
def test_loops_with_evidence_say_where_each_sample_ended():
    system = spin_small.glass((3,), 7, 4, 1)
    for method in spin_small.METHODS.values():
        f = method.problem(system).fixed_point_map
        functions, found = spin_small.compared(method, system, f)
        answer = method.answer(system)
        assert "anderson, evidence" in functions
        for name in set(functions) & set(spin_small.WITH_EVIDENCE):
            ends = functions[name]()
            assert ends.converged.all()
            assert not ends.active.any()
            assert int(ends.evaluations.max()) == found[f"{name} evaluations"]
            assert len(set(ends.evaluations.tolist())) > 1
            mapped = f(ends.value)
            sizes = torch.linalg.vector_norm((mapped - ends.value).flatten(-2), dim=-1)
            np.testing.assert_allclose(ends.residual, sizes, rtol=0.1, atol=1e-14)
            assert spin_small.residual(mapped, ends.value) <= 1.01 * found["residual"]
            m = method.magnetization_at(system, ends.value)
            torch.testing.assert_close(m, answer.magnetization, rtol=1e-8, atol=1e-9)


def test_a_loop_with_evidence_keeps_the_samples_that_have_ended():
    z = torch.ones(3, 2, 1, dtype=torch.float64)
    rate = torch.tensor([0.1, 0.9, 1.0], dtype=torch.float64)[:, None, None]
    ends = by_hand.plain(lambda z: rate * z + 1, z, 1e-3, most=80, atol=0.0)
    assert ends.converged.tolist() == [True, True, False]
    assert ends.active.tolist() == [False, False, True]
    for i, rest in enumerate((0.1, 0.9)):
        single = by_hand.plain(lambda z, rest=rest: rest * z + 1, z[:1], 1e-3, most=80, atol=0.0)
        torch.testing.assert_close(ends.value[i : i + 1], single.value, rtol=0, atol=0)
        assert ends.evaluations[i] == single.evaluations[0] < 80


def test_the_published_formula_is_the_law_of_large_d():
    system = spin_small.glass((2,), 6, 5, 0, radius="bessel")
    m = 0.3 * torch.randn(2, 6, 5, dtype=torch.float64)
    method = spin_small.PUBLISHED["MeanField()"]
    expected = method.problem(system).fixed_point_map(m)
    torch.testing.assert_close(spin_small.published(system)(m), expected, rtol=1e-14, atol=1e-15)


def test_a_loop_that_does_not_get_there_is_no_rival():
    assert spin_small.plain(lambda z: 1 - z, torch.ones(1, 2, 1), 1e-3) is None
    assert spin_small.anderson(lambda z: z * torch.nan, torch.ones(1, 2, 1), 1e-3) is None
    assert spin_small.plain(lambda z: z / 2 + 1, torch.ones(1, 2, 1), 1e-3)[1] > 5


# ------------------------------------------------------------------ the systems


def test_random_systems_are_as_they_are_described():
    systems = random_systems(Many("SaddlePoint()", spin_random.GROUPS))
    assert sum(system.field.shape[0] for system in systems) == 1000
    assert {system.dim for system in systems} == {1, 3, 8}
    sites = [system.num_sites for system in systems]
    assert 2 <= min(sites) <= 4
    assert 60 <= max(sites) <= 64
    betas = torch.cat([system.beta for system in systems])
    assert 0.01 <= float(betas.min()) < 0.02
    assert 50 < float(betas.max()) <= 100
    assert abs(float(betas.log10().mean())) < 0.1
    for system in systems:
        assert torch.equal(system.couplings, system.couplings.mT)
    diagonals = [bool((s.couplings.diagonal(dim1=-2, dim2=-1) != 0).any()) for s in systems]
    assert diagonals[0::2] == [True] * (len(systems) // 2)
    assert diagonals[1::2] == [False] * (len(systems) // 2)
    strengths = torch.cat([system.field.square().mean((-2, -1)).sqrt() for system in systems])
    assert float((strengths == 0).double().mean()) == 1 / len(FIELDS)
    again = random_systems(Many("Bethe()", 2))
    assert torch.equal(again[1].couplings, systems[1].couplings)


def test_every_method_has_a_system_it_can_treat():
    for case in spin_scaling.CASES.values():
        case.method.check(one_system(case.sizes[0], case.dim, chain=case.chain))
    with pytest.raises(ValueError, match="neighbours"):
        TransferMatrix().check(one_system(8, 1, chain=False))


def test_the_exponent_is_the_slope_of_what_is_slow():
    points = [{"sites": n, "seconds": 1e-7 * n**2.5} for n in (32, 64, 128, 256, 512)]
    assert spin_scaling.exponent(points) == pytest.approx(2.5)
    points[0]["seconds"] = points[1]["seconds"] = 10.0
    assert spin_scaling.exponent(points) == pytest.approx(2.5)
    assert spin_scaling.exponent(points[:3]) is None
    assert spin_scaling.exponent([{**point, "seconds": 1e-4} for point in points]) is None


def test_a_size_that_would_take_too_long_is_left_out():
    row = spin_scaling.measured(Sized("SaddlePoint()", (8, 16, 32)), repeats=1, max_seconds=0.1, cap=1e-6)
    assert [point["sites"] for point in row["evidence"]["points"]] == [8]
    assert set(row["evidence"]["left_out"]) == {"16", "32"}
    assert "cap" in row["evidence"]["left_out"]["16"]


def test_other_methods_stop_when_their_time_is_up():
    row = spin_random.measured(Many("MeanField()", 3, per_group=2, cap_seconds=0.0))
    assert row["evidence"]["systems"] + row["evidence"]["skipped"] == 6
    assert row["evidence"]["skipped"] >= 4
    assert row["ratios"] == {}


# ------------------------------------------------------------------ the report


def test_the_table_of_graphs_has_a_row_that_is_refused():
    refused = {"name": "Bethe()", "evidence": {}, "seconds": {}, "ratios": spins.REFUSED["GRAPHS"]}
    assert spins.tables({"rows": [{**refused, "metric": "GRAPHS"}]})[0].lines[0].count("-") == 12


def test_tables_hold_what_was_measured(run, tmp_path):
    console = Console(width=250, record=True, file=io.StringIO())
    report.show(run, spins.NOTES, console, spins.tables)
    shown = console.export_text()
    for text in ("1, float32", "SaddlePoint(), 8", "Enumeration(), 1", "failures of the saddle point", "32", "TAP()"):
        assert text in shown
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- results of spins -->\nold\n<!-- end of spins -->\nafter\n")
    path = report.write(run, tmp_path / "results")
    assert json.loads(path.read_text())["rows"] == json.loads(json.dumps(run["rows"]))
    options = {"tables": spins.tables, "readme": readme, "folder": tmp_path / "results"}
    assert report.rewrite("spins", spins.NOTES, **options) == path
    text = readme.read_text()
    assert "old" not in text
    assert "| SaddlePoint() | 32 | 0 (0.0 %) | 0 |" in text
    assert "| 1, float64 |" in text


@pytest.mark.slow
def test_the_command_runs_the_metrics_that_it_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(spins, "settings_of", lambda quick: tuple(SETTINGS))
    done = CliRunner().invoke(command.app, ["spins", "--quick", "--only", "random", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("spins-partial-*.json")
    written = json.loads(path.read_text())
    assert {row["metric"] for row in written["rows"]} == {"RANDOM"}
    refused = CliRunner().invoke(command.app, ["spins", "--only", "C1"])
    assert refused.exit_code == 2


def test_a_forward_is_timed_with_and_without_verdicts(monkeypatch):
    asked = []
    monkeypatch.setattr(DynamicalMethod, "unstable", lambda self, *_: asked.append(True))
    monkeypatch.setattr(DynamicalMethod, "out_of_range", lambda self, *_: asked.append(False))
    called = spin_verdict.functions(one_system(8, 2, chain=False), GaussianClosure())
    answers = {}
    for name, expected in (("bare", []), ("none", [False]), ("stability", [True, False])):
        asked.clear()
        answers[name] = called[name]()
        assert asked == expected
    assert all(torch.equal(m, answers["bare"]) for m in answers.values())
