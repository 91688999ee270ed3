"""Lists of what the package promises: as it is now, and as it is committed beside this file.

A name is public if the `__all__` of a module or a contract suite of `testing` has it, if README.md, CONTRIBUTING.md, a
page, an example or a tutorial imports it, or if the reference documents it and no other public module has it.
"""

import contextlib
import dataclasses
import enum
import functools
import importlib
import inspect
import json
import math
import os
import pathlib
import re
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
import typer
from torch._subclasses import FakeTensorMode

import implicit_attention

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCE = Path(implicit_attention.__file__).parent
IMPORT = re.compile(r"^[ >.]*from (implicit_attention[\w.]*) import (\([^)]*\)|[^\n\\]*)", re.MULTILINE)
#: CONTRIBUTING.md shows with these how a class is added.
SHOWN = {"HeavyBall", "Ridge", "WeakCoupling"}


def read(name: str) -> Any:
    """A committed list."""
    return json.loads((HERE / f"{name}.json").read_text())


def write(name: str, entries: Any) -> None:
    """Commit a list, one entry a line."""

    def lines(value: Any, indent: str) -> str:
        single = len(indent) > 1 or (indent and name in ("signatures", "refusals"))
        if single or not isinstance(value, dict | list) or not value:
            return json.dumps(value, ensure_ascii=False)
        inner = indent + " "
        if isinstance(value, list):
            return f"[\n{inner}" + f",\n{inner}".join(lines(each, inner) for each in value) + f"\n{indent}]"
        rows = (f"{json.dumps(key)}: {lines(each, inner)}" for key, each in sorted(value.items()))
        return f"{{\n{inner}" + f",\n{inner}".join(rows) + f"\n{indent}}}"

    (HERE / f"{name}.json").write_text(lines(entries, "") + "\n")


def value_at(path: str) -> Any:
    """The value at a dotted path. Where a function hides the module that it is from, the last step is the module's."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return getattr(value_at(module), name)
    except AttributeError:
        # A module that nothing has imported yet.
        return importlib.import_module(path)


def pages() -> list[Path]:
    """Texts and programs that tell users what there is."""
    docs = ROOT / "docs"
    several = (*docs.glob("*.md"), *docs.glob("tutorials/*.md"), *docs.glob("examples/*.py"))
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *several]


def names() -> dict[str, list[str]]:
    """The public names of every public module."""
    found: dict[str, set[str]] = {}
    for file in SOURCE.rglob("*.py"):
        path = ".".join(("implicit_attention", *file.relative_to(SOURCE).with_suffix("").parts))
        path = path.removesuffix(".__init__")
        if "._" in path or ".cli" in path:
            continue
        if re.search(r"^__all__", file.read_text(), re.MULTILINE):
            found[path] = set(importlib.import_module(path).__all__)
        elif ".testing." in path:
            defined = vars(importlib.import_module(path)).items()
            found[path] = {n for n, v in defined if n[0] != "_" and getattr(v, "__module__", None) == path}
    for page in pages():
        for module, listed in IMPORT.findall(page.read_text()):
            for name in re.findall(r"(\w+)(?: as \w+)?", re.sub(r"#.*", "", listed)):
                found.setdefault(module, set()).update({name} - SHOWN)
    held = {id(value_at(f"{module}.{name}")) for module in found for name in found[module]}
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        for path in re.findall(r"^::: (implicit_attention\.\S+)", page.read_text(), re.MULTILINE):
            if id(value_at(path)) not in held:
                module, _, name = path.rpartition(".")
                found.setdefault(module, set()).add(name)
    return {was_at(module): sorted(found[module]) for module in sorted(found)}


def listed() -> Iterator[tuple[str, Any]]:
    """Every value of the committed names, once, with the shortest of its paths."""
    seen: set[int] = set()
    for module, several in sorted(read("names").items(), key=lambda item: (item[0].count("."), item[0])):
        for name in several:
            value = value_at(now_at(f"{module}.{name}")) if not is_gone(f"{module}.{name}") else None
            if id(value) not in seen and value is not None:
                seen.add(id(value))
                yield f"{module}.{name}", value


@functools.cache
def _exceptions() -> tuple[dict[str, str], dict[str, str]]:
    return read("gone"), read("moved")


def is_gone(promise: str) -> bool:
    """Whether `gone.json` takes a promise back, by itself or with what it is a part of."""
    return any(re.match(re.escape(name) + r"(?![\w-])", promise) for name in _exceptions()[0])


def now_at(text: str) -> str:
    """A text with the paths that have moved, as `moved.json` says."""
    for old, new in _exceptions()[1].items():
        text = re.sub(rf"\b{re.escape(old)}\b", new, text)
        (home, _, name), (house, _, called) = old.rpartition("."), new.rpartition(".")
        text = re.sub(rf"from {re.escape(home)} import {name}\b", f"from {house} import {called} as {name}", text)
    return text


def was_at(path: str) -> str:
    """The path before it moved."""
    return {new: old for old, new in _exceptions()[1].items()}.get(path, path)


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """Work in a folder of one's own, which is gone afterwards."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)


def scope() -> dict[str, Any]:
    """Names that the expressions of the lists may use."""

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)

    def symmetric(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        half = normal(*shape, dtype=dtype) / 2
        return half + half.mT

    def fake(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with FakeTensorMode():
            return torch.ones(shape, dtype=dtype)

    names: dict[str, Any] = {
        "__name__": "given",
        "torch": torch,
        "nn": torch.nn,
        "Tensor": torch.Tensor,
        "math": math,
        "numpy": numpy,
        "pathlib": pathlib,
    }
    names |= {"functools": functools, "implicit_attention": implicit_attention, "transformers": transformers}
    return names | {"normal": normal, "symmetric": symmetric, "fake": fake}


def evaluate(text: str, given: tuple[str, ...] = ()) -> Any:
    """The value of an expression, after the definitions that it needs."""
    names = scope()
    text, *given = map(now_at, (text, *given))
    for path in sorted(set(re.findall(r"\bimplicit_attention(?:\.\w+)+", " ".join((text, *given))))):
        with contextlib.suppress(ImportError, AttributeError):
            value_at(path)
    for source in given:
        exec(compile(source, "<given>", "exec", dont_inherit=True), names)
    return eval(text, names)


def _default(value: Any) -> str:
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    return re.sub(r"<[^>]*>", "...", repr(value))


def parameters(function: Any) -> list[str]:
    """Parameters as they are written in a call: `*` stands before those by name alone, `name=default`.

    Of keywords that a TypedDict names each is here, with `~` for its default.
    """
    found, by_name = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            owner = inspect.unwrap(function.__init__ if inspect.isclass(function) else function)
            packed = re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation))
            keywords = owner.__globals__[packed[1]].__annotations__ if packed else ("*",)
            found += [f"{name}=~" if packed else "**" for name in keywords]
            continue
        if (parameter.kind is parameter.KEYWORD_ONLY and not by_name) or parameter.kind is parameter.VAR_POSITIONAL:
            found, by_name = [*found, "*" if parameter.kind is parameter.KEYWORD_ONLY else "*args"], True
        if parameter.kind is not parameter.VAR_POSITIONAL and parameter.name != "self":
            optional = parameter.default is not parameter.empty
            found.append(parameter.name + (f"={_default(parameter.default)}" if optional else ""))
    return found


def signatures() -> dict[str, Any]:
    """Parameters of public functions, classes, and methods that are in use; of an attribute that is, its kind.

    It is in use if a page, an example of a docstring or a contract suite reads it, or if it is a field.
    """
    used, found = _used(), dict[str, Any]()
    for path, value in listed():
        if inspect.isfunction(value):
            found[path] = parameters(value)
        if not inspect.isclass(value) or issubclass(value, BaseException):
            continue
        if not issubclass(value, enum.Enum) and not inspect.isabstract(value) and not _is_protocol(value):
            found[path] = parameters(value)
        fields = {f.name for f in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
        fields |= {*getattr(value, "_fields", ()), *getattr(value, "__members__", ())}
        for name in {*dir(value), *fields}:
            owner = next((base for base in value.__mro__ if name in vars(base)), value)
            if not owner.__module__.startswith("implicit_attention") or (name[0] == "_" and name != "__call__"):
                continue
            if name in fields or name in ("forward", "__call__") or name in used:
                found[f"{path}.{name}"] = member(value, name)
    return found


def member(kind: type, name: str) -> Any:
    """Parameters of a method; of what else a class has, or its objects, "attribute"; None for nothing."""
    found = getattr(kind, name, None)
    if inspect.isfunction(found) or inspect.ismethod(found):
        return parameters(found)
    has = hasattr(kind, name) or any(name in vars(base).get("__annotations__", ()) for base in kind.__mro__)
    return "attribute" if has else None


def keeps(path: str, old: list[str], new: list[str]) -> bool:
    """Whether all calls by the old parameters are calls by the new ones, with the same defaults."""

    def parts(given: list[str]) -> tuple[list[str], dict[str, str]]:
        star = next((i for i, each in enumerate(given) if each in ("*", "*args")), len(given))
        named = [each.partition("=") for each in given if each[0] != "*"]
        return [each.partition("=")[0] for each in given[:star] if each != "**"], {n: d for n, _, d in named}

    old = [each for each in old if not is_gone(f"{path}({each.partition('=')[0]})")]
    (first, defaults), (now, others) = parts(old), parts(new)
    same = all(d in ("", "~") or others.get(n) in ("~", d) for n, d in defaults.items())
    optional = all(others[n] for n in others.keys() - defaults)
    stars = {"*args", "**"} & set(old) <= set(new)
    return now[: len(first)] == first and defaults.keys() <= others.keys() and same and optional and stars


def _is_protocol(kind: type) -> bool:
    return typing.Protocol in kind.__bases__


def _used() -> set[str]:
    """Names behind a dot in texts for users."""
    text = "".join(page.read_text() for page in pages())
    for file in SOURCE.rglob("*.py"):
        source = file.read_text()
        testing = file.parent.name == "testing"
        text += source if testing else "\n".join(re.findall(r"^ *(?:>>>|\.\.\.) .*", source, re.MULTILINE))
    return set(re.findall(r"\.([a-z]\w*)", text))


def operations() -> dict[str, str]:
    """The operations of the package that torch knows, with their schemas."""
    known = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("implicit_attention::")]
    return {schema.name: str(schema) for schema in known}


def options() -> dict[str, list[str]]:
    """The options and arguments of every command, with their defaults."""
    from commands import app

    found: dict[str, list[str]] = {}

    def walk(command: Any, path: str) -> None:
        for name, each in getattr(command, "commands", {}).items():
            walk(each, f"{path} {name}")
        found[path] = sorted(
            f"{'/'.join((*each.opts, *each.secondary_opts))}={_default(each.default)}" for each in command.params
        )

    walk(typer.main.get_command(app), "implicit-attention")
    return found


LISTS = {"signatures": signatures, "operations": operations, "options": options}
