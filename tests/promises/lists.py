"""Lists of what the package promises: as it is now, and as it is committed beside this file.

A name is public if the `__all__` of a module or a contract suite of `testing` has it, if README.md, CONTRIBUTING.md, a
page, an example or a tutorial imports it, or if the reference documents it and no other public module has it.
"""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import implicit_attention

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCE = Path(implicit_attention.__file__).parent
IMPORT = re.compile(r"^[ >.]*from (implicit_attention[\w.]*) import (\([^)]*\)|[^\n\\]*)", re.MULTILINE)
#: CONTRIBUTING.md shows with these how a class is added.
SHOWN = {"HeavyBall", "Ridge"}


def read(name: str) -> Any:
    """A committed list."""
    return json.loads((HERE / f"{name}.json").read_text())


def write(name: str, entries: Any) -> None:
    """Commit a list, one entry a line."""

    def lines(value: Any, indent: str = "") -> str:
        if indent == "  " and not isinstance(value, dict | list):
            return json.dumps(value, ensure_ascii=False)
        if isinstance(value, dict) and len(indent) < 2:
            rows = [f"{indent} {json.dumps(key)}: {lines(each, indent + ' ')}" for key, each in sorted(value.items())]
            return "{\n" + ",\n".join(rows) + f"\n{indent}}}" if rows else "{}"
        if isinstance(value, list) and len(indent) < 2:
            return "[\n" + ",\n".join(f"{indent} {lines(each, '  ')}" for each in value) + f"\n{indent}]"
        return json.dumps(value, ensure_ascii=False)

    (HERE / f"{name}.json").write_text(lines(entries) + "\n")


def value_at(path: str) -> Any:
    """The value at a dotted path. Where a function hides the module that it is from, the last step is the module's."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return getattr(value_at(module), name)


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
    docs = ROOT / "docs"
    pages = (*docs.glob("*.md"), *docs.glob("tutorials/*.md"), *docs.glob("examples/*.py"))
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *pages):
        for module, listed in IMPORT.findall(page.read_text()):
            for name in re.findall(r"(\w+)(?: as \w+)?", re.sub(r"#.*", "", listed)):
                found.setdefault(module, set()).update({name} - SHOWN)
    held = {id(value_at(f"{module}.{name}")) for module in found for name in found[module]}
    for page in (docs / "reference").glob("*.md"):
        for path in re.findall(r"^::: (implicit_attention\.\S+)", page.read_text(), re.MULTILINE):
            if id(value_at(path)) not in held:
                module, _, name = path.rpartition(".")
                found.setdefault(module, set()).add(name)
    return {module: sorted(found[module]) for module in sorted(found)}
