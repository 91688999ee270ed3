import collections
import io

import pytest
import torch
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from implicit_attention.cli import main, maze, watching
from implicit_attention.cli.maze import Maze
from implicit_attention.cli.progress import Progress
from implicit_attention.studies import maze_model
from implicit_attention.studies.mazes import GENERATORS, IGNORED, NONE, Mazes, mazes


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
        assert targets[36:].tolist() == 4 * [IGNORED]


def test_mazes_are_those_of_their_seed_and_generators_differ():
    for generator in GENERATORS:
        few, more = mazes(generator, 5, 2, "a"), mazes(generator, 5, 4, "a")
        assert all(torch.equal(a, b[:2]) for a, b in zip(few, more, strict=True))
        assert not torch.equal(mazes(generator, 5, 2, "b").edges, few.edges)
    # Depth-first mazes have few dead ends, Prim's many.
    ends = {g: int((mazes(g, 12, 8, "a").ways.sum(-1) == 1).sum()) for g in GENERATORS}
    assert 1.5 * ends["depth-first"] < ends["Wilson"] < ends["Prim"]


def test_mazes_with_a_crossing_have_a_cell_with_four_ways_out():
    plain, crossed = (mazes("depth-first", 5, 12, "a", crossed=only).ways.sum(-1).amax(-1) for only in (False, True))
    assert int(plain.min()) < 4
    assert crossed.tolist() == 12 * [4]


@pytest.fixture
def corner():
    """Two by two cells; the way from start to goal is down, then right."""
    inputs = torch.zeros(1, 8, 3)
    inputs[0, 0, 0] = inputs[0, 3, 1] = 1
    inputs[0, 4:, 2] = 1
    cells = [[4, 2, 6, 1], [4, 5, 0, 7], [0, 5, 6, 3], [4, 5, 2, 7]]
    edges = torch.tensor([cells + [[wall, NONE, NONE, NONE] for wall in range(4, 8)]])
    return Mazes(inputs, edges, torch.tensor([[1, 0, 1, 1] + 4 * [IGNORED]]))


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
    faint, strong = (watching.rgb(value) for value in (0.0, 1.0))
    assert (faint, strong) == ("238,240,242", "0,114,178")


def answer(model, size, generator="depth-first"):
    drawn = mazes(generator, size, 1, "to watch, 0")
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
    torch.testing.assert_close(found.paths[-1], logits[0, :36].softmax(-1)[:, 1])
    # The answer after each evaluation is that of a loop of as many steps.
    with torch.no_grad():
        state = model.layer(model.embed(drawn.inputs), drawn.mask, steps=4)
    torch.testing.assert_close(found.paths[3], model.head(state)[0, :36].softmax(-1)[:, 1].detach())
    wrong = int(((found.paths[-1] > 0.5).long() != drawn.targets[0, :36]).sum())
    assert maze.verdict(drawn, found).startswith(f"settled after {len(found.paths)} evaluations")
    assert maze.verdict(drawn, found).endswith(f": {wrong} cells are wrong")


@pytest.mark.slow
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
    watching.show(console, maze.watched(drawn, found, Maze(), size), speed=1000)
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
    monkeypatch.setattr(maze_model, "trained", lambda *arguments: pytest.fail("trained"))
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr


def trained(command):
    with Progress(command.line) as progress:
        return command.run(progress)


@pytest.mark.slow
def test_training_learns_and_leaves_the_callers_random_numbers_alone():
    losses = []
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model = trained(Maze(quick=True))
    assert torch.equal(torch.rand(3), expected)
    assert not model.training
    torch.manual_seed(0)
    maze_model.train(maze_model.MazeModel(), 12, lambda update, loss: losses.append((update, loss)))
    assert [update for update, _ in losses] == list(range(1, 13))
    assert losses[-1][1] < 0.9 * losses[0][1]


@pytest.mark.parametrize(("steps", "asked"), [(8, (4, 6, 8)), (7, (5, 7)), (9, (5, 7, 9))])
def test_the_loss_is_that_of_every_second_state_of_the_later_half_and_of_the_last_change(steps, asked):
    torch.manual_seed(0)
    model, drawn = maze_model.MazeModel(), mazes("depth-first", 4, 3, "test")
    batch = drawn.inputs, drawn.mask, drawn.targets
    x = model.embed(drawn.inputs)
    state = {count: model.layer(x, drawn.mask, steps=count) for count in (*asked, steps - 1)}
    known, entropy = drawn.targets[:, :16].flatten(), torch.nn.functional.cross_entropy
    errors = [entropy(model.head(state[count])[:, :16].flatten(0, 1), known) for count in asked]
    plain = maze_model.loss_of(model, batch, steps, 0.0)
    torch.testing.assert_close(plain, sum(errors) / len(errors))
    pairs = zip(state[steps - 1], state[steps], strict=True)
    change = sum((after - before).norm() / after.norm() for before, after in pairs) / 3
    torch.testing.assert_close(maze_model.loss_of(model, batch, steps, 0.5) - plain, 0.5 * change, rtol=1e-3, atol=1e-5)


@pytest.mark.nightly
def test_a_block_trained_on_small_mazes_solves_larger_ones():
    model = trained(Maze())
    for size, share in ((5, 0.95), (9, 0.9), (17, 0.65)):
        held_out = mazes("depth-first", size, 100, "to test")
        with torch.no_grad():
            answers = model(held_out.inputs, held_out.mask).argmax(-1)
        right = (answers == held_out.targets)[:, : held_out.cells].all(-1)
        assert float(right.double().mean()) >= share, size
        assert float(model.layer.last_solve.converged.double().mean()) >= 0.95, size
