"""Which of some random faults in the package do fast tests find, and which slow ones? Nightly tests are left out.

`python tests/mutations.py` draws faults (operators, comparisons, numbers, truth values, conditions) from the functions
of the package, or of its core (`--core`, as tests/size.py counts it), runs for each the tests that reach its function,
and prints a table; it takes one to two hours. The same seed draws the same faults from the same code.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from size import CORE

ROOT = Path(__file__).parent.parent
PACKAGE = "implicit_attention"
TESTS = ("-m", "not nightly")
#: What Triton compiles records nothing: its faults are looked for by all tests of that name.
TRITON = f"{PACKAGE}/kernels/triton/"
#: Seconds for the tests of one fault; a fault that makes a loop endless counts as found.
LIMIT = 900

SWAPPED: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}

# What is written into a function to tell which tests reach it.
RECORDER = """
import os
_seen = set()


def reached(fault):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" ", 1)[0]
    if (fault, test) not in _seen:
        _seen.add((fault, test))
        with open(os.path.join(os.environ["MUTATIONS_OUT"], str(fault)), "a") as file:
            file.write(test + "\\n")
"""


class Fault(NamedTuple):
    """`old` becomes `new` at an offset of a file's text; `body` is the line of the function's first statement."""

    file: str
    line: int
    offset: int
    old: str
    new: str
    body: int


def faults(file: str, text: str) -> Iterator[Fault]:
    """All faults that can be made in the functions of a file."""
    starts = [0]
    for row in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(row))

    def offset(node: ast.expr, end: bool = False) -> int:
        line, column = (node.end_lineno, node.end_col_offset) if end else (node.lineno, node.col_offset)
        assert line is not None
        assert column is not None
        row = text[starts[line - 1] : starts[line]]
        return starts[line - 1] + len(row.encode()[:column].decode())

    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        statements = [s for s in function.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        inner = {n for s in statements for f in ast.walk(s) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
        for node in (n for s in statements for n in ast.walk(s) if n not in inner):
            pairs: list[tuple[ast.expr, ast.AST, ast.expr]] = []
            if isinstance(node, ast.BinOp):
                pairs = [(node.left, node.op, node.right)]
            elif isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                pairs = list(zip(sides, node.ops, sides[1:], strict=False))
            elif isinstance(node, ast.BoolOp):
                pairs = [(a, node.op, b) for a, b in zip(node.values, node.values[1:], strict=False)]
            for left, operator, right in pairs:
                if type(operator) in SWAPPED:
                    old, new = SWAPPED[type(operator)]
                    start, stop = offset(left, end=True), offset(right)
                    if text[start:stop].count(old) == 1:
                        at = start + text[start:stop].index(old)
                        yield Fault(file, left.lineno, at, old, new, statements[0].lineno)
            if isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
                new = str(not node.value) if isinstance(node.value, bool) else repr(node.value + 1)
                old = text[offset(node) : offset(node, end=True)]
                yield Fault(file, node.lineno, offset(node), old, new, statements[0].lineno)
            if isinstance(node, (ast.If, ast.IfExp)):
                old = text[offset(node.test) : offset(node.test, end=True)]
                yield Fault(file, node.test.lineno, offset(node.test), old, f"(not ({old}))", statements[0].lineno)


def run(folder: Path, arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str] | None:
    """Pytest in a copy of the project, or None if it takes too long."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    settings = {**os.environ, "PYTHONPATH": str(folder), **environment}
    try:
        limit = None if environment else LIMIT
        return subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return None


def reaching(folder: Path, drawn: list[Fault], out: Path) -> list[list[str]]:
    """For every fault the tests that run its function, and those that fail where that is recorded."""
    before = {f.file: (folder / f.file).read_text() for f in drawn if not f.file.startswith(TRITON)}
    (folder / "_mutations.py").write_text(RECORDER)
    for file, text in before.items():
        rows = text.splitlines(keepends=True)
        inside = [(fault.body, number) for number, fault in enumerate(drawn) if fault.file == file]
        for line, number in sorted(inside, reverse=True):
            indent = len(rows[line - 1]) - len(rows[line - 1].lstrip())
            rows.insert(line - 1, " " * indent + f'__import__("_mutations").reached({number})\n')
        (folder / file).write_text("".join(rows))
    finished = run(folder, [*TESTS, "-rfE", "tests"], MUTATIONS_OUT=str(out))
    assert finished is not None
    failed = [line.split(" ", 1)[1].split(" - ")[0] for line in finished.stdout.splitlines() if line[:5] == "FAILE"]
    for file, text in before.items():
        (folder / file).write_text(text)
    print(f"{finished.stdout.splitlines()[-1]}; {len(failed)} tests do not stand the recording and run for all faults")
    compiled = {name for name in named(folder, *TESTS) if "triton" in name}
    found = []
    for number, fault in enumerate(drawn):
        file = out / str(number)
        tests = set(file.read_text().splitlines()) if file.exists() else set()
        found.append(sorted({*tests, *(compiled if fault.file.startswith(TRITON) else failed)} - {""}))
    return found


def named(folder: Path, *markers: str) -> set[str]:
    """The names of all tests, or of those with these markers, which depend on the cases that are collected together."""
    listed = run(folder, ["--collect-only", "-n", "0", *markers, "tests"])
    assert listed is not None
    return {line for line in listed.stdout.splitlines() if "::" in line}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=30)
    options.add_argument("--seed", type=int, default=15)
    options.add_argument("--core", action="store_true", help="draw from the core of the package only")
    options.add_argument("--list", action="store_true", help="print the faults and run nothing")
    chosen = options.parse_args()
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    sources = sorted(f for f in files if f.startswith(f"{PACKAGE}/") and f.endswith(".py"))
    if chosen.core:
        # A file in no folder is of the root.
        sources = [f for f in sources if (f.split("/")[1] if f.count("/") > 1 else "root") in CORE]
    possible = [fault for file in sources for fault in faults(file, (ROOT / file).read_text())]
    drawn = sorted(random.Random(chosen.seed).sample(possible, chosen.count))
    names = [f"{f.file}:{f.line} {' '.join(f.old.split())} -> {' '.join(f.new.split())}" for f in drawn]
    if chosen.list:
        print(*names, sep="\n")
        return
    fast = whole = 0
    with tempfile.TemporaryDirectory() as place:
        folder, out = Path(place, "project"), Path(place, "reached")
        out.mkdir()
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, folder / file)
        quick, tests = named(folder), reaching(folder, drawn, out)
        for fault, name, ids in zip(drawn, names, tests, strict=True):
            text = (folder / fault.file).read_text()
            (folder / fault.file).write_text(text[: fault.offset] + fault.new + text[fault.offset + len(fault.old) :])
            found = []
            for part in ([i for i in ids if i in quick], [i for i in ids if i not in quick]):
                Path(place, "ids").write_text("\n".join(part))
                finished = run(folder, ["-x", *TESTS, f"@{place}/ids"]) if part else None
                # 5 is pytest's code for no test.
                found.append(bool(part) and (finished is None or finished.returncode not in (0, 5)))
                if found[-1]:
                    break
            fast, whole = fast + (found[:1] == [True]), whole + any(found)
            outcome = "found" if found[:1] == [True] else "slow tests only" if any(found) else "not found"
            print(f"{outcome:16} {len(ids):5} tests  {name}", flush=True)
            (folder / fault.file).write_text(text)
    print(f"of {len(drawn)} faults the fast suite finds {fast}, the whole one {whole}")


if __name__ == "__main__":
    main()
