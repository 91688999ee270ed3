"""Every public class and function shows how it is used and when it is not, and the examples run."""

import doctest
import importlib
import inspect
import pkgutil

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
    ".ops",
    ".plotting",
    ".potentials",
    ".solvers",
    ".spins",
    ".spins.sampling",
)
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
