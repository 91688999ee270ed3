"""Lines of code, tokens, files and lines of imports by folder, and which tests import what is not promised.

`python tests/size.py` counts the files that git tracks. A line of code is one that a token of `tokenize` covers which
is no comment, no docstring and none that lays lines out (NEWLINE, NL, INDENT, DEDENT); a string covers all of its
lines, and an f-string is one token. A line of C++ is one that is not blank without its comments. A bound in lines
counts only at 12 tokens a line or fewer. Promised are the names in `promises/names.json`.
"""

from __future__ import annotations

import ast
import collections
import io
import json
import re
import subprocess
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "implicit_attention"
PARTS = (PACKAGE, "tests", "benchmarks", "docs")
#: What is worked on first: the files at the top of the package, and folders.
CORE = ("root", "solvers", "linear", "adjoints", "kernels", "energies", "attention")
#: Tokens a line, above which lines are too long to be counted.
MOST_TOKENS = 12
LAYOUT = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
Size = collections.Counter[str]


def python_size(text: str) -> Size:
    """Lines, tokens and lines of imports of a file of Python."""
    docstrings, imports, lines = set(), set[int](), set[int]()
    tokens = inside = 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            docstrings.add((node.body[0].lineno, node.body[0].col_offset))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(range(node.lineno, node.end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind in LAYOUT or token.start in docstrings:
            continue
        lines.update(range(token.start[0], token.end[0] + 1))
        # From Python 3.12 on an f-string is many tokens.
        inside += (kind == "FSTRING_START") - (kind == "FSTRING_END")
        tokens += not inside
    return Size(files=1, lines=len(lines), tokens=tokens, imports=len(imports))


def cpp_size(text: str) -> Size:
    return Size(files=1, lines=sum(not line.isspace() for line in without_comments(text).splitlines(True)))


def without_comments(cpp: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", cpp, flags=re.DOTALL)


def unpromised(text: str, promised: dict[str, list[str]]) -> set[str]:
    """Paths of the package that a file imports, also in a function or in code in a string, and that are not promised.

    Of a module without promises the path is that of the module, else that of the name.
    """
    found = set()
    for module, name in _imports(ast.parse(text)):
        path = f"{module}.{name}" if name else module
        if module.split(".")[0] == PACKAGE and path not in promised and name not in promised.get(module, ()):
            found.add(path if module in promised else module)
    return found


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and f" {PACKAGE}" in node.value:
            try:
                code = ast.parse(textwrap.dedent(node.value))
            except SyntaxError:
                continue
            yield from _imports(code)


def tracked() -> dict[str, str]:
    """Texts of the files of Python and C++ that git tracks, by their paths."""
    wanted = [f"{part}/*.{kind}" for part in PARTS for kind in ("py", "h", "cpp")]
    listed = subprocess.run(["git", "ls-files", *wanted], cwd=ROOT, capture_output=True, text=True, check=True)
    return {path: (ROOT / path).read_text() for path in listed.stdout.splitlines()}


def promised_names() -> dict[str, list[str]]:
    """The promised names by module, at the paths to which they have moved."""
    promises = ROOT / "tests" / "promises"
    moved = json.loads((promises / "moved.json").read_text())
    return {moved.get(at, at): names for at, names in json.loads((promises / "names.json").read_text()).items()}


def folder(path: str) -> str:
    """The first folder of a path below a part, "root" for the files at its top."""
    parts = path.split("/")
    return parts[1] if len(parts) > 2 else "root"


HEADER = f"\n{'':<22}{'files':>6}{'lines':>9}{'tokens':>11}{'a line':>8}{'imports':>9}"


def row(name: str, size: Size) -> str:
    counted = f"{name:<22}{size['files']:>6,}{size['lines']:>9,}"
    return f"{counted}{size['tokens']:>11,}{density(size):>8.1f}{size['imports']:>9,}" if size["tokens"] else counted


def total(name: str, size: Size) -> str:
    within = density(size) <= MOST_TOKENS
    return f"{row(name, size)}  {'within' if within else 'MORE THAN'} {MOST_TOKENS} tokens a line"


def density(size: Size) -> float:
    return size["tokens"] / size["lines"]


def main() -> None:
    promised = promised_names()
    parts, folders = collections.defaultdict(Size), collections.defaultdict(Size)
    wrong, tests = {}, Size()
    for path, text in tracked().items():
        part = path.split("/")[0]
        if not path.endswith(".py"):
            parts["C++"] += cpp_size(text)
            continue
        parts[part] += (size := python_size(text))
        if part == PACKAGE:
            folders[folder(path)] += size
        elif part == "tests":
            tests[folder(path)] += 1
            if paths := unpromised(text, promised):
                wrong[path] = ", ".join(sorted(found.removeprefix(f"{PACKAGE}.") for found in paths))
    print("Files of tests, and what they import that is not promised:\n")
    print(*(f"{path}: {paths}" for path, paths in wrong.items()), sep="\n")
    by_folder = Size(map(folder, wrong))
    counts = ", ".join(f"{name} {by_folder[name]} of {tests[name]}" for name in sorted(by_folder))
    print("\nSuch files by folder:", *textwrap.wrap(counts, 110), sep="\n")
    print(HEADER, *(row(name, size) for name, size in sorted(folders.items())), sep="\n")
    print(HEADER, total("package", parts[PACKAGE]), sep="\n")
    print(total("its core", sum((folders[name] for name in CORE if name in folders), Size())))
    print(*(total(part, parts[part]) for part in PARTS[1:]), sep="\n")
    print(total("all four", sum((parts[part] for part in PARTS), Size())))
    print(row("C++ of the package", parts["C++"]))
    print(f"{'unpromised imports':<22}{len(wrong):>6} of {tests.total()} files of tests")


if __name__ == "__main__":
    main()
