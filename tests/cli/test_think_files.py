"""Problems of one's own in `implicit-attention think`, and what cannot be used."""

import struct
import zlib

import pytest
from commands import done, invoke, refused
from PIL import Image

#: A maze with a frame; its path has 9 squares.
DRAWN = """
#######
#S#   #
# # # #
#   #G#
#######
"""


def told(tmp_path, puzzle, text):
    """What is printed of a problem in a file: notes, the title, and all lines."""
    file = tmp_path / "own.txt"
    file.write_text(text)
    lines = done("think", puzzle, "--file", file).stdout.splitlines()
    notes = [line.removeprefix("note: ") for line in lines if line.startswith("note: ")]
    return notes, lines[len(notes)], lines


def test_a_maze_as_text_is_the_one_that_was_drawn_and_its_answer_is_checked(tmp_path):
    notes, title, lines = told(tmp_path, "maze", DRAWN)
    assert (notes, title) == ([], "maze of pixels, 3 x 5, own.txt (trained on ones of 9 x 9)")
    shown = [line for line in lines if line.startswith("#") and line.endswith("#")]
    assert [line.replace(".", " ") for line in shown] == DRAWN.split("\n")[1:-1]
    assert any(line.startswith("settled after") and line.endswith(" are right") for line in lines)
    # The answer is a maze that can be read.
    assert told(tmp_path, "maze", "\n".join(shown))[1] == title


def test_a_maze_as_an_image_is_that_of_the_text(tmp_path):
    drawing, unmarked = (tmp_path / name for name in ("a.png", "b.png"))
    colours = {"#": (20, 20, 30), " ": (250, 250, 250), "S": (40, 200, 60), "G": (220, 50, 40)}
    rows = DRAWN.strip("\n").splitlines()
    image = Image.new("RGB", (len(rows[0]), len(rows)))
    image.putdata([colours[letter] for row in rows for letter in row])
    image.save(drawing)
    image.putdata([colours[letter if letter in "# " else " "] for row in rows for letter in row])
    image.save(unmarked)
    wanted = told(tmp_path, "maze", DRAWN)[2]
    for file, places in ((drawing, ()), (unmarked, ("--start", "1,1", "--goal", "3,5"))):
        found = done("think", "maze", "--file", file, *places).stdout
        assert found.replace(file.name, "own.txt").splitlines() == wanted


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("S  \n # \n  G\n", "it has loops, the model was trained on mazes without"),
        ("S G \n    \n", "one square wide"),
        ("S  \n# G\n   \n", "one square wide"),
        ("##\nS \n G\n", "one square wide"),
        ("#S###\n#   #\n###G#\n", None),
    ],
)
def test_loops_and_wide_ways_are_told(tmp_path, text, note):
    notes = told(tmp_path, "maze", text)[0]
    assert (notes == []) if note is None else (note in notes[-1])


def test_bits_and_digits_of_ones_own(tmp_path):
    _, title, lines = told(tmp_path, "prefix", "0110 1\n01\n")
    assert title == "bits above their prefix parities, 7 bits, own.txt (trained on strings of 32 bits)"
    assert lines[lines.index("0110101") + 1] == "0100110"
    # Long strings are cut; below each part stand its parities.
    lines = told(tmp_path, "prefix", 150 * "1")[2]
    first = lines.index(64 * "1")
    assert lines[first + 1] == 32 * "10"
    assert [line.strip() for line in lines[first + 6 : first + 8]] == [22 * "1", 11 * "10"]
    _, title, _ = told(tmp_path, "sudoku", "1...\n..2.\n.3..\n0004\n")
    assert title == "Sudoku of 4 x 4, 4 givens, own.txt (trained on ones with 6 to 8 givens)"
    (note,) = told(tmp_path, "sudoku", 16 * ".")[0]
    assert note.startswith("288 grids fit these givens (the model was trained on puzzles with one)")


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
    refused("think", puzzle, "--file", written(tmp_path, text), parts=message)


@pytest.mark.parametrize(
    ("side", "message"), [(10_000, "got 10000 x 10000; shrink"), (60_000, "got far more: 'own.png'; shrink")]
)
def test_images_that_are_too_large_are_refused_unread(tmp_path, side, message):
    """A header that promises more pixels than Pillow reads; the rest is left out."""
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    file = written(tmp_path, content + b"\0\0\0\0IDAT", "own.png")
    refused("think", "maze", "--file", file, parts=message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["maze", "--size", "8"], "`--size` must be an odd number of squares from 5 to 65, got 8; try --size 17"),
        (["maze", "--size", "67"], "got 67"),
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
    refused("think", *arguments, parts=message)


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
    refused("think", "maze", "--file", written(tmp_path, DRAWN), *places, parts=message)


def test_start_and_goal_have_to_differ(tmp_path):
    places = ("--file", written(tmp_path, "   \n # \n   "), "--start", "0,0", "--goal", "0,0")
    refused("think", "maze", *places, parts="must have a start and a goal apart, got (0, 0)")


def test_wrong_images_are_refused(tmp_path):
    large, other = tmp_path / "large.png", written(tmp_path, b"no image", "other.png")
    Image.new("RGB", (200, 9), "white").save(large)
    for file, message in (
        (large, "must have one pixel for each square, and at most 67 a side, got 200 x 9"),
        (other, "must be an image that can be read, got 'other.png' (not a PNG image)"),
    ):
        refused("think", "maze", "--file", file, parts=message)


def test_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / "a.gif").mkdir()
    refused("think", "sudoku", "--gif", tmp_path / "a.gif", parts="`--gif` must be a file, got the folder ")
    # Before anything is solved.
    message = "`--gif` must be a writable file, got 'a.gif' (No such file or directory); choose another"
    refused("think", "sudoku", "--gif", "/proc/a.gif", parts=message)
    refused("maze", "--gif", "/proc/a.gif", parts=message)
    (tmp_path / "c.gif").symlink_to(tmp_path / "nowhere.gif")
    done("think", "sudoku", "--gif", tmp_path / "c.gif")
    assert (tmp_path / "c.gif").is_symlink()
    assert (tmp_path / "nowhere.gif").stat().st_size > 1000
    (tmp_path / "b.gif").symlink_to("/dev/full")
    result = invoke("think", "sudoku", "--gif", tmp_path / "b.gif")
    assert result.exit_code == 2
    assert "`--gif` must be a writable file, got 'b.gif' (No space left on device); choose another" in result.stderr
