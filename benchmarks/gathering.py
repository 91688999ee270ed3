"""GATHERING: the evaluations that tiles of the Triton kernels make for queries that have ended, without a GPU.

A tile makes evaluations until its slowest query has ended. Numbers of evaluations are recorded in solves on this
machine; how many tiles make how many of them follows by the rule of the kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from .problems import FULL, Shape, draw
from .report import Table, document, number, write
from .targets import Row

SHAPE, RTOL, MAX_STEPS = Shape(1, 4, 4096, 64), 1e-3, 100
NOTES = (
    f"{SHAPE.heads} sets of {SHAPE.length} queries and keys, D {SHAPE.dim}, solved to {RTOL:g} on a CPU. `wasted`: "
    "of the evaluations that tiles make for their rows, the part for queries that have ended or do not exist, as a "
    "tile waits for its slowest query, and where the others are gathered after some evaluations. `launches`: of the "
    "kernel until the last query has ended.",
)


def tile_evaluations(evaluations: Tensor, rows: int, ends: tuple[int, ...]) -> tuple[int, int]:
    """Evaluations that tiles of so many rows make, and launches, where queries (sets, N) are gathered after `ends`."""
    most = int(evaluations.max())
    made, launches, begin = 0, 0, 0
    for end in (*(end for end in ends if end < most), most):
        launches += 1
        for going in (each[each > begin] for each in evaluations):
            made += sum(min(int(tile.max()), end) - begin for tile in going.split(rows) if tile.numel())
        begin = end
    return made, launches


def measured(setting: Any, rows: int, ends: tuple[int, ...]) -> Row:
    from implicit_attention.kernels import hopfield_solve

    data = draw(setting)
    found = hopfield_solve(
        data.queries, data.keys, beta=setting.beta, anchor=setting.anchor, rtol=RTOL, max_steps=MAX_STEPS
    )
    evaluations = found.num_evals.flatten(0, -2)
    waiting, _ = tile_evaluations(evaluations, rows, ())
    gathered, launches = tile_evaluations(evaluations, rows, ends)
    useful = int(evaluations.sum())
    return {
        "name": setting.name,
        "metric": "GATHERING",
        "setting": dataclasses.asdict(setting),
        "rows": rows,
        "evaluations": {"mean": float(evaluations.double().mean()), "most": int(evaluations.max())},
        "converged": float((found.status == 0).double().mean()),
        "wasted": {"waiting": 1 - useful / (rows * waiting), "gathered": 1 - useful / (rows * gathered)},
        "launches": launches,
    }


def told(row: Row) -> str:
    """The row in a few words."""
    waiting, gathered = (f"{row['wasted'][name]:.1%}" for name in ("waiting", "gathered"))
    return f"{waiting} of the evaluations are for queries that have ended, {gathered} where the others are gathered"


def run(out: Path, progress: Callable[[Row], None]) -> tuple[dict[str, Any], Path]:
    """Measure every setting and write the rows into the folder."""
    from implicit_attention.kernels.triton.layout import TILES, growing

    from .environment import environment

    rows = []
    for setting in FULL:
        given = dataclasses.replace(setting, shape=SHAPE, rtol=RTOL)
        rows.append(measured(given, TILES["solve", True][64].rows, growing(MAX_STEPS)))
        progress(rows[-1])
    options = {"metrics": ["GATHERING"], "repeats": 1, "settings": len(rows)}
    made = document("gathering", rows, (), complete=True, quick=False, options=options, where=environment())
    return made, write(made, out)


def tables(run: dict[str, Any]) -> list[Table]:
    header = ["problem", "evaluations mean/max", "wasted, %", "gathered: wasted, %", "launches"]
    lines = [
        [
            row["name"],
            f"{row['evaluations']['mean']:.1f}/{row['evaluations']['most']}",
            *(number(100 * row["wasted"][name]) for name in ("waiting", "gathered")),
            str(row["launches"]),
        ]
        for row in run["rows"]
    ]
    intro = f"GATHERING: evaluations for queries that have ended, by tiles of {run['rows'][0]['rows']} queries:"
    return [Table("gathering", intro, header, lines)]
