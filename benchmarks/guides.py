"""The parts of both READMEs and of two pages on the newest runs: costs of a solve, and when one step is enough."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

from . import (
    attention_tables,
    card_tables,
    compiled_kernels,
    cost_tables,
    gathering,
    report,
    roofline,
    train_tables,
    useful_tables,
)
from .environment import warning
from .puzzles import mazes
from .puzzles.contenders import values
from .puzzles.tables import percent
from .targets import CARD, Row

DOCS = report.HERE.parent / "docs"
README = DOCS.parent / "README.md"
COSTS, STEPS = DOCS / "performance.md", DOCS / "energy_minimization.md"
BEGIN, END = "<!-- {}: python -m benchmarks report -->", "<!-- end of {} -->"
#: The parts of the page about costs that are written here, and what each is taken from.
PARTS = ("five lines", "settings", "short calls", "lengths", "memory", "models", "on a card")
#: The parts of the page of the benchmarks about the kernels of a GPU, for which no GPU is needed.
KERNELS = ("kernels", "gathering", "roofline")
SUITES = ("solve", "native", "attention", "train")
#: The models of attention repeated over fixed keys whose scores are shown.
MODELS = ("explicit, 1 step", "explicit, 2 steps, own weights", "equilibrium, solved")

Runs = dict[str, tuple[Path, dict[str, Any]]]


def newest(folder: Path = report.RESULTS) -> Runs:
    """The newest complete run on a CPU of every suite that the page about costs tells of."""
    return {suite: found for suite in SUITES if (found := report.newest(suite, folder)) is not None}


def five_lines(folder: Path = report.RESULTS) -> list[str]:
    """Write the costs of an equilibrium: forward, training step, memory, beside torchdeq, and all missing ones."""
    runs = newest(folder)
    missing = [suite for suite in SUITES if suite not in runs]
    if missing:
        return [f"Not run yet: {', '.join(missing)}."]
    rows = [row for row in runs["solve"][1]["rows"] if "evidence" in row]
    forward, training = ([cost_tables.times(row, what) for row in rows] for what in ("forward", "training"))
    evaluations = statistics.mean(row["evidence"]["ours_forward"]["evaluations_mean"] for row in rows)
    rivals = [statistics.geometric_mean(row["ratios"][f"C2 {name}"] for row in rows) for name in ("anderson", "fpi")]
    tiny = _ratios(runs, "native", "SHORT")[0]["forward"]
    llama = _ratios(runs, "train", "LLAMA")[-1]["training / sdpa"]
    memory = _ratios(runs, "attention", "C4")[0]
    blocks = [row["ours / torchdeq"] for row in _ratios(runs, "train", "EQUILIBRIUM")]
    return [
        f"**Forward pass**: a solve to 1e-4 takes {_span(forward)} x one SDPA forward over {len(rows)} settings of 512 "
        f"keys, with {evaluations:.1f} evaluations in the mean; the tiniest call (one head, 16 tokens) {tiny:.0f} x.",
        f"**Training step** with the exact gradient: {_span(training)} x SDPA's; that of a whole Llama at anchor .9 "
        f"{llama:.2f} x.",
        f"**Memory** of a training step at 4096 keys: {memory['C4']:.2f} x SDPA's; with 20 evaluations "
        f"{memory['C4 growth']:.2f} x that with 5 (unrolled {memory['unrolled growth']:.2f} x).",
        f"**torchdeq** takes {rivals[0]:.0f} x (Anderson) and {rivals[1]:.1f} x (fixed-point iteration) our time for "
        f"the same solves, a row per query; for {len(blocks)} repeated blocks and convolutions we take "
        f"{statistics.geometric_mean(blocks):.2f} x ({min(blocks):.2f} to {max(blocks):.2f}) the time of its faster "
        "solver.",
        f"**Never measured**: {_unmeasured(folder)}",
    ]


def _ratios(runs: Runs, suite: str, metric: str) -> list[dict[str, float]]:
    """The ratios of every row of a metric that was timed, in their order."""
    return [row["ratios"] for row in runs[suite][1]["rows"] if row["metric"] == metric and not row.get("memory")]


def _span(ratios: list[float]) -> str:
    return f"{statistics.geometric_mean(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"


def _unmeasured(folder: Path) -> str:
    """Write which costs were never measured; a run on a card, once there is one, is not passed over."""
    found = card_tables.newest(folder)
    judged = [target.judge([]) for target in CARD] if found is None else found[1]["targets"]
    measured = {target["id"] for target in judged if target["rows"]}
    missing = list(dict.fromkeys(target["id"] for target in judged if target["id"] not in measured))
    first = f"the targets of a GPU ({', '.join(missing)}), " if missing else ""
    return f"{first}more than one machine, and a larger model than a Llama of width 512 with 4 layers."


def tables(runs: Runs) -> dict[str, list[str]]:
    """The other parts of the page about costs, as paragraphs; those whose suite has not run are left out."""
    made: dict[str, list[str]] = {}
    if "solve" in runs:
        made["settings"] = [report.markdown_table(*cost_tables.settings(runs["solve"][1]["rows"]))]
    if "native" in runs:
        made["short calls"] = [report.markdown_table(*cost_tables.short_calls(runs["native"][1]["rows"]))]
    if "attention" in runs:
        made["lengths"] = [report.markdown_table(*cost_tables.lengths(runs["attention"][1]["rows"]))]
        made["memory"] = _picked(attention_tables.tables(runs["attention"][1]), ("C4",))
    if "train" in runs:
        made["models"] = [
            *_picked(train_tables.tables(runs["train"][1]), ("BLOCK", "LLAMA")),
            cost_tables.BLOCKS,
            report.markdown_table(*cost_tables.blocks(runs["train"][1]["rows"])),
        ]
    source = {"settings": "solve", "short calls": "native", "lengths": "attention", "memory": "attention"}
    for part, told in made.items():
        told.append(_from(*runs[source.get(part, "train")]))
    return made


def on_a_card(folder: Path = report.RESULTS) -> list[str]:
    """The newest run of a card; until there is one, what an older one says of times by length. Nothing without either.

    In the older one a contender that was timed once was compiled by that call, and is left out.
    """
    if told := card_tables.in_short(folder):
        return told
    for path, run in report.newest_by_metric("attention", ("LENGTH",), folder, "cuda"):
        told = []
        for dtype in ("float32", "bfloat16"):
            rows = [row for row in run["rows"] if row["dtype"] == dtype]
            lengths = [row["shape"]["length"] for row in rows]
            spans = {
                name: [row["ratios"][name] for row in rows if name in row["ratios"] and _repeated(row, contender)]
                for name, contender in (("ours", "ours_forward"), ("Picard", "picard"))
            }
            shown = ", ".join(f"{name} {_span(ratios)}" for name, ratios in spans.items())
            told.append(f"{dtype}, N = M from {min(lengths)} to {max(lengths)}: {shown}")
        card = run["environment"]["gpu"]["name"]
        return [
            f"Forward solves on one {card}, in forwards of torch's fastest SDPA kernel there, geometric mean (least to "
            f"most): {'; '.join(told)}. From `{path.name}` in `benchmarks/results/`."
        ]
    return []


def kernels(folder: Path = report.RESULTS) -> dict[str, list[str]]:
    """Of the kernels without masks, what the compiler made and, on an H100, bounds them; of tiles, what they waste.

    As paragraphs by part; none before they were compiled or counted.
    """
    made = {}
    runs = {
        arch: [run for version in compiled_kernels.TRITONS if (run := report.newest(arch, folder, triton=version))]
        for arch in ("kernels_sm_90a", "kernels_sm_80")
    }
    if found := list(itertools.chain.from_iterable(runs.values())):
        plain = [{**run, "rows": [row for row in run["rows"] if row["kind"] == "plain"]} for _, run in found]
        source = (
            f"From {', '.join(f'`{path.name}`' for path, _ in found)} in `benchmarks/results/`, which have "
            "causal and masked queries, too."
        )
        made["kernels"] = [*_whole(compiled_kernels, *plain), source]
        made["roofline"] = _whole(roofline, *(run for _, run in runs["kernels_sm_90a"]))
    if found := report.newest("gathering", folder):
        made["gathering"] = [*_whole(gathering, found[1]), f"From `{found[0].name}` in `benchmarks/results/`."]
    return made


def _whole(suite: Any, *runs: dict[str, Any]) -> list[str]:
    """The one table of a suite for each of the runs, with its notes, as paragraphs."""
    found = [table for run in runs for table in suite.tables(run)]
    return [
        *(part for _, intro, header, lines in found for part in (intro, report.markdown_table(header, lines))),
        *suite.NOTES,
    ]


def _repeated(row: Row, contender: str) -> bool:
    return contender in row["seconds"] and row["seconds"][contender]["turns"] > 1


def _picked(found: list[report.Table], names: tuple[str, ...]) -> list[str]:
    """The tables whose sentence begins with one of the names, as paragraphs."""
    return [
        part
        for _, intro, header, lines in found
        if intro.startswith(names)
        for part in (intro, report.markdown_table(header, lines))
    ]


def _from(path: Path, run: dict[str, Any]) -> str:
    load = run["environment"]["load_average_at_start"]
    told = f"From `{path.name}` ([all of it](../benchmarks/README.md#results-{run['suite']})"
    told += ")." if load is None else f", load {load[0]:.1f})."
    return told if warning(run["environment"]) is None else f"{told} Other work shared the cores: not reliable."


def one_step(folder: Path = report.RESULTS) -> str:
    """Two tables: one step beside the equilibrium over fixed keys, and a repeated block as a loop and solved."""
    tasks = ("DIGITS", "RETRIEVAL", "TEXT")
    found = {metric: report.newest_by_metric("usefulness", (metric,), folder) for metric in tasks}
    lines, paths = [], []
    for metric, runs in found.items():
        for path, run in runs:
            rows = {row["model"]["name"]: row for row in run["rows"] if "model" in row}
            unit = "accuracy, %" if rows[MODELS[0]]["score"] == "accuracy" else "bits per character"
            verdict = useful_tables.verdict(rows["equilibrium, solved"], rows["explicit, 1 step"])
            scores = [useful_tables.score(rows[name]) for name in MODELS]
            lines.append([f"{metric.lower()} ({unit})", *scores, verdict])
            paths.append(path)
    header = ["task", "one step", "two layers of one step", "equilibrium", "equilibrium against one step"]
    parts = [report.markdown_table(header, lines)] if lines else ["Not run yet."]
    if runs := report.newest_by_metric("usefulness", ("MAZES",), folder):
        path, run = runs[0]
        paths.append(path)
        (row,) = (row for row in run["rows"] if row["contender"] == mazes.PLAN.leader[0])
        sizes = [f"{size} x {size}" for size in mazes.SIZES]
        ways = {"as a loop of 12 steps": "12 steps", "solved": "solved"}
        lines = [
            [name, *(percent(values(row["runs"], way, each)) for each in mazes.SHOWN)] for name, way in ways.items()
        ]
        parts += [
            "A block that is repeated over moving states, trained on mazes of 5 x 5; mazes wholly right, in %:",
            report.markdown_table(["the same weights", *sizes], lines),
        ]
    if paths:
        names = ", ".join(f"`{path.name}`" for path in dict.fromkeys(paths))
        parts.append(f"From {names} in `benchmarks/results/`; all contenders are in `benchmarks/README.md`.")
    return "\n\n".join(parts)


def rewrite(
    costs: Path = COSTS,
    steps: Path = STEPS,
    readme: Path = README,
    benchmarks: Path = report.README,
    folder: Path = report.RESULTS,
) -> None:
    """Put what the newest runs say between the markers of the pages."""
    lines = "\n".join(f"{n}. {line}" for n, line in enumerate(five_lines(folder), 1))
    report.between(readme, BEGIN.format("five lines"), END.format("five lines"), lines)
    made = {"five lines": [lines], "on a card": on_a_card(folder)} | kernels(folder) | tables(newest(folder))
    for page, parts in ((costs, PARTS), (benchmarks, KERNELS)):
        for part in parts:
            content = "\n\n".join(made.get(part) or ["Not run yet."])
            report.between(page, BEGIN.format(part), END.format(part), content)
    report.between(steps, BEGIN.format("one step"), END.format("one step"), one_step(folder))
