"""GATHERING: the evaluations that tiles of the Triton kernels make for queries that have ended, without a GPU.

A tile whose queries stand side by side makes evaluations until its slowest one has ended. Numbers of evaluations are
recorded in solves on this machine; how many tiles make how many of them follows by the rule of the kernels.
"""

from __future__ import annotations

import dataclasses
import math
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
    "of the evaluations that tiles make for their rows, the part for queries that have ended or do not exist, where a "
    "tile waits for its slowest query, and where those that are left are listed after every evaluation.",
)


def waiting(evaluations: Tensor, rows: int) -> int:
    """Evaluations that tiles of so many rows make where queries (sets, N) stand side by side."""
    return sum(int(tile.max()) for each in evaluations for tile in each.split(rows))


def listed(evaluations: Tensor, rows: int) -> int:
    """The same where the queries that are left after every evaluation fill the tiles of the next one."""
    left = (evaluations > step for step in range(int(evaluations.max())))
    return sum(math.ceil(int(count) / rows) for each in left for count in each.sum(-1))


def measured(setting: Any, rows: int) -> Row:
    from implicit_attention.kernels import hopfield_solve

    data = draw(setting)
    found = hopfield_solve(
        data.queries, data.keys, beta=setting.beta, anchor=setting.anchor, rtol=RTOL, max_steps=MAX_STEPS
    )
    evaluations = found.num_evals.flatten(0, -2)
    useful, made = int(evaluations.sum()), {"waiting": waiting(evaluations, rows), "listed": listed(evaluations, rows)}
    return {
        "name": setting.name,
        "metric": "GATHERING",
        "setting": dataclasses.asdict(setting),
        "rows": rows,
        "evaluations": {"mean": float(evaluations.double().mean()), "most": int(evaluations.max())},
        "converged": float((found.status == 0).double().mean()),
        "wasted": {name: 1 - useful / (rows * count) for name, count in made.items()},
    }


def told(row: Row) -> str:
    """The row in a few words."""
    side_by_side, in_lists = (f"{row['wasted'][name]:.1%}" for name in ("waiting", "listed"))
    return f"{side_by_side} of the evaluations are for queries that have ended, {in_lists} where the others are listed"


def run(out: Path, progress: Callable[[Row], None]) -> tuple[dict[str, Any], Path]:
    """Measure every setting and write the rows into the folder."""
    from implicit_attention.kernels.triton.layout import TILES

    from .environment import environment

    rows = []
    for setting in FULL:
        given = dataclasses.replace(setting, shape=SHAPE, rtol=RTOL)
        rows.append(measured(given, TILES["evaluate", True][64].rows))
        progress(rows[-1])
    options = {"metrics": ["GATHERING"], "repeats": 1, "settings": len(rows)}
    made = document("gathering", rows, (), complete=True, quick=False, options=options, where=environment())
    return made, write(made, out)


def tables(run: dict[str, Any]) -> list[Table]:
    header = ["problem", "evaluations mean/max", "wasted, %", "listed: wasted, %"]
    lines = [
        [
            row["name"],
            f"{row['evaluations']['mean']:.1f}/{row['evaluations']['most']}",
            *(number(100 * row["wasted"][name]) for name in ("waiting", "listed")),
        ]
        for row in run["rows"]
    ]
    intro = f"GATHERING: evaluations for queries that have ended, by tiles of {run['rows'][0]['rows']} queries:"
    return [Table("gathering", intro, header, lines)]
