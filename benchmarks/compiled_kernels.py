"""What a compiler makes of the Triton kernels: registers, memory, and the instructions of their loops over the keys.

`python -m benchmarks kernels --compile sm_90a` needs no GPU. `python -m benchmarks.compiled_kernels ARCH CASE...`
prints the rows of these cases as JSON: Triton compiles for one GPU in a process.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .measure import apart
from .report import Table, document, write
from .targets import Row

#: The GPUs that the kernels are compiled for: capability, shared memory of a multiprocessor and of a program in bytes.
ARCHES = {
    "sm_80": (80, 164 * 1024, 163 * 1024),
    "sm_90a": (90, 228 * 1024, 227 * 1024),
    "sm_100a": (100, 228 * 1024, 227 * 1024),
}
#: The compilers whose runs the tables show: that of constraints.txt, and that of torch 2.11, which cards run.
TRITONS = ("3.9.0", "3.6.0")
#: Kernels with a loop over the keys, and the steps between two of those loops. Fine ones are of half precision.
KERNELS = {
    "evaluate": "_attend_kernel",
    "fine evaluate": "_attend_kernel",
    "product": "_attend_kernel",
    "fine product": "_attend_kernel",
    "keys": "_keys_kernel",
}
STEPS = {"step": "_step_kernel", "conjugate": "_conjugate_kernel"}
#: Operands of keys in bfloat16 and float16 are float16 both.
DIMS = {"bfloat16": (32, 64, 128, 256), "float32": (32, 64, 128)}
#: Of queries: all keys, those up to its own place, those that a mask allows.
KINDS = ("plain", "causal", "masked")
#: Registers and threads of a multiprocessor, and shared memory that every program takes beside its own.
REGISTERS, WARPS, RESERVED = 65536, 64, 1024
#: Instructions of a loop that are counted, by what their names begin with.
COUNTED = {
    "tensor": ("HGMMA", "HMMA", "UTCHMMA"),
    "exp2": ("MUFU.EX2",),
    "loads": ("LDGSTS", "UTMALDG"),
    "barriers": ("BAR", "WARPSYNC", "WARPGROUP.DEPBAR"),
    "spills": ("LDL", "STL"),
}
NOTES = (
    "A kernel in the tiles of a large problem, as the compiler of that Triton makes it; no GPU took part. `stack`: "
    "bytes per thread in local memory, and `spills`, how often a loop over the keys goes there: once per tile. "
    "Programs: of one multiprocessor, by registers, warps and shared memory. A step has queries and no loop. In half "
    "precision an evaluation has a coarse and a fine loop in one kernel, whose operands are float16 for both dtypes.",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel, the precision of its products, the head dimension, and how queries choose keys."""

    kernel: str
    dtype: str
    dim: int
    kind: str

    @property
    def name(self) -> str:
        return f"{self.kernel}-{self.dtype}-{self.dim}-{self.kind}"

    @classmethod
    def of(cls, name: str) -> Case:
        kernel, dtype, dim, kind = name.split("-")
        return cls(kernel, dtype, int(dim), kind)


CASES = (
    *(
        Case(kernel, dtype, dim, kind)
        for kernel, (dtype, dims) in itertools.product(KERNELS, DIMS.items())
        for dim, kind in itertools.product(dims, KINDS)
        if dtype != "float32" or not kernel.startswith("fine")
    ),
    # Steps are in float32 for all keys, and see neither keys nor masks.
    *(Case(step, "bfloat16", dim, "plain") for step, dim in itertools.product(STEPS, DIMS["bfloat16"])),
)


def rows_for(arch: str, cases: Iterable[Case], progress: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """The row of every case, compiled by precision and head dimension in a fresh process each, two at once."""
    cases = list(cases)
    groups: dict[tuple[str, int], list[str]] = {}
    for case in cases:
        groups.setdefault((case.dtype, case.dim), []).append(case.name)

    def compiling(names: list[str]) -> dict[str, Any]:
        return apart("benchmarks.compiled_kernels", arch, *names, variables={"TRITON_INTERPRET": "0"})

    rows: dict[str, Row] = {}
    with ThreadPoolExecutor(2) as pool:
        for names, found in zip(groups.values(), pool.map(compiling, groups.values()), strict=True):
            if "error" in found:
                raise RuntimeError(f"the kernels could not be compiled for {arch}: {found['error']}")
            for name in names:
                rows[name] = {"name": name, "metric": "COMPILED", **dataclasses.asdict(Case.of(name)), **found[name]}
                progress(rows[name])
    return [rows[case.name] for case in cases]


def told(row: Row) -> str:
    """The row in a few words."""
    return f"{row['registers']} registers, {row['stack']} bytes of stack"


def run(arch: str, out: Path, progress: Callable[[Row], None]) -> tuple[dict[str, Any], Path]:
    """Compile every case for `arch` and write the rows into the folder."""
    from .environment import environment

    rows = rows_for(arch, CASES, progress)
    where = {**environment(), "arch": arch}
    options = {"metrics": ["COMPILED"], "repeats": 1, "settings": len(rows)}
    made = document(f"kernels_{arch}", rows, (), complete=True, quick=False, options=options, where=where)
    return made, write(made, out)


def tables(run: dict[str, Any]) -> list[Table]:
    header = [
        "kernel",
        "products",
        "D",
        "keys",
        "tile",
        "warps, stages",
        "registers",
        "stack",
        "shared, KiB",
        "programs",
    ]
    header += ["instructions", *COUNTED]
    lines = [
        [
            row["kernel"],
            row["dtype"] if row["loop"] else "-",
            str(row["dim"]),
            row["kind"] if row["loop"] else "-",
            f"{row['rows']} x {row['keys']}" if row["loop"] else str(row["rows"]),
            f"{row['warps']}, {row['stages']}",
            str(row["registers"]),
            str(row["stack"]),
            f"{row['shared'] / 1024:.0f}",
            str(row["programs"]),
            *(str(row["loop"].get(name, "-")) for name in ("instructions", *COUNTED)),
        ]
        for row in run["rows"]
    ]
    arch = run["environment"]["arch"]
    by = f"by Triton {run['environment']['libraries']['triton']}"
    return [
        Table(f"kernels for {arch}", f"COMPILED: kernels for {arch} {by}, and the loop over the keys:", header, lines)
    ]


# In the process that compiles.


class Card:
    """All that compiling asks of a driver."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0


def compiled(arch: str, cases: Iterable[Case]) -> dict[str, Row]:
    """What the compiler made of each case, by name."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from implicit_attention.kernels.triton import layout

    driver.set_active(Card(ARCHES[arch][0]))
    launch, made = JITFunction.run, {}

    def only_compile(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        made.setdefault(kernel.__name__, []).append(launch(kernel, *arguments, grid=grid, warmup=True, **options))

    JITFunction.run = only_compile
    # Nothing runs that could end, and no device is there to ask.
    layout.Left.next = lambda left: True  # type: ignore[method-assign, assignment]
    layout.is_earlier = lambda device: ARCHES[arch][0] < 90
    names, found = KERNELS | STEPS, {}
    for case in cases:
        made.clear()
        chosen = _call(case)
        # The last product of an adjoint solve is fine.
        kernels = made[names[case.kernel]]
        found[case.name] = chosen._asdict() | _measured(kernels[-1 if "fine" in case.kernel else 0], case, chosen, arch)
    return found


def _call(case: Case) -> Any:
    """Call the operation of the case; the tiles of its kernel."""
    from implicit_attention.kernels.problem import AdjointRule, Attention, FusedRule
    from implicit_attention.kernels.triton.adjoint import solve_adjoint
    from implicit_attention.kernels.triton.layout import step_tiles, tiles
    from implicit_attention.kernels.triton.solve import solve

    x = torch.zeros(2, 2, 1024, case.dim, dtype=getattr(torch, case.dtype))
    mask = torch.ones(2, 1, 1, 1024, dtype=torch.bool) if case.kind == "masked" else None
    problem = Attention.of(x, x, 1.0, 0.5, mask, first=0 if case.kind == "causal" else None)
    kernel = case.kernel.removeprefix("fine ")
    if kernel in ("evaluate", "step"):
        solve(problem, x, FusedRule(1e-3, 0.0, 1, 1))
    else:
        z = x.float()
        solve_adjoint(problem, z, z, z, z[..., 0].contiguous(), AdjointRule(1e-2, 1))
    return step_tiles(problem) if kernel in STEPS else tiles(kernel, problem)


def _measured(kernel: Any, case: Case, chosen: Any, arch: str) -> Row:
    text = _tool("--dump-resource-usage", kernel.asm["cubin"])
    registers, stack = (int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    shared = kernel.metadata.shared
    _, of_all, _ = ARCHES[arch]
    # Registers are given out to warps, 256 at a time.
    by_registers = REGISTERS // (-(-registers * 32 // 256) * 256 * chosen.warps)
    programs = min(by_registers, WARPS // chosen.warps, of_all // (shared + RESERVED))
    bodies = loops_of(_tool("-sass", kernel.asm["cubin"]))
    if case.kernel.endswith("evaluate") and case.dtype != "float32":
        half = len(bodies) // 2
        bodies = bodies[half:] if "fine" in case.kernel else bodies[:half]
    loop = counted(bodies)
    return {"registers": registers, "stack": stack, "shared": shared, "programs": programs, "loop": loop}


def _tool(option: str, code: bytes) -> str:
    """What the disassembler in Triton's package says of machine code."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([path, option, file.name], capture_output=True, text=True, check=True).stdout


def loops_of(text: str) -> list[list[str]]:
    """The instructions of the innermost loops with weights, which are exponentials between products of matrices."""
    listed = [(int(at, 16), code) for at, code in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", text)]
    loops: dict[tuple[int, int], list[str]] = {}
    for at, code in listed:
        jump = re.search(r"\bBRA\b.*0x([0-9a-f]+)", code)
        if jump is not None and (first := int(jump[1], 16)) <= at:
            body = [code for place, code in listed if first <= place <= at]
            # Inner loops end first.
            within = any(first <= begin and end <= at for begin, end in loops)
            if all(_count(body, COUNTED[part]) for part in ("tensor", "exp2")) and not within:
                loops[first, at] = body
    return list(loops.values())


def counted(bodies: list[list[str]]) -> dict[str, int]:
    """The instructions of the first loop, which is over whole tiles of keys, and the most spills of any."""
    if not bodies:
        return {}
    found = {name: _count(bodies[0], begins) for name, begins in COUNTED.items()}
    spills = max(_count(body, COUNTED["spills"]) for body in bodies)
    return {"instructions": len(bodies[0]), **found, "spills": spills}


def _count(body: list[str], begins: tuple[str, ...]) -> int:
    # An instruction may stand behind the predicate that guards it.
    return sum(re.sub(r"^@!?U?P\d+\s+", "", code).startswith(begins) for code in body)


if __name__ == "__main__":
    print(json.dumps(compiled(sys.argv[1], [Case.of(name) for name in sys.argv[2:]])))
