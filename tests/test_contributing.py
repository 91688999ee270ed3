"""CONTRIBUTING.md is followed to the letter in a copy of the package, where nothing else is touched."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

ROOT = Path(__file__).resolve().parents[1]


def blocks(heading):
    """The blocks of code in a section of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    fenced = re.findall(r"^( *)```\w*\n(.*?)^\1```$", section, re.MULTILINE | re.DOTALL)
    return ["".join(line.removeprefix(indent) for line in block.splitlines(True)) for indent, block in fenced]


class Copy:
    """A copy of the package in a folder, and Python that imports that copy."""

    def __init__(self, folder):
        self.folder, self.package = folder, folder / "implicit_attention"
        shutil.copytree(ROOT / "implicit_attention", self.package, ignore=shutil.ignore_patterns("__pycache__"))

    def write(self, path, text):
        """A new file."""
        assert not (self.package / path).exists(), path
        (self.package / path).write_text(text)

    def add_line(self, path, line, *, before):
        """One more line in a file, in front of a text that stands there once."""
        head, tail = (self.package / path).read_text().split(before)
        (self.package / path).write_text(f"{head}{line}{before}{tail}")

    def passes(self, test, *options):
        """Run the tests of a file: whether they pass."""
        (self.folder / "test_addition.py").write_text(test)
        return "passed" in self.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_addition.py", *options)

    def python(self, *arguments):
        """What `python ...` prints in the folder."""
        environment = os.environ | {"PYTHONPATH": str(self.folder), "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    def commands(self, *lines):
        """What `implicit-attention ...` prints for each of the lines, one after the other in one process."""
        return self.python("-c", COMMANDS, *lines).split("\0")[:-1]


# Runs a command for each argument, and prints an end after each.
COMMANDS = """
import runpy, sys
for line in sys.argv[1:]:
    sys.argv = ["implicit-attention", *line.split()]
    try:
        runpy.run_module("implicit_attention", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise
    print(end="\\0", flush=True)
"""


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path)


def test_a_command_is_one_file_and_one_line(copy):
    file, line = blocks("A new command")
    copy.write("cli/draw.py", file)
    copy.add_line("cli/commands.py", line, before=")\n#: Groups of commands")
    commands, told, said = copy.commands("--help", "draw --help", "draw --count 7 --seed 1")
    assert "Draw random numbers, and tell their mean." in commands
    for word in ("--count", "Number of numbers.", "--seed", "Seed of the numbers.", "--out"):
        assert word in told
    written = json.loads((copy.folder / "draw" / "draw.json").read_text())
    assert written["command"] == "draw"
    assert len(written["numbers"]) == 7
    assert f"mean of 7 numbers: {sum(written['numbers']) / 7:.3f}" in said
    assert "draw.json written to draw after" in said


@pytest.mark.slow
def test_a_potential_is_one_file_and_its_name(copy):
    file, line, contract = blocks("A new potential")
    copy.write("potentials/ridge.py", file)
    copy.add_line("potentials/__init__.py", line, before='    "tilted": ("Tilted",),\n')
    answers = """
def test_a_solve_has_its_gradient():
    from implicit_attention import AnchoredEnergy, solve

    def answer(width, field):
        return solve(AnchoredEnergy(Ridge(width), field, 0.8), field).value

    inputs = [torch.linspace(1, 2, 3).double().requires_grad_(), torch.randn(2, 3).double().requires_grad_()]
    z = answer(*inputs)
    torch.testing.assert_close(0.8 * (z - inputs[1]) + 0.2 * (z - Ridge(inputs[0]).mean(z)), 0 * z, rtol=0, atol=1e-4)
    assert all(bool(g.any()) for g in torch.autograd.grad(z.sum(), inputs))
"""
    assert copy.passes(contract + answers)


@pytest.mark.slow
def test_a_solver_is_one_file_and_its_name(copy):
    file, imported, name, contract = blocks("A new solver")
    copy.write("solvers/heavy_ball.py", file)
    copy.add_line("solvers/__init__.py", imported, before="from .loop import")
    copy.add_line("solvers/__init__.py", name, before='    "Iteration",\n')
    answers = """
def test_a_layer_is_solved_by_it():
    import torch

    from implicit_attention import ImplicitAttention

    x = torch.randn(1, 4, 8, requires_grad=True)
    answer, solution = ImplicitAttention(8, heads=2, solver=HeavyBall())(x, return_solution=True)
    answer.sum().backward()
    assert bool(solution.converged.all() and x.grad.any())
"""
    assert copy.passes(contract + answers)


@pytest.mark.slow
def test_an_approximation_of_spins_is_one_file_and_one_line(copy):
    file, line, contract = blocks("A new approximation of spins")
    copy.write("spins/weak_coupling.py", file)
    copy.add_line("spins/methods.py", line, before=")\n\n\ndef listed")
    copy.add_line("spins/__init__.py", "from .weak_coupling import WeakCoupling\n\n", before="__all__ = [")
    docs = copy.folder / "docs"
    (docs / "spin_systems").mkdir(parents=True)
    (docs / "reference").mkdir()
    for page in ("spin_systems.md", "spin_systems/methods.py", "reference/spin_methods.md"):
        shutil.copy(ROOT / "docs" / page, docs / page)
    copy.python("docs/spin_systems/methods.py")
    row = "| `WeakCoupling()` | yes | yes | no | yes | N <= 2,048 | (beta J)^2 |\n"
    assert row in (docs / "spin_systems.md").read_text()
    assert "::: implicit_attention.spins.WeakCoupling\n" in (docs / "reference" / "spin_methods.md").read_text()
    numpy.savez(copy.folder / "pair.npz", J=[[0, 0.1], [0.1, 0]], h=[0.3, 0], beta=1.0)
    options = ("--quick", "--methods", "weak,enumeration")
    assert "weak" in copy.python("-m", "implicit_attention", "magnetize", "pair.npz", *options)
    rows = json.loads((copy.folder / "magnetize" / "thermodynamics.json").read_text())["rows"]
    weak, exact = ({row["method"]: row for row in rows}[name] for name in ("weak", "enumeration"))
    assert weak["free_energy"] == pytest.approx(exact["free_energy"], abs=0.01)
    assert weak["distance"] < 0.01
    # The other tests of the contract take derivatives, of which the method has none of its own.
    assert copy.passes(contract, "-k", "slopes or masked or company or vmap or evidence")
