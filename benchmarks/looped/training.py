"""The training of LOOPED, and what is asked of the weights that it made."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from implicit_attention import Anderson
from implicit_attention.layers import Exit

from ..useful_tasks import Examples, drawn_windows, help_texts, windows
from .data import LENGTH
from .models import CAP, RATIO, RTOL, SETTINGS, WIDTH, Contender, Norm, OneSlot, Reader

#: A training draws 2 to 8 steps; a loss of this weight on the last step's change grows from the middle of it on.
DRAWN, REST = range(2, 9), 0.3
#: Loops that are asked for, those in training's range one by one.
LOOPS = (1, 2, 3, 4, 5, 6, 8, 16, 64)
#: Numbers of evaluations of a token that is decoded with one slot.
DECODED = (1, 2, 4, 8, 16)
#: The tokens of a long text, and of the chunks that it is solved by.
LONG, CHUNKS = 1024, (16, 64, 256)
#: Windows that are read at once, and every so many of them are decoded.
AT_ONCE, EACH = 64, 4


@dataclasses.dataclass(frozen=True)
class Plan:
    """The training of every contender; `held` windows, of `length` characters each, to validate and to test."""

    updates: int = 700
    batch: int = 12
    #: How many norms and rates are tried; None for all.
    tries: int | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    held: int = 128
    length: int = LENGTH

    def quick(self) -> Plan:
        return dataclasses.replace(self, updates=3, batch=4, tries=1, seeds=self.seeds[:1], held=4, length=12)

    def settings(self, contender: Contender) -> tuple[tuple[Norm, float], ...]:
        """Norms and rates to try."""
        return SETTINGS[contender.kind][: self.tries]


def loss(reader: Reader, examples: Examples, done: float) -> Tensor:
    """Cross-entropy; of a loop after a number of steps that is drawn, and late in the training the last one's change.

    Rest is asked for late: asked for at once, states come to rest before they answer anything.
    """
    targets = examples.targets.flatten()
    if not reader.loops:
        return F.cross_entropy(reader(examples.inputs).flatten(0, 1), targets)
    x, steps = reader.embed(examples.inputs), DRAWN[int(torch.randint(len(DRAWN), ()))]
    before = reader.body(x, steps=steps - 1)
    z = reader.body(x, steps=1, start=before)
    wrong = F.cross_entropy(reader.head(z).flatten(0, 1), targets)
    weight = REST * min(max(4 * done - 2, 0), 1)
    if not weight:
        return wrong
    return wrong + weight * ((z - before).norm(dim=-1) / z.detach().norm(dim=-1)).mean()


def trained(contender: Contender, plan: Plan, seed: int, norm: Norm, rate: float) -> tuple[Reader, float]:
    """A reader after its training, and the seconds of it."""
    given = help_texts()
    torch.manual_seed(seed)
    reader = Reader(contender, len(given.alphabet), norm)
    optimizer = torch.optim.AdamW(reader.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=plan.updates, pct_start=0.15)
    generator, begin = torch.Generator().manual_seed(seed), time.perf_counter()
    for update in range(plan.updates):
        optimizer.zero_grad()
        loss(reader, drawn_windows(given.train, LENGTH, plan.batch, generator), update / plan.updates).backward()
        nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return reader.eval(), time.perf_counter() - begin


def kept(keep: Path, contender: Contender, plan: Plan, seed: int, norm: Norm, rate: float) -> tuple[Reader, float]:
    """The same, or what the folder `keep` has of such a training."""
    path = keep / f"{_name(contender, plan, seed, norm, rate)}.pt"
    if not path.exists():
        reader, seconds = trained(contender, plan, seed, norm, rate)
        keep.mkdir(parents=True, exist_ok=True)
        torch.save({"weights": reader.state_dict(), "seconds": seconds}, path)
    held = torch.load(path)
    reader = Reader(contender, len(help_texts().alphabet), norm)
    reader.load_state_dict(held["weights"])
    return reader.eval(), float(held["seconds"])


def _name(contender: Contender, plan: Plan, seed: int, norm: Norm, rate: float) -> str:
    what = f"looped {contender.name} {norm} {rate:g} {seed} {plan.updates} {plan.batch}"
    return re.sub(r"[^a-z0-9]+", "-", what)


# What is asked.


@torch.no_grad()
def bits(reader: Reader, examples: Examples, **options: Any) -> dict[str, float]:
    """Bits per character, and what the solves say: evaluations of a token, those in tolerance, those a rule ended."""
    surprise, found = 0.0, []
    for inputs, targets in zip(*(part.split(AT_ONCE) for part in examples), strict=True):
        scores = reader(inputs, **options)
        surprise += float(F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum"))
        if reader.loops and "steps" not in options:
            found.append(_of_tokens(reader.repeated.last_solve))
    told = {"bits": surprise / math.log(2) / examples.targets.numel()}
    return told | (_evidence(*(torch.cat(parts) for parts in zip(*found, strict=True))) if found else {})


def _of_tokens(report: Any) -> tuple[Tensor, Tensor]:
    return report.num_evals.flatten(), report.converged.flatten()


def _evidence(evaluations: Tensor, converged: Tensor) -> dict[str, float]:
    return {
        "evaluations": float(evaluations.double().mean()),
        "most": int(evaluations.max()),
        "settled": float(converged.double().mean()),
        "settled in 16": float((converged & (evaluations <= 16)).double().mean()),
    }


@torch.no_grad()
def decoded(reader: Reader, examples: Examples, *, warm_start: bool = False, **options: Any) -> dict[str, float]:
    """Bits per character of text that is read one token at a time, with one slot for every attention."""
    inputs, targets = (part[::EACH] for part in examples)
    decoder, surprise = OneSlot(reader, warm_start=warm_start, **options), 0.0
    for place in range(inputs.shape[1]):
        scores = decoder(inputs[:, place : place + 1])
        surprise += float(F.cross_entropy(scores[:, 0], targets[:, place], reduction="sum"))
    cache = decoder.cache
    assert cache.num_evals is not None
    assert cache.status is not None
    return {
        "bits": surprise / math.log(2) / targets.numel(),
        "evaluations": float(cache.num_evals.double().mean()),
        "settled": float((cache.status == 0).double().mean()),
    }


def counted_decoding(reader: Reader, examples: Examples, steps: int) -> dict[str, float]:
    """The same with a number of evaluations for every token, and the bits of as many steps with a slot for each."""
    every = bits(reader, Examples(*(part[::EACH] for part in examples)), steps=steps)["bits"]
    return decoded(reader, examples, exit=Exit(evaluations=steps)) | {"every step": every}


def ways(reader: Reader) -> Iterator[tuple[str, Callable[[Examples], dict[str, float]]]]:
    """All ways to read with a tied reader, by name."""

    def by(function: Callable[..., dict[str, float]], **options: Any) -> Callable[[Examples], dict[str, float]]:
        return lambda examples: function(reader, examples, **options)

    for steps in LOOPS:
        yield f"loop, {steps}", by(bits, steps=steps)
    yield "solved, Picard", by(bits)
    yield "solved, Anderson(1)", by(bits, solver=Anderson(rtol=RTOL, history=1, max_steps=CAP))
    for name, options in exits(reader):
        yield name, by(bits, **options)
    for steps in DECODED:
        yield f"decoded, {steps}", by(counted_decoding, steps=steps)
    yield "decoded, exit at a change of 0.3", by(decoded, exit=Exit(rtol=0.3))
    yield "decoded, solved", by(decoded)
    yield "decoded, solved, warm start", by(decoded, warm_start=True)


def exits(reader: Reader) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rules by which single tokens end before they have settled, as options of a call."""
    for rtol in (0.5, 0.3, 0.2, 0.1, 0.05):
        yield f"exit, change {rtol:g}", {"exit": Exit(rtol=rtol)}
    for count in (2, 4):
        yield f"exit, {count} evaluations", {"exit": Exit(evaluations=count)}
    for mean in (2.0, 2.5, 3.0, 4.0):
        yield f"exit, mean {mean:g}", {"exit": Exit(mean=mean)}
    for nats in (0.1, 0.03, 0.01, 0.003):
        yield f"exit, read-out {nats:g} nats", {"exit": Exit(readout=reader.head, nats=nats)}


def asked(reader: Reader, examples: Examples) -> dict[str, dict[str, float]]:
    """Everything that the table tells of a reader."""
    if not reader.loops:
        return {"stack": bits(reader, examples)}
    return {name: ask(examples) for name, ask in ways(reader)}


def answers(keep: Path, contender: Contender, plan: Plan, seed: int, norm: Norm, rate: float) -> dict[str, Any]:
    """The same of a training on the windows to test, or what the folder `keep` has of it; with its seconds."""
    reader, seconds = kept(keep, contender, plan, seed, norm, rate)
    given = [plan.held, plan.length, [name for name, _ in ways(reader)] if reader.loops else []]
    path = keep / f"{_name(contender, plan, seed, norm, rate)}.json"
    if path.exists() and (known := json.loads(path.read_text()))["asked"] == given:
        return dict(known["found"])
    found = {"seed": seed, "seconds": seconds, "ways": asked(reader, held_out(plan)[1])}
    path.write_text(json.dumps({"asked": given, "found": found}) + "\n")
    return found


@torch.no_grad()
def chunked(reader: Reader, count: int = LONG) -> dict[str, dict[str, float]]:
    """The work of a solve of one long text, all tokens at once and by chunks: evaluations times tokens, for a token."""
    codes, work = help_texts().test[None, :count], 0

    def seen(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        nonlocal work
        work += arguments[0].shape[:-1].numel()

    handle, found = reader.repeated.block.register_forward_pre_hook(seen), {}
    try:
        for chunk in (None, *CHUNKS):
            work = 0
            reader(codes, chunk=chunk)
            name = "at once" if chunk is None else f"chunks of {chunk}"
            found[name] = {"work": work / count, **_evidence(*_of_tokens(reader.repeated.last_solve))}
    finally:
        handle.remove()
    return found


def flops(contender: Contender, evaluations: float) -> float:
    """FLOPs of the layers for one character: projections and feed-forward part, and half a window of keys."""
    one = contender.layers * int(2 * WIDTH * WIDTH * (4 + 2 * RATIO) + 4 * WIDTH * (LENGTH + 1) / 2)
    return one * (evaluations if contender.kind == "tied" else 1)


def held_out(plan: Plan) -> tuple[Examples, Examples]:
    """Windows to validate and to test."""
    given, count = help_texts(), plan.length
    parts = (windows(part, LENGTH, plan.held) for part in (given.validation, given.test))
    validation, test = (Examples(*(t[:, :count] for t in part)) for part in parts)
    return validation, test
