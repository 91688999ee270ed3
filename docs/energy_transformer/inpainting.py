"""Writes the table of `train inpaint` in docs/energy_transformer.md from the committed metrics; `--check` compares it.

The metrics and pictures beside this file are those of

    implicit-attention train inpaint --data digits --minutes 5 --out runs/digits
    implicit-attention train inpaint --data photos --minutes 5 --out runs/photos
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "energy_transformer.md"
START, END = "<!-- table: python docs/energy_transformer/inpainting.py -->", "<!-- end of inpainting -->"
RUNS = ("digits", "photos")
METHODS = ("visible mean", "harmonic", "published, 1 step", "published, 4 steps", "published, 12 steps", "equilibrium")


def table() -> str:
    """One row for each run: its errors."""
    head = ["data", "updates", *METHODS]
    lines = [head, ["---"] * len(head)]
    for name in RUNS:
        run = json.loads((HERE / f"{name}.json").read_text())
        errors = [f"{run['rmse'][method]:.4f}" for method in METHODS]
        lines.append([name, str(run["training"]["updates"]), *errors])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    page = PAGE.read_text()
    before, rest = page.split(START)
    new = f"{before}{START}\n\n{table()}\n\n{END}{rest.split(END)[1]}"
    if "--check" in sys.argv:
        return int(new != page)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
