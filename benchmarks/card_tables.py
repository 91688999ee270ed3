"""The tables of what a card was asked, from the rows.jsonl of a call of `bash benchmarks/gpu.sh`."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

from rich.console import Console

from . import report
from .report import Document, Table, number, spread
from .targets import CARD, Row

NOTES = (
    "Attention: fixed points of Gaussian keys, beta*sqrt(D) 2, anchor .5, N queries times sets 2^18, to 1e-3 (float32: "
    "1e-4), by `hopfield_solve` in the precision of the keys, over one explicit step by torch's fastest kernel; with "
    "`read out`: by `equilibrium_attention`. torchdeq (the faster "
    "of its two solvers) and unrolled steps solve the same beside us up to 16k keys, where that is expected to take "
    "less than 1.5 s, with states in float32 and the explicit steps of that fastest kernel. Short ones have 8 sets: "
    "launches are the larger part.",
    "One head of every answer is checked in float64: largest relative residual, and the error of the gradient (beyond "
    "16k keys of 2,048 queries). A wrong answer of ours has no ratio.",
    "Evaluation: mean and log-sum-exp of float32 states, 64 sets of 4096 queries and keys; torch's operations take the "
    "states in the precision of the keys. Errors: the largest against float64, of means relative to their length. In "
    "float32 ours shifts scores by the log-sum-exp before, as from the second evaluation of a solve on.",
    "G rows: B 4, H 16, N = M = 4096, bfloat16; of G1 to G3 inputs are rotated past the cache of the card. G1: an "
    "evaluation of 8 steps; G2: anchor 0, mean evaluations; G3: what more products of the adjoint solve take; both "
    "with the step behind them, and `alone` without it; G4: anchor .5.",
    "Medians of events of the device, in turns. * : a case of the kernel fails in the tests of the same call.",
)


def read(path: Path) -> Document:
    """A run from its rows, as the other suites have them."""
    rows: list[Row] = [json.loads(line) for line in path.read_text().splitlines()]
    first = rows[0]
    finished = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.timezone.utc)
    measured = [row for row in rows if row["part"] in ("attention", "targets", "block")]
    judged = [{"ratios": {}, **row} for row in measured if row["part"] != "attention"]
    return {
        "suite": "card",
        "began": first["began"],
        "finished": finished.isoformat(timespec="seconds"),
        "complete": not any(row["name"] == "skipped" for row in rows),
        "quick": first["dry"],
        "options": {"metrics": sorted({target.id for target in CARD}), "repeats": 3},
        "environment": first["environment"],
        "targets": [target.judge(judged) for target in CARD],
        "rows": rows,
    }


def newest(folder: Path = report.RESULTS) -> tuple[Path, Document] | None:
    """The latest run of a card; dry ones measure nothing."""
    runs = [(path, read(path)) for path in folder.glob("card-*.jsonl")]
    return max((r for r in runs if not r[1]["quick"]), key=lambda pair: pair[1]["began"], default=None)


#: Columns of the main table on the terminal and in short.
SHOWN = (
    *("problem", "ms", "evals", "ours / SDPA", "read out / SDPA", "training / SDPA's", "memory / SDPA's"),
    *("torchdeq / ours", "unrolled / ours"),
)


def of_part(run: Document, part: str) -> list[Row]:
    return [row for row in run["rows"] if row["part"] == part and row["name"] != "skipped"]


def marks(run: Document) -> dict[str, str]:
    """The mark of numbers that depend on a kernel which fails its tests in the same call."""
    failed = [name for row in of_part(run, "tests") for name in row["failed"]]
    solve, adjoint = (any(name.startswith(kernel) for name in failed) for kernel in ("solve_", "adjoint_"))
    return {"forward": "*" if solve else "", "training": "*" if solve or adjoint else ""}


def tables(run: Document) -> list[Table]:
    """One table for every part that has rows."""
    made = [_checks(run)]
    parts = {
        "attention": _attention,
        "evaluation": _evaluations,
        "targets": _targets,
        "block": _blocks,
        "tiles": _tiles,
    }
    for part, table in parts.items():
        if rows := of_part(run, part):
            made.append(table(run, rows))
    return made


def _checks(run: Document) -> Table:
    lines = [
        [row["name"], ", ".join(f"{value:.3g} {unit}" for unit, value in row.get("ratios", {}).items())]
        for row in of_part(run, "ceilings")
    ]
    smoke = of_part(run, "smoke")
    wrong = [f"{row['name']}: {row['error']}" for row in smoke if "error" in row]
    lines.append(["smoke", f"{len(smoke) - len(wrong)} of {len(smoke)} right" + "".join(f"; {w}" for w in wrong)])
    for row in of_part(run, "tests"):
        told = [f"{row['passed']} passed"] if "passed" in row else []
        told.append(f"failed: {', '.join(row['failed']) or 'none'}")
        told += [f"not reached: {len(row['not_reached'])}"] if row.get("not_reached") else []
        told += [row["error"]] if "error" in row else []
        lines.append([f"tests, {row['name']}", "; ".join(told)])
    for row in run["rows"]:
        if row["name"] == "skipped":
            lines.append([f"{row['part']}, out of time", ", ".join(row["skipped"])])
    return Table("the card", "CARD: ceilings and checks:", ["what", "found"], lines)


def _attention(run: Document, rows: list[Row]) -> Table:
    header = ["problem", "best SDPA", "ms", "evals", "ours / SDPA", "an evaluation", "read out / SDPA"]
    header += ["training / SDPA's", "memory / SDPA's", "torchdeq / ours", "training", "unrolled / ours", "memory"]
    header += ["residual", "gradient error", "spread"]
    mark, lines = marks(run), []
    for row in rows:
        ratios, found = row.get("ratios", {}), row.get("evidence", {})
        ours, training, seconds = found.get("ours", {}), found.get("ours_training", {}), row.get("seconds", {})
        best, evaluations = row.get("best_sdpa"), ours.get("evaluations_mean")
        forward = ratios.get("forward")
        reason = row.get("error") or ours.get("error") or training.get("error")
        lines.append(
            [
                row["name"] + (f" ({reason})" if reason else ""),
                "-" if best is None else best.removeprefix("sdpa_"),
                number(1000 * seconds[best]["median"] if best in seconds else None),
                number(evaluations),
                number(forward) + mark["forward"],
                number(forward / evaluations if forward and evaluations else None),
                number(ratios.get("equilibrium_attention")),
                number(ratios.get("training")) + mark["training"],
                *(
                    number(ratios.get(name))
                    for name in ("memory", "torchdeq", "torchdeq training", "unrolled", "unrolled memory")
                ),
                *(
                    f"{part[key]:.0e}" if key in part else "-"
                    for part, key in ((ours, "residual_max"), (training, "gradient_error"))
                ),
                spread(seconds),
            ]
        )
    return Table("attention", "ATTENTION: fixed points beside one explicit step:", header, lines)


def _evaluations(run: Document, rows: list[Row]) -> Table:
    header = ["problem", "by", "ms", "torch / ours", "error of the mean", "of the log-sum-exp"]
    lines = []
    for row in rows:
        seconds, ratio = row.get("seconds", {}), row.get("ratios", {}).get("torch / ours")
        found = row.get("evidence") or {"ours": {"error": row.get("error", "-")}}
        for name, each in found.items():
            lines.append(
                [
                    row["name"] + (f" ({each['error']})" if "error" in each else ""),
                    name,
                    number(1000 * seconds[name]["median"] if name in seconds else None),
                    number(ratio if name == "ours" else None),
                    *(f"{each[key]:.0e}" if key in each else "-" for key in ("mean_error", "logsumexp_error")),
                ]
            )
    intro = "EVALUATION: mean and log-sum-exp of all queries, by our kernel and torch's operations:"
    return Table("evaluation", intro, header, lines)


def _targets(run: Document, rows: list[Row]) -> Table:
    header = ["row", "value", "ms, ours", "best SDPA", "ms", "evals", "residual", "gradient error", "spread"]
    lines = []
    for row in rows:
        seconds = row.get("seconds", {})
        found = row.get("evidence", {})
        found = found.get("fused") or {**found.get("ours_training", {}), **found.get("ours", {})}
        best = row.get("best_sdpa", "-")
        mine = next((seconds[name] for name in ("fused", "many", "ours_training") if name in seconds), None)
        values = ", ".join(f"{k} {number(v)}" for k, v in row["ratios"].items() if k.startswith("G"))
        lines.append(
            [
                row["name"],
                row.get("error") or values,
                number(None if mine is None else 1000 * mine["median"]),
                best.removeprefix("sdpa_"),
                number(1000 * seconds[best]["median"] if best in seconds else None),
                number(found.get("evaluations_mean")),
                *(f"{found[key]:.0e}" if key in found else "-" for key in ("residual_max", "gradient_error")),
                spread(seconds),
            ]
        )
    return Table("targets' rows", "G rows:", header, lines)


def _blocks(run: Document, rows: list[Row]) -> Table:
    header = ["contender", "ms", "evaluations", "products", "residual of the state", "of the adjoint"]
    lines = []
    for row in rows:
        for name, timing in row.get("seconds", {}).items():
            found = row["evidence"].get(name, {})
            lines.append(
                [
                    f"{row['name']}, {name}",
                    number(1000 * timing["median"]),
                    *(str(found.get(key, "-")) for key in ("evaluations", "products")),
                    *(f"{found[key]:.0e}" if key in found else "-" for key in ("state_residual", "adjoint_residual")),
                ]
            )
        ratios = ", ".join(f"{name} {number(value)}" for name, value in row.get("ratios", {}).items())
        lines.append([f"{row['name']}: {row.get('error') or ratios}", *["-"] * 5])
    return Table(
        "block", "BLOCK: a transformer block as a fixed point, and bare loops of as many calls:", header, lines
    )


def _tiles(run: Document, rows: list[Row]) -> Table:
    lines = [
        [row["name"], each["tiles"], each["refused"] or number(1000 * each["seconds"])]
        for row in rows
        for each in row.get("tiles", [{"tiles": "-", "refused": row.get("error", "-")}])
    ]
    intro = "TILES: queries, keys, warps, stages, registers; the first are those in use:"
    return Table("tiles", intro, ["kernel", "tiles", "ms, or why not"], lines)


def show(path: Path) -> None:
    """All tables on the terminal, of the main one what matters most, at its end."""

    def on_screen(run: Document) -> list[Table]:
        *others, main = sorted(tables(run), key=lambda table: table.title == "attention")
        return [*others, picked(main) if main.title == "attention" else main]

    report.show(read(path), (), Console(highlight=False, width=150), on_screen)


def picked(table: Table) -> Table:
    """The main table with the columns that matter most."""
    at = [table.header.index(name) for name in SHOWN]
    return table._replace(header=list(SHOWN), lines=[[line[i] for i in at] for line in table.lines])


def rewrite(readme: Path = report.README, folder: Path = report.RESULTS) -> Path | None:
    """Put the tables of the newest run between their markers; None without one."""
    found, content = newest(folder), "Not run yet."
    if found is not None:
        content = report.markdown(found[1], f"{folder.name}/{found[0].name}", NOTES, tables)
    report.between(readme, "<!-- results of card -->", "<!-- end of card -->", content)
    return None if found is None else found[0]


def in_short(folder: Path = report.RESULTS) -> list[str]:
    """The targets of a card and the main table in bfloat16, as paragraphs; none without a run."""
    found = newest(folder)
    if found is None:
        return []
    path, run = found
    rows = [row for row in of_part(run, "attention") if row.get("dtype") == "bfloat16" and not row.get("causal")]
    _, intro, header, lines = picked(_attention(run, rows))
    card = run["environment"]["gpu"]["name"]
    return [
        report.markdown_table(*report.targets_table(run)),
        f"{intro.removeprefix('ATTENTION: ').capitalize()}",
        report.markdown_table(header, lines),
        f"One {card}. From `{path.name}` ([all of it](../benchmarks/README.md#results-card)).",
    ]
