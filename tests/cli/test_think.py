"""`implicit-attention think`: the shipped weights, what is shown, and how weights are made anew."""

import collections
import io
import json

import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors import safe_open
from typer.testing import CliRunner

from implicit_attention.cli import main, think, watching
from implicit_attention.studies.thinking import pixels, prefix, weights
from implicit_attention.studies.thinking import puzzle as puzzle_module
from implicit_attention.studies.thinking.puzzles import PUZZLES
from implicit_attention.training import SettlingLoss

MAZE, PREFIX, SUDOKU = PUZZLES["maze"], PUZZLES["prefix"], PUZZLES["sudoku"]


def invoke(*arguments):
    return CliRunner().invoke(main.app, ["think", *map(str, arguments)], env={"COLUMNS": "120"})


@pytest.fixture(autouse=True)
def few_problems(monkeypatch):
    """Tables and trainings of few problems, which are made as many are."""
    for name, count in (("POOL", 60), ("CROSSED", 6)):
        monkeypatch.setattr(pixels, name, count)
    pixels.pools.cache_clear()
    for puzzle in PUZZLES.values():
        monkeypatch.setattr(type(puzzle), "count", 4)
        monkeypatch.setattr(type(puzzle), "sizes", type(puzzle).sizes[:2])


def solved(puzzle, asked):
    return weights.shipped(puzzle).model.solved(asked.problem.inputs)


# ------------------------------------------------------------------ the weights that are shipped


@pytest.mark.parametrize(("puzzle", "size"), [(PREFIX, 256), (MAZE, 25), (SUDOKU, 4)])
def test_the_shipped_weights_settle_on_the_answer_of_a_problem_larger_than_those_of_the_training(puzzle, size):
    asked = puzzle.watched(size, 0)
    thought = solved(puzzle, asked)
    assert thought.course.settled
    assert thought.course.residuals[-1] <= 1e-3 < thought.course.residuals[-2]
    assert len(thought.answers) == int(thought.course.solution.num_evals)
    assert puzzle.wrong(asked.problem, thought.classes()) == 0
    assert torch.equal(thought.classes(), asked.problem.target[0])
    # What is watched is the course of a solve, and ends with its answer.
    model = weights.shipped(puzzle).model
    with torch.no_grad():
        told = model.told(asked.problem.inputs)
        states = model.layer(*told, steps=4), model.layer(*told)
        for z, found in zip(states, (thought.answers[3], thought.answers[-1]), strict=True):
            torch.testing.assert_close(model.readout(z).softmax(model.axis).movedim(model.axis, -1)[0], found)
    # It took more steps than the training had at most, but for the Sudoku, whose board does not grow.
    assert puzzle is SUDOKU or len(thought.answers) > puzzle.recipe.steps[-1]


@pytest.mark.parametrize("puzzle", PUZZLES.values(), ids=PUZZLES)
def test_files_of_weights_are_small_and_say_where_they_are_from(puzzle):
    file = weights.FOLDER / f"{puzzle.name}.safetensors"
    assert file.stat().st_size < 200_000
    with safe_open(file, "pt") as opened:
        told = json.loads(opened.metadata()["training"])
    recipe = puzzle.recipe.text(puzzle.recipe.updates)
    assert told == {"puzzle": puzzle.name, "seed": puzzle.recipe.seed, "recipe": recipe}


@pytest.mark.parametrize("puzzle", PUZZLES.values(), ids=PUZZLES)
def test_problems_to_learn_from_and_to_ask_have_right_targets(puzzle):
    learnt, asked = puzzle.learn(6, torch.Generator().manual_seed(0)), puzzle.ask(puzzle.size, 6, 0)
    for problems in (learnt, asked):
        assert len(problems.inputs) == len(problems.target) == 6
        for index in range(6):
            one = type(problems)(problems.inputs[index, None], problems.target[index, None])
            assert puzzle.wrong(one, problems.target[index]) == 0
            # Flip a place that is asked for.
            other = problems.target[index].flatten().clone()
            other[-1] = (int(other[-1]) + 1) % 2
            assert puzzle.wrong(one, other.view_as(problems.target[index])) > 0
    if puzzle is PREFIX:
        assert prefix.held_out(asked.inputs[:, 0].long()).all()
        assert not prefix.held_out(learnt.inputs[:, 0].long()).any()
    again = puzzle.ask(puzzle.size, 6, 0), puzzle.ask(puzzle.size, 6, 1)
    assert torch.equal(again[0].inputs, asked.inputs)
    assert not torch.equal(again[1].inputs, asked.inputs)


# ------------------------------------------------------------------ the command


@pytest.mark.parametrize(
    ("puzzle", "size", "line"),
    [
        ("prefix", 40, "bits above their prefix parities, 40 bits (trained on strings of 32 bits)"),
        ("sudoku", 5, "Sudoku of 4 x 4, 5 givens (trained on ones with 6 to 8 givens)"),
        ("maze", 11, "maze of pixels, 11 x 11 (trained on ones of 9 x 9)"),
    ],
)
def test_plain_text_where_there_is_no_terminal(puzzle, size, line):
    result = invoke(puzzle, "--size", size)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    lines = result.stdout.splitlines()
    assert lines[0] == line
    assert lines[1].startswith("evaluation   1, residual 1.0e+00, ")
    (verdict,) = (line for line in lines if line.startswith("settled after"))
    assert "(CONVERGED, relative residual " in verdict
    assert verdict.endswith(" are right")
    assert lines[lines.index(verdict) + 1].startswith("checked by ")
    assert any(line.startswith(f"weights {puzzle}.safetensors, ") and " sha256 " in line for line in lines)
    assert max(map(len, lines)) <= 120
    assert [line.split("  ")[0] for line in lines[-7:]] == [
        "set",
        "problems",
        "settled",
        "exact",
        "exact, settled",
        "exact, not settled",
        "evaluations",
    ]


def test_the_answer_is_drawn_as_it_is():
    bits = torch.tensor([1, 1, 0, 1])
    problem = prefix.problems(bits[None])
    odd = torch.tensor([0.9, 0.2, 0.4, 0.7])
    assert problem.inputs[0].tolist() == [[1, 1, 0, 1], [1, 0, 0, 0]]
    view = PREFIX.view(problem, torch.stack([1 - odd, odd], -1))
    assert ["".join(row) for row in view.cells] == ["1101", "1001"]
    torch.testing.assert_close(view.levels, torch.stack([bits.float(), odd]))
    long = prefix.problems(torch.ones(1, 150, dtype=torch.long))
    view = PREFIX.view(long, torch.nn.functional.one_hot(long.target[0], 2).float())
    rows = ["".join(row) for row in view.cells]
    assert rows[:3] == [64 * "1", 32 * "10", 64 * " "]
    assert rows[-1] == (11 * "10").ljust(64)


def test_a_picture_has_the_colours_of_its_squares():
    asked = MAZE.watched(5, 0)
    answer = torch.nn.functional.one_hot(asked.problem.target[0], 2).float()
    view = MAZE.view(asked.problem, answer)
    halved = think.picture(view, halved=True)
    assert halved.plain == "\n".join(4 * [7 * "▀"])
    colours = {str(span.style) for span in halved.spans}
    for colour in (watching.START, watching.GOAL, watching.ON, watching.WALL):
        assert any(",".join(map(str, colour)) in style for style in colours)
    given = SUDOKU.watched(4, 0)
    view = SUDOKU.view(given.problem, torch.nn.functional.one_hot(given.problem.target[0], 4).float())
    tiles = think.picture(view, halved=False)
    assert tiles.plain.count("[") == 4
    assert [row.replace("[", " ").replace("]", " ").split() for row in tiles.plain.splitlines()] == [
        [str(digit + 1) for digit in row] for row in given.problem.target.view(4, 4).tolist()
    ]
    light, dark = "238,240,242", "27,39,51"
    styles = {str(span.style) for span in tiles.spans if tiles.plain[span.start] == "["}
    assert styles == {f"rgb({light}) on rgb({dark})"}
    assert str(watching.tiles([[0.0]], [["1"]]).spans[0].style) == f"rgb({dark}) on rgb({light})"


def test_a_terminal_shows_every_evaluation():
    asked = SUDOKU.watched(6, 0)
    thought = solved(SUDOKU, asked)
    views = [SUDOKU.view(asked.problem, answer) for answer in thought.answers]
    console = Console(file=io.StringIO(), width=100, height=30, force_terminal=True, highlight=False)
    watching.show(console, think.watched(SUDOKU, asked, thought, views), speed=1000)
    output = console.file.getvalue()
    for index in range(len(views)):
        assert f"evaluation {index + 1:>3}, residual" in output
    assert "settled after" in output


def test_a_state_that_does_not_settle_is_said_to_be_so(monkeypatch):
    monkeypatch.setattr(prefix, "MOST", 3)
    asked = PREFIX.watched(20, 0)
    thought = solved(PREFIX, asked)
    wrong = PREFIX.wrong(asked.problem, thought.classes())
    verdict = think.verdict(PREFIX, asked, thought)
    assert verdict.startswith("not settled after 4 evaluations (MAX_STEPS, relative residual ")
    assert f"{wrong} of {asked.problem.target.numel()} bits wrong" in verdict


def test_files_that_are_written(tmp_path):
    gif, curve = tmp_path / "a.gif", tmp_path / "risk.png"
    result = invoke("sudoku", "--gif", gif, "--calibration", curve)
    assert result.exit_code == 0, result.output
    assert "a.gif written" in result.stdout
    assert "risk.png written" in result.stdout
    # A picture has more problems than the table.
    assert "problems             40 " in result.stdout
    with Image.open(gif) as image:
        assert image.n_frames > 5
    with Image.open(curve) as image:
        assert image.size[0] > 500


def test_weights_are_trained_written_and_the_same_each_time(tmp_path):
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for seed, file in enumerate(files):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        result = invoke("sudoku", "--train", "--quick", "--out", file)
        assert result.exit_code == 0, result.output
        assert torch.equal(torch.get_rng_state(), before)
        assert "update 5 of 5, loss" in result.stderr
        assert "weights trained now" in result.stdout
    assert files[0].read_bytes() == files[1].read_bytes()
    with safe_open(files[0], "pt") as opened:
        told = json.loads(opened.metadata()["training"])
        assert told["recipe"].startswith("5 updates of 64 problems, 4 to 16 steps drawn")
        assert set(opened.keys()) == set(SUDOKU.model().state_dict())


@pytest.mark.parametrize("puzzle", [MAZE, PREFIX], ids=["maze", "prefix"])
def test_training_takes_the_recipe(puzzle, monkeypatch):
    losses, told = [], []

    class Told(SettlingLoss):
        def __call__(self, *args, done, **options):
            told.append((self.steps, self.axis, done))
            return super().__call__(*args, done=done, **options)

    monkeypatch.setattr(puzzle_module, "SettlingLoss", Told)
    torch.manual_seed(0)
    puzzle.train(puzzle.model(), 4, lambda update, loss: losses.append((update, loss)))
    assert [update for update, _ in losses] == [1, 2, 3, 4]
    assert all(0 < loss < 2 for _, loss in losses)
    assert told == [(puzzle.recipe.steps, 1, done) for done in (0, 0.25, 0.5, 0.75)]


# ------------------------------------------------------------------ mazes


def test_a_third_of_the_mazes_to_learn_from_has_a_crossing_and_they_are_turned():
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(12):
        learnt = MAZE.learn(12, generator)
        free = torch.nn.functional.pad(learnt.inputs[:, 0], (1, 1, 1, 1))
        beside = free[:, :-2, 1:-1] + free[:, 2:, 1:-1] + free[:, 1:-1, :-2] + free[:, 1:-1, 2:]
        crossings = ((beside == 4) & (learnt.inputs[:, 0] == 1)).flatten(1).any(1)
        assert int(crossings[8:].sum()) == 4
        seen |= {tuple(maze) for maze in learnt.inputs[8:, 0].flatten(1).int().tolist()}
    # Six mazes, turned and mirrored.
    assert len(seen) > 12


def test_walls_do_not_exist_for_the_block():
    asked = MAZE.watched(7, 0)
    model = weights.shipped(MAZE).model
    with torch.no_grad():
        state = model.layer(*model.told(asked.problem.inputs))
    walls = asked.problem.inputs[:, :1] == 0
    assert float(state.masked_select(walls).abs().max()) == 0
    # So a frame of walls changes nothing.
    framed = torch.nn.functional.pad(asked.problem.inputs, (1, 1, 1, 1))
    with torch.no_grad():
        other = model.layer(*model.told(framed))[..., 1:-1, 1:-1]
    torch.testing.assert_close(other, state, atol=1e-5, rtol=1e-5)


def test_a_path_is_the_shortest_one():
    for seed in range(5):
        plan = pixels.squares_in(MAZE.ask(9, 1, seed))
        before, waiting = {plan.start: 0}, collections.deque([plan.start])
        while waiting:
            row, column = waiting.popleft()
            for there in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
                inside = all(0 <= place < 9 for place in there)
                if inside and plan.free[there[0]][there[1]] and there not in before:
                    before[there] = before[row, column] + 1
                    waiting.append(there)
        assert len(plan.shortest()) == before[plan.goal] + 1
        assert not plan.has_loops()
        assert plan.is_narrow()
