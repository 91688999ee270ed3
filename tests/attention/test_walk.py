"""The walk through a call that the guide for contributors draws."""

import gc
import re
from pathlib import Path

import pytest
import torch
from walk import doors, frames, walked

import implicit_attention as ia
from implicit_attention.kernels import native_status

native = pytest.mark.skipif(native_status().isa is None, reason=native_status().reason)
GUIDE = Path(ia.__file__).parents[1] / "CONTRIBUTING.md"
LAYER = "ImplicitAttention.forward(x), no graph"
#: The most files that a call may enter.
FILES = {LAYER: 10, "equilibrium_attention(query, keys, keys)": 8, "solve(energy, query)": 9}


@pytest.fixture(scope="module")
def counted():
    """Files, records, records before the kernel, and frames of some calls, by their names."""
    found = {}
    # What is collected in between may have finalizers, which are frames.
    gc.disable()
    try:
        for door, call in doors():
            if door in FILES:
                walk = walked(call)
                found[door] = len(set(walk.files)), len(walk.records), len(walk.before), frames(call)
    finally:
        gc.enable()
    return found


@native
def test_a_training_step_passes_the_stops_that_the_guide_names_in_that_order():
    section = GUIDE.read_text().partition("## A call, stop by stop")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `([\w/.]+)`: `(\w+)` \|", section, re.MULTILINE)
    assert 1 < len(named) <= 8
    layer, x = ia.ImplicitAttention(16, 2), torch.randn(2, 5, 16)
    walk = walked(lambda: layer(x).sum().backward())
    assert walk.native
    assert [stop for stop in walk.passed if stop in named] == named


@native
def test_a_call_is_few_files_few_records_before_the_kernel_and_few_frames(counted):
    assert {door: files for door, (files, *_) in counted.items() if files > FILES[door]} == {}
    assert {door: before for door, (_, _, before, _) in counted.items() if not 0 < before <= 4} == {}
    assert counted[LAYER][-1] <= 60


@native
def test_the_guide_has_the_table_of_the_walk(counted):
    (header,) = re.findall("^ +(files +returns .*)$", GUIDE.read_text(), re.MULTILINE)
    columns = [header.split().index(name) for name in ("files", "records", "before", "frames")]
    for door, numbers in counted.items():
        (row,) = re.findall(rf"^{re.escape(door)} +(\d.*)$", GUIDE.read_text(), re.MULTILINE)
        assert (door, *(int(row.split()[i].replace(",", "")) for i in columns)) == (door, *numbers)
