"""Put the table of the committed comparison into docs/compare.md: `python docs/compare/table.py` (`--check` compares).

The comparison itself comes from `implicit-attention compare --out docs/compare`.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console

from implicit_attention.cli.compare import Compare
from implicit_attention.cli.compare_solvers import solver_tables
from implicit_attention.studies.retrieval import summary

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parent / "compare.md"
START, END = "<!-- table of compare: python docs/compare/table.py -->\n", "<!-- end of table -->"


def table(path: Path) -> str:
    """The table of solvers and the summary that the command printed, from its JSON file; rates.png has its rates."""
    run = json.loads(path.read_text())
    chosen = run["settings"]
    settings = Compare(**{name: chosen[name] for name in ("patterns", "beta", "anchor", "device", "dtype", "seed")})
    ran = {"threads": run["device"]["threads"], "native": run["device"].get("native")}
    comparison = SimpleNamespace(settings=settings, rows=run["rows"], **ran)
    console = Console(file=io.StringIO(), width=120, color_system=None, legacy_windows=False)
    for part in solver_tables(comparison, 120):
        console.print(part)
        console.print()
    console.print(summary(run["retrieval"], settings.beta))
    return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().splitlines())


def updated(page: str, content: str) -> str:
    before, rest = page.split(START)
    return f"{before}{START}```\n{content}\n```\n{END}{rest.split(END)[1]}"


def main() -> int:
    new = updated(PAGE.read_text(), table(FOLDER / "compare.json"))
    if "--check" in sys.argv:
        return int(new != PAGE.read_text())
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
