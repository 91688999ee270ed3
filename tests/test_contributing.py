"""CONTRIBUTING.md is followed to the letter in a copy of the package, where nothing else is touched."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def blocks(heading):
    """The blocks of code in a section of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    found = re.findall(r"^( *)```\w*\n(.*?)^\1```$", section, re.MULTILINE | re.DOTALL)
    return ["".join(line.removeprefix(indent) for line in block.splitlines(True)) for indent, block in found]


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
        assert ran.returncode == 0, ran.stderr
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
