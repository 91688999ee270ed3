"""What `size.py` and `walk.py` count, in texts and calls whose numbers are known."""

import dataclasses
from typing import NamedTuple

import size
import walk

import implicit_attention as ia

CODE = '''"""A module
of two lines."""

import os  # a comment
from sys import (
    path,
)


def f(x):
    """A docstring."""
    # Another comment.
    return f"{x} and {path[0]!r}", """one

three"""
'''
PROMISED = {"implicit_attention": ["solve"], "implicit_attention.spins": ["SpinSystem"]}


def test_lines_and_tokens_are_those_of_code():
    # import os; from sys import ( path , ); def f ( x ) : return f"..." , """..."""
    tokens = 2 + 7 + 6 + 4
    assert size.python_size(CODE) == {"files": 1, "lines": 1 + 3 + 1 + 3, "tokens": tokens, "imports": 1 + 3}
    assert size.cpp_size("// a\n\nint x; // b\n/* c\n d */ int y;\n  \n")["lines"] == 2


def test_imports_that_are_not_promised_are_found_wherever_they_stand():
    def found(text):
        return size.unpromised(text.replace("PACKAGE", size.PACKAGE), PROMISED)

    system = {f"{size.PACKAGE}.spins.system"}
    assert not found("import PACKAGE.spins as s\nfrom PACKAGE import solve, spins\nimport torch")
    assert not found("from PACKAGE.spins import SpinSystem\nimport PACKAGE")
    assert found("from PACKAGE import solve, _solve") == {f"{size.PACKAGE}._solve"}
    assert found("import PACKAGE.spins.system") == system
    assert found("def f():\n    from PACKAGE.spins.system import SpinSystem") == system
    assert found("code = '''\n    from PACKAGE.spins.system import SpinSystem\n'''") == system
    assert not found("message = 'the files of PACKAGE'")


#: Tests of the core with private imports: kernels beside their references, their checks, the library that holds them.
OF_KERNELS = "hopfield_cases native native_library triton_adjoint_cases triton_half_cases triton_harness"
OF_KERNELS += " triton_solve_cases triton_trust_cases triton_variants trust"


def test_few_tests_import_what_is_not_promised():
    promised, tests = size.promised_names(), size.ROOT / "tests"
    files = [path for path in tests.rglob("*.py") if size.unpromised(path.read_text(), promised)]
    assert len(files) <= 40
    of_core = [
        path.stem.removeprefix("test_") for path in files if path.parent != tests and path.parent.name in size.CORE
    ]
    assert sorted(of_core) == OF_KERNELS.split()


def test_a_return_is_to_a_place_that_was_left():
    assert walk.returns("aabbcc") == 0
    assert walk.returns("abbaca") == 2


@dataclasses.dataclass
class Report:
    steps: int

    @classmethod
    def bare(cls):
        return object.__new__(cls)

    def same(self):
        return self


class Pair(NamedTuple):
    left: int
    right: int


def test_records_are_those_that_a_call_makes(monkeypatch):
    def made(call):
        return walk.walked(call).records

    assert not made(lambda: Report(1)), "it is none of the package"
    for record in (Report, Pair):
        monkeypatch.setattr(record, "__module__", f"{ia.__name__}.solution")
    report, pair = Report(1), Pair(1, 2)
    for call in (lambda: Report(1), Report.bare, lambda: dataclasses.replace(report, steps=2)):
        assert made(call) == {"Report"}
    for call in (lambda: Pair(1, 2), lambda: Pair._make((1, 2)), lambda: pair._replace(left=2)):
        assert made(call) == {"Pair"}
    assert not made(report.same)


def test_files_of_cpp_are_reached_by_names_that_they_see():
    texts = {
        "a.cpp": '#include "b.h"\n#include "c.h"\nint ia_one() { return ours(); }\n'
        "// theirs\nint ia_two() { return theirs(); }\n",
        "b.h": "template <typename T>\nstruct Deep {};\nint ours() {\n  return 2 * other;\n}\n",
        "c.h": '#include "b.h"\nint theirs() { return sizeof(Deep<int>); }\nconstexpr int other = 3;\n',
    }
    assert walk.cpp_files({"ia_one"}, texts) == {"a.cpp", "b.h"}
    assert walk.cpp_files({"ia_two"}, texts) == {"a.cpp", "b.h", "c.h"}
    assert walk.cpp_files(set(), texts) == set()


def test_walks_through_the_doors_are_the_same_each_time():
    for door, call in walk.doors():
        first, again = walk.walked(call), walk.walked(call)
        assert first == again, door
        assert first.records, door
        assert 1 < len(set(first.folders)) < len(set(first.files)) < len(first.passed), door
    assert again.passed.count(walk.SOLVE) == 1, "the last door is `solve` itself"
