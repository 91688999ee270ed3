"""The one call that measures a card: its rows are kept, checked, skipped and shown as promised."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer

from benchmarks import baselines, card, card_tables, guides, problems, report
from benchmarks.card import Rows, Scale
from benchmarks.measure import ROOT, Timing
from benchmarks.problems import Setting, Shape
from benchmarks.targets import CARD

TINY = Setting("gaussian", 2.0, 0.5, Shape(1, 2, 20, 9), rtol=1e-4)
#: Seconds of the contenders, by name.
CLOCK = {"fused": 36.0, "evaluate": 4.5, "ours": 6.0, "sdpa_math": 5.0, "sdpa_flash": 3.0}
CLOCK |= {"sdpa_training_math": 9.0, "sdpa_training_flash": 7.0, "ours_training": 28.0, "ours_door": 9.0}


def solved(data, rtol, max_steps):
    """What stands for the kernel on a CPU: plain steps."""
    steps = max_steps if rtol == 0 else 60
    evaluations = torch.full(data.queries.shape[:-1], steps)
    evaluations[..., 0] = steps + 4
    return SimpleNamespace(state=baselines.picard(data, steps)().state, num_evals=evaluations)


@pytest.fixture
def known(monkeypatch):
    """Kernels that exist on a CPU, and clocks that are known."""

    def clock(functions, first, device, seconds=0.0):
        return {name: Timing(CLOCK[name], 1.0, 1.0, 1) for name in functions if name in CLOCK}

    def by_kernel(data, queries=None, keys=None):
        queries, keys = data.queries if queries is None else queries, data.keys if keys is None else keys
        z = queries
        for _ in range(60):
            z = baselines.step(data, z, queries, keys)
        return baselines.Run(z, torch.tensor(60))

    monkeypatch.setattr(card, "fused", solved)
    monkeypatch.setattr(card, "over_keys", lambda *given: lambda: None)
    monkeypatch.setattr(card, "in_turns", clock)
    monkeypatch.setattr(card, "by_kernel", by_kernel)
    return TINY


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# ------------------------------------------------------------------ the call


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    """The rows of a dry call."""
    out = tmp_path_factory.mktemp("card")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "benchmarks/gpu.sh", str(out), "--dry"],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for shown in ("1 of 1 right", "2 passed; failed: none", "ours / SDPA", "torch / ours", "evaluate, D 64"):
        assert shown in done.stdout[-12_000:], shown
    assert [file.name for file in out.iterdir()] == ["rows.jsonl"]
    return out / "rows.jsonl"


@pytest.mark.slow
def test_a_dry_call_has_rows_of_all_parts_and_no_error(dry):
    rows = rows_of(dry)
    assert list(dict.fromkeys(row["part"] for row in rows)) == ["run", *card.PARTS]
    assert [row for row in rows if "error" in row or row["name"] == "skipped"] == []
    for row in rows:
        for name, found in row.get("evidence", {}).items():
            # Not every kernel of torch runs on a CPU.
            assert "error" not in found or name.startswith("sdpa_"), (row["name"], name, found)
    short, main = (row for row in rows if row["part"] == "attention")
    assert short["name"] == "N 1, M 20, D 16, float32"
    assert short["evidence"]["ours"]["converged"] == main["evidence"]["ours"]["converged"] == 1
    for row in (row for row in rows if row["part"] == "evaluation"):
        most = 1e-5 if row["dtype"] == "float32" else 3e-2
        assert all(0 < error < most for found in row["evidence"].values() for error in found.values()), row
        assert set(row["seconds"]) == {"ours", "flash"}
        assert row["ratios"]["torch / ours"] > 0
    assert 0 < main["evidence"]["ours_training"]["gradient_error"] < 5e-2
    wanted = {"forward", "training", "equilibrium_attention", "torchdeq", "torchdeq training", "unrolled"}
    assert wanted <= {name for name, value in main["ratios"].items() if value}
    targets = {name for row in rows if row["part"] in ("targets", "block") for name in row["ratios"]}
    assert {target.ratio for target in CARD} <= targets


@pytest.mark.slow
def test_report_reads_rows_into_the_docs(dry, tmp_path, monkeypatch):
    first, *rows = rows_of(dry)
    first["environment"] |= {"device": "cuda", "gpu": {"name": "a card", "driver": "1", "cuda": "13"}}
    # As if a card had made them.
    rows = [{**first, "dry": False}, *({**row, "device": "cuda"} for row in rows)]
    for row in rows:
        if row["name"].startswith("G"):
            row["shape"] = {**row.get("shape", {}), "dim": 64}
    (tmp_path / "card-1.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for path in report.RESULTS.glob("*.json"):
        os.symlink(path, tmp_path / path.name)
    pages = {}
    for name, page in {
        "costs": guides.COSTS,
        "steps": guides.STEPS,
        "readme": guides.README,
        "all": report.README,
    }.items():
        pages[name] = Path(shutil.copy(page, tmp_path / f"{name}.md"))
    guides.rewrite(pages["costs"], pages["steps"], pages["readme"], pages["all"], folder=tmp_path)
    assert card_tables.rewrite(pages["all"], tmp_path).name == "card-1.jsonl"
    assert "One a card. From `card-1.jsonl`" in pages["costs"].read_text()
    assert "| G2 | solve to 1e-3 / the fastest SDPA forward, D 64 |" in pages["costs"].read_text()
    assert "the targets of a GPU" not in pages["readme"].read_text()
    assert "N 20, D 16, bfloat16, causal" in pages["all"].read_text()


def test_a_row_is_written_at_once_and_a_second_call_goes_on_behind_it(tmp_path):
    rows = Rows(tmp_path, Scale(dry=True))
    calls = []

    def job(name, row):
        calls.append(name)
        assert len(rows_of(tmp_path / "rows.jsonl")) == 1 + len(calls[:-1])
        row["ratios"] = {"x": 2.0}

    rows.measure("ceilings", [("a", partial(job, "a")), ("b", partial(job, "b"))])
    again = Rows(tmp_path, Scale(dry=True))
    again.measure("ceilings", [("b", partial(job, "b")), ("c", partial(job, "c"))])
    assert calls == ["a", "b", "c"]
    assert [row["name"] for row in rows_of(tmp_path / "rows.jsonl")] == ["run", "a", "b", "c"]


def test_what_comes_after_its_time_is_skipped_and_said(tmp_path, monkeypatch, capsys):
    rows = Rows(tmp_path, Scale(dry=True))
    rows.scale = SimpleNamespace(dry=False, device="cpu")
    rows.began = time.time() - 50
    monkeypatch.setitem(card.PARTS, "ceilings", 10)
    late = rows.measure("ceilings", [("a", lambda row: None), ("b", lambda row: None)])
    assert late == ["a", "b"]
    assert rows.measure("ceilings", [("b", lambda row: None)], until=60) == []
    rows.skip("ceilings", late)
    assert rows.measure("tests", [("c", lambda row: None)]) == []
    assert [row.get("skipped") or row["name"] for row in rows.written[1:]] == ["b", ["a", "b"], "c"]
    assert "ceilings: skipped, as its time was over: a, b" in capsys.readouterr().out
    assert card_tables.read(rows.path)["complete"] is False


def test_an_alarm_ends_a_row_and_keeps_what_was_measured():
    def slow(row):
        row["seconds"] = {"first": 1.0}
        time.sleep(5)

    row = card.filled(slow, 0.05)
    assert row["seconds"] == {"first": 1.0}
    assert row["error"] == "TimeoutError: the row took more than 0.05 s"
    assert row["wall_seconds"] < 2
    assert "error" not in card.filled(lambda row: None, 5.0)


def test_a_broken_context_ends_the_process_and_not_the_call(tmp_path, monkeypatch):
    class Ended(BaseException):
        pass

    def end(code):
        raise Ended(code)

    rows = Rows(tmp_path, Scale(dry=True))
    rows.scale = SimpleNamespace(dry=True, device="cuda")
    monkeypatch.setattr(card, "context_is_broken", lambda: True)
    monkeypatch.setattr(card.os, "_exit", end)
    with pytest.raises(Ended, match=str(card.AGAIN)):
        rows.measure("attention", [("a", lambda row: None), ("b", lambda row: None)])
    assert [row["name"] for row in rows.written] == ["run", "a"]


def test_a_row_in_which_the_process_ended_is_told_by_the_next(tmp_path):
    class Ended(BaseException):
        pass

    def crash(row):
        raise Ended

    with pytest.raises(Ended):
        Rows(tmp_path, Scale(dry=True)).measure("attention", [("a", crash)])
    rows = Rows(tmp_path, Scale(dry=True))
    assert rows.written[-1] == {"part": "attention", "name": "a", "error": "the process ended in this row"}
    assert rows.measure("attention", [("a", crash)]) == []
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


def test_the_script_calls_again_until_a_process_adds_no_row_and_shows_what_there_is(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    lines = [
        "#!/bin/sh",
        'echo "$*" >> "$CALLS"',
        '[ $(wc -l < "$CALLS") -lt 3 ] && echo "{}" >> "$OUT/rows.jsonl" && exit 75',
        "exit 7",
    ]
    (tmp_path / "python3").write_text("\n".join(lines))
    (tmp_path / "python3").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    where = {**os.environ, "PATH": path, "CALLS": str(tmp_path / "calls"), "OUT": str(out)}
    done = subprocess.run(["bash", "benchmarks/gpu.sh", str(out)], cwd=ROOT, env=where, capture_output=True, text=True)
    assert done.returncode == 7
    called = f"-m benchmarks.card {out}"
    assert (tmp_path / "calls").read_text().splitlines() == [*[called] * 3, f"{called} --show"]


@pytest.mark.parametrize(("index", "code"), [(0, card.NO_KERNEL), (1, None)])
def test_without_the_first_kernel_the_call_ends(tmp_path, monkeypatch, index, code):
    class Process:
        def __init__(self, command, **options):
            number = int(command[command.index("--smoke") + 1])
            Path(command[3]).write_text(json.dumps({"error": "CompilationError"} if number == index else {}))

        def poll(self):
            return 0

        def wait(self, limit=None):
            return 0

    rows = Rows(tmp_path, Scale(dry=True))
    monkeypatch.setattr(card.subprocess, "Popen", Process)
    monkeypatch.setattr(Scale, "smoke", card.SMOKE[:3])
    smoke = card.SmokeTests(rows, tmp_path)
    if code is None:
        smoke.collect("smoke")
    else:
        with pytest.raises(typer.Exit) as ended:
            smoke.collect("smoke")
        assert ended.value.exit_code == code
    found = [row for row in rows_of(tmp_path / "rows.jsonl") if row["part"] == "smoke"]
    assert [row["name"] for row in found] == [case.name for case in card.SMOKE[: 1 if code else 3]]
    assert [row["name"] for row in found if "error" in row] == [card.SMOKE[index].name]


# ------------------------------------------------------------------ rows


def test_g1_is_the_time_of_one_evaluation(known):
    row = {}
    card.per_evaluation(known, row)
    # 8 evaluations; one of 20 queries needs 4 more.
    assert row["ratios"]["G1"] == pytest.approx(36 / 8.2 / 3)
    assert row["ratios"]["G1 alone"] == pytest.approx(4.5 / 3)
    assert row["best_sdpa"] == "sdpa_flash"
    assert row["evidence"]["fused"]["residual_max"] < 0.1


def test_torch_stands_beside_an_evaluation_with_its_errors(known, monkeypatch):
    def ours(data, kind, state, mean, logsumexp):
        # A quarter off, and a log-sum-exp that is one too large.
        scores = data.setting.beta * state @ data.keys.mT
        return lambda: (mean.copy_(1.25 * scores.softmax(-1) @ data.keys), logsumexp.copy_(scores.logsumexp(-1) + 1))

    monkeypatch.setattr(card, "over_keys", ours)
    monkeypatch.setitem(CLOCK, "flash", 3.0)
    monkeypatch.setitem(card.TORCHS["cpu"], "gone", ("_no_such_attention",))
    row = {}
    card.beside_torch(known, row)
    assert row["ratios"]["torch / ours"] == pytest.approx(3 / 6)
    found = row["evidence"]
    assert found["ours"] == pytest.approx({"mean_error": 0.25, "logsumexp_error": 1.0}, abs=1e-5)
    assert max(found["flash"].values()) < 1e-5
    assert "_no_such_attention" in found["gone"]["error"]
    assert set(row["seconds"]) == {"ours", "flash"}


def test_g2_is_the_plain_ratio_of_a_right_answer(known):
    row = {}
    card.solved(known, row)
    assert row["ratios"]["G2"] == pytest.approx(36 / 3)
    assert row["evidence"]["fused"]["evaluations_mean"] == pytest.approx(60.2)
    wrong = {}
    card.solved(dataclasses.replace(known, rtol=1e-9), wrong)
    assert wrong["ratios"] == {"G2": None}
    judged = card_tables.CARD[2].judge([{**wrong, "device": "cuda", "shape": {"dim": 64}}])
    assert (judged["verdict"], judged["wrong"]) == ("missed", 1)


def test_a_training_step_is_over_the_explicit_one(known):
    row = {}
    card.step(known, row)
    assert row["ratios"]["G4"] == row["ratios"]["training"] == pytest.approx(28 / 7)
    assert row["ratios"]["forward"] == pytest.approx(6 / 3)
    assert row["best_sdpa_training"] == "sdpa_training_flash"
    assert row["evidence"]["ours_training"]["gradient_error"] < 1e-4


def test_a_wrong_answer_is_not_timed(known, monkeypatch):
    right = card.by_kernel
    monkeypatch.setattr(card, "by_kernel", lambda *args: (found := right(*args))._replace(state=1.1 * found.state))
    row = {}
    card.step(known, row)
    assert row["ratios"]["forward"] is None
    assert row["ratios"]["G4"] is None
    assert row["evidence"]["ours"]["error"] == "not counted, the answer is wrong"


def test_a_rival_that_would_take_too_long_is_not_called(known, monkeypatch):
    row = {}
    contest = card.Contest(problems.draw(known), row)
    contest.enter("ours", lambda: partial(card.without_graph, contest.data))
    row["ratios"] |= {"forward": 1.0, "training": 1.0}
    card.beside(contest, "MATH", one=1.0, most=1.5)
    rivals = set(row["evidence"])
    assert rivals == {
        *(f"torchdeq_{name}" for name in ("anderson", "fixed_point_iter")),
        *(f"torchdeq_training_{name}" for name in ("anderson", "fixed_point_iter")),
        "unrolled",
    }
    assert all("not timed, it takes about" in row["evidence"][name]["error"] for name in rivals)
    assert {name for name, ratio in row["ratios"].items() if ratio} == {"forward", "training"}


def test_a_wrong_kernel_flags_its_rows(tmp_path):
    rows = Rows(tmp_path, Scale(dry=True))
    rows.add({"part": "tests", "name": "kernels", "passed": 3, "failed": {"adjoint_ends": "?"}, "not_reached": []})
    rows.add({"part": "attention", "name": "a", "ratios": {"forward": 2.0, "training": 3.0}})
    ((_, _, header, (line,)),) = [t for t in card_tables.tables(card_tables.read(rows.path)) if t.title == "attention"]
    told = dict(zip(header, line, strict=True))
    assert (told["ours / SDPA"], told["training / SDPA's"]) == ("2.00", "3.00*")


def test_only_waits_of_the_function_are_counted(monkeypatch):
    def mode(name):
        if name == "warn":
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    def function():
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert card.synchronisations(function) == 2
        assert card.synchronisations(lambda: None) == 0
