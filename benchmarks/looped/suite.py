"""LOOPED as a part of the suite `usefulness`: its settings, rows and notes."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ..measure import interleaved, once
from ..targets import Row, Target
from ..useful_tasks import help_texts
from .data import CONTEXTS, LENGTH, counted, described
from .models import CAP, HEADS, RATIO, RTOL, SETTINGS, WIDTH, Contender, OneSlot, Reader, Slots
from .training import CHUNKS, DRAWN, LONG, REST, Plan, answers, bits, chunked, flops, held_out, kept

METRIC = "LOOPED"
TIED, SAME_PARAMETERS, SAME_FLOPS = Contender("tied", 2), Contender("stack", 2), Contender("stack", 8)
#: Side by side, two at a time: those that take longest first.
CONTENDERS = (TIED, SAME_FLOPS, SAME_PARAMETERS)
#: The ways to cut a long text.
CUT = tuple(f"chunks of {chunk}" for chunk in CHUNKS)
#: What is to hold.
TARGETS = (
    Target(
        METRIC,
        f"evaluations x tokens of a solve of {LONG} tokens: by chunks of 64 / all at once, worst of three seeds",
        "work, chunks of 64 / at once",
        "worst",
        "<=",
        0.8,
        lambda row: row["metric"] == METRIC,
    ),
)
#: Tokens that are decoded, and the evaluations of each, for time and memory.
TOKENS, EVALUATIONS = 64, (1, 4, 16)

NOTES = (
    "LOOPED: the next character of pydoc_data.topics (eight tenths to train, one to validate, one to test) in windows "
    f"of {LENGTH} that do not overlap. Embedding of width {WIDTH}, causal transformer layers ({HEADS} heads, rotary "
    f"positions, feed-forward part {RATIO:g} times as wide), linear head. `tied`: an `EquilibriumTransformer` of two "
    f"layers, trained in loops of {DRAWN[0]} to {DRAWN[-1]} steps, drawn for every batch, with a loss of weight "
    f"{REST:g} on the last step's relative change from the middle of the training on. Stacks have layers of their own.",
    f"All see the same {Plan().updates} batches of {Plan().batch} windows: AdamW (weight decay .01, clipped at norm "
    "1), one cycle; norm (post, pre) and rate are the best of "
    + "; ".join(f"{kind} {', '.join(f'{norm} {rate:g}' for norm, rate in tried)}" for kind, tried in SETTINGS.items())
    + f" on {Plan().held} windows of the validation part with the first seed. Test: {Plan().held} windows at equal "
    "distances. Means +- standard deviations over three seeds.",
    f"`solved`: each token to the relative residual {RTOL:g}, at most {CAP} evaluations. `settled`: the part of the "
    "tokens that have, with all before them. `loop of equal bits`: the (fractional) number of steps at which a loop "
    "without exits has the same bits, on the line between whole numbers. FLOPs are of the layers, for one character.",
    f"Chunks: one text of {LONG} tokens, solved all at once or by chunks, each beside the settled tokens before it; "
    "work is the number of tokens in all evaluations of the block, over that of the text.",
    "`counts`: the characters after a context, interpolated with shorter contexts (Witten and Bell); the context "
    f"is the best one of {CONTEXTS[0]} to {CONTEXTS[-1]} characters on the validation part.",
    f"Decoding: {TOKENS} tokens of one text, contenders in turns in one process, one thread. `one slot`: "
    "`model.new_cache()` and `steps=...`; `a slot for every step`: written by hand, token t at step j "
    "reads the keys of step j, as in the loop; both with the same weights. Bits are of every fourth window.",
)


@dataclasses.dataclass(frozen=True)
class Trained:
    """One contender and its trainings."""

    contender: Contender
    plan: Plan
    metric: str = METRIC

    @property
    def name(self) -> str:
        return f"looped: {self.contender.name}"


@dataclasses.dataclass(frozen=True)
class Counted:
    """What counts alone reach."""

    plan: Plan
    metric: str = METRIC
    name: str = "looped: counts"


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Time and memory of decoding."""

    plan: Plan
    metric: str = METRIC
    name: str = "looped: decoding"


Setting: TypeAlias = Trained | Counted | Decoding


def settings_of(quick: bool) -> tuple[Setting, ...]:
    plan = Plan().quick() if quick else Plan()
    return (*(Trained(one, plan) for one in CONTENDERS), Counted(plan), Decoding(plan))


def updates_of(settings: list[Trained]) -> int:
    return sum(s.plan.updates * (len(s.plan.settings(s.contender)) + len(s.plan.seeds) - 1) for s in settings)


def trained_row(setting: Trained, keep: Path | None = None) -> Row:
    """The row of a contender: its best setting, and what is asked of the weights of every seed."""
    if keep is None:
        with tempfile.TemporaryDirectory() as folder:
            return trained_row(setting, Path(folder))
    begin, plan, contender = time.perf_counter(), setting.plan, setting.contender
    validation, _ = held_out(plan)
    tried, loop = {}, {"steps": 4} if contender.kind == "tied" else {}
    for norm, rate in plan.settings(contender):
        reader, _ = kept(keep, contender, plan, plan.seeds[0], norm, rate)
        tried[norm, rate] = bits(reader, validation, **loop)["bits"]
    norm, rate = min(tried, key=lambda key: tried[key])
    runs = [answers(keep, contender, plan, seed, norm, rate) for seed in plan.seeds]
    evidence = {way: averaged([run["ways"][way] for run in runs]) for way in runs[0]["ways"]}
    shown = ("loop, 4", "solved, Picard", "stack")
    long = min(LONG, 64 * plan.updates)
    chunks = [chunked(kept(keep, contender, plan, seed, norm, rate)[0], long) for seed in plan.seeds if loop]
    work = {
        f"work, {name} / at once": max(one[name]["work"] / one["at once"]["work"] for one in chunks)
        for name in CUT
        if chunks
    }
    return {
        "name": setting.name,
        "metric": METRIC,
        "contender": {**dataclasses.asdict(contender), "name": contender.name},
        "threads": torch.get_num_threads(),
        "data": described(plan.held),
        "plan": dataclasses.asdict(plan),
        "setting": {"norm": norm, "rate": rate},
        "validation": {f"{norm} {rate:g}": found for (norm, rate), found in tried.items()},
        "parameters": sum(p.numel() for p in Reader(contender, len(help_texts().alphabet), norm).parameters()),
        "flops_of_one_evaluation": flops(contender, 1),
        "runs": runs,
        "evidence": evidence,
        "long": {"tokens": long, "chunks": chunks},
        "ratios": {f"bits, {way}": evidence[way]["bits"] for way in shown if way in evidence} | work,
        "wall_seconds": time.perf_counter() - begin,
    }


def averaged(found: list[dict[str, float]]) -> dict[str, float | None]:
    """Means of all numbers, and the standard deviation of the bits."""
    told: dict[str, float | None] = {name: statistics.mean(each[name] for each in found) for name in found[0]}
    several = len(found) > 1
    return told | {"bits_std": statistics.stdev(each["bits"] for each in found) if several else None}


def counted_row(setting: Counted) -> Row:
    begin, found = time.perf_counter(), counted(setting.plan.held)
    row = {"name": setting.name, "metric": METRIC, "counts": found, "data": described(setting.plan.held)}
    ratios = {f"bits, context {found['best']}": found["bits"][str(found["best"])]}
    return {**row, "evidence": {}, "ratios": ratios, "wall_seconds": time.perf_counter() - begin}


def decoding_row(setting: Decoding, repeats: int, max_seconds: float) -> Row:
    """Seconds and bytes of decoding, with the weights of the beginning: fixed evaluations cost what they cost."""
    begin, given = time.perf_counter(), help_texts()
    tokens = TOKENS if setting.plan.updates > 10 else 4
    torch.manual_seed(0)
    tied, stack = (Reader(one, len(given.alphabet)).eval() for one in (TIED, SAME_FLOPS))
    written = given.test[None, :tokens]
    makers: dict[str, Callable[[], Any]] = {"stack of 8 layers": functools.partial(Slots, stack, tokens)}
    for count in EVALUATIONS:
        makers[f"one slot, {count}"] = functools.partial(OneSlot, tied, steps=count)
        makers[f"every step, {count}"] = functools.partial(Slots, tied, tokens, count)
    functions = {name: functools.partial(read, make, written) for name, make in makers.items()}
    first, held = {}, {}
    for name, function in functions.items():
        decoder, first[name] = once(function)
        held[name] = decoder.num_bytes
    times = interleaved(functions, first, repeats=repeats, max_seconds=max_seconds)
    pairs = {count: [times[f"{kind}, {count}"].median for kind in ("one slot", "every step")] for count in EVALUATIONS}
    return {
        "name": setting.name,
        "metric": METRIC,
        "threads": torch.get_num_threads(),
        "tokens": tokens,
        "evidence": {},
        "seconds": {name: dataclasses.asdict(timing) for name, timing in times.items()},
        "bytes": held,
        "ratios": {f"time of one slot / every step, {count}": ours / theirs for count, (ours, theirs) in pairs.items()},
        "wall_seconds": time.perf_counter() - begin,
    }


@torch.no_grad()
def read(make: Callable[[], Any], written: torch.Tensor) -> Any:
    """A decoder that has read a text (1, N) token by token."""
    decoder = make()
    for place in range(written.shape[1]):
        decoder(written[:, place : place + 1])
    return decoder
