"""Which native library answers, what is told where none does, and that the install never depends on one."""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import native_rule
import pytest
import torch

from implicit_attention import Status, UnsupportedImplementation
from implicit_attention.failure import KernelWarning
from implicit_attention.kernels import NativeStatus, hopfield_solve, native_status
from implicit_attention.kernels.native import library

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(library.__file__).parent
#: As setup.py defines them.
X86 = platform.machine() == "x86_64"
COMPILER = next(filter(shutil.which, ("c++", "g++", "clang++")), None)
needs_library = pytest.mark.skipif(native_status().isa is None, reason=native_status().reason)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler is installed")
on_x86 = pytest.mark.skipif(not X86, reason="names the sets of x86-64")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """The choice is made anew, and again after the test."""
    monkeypatch.delenv(library.VARIABLE, raising=False)
    caches = (library.found, library.warn_once)
    for cache in caches:
        cache.cache_clear()
    yield
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


def solve_once():
    return hopfield_solve(torch.ones(2, 4), torch.eye(4), beta=0.5, anchor=0.5)


def refused(reason):
    """What is told, once, of a solve that torch answers."""
    status = native_status()
    assert (status.isa, status.threads) == (None, "one thread")
    assert re.search(reason, status.reason), status.reason
    assert re.search(reason, str(status))
    assert str(Path.home()) not in str(status)
    assert str(ROOT) not in str(status)
    with pytest.warns(KernelWarning, match=reason) as told:
        found = solve_once()
    assert len(told) == 1
    assert "IMPLICIT_ATTENTION_NATIVE=off silences this" in str(told[0].message)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solve_once()
    assert (found.status == Status.CONVERGED).all()
    assert status.reason.partition("; ")[2]
    with pytest.raises(UnsupportedImplementation, match=re.escape(f"`impl='native'`: {status.reason}")):
        hopfield_solve(torch.ones(2, 4), torch.eye(4), beta=0.5, impl="native")


#: The operations of a library.
FUNCTIONS = [f"ia_{name}" for name in library.ARGUMENTS]


def stand_in(folder, isa, *, abi=library.ABI, supported=1, without=None):
    """A library of functions that return a number, but for one that it lacks."""
    returned = {"ia_abi": abi, "ia_supported": supported, **dict.fromkeys(FUNCTIONS, 0)}
    lines = [f'extern "C" int {name}() {{ return {number}; }}' for name, number in returned.items() if name != without]
    source = folder / f"{isa}.cpp"
    source.write_text("\n".join(lines))
    path = folder / f"{isa}.library"
    subprocess.run([COMPILER, "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    signed(path, path.read_bytes())


def signed(path, data):
    """Writes a library as setup.py does."""
    path.write_bytes(data + (hashlib.sha256(data).digest() if data[:4] == b"\x7fELF" else b""))


@pytest.fixture
def stand_ins(monkeypatch, tmp_path):
    """An empty folder for libraries, on a processor of the family x86-64."""
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    return tmp_path


@pytest.mark.skipif(COMPILER is None or platform.machine() not in library.SETS, reason="nothing can be compiled here")
def test_where_there_is_a_compiler_there_is_a_library():
    assert native_status().isa is not None, str(native_status())


@needs_compiler
def test_the_faster_of_two_sets_answers(stand_ins, monkeypatch):
    for isa in ("avx2", "avx512"):
        stand_in(stand_ins, isa)
    assert (native_status().isa, native_status().reason) == ("avx512", "")
    library.found.cache_clear()
    monkeypatch.setenv(library.VARIABLE, "avx2")
    assert (native_status().isa, native_status().reason) == ("avx2", "")


@needs_compiler
def test_it_is_told_why_the_faster_set_does_not_answer(stand_ins):
    stand_in(stand_ins, "avx2")
    stand_in(stand_ins, "avx512", supported=0)
    assert (native_status().isa, library.unavailable()) == ("avx2", None)
    assert str(native_status()) == f"native operations: avx2, {native_status().threads}; this processor has no avx512"
    library.found.cache_clear()
    # A new file: the process still uses the other one.
    (stand_ins / "avx512.library").unlink()
    (stand_ins / "avx512.library").write_bytes((stand_ins / "avx2.library").read_bytes()[:5000])
    assert "; the compiled library for avx512 is damaged; install" in str(native_status())


@needs_compiler
@pytest.mark.parametrize("without", ["ia_abi", "ia_supported", *FUNCTIONS])
def test_a_library_that_lacks_a_function(stand_ins, without):
    stand_in(stand_ins, "avx2", without=without)
    refused(f"avx2 cannot be loaded .*{without}.*; install the package again")


@needs_compiler
@pytest.mark.parametrize(
    ("asked", "supported", "reason"),
    [
        ("avx512", ["avx2"], "this processor has no avx512; unset IMPLICIT_ATTENTION_NATIVE"),
        ("auto", [], "this processor has no avx2; use another processor"),
    ],
)
def test_a_processor_without_a_set(asked, supported, reason, stand_ins, monkeypatch):
    for isa in ("avx2", "avx512"):
        stand_in(stand_ins, isa, supported=int(isa in supported))
    monkeypatch.setenv(library.VARIABLE, asked)
    refused(reason)


@pytest.mark.parametrize(
    ("owner", "name", "value", "reason"),
    [
        (library.sys, "platform", "win32", "they are written for GCC and clang and not built on Windows; use Linux"),
        (library.platform, "machine", lambda: "riscv64", "none for processors of the family riscv64; use x86-64 or"),
        (library, "FOLDER", Path("nowhere"), "was not compiled when the package was installed; .* with g\\+\\+ or"),
        (library, "ABI", library.ABI + 1, f"interface {library.ABI}, the package of {library.ABI + 1}; install the"),
    ],
    ids=["Windows", "another processor", "not compiled", "another interface"],
)
def test_a_machine_without_a_library(owner, name, value, reason, monkeypatch):
    if name == "ABI" and native_status().isa is None:
        pytest.skip(native_status().reason)
    library.found.cache_clear()
    monkeypatch.setattr(owner, name, value)
    refused(reason)


@needs_library
def test_the_best_set_of_the_processor_answers_and_a_forced_one(monkeypatch):
    best = native_status()
    assert best.isa in library.SETS[platform.machine()]
    # Where the processor lacks the fastest set that is all that is told.
    assert best.reason in ("", "this processor has no avx512")
    assert str(best).startswith(f"native operations: {best.isa}, ")
    for isa in library.SETS[platform.machine()]:
        if library._loaded(isa)[0] is None:
            continue
        library.found.cache_clear()
        monkeypatch.setenv(library.VARIABLE, isa)
        assert native_status().isa == isa
        named = library.found()[0].handle.ia_isa
        named.restype = ctypes.c_char_p
        assert named() == isa.encode()


def test_off_uses_none_and_says_nothing(monkeypatch):
    monkeypatch.setenv(library.VARIABLE, "off")
    assert native_status() == NativeStatus(None, "one thread", "they are switched off; unset IMPLICIT_ATTENTION_NATIVE")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solve_once()


@pytest.mark.parametrize("value", ["sse2", "AVX2", "1", pytest.param("neon", marks=on_x86)])
def test_an_unknown_value_is_told(value, monkeypatch):
    monkeypatch.setenv(library.VARIABLE, value)
    family = "neon is not of the processor's family, x86_64; unset IMPLICIT_ATTENTION_NATIVE"
    refused(family if value == "neon" else f"must be auto, off, avx2, avx512, neon, got '{value}'")


def _cut(whole, part):
    return whole[: int(part * len(whole))]


def _flipped(whole, part):
    data = bytearray(whole)
    data[int(part * len(data))] ^= 16
    return bytes(data)


@needs_library
@pytest.mark.parametrize("damage", [_cut, _flipped])
@pytest.mark.parametrize("part", [0.0002, 0.1, 0.5, 0.99, 0.99999])
def test_a_damaged_library(damage, part, monkeypatch, tmp_path):
    for isa in library.SETS[platform.machine()]:
        path = tmp_path / f"{isa}.library"
        path.write_bytes(damage((SOURCE / f"{isa}.library").read_bytes(), part))
        # Asked first, since loading such a file can end the process.
        assert not library._is_whole(path)
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    refused("is damaged; install the package again")


@pytest.mark.parametrize("size", [0, 100])
def test_a_file_that_is_no_library(size, monkeypatch, tmp_path):
    for isa in library.SETS[platform.machine()]:
        (tmp_path / f"{isa}.library").write_bytes(bytes(size))
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    refused("cannot be loaded .*; install the package again")


@needs_library
def test_without_torchs_loop_one_thread_works(monkeypatch, tmp_path):
    query, keys = torch.randn(64, 64, 16), torch.randn(64, 64, 16)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
        assert library.found()[0].parallel_for == 0
        assert "one thread (torch " in native_status().threads
        assert "2.10 has" in native_status().threads
        found = hopfield_solve(query, keys, beta=0.2, anchor=0.5)
    library.found.cache_clear()
    assert torch.equal(hopfield_solve(query, keys, beta=0.2, anchor=0.5).state, found.state)


# The rule of accelerated steps, which C++ has of Python.


def test_the_header_of_the_rule_is_written_from_it():
    assert native_rule.HEADER.read_text() == native_rule.header(native_rule.SOURCE.read_text())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("lang.sqrt", "lang.exp"),
        ("lang.abs(energy)", "energy.abs()"),
        ("tries & ~downward", "tries and not downward"),
        ("tries & ~downward", "tries & cut"),
        ("gamma * gamma * span", "gamma**2 * span"),
        ("square - gamma", "-square - gamma"),
        ("trapezoid >= required", "required <= trapezoid < 1.0"),
        ("DESCENT *", "0.25j *"),
        ("DESCENT *", "UNKNOWN *"),
        ("DESCENT = 0.25", "DESCENT = 1 / 4"),
        ("eps: float", "eps: int"),
        ("part: float", "part: float = 0.5"),
        ("    slope = square", "    if True:\n        gamma = square\n    slope = square"),
        ("    slope = square", "    gamma = square"),
        ("    slope = square", "    slope += square"),
        ("shortened(residual, reach, LONGEST)", "shortened(residual, reach)"),
        ("shortened(residual, reach, LONGEST)", "shortened(residual, reach, most=LONGEST)"),
        ("return accepted, tries, by_r, by_df", "return accepted, tries, by_r"),
        ("return accepted, tries, by_r, by_df", "return accepted, tries, tries, by_df"),
        ("def descends", "@lang.no_grad\ndef descends"),
        ("def descends", "class Rule: ...\n\n\ndef descends"),
    ],
)
def test_a_rule_that_is_not_of_what_c_plus_plus_is_made_of_is_refused(old, new):
    source = native_rule.SOURCE.read_text()
    assert old in source
    with pytest.raises(SyntaxError, match=r"line \d+ of the rule is not of what C\+\+ is made of: "):
        native_rule.header(source.replace(old, new))


def having(pattern):
    """Files of the package that have this."""
    package, found = native_rule.PACKAGE, re.compile(pattern, re.MULTILINE)
    files = [path for path in package.rglob("*") if path.suffix in (".py", ".h", ".cpp")]
    return {path.relative_to(package).as_posix() for path in files if found.search(path.read_text())}


#: Torch's loop (Newton's method has one number of it), C++, and Triton.
USERS = {"solvers/safeguard.py", "solvers/newton.py", "kernels/native/solve.h", "kernels/triton/solve.py"}


def test_the_rule_is_written_once_and_has_three_users():
    written = {"kernels/rule.py", "kernels/native/rule.h"}
    assert having(r"^from .* import .*\brule\b|\bdecide<T>\(") == USERS
    assert having(r"(?<!rule\.)\b(DESCENT|ENERGY_SLACK|STRETCH|SLOPE)\b") == written


# The install.


def built(folder, **variables):
    """What building the libraries of a copy of the sources prints, and the libraries."""
    package = folder / "implicit_attention" / "kernels" / "native"
    package.mkdir(parents=True)
    for path in (*SOURCE.glob("*.h"), *SOURCE.glob("*.cpp")):
        shutil.copy(path, package)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    (folder / "implicit_attention" / "__init__.py").touch()
    for isa in library.SETS.get(platform.machine(), ()):
        (package / f"{isa}.library").write_bytes(b"compiled of other sources")
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    found = subprocess.run(command, cwd=folder, env=os.environ | variables, capture_output=True, text=True)
    return found, sorted(path.stem for path in package.glob("*.library"))


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_a_broken_compiler_breaks_no_install(compiler, tmp_path):
    found, libraries = built(tmp_path, CC=compiler, CXX=compiler)
    assert found.returncode == 0, found.stderr
    assert libraries == []
    if library.SETS.get(platform.machine()):
        assert "failed" in found.stdout + found.stderr


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ compiles the kernels")
def test_a_compiler_makes_the_libraries_of_the_processor(tmp_path):
    found, libraries = built(tmp_path)
    assert found.returncode == 0, found.stderr
    assert libraries == sorted(library.SETS[platform.machine()])


def test_what_nobody_ran_is_called_unverified():
    assert "neon, unverified" in str(NativeStatus("neon", "torch's threads", ""))
    assert "unverified" not in str(NativeStatus("avx2", "torch's threads", ""))


@pytest.mark.nightly
def test_an_editable_install_is_seen_by_type_checkers(tmp_path):
    """mypy, outside of the checkout, knows the types of the installed package."""
    clone = tmp_path / "clone"
    copied = shutil.ignore_patterns(".git", "build", "*.egg-info", ".*cache", "*.library", ".venv")
    shutil.copytree(ROOT, clone, ignore=copied)
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", str(environment)], check=True)
    python = str(environment / "bin" / "python")
    # The packages of the environment that runs the tests, itself perhaps a virtual one.
    paths = [path for path in sys.path if path.endswith("site-packages")]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CXX": "false", "CC": "false"}
    install = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", str(clone)]
    subprocess.run(install, check=True, env=variables, cwd=tmp_path)
    program = tmp_path / "program.py"
    program.write_text("from implicit_attention import equilibrium_attention\nreveal_type(equilibrium_attention)\n")
    finders = list(environment.glob("lib/python*/site-packages/__editable__*.pth"))
    assert [path.read_text().strip() for path in finders] == [str(clone)]
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"MYPYPATH": ""}
    command = [sys.executable, "-m", "mypy", "--python-executable", python, "--follow-imports=silent", "program.py"]
    found = subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, text=True)
    # Torch is not in that environment; the types of this package are.
    assert "Revealed type is" in found.stdout, found.stdout
    assert "implicit_attention.solution.Solution" in found.stdout, found.stdout
