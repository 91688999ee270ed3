"""The suite `spin_layers`: every ratio that a target asks for is measured, and nothing whose answer is wrong."""

import dataclasses

import pytest

from benchmarks import spin_layers, targets

SMALL = spin_layers.Setting("SPIN", 12, batch=1, heads=2, dim=8)


@pytest.fixture(scope="module")
def rows():
    settings = (SMALL, *(dataclasses.replace(SMALL, metric=metric, length=64) for metric in ("GROWTH", "LONG")))
    return spin_layers.run(settings, repeats=1, max_seconds=0.01)


@pytest.mark.slow
def test_every_target_has_its_ratio(rows):
    known = {name: value for row in rows for name, value in row["ratios"].items()}
    assert {target.ratio for target in targets.SPIN_LAYERS} <= set(known)
    assert all(value is not None and value > 0 for value in known.values()), known


@pytest.mark.slow
def test_the_evidence_is_of_the_answer(rows):
    found = rows[0]["evidence"]["ours"]
    assert found["converged"] == 1.0
    assert 0 < found["residual"] <= SMALL.rtol
    # Plain steps need more evaluations than the solver, which makes use of those before.
    assert rows[0]["evidence"]["unrolled"]["evaluations"] >= found["evaluations"]
    assert rows[1]["evidence"]["evaluations 40"]["peak_bytes"] > 0


def test_a_wrong_answer_is_not_timed(monkeypatch):
    sound = spin_layers.residual
    for wrong in (lambda system, m: sound(system, m + 0.1), lambda system, m: 1.01 * SMALL.rtol):
        monkeypatch.setattr(spin_layers, "residual", wrong)
        row = spin_layers.timed(SMALL, repeats=1, max_seconds=0.01)
        assert row["seconds"] == {}
        assert "not timed" in row["evidence"]["ours"]["error"]
    judged = [t.judge([{**row, "length": 256}]) for t in targets.SPIN_LAYERS if t.ratio == "training"]
    assert [verdict["verdict"] for verdict in judged] == ["missed"]


@pytest.mark.slow
def test_the_tables_hold_all_of_a_run(rows):
    times, memory = spin_layers.tables({"rows": rows})
    assert times.header[0] == "N"
    assert len(times.lines) == 1
    assert [line[0] for line in memory.lines] == [row["name"] for row in rows[1:]]
