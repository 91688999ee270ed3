"""The looped language model of the examples: it learns, is solved, and decodes what it predicts."""

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


@pytest.fixture(scope="module")
def names():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield runpy.run_path(str(EXAMPLES / "looped_text.py"), run_name="example")


def test_it_runs_and_prints_what_it_found(names, capsys, tmp_path):
    picture = tmp_path / "text.png"
    found = names["main"](["--quick", "--picture", str(picture)])
    printed = capsys.readouterr().out
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert f"{found['parameters']} parameters" in printed
    assert [*found["loops"]] == [1, 2, 4, 8, 16, 64]
    assert all(f"{steps}: {value:.3f}" in printed for steps, value in found["loops"].items())
    assert f"solved: {found['solved']['bits']:.3f} bits, {found['solved']['settled']:.1%}" in printed
    assert len(found["exits"]) == 4
    for value in found["exits"].values():
        assert f"{value['bits']:.3f} bits, {value['evaluations']:.2f} evaluations" in printed
    # Layers, keys and values, tokens, width, bytes of a number.
    assert found["decoded"]["bytes"] == 2 * 2 * (64 + 8) * 96 * 4
    assert found["decoded"]["text"] in printed


def test_training_makes_the_loss_smaller_and_the_last_step_rest(names):
    torch.manual_seed(0)
    reader, tokens = names["Reader"](11), torch.randint(11, (4, 17))
    given = tokens[:, :-1], tokens[:, 1:]

    def bits():
        return names["bits"](reader.eval(), *given, steps=4)

    before = bits()
    names["train"](reader, lambda: ((given[0],), given[1]), updates=30, rate=4e-3, loss=reader.loss)
    assert bits() < 0.9 * before


@torch.no_grad()
def test_the_cache_predicts_what_the_whole_text_does(names):
    torch.manual_seed(0)
    reader, tokens = names["Reader"](11).eval(), torch.randint(11, (1, 9))
    cache = reader.layer.new_cache()
    found = torch.cat([reader(tokens[:, i : i + 1], cache=cache) for i in range(9)], dim=1)
    torch.testing.assert_close(found, reader(tokens), rtol=1e-2, atol=1e-2)
