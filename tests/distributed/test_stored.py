"""Patterns on disk: what is appended is read, by rows and by parts, and what is broken is refused."""

import json
import re

import pytest
import torch
from processes import together
from safetensors import safe_open
from torch import distributed

from implicit_attention.distributed import StoredPatterns
from implicit_attention.distributed import stored as module


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


@pytest.mark.parametrize("when", ["the patterns", "the index"])
def test_a_crash_leaves_what_was_there(when, filled, monkeypatch):
    folder, keys, _ = filled
    settle, calls = module._settle, []

    def crashes(written, name):
        calls.append(name)
        if len(calls) == (1 if when == "the patterns" else 2):
            raise KeyboardInterrupt
        settle(written, name)

    with monkeypatch.context() as patched:
        patched.setattr(module, "_settle", crashes)
        with pytest.raises(KeyboardInterrupt):
            StoredPatterns(folder).append(patterns(3, 7), patterns(3, 8, dim=2))
    assert torch.equal(StoredPatterns(folder).load().keys, keys)
    StoredPatterns(folder).append(patterns(2, 9), patterns(2, 8, dim=2))
    assert torch.equal(StoredPatterns(folder).load().keys, torch.cat([keys, patterns(2, 9)]))


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


def test_what_does_not_fit_is_refused(filled, tmp_path):
    stored = StoredPatterns(filled[0])
    calls = {
        "`keys` must be like what is stored.*got 6": lambda: stored.append(patterns(2, dim=6), patterns(2, dim=2)),
        "`values` must be like what is stored.*got None": lambda: stored.append(patterns(2)),
        "`keys` must be like what is stored.*got torch.float64": lambda: stored.append(
            patterns(2).double(), patterns(2, dim=2).double()
        ),
        "`values` must have one row for each": lambda: stored.append(patterns(2), patterns(3, dim=2)),
        "`keys` must have two axes": lambda: stored.append(patterns(2)[None]),
        "`rows` must be a slice without a step": lambda: stored.load(slice(0, 4, 2)),
        "`size` must be": lambda: list(stored.pieces(0)),
        "`folder` must hold patterns.*append some": lambda: StoredPatterns(tmp_path / "none").load(),
    }
    for told, call in calls.items():
        with pytest.raises(ValueError, match=told):
            call()
    assert len(stored) == 12
    assert re.search("12 of dimension 5, values of 2, 3 files", repr(stored))
