"""Every public class and function shows how it is used and when it is not, and the examples run."""

import ast
import collections
import doctest
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest
import torch

import implicit_attention

#: The top of the package and its public wings.
FACES = (
    "",
    ".adjoints",
    ".diagnostics",
    ".energies",
    ".integrations",
    ".integrations.transformers",
    ".layers",
    ".linear",
    ".models",
    ".kernels",
    ".plotting",
    ".potentials",
    ".solvers",
    ".spins",
    ".spins.sampling",
)
PACKAGE = Path(implicit_attention.__file__).parent
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def public() -> dict[str, object]:
    """Classes and functions that a face lists, each once."""
    found: dict[int, tuple[str, object]] = {}
    for face in FACES:
        module = importlib.import_module(implicit_attention.__name__ + face)
        listed = getattr(module, "__all__", None)
        for name in vars(module) if listed is None else listed:
            value = getattr(module, name)
            home = getattr(value, "__module__", "")
            own = (
                home == module.__name__ and name[0] != "_" if listed is None else home.startswith("implicit_attention")
            )
            if own and name[0] != "_" and (inspect.isclass(value) or inspect.isfunction(value)):
                found.setdefault(id(value), (f"{home}.{name}", value))
    return dict(found.values())


MODULES = [
    info.name
    for info in pkgutil.walk_packages(implicit_attention.__path__, f"{implicit_attention.__name__}.")
    if ".testing" not in info.name and not info.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_run(name):
    module = importlib.import_module(name)
    finder, runner = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner(optionflags=FLAGS)
    for example in finder.find(module, name):
        torch.manual_seed(0)
        runner.run(example)
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize("name", sorted(public()))
def test_public_names_have_an_example_and_a_limit(name):
    text = inspect.getdoc(public()[name]) or ""
    assert ">>>" in text, "no runnable example"
    assert "Not for" in text, "no sentence that says when not to use it"


def test_docstrings_begin_with_a_verb_or_a_noun():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            first = (ast.get_docstring(node) or "").split(" ", 1)[0]
            if first in ("What", "Of", "Who", "How", "Where", "That"):
                wrong.append(f"{path.name}: {getattr(node, 'name', 'the module')}")
    assert not wrong


def test_no_two_classes_have_the_same_name():
    places = collections.defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert not {name: found for name, found in places.items() if len(found) > 1}
