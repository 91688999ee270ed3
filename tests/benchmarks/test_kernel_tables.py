"""Tables about the Triton kernels that need no GPU: evaluations of tiles, bounds, what a compiler makes of them."""

import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import __main__ as command
from benchmarks import compiled_kernels, gathering, report, roofline
from benchmarks.problems import Shape
from implicit_attention.kernels.triton import layout


def test_a_tile_waits_for_its_slowest_query_unless_those_left_are_listed():
    evaluations = torch.tensor([[1, 1, 5, 1, 3, 1], [2, 2, 2, 2, 2, 2]])
    # By tiles of two: 1 + 5 + 3, and three times 2.
    assert gathering.waiting(evaluations, 2) == 9 + 6
    # Six queries, then two that share a tile for two evaluations, then one for two; and six for two.
    assert gathering.listed(evaluations, 2) == (3 + 2 + 2) + 2 * 3
    assert gathering.listed(evaluations, 4) == (2 + 2 + 2) + 2 * 2


def test_listing_leaves_a_tenth_at_most_in_the_committed_run():
    _, run = report.newest("gathering", report.RESULTS)
    assert len(run["rows"]) == 16
    assert all(row["wasted"]["listed"] <= 0.1 for row in run["rows"])
    assert max(row["wasted"]["waiting"] for row in run["rows"]) > 0.5


def test_bounds_of_a_kernel_are_those_of_the_data_sheet():
    row = {"kernel": "evaluate", "dim": 64, "rows": 64, "keys": 64, "warps": 4}
    row["loop"] = {"exp2": 32, "instructions": 256}
    found = roofline.bounds(row)
    pairs = 64 * 4096**2
    assert found["tensor cores"] == pytest.approx(4 * 64 * pairs / 989.4e12)
    # One exponential and a quarter of a warp's instruction for every pair of 64 x 64 by 4 warps.
    cycle = 1 / (132 * 66.9e12 / (132 * 128 * 2))
    assert found["exp2"] == pytest.approx(pairs / 16 * cycle)
    assert found["issue"] == pytest.approx(pairs / 4 / 4 * cycle)


def test_the_compilers_of_the_tables_are_those_that_are_used():
    pinned, older = compiled_kernels.TRITONS
    assert f"triton=={pinned}" in (report.HERE.parent / "constraints.txt").read_text().splitlines()
    assert f"triton=={older} " in (report.HERE.parent / ".ci" / "run").read_text()


@pytest.mark.parametrize("triton", compiled_kernels.TRITONS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_every_kernel_of_a_card_is_in_the_committed_run(arch, triton):
    _, run = report.newest(f"kernels_{arch}", report.RESULTS, triton=triton)
    assert [row["name"] for row in run["rows"]] == [case.name for case in compiled_kernels.CASES]
    limit = compiled_kernels.ARCHES[arch][2]
    assert all(row["shared"] <= limit and row["programs"] > 0 for row in run["rows"])
    # Of the tiles as they are: what was compiled is what runs.
    for row in (row for row in run["rows"] if row["kernel"] in compiled_kernels.KERNELS):
        kind = row["kernel"].removeprefix("fine "), row["dtype"] != "float32"
        table = layout.EARLIER.get(kind, layout.TILES[kind]) if arch == "sm_80" else layout.TILES[kind]
        tile = table[min(size for size in table if size >= row["dim"])]
        assert [row[name] for name in tile._fields[:4]] == list(tile[:4]), row["name"]
        assert row["registers"] <= (255 if row["kernel"] == "fine product" else tile.registers or 255)
        # Keys arrive in parts of 16 bytes, in the background.
        assert row["loop"]["loads"] > 0 or row["dtype"] == "float32", row["name"]


def test_the_committed_loops_for_an_h100_stay_in_registers():
    _, run = report.newest("kernels_sm_90a", report.RESULTS, triton=compiled_kernels.TRITONS[0])
    loops, steps = (
        [row for row in run["rows"] if row["kernel"] in names]
        for names in (compiled_kernels.KERNELS, compiled_kernels.STEPS)
    )
    rows = [row for row in loops if row["dim"] <= 128]
    # Products of float32 in three parts take more registers than there are.
    spilled = {row["name"] for row in rows if row["loop"]["spills"]}
    assert all("float32-128" in name for name in spilled), spilled
    assert all(row["loop"]["spills"] < 0.05 * row["loop"]["instructions"] for row in loops if row["dim"] <= 64)
    # Where the assembler runs the products of a loop one after the other, each has a barrier.
    serialized = {row["name"] for row in loops if row["loop"]["barriers"] >= row["loop"]["tensor"]}
    assert serialized == set()
    # The numbers of a step are in registers.
    assert {row["kernel"] for row in steps} == set(compiled_kernels.STEPS)
    assert all(row["stack"] == 0 and not row["loop"] for row in steps)


def test_the_command_tells_of_tiles(tmp_path, monkeypatch):
    monkeypatch.setattr(gathering, "FULL", gathering.FULL[:1])
    monkeypatch.setattr(gathering, "SHAPE", Shape(1, 1, 128, 16))
    done = CliRunner().invoke(command.app, ["kernels", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "of the evaluations are for queries that have ended" in " ".join(done.output.split())
    (path,) = tmp_path.glob("gathering-*.json")
    (row,) = json.loads(path.read_text())["rows"]
    assert row["converged"] == 1
    assert 0 <= row["wasted"]["listed"] <= row["wasted"]["waiting"] < 1
