import collections

import pytest
import torch
from commands import done, refused
from PIL import Image

from implicit_attention.studies.mazes import mazes

NAMES = ("depth-first", "Prim", "Wilson")


def shortest(mask, start, goal):
    """The cells of the shortest way, by breadth-first search."""
    came_from, waiting = {start: start}, collections.deque([start])
    while waiting:
        here = waiting.popleft()
        for there in mask[here].nonzero().flatten().tolist():
            if there not in came_from:
                came_from[there] = here
                waiting.append(there)
    assert len(came_from) == len(mask)
    way = [goal]
    while way[-1] != start:
        way.append(came_from[way[-1]])
    return way


@pytest.mark.parametrize("generator", NAMES)
def test_a_maze_is_a_tree_of_neighbours_and_its_path_the_one_way_between_corners(generator):
    drawn = mazes(generator, 6, 5, "test")
    assert drawn.cells == 36
    assert drawn.inputs.nonzero()[:, 1:].tolist() == 5 * [[0, 0], [35, 1], *([wall, 2] for wall in range(36, 40))]
    assert bool((drawn.mask[:, 36:] == torch.eye(40).bool()[36:]).all())
    for mask, ways, targets in zip(drawn.mask, drawn.ways, drawn.targets, strict=True):
        open_ = mask[:36, :36]
        assert bool((open_ == open_.T).all())
        assert not bool(open_.diagonal().any())
        assert int(open_.sum()) == 2 * 35
        for cell in range(36):
            row, column = divmod(cell, 6)
            beside = ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1))
            inside = [0 <= r < 6 and 0 <= c < 6 for r, c in beside]
            free = [ok and bool(open_[cell, r * 6 + c]) for ok, (r, c) in zip(inside, beside, strict=True)]
            assert ways[cell].tolist() == free
            # On the other sides are walls.
            assert mask[cell, 36:].tolist() == [not way for way in free]
            assert int(mask[cell].sum()) == 4
        assert sorted(shortest(open_, 0, 35)) == (targets == 1).nonzero().flatten().tolist()
        assert targets[36:].tolist() == 4 * [-100]


def test_mazes_are_those_of_their_seed_and_generators_differ():
    for generator in NAMES:
        few, more = mazes(generator, 5, 2, "a"), mazes(generator, 5, 4, "a")
        assert all(torch.equal(a, b[:2]) for a, b in zip(few, more, strict=True))
        assert not torch.equal(mazes(generator, 5, 2, "b").edges, few.edges)
    # Depth-first mazes have few dead ends, Prim's many.
    ends = {g: int((mazes(g, 12, 8, "a").ways.sum(-1) == 1).sum()) for g in NAMES}
    assert 1.5 * ends["depth-first"] < ends["Wilson"] < ends["Prim"]


def test_mazes_with_a_crossing_have_a_cell_with_four_ways_out():
    plain, crossed = (mazes("depth-first", 5, 12, "a", crossed=only).ways.sum(-1).amax(-1) for only in (False, True))
    assert int(plain.min()) < 4
    assert crossed.tolist() == 12 * [4]


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
        (["--size", ""], "got ''"),
        (["--gif", "maze.png"], "`--gif` must end in .gif, got 'maze.png'"),
        (["--gif", "no/such/folder/maze.gif"], "`--gif` must lie in a folder that exists, got 'no/such/folder'"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line_before_any_training(arguments, message):
    refused("maze", *arguments, parts=message)
