import collections
import io

import pytest
import torch
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from implicit_attention.cli import main, maze, maze_model
from implicit_attention.cli.mazes import GENERATORS, Mazes, mazes
from implicit_attention.cli.settings import MazeSettings


def invoke(*arguments):
    return CliRunner().invoke(main.app, ["maze", *map(str, arguments)], env={"COLUMNS": "120"})


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


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("far", [False, True])
def test_a_maze_is_a_tree_of_neighbours_and_its_path_the_one_way(generator, far):
    size, drawn = 6, mazes(generator, 6, 5, "test", far=far)
    assert drawn.inputs.shape == (5, 36, 6)
    for inputs, mask, targets in zip(drawn.inputs, drawn.mask, drawn.targets, strict=True):
        assert bool((mask == mask.T).all())
        assert not bool(mask.diagonal().any())
        assert int(mask.sum()) == 2 * 35
        start, goal = (int(i) for i in inputs[:, :2].argmax(0))
        assert inputs[:, :2].sum(0).tolist() == [1, 1]
        assert start != goal
        assert not far or (start, goal) == (0, 35)
        for cell in range(36):
            row, column = divmod(cell, size)
            beside = ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1))
            inside = [0 <= r < size and 0 <= c < size for r, c in beside]
            ways = [float(ok and bool(mask[cell, r * size + c])) for ok, (r, c) in zip(inside, beside, strict=True)]
            assert inputs[cell, 2:].tolist() == ways
            assert int(mask[cell].sum()) == sum(ways)
        assert sorted(shortest(mask, start, goal)) == targets.nonzero().flatten().tolist()


def test_mazes_are_those_of_their_seed_and_generators_differ():
    for generator in GENERATORS:
        few, more = mazes(generator, 5, 2, "a"), mazes(generator, 5, 4, "a")
        assert all(torch.equal(a, b[:2]) for a, b in zip(few, more, strict=True))
        assert not torch.equal(mazes(generator, 5, 2, "b").edges, few.edges)
    # Depth-first mazes have few dead ends, Prim's many.
    ends = {g: int((mazes(g, 12, 8, "a").inputs[..., 2:].sum(-1) == 1).sum()) for g in GENERATORS}
    assert 1.5 * ends["depth-first"] < ends["Wilson"] < ends["Prim"]


@pytest.fixture
def corner():
    """Two by two cells; the way from start to goal is down, then right."""
    inputs = torch.zeros(1, 4, 6)
    inputs[0, 0, 0] = inputs[0, 3, 1] = 1
    inputs[0, 0, [3, 5]] = inputs[0, 1, 4] = inputs[0, 2, [2, 5]] = inputs[0, 3, 4] = 1
    edges = torch.tensor([[[-1, 2, -1, 1], [-1, -1, 0, -1], [0, -1, -1, 3], [-1, -1, 2, -1]]])
    return Mazes(inputs, edges, torch.tensor([[1, 0, 1, 1]]))


def test_a_maze_as_text_and_as_colours(corner):
    path = torch.tensor([0.9, 0.1, 0.8, 0.9])
    assert maze.drawn(corner, path) == ["#####", "#S  #", "#.###", "#..G#", "#####"]
    text = maze.view(corner, path)
    assert text.plain == "▀▀▀▀▀\n▀▀▀▀▀\n▀▀▀▀▀"
    styles = [str(span.style) for span in text.spans]
    assert len(styles) == 15
    # Above the start is a wall, and the lower edge has nothing below it.
    assert styles[1] == "rgb(27,39,51) on rgb(0,158,115)"
    assert styles[-1] == "rgb(27,39,51)"
    faint, strong = (maze._rgb(value) for value in (0.0, 1.0))
    assert (faint, strong) == ("238,240,242", "0,114,178")


def answer(model, size, generator="depth-first"):
    drawn = mazes(generator, size, 1, "to watch, 0", far=True)
    return drawn, model.solved(drawn)


def test_what_is_watched_is_the_course_of_the_solve():
    torch.manual_seed(0)
    model = maze_model.MazeModel().eval()
    drawn, found = answer(model, 6)
    solution = found.solution
    assert bool(solution.converged)
    assert len(found.paths) == len(found.residuals) == int(solution.num_evals)
    assert found.residuals[-1] == pytest.approx(float(solution.residual / solution.value.norm()), rel=0.05)
    assert found.residuals[-1] <= maze_model.RTOL < found.residuals[-2]
    with torch.no_grad():
        logits = model(drawn.inputs, drawn.mask)
    torch.testing.assert_close(found.paths[-1], logits[0].softmax(-1)[:, 1])
    # The answer after each evaluation is that of a loop of as many steps.
    with torch.no_grad():
        state = model.layer(model.embed(drawn.inputs), drawn.mask, steps=4)
    torch.testing.assert_close(found.paths[3], model.head(state)[0].softmax(-1)[:, 1].detach())
    wrong = int(((found.paths[-1] > 0.5).long() != drawn.targets[0]).sum())
    assert maze.verdict(drawn, found).startswith(f"settled after {len(found.paths)} evaluations")
    assert maze.verdict(drawn, found).endswith(f": {wrong} cells are wrong")


def test_plain_text_where_there_is_no_terminal(tmp_path):
    gif = tmp_path / "here.gif"
    result = invoke("--quick", "--size", "4,6", "--generator", "Prim", "--gif", gif)
    assert result.exit_code == 0, result.output
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


def shown(size, width, height):
    options = {"force_terminal": True, "color_system": "truecolor", "highlight": False}
    console = Console(file=io.StringIO(), width=width, height=height, **options)
    torch.manual_seed(0)
    drawn, found = answer(maze_model.MazeModel().eval(), size)
    maze.show(console, drawn, found, MazeSettings(speed=1000), size)
    return found, console.file.getvalue()


def test_a_terminal_shows_every_evaluation():
    found, output = shown(5, 80, 30)
    for index in range(len(found.paths)):
        assert f"evaluation {index + 1:>3}, residual" in output
    assert output.count("▀") >= 11 * 6 * len(found.paths)
    assert "settled after" in output


@pytest.mark.parametrize(("width", "height"), [(30, 30), (80, 20)])
def test_a_terminal_that_is_too_small_says_what_is_needed(width, height):
    _, output = shown(15, width, height)
    assert "▀" not in output
    words = " ".join(output.split())
    assert "a terminal needs 31 columns and 21 lines" in words
    assert f"this one has {width} and {height}" in words
    assert "settled after" in words


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
def test_what_cannot_be_used_is_said_in_one_line_before_any_training(arguments, message, monkeypatch):
    monkeypatch.setattr(maze, "trained", lambda settings: pytest.fail("trained"))
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr


def test_training_learns_and_leaves_the_callers_random_numbers_alone():
    losses = []
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model = maze.trained(MazeSettings(quick=True))
    assert torch.equal(torch.rand(3), expected)
    assert not model.training
    torch.manual_seed(0)
    maze_model.train(maze_model.MazeModel(), 12, lambda update, loss: losses.append((update, loss)))
    assert [update for update, _ in losses] == list(range(1, 13))
    assert losses[-1][1] < 0.9 * losses[0][1]


def test_a_block_trained_on_small_mazes_solves_larger_ones():
    model = maze.trained(MazeSettings())
    for size, share in ((5, 0.95), (9, 0.85), (17, 0.4)):
        held_out = mazes("depth-first", size, 40, "to test")
        with torch.no_grad():
            right = (model(held_out.inputs, held_out.mask).argmax(-1) == held_out.targets).all(-1)
        assert float(right.double().mean()) >= share, size
