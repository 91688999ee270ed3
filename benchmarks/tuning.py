"""TILES: tiles of the Triton kernels on the GPU that is there; each is checked before it is timed.

The fastest of a kernel and head dimension is the one to put into `implicit_attention.ops.triton.layout.TILES`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from implicit_attention.errors import UnsupportedImplementation
from implicit_attention.ops.triton import layout
from implicit_attention.ops.triton.layout import Tiles

from .measure import interleaved, once
from .report import Table, document, write
from .targets import Row

#: Tiles to try beside those that are used, by kernel and head dimension, for keys in half precision.
CANDIDATES: Mapping[tuple[str, int], tuple[Tiles, ...]] = {
    ("solve", 64): (Tiles(64, 64, 4, 2, 128), Tiles(64, 64, 4, 3), Tiles(64, 128, 4, 2), Tiles(128, 64, 8, 3)),
    ("solve", 128): (Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 3), Tiles(128, 64, 8, 3)),
    ("solve", 256): (Tiles(64, 16, 4, 2), Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 2)),
    ("adjoint", 64): (Tiles(64, 64, 4, 2, 168), Tiles(64, 64, 4, 3), Tiles(64, 32, 4, 3, 168)),
    ("adjoint", 128): (Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 3)),
    ("adjoint", 256): (Tiles(64, 32, 4, 2),),
    ("keys", 64): (Tiles(64, 64, 4, 3), Tiles(32, 64, 4, 3), Tiles(64, 64, 4, 2, 168)),
    ("keys", 128): (Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2)),
    ("keys", 256): (Tiles(16, 64, 4, 2),),
}
SETS, LENGTH, BUDGET = 16, 4096, 8
NOTES = (
    f"{SETS} sets of {LENGTH} queries and keys in bfloat16; a solve of {BUDGET} steps, or an adjoint solve with the "
    "gradient of keys, in turns. Tiles: queries, keys, warps, stages, registers. The first of each is the one in use.",
)


def rows_for(
    kernel: str,
    dim: int,
    candidates: tuple[Tiles, ...],
    *,
    device: str = "cuda",
    length: int = LENGTH,
    sets: int = SETS,
    repeats: int = 5,
) -> list[Row]:
    """The tiles in use and the candidates: seconds, or why the kernels with them cannot be trusted."""
    run = _operation(kernel, dim, device, length, sets)
    used = layout.TILES[kernel, True][dim]
    functions: dict[str, Callable[[], Any]] = {}
    first, refused = {}, {}
    for tile in dict.fromkeys((used, *candidates)):
        name = ", ".join(map(str, tile))
        function = partial(_with_tiles, kernel, dim, tile, run)
        try:
            _, first[name] = once(function, device)
            functions[name] = function
        except UnsupportedImplementation as error:
            refused[name] = str(error)
    times = interleaved(functions, first, repeats=repeats, device=device)
    about = {"metric": "TILES", "kernel": kernel, "dim": dim}
    return [
        *({**about, "tiles": name, "seconds": timing.median, "refused": ""} for name, timing in times.items()),
        *({**about, "tiles": name, "seconds": None, "refused": reason} for name, reason in refused.items()),
    ]


@contextlib.contextmanager
def in_use(kernel: str, dim: int, tile: Tiles) -> Iterator[None]:
    """The kernel has these tiles for heads of this dimension."""
    table = layout.TILES[kernel, True]
    before, table[dim] = table[dim], tile
    try:
        yield
    finally:
        table[dim] = before


def _with_tiles(kernel: str, dim: int, tile: Tiles, run: Callable[[], Any]) -> Any:
    with in_use(kernel, dim, tile):
        return run()


def _operation(kernel: str, dim: int, device: str, length: int, sets: int) -> Callable[[], Any]:
    """A call that runs the kernel, by kernels or not at all."""
    from implicit_attention._fused_rule import FusedRule
    from implicit_attention.ops.dispatch import solve, solve_adjoint
    from implicit_attention.ops.problem import Hopfield

    generator = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(1, sets, length, dim, generator=generator).to(device) for _ in range(2))
    numbers = (torch.full((1, 1, 1, 1), value, device=device) for value in (2 / dim**0.5, 0.5))
    problem = Hopfield(queries.bfloat16(), keys.bfloat16(), *numbers)
    if kernel == "solve":
        return lambda: solve(problem, queries, FusedRule(0.0, 0.0, BUDGET, 3), "triton")
    return lambda: solve_adjoint(problem, queries, keys, None, 20, "triton")


def told(row: Row) -> str:
    """The row in a few words."""
    return row["refused"] or f"{1000 * row['seconds']:.2f} ms"


def run(out: Path, progress: Callable[[Row], None]) -> tuple[dict[str, Any], Path]:
    """Try all candidates on the GPU and write the rows into the folder."""
    from .environment import environment

    rows = []
    for (kernel, dim), candidates in CANDIDATES.items():
        for row in rows_for(kernel, dim, candidates):
            rows.append({"name": f"{kernel}, D {dim}, tiles {row['tiles']}", **row})
            progress(rows[-1])
    options = {"metrics": ["TILES"], "repeats": 5, "settings": len(rows)}
    made = document("tiles", rows, (), complete=True, quick=False, options=options, where=environment("cuda"))
    return made, write(made, out)


def tables(run: dict[str, Any]) -> list[Table]:
    header = ["kernel", "D", "tiles", "ms, or why not"]
    lines = [[row["kernel"], str(row["dim"]), row["tiles"], told(row)] for row in run["rows"]]
    return [Table("tiles", "TILES: kernels by their tiles:", header, lines)]
