"""The tutorials run from top to bottom, and their notebooks are those of the pages."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "tutorials"
PAGES = sorted(page.stem for page in FOLDER.glob("*.md"))
SCRIPT = FOLDER / "notebooks.py"


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (FOLDER / f"{name}.md").read_text(), flags=re.DOTALL)


def test_the_four_tutorials_are_there():
    assert PAGES == ["hugging_face", "ising", "own_energy", "transformer_encoder"]


@pytest.mark.parametrize("name", PAGES)
def test_a_tutorial_runs_from_top_to_bottom(name, capsys):
    names: dict[str, object] = {}
    for number, block in enumerate(blocks(name)):
        exec(compile(block, f"{name}.md, block {number}", "exec"), names)
    page = (FOLDER / f"{name}.md").read_text()
    assert ("figure" in names) == (f"({name}.png)" in page)
    assert sum(block.count("assert") for block in blocks(name)) >= 6
    if (figure := names.get("figure")) is not None:
        assert all(axes.lines for axes in figure.axes)
        assert (FOLDER / f"{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", PAGES)
def test_a_notebook_holds_the_page_and_nothing_else(name):
    found = json.loads((FOLDER / f"{name}.ipynb").read_text())
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    code = ["".join(cell["source"]) for cell in found["cells"] if cell["cell_type"] == "code"]
    assert code == [block.rstrip("\n") for block in blocks(name)]
    told = " ".join("".join(cell["source"]) for cell in found["cells"] if cell["cell_type"] == "markdown")
    page = re.sub(r"```python\n.*?```", "", (FOLDER / f"{name}.md").read_text(), flags=re.DOTALL)
    assert told.split() == page.split()
    assert len({cell["id"] for cell in found["cells"]}) == len(found["cells"])
    assert all(cell["outputs"] == [] for cell in found["cells"] if cell["cell_type"] == "code")


def test_the_script_tells_stale_notebooks(tmp_path):
    assert runpy.run_path(str(SCRIPT))["main"](True) == 0
    copy = tmp_path / "notebooks.py"
    copy.write_text(SCRIPT.read_text())
    (tmp_path / "page.md").write_text("# Title\n\nText.\n\n```python\nx = 1\n```\n\nMore.\n")

    def run(*arguments):
        return subprocess.run([sys.executable, copy, *arguments], capture_output=True, text=True, check=False)

    assert run("--check").returncode == 1
    assert run().returncode == 0
    assert run("--check").returncode == 0
    kinds = [cell["cell_type"] for cell in json.loads((tmp_path / "page.ipynb").read_text())["cells"]]
    assert kinds == ["markdown", "code", "markdown"]
    (tmp_path / "page.md").write_text("# Another\n")
    told = run("--check")
    assert told.returncode == 1
    assert "page.ipynb" in told.stdout
