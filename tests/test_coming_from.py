"""The page that translates calls: the names of both sides exist, and its code gives the same numbers."""

import inspect
import re
from pathlib import Path

import pytest
import torch
import torchdeq
from torchdeq.core import DEQIndexing
from torchdeq.solver.stat import SolverStat

import implicit_attention
from implicit_attention import adjoints, diagnostics, layers, linear, solvers, spins

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "coming_from.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
ROWS = {name: re.findall(r"^\| (.+) \| (.+) \|$", text, re.MULTILINE) for name, text in SECTIONS.items()}


def test_it_is_short_and_has_four_sections():
    assert list(SECTIONS) == ["torchdeq", "hopfield-layers", "afem", "A loop of your own"]
    assert len(PAGE.split()) <= 750


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_has_a_table_and_code_that_runs(name):
    (block,) = re.findall(r"```python\n(.*?)```", SECTIONS[name], re.DOTALL)
    assert len(ROWS[name]) > 4
    assert "assert " in block
    imported = set(re.findall(r"^(?:import|from) (\w+)", block, re.MULTILINE))
    assert imported <= {"torch", "implicit_attention", "torchdeq"}
    torch.manual_seed(0)
    exec(compile(block, f"coming_from.md, {name}", "exec"), {})


def test_the_calls_of_torchdeq_exist():
    known = {*vars(torchdeq), *vars(torchdeq.solver)["_solvers"], *SolverStat(), "deq"}
    for kind in (DEQIndexing, torchdeq.core.DEQBase):
        known |= set(inspect.signature(kind.__init__).parameters)
    told = " ".join(left for left, _ in ROWS["torchdeq"][1:])
    named = re.findall(r'`(\w+)|"(\w+)"', told)
    assert len(named) > 15
    assert {a or b for a, b in named} - {"info"} <= known


def test_the_calls_of_this_library_exist():
    homes = (implicit_attention, adjoints, diagnostics, layers, linear, solvers, spins, torch)
    told = " ".join(right for rows in ROWS.values() for _, right in rows)
    called = set(re.findall(r"(?<![.\w])([A-Z]\w+|[a-z]+_\w+)\(", told))
    assert len(called) > 15
    assert [name for name in called if not any(hasattr(home, name) for home in homes)] == []
    for name in ("jacobian_penalty", "spectral_radius"):
        assert hasattr(diagnostics, name)
    assert callable(layers.contractive)
