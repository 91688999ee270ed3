"""Runs as JSON files, tables on the terminal, and the table in README.md."""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from .environment import environment, warning
from .targets import Row, Target

SCHEMA = 1
HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
README = HERE / "README.md"

Document = dict[str, Any]


class Table(NamedTuple):
    """Title on the terminal, the sentence above it in README.md, header and lines."""

    title: str
    intro: str
    header: list[str]
    lines: list[list[str]]


def document(
    suite: str,
    rows: list[Row],
    targets: Iterable[Target],
    *,
    complete: bool,
    quick: bool,
    options: dict[str, Any],
    where: Document,
) -> Document:
    """Everything about a run, as it is written; `where` is the `environment()` at its beginning."""
    return {
        "schema": SCHEMA,
        "suite": suite,
        "finished": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "complete": complete,
        "quick": quick,
        "options": options,
        "environment": where,
        "targets": [target.judge(rows) for target in targets],
        "rows": rows,
    }


def write(run: Document, folder: Path) -> Path:
    """Write under a name of its own; an existing file is never touched."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = run["finished"].replace("-", "").replace(":", "").removesuffix("+0000")
    kind = "" if run["complete"] else "-partial"
    path = folder / f"{run['suite']}{kind}-{stamp}-{secrets.token_hex(3)}.json"
    with path.open("x") as file:
        json.dump(run, file, indent=1, allow_nan=False)
        file.write("\n")
    return path


def newest(suite: str, folder: Path = RESULTS) -> tuple[Path, Document] | None:
    """The latest complete run of a suite."""
    runs = [(path, json.loads(path.read_text())) for path in sorted(folder.glob(f"{suite}-*.json"))]
    runs = [(path, run) for path, run in runs if run["suite"] == suite and run["complete"]]
    return max(runs, key=lambda pair: pair[1]["finished"], default=None)


def tables_of_settings(run: Document) -> list[Table]:
    """The table of the suite `solve`, and of others that have none of their own."""
    intro = "Per setting (ratios as above; `spread` is the largest (high - low)/median of the timed functions):"
    return [Table("settings", intro, *settings_table(run))]


Tables = Callable[[Document], list[Table]]


def show(run: Document, notes: Iterable[str], console: Console, tables: Tables = tables_of_settings) -> None:
    """All tables, the machine, and what the reader must know."""
    for title, _, header, lines in (*tables(run), Table("targets", "", *targets_table(run))):
        table = RichTable(
            title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        for index, cell in enumerate(header):
            table.add_column(cell, justify="left" if index == 0 or title == "targets" else "right")
        for line in lines:
            table.add_row(*line)
        console.print(table)
    console.print(machine(run), markup=False)
    if not run["complete"]:
        console.print("NOT the full run: " + scope(run), style="bold", markup=False)
    if (busy := warning(run["environment"])) is not None:
        console.print(busy, style="bold", markup=False)
    for note in notes:
        console.print(f"- {note}", style="dim", markup=False)


def scope(run: Document) -> str:
    """What an incomplete run left out."""
    settings = sum("evidence" in row for row in run["rows"])
    return f"{settings} settings, metrics {', '.join(run['options']['metrics'])}, {run['options']['repeats']} rounds"


def targets_table(run: Document) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the verdicts of what was measured."""
    lines = []
    for target in run["targets"]:
        if target["verdict"] == "not measured":
            continue
        measured = "-" if target["measured"] is None else f"{target['measured']:.2f}"
        wrong = f" ({target['wrong']} wrong)" if target["wrong"] else ""
        bound = f"{target['sense']} {target['bound']:g}"
        of = f"{target['statistic']} of {target['rows']}" if target["rows"] > 1 else "-"
        lines.append([target["id"], target["claim"], of, bound, measured + wrong, target["verdict"]])
    return ["id", "ratio", "statistic", "target", "measured", "verdict"], lines


def settings_table(run: Document) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the ratios per setting, with the spread of ours and the evidence for it."""
    columns = list(dict.fromkeys(name for row in run["rows"] if "evidence" in row for name in row["ratios"]))
    lines = []
    for row in run["rows"]:
        if "evidence" not in row:
            continue
        found = row["evidence"].get("ours_forward") or row["evidence"].get("ours_training") or {}
        lines.append(
            [
                f"{row['keys']}, {row['sharpness']:g}, {row['anchor']:g}",
                f"{row['picard']['mean']:.1f}/{row['picard']['most']}",
                f"{found['evaluations_mean']:.1f}/{found['evaluations_max']}" if "evaluations_mean" in found else "-",
                f"{found['residual_max']:.0e}" if "residual_max" in found else "-",
                f"{100 * found['converged']:.4g}" if "converged" in found else "-",
                *(_number(row["ratios"].get(name)) for name in columns),
                spread(row["seconds"]),
            ]
        )
    header = [
        "keys, beta*sqrt(D), anchor",
        "Picard evals mean/max",
        "our evals mean/max",
        "max residual",
        "converged %",
    ]
    return [*header, *columns, "spread"], lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def spread(seconds: dict[str, dict[str, float]]) -> str:
    """Largest (high - low)/median over what was timed more than once."""
    spreads = [(t["high"] - t["low"]) / t["median"] for t in seconds.values() if t["turns"] > 1]
    return f"{100 * max(spreads):.0f} %" if spreads else "-"


def machine(run: Document) -> str:
    """One line: what it was measured on."""
    where = run["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["libraries"].items())
    return f"{where['cpu']}, {where['cores']} cores, {where['threads']} threads, {where['capability']}; {versions}"


def markdown(run: Document, source: str, notes: Iterable[str], tables: Tables = tables_of_settings) -> str:
    """The part of the README between its markers."""
    parts = [
        f"From `{source}`, finished {run['finished']}: {machine(run)}.",
        _markdown_table(*targets_table(run)),
        *(part for _, intro, header, lines in tables(run) for part in (intro, _markdown_table(header, lines))),
        "\n".join(f"- {note}" for note in notes),
    ]
    if (busy := warning(run["environment"])) is not None:
        parts.insert(1, busy)
    return "\n\n".join(parts)


def _markdown_table(header: list[str], lines: list[list[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def rewrite(
    suite: str,
    notes: Iterable[str],
    *,
    tables: Tables = tables_of_settings,
    readme: Path = README,
    folder: Path = RESULTS,
) -> Path | None:
    """Put the newest complete run of a suite between its markers; None where there is no such run."""
    latest = newest(suite, folder)
    if latest is None:
        return None
    path, run = latest
    begin, end = f"<!-- results of {suite} -->", f"<!-- end of {suite} -->"
    text = readme.read_text()
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"`{readme.name}` must hold the lines {begin} and {end}, once each and in this order")
    before, rest = text.split(begin)
    _, after = rest.split(end)
    source = f"{folder.name}/{path.name}"
    readme.write_text(f"{before}{begin}\n\n{markdown(run, source, notes, tables)}\n\n{end}{after}")
    return path


__all__ = ["document", "environment", "markdown", "newest", "rewrite", "show", "write"]
