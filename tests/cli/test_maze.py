import pytest
from commands import done, refused
from PIL import Image


@pytest.mark.slow
def test_plain_text_where_there_is_no_terminal(tmp_path):
    gif = tmp_path / "here.gif"
    result = done("maze", "--quick", "--size", "4,6", "--generator", "Prim", "--gif", gif)
    assert "\x1b" not in result.output
    lines = result.stdout.splitlines()
    assert [line for line in lines if " maze of " in line] == [
        f"Prim maze of {size} x {size} (trained on depth-first ones of 5 x 5)" for size in (4, 6)
    ]
    assert sum(line.startswith("settled after") for line in lines) == 2
    first = lines.index("#" * 9)
    assert lines[first + 1].startswith("#S")
    assert lines[first + 7].endswith("G#")
    assert lines[first + 8] == "#" * 9
    assert result.stderr.splitlines()[-1].endswith(f"update 10 of 10, loss {result.stderr.split()[-1]}")
    for size in (4, 6):
        assert f"here-{size}.gif written" in result.stdout
        with Image.open(tmp_path / f"here-{size}.gif") as image:
            assert image.n_frames > 3
    assert not gif.exists()


@pytest.mark.slow
def test_a_terminal_shows_every_evaluation_or_says_what_it_needs():
    terminal = {"FORCE_COLOR": 1, "COLORTERM": "truecolor", "TERM": "xterm-256color", "COLUMNS": 80, "LINES": 30}
    output = done("maze", "--quick", "--size", "5,40", "--speed", 1000, **terminal).stdout
    small, large = output.split("maze of 40 x 40")
    assert "evaluation   1, residual" in small
    assert small.count("▀") >= 11 * 6
    assert "▀" not in large
    assert "a terminal needs 81 columns" in " ".join(large.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "2"], "`--size` must be whole numbers from 3 to 40 with commas between them, got '2'"),
        (["--size", "9,x"], "got '9,x'; try --size 9,17"),
        (["--size", "41"], "from 3 to 40"),
        (["--gif", "maze.png"], "`--gif` must end in .gif, got 'maze.png'"),
        (["--gif", "no/such/folder/maze.gif"], "`--gif` must lie in a folder that exists, got 'no/such/folder'"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line_before_any_training(arguments, message):
    refused("maze", *arguments, parts=message)
