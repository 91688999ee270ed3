"""Trainings that are killed at random updates go on from their last checkpoint to the same losses, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kill_and_resume import UPDATES, updates

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked, so that each need not import")


def killed(name, folder, kills, seed):
    script = Path(__file__).with_name("kill_and_resume.py")
    command = [sys.executable, str(script), name, str(folder), str(kills), str(seed)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    whole = dict(updates(folder / "whole"))
    assert sorted(whole) == list(range(1, UPDATES[name] + 1))
    told = json.loads((folder / "killed.json").read_text())
    assert told["killed"] == kills
    repeated = 0
    for run in range(told["runs"]):
        lines = updates(folder / f"cut{run}")
        assert sorted({update for update, _ in lines}) == sorted(whole)
        assert [line for line in lines if line[1] != whole[line[0]]] == []
        repeated += len(lines) - len(whole)
    # Updates after the last checkpoint were made again: the kills came where they cost something.
    assert repeated > 0
    assert len(set(whole.values())) > len(whole) / 2
    return told


@pytest.mark.parametrize("name", ["digits", "llama"])
def test_two_kills_change_no_loss(tmp_path, name):
    if name == "llama":
        pytest.importorskip("accelerate")
    killed(name, tmp_path, kills=2, seed=0)


@pytest.mark.parametrize("name", ["digits", "llama"])
def test_ten_kills_change_no_loss(tmp_path, name):
    if name == "llama":
        pytest.importorskip("accelerate")
    killed(name, tmp_path, kills=10, seed=1)
