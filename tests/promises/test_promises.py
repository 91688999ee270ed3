"""What the package promises today is what it promised before; CONTRIBUTING.md says how a promise is moved or taken back."""

import importlib

import lists
import pytest


@pytest.fixture(scope="module")
def found():
    return lists.names()


def test_every_public_name_is_in_the_list(found):
    committed = lists.read("names")
    new = {m: sorted(set(names) - set(committed.get(m, ()))) for m, names in found.items()}
    assert not {m: names for m, names in new.items() if names}, "run `python tests/promises/write.py`"


def test_every_listed_name_is_there():
    for module, names in lists.read("names").items():
        there = importlib.import_module(module)
        assert not [name for name in names if not hasattr(there, name)], module
