"""`python tests/promises/write.py [RECORDS ...]`: adds to the lists what the package promises beyond them.

RECORDS are files that `recorder.py` wrote: their refusals join the table, at most MOST of one door with like words.
"""

import collections
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lists
import refusals
import saved

#: Of the helpers of all tests.
sys.path.append(str(Path(__file__).parents[1]))

MOST = 3


def merged(path: str, old: Any, new: Any) -> Any:
    """The old promise with what is new: nothing that is promised is taken out."""
    if isinstance(old, dict):
        return {**old, **{key: merged(key, old.get(key), each) for key, each in new.items()}}
    if path in lists.read("signatures") and isinstance(old, list) and isinstance(new, list):
        return new if lists.keeps(path, old, new) else old
    if isinstance(old, list):
        return sorted({*old, *new})
    return new if old is None else old


def groups(files: list[str]) -> list[list[dict[str, Any]]]:
    """Records of refusals by their door and like words; one record has all calls that led to its very words."""
    found: dict[Any, dict[Any, Any]] = collections.defaultdict(dict)
    for file in files:
        with open(file) as lines:
            for row in map(json.loads, lines):
                if row["door"] is None or row["raised"] != "package" or ".testing" in row["door"]:
                    continue
                if not row["test"] and "`" not in row["message"]:
                    continue
                row["message"] = refusals.words(type(row["kind"], (Exception,), {})(row["message"]))
                alike = re.sub(r"'[^']*'|\[[^]]*\]|\([^)]*\)|-?\d[\d.]*(e[+-]?\d+)?|#", "#", row["message"])
                group = found[row["door"], row["kind"], alike]
                calls = group.setdefault(row["message"], {**row, "calls": []})["calls"]
                calls += [each for each in row["calls"] if each not in calls]
    for group in found.values():
        for row in group.values():
            row["calls"] = sorted(row["calls"], key=lambda each: len(each[0]) + sum(map(len, each[1])))[:8]
    return [sorted(group.values(), key=lambda row: len(str(row["calls"][:1] or "#" * 999))) for group in found.values()]


def asked(rows: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
    """The row of the table for each record, found in a fresh process; None if no call raises the same."""
    found: list[dict[str, Any] | None] = []
    while len(found) < len(rows):
        sent = "".join(json.dumps(row) + "\n" for row in rows[len(found) :])
        done = subprocess.run([sys.executable, refusals.__file__], input=sent, text=True, capture_output=True)
        got = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "null"))]
        found += got
        if len(found) < len(rows):
            found.append(None)
    return found


def table(files: list[str]) -> list[dict[str, Any]]:
    """Rows of the table of refusals; where no call can be written, the test that is its witness."""
    waiting = groups(files)
    rows: list[dict[str, Any]] = []
    kept = [[] for _ in waiting]
    for turn in range(2 * MOST):
        now = [i for i, group in enumerate(waiting) if len(group) > turn and len(kept[i]) < MOST]
        for i, row in zip(now, asked([waiting[i][turn] for i in now]), strict=True):
            kept[i] += [row] if row else []
    for group, found in zip(waiting, kept, strict=True):
        tested = [row for row in group if row["test"]]
        if not found and tested:
            witness = {name: tested[0][name] for name in ("door", "kind", "message")}
            found = [{**witness, "test": tested[0]["test"].partition("[")[0]}]
        rows += found
    return rows


def add_refusals(files: list[str]) -> None:
    known = {(row["door"], row["message"]): row for row in lists.read("refusals")}
    for row in table(files):
        old = known.get((row["door"], row["message"]))
        if old is None or "test" in old:
            known[row["door"], row["message"]] = row
    lists.write("refusals", [known[key] for key in sorted(known)])


if __name__ == "__main__":
    for name, today in (("names", lists.names), *lists.LISTS.items(), ("states", saved.states), ("files", saved.files)):
        lists.write(name, merged(name, lists.read(name), today()))
    if sys.argv[1:]:
        add_refusals(sys.argv[1:])
