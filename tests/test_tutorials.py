"""The tutorials run from top to bottom, as pages and as notebooks, and both say the same."""

import ast
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "tutorials"
PAGES = sorted(FOLDER.glob("*.md"))


def test_there_are_four():
    assert len(PAGES) == 4


@pytest.mark.by_name(slow=r"\[(ising_phase_diagram|your_own_energy)")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_runs_as_its_notebook(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    cells = json.loads(page.with_suffix(".ipynb").read_text())["cells"]
    names: dict[str, object] = {}
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(sources) >= 4
    assert any(isinstance(node, ast.Assert) for source in sources for node in ast.walk(ast.parse(source)))
    for source in sources:
        exec(compile(source, page.name, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_holds_what_its_page_says(page):
    cells = json.loads(page.with_suffix(".ipynb").read_text())["cells"]
    parts = ["".join(cell["source"]) for cell in cells]
    text = re.sub(r"```python\n|```$", "", page.read_text(), flags=re.MULTILINE)
    assert re.sub(r"\s+", "", text).replace("```", "") == re.sub(r"\s+", "", "".join(parts)).replace("```", "")


def test_the_notebooks_are_written_by_the_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["notebooks.py", "--check"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(FOLDER / "notebooks.py"), run_name="__main__")
    assert end.value.code == 0
