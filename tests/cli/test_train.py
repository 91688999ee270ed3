"""`implicit-attention train`: what it writes, how it goes on, and what cannot be used."""

import hashlib
import math

import numpy as np
import pytest
import torch
from commands import done, invoke, refused, strict
from PIL import Image

from implicit_attention.studies import training


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "mode"), [("digits", "published"), ("digits", "equilibrium"), ("photos", "published")]
)
def test_inpainting_writes_what_it_found_and_goes_on(tmp_path, data, mode):
    out = tmp_path / "made" / "here"
    options = ("train", "inpaint", "--quick", "--data", data, "--mode", mode, "--out", out)
    before = torch.random.get_rng_state()
    result = done(*options, "--updates", 3)
    assert torch.equal(torch.random.get_rng_state(), before)
    pictures = ("reconstruction.png", "energy.png")
    assert {path.name for path in out.iterdir()} == {"metrics.json", "checkpoint.pt", *pictures}
    for name in pictures:
        with Image.open(out / name) as image:
            assert min(image.size) > 300
            assert len(np.unique(np.asarray(image.convert("L")))) > 20
    found = strict(out / "metrics.json")
    assert found["settings"]["data"] == data
    assert found["training"]["updates"] == 3
    assert len(found["training"]["losses"]) == 1
    answer = "equilibrium" if mode == "equilibrium" else "published, 12 steps"
    assert found["answer"] == answer
    stages = [f"{mode}, {steps} step{'s' * (steps > 1)}" for steps in (1, 4, 12)]
    assert list(found["rmse"]) == ["visible mean", "harmonic", *stages, "equilibrium"]
    # Harmonic interpolation learns nothing, and is better than a constant.
    assert 0 < found["rmse"]["harmonic"] < found["rmse"]["visible mean"] < 1
    for name, error in found["rmse"].items():
        assert name in result.stdout
        assert f"{error:.4f}" in result.stdout
    for verdict in found["verdicts"]:
        part = found["rmse"][answer] / found["rmse"][verdict["baseline"]]
        assert verdict["part"] == pytest.approx(part)
        assert verdict["holds"] == (part <= verdict["at_most"])
    # What has ended is measured again, from the checkpoint.
    done(*options, "--resume")
    assert strict(out / "metrics.json")["rmse"] == found["rmse"]


@pytest.mark.slow
def test_checkpoints_of_other_trainings_and_damaged_ones_are_refused(tmp_path):
    options = ("train", "inpaint", "--quick", "--out", tmp_path)
    done(*options, "--updates", 2)
    other = "`--resume` cannot use checkpoint.pt in --out"
    for arguments, message in (
        (["--updates", 2], "`--out` must hold no checkpoint of another training, got checkpoint.pt there"),
        (["--resume", "--seed", 1], "which has seed 0 instead of 1; give the same ones"),
        (["--resume", "--mode", "equilibrium"], "which has mode published instead of equilibrium"),
        (["--resume", "--data", "photos"], other),
    ):
        refused(*options, *arguments, parts=message)
    whole = (tmp_path / "checkpoint.pt").read_bytes()
    (tmp_path / "checkpoint.pt").write_bytes(whole[: len(whole) // 2])
    refused(*options, "--resume", parts=[other, "truncated"])


@pytest.mark.slow
def test_an_interrupted_training_has_a_checkpoint_and_goes_on_to_the_same_losses(tmp_path, monkeypatch):
    options, whole, cut = ("train", "characters", "--quick", "--updates", 4, "--out"), tmp_path / "a", tmp_path / "b"
    done(*options, whole)
    update, made = training.make_update, []

    def interrupted(*arguments):
        made.append(arguments)
        if len(made) == 3:
            raise KeyboardInterrupt
        return update(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(training, "make_update", interrupted)
        result = invoke(*options, cut)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == f"interrupted: {cut} holds checkpoint.pt; go on with --resume"
    done("train", "characters", "--quick", "--resume", "--out", cut)
    found, expected = (strict(folder / "metrics.json")["training"] for folder in (cut, whole))
    assert found["resumed_after"] == 1
    assert found["losses"] == expected["losses"]


@pytest.mark.slow
def test_minutes_become_updates_and_bits_of_characters_are_those_of_the_file(tmp_path):
    from pydoc_data.topics import topics

    result = done("train", "characters", "--quick", "--minutes", 0.05, "--out", tmp_path)
    found = strict(tmp_path / "metrics.json")
    assert found["training"]["updates"] >= 1
    whole = "\n".join(topics[name] for name in sorted(topics))
    assert found["data"]["sha256"] == hashlib.sha256(whole.encode()).hexdigest()
    assert found["data"]["alphabet"] == len(set(whole))
    values = found["bits_per_character"]
    unigram, bigram, model = values
    assert values[bigram] < values[unigram] < math.log2(found["data"]["alphabet"])
    for verdict in found["verdicts"]:
        assert verdict["holds"] == (values[model] < values[verdict["baseline"]])
    for value in values.values():
        assert f"{value:.3f}" in result.stdout
    done("train", "characters", "--quick", "--resume", "--out", tmp_path)
    assert strict(tmp_path / "metrics.json")["bits_per_character"] == values


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "1", "--updates", "5"], "`--minutes` must be left out beside --updates"),
        (["--rate", "0"], "`--rate` must be > 0 and finite, got 0"),
        (["--rate", "inf"], "`--rate` must be > 0 and finite, got inf"),
        (["--resume"], "`--resume` must find a checkpoint of an earlier run in --out, got no checkpoint.pt there"),
        (["--resume", "--updates", "5"], "`--minutes` and `--updates` must be left out beside --resume"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(tmp_path, arguments, message):
    refused("train", "inpaint", "--out", tmp_path, *arguments, parts=message)
