"""The suite `energy_transformer`: every ratio that a target asks for is measured, of things that agree."""

import pytest

from benchmarks import energy_transformer, targets

SMALL = {"dim": 24, "heads": 3, "head_dim": 8, "memories": 48}


@pytest.fixture(scope="module")
def rows():
    settings = [energy_transformer.Setting(metric, tokens=20, **SMALL) for metric in energy_transformer.METRICS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(energy_transformer.guard, "red", lambda tests: None)
        return energy_transformer.run(settings, repeats=1, max_seconds=0.01)


@pytest.mark.slow
def test_every_target_has_its_ratio(rows):
    known = {name: value for row in rows for name, value in row["ratios"].items()}
    assert {target.ratio for target in targets.ENERGY_TRANSFORMER} <= set(known)
    assert all(value > 0 for value in known.values()), known


def test_what_is_compared_agrees(rows):
    apart = [error for row in rows for error in row["evidence"].get("apart", {}).values()]
    assert len(apart) == 3
    assert max(apart) < 1e-4


def test_the_solve_that_is_timed_has_converged(rows):
    (found,) = (row["evidence"]["solve"] for row in rows if row["metric"] == "SOLVE")
    assert found["converged"]
    assert found["evaluations"] > 1


def test_memory_of_an_equilibrium_does_not_grow_with_its_evaluations(rows):
    (row,) = (row for row in rows if row["metric"] == "TRAINING")
    assert row["ratios"]["equilibrium, 40 / 5 evaluations"] < 1.2
    assert row["ratios"]["checkpointed, 12 / 1 steps"] < row["ratios"]["published, 12 / 1 steps"]


def test_a_red_suite_measures_nothing(monkeypatch):
    monkeypatch.setattr(energy_transformer.guard, "red", lambda tests: "1 failed")
    (row,) = energy_transformer.run([energy_transformer.Setting("SOLVE", tokens=20, **SMALL)])
    assert row["ratios"] == {}
    assert row["evidence"]["ours"]["error"] == "1 failed"


def test_the_table_holds_every_ratio(rows):
    (table,) = energy_transformer.tables({"rows": rows})
    assert len(table.lines) == sum(len(row["ratios"]) for row in rows)


def test_the_page_is_what_the_newest_run_says(tmp_path):
    text = energy_transformer.PAGE.read_text()
    copy = tmp_path / "page.md"
    copy.write_text(text)
    energy_transformer.rewrite(copy)
    assert copy.read_text() == text
    energy_transformer.rewrite(copy, tmp_path)
    assert "Not run yet." in copy.read_text()
