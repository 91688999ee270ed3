"""The puzzles of the examples: they run, their generators are right, and the page shows what was measured."""

import itertools
import json
import re
import runpy
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
PAGE = EXAMPLES.parent / "examples.md"


@pytest.fixture
def run(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return lambda name: runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="example")


@pytest.fixture
def results():
    return json.loads((EXAMPLES / "puzzles.json").read_text())["examples"]


@pytest.mark.parametrize(("name", "sets"), [("mazes", ["5 x 5", "9 x 9"]), ("sudoku", ["4 givens", "5 givens"])])
def test_it_runs_and_prints_a_row_for_every_set(run, capsys, name, sets):
    result = run(name)["main"](["--quick"])
    assert [row["set"] for row in result["rows"]] == sets
    printed = capsys.readouterr().out.splitlines()
    assert f"{result['parameters']} parameters" in printed[0]
    for row, line in zip(result["rows"], printed[2:], strict=True):
        assert line.startswith(row["set"])
        assert f"{row['solved']:.3f}" in line
        assert all(0 <= row[key] <= 1 for key in ("loop", "solved", "converged"))
        assert 1 < row["evaluations"] <= row["most evaluations"]
    assert result["seconds"] > 0


def test_training_makes_the_loss_smaller(run):
    names = run("mazes")
    torch.manual_seed(0)
    learnt, solver = names["mazes"]("depth-first", 5, 64, "test"), names["Solver"]()

    def loss():
        with torch.no_grad():
            logits = solver(learnt.inputs, learnt.mask, steps=12)
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), learnt.targets.flatten()))

    before, example = loss(), ((learnt.inputs[:32], learnt.mask[:32]), learnt.targets[:32])
    names["train"](solver, lambda: example, updates=30, loss=solver.loss)
    assert loss() < 0.9 * before


@torch.no_grad()
def test_the_loss_of_a_maze_is_that_of_several_states_and_late_in_training_of_the_change_after_them(run, monkeypatch):
    names = run("mazes")
    torch.manual_seed(0)
    drawn, solver = names["mazes"]("depth-first", 4, 3, "test"), names["Solver"]()
    monkeypatch.setattr(torch, "randint", lambda *given: torch.tensor(9))
    given = drawn.inputs, drawn.mask, drawn.targets
    known, entropy = drawn.targets[:, :16].flatten(), torch.nn.functional.cross_entropy
    errors = [entropy(solver(*given[:2], steps=count)[:, :16].flatten(0, 1), known) for count in (5, 7, 9)]
    early, middle, late = (solver.loss(*given, done) for done in (0.5, 0.625, 1.0))
    torch.testing.assert_close(early, sum(errors) / 3)
    x = solver.embed(drawn.inputs)
    z, after = (solver.layer(x, drawn.mask, steps=count) for count in (9, 10))
    change = sum(float((b - a).norm() / a.norm()) for a, b in zip(z, after, strict=True)) / 3
    assert float(late - early) == pytest.approx(0.5 * change, rel=1e-3)
    assert float(middle - early) == pytest.approx(0.25 * change, rel=1e-3)


def test_a_sudoku_has_one_solution_and_as_many_givens_as_asked(run):
    names = run("sudoku")
    grids = names["every_grid"]()
    assert grids.shape == (288, 16)
    assert len({tuple(grid) for grid in grids.tolist()}) == 288
    (cells,), digits = names["puzzles"](grids, 5, 12, torch.Generator().manual_seed(0))
    assert cells.shape == (12, 16, 21)
    assert bool((cells[..., :16] == torch.eye(16)).all())
    units = [[4 * row + column for column in range(4)] for row in range(4)]
    units += [list(column) for column in zip(*units, strict=True)]
    units += [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]

    def solutions(grid):
        if None not in grid:
            return [grid]
        cell = grid.index(None)
        taken = {grid[other] for unit in units if cell in unit for other in unit}
        found = [[*grid[:cell], digit, *grid[cell + 1 :]] for digit in range(4) if digit not in taken]
        return [solution for filled in found for solution in solutions(filled)]

    for shown, solution in zip(cells[..., 16:].argmax(-1).tolist(), digits.tolist(), strict=True):
        asked = [None if digit == 4 else digit for digit in shown]
        assert sum(digit is not None for digit in asked) == 5
        assert solutions(asked) == [solution]


def test_the_table_is_that_of_the_results(run):
    names = run("run_all")
    content = names["puzzle_table"](json.loads((EXAMPLES / "puzzles.json").read_text()))
    page = PAGE.read_text()
    assert names["updated"](page, content, names["PUZZLES_START"], names["PUZZLES_END"]) == page
    assert len(re.findall(r"^\| `(?:mazes|sudoku).py` \| ", content, re.MULTILINE)) == 6


def test_the_page_claims_what_was_measured(results):
    maze, sudoku = ({row["set"]: row for row in results[name]["rows"]} for name in ("mazes", "sudoku"))
    for result in results.values():
        assert result["seconds"] < 75
    assert results["mazes"]["parameters"] == 8738
    # A loop as it was trained solves few larger mazes, going on nearly all of them.
    assert max(maze[f"{size} x {size}"]["loop"] for size in (9, 13, 17)) <= 0.1
    assert min(row["solved"] for row in maze.values()) >= 0.98
    assert sudoku["4 givens"]["solved"] > sudoku["4 givens"]["loop"] + 0.02
    # All states have come to rest, those of larger mazes later.
    assert min(row["converged"] for row in (*maze.values(), *sudoku.values())) > 0.99
    evaluations = [row["evaluations"] for row in maze.values()]
    assert all(2 * before > after > before for before, after in itertools.pairwise(evaluations))
    assert evaluations[-1] > 4 * evaluations[0]
