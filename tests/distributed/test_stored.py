"""Patterns on disk: what is appended is read, by rows and by parts, and what is broken is refused."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import stored_writers
import torch
from processes import together
from safetensors import safe_open
from torch import distributed

from implicit_attention.distributed import StoredPatterns


def patterns(rows, seed=0, dim=5, dtype=torch.float32):
    return torch.randn(rows, dim, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def filled(tmp_path):
    """A folder of three files, and what they hold."""
    folder = tmp_path / "new" / "folder"
    stored, keys, values = StoredPatterns(folder), [], []
    assert len(stored) == 0
    for seed, rows in enumerate((4, 1, 7)):
        keys.append(patterns(rows, seed))
        values.append(patterns(rows, seed + 10, dim=2))
        stored.append(keys[-1], values[-1])
    return folder, torch.cat(keys), torch.cat(values)


@pytest.mark.parametrize(
    "rows", [slice(None), slice(0, 4), slice(3, 6), slice(4, 5), slice(-2, None), slice(5, 5), slice(9, 99)]
)
def test_rows_are_those_that_were_appended(rows, filled):
    folder, keys, values = filled
    stored = StoredPatterns(folder)
    assert (len(stored), stored.dim, stored.value_dim, stored.dtype) == (12, 5, 2, torch.float32)
    found = stored.load(rows)
    assert torch.equal(found.keys, keys[rows])
    assert torch.equal(found.values, values[rows])
    assert stored.load(rows, dtype=torch.float64).keys.dtype == torch.float64


def test_no_file_is_read_that_is_not_asked_for(filled, monkeypatch):
    folder, keys, _ = filled
    opened = []

    def counted(path, *arguments):
        opened.append(path.name)
        return safe_open(path, *arguments)

    monkeypatch.setattr("safetensors.safe_open", counted)
    assert torch.equal(StoredPatterns(folder).load(slice(4, 6)).keys, keys[4:6])
    assert opened == ["patterns-00001.safetensors", "patterns-00002.safetensors"]


@pytest.mark.parametrize("size", [1, 5, 12, 50])
def test_pieces_are_all_of_it(size, filled):
    folder, keys, values = filled
    pieces = list(StoredPatterns(folder).pieces(size))
    assert all(len(piece.keys) <= size for piece in pieces)
    assert torch.equal(torch.cat([piece.keys for piece in pieces]), keys)
    assert torch.equal(torch.cat([piece.values for piece in pieces]), values)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_and_layouts_come_back_as_they_went(dtype, tmp_path):
    keys = patterns(5, dim=6).to(dtype)
    StoredPatterns(tmp_path).append(keys.mT)
    StoredPatterns(tmp_path).append(keys.T.expand(6, 5))
    StoredPatterns(tmp_path).append(patterns(12, dim=5).to(dtype)[::2].requires_grad_())
    found = StoredPatterns(tmp_path).load()
    assert found.values is None
    assert torch.equal(found.keys, torch.cat([keys.mT, keys.mT, patterns(12, dim=5).to(dtype)[::2]]))


def local(rank, folder):
    stored = StoredPatterns(folder)
    alone = distributed.new_group([rank], use_local_synchronization=True)
    return stored.local().keys, stored.local(alone).keys


def test_processes_share_the_rows_evenly(filled):
    folder, keys, _ = filled
    found = together(local, 3, str(folder))
    assert [len(part) for part, _ in found] == [4, 4, 4]
    assert torch.equal(torch.cat([part for part, _ in found]), keys)
    assert all(torch.equal(alone, keys) for _, alone in found)


@contextlib.contextmanager
def interrupted(at):
    """A context in which the process ends before it gives a file its name, at the file of this number."""
    names, replace = [], Path.replace

    def renamed(self, target):
        names.append(Path(target).name)
        if len(names) == at + 1:
            raise KeyboardInterrupt
        return replace(self, target)

    with mock.patch.object(Path, "replace", renamed), pytest.raises(KeyboardInterrupt):
        yield names


@pytest.mark.parametrize("when", ["the patterns", "the index"])
def test_a_crash_leaves_what_was_there(when, filled):
    folder, keys, _ = filled
    with interrupted(["the patterns", "the index"].index(when)):
        StoredPatterns(folder).append(patterns(3, 7), patterns(3, 8, dim=2))
    assert torch.equal(StoredPatterns(folder).load().keys, keys)
    StoredPatterns(folder).append(patterns(2, 9), patterns(2, 8, dim=2))
    assert torch.equal(StoredPatterns(folder).load().keys, torch.cat([keys, patterns(2, 9)]))


def test_two_objects_that_append_in_turn_both_keep_their_rows(tmp_path):
    first, second = StoredPatterns(tmp_path), StoredPatterns(tmp_path)
    first.append(patterns(10))
    second.append(patterns(6, 1))
    first.append(patterns(3, 2))
    expected = torch.cat([patterns(10), patterns(6, 1), patterns(3, 2)])
    assert torch.equal(StoredPatterns(tmp_path).load().keys, expected)
    assert torch.equal(first.load().keys, expected)
    # What an object has not looked at since is as it was for it.
    assert torch.equal(second.load().keys, expected[:16])


def test_an_append_is_held_against_what_others_have_appended(tmp_path):
    first, second = StoredPatterns(tmp_path), StoredPatterns(tmp_path)
    first.append(patterns(4))
    with pytest.raises(ValueError, match="`keys` must be like what is stored"):
        second.append(patterns(4, dim=6))
    assert torch.equal(StoredPatterns(tmp_path).load().keys, patterns(4))


def test_an_object_appends_to_no_other_store_than_it_has_read(filled, tmp_path):
    stored = StoredPatterns(filled[0])
    for path in filled[0].iterdir():
        path.unlink()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"`folder` must still hold the 3 files .*; make a new StoredPatterns"):
            stored.append(patterns(2), patterns(2, dim=2))
    StoredPatterns(filled[0]).append(patterns(2), patterns(2, dim=2))
    with pytest.raises(ValueError, match="must still hold"):
        stored.append(patterns(2), patterns(2, dim=2))
    assert len(StoredPatterns(filled[0])) == 2


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="writers are forked, so that each need not import")
def test_two_writers_kills_and_damage_lose_no_row():
    # `python tests/stored_writers.py` asks more often.
    counts = ["--interleavings", "20", "--kills", "5", "--damages", "100"]
    command = [sys.executable, stored_writers.__file__, *counts]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert json.loads(found.stdout)["damaged stores"]["refused"] > 30


def test_no_file_name_is_given_twice(filled):
    """Not that of a file either whose append ended before the index was written."""
    folder, keys, _ = filled
    given = []
    for _ in range(3):
        with interrupted(1) as names:
            StoredPatterns(folder).append(patterns(3, 7), patterns(3, 8, dim=2))
        StoredPatterns(folder).append(patterns(1, 9), patterns(1, 8, dim=2))
        given += [names[0], json.loads((folder / "index.json").read_text())["files"][-1]["name"]]
    assert len(set(given)) == 6
    assert torch.equal(StoredPatterns(folder).load().keys, torch.cat([keys, *[patterns(1, 9)] * 3]))


@pytest.mark.parametrize("when", ["the empty index", "the patterns", "the index"])
def test_a_first_append_that_is_cut_off_leaves_an_empty_store(when, tmp_path):
    with interrupted(["the empty index", "the patterns", "the index"].index(when)):
        StoredPatterns(tmp_path).append(patterns(3))
    stored = StoredPatterns(tmp_path, check=True)
    assert (len(stored), stored.dim, stored.dtype) == (0, None, None)
    # Nothing is known yet, so that any patterns fit.
    stored.append(patterns(2, dim=4, dtype=torch.float64))
    assert torch.equal(StoredPatterns(tmp_path).load().keys, patterns(2, dim=4, dtype=torch.float64))


def version_1(folder):
    """The index as it was before there were checksums."""
    path = folder / "index.json"
    index = json.loads(path.read_text())
    del index["checksum"]
    for file in index["files"]:
        del file["block"], file["checksums"]
    path.write_text(json.dumps({**index, "version": 1}, indent=1))


def test_stores_of_version_1_are_read_and_appended_to(filled):
    folder, keys, values = filled
    version_1(folder)
    stored = StoredPatterns(folder)
    assert torch.equal(stored.load(slice(3, 9)).keys, keys[3:9])
    assert "3 files (3 without checksums)" in repr(stored)
    stored.append(keys[:2], values[:2])
    for again in (stored, StoredPatterns(folder)):
        assert torch.equal(again.load().values, torch.cat([values, values[:2]]))
        assert "4 files (3 without checksums)" in repr(again)
    with pytest.raises(ValueError, match=r"`check` must be False for files without checksums.*'patterns-00000"):
        StoredPatterns(folder, check=True)


def edited(**changes):
    """An index, of version 1 too, with other entries; those of a file for its first one."""

    def change(folder):
        path = folder / "index.json"
        index = json.loads(path.read_text())
        for name, value in changes.items():
            place = index if name in index else index["files"][0]
            if value is None:
                del place[name]
            else:
                place[name] = value
        path.write_text(json.dumps(index))

    return change


INCONSISTENT = {
    "no files": (edited(files=None), "index.json"),
    "no dtype": (edited(dtype=None), "index.json"),
    "no rows": (edited(rows=None), "index.json"),
    "no names": (edited(name=None), "index.json"),
    "more rows": (edited(rows=5), "index.json|patterns-00000"),
    "fewer rows": (edited(rows=3), "index.json|patterns-00000"),
    "rows below 0": (edited(rows=-1), "index.json"),
    "another dimension": (edited(dim=4), "index.json|patterns-00000"),
    "another dtype": (edited(dtype="float16"), "index.json|patterns-00000"),
    "a dtype of no kind": (edited(dtype="Tensor"), "index.json"),
    "a file twice": (edited(name="patterns-00001.safetensors"), "index.json"),
    "no list of files": (edited(files=3), "index.json"),
    "another version": (edited(version=3), "index.json"),
    "no index": (lambda folder: (folder / "index.json").unlink(), "index.json.*patterns-00000.* without one"),
}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("case", INCONSISTENT)
def test_an_index_that_does_not_fit_its_files_is_refused(case, old, filled):
    folder, *_ = filled
    if old:
        version_1(folder)
    change, told = INCONSISTENT[case]
    change(folder)
    with pytest.raises(ValueError, match=rf"`folder` must hold .*({told}).*; .*copy the whole folder again"):
        StoredPatterns(folder)


def flipped(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("at", [0, 3, 20, -1, -40])
def test_a_flipped_bit_is_told_where_it_is_read(at, filled):
    folder, keys, _ = filled
    stored = StoredPatterns(folder)
    flipped(folder / "patterns-00002.safetensors", at)
    told = r"`folder` must hold patterns-00002\.safetensors .*; copy the whole folder again"
    with pytest.raises(ValueError, match=told):
        stored.load(slice(4, 9))
    with pytest.raises(ValueError, match=told):
        StoredPatterns(folder, check=True)
    # What is not read cannot be wrong.
    assert torch.equal(StoredPatterns(folder).load(slice(0, 5)).keys, keys[:5])


def test_checksums_are_of_parts_of_a_file(tmp_path):
    keys = patterns(30_000, dim=16)
    StoredPatterns(tmp_path).append(keys)
    flipped(tmp_path / "patterns-00000.safetensors", -1)
    stored = StoredPatterns(tmp_path)
    assert torch.equal(stored.load(slice(1, 20_000)).keys, keys[1:20_000])
    with pytest.raises(ValueError, match="got rows 28672 to 29999 of another checksum"):
        stored.load(slice(28_700, 28_701))


def test_a_file_that_goes_after_it_was_found_is_named(filled):
    stored = StoredPatterns(filled[0])
    (filled[0] / "patterns-00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"must hold patterns-00001.* cannot be read .*copy the whole"):
        stored.load()


def truncated(folder):
    path = folder / "patterns-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


def other_index(folder):
    (folder / "index.json").write_text(json.dumps({"format": "another"}))


BROKEN = {
    "truncated": (truncated, r"`folder` must hold patterns-00001.safetensors of \d+ bytes, got one of \d+ bytes"),
    "missing": (lambda folder: (folder / "patterns-00002.safetensors").unlink(), "got no such file; copy the whole"),
    "half an index": (lambda folder: (folder / "index.json").write_text('{"format"'), "index.json of format"),
    "another index": (other_index, "index.json of format"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_refused(case, filled):
    folder, *_ = filled
    change, told = BROKEN[case]
    change(folder)
    with pytest.raises(ValueError, match=told):
        StoredPatterns(folder)


def test_what_does_not_fit_is_refused(filled):
    stored = StoredPatterns(filled[0])
    with pytest.raises(ValueError, match="`size` must be"):
        list(stored.pieces(0))
    with pytest.raises(ValueError, match=r"`keys` must be like what is stored.*got 6"):
        stored.append(patterns(2, dim=6), patterns(2, dim=2))
    assert len(stored) == 12
    assert re.search("12 of dimension 5, values of 2, 3 files", repr(stored))
