"""Plain and accelerated steps of the equilibrium Energy Transformer at five scales of its weights.

`python docs/energy_transformer/scales.py` (some minutes) writes scales.json beside this file and the table of
`docs/energy_transformer.md`; `--table` rewrites the table from scales.json alone, `--check` says whether it would.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from implicit_attention import Anderson, Picard, Status, solve
from implicit_attention.diagnostics import smallest_curvature
from implicit_attention.energies import LegendreEnergy
from implicit_attention.potentials import LayerNormPotential, Polynomial, TokenAttention, TokenMemory

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "scales.json", HERE.parent / "energy_transformer.md"
START, END = "<!-- table: python docs/energy_transformer/scales.py -->", "<!-- end of table -->"

DIM, MEMORIES, SEEDS, RTOL = 64, 256, 5, 1e-8
#: Tokens, heads, head width, standard deviations of W_query and W_key and of the memories: from those that the
#: published layer starts training with to those of its tutorial.
SCALES = (
    (32, 4, 16, 0.002, 0.02),
    (32, 4, 16, 0.02, 0.1),
    (32, 4, 16, 0.1, 0.06),
    (32, 4, 16, 0.3, 0.03),
    (50, 6, 21, 1 / 21, 1.0),
)
#: A solver by the name that the table gives it. Of acceptable steps there may be thousands.
SOLVERS = {"plain": Picard(rtol=RTOL, max_steps=5000), "default": Anderson(rtol=RTOL, max_steps=5000)}


def problem(scale: int, seed: int) -> tuple[LegendreEnergy, Tensor]:
    """The energy, and the tokens that it is solved from, which are its field."""
    tokens, heads, width, of_scores, of_memories = SCALES[scale]
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    w_query, w_key = of_scores * drawn(heads, width, DIM), of_scores * drawn(heads, width, DIM)
    field, memories = drawn(tokens, DIM), of_memories * drawn(MEMORIES, DIM)
    potential = TokenAttention(w_query, w_key, width**-0.5) + TokenMemory(Polynomial(memories, 1.0))
    return LegendreEnergy(LayerNormPotential(), potential, field), field


#: Vectors of the estimate of the smallest curvature.
LANCZOS = 200


def solved(scale: int, seed: int) -> dict[str, Any]:
    """What both solvers make of one problem; the smallest curvature is found from above."""
    energy, start = problem(scale, seed)
    row: dict[str, Any] = {"scale": scale, "seed": seed}
    for name, solver in SOLVERS.items():
        solution = solve(energy, start, solver=solver, on_failure="ignore")
        row[name] = {
            "status": Status(int(solution.status)).name,
            "evaluations": int(solution.num_evals),
            "energy": float(energy.energy(solution.value)),
            "curvature": float(smallest_curvature(energy, solution.value, steps=LANCZOS)),
        }
    return row


def measure() -> dict[str, Any]:
    rows = []
    for scale in range(len(SCALES)):
        for seed in range(SEEDS):
            rows.append(solved(scale, seed))
            print(rows[-1], flush=True)
    settings = {"dim": DIM, "memories": MEMORIES, "rtol": RTOL, "lanczos": LANCZOS}
    return {"settings": settings, "rows": rows}


# What is shown of it.


def table(rows: list[dict[str, Any]]) -> str:
    """A line a scale: means over its seeds, how many end in two minima, and the smallest curvature of all."""
    head = [
        "N, H, Y",
        "std of W, of xi",
        "evaluations: plain",
        "default",
        "two minima (default's lower)",
        "smallest curvature",
    ]
    lines = [head, ["---"] * len(head)]
    for scale, (tokens, heads, width, of_scores, of_memories) in enumerate(SCALES):
        own = [row for row in rows if row["scale"] == scale]

        energies = [(row["plain"]["energy"], row["default"]["energy"]) for row in own]
        # The same minimum to all digits that a solve to 1e-8 gives.
        apart = [b - a for a, b in energies if abs(b - a) >= 1e-9 * abs(a)]
        lines.append(
            [
                f"{tokens}, {heads}, {width}",
                f"{of_scores:.3g}, {of_memories:g}",
                *(f"{statistics.mean(row[name]['evaluations'] for row in own):.0f}" for name in SOLVERS),
                f"{len(apart)} of {len(own)} ({sum(gap < 0 for gap in apart)})",
                f"{min(row['default']['curvature'] for row in own):.2g}",
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def updated(page: str, content: str) -> str:
    before, rest = page.split(START)
    return f"{before}{START}\n\n{content}\n\n{END}{rest.split(END)[1]}"


def main() -> int:
    if "--table" not in sys.argv and "--check" not in sys.argv:
        torch.set_num_threads(1)
        RESULTS.write_text(json.dumps(measure(), indent=1, allow_nan=False) + "\n")
    page = PAGE.read_text()
    new = updated(page, table(json.loads(RESULTS.read_text())["rows"]))
    if "--check" in sys.argv:
        return int(new != page)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
