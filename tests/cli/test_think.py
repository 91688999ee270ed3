"""`implicit-attention think`: the shipped weights, what is shown, and how weights are made anew."""

import json
import re
from pathlib import Path

import pytest
import torch
from commands import done
from PIL import Image
from safetensors import safe_open

import implicit_attention

#: As many colours as a terminal may have, and no wait between evaluations.
TERMINAL = {"FORCE_COLOR": 1, "COLORTERM": "truecolor", "TERM": "xterm-256color", "COLUMNS": 100, "LINES": 30}
TABLE = ["set", "problems", "settled", "exact", "exact, settled", "exact, not settled", "evaluations"]


@pytest.mark.parametrize(
    ("puzzle", "size", "most", "line"),
    [
        ("prefix", 256, 30, "bits above their prefix parities, 256 bits (trained on strings of 32 bits)"),
        ("sudoku", 4, 0, "Sudoku of 4 x 4, 4 givens (trained on ones with 6 to 8 givens)"),
        ("maze", 25, 16, "maze of pixels, 25 x 25 (trained on ones of 9 x 9)"),
    ],
)
def test_the_shipped_weights_settle_on_the_answer_of_a_problem_larger_than_those_of_the_training(
    puzzle, size, most, line
):
    result = done("think", puzzle, "--size", size)
    assert "\x1b" not in result.output
    lines = result.stdout.splitlines()
    assert lines[0] == line
    assert lines[1].startswith("evaluation   1, residual 1.0e+00, ")
    (verdict,) = (line for line in lines if line.startswith("settled after"))
    evaluations, residual = re.match(
        r"settled after (\d+) evaluations \(CONVERGED, relative residual (\S+),", verdict
    ).groups()
    assert float(residual) <= 1e-3
    # It took more steps than the training had at most, but for the Sudoku, whose board does not grow.
    assert int(evaluations) > most
    assert verdict.endswith(" are right")
    assert lines[lines.index(verdict) + 1].startswith("checked by ")
    assert any(line.startswith(f"weights {puzzle}.safetensors, ") and " sha256 " in line for line in lines)
    assert max(map(len, lines)) <= 120
    assert [line.split("  ")[0] for line in lines[-7:]] == TABLE


@pytest.mark.parametrize("puzzle", ["maze", "prefix", "sudoku"])
def test_files_of_weights_are_small_and_say_where_they_are_from(puzzle):
    folder = Path(implicit_attention.__file__).parent / "studies" / "thinking" / "weights"
    file = folder / f"{puzzle}.safetensors"
    assert file.stat().st_size < 200_000
    with safe_open(file, "pt") as opened:
        told = json.loads(opened.metadata()["training"])
    assert (told["puzzle"], set(told)) == (puzzle, {"puzzle", "seed", "recipe"})


def test_a_terminal_shows_every_evaluation_in_colours():
    maze = done("think", "maze", "--size", 5, "--speed", 1000, **TERMINAL).stdout
    assert maze.count("▀") >= 4 * 7
    # Start, goal, a way and a wall have their own.
    assert len(set(re.findall(r"38;2;\d+;\d+;\d+", maze))) >= 4
    grid = done("think", "sudoku", "--size", 6, "--speed", 1000, **TERMINAL).stdout
    assert "evaluation   1, residual" in grid
    assert "settled after" in grid
    # Givens stand in brackets.
    assert grid.count("[") > 6


@pytest.mark.parametrize("without", [{"NO_COLOR": 1}, {"TERM": "dumb", "COLORTERM": ""}])
@pytest.mark.parametrize("columns", [60, 80])
def test_a_terminal_without_colours_shows_characters_and_tables_that_fit(without, columns):
    lines = done("think", "maze", "--size", 9, **TERMINAL | {"COLUMNS": columns} | without).stdout.splitlines()
    shown = [re.sub("\x1b[^m]*m", "", line) for line in lines]
    assert "▀" not in "".join(shown)
    assert shown.count("#" * 11) == 2
    assert sum(line.count("S") + line.count("G") for line in shown if line.startswith("#")) == 2
    assert [line.split("  ")[0] for line in shown[-21:]] == 3 * TABLE
    assert max(map(len, shown[-21:])) <= columns


@pytest.mark.parametrize(("columns", "lines"), [(26, 30), (80, 8)])
def test_a_terminal_that_is_too_small_says_what_is_needed(columns, lines):
    size = {"COLUMNS": columns, "LINES": lines}
    shown = done("think", "maze", "--size", 25, "--speed", 1000, **TERMINAL | size).stdout
    words = " ".join(re.sub("\x1b[^m]*m", "", shown).split())
    assert "▀" not in words
    assert f"this one has {columns} and {lines}" in words
    assert "settled after" in words


def test_files_that_are_written(tmp_path):
    gif, curve = tmp_path / "a.gif", tmp_path / "risk.png"
    result = done("think", "sudoku", "--gif", gif, "--calibration", curve)
    assert "a.gif written" in result.stdout
    assert "risk.png written" in result.stdout
    with Image.open(gif) as image:
        assert image.n_frames > 5
    with Image.open(curve) as image:
        assert image.size[0] > 500


@pytest.mark.slow
def test_weights_are_trained_written_and_the_same_each_time(tmp_path):
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for seed, file in enumerate(files):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        result = done("think", "sudoku", "--train", "--quick", "--out", file)
        assert torch.equal(torch.get_rng_state(), before)
        assert "update 5 of 5, loss" in result.stderr
        assert "weights trained now" in result.stdout
    assert files[0].read_bytes() == files[1].read_bytes()
    with safe_open(files[0], "pt") as opened:
        told = json.loads(opened.metadata()["training"])
    assert told["recipe"].startswith("5 updates of 64 problems, 4 to 16 steps drawn")


@pytest.mark.slow
@pytest.mark.parametrize(("puzzle", "size"), [("maze", 17), ("prefix", 128)])
def test_hardly_trained_weights_are_told_to_be_wrong(puzzle, size):
    result = done("think", puzzle, "--train", "--quick", "--size", size)
    assert "update 5 of 5, loss" in result.stderr
    assert re.search(r"settled after \d+ evaluations \(.*\): \d+ of \d+ \w+ wrong", result.stdout)
