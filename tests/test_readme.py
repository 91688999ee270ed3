"""The code of README and docs runs, their tables are those of the committed runs, and their commands exist."""

import json
import os
import re
import runpy
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import report  # noqa: E402

README = (ROOT / "README.md").read_text()


def test_the_code_runs_from_top_to_bottom(capsys):
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert "2 CONVERGED" in capsys.readouterr().out
    assert all(weight.grad.abs().sum() > 0 for weight in names["block"].parameters())
    assert names["x"].grad.abs().sum() > 0
    assert names["field"].grad.abs().sum() > 0


def test_the_first_screen_shows_what_it_is():
    lines = README.splitlines()
    # Two sentences, the case in motion, install and run, code, where it pays and where not, links.
    parts = ("docs/demo/maze.gif", "<!-- main command -->", "```python", "**Use it if", "**Do not use it if")
    places = [README.index(part) for part in (*parts, "**Costs**", "## Where to go", "<!-- test command -->")]
    assert places == sorted(places)
    assert lines.index("```python") < 45
    assert "grad E(z) = 0" in README
    assert len(lines) <= 120


def test_the_main_command_is_the_demonstration():
    command = re.search(r"<!-- main command -->\n```\n(.*)\n```", README)
    assert command is not None
    assert command[1] == 'pip install -c constraints.txt -e ".[cli]" && implicit-attention demo'


def test_what_the_picture_shows_is_what_the_committed_demonstration_found():
    found = json.loads((ROOT / "docs" / "demo" / "demo.json").read_text())
    shown = found["parts"]["maze"]["shown"]
    assert shown["settled"]
    assert shown["wrong"] == 0 < shown["wrong_loop"]
    for text in (README, (ROOT / "docs" / "index.md").read_text()):
        assert f"stops after {found['parts']['maze']['loop_steps']} steps with a wrong path" in text
    # "in less than a minute", on an idle machine of two cores
    assert found["seconds"] < 60


def test_the_pages_of_the_docs_are_short_and_say_for_whom_they_are():
    pages = {page.name: page.read_text() for page in (ROOT / "docs").glob("*.md")}
    words = sum(len(text.split()) for text in pages.values())
    assert words <= 30_000, f"cut {words - 30_000} words of docs/*.md"
    for name, text in pages.items():
        first = re.sub(r"```.*?```", "", text, flags=re.DOTALL).split("\n\n")[1]
        assert re.match(r"For (whoever|those|readers|owners)\b", first), (name, first)


def first_block(page):
    """The first Python of a page of docs/."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)[0]


def test_every_weight_of_the_first_block_learns():
    """A mean square of what layer norm returns is a constant of all weights before it."""
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(compile(first_block("equilibrium_blocks.md"), "equilibrium_blocks.md", "exec"), names)
    sizes = {name: float(weight.grad.norm()) for name, weight in names["layer"].named_parameters()}
    assert len(sizes) == 4
    assert min(sizes.values()) > 1e-2, sizes


@pytest.mark.slow
def test_the_potential_of_ones_own_keeps_the_contract(tmp_path):
    (tmp_path / "test_own.py").write_text(first_block("your_own.md"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_own.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


@pytest.mark.slow
def test_the_code_of_the_docs_runs():
    blocks = [
        b
        for page in (ROOT / "docs").glob("*.md")
        for b in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    assert blocks
    for block in blocks:
        exec(compile(block, "docs", "exec"), {})


def test_every_status_is_explained():
    from implicit_attention import Status

    page = (ROOT / "docs" / "how_it_works.md").read_text()
    for status in Status:
        assert f"| {status.name} |" in page


def test_what_is_said_of_solvers_is_what_the_committed_run_shows():
    (_, run), *_ = report.newest_by_metric("usefulness", ("MAZES",))
    rows = {row["contender"]: row for row in run["rows"]}
    tied = rows["tied, 8 to 16 steps drawn"]

    solvers = [trial["solvers"] for trial in tied["runs"]]
    page = " ".join((ROOT / "docs" / "equilibrium_blocks.md").read_text().split())

    def mean(name, key="exact", factor=100):
        return factor * statistics.mean(found[name][key] for found in solvers)

    evaluations = [mean(name, "evaluations_mean", 1) for name in ("Picard", "Anderson, history 1")]
    said = [
        f"`Picard` solves {mean('Picard'):.1f} % in {evaluations[0]:.0f} evaluations",
        f"`Anderson(history=1)` {mean('Anderson, history 1'):.1f} % in {evaluations[1]:.0f}",
        f"the default `Anderson()` {mean('Anderson, history 5'):.1f} %",
        f"`Broyden()` {mean('Broyden'):.1f} %",
        f"{mean('distinct', 'mean', 1):.2f} fixed points",
    ]
    assert [each for each in said if each not in page] == []
    assert all(mean(f"Picard, random start {number}") == 0 for number in (1, 2, 3))


def test_what_is_said_of_wrong_settled_answers_is_what_the_committed_runs_show():
    runs = {"MAZES_IMAGE": report.newest_by_metric("usefulness", ("MAZES_IMAGE",))[0][1]["rows"]}
    trials = [trial["ways"] for row in runs["MAZES_IMAGE"][:1] for trial in row["runs"]]
    solved, accelerated = ([ways[name]["33 x 33"] for ways in trials] for name in ("solved", "solved, Anderson(1)"))
    (wrong,) = [seed for seed, found in enumerate(solved) if found["exact"] < 0.99]
    lost, found = 100 - 100 * solved[wrong]["exact"], 100 * accelerated[wrong]["exact"]
    said = f"settles on wrong paths in {lost:.0f} % of the mazes of 33 x 33", f"the same weights solve {found:.0f} %"
    page = " ".join((ROOT / "docs" / "equilibrium_blocks.md").read_text().split())
    assert [each for each in said if each not in page] == []
    assert solved[wrong]["converged"] == 1.0


def test_what_is_said_of_path_lengths_is_what_the_committed_run_shows():
    (_, run), *_ = report.newest_by_metric("usefulness", ("PATHS",))
    rows = {row["contender"]: row for row in run["rows"]}
    # Of the guide: three trainings by fixed steps.
    fixed = [trial["ways"] for trial in rows["messages, tied, 12 steps"]["runs"]]
    assert [ways["12 steps"]["16 nodes"]["exact"] for ways in fixed] == [1.0] * 3
    solved = sorted(ways["solved"]["16 nodes"]["exact"] for ways in fixed)
    assert solved[1] < 0.1
    assert solved[2] == 1.0
    assert 1.0 in [ways["solved"]["16 nodes"]["converged"] for ways in fixed if ways["solved"]["16 nodes"]["exact"] < 1]


def test_what_is_said_of_recipes_is_what_the_committed_run_shows():
    (_, run), *_ = report.newest_by_metric("usefulness", ("RECIPES",))

    def seeds(recipe, key="exact"):
        (row,) = (row for row in run["rows"] if row["contender"] == recipe)
        return [trial["ways"]["solved"]["4 givens"][key] for trial in row["runs"]]

    means = {row["contender"]: statistics.mean(seeds(row["contender"])) for row in run["rows"]}
    assert max(means, key=means.get) == "loop, drawn, a loss at half the steps too"
    assert [share > 0.5 for share in seeds("phantom gradient (5)")].count(True) == 1
    assert all(share < 0.01 for name in means if name.startswith("implicit gradient") for share in seeds(name))
    bounded = "loop, drawn, linear maps of norm 1 at most"
    assert min(seeds(bounded, "converged")) > 0.999
    assert 0.6 < means[bounded] < 0.72


def test_digits_need_no_attention_in_the_committed_run():
    (_, run), *_ = report.newest_by_metric("usefulness", ("DIGITS",))
    rows = [row for row in run["rows"] if row["metric"] == "DIGITS" and "model" in row]
    assert max(rows, key=lambda row: row["evidence"]["score"])["model"]["name"] == "no attention"


def test_the_table_is_that_of_the_committed_run(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["table.py", "--check"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "docs" / "compare" / "table.py"), run_name="__main__")
    assert end.value.code == 0


def test_what_is_said_of_retrieval_is_what_the_committed_run_shows():
    pages = [README, *(page.read_text() for page in (ROOT / "docs").glob("*.md"))]
    assert not re.search(r"steps?( do)? pays?\b|They pay in retrieval", "\n".join(pages))
    run = json.loads((ROOT / "docs" / "compare" / "compare.json").read_text())
    rates = {}
    for entry in run["retrieval"]:
        rates.setdefault((entry["task"], entry["state"]), []).append((entry["beta"], entry["mean"]))
    for task in ("half-masked", "noisy"):
        one, equilibrium = (
            [rate for beta, rate in rates[task, state] if beta >= 8] for state in ("one step", "equilibrium")
        )
        # The equilibrium hardly depends on beta from 8 up; one step does, and is as good at its best.
        assert max(equilibrium) - min(equilibrium) < 0.04
        assert max(one) - min(one) > 2 * (max(equilibrium) - min(equilibrium))
        assert abs(max(one) - max(equilibrium)) < 0.01
        (_, dot), (_, known) = (rates[task, f"nearest by {how}"][0] for how in ("dot product", "distance, known"))
        assert max(*one, *equilibrium) <= dot + 1e-9
        assert known > dot + 0.04
    assert run["summary"] in re.sub(r"\s+", " ", (ROOT / "docs" / "compare.md").read_text())
    assert "as good as one step" in run["summary"]


@pytest.mark.parametrize(
    "script",
    [
        "magnetize/table.py",
        "spin_systems/accuracy.py",
        "energy_transformer/scales.py",
        "energy_transformer/inpainting.py",
    ],
)
def test_the_tables_of_the_docs_are_those_of_the_committed_runs(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script, "--check"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "docs" / script), run_name="__main__")
    assert end.value.code == 0


def test_what_is_said_of_transformers_own_tests_is_the_committed_run():
    run = json.loads((ROOT / "docs" / "integrations" / "transformers_suite.json").read_text())
    own, ours = run["own attention"], run["equilibria of no step"]
    page = re.sub(r"\s+", " ", (ROOT / "docs" / "integrations.md").read_text())
    total = sum(own.values())
    assert f"Of {total}, {own['passed']} pass with their attention and {ours['passed']} with equilibria" in page
    assert f"{own['skipped']} are skipped in both" in page
    failing = [name.split("::") for name in run["fail with equilibria alone"]]
    assert {test for _, test in failing} == {"test_retain_grad_hidden_states_attentions"}
    assert len(failing) == len(run["models"]) == 6
    assert [name.split("_")[:5] for name in run["fail with both"]] == [
        ["TestGemma3Text::test", "model", "rope", "scaling", last] for last in ("frequencies", "from", "from", "from")
    ]


def test_the_pictures_are_there():
    pages = [(README, ROOT), *((page.read_text(), page.parent) for page in (ROOT / "docs").glob("*.md"))]
    for text, folder in pages:
        for name in re.findall(r"\]\(([^)]*\.png)\)", text):
            assert (folder / name).stat().st_size > 10_000, name


def test_ci_runs_the_test_command_of_the_readme():
    command = re.search(r"<!-- test command -->\n```\n(.*)\n```", README)
    assert command is not None
    assert command[1] == 'pip install -c constraints.txt -e ".[cli,test]" && pytest'
    assert "<!-- test command -->" in (ROOT / ".ci" / "run").read_text()


def test_nobody_is_told_to_install_this_package_from_an_index():
    files = [*ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    files += (ROOT / "implicit_attention").rglob("*.py")
    # A folder of wheels that one has built is no index.
    named = re.compile(r"pip install(?! --find-links)[^\n`&]*[ '\"]implicit.attention")
    assert [str(file) for file in files if named.search(file.read_text())] == []
    extras = {
        name
        for file in files
        for found in re.findall(r'-e "\.\[([\w,-]+)\]"', file.read_text())
        for name in found.split(",")
    }
    assert extras >= {"cli", "test", "transformers", "x-transformers"}
    for name in extras:
        assert re.search(rf"^{name} = ", (ROOT / "pyproject.toml").read_text(), re.MULTILINE), name


def test_everything_public_is_in_the_tour_or_a_docstring_away():
    import implicit_attention

    tour = README + (ROOT / "docs" / "tour.md").read_text()
    for name in implicit_attention.__all__:
        assert name in tour or name in ("Solution", "Status", "ConvergenceWarning", "UnsupportedImplementation"), name
