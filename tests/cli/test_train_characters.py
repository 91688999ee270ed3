import hashlib
import json
import math

import pytest
import torch
from typer.testing import CliRunner

from implicit_attention.cli import main
from implicit_attention.models import load_checkpoint
from implicit_attention.studies import characters


def invoke(*arguments):
    return CliRunner().invoke(main.app, ["train", "characters", *map(str, arguments)], env={"COLUMNS": "120"})


@pytest.fixture
def small(monkeypatch):
    for name, value in {"DIM": 8, "HEADS": 2, "HEAD_DIM": 4, "MEMORIES": 8, "LENGTH": 12, "BATCH": 4}.items():
        monkeypatch.setattr(characters, name, value)


def test_the_text_is_split_and_its_hash_is_written_down():
    text = characters.load()
    from pydoc_data.topics import topics

    whole = "\n".join(topics[name] for name in sorted(topics))
    alphabet = sorted(set(whole))
    codes = torch.cat([text.train, text.held_out])
    assert "".join(alphabet[code] for code in codes.tolist()) == whole
    assert len(text.held_out) == pytest.approx(len(whole) / 10, abs=1)
    assert text.size == len(alphabet)
    assert text.source["sha256"] == hashlib.sha256(whole.encode()).hexdigest()


def test_the_baselines_are_those_of_counts(small):
    text = characters.Text(torch.tensor([0, 1, 0, 1, 0, 2]), torch.tensor([0, 1, 2, 0]), 3, {})
    found = characters.baselines(text, torch.tensor([[0, 1, 2], [1, 0, 1]]))
    # Counts 3, 2, 1, and of pairs 01 twice, 10 twice, 02 once; one more of each.
    unigram = [3 / 9, 2 / 9, 4 / 9, 3 / 9]
    bigram = [3 / 6, 1 / 5, 3 / 5, 3 / 6]
    assert found[characters.UNIGRAM] == pytest.approx(-sum(map(math.log2, unigram)) / 4)
    assert found[characters.BIGRAM] == pytest.approx(-sum(map(math.log2, bigram)) / 4)


def test_windows_lie_at_equal_distances_inside_of_the_text(small):
    asked = characters.windows(torch.arange(100), 3)
    assert asked[:, 0].tolist() == [0, 43, 87]
    assert torch.equal(asked - asked[:, :1], torch.arange(13).expand(3, 13))


def test_no_character_reads_a_later_one(small):
    torch.manual_seed(0)
    model, codes = characters.CharacterModel(7), torch.randint(7, (2, 12))
    changed = codes.clone()
    changed[:, 8:] = (codes[:, 8:] + 1) % 7
    with torch.no_grad():
        before, after = model(codes), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_the_command_writes_what_it_found_and_goes_on(small, tmp_path):
    result = invoke("--quick", "--updates", 30, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "metrics.json").read_text())
    assert found["data"]["sha256"] == characters.load().source["sha256"]
    values = found["bits_per_character"]
    assert list(values) == [characters.UNIGRAM, characters.BIGRAM, characters.MODEL]
    assert values[characters.BIGRAM] < values[characters.UNIGRAM] < math.log2(found["data"]["alphabet"])
    for verdict in found["verdicts"]:
        assert verdict["holds"] == (values[characters.MODEL] < values[verdict["baseline"]])
    for value in values.values():
        assert f"{value:.3f}" in result.stdout
    text = characters.load()
    model = characters.CharacterModel(text.size)
    assert load_checkpoint(tmp_path / "checkpoint.pt", model=model)[0] == 30
    asked = characters.windows(text.held_out, characters.QUICK_WINDOWS)
    assert float(characters.bits(model, asked).detach()) == pytest.approx(values[characters.MODEL], rel=1e-6)
    again = invoke("--quick", "--resume", "--out", tmp_path)
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "metrics.json").read_text())["bits_per_character"] == values
    assert "resume" in invoke("--quick", "--out", tmp_path).stderr
