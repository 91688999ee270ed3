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
from implicit_attention.studies.thinking.grids import every_grid
from implicit_attention.studies.thinking.puzzles import PUZZLES

MAZE, PREFIX, SUDOKU = PUZZLES["maze"], PUZZLES["prefix"], PUZZLES["sudoku"]

#: A maze with a frame; its path has 9 squares.
DRAWN = """
#######
#S#   #
# # # #
#   #G#
#######
"""


def invoke(*arguments, columns=120):
    return CliRunner().invoke(main.app, ["think", *map(str, arguments)], env={"COLUMNS": str(columns)})


@pytest.fixture(autouse=True)
def small_tables(monkeypatch):
    """Tables of few problems, which are made as large ones are."""
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
            other = problems.target[index].clone()
            other.flatten()[-1] = (int(other.flatten()[-1]) + 1) % 2
            assert puzzle.wrong(one, other) > 0
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
    assert next(str(span.style) for span in tiles.spans if tiles.plain[span.start] == "[").endswith("on rgb(27,39,51)")


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
    assert f"{wrong} bits are wrong" in verdict


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
    for file in files:
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
def test_training_takes_the_recipe(puzzle):
    losses = []
    torch.manual_seed(0)
    puzzle.train(puzzle.model(), 4, lambda update, loss: losses.append(loss))
    assert len(losses) == 4
    assert all(0 < loss < 2 for loss in losses)


# ------------------------------------------------------------------ problems of one's own


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
    file.write_text("S G \n    \n")
    assert "one square wide" in MAZE.read(file).notes[1]


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
    result = invoke("sudoku", "--file", file)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("note: 288 grids fit these givens (the model was trained on puzzles with one)")


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
        assert plan.is_usual()


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
        ("prefix", "01a", "must hold bits, 0 and 1, got 'a'; take other characters out"),
        ("prefix", "1", "must hold 2 to 512 bits, got 1"),
        ("prefix", 600 * "1", "must hold 2 to 512 bits, got 600; take a part of them"),
        ("sudoku", "1234", "hold 16 characters, digits 1 to 4 and 0 or . for an empty cell, got '1234'"),
        ("sudoku", 15 * "." + "7", "got '0000000000000007'; write the grid row by row"),
        ("sudoku", "11" + 14 * ".", "must hold a puzzle that has a solution, got one that none of all 288 grids fits"),
    ],
)
def test_wrong_files_are_refused(tmp_path, puzzle, text, message):
    refused([puzzle, "--file", written(tmp_path, text)], message)


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
    refused(["sudoku", "--gif", tmp_path / "a.gif"], "`--gif` must be a writable file, got 'a.gif' (Is a directory)")
