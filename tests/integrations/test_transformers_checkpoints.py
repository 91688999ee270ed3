"""Which checkpoints of a Trainer are whole, as a process that was killed leaves them."""

import json
import shutil
import warnings

import pytest
import torch

pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

from implicit_attention.integrations.transformers import last_whole_checkpoint  # noqa: E402


def write(folder, step, shards=1):
    """The files of a checkpoint, in the formats in which the Trainer writes them."""
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    names = ["model.safetensors"] if shards == 1 else [f"model-0000{i}.safetensors" for i in range(shards)]
    for i, name in enumerate(names):
        safetensors.save_file({f"w{i}": torch.randn(4, 3), f"b{i}": torch.randn(3)}, path / name)
    if shards > 1:
        index = {"weight_map": {f"w{i}": name for i, name in enumerate(names)}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"step": step, "moments": torch.randn(5)}, path / name)
    (path / "training_args.bin").write_bytes((path / "scheduler.pt").read_bytes())
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return path


def asked(folder):
    """The name of the checkpoint, or None, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = last_whole_checkpoint(folder)
    return found and found.rpartition("/")[2], [str(w.message) for w in caught]


def test_the_newest_is_found_by_its_number(tmp_path):
    for step in (9, 100, 20):
        write(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-200").write_text("a file")
    assert asked(tmp_path) == ("checkpoint-100", [])
    assert asked(tmp_path / "nothing there") == (None, [])


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_every_truncation_is_refused_and_the_one_before_used_and_kept(tmp_path, name):
    before, last = write(tmp_path, 3), write(tmp_path, 6)
    data = (last / name).read_bytes()
    held = {file.name: file.read_bytes() for file in before.iterdir()}
    for length in sorted({0, 1, 7, 8, 9, len(data) // 3, len(data) // 2, len(data) - 1}):
        (last / name).write_bytes(data[:length])
        assert get_last_checkpoint(str(tmp_path)).endswith("checkpoint-6")
        told = f"`checkpoint-6` must be a whole checkpoint, got a truncated {name}; "
        told += "the one before is used, if there is any"
        assert asked(tmp_path) == ("checkpoint-3", [told]), length
    assert {file.name: file.read_bytes() for file in before.iterdir()} == held
    (last / name).write_bytes(data)
    assert asked(tmp_path) == ("checkpoint-6", [])


def test_a_checkpoint_that_was_left_in_the_middle_is_refused(tmp_path):
    write(tmp_path, 3)
    last = write(tmp_path, 6)
    state = (last / "trainer_state.json").read_text()
    (last / "trainer_state.json").write_text(state[:-1])
    assert asked(tmp_path)[0] == "checkpoint-3"
    (last / "trainer_state.json").unlink()
    found, (told,) = asked(tmp_path)
    assert found == "checkpoint-3"
    assert "got no whole trainer_state.json, which is written last" in told
    shutil.rmtree(last)
    (write(tmp_path, 6) / "model.safetensors").unlink()
    assert "got no weights (*.safetensors)" in asked(tmp_path)[1][0]


def test_all_shards_that_the_index_names_are_asked_for(tmp_path):
    write(tmp_path, 3)
    last = write(tmp_path, 6, shards=3)
    assert asked(tmp_path) == ("checkpoint-6", [])
    (last / "model-00001.safetensors").unlink()
    found, (told,) = asked(tmp_path)
    assert found == "checkpoint-3"
    assert "got no whole model-00001.safetensors" in told
    shutil.rmtree(tmp_path / "checkpoint-3")
    assert asked(tmp_path)[0] is None
