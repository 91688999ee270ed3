"""The walk through a call: files and folders of the package that it enters, records that it makes, frames.

`python tests/walk.py` walks through five calls, each of them warm. A file is entered when a function of it is called; a
return enters a file, or a folder, that was left before. A record is a dataclass or NamedTuple of the package, counted
once where the call makes one or more; "before" counts those that are made before the call first asks the native library
for something, which lie between door and kernel. A solve is a call of `SOLVE`, a frame one of any library. Files of C++
define a name that can be reached, by names and includes, from the functions which the call asks of the native library.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from size import without_comments
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import implicit_attention as ia  # noqa: E402
from benchmarks.native_layers import frames  # noqa: E402
from implicit_attention.kernels.native import library  # noqa: E402
from implicit_attention.spins import MeanField, SpinSystem, thermodynamics  # noqa: E402

PACKAGE = Path(ia.__file__).parent

#: The function that decides how a problem is solved.
SOLVE = ("_solve.py", "solve")
#: The name of what a line of C++ that is not indented defines.
DEFINED = re.compile(r"^\b[^\n(={;]*?\b(\w+)(?:<[^\n<>()]*>)?\s*[({=;]", re.MULTILINE)


class Walk(NamedTuple):
    """Functions of the package in the order of their calls, as (file, name); records; functions of the library.

    before: the records that are made before the first of these functions is called.
    """

    passed: list[tuple[str, str]]
    records: set[str]
    native: set[str]
    before: set[str]

    @property
    def files(self) -> list[str]:
        return [file for file, _ in self.passed]

    @property
    def folders(self) -> list[str]:
        return [str(Path(file).parent) for file in self.files]


def walked(call: Callable[[], Any]) -> Walk:
    """The walk through the second of two calls."""
    found, made = Walk([], set(), set(), set()), set[type]()
    start = f"{PACKAGE}/"

    def watch(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(start):
            found.passed.append((code.co_filename.removeprefix(start), code.co_name))
        if event in ("call", "return") and code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if event == "call" and code.co_name == "__init__":
                made.add(type(first))
            elif event == "return" and isinstance(first, type) and isinstance(argument, first):
                # The `__new__` of a NamedTuple, or a method of a class.
                made.add(type(argument))

    call()
    loaded = library.found()[0]
    functions = {} if loaded is None else {name: part for name, part in vars(loaded).items() if callable(part)}

    def records() -> set[str]:
        return {kind.__name__ for kind in made if is_record(kind)}

    def asked(function: Callable[..., Any], *arguments: Any) -> Any:
        if not found.native:
            found.before.update(records())
        found.native.add(function.__name__)
        return function(*arguments)

    watched = {name: functools.partial(asked, function) for name, function in functions.items()}
    with mock.patch.dict(vars(loaded) if functions else {}, watched), torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(watch)
        call()
        sys.setprofile(None)
    found.records.update(records())
    return found


def is_record(kind: type) -> bool:
    own = kind.__module__.partition(".")[0] == ia.__name__
    return own and (dataclasses.is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields")))


def returns(places: Iterable[str]) -> int:
    """How often a sequence of places comes back to one that it has left."""
    visits = [place for place, _ in itertools.groupby(places)]
    return len(visits) - len(set(visits))


def cpp_files(functions: set[str], texts: dict[str, str]) -> set[str]:
    """Files that define a name which can be reached, by names and includes, from these functions."""
    bare = {file: without_comments(text) for file, text in texts.items()}
    parts: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
    for file, text in bare.items():
        found = list(DEFINED.finditer(text))
        for name, end in itertools.zip_longest(found, (name.start() for name in found[1:])):
            parts[file, name[1]].update(re.findall(r"\w+", text[name.start() : end]))

    @functools.cache
    def seen_by(file: str) -> set[str]:
        included = set(re.findall(r'#include "(.*)"', bare[file])) & bare.keys()
        return {file}.union(*map(seen_by, included))

    reached, left = set[tuple[str, str]](), {(file, name) for file, name in parts if name in functions}
    while left:
        reached |= left
        left = {(place, word) for file, name in left for word in parts[file, name] for place in seen_by(file)}
        left = (left & parts.keys()) - reached
    return {file for file, _ in reached}


class Block(nn.Linear):
    def forward(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(z) + x)


def doors() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls and their names; the first and its frames are those of the benchmark of frames, which makes no graph."""
    torch.manual_seed(0)
    layer, block, x = ia.ImplicitAttention(16, heads=1), ia.Equilibrium(Block(16, 16)), torch.randn(1, 8, 16)
    query, keys = torch.randn(2, 5, 8), torch.randn(2, 7, 8)
    energy = ia.AnchoredEnergy(ia.LogSumExp(keys, beta=0.5), query, anchor=0.5)
    # Too strong for plain steps to be certain: damped ones come first, in a solve of their own.
    system = SpinSystem(0.3 * (torch.ones(6, 6) - torch.eye(6)), torch.linspace(0.1, 0.6, 6)[:, None])
    with torch.no_grad():
        yield "ImplicitAttention.forward(x), no graph", functools.partial(layer, x)
    yield "ImplicitAttention, forward and back", lambda: layer(x).sum().backward()
    yield "equilibrium_attention(query, keys, keys)", functools.partial(ia.equilibrium_attention, query, keys, keys)
    yield "Equilibrium.forward(x)", functools.partial(block, x)
    yield "thermodynamics(system, MeanField())", functools.partial(thermodynamics, system, MeanField())
    yield "solve(energy, query)", functools.partial(ia.solve, energy, query)


def main() -> None:
    columns = ("files", "returns", "folders", "returns", "records", "before", "solves", "frames", "C++")
    table = [f"{'':<41}" + "".join(f"{column:>8}" for column in columns)]
    texts = {path.name: path.read_text() for kind in ("h", "cpp") for path in PACKAGE.rglob(f"*.{kind}")}
    for door, call in doors():
        walk = walked(call)
        with torch.autograd.set_multithreading_enabled(False):
            count = frames(call)
        parts = {"files": list(dict.fromkeys(walk.files)), "records": sorted(walk.records)}
        parts |= {"before": sorted(walk.before), "C++": sorted(cpp_files(walk.native, texts))}
        numbers = [len(parts["files"]), returns(walk.files), len(set(walk.folders)), returns(walk.folders)]
        numbers += [len(walk.records), len(walk.before), walk.passed.count(SOLVE), count, len(parts["C++"])]
        table.append(f"{door:<41}" + "".join(f"{number:>8,}" for number in numbers))
        print(door)
        for part, names in parts.items():
            if names:
                print(textwrap.fill(f"{part}: {', '.join(names)}", 118, initial_indent="  ", subsequent_indent="    "))
    print("", *table, sep="\n")


if __name__ == "__main__":
    main()
