"""Put the table of the digits into magnetize.md: `python docs/magnetize/table.py` (`--check` only compares).

The run itself comes from `implicit-attention magnetize --out docs/magnetize`.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

from rich.console import Console

from implicit_attention.cli.magnetize import magnetization_columns
from implicit_attention.cli.table import method_tables

HERE = Path(__file__).parent
PAGE = HERE.parent / "magnetize.md"
START, END = "<!-- table: python docs/magnetize/table.py -->\n", "<!-- end of table -->"
#: Times and solvers' counts are those of one machine, and are left to the JSON file.
LEFT_OUT = ("steps\nmax", "resid.\nmax", "time\nms")


def table() -> str:
    run = json.loads((HERE / "thermodynamics.json").read_text())
    columns = magnetization_columns(run["rows"], run["reference"])
    console = Console(file=io.StringIO(), width=120, color_system=None, legacy_windows=False)
    columns = [column for column in columns if column.header not in LEFT_OUT]
    for part in method_tables(None, columns, run["rows"], 120):
        console.print(part)
    return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().splitlines())


def main() -> int:
    page = PAGE.read_text()
    before, rest = page.split(START)
    new = f"{before}{START}```\n{table()}\n```\n{END}{rest.split(END)[1]}"
    if "--check" in sys.argv:
        return int(new != page)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
