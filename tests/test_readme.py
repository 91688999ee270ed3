"""The code of README and docs runs, their tables are those of the committed runs, and their commands exist."""

import json
import re
import runpy
import statistics
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import report  # noqa: E402
from benchmarks.puzzles import guide  # noqa: E402

README = (ROOT / "README.md").read_text()


def test_the_code_runs_from_top_to_bottom(capsys):
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert "80 CONVERGED" in capsys.readouterr().out
    assert all(weight.grad.abs().sum() > 0 for weight in names["layer"].parameters())
    assert names["x"].grad.abs().sum() > 0
    assert names["field"].grad.abs().sum() > 0


def test_the_first_screen_shows_what_it_is():
    lines = README.splitlines()
    assert lines.index("```python") < 45
    assert all(words in README for words in ("**Use it if", "**Do not use it if", "grad E(z) = 0"))
    assert len(lines) < 200


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


def test_what_is_said_of_mazes_is_what_the_committed_run_shows():
    found = json.loads((ROOT / "docs" / "examples" / "puzzles.json").read_text())["examples"]["mazes"]
    rows = {row["set"]: row for row in found["rows"]}
    small, large = rows["9 x 9"], rows["17 x 17"]
    asked = {"solved": large, "loop": small}
    share = {name: f"{row[name] * row['puzzles']:.0f} of {row['puzzles']}" for name, row in asked.items()}
    text = " ".join(README.split())
    said = (
        f"A block of {found['parameters']} parameters",
        f"it solves {share['solved']} held-out mazes of 17 x 17, with {large['evaluations']:.0f} evaluations in the",
        f"As a loop of {found['loop']} steps the same weights solve {share['loop']} at 9 x 9 and none at 17 x 17",
    )
    assert [each for each in said if each not in text] == []
    assert large["converged"] == 1.0
    assert large["loop"] == 0.0
    assert 25 < found["seconds"] < 40


def test_what_is_said_of_stacks_and_solvers_is_what_the_committed_run_shows():
    (_, run), *_ = report.newest_by_metric("usefulness", ("MAZES",))
    rows = {row["contender"]: row for row in run["rows"]}
    tied = rows["tied, 8 to 16 steps drawn"]

    def share(row, way, size):
        return 100 * statistics.mean(trial["ways"][way][f"depth-first {size}"]["exact"] for trial in row["runs"])

    said = [
        f"Over three longer trainings {share(tied, 'solved', 9):.1f} % of 9 x 9 and {share(tied, 'solved', 17):.1f} %"
    ]
    for count, words in ((12, "of their own weights, trained alike, solves"), (40, "")):
        row = rows[f"stack of {count}"]
        small, large = (share(row, f"{count} steps", size) for size in (9, 17))
        said.append(f"{words} {small:.1f} and {large:.1f} %".strip())
    said.append(f"of {rows['stack of 40']['parameters'] / tied['parameters']:.0f} times the parameters")
    assert [each for each in said if each not in " ".join(README.split())] == []

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
    runs = {name: report.newest_by_metric("usefulness", (name,))[0][1]["rows"] for name in ("MAZES_IMAGE", "PATHS")}
    _, lines = guide._checks(runs)
    shares = next(line[1:3] for line in lines if line[0] == "steps damped by half")
    (right_mazes, wrong_mazes), (right_paths, wrong_paths) = (map(float, share.split(" / ")) for share in shares)
    assert right_mazes == right_paths == 100.0
    said = (
        f"refused {100 - wrong_mazes:.0f} % of the wrong settled answers there, {100 - wrong_paths:.0f} % of those to"
    )
    assert said in " ".join(README.split())
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
    named = re.compile(r"pip install[^\n`&]*[ '\"]implicit.attention")
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
