"""The tables of LOOPED: who predicts how well, what exits save, and what decoding costs."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

from ..report import Table
from ..targets import Row

Verdict = Callable[[Row, Row], str]
#: Ways to read with the tied layers that the guide shows.
SHOWN = ("loop, 1", "loop, 2", "loop, 4", "loop, 8", "loop, 16", "loop, 64", "solved, Picard", "solved, Anderson(1)")
#: The loop that stacks are compared with.
BESIDE = "loop, 4"


def tables(rows: list[Row], verdict: Verdict) -> list[Table]:
    """All tables of a run; none where nothing was trained."""
    if not any("contender" in row for row in rows):
        return []
    made = [contenders(rows, verdict), exits(rows), one_slot(rows), chunks(rows)]
    timed = [row for row in rows if "bytes" in row]
    return [table for table in (*made, *map(decoding, timed)) if table.lines]


def tied_of(rows: list[Row]) -> Row | None:
    return next((row for row in rows if "contender" in row and row["contender"]["kind"] == "tied"), None)


def contenders(rows: list[Row], verdict: Verdict) -> Table:
    """Bits per character of the tied layers by steps and solved, of stacks, and of counts."""
    lines, tied = [], tied_of(rows)
    for row in rows:
        if "contender" not in row:
            continue
        for way, found in row["evidence"].items():
            if way != "stack" and way not in SHOWN:
                continue
            against = "-"
            if tied is not None and row is not tied:
                against = verdict(_scores(row, way), _scores(tied, BESIDE))
            lines.append([*label(row, way), spread(found), against])
    for row in rows:
        lines += counts(row)
    header = ["model", "parameters", "MFLOP a character", "evaluations", "settled %", "bits per character"]
    intro = "Looped: bits per character of held-out text; `verdict`: beside the tied layers after 4 steps:"
    return Table("looped", intro, [*header, "verdict"], lines)


def label(row: Row, way: str) -> list[str]:
    """Name, parameters, FLOPs, evaluations and settled tokens of one way to read."""
    found, layers = row["evidence"][way], row["contender"]["layers"]
    if way == "stack":
        name, evaluations, settled = f"stack of {layers} layers", 1.0, "-"
    elif way.startswith("loop, "):
        evaluations, settled = float(way.removeprefix("loop, ")), "-"
        name = f"{layers} tied layers, {evaluations:g} step" + "s" * (evaluations > 1)
    else:
        name = f"{layers} tied layers, {way}"
        evaluations, settled = found["evaluations"], f"{100 * found['settled']:.1f}"
    flops = row["flops_of_one_evaluation"] * evaluations / 1e6
    return [name, str(row["parameters"]), f"{flops:.2f}", f"{evaluations:.3g}", settled]


def counts(row: Row) -> list[list[str]]:
    """The lines of what counts alone reach: no context, two characters, and the best context."""
    if "counts" not in row:
        return []
    found = row["counts"]
    shown = dict.fromkeys(["0", "2", str(found["best"])])
    names = {"0": "frequencies of characters"}
    return [
        [names.get(one, f"counts, {one} characters before"), *["-"] * 4, f"{found['bits'][one]:.3f}", "-"]
        for one in shown
    ]


def exits(rows: list[Row]) -> Table:
    """What a rule for every token reaches, and the loop that reaches it for all."""
    lines, tied = [], tied_of(rows)
    for way, found in {} if tied is None else tied["evidence"].items():
        if way.startswith(("exit", "solved")):
            equal = [loop_of(run["ways"], run["ways"][way]["bits"]) for run in tied["runs"]]
            numbers = [each for each in equal if each is not None]
            loop = f"{statistics.mean(numbers):.1f}" if len(numbers) == len(equal) else "-"
            cells = [spread(found), f"{found['evaluations']:.2f}", f"{found['most']:g}", loop]
            lines.append([way.removeprefix("exit, "), *cells])
    header = ["tokens end by", "bits per character", "evaluations", "at most", "loop of equal bits"]
    return Table("looped exits", "Exits by rule, of the tied layers:", header, lines)


def loop_of(ways: dict[str, dict[str, Any]], wanted: float) -> float | None:
    """The number of steps at which a loop has these bits; None where all within training's range have more."""
    steps = [int(way.removeprefix("loop, ")) for way in ways if way.startswith("loop, ")]
    for low, high in itertools.pairwise(sorted(steps)):
        above, below = (ways[f"loop, {each}"]["bits"] for each in (low, high))
        if above >= wanted >= below:
            return low + (high - low) * ((above - wanted) / (above - below) if above > below else 0.0)
    return None


def one_slot(rows: list[Row]) -> Table:
    """Bits of text that is decoded with one slot, beside those of the loop."""
    lines, tied = [], tied_of(rows)
    for way, found in {} if tied is None else tied["evidence"].items():
        if way.startswith("decoded, "):
            name = way.removeprefix("decoded, ")
            settled = "-" if "every step" in found else f"{100 * found['settled']:.1f}"
            beside = f"{found['every step']:.3f}" if "every step" in found else "-"
            shown = f"{name} step" + "s" * (name != "1") if name.isdigit() else name
            lines.append([shown, f"{found['evaluations']:.3g}", settled, spread(found), beside])
    header = ["each token", "evaluations", "settled %", "bits, one slot", "bits, a slot for every step"]
    intro = "Decoding one token at a time, which reads the keys that the tokens before it ended with:"
    return Table("looped slots", intro, header, lines)


def chunks(rows: list[Row]) -> Table:
    """The work of long texts, all at once and by chunks, over the seeds."""
    lines, tied = [], tied_of(rows)
    seeds = [] if tied is None else tied["long"]["chunks"]
    for name in seeds[0] if seeds else ():
        work, settled = ([seed[name][what] for seed in seeds] for what in ("work", "settled"))
        over = [seed[name]["work"] / seed["at once"]["work"] for seed in seeds]
        numbers = " ".join(f"{each:.1f}" for each in work)
        lines.append([name, numbers, " ".join(f"{each:.2f}" for each in over), f"{100 * statistics.mean(settled):.1f}"])
    count = tied["long"]["tokens"] if tied is not None and seeds else 0
    header = ["solve", "evaluations of a token, by seed", "work / at once, by seed", "settled %"]
    return Table("looped chunks", f"A text of {count} tokens, solved by the tied layers:", header, lines)


def decoding(row: Row) -> Table:
    """Bytes and time of decoding, in those of one slot."""
    lines, base = [], row["bytes"]["one slot, 1"]
    for name, held in row["bytes"].items():
        kind, _, count = name.partition(", ")
        same = row["seconds"].get(f"every step, {count}")
        seconds = row["seconds"][name]["median"]
        shown = {"one slot": "one slot", "every step": "a slot for every step"}.get(kind, kind)
        shown += f", {count} step" + "s" * (count != "1") if count else ", a slot for every layer"
        lines.append(
            [
                shown,
                str(held),
                f"{held / base:.3g}",
                f"{1000 * seconds / row['tokens']:.2f}",
                "-" if same is None else f"{seconds / same['median']:.2f}",
            ]
        )
    header = ["decoding", "bytes", "bytes / one slot", "ms a token", "time / a slot for every step"]
    return Table("looped decoding", f"Memory and time of decoding {row['tokens']} tokens:", header, lines)


def spread(found: dict[str, Any]) -> str:
    text = f"{found['bits']:.3f}"
    return text if found["bits_std"] is None else f"{text} +- {found['bits_std']:.3f}"


def _scores(row: Row, way: str) -> Row:
    """Bits of every seed, as a row that `verdict` compares."""
    return {"score": "bits", "runs": [{"score": run["ways"][way]["bits"]} for run in row["runs"]]}
