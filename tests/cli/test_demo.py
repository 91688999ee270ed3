"""`implicit-attention demo`: its numbers, its page, and the code that the page shows."""

import contextlib
import html
import io
import json
import re
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from implicit_attention.cli import main
from implicit_attention.cli.commands import COMMANDS
from implicit_attention.studies.demo import magnet, maze
from implicit_attention.studies.thinking import weights
from implicit_attention.studies.thinking.puzzles import PUZZLES

SEED = 1


def run(out, *options):
    result = CliRunner().invoke(main.app, ["demo", "--out", str(out), *map(str, options)], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The whole demonstration, of few and small problems, in a folder that did not exist."""
    out = tmp_path_factory.mktemp("demo") / "new"
    with pytest.MonkeyPatch.context() as few:
        few.setattr(maze, "COUNT", 3)
        few.setattr(maze, "SIZES", {"maze": (9, 17), "prefix": (32, 64)})
        few.setattr(maze, "SIZE", 17)
        few.setattr(maze, "FRAMES", 4)
        few.setattr(magnet, "POINTS", 8)
        told = run(out, "--seed", SEED)
    return out, told, json.loads((out / "demo.json").read_text())


@pytest.fixture(scope="module")
def page(made):
    return (made[0] / "index.html").read_text(encoding="utf-8")


def code_of(page, name):
    (code,) = re.findall(rf'<section id="{name}">.*?<pre><code>(.*?)</code></pre>', page, re.DOTALL)
    return html.unescape(code)


def executed(code):
    names, said = {}, io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, "demo", "exec"), names)
    return names, said.getvalue()


def test_it_writes_a_page_its_pictures_and_all_numbers(made):
    out, told, content = made
    assert {path.name for path in out.iterdir()} == {"index.html", "demo.json", "maze.gif", "solvers.png", "magnet.png"}
    assert re.search(r"index.html, to open in a browser, .* after \d+\.\d s", " ".join(told.split()))
    assert list(content["parts"]) == ["maze", "solvers", "magnet"]
    assert content["seconds"] > 0
    assert content["seed"] == SEED
    assert content["trained"] is False
    with Image.open(out / "maze.gif") as film:
        assert 3 <= film.n_frames <= 6


def test_the_page_needs_no_network_and_no_script_and_describes_its_pictures(page):
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert "<script" not in page
    assert "url(" not in page
    assert "@import" not in page
    pictures = re.findall(r'<img src="data:image/(gif|png);base64,[\w+/=]{2000,}" alt="([^"]{80,})">', page)
    assert [kind for kind, _ in pictures] == ["gif", "png", "png"]
    assert "$" not in re.sub(r"<(pre|style).*?</\1>", "", page, flags=re.DOTALL)


def test_the_page_names_every_command_and_when_not_to_use_the_library(page):
    for place in COMMANDS:
        name = place.split(":")[0]
        assert re.search(rf"<dt><code>implicit-attention (train )?{name}</code></dt><dd>[^<]{{30,}}</dd>", page), name
    assert "Do not use it for better attention over fixed keys" in page


def test_the_numbers_of_the_page_are_those_of_the_file(made, page):
    rows = made[2]["parts"]["maze"]["rows"]
    for row in rows:
        found = re.search(rf'<th scope="row">{row["problems"]}</th>(.*?)</tr>', page)
        cells = re.findall("<td>(.*?)</td>", found[1])
        counts = [f"{row[key]} of 3" for key in ("solved", "settled", "settled_right")]
        assert cells == [*counts, str(row["evaluations"]), f"{row['loop']} of 3"]
    for row in made[2]["parts"]["magnet"]["rows"]:
        assert f"<td>{row['half']:.2f}</td>" in page


def test_the_code_of_the_maze_computes_what_the_page_says(made, page):
    shown = made[2]["parts"]["maze"]["shown"]
    names, said = executed(code_of(page, "maze"))
    assert len(names["thought"].answers) == shown["evaluations"]
    assert said.endswith(f" {shown['wrong']} squares are wrong\n")
    assert shown["settled"]
    assert names["thought"].course.residuals[-1] == pytest.approx(shown["residual"], rel=1e-3)


def test_the_code_of_the_solvers_has_a_gradient(page):
    names, said = executed(code_of(page, "solvers"))
    assert "200 CONVERGED" in said
    assert names["keys"].grad.abs().sum() > 0


def test_the_code_of_the_magnet_draws_the_curves_of_the_page(made, page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names, _ = executed(code_of(page, "magnet").replace("24)", "8)"))
    assert (tmp_path / "magnet.png").stat().st_size > 10_000
    curves = made[2]["parts"]["magnet"]["curves"]
    for name, ours in {"MeanField": "mean field", "Bethe": "Bethe", "Enumeration": "enumeration"}.items():
        expected = torch.tensor(curves[ours], dtype=torch.float64)
        torch.testing.assert_close(names["found"].curves[name]["mean_length"], expected, rtol=1e-6, atol=1e-8)


def test_the_code_of_the_page_is_short(page):
    assert all(len(code_of(page, name).splitlines()) <= 8 for name in ("maze", "solvers", "magnet"))


# ------------------------------------------------------------------ the numbers


@pytest.fixture(scope="module")
def shipped():
    return {name: weights.shipped(PUZZLES[name]) for name in maze.SIZES}


@pytest.mark.parametrize(("name", "size"), [("maze", 17), ("prefix", 64)])
def test_a_row_counts_what_one_problem_after_the_other_gives(name, size, shipped, monkeypatch):
    monkeypatch.setattr(maze, "COUNT", 4)
    puzzle, model = PUZZLES[name], shipped[name].model
    problems = puzzle.ask(size, 4, maze.SEED)
    right, settled, best = [], [], [0] * len(puzzle.recipe.steps)
    for index in range(4):
        one = type(problems)(*(x[index : index + 1] for x in problems))
        thought = model.solved(one.inputs)
        right.append(torch.equal(thought.classes(), one.target[0]))
        settled.append(thought.course.settled)
        for place, steps in enumerate(puzzle.recipe.steps):
            with torch.no_grad():
                answer = model.readout(model.layer(*model.told(one.inputs), steps=steps)).argmax(model.axis)
            best[place] += torch.equal(answer, one.target)
    row = maze._row(puzzle, shipped[name], size)
    assert (row["solved"], row["settled"], row["by_steps"]) == (sum(right), sum(settled), best)
    assert row["loop"] == max(best)
    assert row["solved"] == 4


def test_the_loop_is_the_beginning_of_the_solve_and_is_wrong(shipped):
    found = maze.shown(shipped["maze"], 0)
    assert found.wrong == 0 < found.wrong_loop
    model = shipped["maze"].model
    with torch.no_grad():
        z = model.layer(*model.told(found.asked.problem.inputs), steps=len(found.loop))
    torch.testing.assert_close(model.readout(z).softmax(1).movedim(1, -1)[0], found.loop[-1])


@pytest.mark.slow
def test_a_maze_that_does_not_settle_is_told_so(shipped, monkeypatch):
    monkeypatch.setattr(maze, "SIZES", {"maze": (5,), "prefix": (8,)})
    monkeypatch.setattr(maze, "COUNT", 1)
    found = maze.shown(shipped["maze"], 0)
    course = found.thought.course._replace(solution=SimpleNamespace(converged=False))
    progress = SimpleNamespace(begin=lambda *_: None, end=lambda *_: None)
    for thought, words in (
        (found.thought, "it settles after"),
        (found.thought._replace(course=course), "it has not settled after"),
    ):
        told = maze.maze_experiment(shipped, found._replace(thought=thought), 0, progress)
        assert f"{words} {len(thought.answers)} evaluations" in told.text
        assert f"{words} {len(thought.answers)} evaluations" in told.description


def test_the_magnet_is_a_torus():
    couplings = magnet.magnet().couplings
    assert torch.equal(couplings, couplings.T)
    assert set(couplings.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(couplings.sum(-1), torch.full((12,), 4.0, dtype=torch.float64))


def test_half_way_is_where_the_curve_crosses(made):
    numbers = made[2]["parts"]["magnet"]
    for row in numbers["rows"]:
        above = next(i for i, m in enumerate(numbers["curves"][row["method"]]) if m > 0.5)
        assert numbers["beta"][above - 1] <= row["half"] <= numbers["beta"][above]
    exact = next(row for row in numbers["rows"] if row["method"] == "enumeration")
    assert exact["all"] == 0.0 < min(row["all"] for row in numbers["rows"] if row is not exact)


# ------------------------------------------------------------------ options


@pytest.mark.slow
def test_weights_can_be_trained_anew(monkeypatch, tmp_path):
    import dataclasses

    from implicit_attention.studies.thinking import pixels

    for name, count in (("POOL", 40), ("CROSSED", 6)):
        monkeypatch.setattr(pixels, name, count)
    pixels.pools.cache_clear()
    monkeypatch.setattr(maze, "COUNT", 1)
    monkeypatch.setattr(maze, "SIZES", {"maze": (5,), "prefix": (8,)})
    monkeypatch.setattr(maze, "SIZE", 5)
    monkeypatch.setattr(magnet, "POINTS", 4)
    for name in ("maze", "prefix"):
        kind = type(PUZZLES[name])
        monkeypatch.setattr(kind, "recipe", dataclasses.replace(kind.recipe, updates=2, batch=4))
    run(tmp_path, "--train")
    told = json.loads((tmp_path / "demo.json").read_text())["parts"]["maze"]["weights"]
    assert told[0] == "weights trained now"
    assert "2 updates of 4 problems" in told[1]
    pixels.pools.cache_clear()


def test_a_file_in_the_place_of_the_folder_is_one_line(tmp_path):
    (tmp_path / "demo").write_text("")
    result = CliRunner().invoke(main.app, ["demo", "--out", str(tmp_path / "demo")])
    assert result.exit_code == 2
    assert result.output.startswith("error: `--out` must be a writable folder")
