"""Which tests run when.

- `pytest`, README's command, runs the fast tests: all that have neither of two markers.
- `slow`: takes long and is not the only test of its subject. `.ci/run` runs fast and slow tests: `-m "not nightly"`.
- `nightly`: another case, or a longer run, of a claim that fast or slow tests make too. `pytest -m nightly` runs these,
  before a release and after a change of what they test.
- Where some cases of a function, or some tests of a class or file, are meant, `by_name(slow=..., nightly=...)` has
  regular expressions for their names with cases: `@pytest.mark.by_name(slow=r"\\[large")`.
- Of a function with more than CASES cases, or than its `cases(...)`, the fast tests are so many, drawn by their names.
"""

import atexit
import collections
import gc
import re
import zlib
from collections.abc import Iterator

import pytest
import torch

# The problems of the tests are small: threads would only wait for each other.
torch.set_num_threads(1)

CASES = 8
#: Wrong arguments are each another fault, and short: all of them are fast.
WHOLE = r"test_\w*(raise|refuse|error|wrong|bad_|argument)"
#: Of what takes longer the fast tests are fewer: derivatives and graphs, and tests of these folders.
LONG, FEW = r"test_\w*(derivative|differentiated|gradcheck|grad_compose|_gradients|_its_gradients|compile)", 2
FOLDERS = {"integrations": 3, "plotting": 3}


def most(item: pytest.Item, several: int) -> int:
    """How many of so many cases of an item's function are fast."""
    fewer = [mark.args[0] for mark in item.iter_markers("cases")]
    if item.path.parent.name in FOLDERS:
        fewer.append(FOLDERS[item.path.parent.name])
    if re.match(LONG, item.name):
        fewer.append(FEW)
    return min(fewer, default=several if re.match(WHOLE, item.name) else CASES)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    given, matched = set(), set()
    functions: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        for mark in item.iter_markers("by_name"):
            for marker, pattern in mark.kwargs.items():
                given.add((item.path.name, pattern))
                if re.search(pattern, item.name):
                    matched.add((item.path.name, pattern))
                    item.add_marker(marker)
        if not any(item.iter_markers("slow")) and not any(item.iter_markers("nightly")):
            file, *classes, function = item.nodeid.partition("[")[0].split("::")
            if item.path.parent.name == "potentials" and re.match(LONG, item.name):
                classes = []  # those of a file are settings of one potential
            functions["::".join((file, *classes, function))].append(item)
    for several in functions.values():
        # In the order of a checksum, because every n-th of a product might always have the same dtype.
        several.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in several[most(several[0], len(several)) :]:
            item.add_marker(pytest.mark.slow)
    if config.args == config.getini("testpaths") and (stale := given - matched):
        raise pytest.UsageError(f"by_name: no test is called {sorted(stale)}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector from the million objects of a collection, which stay: it takes a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)
