"""The suite `potentials`: every ratio that a target asks for is measured, and refusals are told."""

import dataclasses

import pytest

from benchmarks import potentials, targets
from benchmarks.potentials_trained import KERNELS

SMALL = {"batch": 1, "heads": 2, "length": 24, "dim": 8, "steps": 2}


@pytest.fixture(scope="module")
def rows():
    named = [
        ("FUSED", "Softmax1"),
        ("UNFUSED", "Entmax, alpha 1.3"),
        ("UNFUSED", "Polynomial, degree 3"),
        ("KERNEL", "KernelPotential, positive features"),
    ]
    timed = [potentials.Setting(metric, name, **SMALL) for metric, name in named]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(potentials.guard, "red", lambda tests: None)
        rows = potentials.run(timed, repeats=1, max_seconds=0.01)
    trained = [
        potentials.Setting("DIGITS", name, **SMALL)
        for name in ("no attention", "Softmax1", "KernelPotential, positive features")
    ]
    return rows + [{**dataclasses.asdict(setting), **potentials._learned(setting)} for setting in trained]


@pytest.mark.slow
def test_every_target_has_its_ratio(rows):
    known = {name: value for row in rows for name, value in row["ratios"].items()}
    assert {target.ratio for target in targets.POTENTIALS} <= set(known)
    assert all(value is not None and value > 0 for name, value in known.items() if name != "accuracy"), known


@pytest.mark.slow
def test_solves_that_are_timed_have_converged(rows):
    for row in rows:
        if row["metric"] in ("FUSED", "UNFUSED"):
            assert all(part["converged"] == 1 for part in row["evidence"].values())


def test_every_potential_of_the_settings_is_known():
    for setting in potentials.settings_of(quick=False):
        assert setting.potential in {**potentials.FACTORIES, **KERNELS, **potentials.TRAINED} | dict(potentials.BESIDE)


@pytest.mark.slow
def test_trainings_tell_what_they_did(rows):
    *_, plain, softmax1, kernel = rows
    assert plain["evidence"]["converged"] is None
    for row in (softmax1, kernel):
        found = row["evidence"]
        assert 0 <= found["accuracy"] <= 1
        assert found["gradient_norm"] > 0
        assert found["evaluations_mean"] > 1
        assert found["failed_forward"] == 0


@pytest.mark.slow
def test_the_tables_hold_all_of_a_run(rows):
    made = {table.title: table for table in potentials.tables({"rows": rows})}
    assert set(made) == {"fused", "unfused", "kernel", "digits"}
    assert [line[0] for line in made["digits"].lines] == [row["potential"] for row in rows if row["metric"] == "DIGITS"]
    refused = {**rows[-1], "evidence": {"error": "`potential` must be bounded below"}, "ratios": {"accuracy": None}}
    assert potentials.tables({"rows": [refused]})[0].lines[0][1] == "refused"


def test_the_page_of_potentials_is_what_the_newest_run_says(tmp_path):
    text = potentials.PAGE.read_text()
    copy = tmp_path / "page.md"
    copy.write_text(text)
    potentials.rewrite(copy)
    assert copy.read_text() == text
    potentials.rewrite(copy, tmp_path)
    assert "Not run yet." in copy.read_text()
