"""Every page of this folder as a notebook: `python docs/tutorials/notebooks.py` writes them, `--check` compares.

`--draw` runs the pages, a minute, and saves their figures, which the pages show.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def cells(page: str) -> list[tuple[str, str]]:
    """The text and the code of a page, in their order, as kinds and sources."""
    # Of a pattern with one group `split` returns text and code in turn.
    parts = (("code" if index % 2 else "markdown", part.strip("\n")) for index, part in enumerate(BLOCK.split(page)))
    return [(kind, source) for kind, source in parts if source]


def notebook(page: str) -> str:
    """The notebook of a page, without outputs, in format 4.5."""
    made: list[dict[str, Any]] = []
    for number, (kind, source) in enumerate(cells(page)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source.splitlines(keepends=True)}
        made.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def main(check: bool) -> int:
    """Write all notebooks, or say which are not those of their pages."""
    stale = []
    for page in sorted(HERE.glob("*.md")):
        made, path = notebook(page.read_text()), page.with_suffix(".ipynb")
        if not path.exists() or path.read_text() != made:
            stale.append(path.name)
            if not check:
                path.write_text(made)
    print(f"{'not those of their pages' if check else 'written'}: {', '.join(stale) or 'none'}")
    return int(check and bool(stale))


def draw() -> None:
    """Save what a page calls `figure` under its name."""
    for page in sorted(HERE.glob("*.md")):
        names: dict[str, Any] = {}
        if "\nfigure = " in (text := page.read_text()):
            for kind, source in cells(text):
                if kind == "code":
                    exec(compile(source, page.name, "exec"), names)
            names["figure"].savefig(page.with_suffix(".png"), dpi=100)


if __name__ == "__main__":
    if "--draw" in sys.argv[1:]:
        draw()
    sys.exit(main("--check" in sys.argv[1:]))
