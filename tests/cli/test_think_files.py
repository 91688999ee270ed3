"""Problems of one's own in `implicit-attention think`, and what cannot be used."""

import struct
import zlib

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from implicit_attention.cli import main, watching
from implicit_attention.studies.errors import InputError
from implicit_attention.studies.thinking.grids import every_grid
from implicit_attention.studies.thinking.puzzles import PUZZLES

MAZE, SUDOKU = PUZZLES["maze"], PUZZLES["sudoku"]

#: A maze with a frame; its path has 9 squares.
DRAWN = """
#######
#S#   #
# # # #
#   #G#
#######
"""


def invoke(*arguments):
    return CliRunner().invoke(main.app, ["think", *map(str, arguments)], env={"COLUMNS": "120"})


@pytest.fixture(autouse=True)
def few_problems(monkeypatch):
    """Tables of few problems, which are made as those of many are."""
    for puzzle in PUZZLES.values():
        monkeypatch.setattr(type(puzzle), "count", 4)


def test_a_maze_as_text_is_the_one_that_was_drawn_and_its_answer_is_checked(tmp_path):
    file = tmp_path / "own.txt"
    file.write_text(DRAWN)
    asked = MAZE.read(file)
    assert (asked.title, asked.notes) == ("3 x 5, own.txt", ())
    free, start, goal = asked.problem.inputs[0]
    assert free.tolist() == [[1, 0, 1, 1, 1], [1, 0, 1, 0, 1], [1, 1, 1, 0, 1]]
    assert start.nonzero().tolist() == [[0, 0]]
    assert goal.nonzero().tolist() == [[2, 4]]
    assert asked.problem.target[0].tolist() == free.tolist()
    result = invoke("maze", "--file", file)
    assert result.exit_code == 0, result.output
    shown = [line for line in result.stdout.splitlines() if line.startswith("#") and line.endswith("#")]
    assert shown[1][1] == "S"
    # The answer is a maze that can be read.
    file.write_text("\n".join(shown))
    assert torch.equal(MAZE.read(file).problem.inputs, asked.problem.inputs)


def test_a_maze_as_an_image_is_that_of_the_text(tmp_path):
    text, drawing, unmarked = (tmp_path / name for name in ("a.txt", "a.png", "b.png"))
    text.write_text(DRAWN)
    colours = {"#": (20, 20, 30), " ": (250, 250, 250), "S": (40, 200, 60), "G": (220, 50, 40)}
    rows = DRAWN.strip("\n").splitlines()
    image = Image.new("RGB", (len(rows[0]), len(rows)))
    image.putdata([colours[letter] for row in rows for letter in row])
    image.save(drawing)
    image.putdata([colours[letter if letter in "# " else " "] for row in rows for letter in row])
    image.save(unmarked)
    wanted = MAZE.read(text).problem
    for file, places in ((drawing, {}), (unmarked, {"start": (1, 1), "goal": (3, 5)})):
        found = MAZE.read(file, **places).problem
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    result = invoke("maze", "--file", unmarked, "--start", "1,1", "--goal", "3,5")
    assert result.exit_code == 0, result.output


def test_loops_and_wide_ways_are_told_and_every_shortest_path_is_right(tmp_path):
    file = tmp_path / "loop.txt"
    file.write_text("S  \n # \n  G\n")
    asked = MAZE.read(file)
    assert len(asked.notes) == 1
    assert "it has loops, the model was trained on mazes without" in asked.notes[0]
    over, under, both, cut = (
        torch.tensor(rows)
        for rows in (
            [[1, 1, 1], [0, 0, 1], [0, 0, 1]],
            [[1, 0, 0], [1, 0, 0], [1, 1, 1]],
            [[1, 1, 1], [1, 0, 1], [1, 1, 1]],
            [[1, 0, 1], [1, 0, 0], [1, 1, 1]],
        )
    )
    assert [MAZE.wrong(asked.problem, answer) for answer in (over, under)] == [0, 0]
    assert all(MAZE.wrong(asked.problem, answer) > 0 for answer in (both, cut))
    for text in ("S G \n    \n", "S  \n# G\n   \n", "##\nS \n G\n"):
        file.write_text(text)
        assert "one square wide" in MAZE.read(file).notes[-1]
    file.write_text("#S###\n#   #\n###G#\n")
    assert MAZE.read(file).notes == ()


def test_bits_and_digits_of_ones_own(tmp_path):
    file = tmp_path / "own.txt"
    file.write_text("0110 1\n01\n")
    result = invoke("prefix", "--file", file)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "bits above their prefix parities, 7 bits, own.txt (trained on strings of 32 bits)"
    assert lines[lines.index("0110101") + 1] == "0100110"
    file.write_text("1...\n..2.\n.3..\n0004\n")
    asked = SUDOKU.read(file)
    grids = [g for g in every_grid().tolist() if (g[0], g[6], g[9], g[15]) == (0, 1, 2, 3)]
    assert asked.title == "4 givens, own.txt"
    assert (f"{len(grids)} grids fit" in "".join(asked.notes)) == (len(grids) > 1)
    for grid in grids:
        assert SUDOKU.wrong(asked.problem, torch.tensor(grid)) == 0
    file.write_text(16 * ".")
    asked = SUDOKU.read(file)
    assert all(SUDOKU.wrong(asked.problem, grid) == 0 for grid in every_grid())
    assert SUDOKU.wrong(asked.problem, torch.zeros(16)) == 12
    result = invoke("sudoku", "--file", file)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("note: 288 grids fit these givens (the model was trained on puzzles with one)")


# ------------------------------------------------------------------ errors


def written(tmp_path, text, name="own.txt"):
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


@pytest.mark.parametrize(
    ("puzzle", "text", "message"),
    [
        ("maze", "S #\n  G \n", "`--file` must have lines of one length, got 3 and 4; fill up short lines"),
        ("maze", "\n\n", "must hold a maze, got an empty file"),
        ("maze", "  #\n  G\n", "must have one start, got none; mark one square with S"),
        ("maze", "S #\nS G\n", "must have one start, got 2"),
        ("maze", "S #\n   \n", "must have one goal, got none; mark one square with G"),
        ("maze", "S x\n  G\n", "got 'x' in row 0, column 2; replace it"),
        ("maze", "S#G\n ##\n", "must have a path from start to goal, got walls between them; open one"),
        ("maze", 70 * " " + "SG\n" + 72 * " ", "must have sides of 2 to 65 squares without its frame, got 2 x 72"),
        ("maze", b"\xff\xfe\x00", "must be text with a maze (save an image as .png), got bytes that are no UTF-8"),
        ("maze", 70_000 * "#", "must have at most 65536 bytes, got more"),
        ("prefix", "\ufeff1", "must hold 2 to 512 bits, got 1"),
        ("prefix", "01a", "must hold bits, 0 and 1, got 'a'; take other characters out"),
        ("prefix", "1", "must hold 2 to 512 bits, got 1"),
        ("prefix", 600 * "1", "must hold 2 to 512 bits, got 600; take a part of them"),
        ("sudoku", "1234", "hold 16 characters, digits 1 to 4 and 0 or . for an empty cell, got '1234'"),
        ("sudoku", 60_000 * "1", "got 60000 characters that begin '1111111111111111'; write the grid row by row"),
        ("sudoku", 15 * "." + "7", "got '0000000000000007'; write the grid row by row"),
        ("sudoku", "11" + 14 * ".", "must hold a puzzle that has a solution, got one that none of all 288 grids fits"),
    ],
)
def test_wrong_files_are_refused(tmp_path, puzzle, text, message):
    refused([puzzle, "--file", written(tmp_path, text)], message)


@pytest.mark.parametrize(
    ("side", "message"), [(10_000, "got 10000 x 10000; shrink"), (60_000, "got far more: 'own.png'; shrink")]
)
def test_images_that_are_too_large_are_refused_unread(tmp_path, side, message):
    """A header that promises more pixels than Pillow reads; the rest is left out."""
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    refused(["maze", "--file", written(tmp_path, content + b"\0\0\0\0IDAT", "own.png")], message)


def refused(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["maze", "--size", "8"], "`--size` must be an odd number of squares from 5 to 65, got 8; try --size 17"),
        (["maze", "--size", "67"], "got 67"),
        (["prefix", "--size", "1"], "`--size` must be a number of bits from 2 to 512, got 1"),
        (["sudoku", "--size", "3"], "`--size` must be a number of givens from 4 to 15, got 3"),
        (["maze", "--size", "9", "--file", "a"], "`--size` must be left out beside --file"),
        (["maze", "--start", "1,1"], "`--start` must stand beside --file with a maze, got '1,1' alone"),
        (["prefix", "--file", "a", "--goal", "1,1"], "`--goal` must stand beside --file with a maze"),
        (["maze", "--file", "none.txt"], "`--file` must be a file that can be read, got 'none.txt' (No such file"),
        (["maze", "--file", "none.png"], "`--file` must be an image that can be read, got 'none.png' (No such file"),
        (["maze", "--quick"], "`--quick` must stand beside --train, got it alone"),
        (["maze", "--out", "a.safetensors"], "`--out` must stand beside --train"),
        (["maze", "--train", "--out", "a.pt"], "`--out` must end in .safetensors, got 'a.pt'; try --out a.safetensors"),
        (["maze", "--gif", "a.png"], "`--gif` must end in .gif, got 'a.png'; try --gif a.gif"),
        (["maze", "--gif", "no/such/a.gif"], "`--gif` must lie in a folder that exists, got 'no/such'"),
        (["maze", "--calibration", "a.pdf"], "`--calibration` must end in .png, got 'a.pdf'"),
    ],
)
def test_wrong_options_are_refused(arguments, message):
    refused(arguments, message)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (["--start", "1"], "`--start` must be two whole numbers with a comma between them, got '1'; try 0,0"),
        (["--start", "0,0"], "`--start` must be a free square, rows 0 to 4 and columns 0 to 6, got 0,0, a wall"),
        (["--goal", "9,9"], "`--goal` must be a free square, rows 0 to 4 and columns 0 to 6, got 9,9; choose another"),
        (["--start", "1,3"], "`--file` must have one start, got 2"),
    ],
)
def test_wrong_places_are_refused(tmp_path, places, message):
    refused(["maze", "--file", written(tmp_path, DRAWN), *places], message)


def test_start_and_goal_have_to_differ(tmp_path):
    file = written(tmp_path, "   \n # \n   ")
    refused(
        ["maze", "--file", file, "--start", "0,0", "--goal", "0,0"], "must have a start and a goal apart, got (0, 0)"
    )


def test_wrong_images_are_refused(tmp_path):
    large, other = tmp_path / "large.png", written(tmp_path, b"no image", "other.png")
    Image.new("RGB", (200, 9), "white").save(large)
    refused(["maze", "--file", large], "must have one pixel for each square, and at most 67 a side, got 200 x 9")
    refused(["maze", "--file", other], "must be an image that can be read, got 'other.png' (not a PNG image)")


def test_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / "a.gif").mkdir()
    refused(["sudoku", "--gif", tmp_path / "a.gif"], "`--gif` must be a file, got the folder ")
    message = r"`--gif` must be a writable file, got 'b.gif' \(full\); choose another"
    with pytest.raises(InputError, match=message), watching.writable_file("--gif", tmp_path / "b.gif"):
        raise OSError(28, "full")
