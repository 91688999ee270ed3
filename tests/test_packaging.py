"""The sdist and the wheels: what they hold, whom they serve, and that an installed one works without the checkout."""

import functools
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from implicit_attention.kernels.native import library

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "implicit_attention"
#: A command that works only where the files that the package ships are found, and its last words.
COMMAND, SAYS = ("demo",), r"index.html, to open in a browser"
__version__ = importlib.metadata.version("implicit_attention")
SETS = library.SETS.get(platform.machine(), ())
COMPILED = {f"implicit_attention/kernels/native/{isa}.library" for isa in SETS}
SOURCES = (".h", ".cpp")
# Nor may a file of the checkout answer, or another compiler.
HIDDEN = {"PYTHONPATH", "MYPYPATH", library.VARIABLE}
BARE = {name: value for name, value in os.environ.items() if name not in HIDDEN}
#: What is installed says of itself, as JSON. The solve is warned of where torch answers.
PROGRAM = """
import importlib.metadata, json, warnings, torch, implicit_attention
from implicit_attention.kernels import hopfield_solve, native_status
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    found = hopfield_solve(torch.ones(2, 4), torch.eye(4), beta=0.5, anchor=0.5)
status = native_status()
said = {
    "file": implicit_attention.__file__,
    "versions": [implicit_attention.__version__, importlib.metadata.version("implicit_attention")],
    "isa": status.isa,
    "reason": status.reason,
    "solved": found.status.tolist(),
    "told": [str(each.message) for each in told],
}
print(json.dumps(said))
"""
TYPED = "from implicit_attention import equilibrium_attention\nreveal_type(equilibrium_attention)\n"
# Torch is read for seconds, and its types are not asked for.
MYPY = "[mypy]\nstrict = true\n[mypy-torch.*]\nfollow_imports = skip\nignore_missing_imports = true\n"


def run(*command, cwd, **variables):
    """Prints of a program that must succeed, without the checkout in its path."""
    environment = BARE | {"COLUMNS": "120", "OMP_NUM_THREADS": "1"} | variables
    found = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def build(folder, *options, **variables):
    """What `python -m build` makes of a copy of the checkout, in which libraries lie that were compiled for another."""
    clone, out = folder / "clone", folder / "out"
    ignored = (".git", "build", "dist", "site", "*.egg-info", ".*cache", "__pycache__", "*.library", ".venv")
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(*ignored))
    for path in COMPILED | {"implicit_attention/kernels/native/other.library"}:
        (clone / path).write_bytes(b"compiled in the checkout")
    # The setuptools of this environment, so that nothing is downloaded.
    run(sys.executable, "-m", "build", "--no-isolation", "-o", out, *options, clone, cwd=folder, **variables)
    run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *out.iterdir(), cwd=folder)
    return out


def shipped(*without):
    """The files of the package as the checkout has them."""
    listed = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in listed if path.suffix not in (".library", *without)}


def contents(wheel):
    """Names of the files in a wheel, but for those about it, its tags, and whether it says that it is pure."""
    with zipfile.ZipFile(wheel) as opened:
        about = f"implicit_attention-{__version__}.dist-info/"
        names = {name for name in opened.namelist() if not name.startswith(about)}
        assert f"{about}licenses/LICENSE" in opened.namelist()
        said = Parser().parsestr(opened.read(f"{about}WHEEL").decode())
    return names, said.get_all("Tag"), said["Root-Is-Purelib"] == "true"


def environment(folder):
    """Python of a new environment that sees the packages of this one, but for this package."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "environment", cwd=folder)
    (seen := folder / "packages").mkdir()
    # `import` takes the first of several, and so does this.
    for place in [Path(path) for path in sys.path if path.endswith("site-packages")]:
        for path in place.iterdir():
            if not re.match(r"(__editable__\W+)?implicit_attention|.*\.pth$", path.name):
                (seen / path.name).exists() or (seen / path.name).symlink_to(path)
    (site,) = (folder / "environment").glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{seen}\n")
    return folder / "environment" / "bin" / "python"


def installed(out, folder):
    """The new environment, after `pip install` by name from a folder, and what the package says there of itself."""
    python = environment(folder)
    install = ("install", "-q", "--no-index", "--find-links", out, "--only-binary", "implicit_attention")
    run(python, "-m", "pip", *install, "implicit_attention[cli]", cwd=folder)
    (elsewhere := folder / "elsewhere").mkdir()
    said = json.loads(run(python, "-c", PROGRAM, cwd=elsewhere))
    assert Path(said["file"]).is_relative_to(folder / "environment")
    assert said["versions"] == [__version__] * 2
    assert said["solved"] == [0, 0]
    return functools.partial(run, cwd=elsewhere), python, said


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ compiles the kernels")
@pytest.mark.skipif(not SETS, reason="there are no kernels for this processor")
def test_what_is_built_works_outside_of_the_checkout(tmp_path):
    out = build(tmp_path)
    with tarfile.open(next(out.glob("*.tar.gz"))) as archive:
        files = {each.name.partition("/")[2] for each in archive.getmembers() if each.isfile()}
    beside = {name for name in files if not name.startswith(("implicit_attention/", "implicit_attention.egg-info/"))}
    made = {"PKG-INFO", "setup.cfg"}
    about = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
    assert beside == made | about
    assert {name for name in files if name.startswith("implicit_attention/")} == shipped()

    # Made of that sdist. No version of Python stands in its tag, since the libraries link neither Python nor torch.
    (wheel,) = out.glob("*.whl")
    names, tags, pure = contents(wheel)
    assert names == shipped(*SOURCES) | COMPILED
    assert (tags, pure) == ([f"py3-none-{wheel.stem.rpartition('-')[2]}"], False)
    assert platform.machine() in tags[0]

    work, python, said = installed(out, tmp_path)
    assert (said["isa"] in SETS, said["told"]) == (True, []), said
    command = python.with_name("implicit-attention")
    assert "think" in work(command, "--help")
    assert re.search(SAYS, work(command, *COMMAND))
    (tmp_path / "elsewhere" / "program.py").write_text(TYPED)
    (tmp_path / "elsewhere" / "mypy.ini").write_text(MYPY)
    types = work(sys.executable, "-m", "mypy", "--python-executable", python, "program.py")
    assert "Revealed type is" in types, types
    assert "implicit_attention.solution.Solution" in types, types


@pytest.mark.slow
def test_without_a_compiler_a_wheel_serves_all_platforms(tmp_path):
    out = build(tmp_path, "--wheel", CC="false", CXX="false")
    (wheel,) = out.iterdir()
    assert wheel.name == f"implicit_attention-{__version__}-py3-none-any.whl"
    assert contents(wheel) == (shipped(*SOURCES), ["py3-none-any"], True)
    said = installed(out, tmp_path)[2]
    assert said["isa"] is None
    assert said["reason"] in said["told"][0]
    if SETS:
        assert "was not compiled when the package was installed; install the package again, with g++" in said["reason"]


@pytest.mark.skipif(not SETS or sys.platform != "linux", reason="there are no kernels for this system")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump is installed")
@pytest.mark.parametrize("isa", SETS)
def test_libraries_ask_for_no_newer_system_than_torch_does(isa):
    """Neither Python nor torch is linked, and glibc may be 2.17; torch asks for 2.28."""
    path = library.FOLDER / f"{isa}.library"
    if not path.exists():
        pytest.skip(f"{isa} was not compiled")
    printed = subprocess.run(["objdump", "-p", str(path)], capture_output=True, text=True, check=True).stdout
    linked = {name.partition(".so")[0] for name in re.findall(r"NEEDED\s+(\S+)", printed)}
    assert linked <= {"libstdc++", "libm", "libc", "libgcc_s", "ld-linux-x86-64", "ld-linux-aarch64"}
    versions = [tuple(map(int, found)) for found in re.findall(r"GLIBC_(\d+)\.(\d+)", printed)]
    assert max(versions) <= (2, 17), printed
