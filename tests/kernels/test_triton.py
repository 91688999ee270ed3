"""The Triton kernels, case by case: in Triton's interpreter on the CPU, or compiled and larger on a CUDA device.

The cases run in processes of their own, because Triton decides at its import whether it interprets.
"""

import ast
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import half_emulation
import pytest
import torch
import triton_cases

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import compiled_kernels  # noqa: E402
from implicit_attention import UnsupportedImplementation  # noqa: E402
from implicit_attention.kernels import hopfield_solve  # noqa: E402

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
SCRIPT = Path(triton_cases.__file__)
LONGEST = 600
#: The interpreter multiplies by numpy. By the instructions of this generation a row of a product has the same bits
#: wherever it stands in its tile, as on a card.
INTERPRETED = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Sandybridge"}
#: Kernels whose loops need more registers than there are, for the products of three parts that float32 takes.
FULL_OF_REGISTERS = ("float32", 128)


CASES = {"cpu": "::test_kernel_in_the_interpreter", "cuda": "::test_kernel_compiled"}


@pytest.fixture(scope="session")
def outcome(request, tmp_path_factory, worker_id):
    """(device, case) -> what is wrong with it; what is asked of a part runs once, whichever worker asks first."""
    shared = tmp_path_factory.getbasetemp() if worker_id == "master" else tmp_path_factory.getbasetemp().parent

    def run(device, case):
        part = triton_cases.part_of(case)
        results = shared / f"triton_{device}_{part}.json"
        try:
            (shared / f"triton_{device}_{part}").mkdir()
        except FileExistsError:
            deadline = time.monotonic() + LONGEST
            while not results.exists() and time.monotonic() < deadline:
                time.sleep(0.1)
        else:
            unfinished = results.with_suffix(".part")
            environment = {**os.environ, **INTERPRETED} if device == "cpu" else {**os.environ, "TRITON_INTERPRET": "0"}
            environment["OMP_NUM_THREADS"] = "1"
            items = (item for item in request.session.items if item.nodeid.partition("[")[0].endswith(CASES[device]))
            asked = dict.fromkeys(item.callspec.params["case"] for item in items)
            names = [name for name in asked if triton_cases.part_of(name) == part]
            command = [sys.executable, str(SCRIPT), str(unfinished), device, *names]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONGEST)
            if done.returncode:
                unfinished.write_text(json.dumps(dict.fromkeys(names, done.stderr[-2000:])))
            unfinished.rename(results)
        return json.loads(results.read_text())[case]

    return run


@pytest.mark.cases(4)
@pytest.mark.by_name(
    slow=r"\[(trust|half_(?!floor|solve|is_emulated)|.*_shape|.*_mask_(?!per_query|bias_padding))"
    r"|\[(.*_tiles_(?!documents)|adjoint_of_every_scale|adjoint_scale_(fp16_small|bf16|fp32_tiny))"
    r"|\[solve_listed_(shape|causal|bf16|mask_of_keys|in_any)",
    nightly=r"\[(.*_shape_pair|half_random_.*_rest|solve_mask_laid_out_(?!three|keys_of_heads))"
    r"|\[solve_listed_(fp16|at_the|budget|bias|mask_of_(pairs|keys_causal)|in_any_order_(?!fp32))"
    r"|\[trust_(broken_(product|begin|conjugate|end)_un[lc]|that_every_output_is_compared_(?!evaluate|end|keys))",
)
@pytest.mark.parametrize("case", triton_cases.CASES)
def test_kernel_in_the_interpreter(case, outcome):
    wrong = outcome("cpu", case)
    assert not wrong, wrong


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", triton_cases.CASES)
def test_kernel_compiled(case, outcome):
    wrong = outcome("cuda", case)
    assert not wrong, wrong


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """The rows that the compiler makes of these kernels for this GPU."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return lambda arch, *names: compiled_kernels.rows_for(arch, map(compiled_kernels.Case.of, names))


@pytest.mark.slow
def test_kernels_compile_for_hopper(rows):
    found = rows("sm_90a", *(f"{kernel}-bfloat16-64-plain" for kernel in compiled_kernels.KERNELS))
    assert [row["kernel"] for row in found] == list(compiled_kernels.KERNELS)
    for row in found:
        assert row["loop"]["tensor"] > 0, f"{row['name']} does not use the tensor cores"
        assert row["loop"]["exp2"] > 0
        assert row["loop"]["loads"] > 0, f"{row['name']} does not read keys in parts of 16 bytes"
        assert row["loop"]["spills"] == 0, f"{row['name']} has too few registers in its loop over the keys"
        assert 0 < row["registers"] <= 255
        assert row["programs"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize("kernel", compiled_kernels.KERNELS)
def test_no_loop_over_keys_goes_to_local_memory(kernel, rows):
    dtypes = ("bfloat16",) if "fine" in kernel else ("bfloat16", "float32")
    for row in rows("sm_90a", *(f"{kernel}-{dtype}-{dim}-plain" for dtype in dtypes for dim in (64, 128))):
        if (row["dtype"], row["dim"]) != FULL_OF_REGISTERS:
            assert row["loop"]["spills"] == 0, row


def test_instructions_are_counted_in_the_innermost_loop_with_weights():
    lines = ["MOV R1, R2", "LDL R3, [R1]", "HGMMA.64x64x16 R4", "@!P2 LDGSTS.E [R1]", "MUFU.EX2 R3", "@P0 BRA 0x0010"]
    lines.append("STL [R1], R3")
    text = "".join(f"        /*{16 * at:04x}*/  {code} ;" for at, code in enumerate([*lines, "BRA 0x0000"]))
    found = compiled_kernels.counted(compiled_kernels.loops_of(text))
    assert found == {"instructions": 5, "tensor": 1, "exp2": 1, "loads": 1, "barriers": 0, "spills": 1}


@pytest.mark.cases(6)
@pytest.mark.by_name(nightly=r"2\^16 (?!float16)", slow=r"2\^16 float16")
@pytest.mark.parametrize("setting", half_emulation.SETTINGS, ids=str)
def test_half_precision_is_as_accurate_as_is_promised(setting):
    assert not half_emulation.accuracy(setting).broken


@pytest.mark.parametrize("dtype", half_emulation.DTYPES, ids=str)
def test_coarse_products_alone_would_not_tell_the_residual(dtype):
    problem = half_emulation.Setting("Gaussian", 2.0, 0.0, 2**9, dtype).problem()
    dense = half_emulation.Dense.of(problem)
    z, half = problem.query.float(), half_emulation.Half(dense, dtype)
    exact = dense.attend(z.double())[0]
    all_rows = torch.ones(z.shape[:-1], dtype=torch.bool)
    coarse, fine = (half_emulation.relative(half.attend(z, rows)[0], exact) for rows in (~all_rows, all_rows))
    assert 10 * half_emulation.FLOOR < coarse < 3e-4
    assert fine < half_emulation.FLOOR / 4


@pytest.mark.parametrize(
    ("count", "lost"), [(2**13, 1e-3), (2**16, 1e-2), pytest.param(2**18, 3e-2, marks=pytest.mark.slow)]
)
def test_gradients_of_many_keys_keep_their_digits(count, lost):
    """Weights of 1/M, in units of 16 lest they overflow, are subnormal numbers of float16; not in units of 2^-12."""
    problem = half_emulation.Setting("Gaussian", 1.0, 0.5, count, torch.float16, rows=4).problem()
    dense, z = half_emulation.Dense.of(problem), 0.1 * problem.query.float()
    u = torch.randn(z.shape, generator=torch.Generator().manual_seed(0))
    exact, _ = half_emulation.adjoint(dense, problem, z.double(), u.double())[1](u.double())
    there = z, *(t.float() for t in dense.attend(z.double())), u
    halves = (half_emulation.Half(dense, torch.float16, weights) for weights in (half_emulation.UNIT, 1 / 16))
    now, before = (half_emulation.relative(half.by_keys(*there), exact) for half in halves)
    assert now < 5e-4
    assert before > lost


KERNELS = {"solve": ("_step_kernel",), "adjoint": ("_conjugate_kernel", "_end_kernel")}


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, names in KERNELS.items() for name in names])
def test_kernels_that_read_and_write_one_place_have_a_barrier_between(file, name):
    text = (ROOT / "implicit_attention" / "kernels" / "triton" / f"{file}.py").read_text()
    defined = {each.name: each for each in ast.parse(text).body if isinstance(each, ast.FunctionDef)}
    kernels = {each for each, node in defined.items() if "kernel" in map(ast.unparse, node.decorator_list)}
    assert kernels == set(KERNELS[file])
    calls = [node for node in ast.walk(defined[name]) if isinstance(node, ast.Call)]
    lines = {"read": {}, "written": {}}
    for call in calls:
        called, given = ast.unparse(call.func), [ast.unparse(each).split(" + ")[0] for each in call.args]
        if called in ("tl.load", "read", "query_tile"):
            for pointer in ("left.status",) if called == "query_tile" else given[:1]:
                lines["read"].setdefault(pointer, []).append(call.lineno)
        elif called in ("tl.store", "write"):
            lines["written"].setdefault(given[0], []).append(call.lineno)
    barriers = [call.lineno for call in calls if ast.unparse(call.func) == "tl.debug_barrier"]
    both = lines["read"].keys() & lines["written"].keys()
    assert "left.status" in both
    for pointer in both:
        last, first = max(lines["read"][pointer]), min(lines["written"][pointer])
        assert any(last < barrier < first for barrier in barriers), pointer


def refused(*, dim=16, lead=(2,), keys_lead=None, dtype=torch.float32, **options):
    """Why the Triton kernels do not solve such a problem."""
    query, keys = (torch.zeros(*axes, 3, dim, dtype=dtype) for axes in (lead, lead if keys_lead is None else keys_lead))
    with pytest.raises(UnsupportedImplementation) as caught:
        hopfield_solve(query, keys, **{"beta": 1.0, **options}, impl="triton")
    return str(caught.value)


def test_what_is_unsupported_is_said(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "device 'cpu'; use a CUDA device or impl='auto'" in refused()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "head dimension of 129; use at most 128 with keys in torch.float32" in refused(dim=129)
    assert "head dimension of 257; use at most 256" in refused(dim=257, dtype=torch.float16)
    assert "float64 (field)" in refused(dtype=torch.float64)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "Triton is not installed" in refused()


@pytest.mark.slow
def test_asking_does_not_import_triton():
    code = "import sys, implicit_attention.kernels; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
