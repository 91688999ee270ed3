"""What bounds an evaluation of each Triton kernel on an H100, calculated from its data sheet and the compiled loops."""

from __future__ import annotations

from typing import Any

from .report import Table, number
from .targets import Row

#: An H100 SXM by its data sheet: dense bfloat16 and float32 operations and bytes in a second, multiprocessors.
TENSOR, FLOAT32, BYTES, MULTIPROCESSORS = 989.4e12, 66.9e12, 3.35e12, 132
#: 128 float32 lanes of a multiprocessor multiply and add in a cycle.
CYCLES = FLOAT32 / (MULTIPROCESSORS * 128 * 2)
#: Exponentials and instructions of warps that a multiprocessor begins in a cycle.
EXP2, ISSUES = 16, 4
#: Products of a queries' and a keys' tile; arrays (N, D) of float32 that a kernel, and the step behind it, reads or
#: writes beside the keys.
PRODUCTS = {"evaluate": 2, "fine evaluate": 4, "product": 3, "fine product": 6, "keys": 5}
PASSES = {"evaluate": 11, "fine evaluate": 11, "product": 12, "fine product": 12, "keys": 3}
#: The problem of G1 and G2, and what is published of the fastest attention there, in operations a second.
SETS, LENGTH = 64, 4096
SDPA = {64: 476e12, 128: 638e12}
NOTES = (
    "Calculated; nothing was measured. B 4, H 16, N = M = 4096, half precision. Tensor cores: operations of the "
    "products at the rate of the data sheet. exp2: 16 in a cycle of a multiprocessor. Issue: instructions of the "
    "compiled loop over whole tiles, four of a warp in a cycle. Memory: keys once, and arrays of the queries' "
    "shape that a kernel and the step behind it read and write, if none of them stayed in a cache, so that it bounds "
    "nothing. `bound / SDPA`: the largest of the first three in forwards of FlashAttention-3 at its published 476 and "
    "638 TFLOP/s: the least that G1 could be; G2 is as many times that as tiles make evaluations, one of them fine.",
)


def bounds(row: Row) -> dict[str, float]:
    """Seconds that each part of the card takes for one evaluation of the problem, from a compiled kernel."""
    kernel, dim, loop = row["kernel"], row["dim"], row["loop"]
    pairs = float(SETS * LENGTH * LENGTH)
    tiles = pairs / (row["rows"] * row["keys"])
    cycles = MULTIPROCESSORS * CYCLES
    elements = SETS * LENGTH * dim
    return {
        "tensor cores": PRODUCTS[kernel] * 2 * dim * pairs / TENSOR,
        "exp2": tiles * loop["exp2"] * row["warps"] * 32 / (EXP2 * cycles),
        "issue": tiles * loop["instructions"] * row["warps"] / (ISSUES * cycles),
        "memory": (2 * elements + 4 * PASSES[kernel] * elements) / BYTES,
    }


def tables(run: dict[str, Any]) -> list[Table]:
    header = [
        "kernel",
        "D",
        "FLOPs a pair",
        "tensor cores, ms",
        "exp2, ms",
        "issue, ms",
        "memory at most, ms",
        "bound by",
    ]
    header.append("bound / SDPA")
    lines = []
    for row in run["rows"]:
        whole = row["kernel"] in PRODUCTS and row["kind"] == "plain"
        if whole and row["dtype"] == "bfloat16" and row["dim"] in SDPA:
            found = bounds(row)
            largest = max(("tensor cores", "exp2", "issue"), key=lambda part: found[part])
            forward = 4 * row["dim"] * SETS * LENGTH**2 / SDPA[row["dim"]]
            lines.append(
                [
                    row["kernel"],
                    str(row["dim"]),
                    str(PRODUCTS[row["kernel"]] * 2 * row["dim"]),
                    *(number(1000 * seconds) for seconds in found.values()),
                    largest,
                    number(found[largest] / forward),
                ]
            )
    by = f"by Triton {run['environment']['libraries']['triton']}"
    return [Table("roofline", f"ROOFLINE: milliseconds for one evaluation of all queries, loops {by}:", header, lines)]
