"""Make a notebook of each tutorial: `python docs/tutorials/notebooks.py` (`--check` only compares).

The pages are the source. Their code blocks become cells of code, everything between them cells of text.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
CODE = re.compile(r"^```python\n(.*?)^```\n?", re.DOTALL | re.MULTILINE)
# Version 4.4 of the format: later ones give every cell a name, which would change at each writing.
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def notebook(page: str) -> str:
    cells: list[dict[str, Any]] = []
    for index, part in enumerate(CODE.split(page)):
        if lines := part.strip().splitlines(keepends=True):
            kind = (
                {"cell_type": "code", "execution_count": None, "outputs": []}
                if index % 2
                else {"cell_type": "markdown"}
            )
            cells.append(kind | {"metadata": {}, "source": lines})
    whole = {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(whole, indent=1) + "\n"


def main() -> int:
    wrong = 0
    for page in sorted(FOLDER.glob("*.md")):
        made, path = notebook(page.read_text()), page.with_suffix(".ipynb")
        if "--check" in sys.argv:
            wrong += not path.exists() or path.read_text() != made
        else:
            path.write_text(made)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
