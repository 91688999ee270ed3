"""Who may import whom, and what importing the package must not load.

`python tests/test_imports.py` draws the rooms of the package as CONTRIBUTING.md has them.
"""

import ast
import functools
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from processes import fresh

import implicit_attention

PACKAGE = Path(implicit_attention.__file__).parent

# Part of the package -> the parts that it may import. Leaves are free for all.
LEAVES = {"_validate", "_torch"}
ALLOWED = {
    "linear": {"solution"},
    # The face of the kernels names the operations, which are above them.
    "kernels": {"linear", "solution", "failure"},
    # What is above the kernels it imports when an operation runs.
    "kernels.operations": {"_solve", "linear", "solution", "failure"},
    "solution": set(),
    "problem": {"kernels", "solution"},
    "failure": {"solution"},
    "potentials": {"kernels", "linear", "failure", "problem"},
    # Its file stands in `potentials`, which knows its names alone.
    "potentials.legendre": {"_solve", "energies", "failure", "potentials", "problem", "solvers"},
    "solvers": {"problem", "linear", "solution", "failure", "kernels"},
    "adjoints": {"potentials", "solvers", "problem", "linear", "solution", "failure", "kernels"},
    "energies": {"kernels", "potentials", "problem", "failure", "solution"},
    "_solve": {
        "kernels",
        "adjoints",
        "energies",
        "potentials",
        "linear",
        "solvers",
        "problem",
        "solution",
        "failure",
    },
    "options": {"_solve", "solvers", "adjoints", "failure", "kernels"},
    "attention": {
        "options",
        "_solve",
        "kernels",
        "energies",
        "potentials",
        "solvers",
        "adjoints",
        "solution",
        "failure",
    },
    "layers": {
        "options",
        "attention",
        "kernels",
        "energies",
        "potentials",
        "problem",
        "solvers",
        "adjoints",
        "linear",
        "_solve",
        "solution",
        "spins",
        "failure",
    },
    "spins": {
        "diagnostics",
        "plotting",
        "potentials",
        "_solve",
        "solvers",
        "adjoints",
        "linear",
        "problem",
        "solution",
        "failure",
    },
    "integrations": {
        "layers",
        "kernels",
        "options",
        "attention",
        "diagnostics",
        "potentials",
        "solvers",
        "adjoints",
        "solution",
        "energies",
        "training",
        "failure",
    },
    "training": {"layers", "diagnostics", "problem", "solution", "failure"},
    "distributed": {"attention", "adjoints", "energies", "potentials", "solvers", "failure", "problem"},
    "models": {"layers", "options", "problem"},
    "diagnostics": {"_solve", "solvers", "linear", "problem", "potentials", "energies", "kernels", "solution"},
    "plotting": {"energies", "potentials", "_solve", "solvers", "problem", "solution", "diagnostics", "spins"},
    # Only commands import studies, and studies no command.
    "studies": {
        "models",
        "layers",
        "plotting",
        "spins",
        "diagnostics",
        "energies",
        "potentials",
        "_solve",
        "solvers",
        "adjoints",
        "linear",
        "problem",
        "solution",
        "training",
    },
    "cli": {"studies", "layers", "training", "kernels", "plotting", "spins", "solution"},
    "__main__": {"cli"},
}


@functools.cache
def imported_modules(path: Path) -> set[str]:
    """Modules and packages of the package that a file names in its imports: at the top, in functions, for types.

    `from .base import X` and `from . import base` name the module `base`, `from ..kernels import f` the face of
    `kernels`.
    """
    folder = path.relative_to(PACKAGE).parent.parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            dotted = [alias.name.split(".") for alias in node.names]
            found |= {".".join(names[1:]) for names in dotted if names[0] == PACKAGE.name and len(names) > 1}
        elif isinstance(node, ast.ImportFrom):
            named = (node.module or "").split(".") if node.module else []
            if node.level:
                base = [*folder[: len(folder) + 1 - node.level], *named]
            elif named[:1] == [PACKAGE.name]:
                base = named[1:]
            else:
                continue
            inner = {alias.name for alias in node.names if module_file([*base, alias.name]) is not None}
            found |= {".".join([*base, name]) for name in inner}
            if {alias.name for alias in node.names} - inner:
                found.add(".".join(base))
    return found


def module_file(names: list[str]) -> Path | None:
    path = PACKAGE.joinpath(*names)
    return next((f for f in (path.with_suffix(".py"), path / "__init__.py") if names and f.is_file()), None)


def imported_parts(path: Path) -> set[str]:
    """Top-level parts of the package that a file imports, at run time or for types."""
    return {name.split(".")[0] for name in imported_modules(path)} - {""}


def dotted_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_module_imports_itself_by_way_of_others():
    imports = {dotted_name(path): imported_modules(path) for path in PACKAGE.rglob("*.py")}
    for cycle in cycles(imports):
        raise AssertionError(" -> ".join(cycle))


def test_cycles_are_found():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": set()}) == []
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c", "b"]]
    assert cycles({"a": {"a"}}) == [["a", "a"]]


def cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """A shortest way back to each module that has one, of every group once."""
    found: list[list[str]] = []
    for start in sorted(imports):
        ways = [[start]]
        seen: set[str] = set()
        while ways and not any(start in cycle for cycle in found):
            way = ways.pop(0)
            for name in sorted(imports.get(way[-1], set()) - seen):
                if name == start:
                    found.append([*way, name])
                    break
                seen.add(name)
                ways.append([*way, name])
    return found


#: Modules that stand in a room for their subject, and import from rooms above it when they are used.
UPWARDS = {"kernels.operations": "_solve", "potentials.legendre": "_solve", "spins.sweep": "plotting"}


def drawing() -> str:
    """The rooms in rows: each imports from rows below its own only."""
    below: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        names = set() if dotted_name(path) in UPWARDS else imported_parts(path) - {room}
        below.setdefault(room, set()).update(name for name in names if name in ALLOWED.keys() | LEAVES)
    for root in ("__init__", "__main__"):
        del below[root]
    rows: list[list[str]] = []
    while below:
        ready = sorted(room for room, names in below.items() if not names & below.keys())
        assert ready, f"rooms that import each other: {sorted(below)}"
        rows.append(ready)
        for room in ready:
            del below[room]
    return "\n".join(textwrap.indent("   ".join(row), "    ") for row in reversed(rows))


def test_rooms_import_downwards_as_they_are_drawn():
    assert drawing() in (PACKAGE.parent / "CONTRIBUTING.md").read_text()


def test_only_solve_knows_kernels():
    # The record and the rule are everybody's, the trust also that of torch's attention; commands tell what there is.
    free = {"kernels.problem", "kernels.rule"}
    told = {"cli.compare_solvers": {"kernels"}, "cli.demo": {"kernels"}, "cli.report": {"kernels"}}
    told["potentials._attention"] = {"kernels", "kernels.trust"}
    # A graph holds the operations by name, and they are there after a bare import.
    told["attention.function"] = told[""] = {"kernels.operations"}
    for path in PACKAGE.rglob("*.py"):
        name = dotted_name(path)
        if name.split(".")[0] not in ("kernels", "testing") and name != "_solve":
            known = {each for each in imported_modules(path) if each.split(".")[0] == "kernels"}
            assert known - free <= told.get(name, set()), name


def test_parts_import_only_what_they_may():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        imports = imported_parts(path) - LEAVES - {part}
        if part in LEAVES:
            wrong += [(str(path), name) for name in imports]
        elif part not in ("__init__", "testing"):
            # The version number and other public names come from the root, which only commands may read.
            allowed = ALLOWED.get(dotted_name(path), ALLOWED[part])
            allowed = allowed | ({"__version__"} if part in ("cli", "__main__") else set())
            wrong += [
                (str(path.relative_to(PACKAGE)), name)
                for name in imports
                if name not in allowed and (PACKAGE / name).exists() | (PACKAGE / f"{name}.py").exists()
            ]
    assert not wrong


def test_nothing_imports_testing():
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] != "testing":
            assert "testing" not in imported_parts(path), path


def test_studies_know_nothing_of_the_terminal():
    # A comparison of solvers shows itself as a table of rich where that is installed.
    for path in {*(PACKAGE / "studies").rglob("*.py")} - {PACKAGE / "studies" / "comparison.py"}:
        assert not re.search(r"^\s*(import|from) (typer|rich)\b", path.read_text(), re.MULTILINE), path


#: Functions of autograd that are no fixed points' own, and what they are.
OTHER_DERIVATIVES = {
    "_torch._Refusing": "an error",
    "adjoints.reversible.ReversibleSteps": "steps that run backwards",
    "distributed.derivatives.Attend": "attention over keys of several processes",
    "distributed.sequence._AllToAll": "a message",
    "layers.couplings._MeanOfOrders": "a mean over permutations",
    "potentials._attention._Attention": "torch's attention kernels",
    "potentials._bessel._WithSlope": "a function with a known slope",
    "potentials._entmax._Maximum": "a maximum in closed form",
    "potentials._entmax._Weights": "weights in closed form",
    "potentials.legendre._Stationary": "the identity, where a derivative is 0",
    "spins._matrix_inverse._Inverse": "the inverse of a matrix",
}


def test_fixed_points_have_one_derivative():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            bases = node.bases if isinstance(node, ast.ClassDef) else []
            if any(ast.unparse(base).endswith("autograd.Function") for base in bases):
                found.add(f"{dotted_name(path)}.{node.name}")
    assert found - OTHER_DERIVATIVES.keys() == {"adjoints.implicit.FixedPoint"}
    assert OTHER_DERIVATIVES.keys() <= found


def test_only_ops_knows_triton():
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] != "kernels":
            assert not re.search(r"^\s*(import|from) triton", path.read_text(), re.MULTILINE), path


def test_a_fresh_import_loads_nothing_heavy():
    forbidden = ["triton", "matplotlib", "torchdeq", "scipy", "sklearn", "rich", "typer", "pytest"]
    forbidden += ["transformers", "x_transformers", "timm"]
    code = f"""
import sys, torch
before = set(sys.modules)
import implicit_attention
new = {{m.split('.')[0] for m in set(sys.modules) - before}}
print(sorted(new & set({forbidden!r})))
"""
    assert fresh(code) == "[]"


def test_a_fresh_import_adds_only_what_is_listed_to_torch():
    # Import time, guarded without a clock: a library or part that only some users need is imported where it is used.
    code = """
import sys, torch
before = set(sys.modules)
import implicit_attention
new = [m.split('.') for m in set(sys.modules) - before]
print(sorted({m[0] for m in new if m[0] not in sys.stdlib_module_names}))
print(sorted('.'.join(m) for m in new if m[0] == 'torch'))
print(sorted({m[1] for m in new if m[0] == 'implicit_attention' and len(m) > 1}))
"""
    libraries, of_torch, parts = (ast.literal_eval(line) for line in fresh(code).splitlines())
    assert of_torch == []
    assert set(libraries) - {"numpy"} == {"implicit_attention", "jaxtyping"}  # jaxtyping loads numpy.typing
    # The operations, which exported programs call by name; all else loads when it is asked for.
    assert {"kernels"} <= set(parts) <= {"kernels", "linear", "solution", "failure", *LEAVES}


def test_the_help_of_the_command_line_needs_no_torch():
    started = [sys.executable, "-m", "implicit_attention"], [str(Path(sys.executable).with_name("implicit-attention"))]
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    for command in started:
        for words, said in ((["--help"], "magnetize"), (["--version"], "0.1.0"), (["think", "--help"], "--speed")):
            found = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, check=True)
            assert said in found.stdout
            loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in found.stderr.splitlines()}
            assert "typer" in loaded
            assert not loaded & {"torch", "numpy", "matplotlib"}


def test_torchdeq_knows_our_solvers_once_they_are_registered_and_not_before():
    look = "from torchdeq.solver import _solvers; print('implicit_anderson' in _solvers)"
    assert fresh(f"import torchdeq, implicit_attention.solvers; {look}") == "False"
    register = "from implicit_attention.solvers import register_with_torchdeq; register_with_torchdeq()"
    assert fresh(f"import implicit_attention; {register}; {look}") == "True"


def test_what_is_asked_for_is_loaded_and_kept():
    code = """
import sys, implicit_attention
assert 'implicit_attention.layers' not in sys.modules
assert 'tie' in dir(implicit_attention) and 'layers' in dir(implicit_attention)
first = implicit_attention.tie
assert first is implicit_attention.tie is implicit_attention.layers.tie and callable(first)
assert callable(implicit_attention.solve)
print('implicit_attention.spins' in sys.modules, implicit_attention.failure.__name__)
"""
    assert fresh(code) == "False implicit_attention.failure"
    with pytest.raises(AttributeError, match="module 'implicit_attention' has no attribute 'sovle'"):
        implicit_attention.sovle  # noqa: B018


def test_a_training_step_of_attention_imports_no_more():
    code = """
import sys, torch, implicit_attention
layer, x = implicit_attention.ImplicitAttention(8, 2), torch.randn(2, 5, 8)
before = set(sys.modules)
with torch.autograd.set_multithreading_enabled(False):
    layer(x).square().sum().backward()
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before} - {"implicit_attention"}))
"""
    assert "sympy" not in fresh(code)


def test_the_root_lists_its_public_names_where_they_are():
    everything = {name for names in implicit_attention._NAMES.values() for name in names}
    assert everything == set(implicit_attention.__all__)


@pytest.mark.slow
def test_an_exported_program_finds_its_operation_after_a_bare_import(tmp_path):
    saved = tmp_path / "layer.pt2"
    made = "torch.export.export(implicit_attention.ImplicitAttention(8, 2).eval(), (torch.zeros(1, 70, 8),))"
    fresh(f"import torch, implicit_attention; torch.export.save({made}, {str(saved)!r})")
    asked = f"torch.export.load({str(saved)!r}).module()(torch.zeros(1, 70, 8)).shape"
    assert fresh(f"import torch, implicit_attention; print(*{asked})") == "1 70 8"


def test_public_names_are_there_and_documented():
    for name in implicit_attention.__all__:
        assert getattr(implicit_attention, name).__doc__, name


if __name__ == "__main__":
    print(drawing())
