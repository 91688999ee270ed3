"""`implicit-attention demo`: its numbers, its page, and the code that the page shows."""

import contextlib
import dataclasses
import html
import io
import re

import pytest
import torch
from commands import app, done, refused, strict
from PIL import Image
from typer.main import get_command

from implicit_attention.studies.demo import magnet, maze
from implicit_attention.studies.measure import one_thread
from implicit_attention.studies.thinking import pixels
from implicit_attention.studies.thinking.puzzles import PUZZLES

SEED = 1


#: The demonstration runs once for all of them.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The whole demonstration, in a folder that did not exist."""
    out = tmp_path_factory.mktemp("demo") / "new"
    told = done("demo", "--out", out, "--seed", SEED).output
    return out, told, strict(out / "demo.json")


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
        assert 3 <= film.n_frames <= 42


def test_the_page_needs_no_network_and_no_script_and_describes_its_pictures(page):
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert "<script" not in page
    assert "url(" not in page
    assert "@import" not in page
    pictures = re.findall(r'<img src="data:image/(gif|png);base64,[\w+/=]{2000,}" alt="([^"]{80,})">', page)
    assert [kind for kind, _ in pictures] == ["gif", "png", "png"]
    assert "$" not in re.sub(r"<(pre|style).*?</\1>", "", page, flags=re.DOTALL)


def test_the_page_names_every_command_and_when_not_to_use_the_library(page):
    commands = get_command(app).commands
    for name in {*commands, *commands["train"].commands} - {"train"}:
        assert re.search(rf"<dt><code>implicit-attention (train )?{name}</code></dt><dd>[^<]{{30,}}</dd>", page), name
    assert "Do not use it for better attention over fixed keys" in page


def test_the_numbers_of_the_page_are_those_of_the_file(made, page):
    part = made[2]["parts"]["maze"]
    rows, count = part["rows"], part["count"]
    for row in rows:
        found = re.search(rf'<th scope="row">{row["problem"]}</th>(.*?)</tr>', page)
        cells = re.findall("<td>(.*?)</td>", found[1])
        counts = [f"{row[key]} of {count}" for key in ("solved", "settled", "settled_right")]
        assert cells == [*counts, str(row["evaluations"]), f"{row['loop']} of {count}"]
    for row in made[2]["parts"]["magnet"]["rows"]:
        assert f"<td>{row['half']:.2f}</td>" in page


def test_the_code_of_the_maze_computes_what_the_page_says(made, page):
    shown = made[2]["parts"]["maze"]["shown"]
    names, said = executed(code_of(page, "maze"))
    assert len(names["thought"].answers) == shown["evaluations"]
    assert said.endswith(f" {shown['wrong']} squares are wrong\n")
    assert shown["settled"]
    assert names["thought"].course.residuals[-1] == pytest.approx(shown["residual"], rel=1e-3)


def test_the_code_of_the_solvers_finds_the_numbers_of_the_page(page):
    with one_thread():
        names, said = executed(code_of(page, "solvers"))
    found = {words[0]: words[1:] for line in said.splitlines()[1:] if (words := line.split())}
    for method, name in (("Picard",) * 2, ("Anderson",) * 2, ("Broyden",) * 2, ("NewtonKrylov", "Newton-Krylov")):
        row = re.search(rf'<th scope="row">{name}</th>(.*?)</tr>', page)
        evaluations, converged, saddles = re.findall("<td>(.*?)</td>", row[1])[:3]
        spent, _, share, curved = found[method][:4]
        assert (spent, float(share.rstrip("%")), curved) == (
            evaluations.replace(" ", ""),
            float(converged.rstrip(" %")),
            saddles,
        )
    assert names["task"].keys.grad.isfinite().all()
    assert names["task"].keys.grad.abs().sum() > 0


def test_tables_name_their_rows(made):
    tables = [line.split()[0] for line in made[1].splitlines() if line.startswith(("problem ", "method "))]
    assert tables == ["problem", "method", "method"]


def test_the_code_of_the_magnet_draws_the_curves_of_the_page(made, page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names, _ = executed(code_of(page, "magnet"))
    assert (tmp_path / "magnet.png").stat().st_size > 10_000
    curves = made[2]["parts"]["magnet"]["curves"]
    for name, ours in {"MeanField": "mean field", "Bethe": "Bethe", "Enumeration": "enumeration"}.items():
        expected = torch.tensor(curves[ours], dtype=torch.float64)
        torch.testing.assert_close(names["found"].curves[name]["mean_length"], expected, rtol=1e-6, atol=1e-8)


def test_the_code_of_the_page_is_short(page):
    assert all(len(code_of(page, name).splitlines()) <= 8 for name in ("maze", "solvers", "magnet"))


def test_half_way_is_where_the_curve_crosses(made):
    numbers = made[2]["parts"]["magnet"]
    for row in numbers["rows"]:
        above = next(i for i, m in enumerate(numbers["curves"][row["method"]]) if m > 0.5)
        assert numbers["beta"][above - 1] <= row["half"] <= numbers["beta"][above]
    exact = next(row for row in numbers["rows"] if row["method"] == "enumeration")
    assert exact["all"] == 0.0 < min(row["all"] for row in numbers["rows"] if row is not exact)


# ------------------------------------------------------------------ options


def test_weights_can_be_trained_anew(monkeypatch, tmp_path):
    """No option makes a training short: the recipes are cut here."""
    for name, count in (("POOL", 40), ("CROSSED", 6)):
        monkeypatch.setattr(pixels, name, count)
    pixels.pools.cache_clear()
    for place, name, value in (
        (maze, "COUNT", 1),
        (maze, "SIZES", {"maze": (5,), "prefix": (8,)}),
        (maze, "SIZE", 5),
        (magnet, "POINTS", 4),
    ):
        monkeypatch.setattr(place, name, value)
    for name in ("maze", "prefix"):
        kind = type(PUZZLES[name])
        monkeypatch.setattr(kind, "recipe", dataclasses.replace(kind.recipe, updates=2, batch=4))
    done("demo", "--train", "--out", tmp_path)
    told = strict(tmp_path / "demo.json")["parts"]["maze"]["weights"]
    assert told[0] == "weights trained now"
    assert "2 updates of 4 problems" in told[1]
    pixels.pools.cache_clear()


def test_a_file_in_the_place_of_the_folder_is_one_line(tmp_path):
    (tmp_path / "demo").write_text("")
    refused("demo", "--out", tmp_path / "demo", parts="`--out` must be a writable folder")
