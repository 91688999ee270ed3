"""Trainings that are killed at random updates go on from their last checkpoint to the same losses and weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kill_and_resume import UPDATES, updates

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked, so that each need not import")


def killed(name, folder, runs, kills, seed):
    script = Path(__file__).with_name("kill_and_resume.py")
    command = [sys.executable, str(script), name, str(folder), *map(str, (runs, kills, seed))]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    whole, weights = dict(updates(folder / "whole")), torch.load(folder / "whole" / "final.pt", weights_only=True)
    assert sorted(whole) == list(range(1, UPDATES[name] + 1))
    assert len(set(whole.values())) > len(whole) / 2
    reached = json.loads((folder / "killed.json").read_text())
    assert [len(of_run) for of_run in reached] == [kills] * runs
    # Every kill came after the first update and before the last one.
    assert all(1 <= update < UPDATES[name] for of_run in reached for update in of_run)
    repeated = 0
    for run in range(runs):
        lines = updates(folder / f"cut{run}")
        assert sorted({update for update, _ in lines}) == sorted(whole)
        assert [line for line in lines if line[1] != whole[line[0]]] == []
        repeated += len(lines) - len(whole)
        final = torch.load(folder / f"cut{run}" / "final.pt", weights_only=True)
        assert final.keys() == weights.keys()
        assert [key for key, weight in weights.items() if not torch.equal(final[key], weight)] == []
    # Updates after the last checkpoint were made again: the kills came where they cost something.
    assert repeated > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "llama"])
def test_two_kills_of_a_training_change_no_bit(tmp_path, name):
    if name == "llama":
        pytest.importorskip("accelerate")
    killed(name, tmp_path, runs=1, kills=2, seed=0)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["digits", "llama"])
def test_ten_trainings_killed_inside_end_with_the_same_bits(tmp_path, name):
    if name == "llama":
        pytest.importorskip("accelerate")
    killed(name, tmp_path, runs=10, kills=1, seed=1)
