"""Runs as JSON files, tables on the terminal, and the table in README.md."""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Callable, Iterable, Iterator
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


#: Where a suite may have been run; each has its own newest results.
DEVICES = ("cpu", "cuda")
#: What stands in the names of contenders that are gone, of which older runs tell.
GONE = "tiled"


def newest(suite: str, folder: Path = RESULTS, device: str = "cpu", **libraries: str) -> tuple[Path, Document] | None:
    """The latest complete run of a suite on a device, of all with these versions of libraries."""
    runs = [
        (path, run)
        for path, run in _runs(suite, folder, device)
        if run["complete"] and libraries.items() <= run["environment"]["libraries"].items()
    ]
    return max(runs, key=lambda pair: pair[1]["finished"], default=None)


def _runs(suite: str, folder: Path, device: str) -> Iterator[tuple[Path, Document]]:
    """The runs of a suite on a device, without contenders that are gone."""
    for path in sorted(folder.glob(f"{suite}-*.json")):
        run = json.loads(path.read_text())
        if run["suite"] == suite and run["environment"]["device"] == device:
            for part in (part for row in run["rows"] for part in row.values() if isinstance(part, dict)):
                for name in [name for name in part if GONE in name]:
                    del part[name]
            yield path, run


def timed(run: Document) -> bool:
    """Return whether any row has times, for which other work on the cores matters."""
    return any("seconds" in row for row in run["rows"])


def newest_by_metric(
    suite: str, metrics: Iterable[str], folder: Path = RESULTS, device: str = "cpu"
) -> list[tuple[Path, Document]]:
    """The latest full run of every metric on a device, each restricted to the metrics of which it is the latest."""
    runs = [(path, run) for path, run in _runs(suite, folder, device) if not run["quick"]]
    latest: dict[Path, tuple[Document, list[str]]] = {}
    for metric in metrics:
        having = [(path, run) for path, run in runs if metric in run["options"]["metrics"]]
        if having:
            path, run = max(having, key=lambda pair: pair[1]["finished"])
            latest.setdefault(path, (run, []))[1].append(metric)
    return [(path, _restricted(run, chosen)) for path, (run, chosen) in latest.items()]


def _restricted(run: Document, metrics: list[str]) -> Document:
    return {
        **run,
        "options": {**run["options"], "metrics": metrics},
        "rows": [row for row in run["rows"] if row["metric"] in metrics],
        "targets": [target for target in run["targets"] if target["id"] in metrics],
    }


def tables_of_settings(run: Document) -> list[Table]:
    """The table of the suite `solve`, and of others that have none of their own."""
    intro = "Per setting (ratios as above; `spread` is the largest (high - low)/median of the timed functions):"
    return [Table("settings", intro, *settings_table(run))]


Tables = Callable[[Document], list[Table]]


def show(run: Document, notes: Iterable[str], console: Console, tables: Tables = tables_of_settings) -> None:
    """All tables, the machine, and what the reader must know."""
    verdicts = [Table("targets", "", *targets_table(run))] if any(t["rows"] for t in run["targets"]) else []
    for title, _, header, lines in (*tables(run), *verdicts):
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
    if (busy := warning(run["environment"])) is not None and timed(run):
        console.print(busy, style="bold", markup=False)
    for reason in refusals(run):
        console.print(reason, style="bold", markup=False)
    for note in notes:
        console.print(f"- {note}", style="dim", markup=False)


def refusals(run: Document) -> list[str]:
    """List the parts of the library that were not measured, with the reason: red tests, wrong answers."""
    reasons: dict[str, list[str]] = {}
    for row in run["rows"]:
        found = [row, *(part for part in row.get("evidence", {}).values() if isinstance(part, dict))]
        for reason in dict.fromkeys(part["error"] for part in found if part.get("error", "").startswith("not ")):
            reasons.setdefault(reason, []).append(row["name"])
    return [f"{len(names)} rows, {names[0]} first: {reason}" for reason, names in reasons.items()]


def scope(run: Document) -> str:
    """Write the scope of an incomplete run: its settings, metrics and rounds."""
    settings = sum("evidence" in row for row in run["rows"])
    return f"{settings} settings, metrics {', '.join(run['options']['metrics'])}, {run['options']['repeats']} rounds"


def targets_table(run: Document) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the verdicts of what was measured.

    `ambition`, where any target has one, is a sharper bound and whether it was reached.
    """
    targets = [target for target in run["targets"] if target["rows"]]
    ambitious = any(target.get("ambition") is not None for target in targets)
    lines = []
    for target in targets:
        of = f"{target['statistic']} of {target['rows']}" if target["rows"] > 1 else "-"
        line = [target["id"], target["claim"], of, bound(target), measured(target), target["verdict"]]
        lines.append([*line, ambition(target)] if ambitious else line)
    header = ["id", "ratio", "statistic", "target", "measured", "verdict"]
    return [*header, "ambition"] if ambitious else header, lines


def bound(target: Document) -> str:
    return f"{target['sense']} {target['bound']:g}"


def measured(target: Document) -> str:
    value = "-" if target["measured"] is None else f"{target['measured']:.2f}"
    return value + (f" ({target['wrong']} wrong)" if target["wrong"] else "")


def ambition(target: Document) -> str:
    if target.get("ambition") is None:
        return "-"
    reached = {True: ": reached", False: ": not reached", None: ""}[target["reached"]]
    return f"{target['sense']} {target['ambition']:g}{reached}"


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
                *(number(row["ratios"].get(name)) for name in columns),
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


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def spread(seconds: dict[str, dict[str, float]]) -> str:
    """Largest (high - low)/median over what was timed more than once."""
    spreads = [(t["high"] - t["low"]) / t["median"] for t in seconds.values() if t["turns"] > 1]
    return f"{100 * max(spreads):.0f} %" if spreads else "-"


def machine(run: Document) -> str:
    """One line: what it was measured on."""
    where = run["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["libraries"].items())
    card = ""
    if (gpu := where.get("gpu")) is not None:
        card = f"{gpu['name']}, driver {gpu['driver']}, CUDA {gpu['cuda']}; "
    host = f"{where['cpu']}, {where['cores']} cores, {where['threads']} threads, {where['capability']}"
    if (native := where.get("native")) is not None:
        host += f"; {native}"
    return f"{card}{host}; {versions}"


def markdown(run: Document, source: str, notes: Iterable[str], tables: Tables = tables_of_settings) -> str:
    """The part of the README between its markers."""
    parts = [
        f"From `{source}`, finished {run['finished']}: {machine(run)}.",
        *([markdown_table(*targets_table(run))] if run["targets"] else []),
        *(part for _, intro, header, lines in tables(run) for part in (intro, markdown_table(header, lines))),
        *(["\n".join(f"- {note}" for note in told)] if (told := [*refusals(run), *notes]) else []),
    ]
    if (busy := warning(run["environment"])) is not None and timed(run):
        parts.insert(1, busy)
    return "\n\n".join(parts)


def markdown_table(header: list[str], lines: list[list[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


Figures = Callable[[Document, Path], list[tuple[str, str]]]


def rewrite(
    suite: str,
    notes: Iterable[str],
    *,
    tables: Tables = tables_of_settings,
    figures: Figures | None = None,
    by_metric: tuple[str, ...] = (),
    readme: Path = README,
    folder: Path = RESULTS,
) -> Path | None:
    """Put the newest complete run of a suite on each device between its markers; None where there is no such run.

    `figures` draws into the folder figures/ beside the file, and says names and captions. With the metrics `by_metric`
    the newest run of each takes the place of a complete one; those without a run are named.
    """
    found = [latest for device in DEVICES if (latest := newest(suite, folder, device)) is not None]
    if by_metric:
        found = [pair for device in DEVICES for pair in newest_by_metric(suite, by_metric, folder, device)]
    parts = []
    for path, run in found:
        # Notes on all runs stand below the last.
        told = () if by_metric and path != found[-1][0] else notes
        parts.append(markdown(run, f"{folder.name}/{path.name}", told, tables))
        if figures is not None:
            parts += [f"![{caption}](figures/{name})" for name, caption in figures(run, readme.parent / "figures")]
    missing = [metric for metric in by_metric if not any(metric in run["options"]["metrics"] for _, run in found)]
    if found and missing:
        parts.append(f"Not run yet: {', '.join(missing)}.")
    if found:
        between(readme, f"<!-- results of {suite} -->", f"<!-- end of {suite} -->", "\n\n".join(parts))
    return found[0][0] if found else None


def between(readme: Path, begin: str, end: str, content: str) -> None:
    """Replace what stands between two lines of a file."""
    text = readme.read_text()
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"`{readme.name}` must hold the lines {begin} and {end}, once each and in this order")
    before, rest = text.split(begin)
    _, after = rest.split(end)
    readme.write_text(f"{before}{begin}\n\n{content}\n\n{end}{after}")


__all__ = ["document", "environment", "markdown", "newest", "rewrite", "show", "write"]
