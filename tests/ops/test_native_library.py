"""Which native library answers, what is told where none does, and that the install never depends on one."""

import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from implicit_attention import Status
from implicit_attention.errors import KernelWarning
from implicit_attention.ops import NativeStatus, hopfield_solve, native_status, rule
from implicit_attention.ops.native import library
from implicit_attention.ops.tiled import adjoint as tiled_adjoint

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(library.__file__).parent
X86 = platform.machine() in ("x86_64", "AMD64")
needs_library = pytest.mark.skipif(native_status().isa is None, reason=native_status().reason)
on_x86 = pytest.mark.skipif(not X86, reason="names the sets of x86-64")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """The choice is made anew, and again after the test."""
    monkeypatch.delenv(library.VARIABLE, raising=False)
    caches = (library._found, library.warn_once)
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


@needs_library
def test_the_best_set_of_the_processor_answers_and_a_forced_one(monkeypatch):
    best = native_status()
    assert best.isa in library.SETS[platform.machine()]
    assert best.reason == ""
    assert str(best).startswith(f"native operations: {best.isa}, ")
    for isa in library.SETS[platform.machine()]:
        if library._loaded(isa)[0] is None:
            continue
        library._found.cache_clear()
        monkeypatch.setenv(library.VARIABLE, isa)
        assert native_status().isa == isa
        assert library.library().handle.ia_isa is not None


def test_off_uses_none_and_says_nothing(monkeypatch):
    monkeypatch.setenv(library.VARIABLE, "off")
    assert native_status() == NativeStatus(None, "one thread", "they are switched off; unset IMPLICIT_ATTENTION_NATIVE")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solve_once()


@pytest.mark.parametrize("value", ["sse2", "AVX2", "1"])
def test_an_unknown_value_is_told(value, monkeypatch):
    monkeypatch.setenv(library.VARIABLE, value)
    refused(f"must be auto, off, avx2, avx512, neon, got '{value}'")


@on_x86
def test_a_set_of_other_processors_was_not_compiled(monkeypatch):
    monkeypatch.setenv(library.VARIABLE, "neon")
    refused("neon was not compiled when the package was installed; install the package again")


def test_other_processors_have_none(monkeypatch):
    monkeypatch.setattr(library.platform, "machine", lambda: "riscv64")
    refused("there are none for 'riscv64'; use an x86-64 or ARM processor")


def test_without_a_compiled_library(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    refused("was not compiled when the package was installed; install the package again, with g\\+\\+ or clang at hand")


@needs_library
@pytest.mark.parametrize("part", [0.0, 0.0001, 0.5, 0.99])
def test_a_half_written_library(part, monkeypatch, tmp_path):
    for isa in library.SETS[platform.machine()]:
        whole = (SOURCE / f"{isa}.library").read_bytes()
        (tmp_path / f"{isa}.library").write_bytes(whole[: int(part * len(whole))])
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    refused("is not whole; install the package again")


def test_a_file_that_is_no_library(monkeypatch, tmp_path):
    for isa in library.SETS[platform.machine()]:
        (tmp_path / f"{isa}.library").write_bytes(bytes(100))
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    refused("cannot be loaded .*; install the package again")


@needs_library
def test_a_library_of_another_interface(monkeypatch):
    monkeypatch.setattr(library, "ABI", library.ABI + 1)
    refused(f"is of interface {library.ABI - 1}, the package of {library.ABI}; install the package again")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler makes a library")
def test_a_processor_without_the_set(monkeypatch, tmp_path):
    """A library that says so of itself, as the compiled ones do by asking the processor."""
    source = tmp_path / "other.c"
    source.write_text(f"int ia_abi(void) {{ return {library.ABI}; }} int ia_supported(void) {{ return 0; }}")
    for isa in library.SETS[platform.machine()]:
        target = str(tmp_path / f"{isa}.library")
        subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", target], check=True)
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    refused("this processor has no .*; unset IMPLICIT_ATTENTION_NATIVE, or use another processor")


@needs_library
def test_without_torchs_loop_one_thread_works(monkeypatch):
    monkeypatch.setattr(library, "_parallel_for", lambda: 0)
    assert "one thread (torch " in native_status().threads
    assert "2.10 has" in native_status().threads
    query, keys = torch.randn(64, 64, 16), torch.randn(64, 64, 16)
    found = hopfield_solve(query, keys, beta=0.2, anchor=0.5)
    library._found.cache_clear()
    monkeypatch.undo()
    assert torch.equal(hopfield_solve(query, keys, beta=0.2, anchor=0.5).state, found.state)


# What stands twice, in C++ and in Python.


def constants(*names):
    """The numbers that the headers give to names."""
    text = " ".join((SOURCE / name).read_text() for name in names)
    return {name: float(value) for name, value in re.findall(r"\b([A-Z_]+) = (-?[\d.]+)\b", text)}


def test_codes_and_constants_are_those_of_the_rule():
    found = constants("rule.h", "kernels.cpp", "adjoint.h")
    for status in Status:
        if status.name in found:
            assert found[status.name] == status
    assert {"CONVERGED", "EXPLICIT", "BUDGET", "MAX_STEPS", "STALLED", "DIVERGED", "NONFINITE"} <= set(found)
    for name in ("DESCENT", "ENERGY_SLACK", "STRETCH", "SLOPE", "LONGEST"):
        assert found[name] == getattr(rule, name)
    for name in ("NOISE", "SLACK"):
        assert found[name] == getattr(tiled_adjoint, name)
    assert found["ABI"] == library.ABI


# The install.


def built(folder, **variables):
    """What building the libraries of a copy of the sources prints, and the libraries."""
    package = folder / "implicit_attention" / "ops" / "native"
    package.mkdir(parents=True)
    for path in (*SOURCE.glob("*.h"), *SOURCE.glob("*.cpp")):
        shutil.copy(path, package)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    (folder / "implicit_attention" / "__init__.py").touch()
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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ compiles the kernels")
def test_a_compiler_makes_the_libraries_of_the_processor(tmp_path):
    found, libraries = built(tmp_path)
    assert found.returncode == 0, found.stderr
    assert libraries == sorted(library.SETS[platform.machine()])


CROSS = [["aarch64-linux-gnu-g++"], ["clang++", "--target=aarch64-linux-gnu"]]


def test_neon_compiles_where_a_cross_compiler_is_at_hand(tmp_path):
    program = tmp_path / "program.cpp"
    program.write_text("#include <cstring>\n#include <arm_neon.h>\n")
    for command in CROSS:
        if shutil.which(command[0]) is None:
            continue
        probe = subprocess.run([*command, "-fsyntax-only", str(program)], capture_output=True)
        if probe.returncode == 0:
            break
    else:
        pytest.skip("no cross-compiler for aarch64 is installed")
    flags = ["-O1", "-std=c++17", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-fPIC", "-c"]
    target = str(tmp_path / "neon.o")
    subprocess.run([*command, *flags, '-DIA_ISA="neon"', str(SOURCE / "kernels.cpp"), "-o", target], check=True)


def test_what_nobody_ran_is_called_unverified():
    assert "neon, unverified" in str(NativeStatus("neon", "torch's threads", ""))
    assert "unverified" not in str(NativeStatus("avx2", "torch's threads", ""))


@pytest.mark.slow
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
