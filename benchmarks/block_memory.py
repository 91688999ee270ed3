"""The peak memory of a block's training step by evaluations: `python -m benchmarks.block_memory SETTING STEP`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from implicit_attention import Equilibrium, Reversible

from . import guard
from .block_equilibrium import TESTS, Data, EquilibriumSetting, draw, ours
from .measure import Timing, interleaved, once
from .memory import begin, found_apart, peak
from .targets import Row

#: Evaluations of the block; the growth is from the first to the last.
COUNTS = (5, 20, 80)
#: Evaluations of the unrolled step, which keeps them all.
UNROLLED = (5, 20)
#: Reversible steps, each of two evaluations; the growth is from the first to the last.
REVERSIBLE = (8, 64)
#: A step of the same kind on so little loads what is loaded once: threads, kernels, autograd.
WARM_UP = {"batch": 1, "length": 16}
GROWTH = "memory growth"
REVERSIBLE_GROWTH = "memory growth, reversible"
#: The time of reversible steps over that of the same steps, recorded by autograd.
REVERSIBLE_TIME = "reversible / unrolled"
DAMPING = 0.5


@dataclasses.dataclass(frozen=True)
class MemorySetting(EquilibriumSetting):
    """Sizes of the block whose memory is measured."""

    batch: int = 4
    length: int = 512

    @property
    def name(self) -> str:
        return f"memory of a {super().name}"


def step_of(name: str, data: Data) -> Callable[[], Any]:
    """The training step `implicit K` or `unrolled K`, with K evaluations of the block for every sample.

    `reversible K` and `coupled K` make K steps of two evaluations each, which are run backwards or recorded.
    """
    kind, _, number = name.partition(" ")
    if kind == "implicit":
        return ours(data, rtol=data.block.setting.rtol, evaluations=int(number))
    if kind == "reversible":
        layer = Equilibrium(data.block, steps=int(number), adjoint=Reversible(damping=DAMPING))

        def reversible() -> None:
            data.block.zero_grad(set_to_none=True)
            layer(data.x).backward(data.cotangent)

        return reversible

    def coupled() -> None:
        data.block.zero_grad(set_to_none=True)
        y = z = torch.zeros_like(data.x)
        for _ in range(int(number)):
            y = torch.lerp(data.block(z, data.x), y, DAMPING)
            z = torch.lerp(data.block(y, data.x), z, DAMPING)
        z.backward(data.cotangent)

    def unrolled() -> None:
        data.block.zero_grad(set_to_none=True)
        z = torch.zeros_like(data.x)
        for _ in range(int(number)):
            z = data.block(z, data.x)
        z.backward(data.cotangent)

    return coupled if kind == "coupled" else unrolled


def memory_row(setting: MemorySetting, *, repeats: int, max_seconds: float) -> Row:
    """Peak memory of implicit, unrolled and reversible training steps."""
    if (reason := guard.red(TESTS)) is not None:
        missing = dict.fromkeys((GROWTH, REVERSIBLE_GROWTH, REVERSIBLE_TIME))
        return {"evidence": {"ours": {"error": reason}}, "seconds": {}, "ratios": missing}
    names = [*(f"implicit {count}" for count in COUNTS), *(f"unrolled {count}" for count in UNROLLED)]
    names += [f"reversible {count}" for count in REVERSIBLE]
    found = {name: found_apart("benchmarks.block_memory", setting, name, needed) for name in names}
    peaks = {name: part.get("peak_bytes") for name, part in found.items()}
    first, last, same = (f"implicit {COUNTS[0]}", f"implicit {COUNTS[-1]}", UNROLLED[-1])
    wanted = {GROWTH: (last, first), "unrolled / ours": (f"unrolled {same}", f"implicit {same}")}
    wanted[REVERSIBLE_GROWTH] = (f"reversible {REVERSIBLE[-1]}", f"reversible {REVERSIBLE[0]}")
    made = {label: peaks[a] / peaks[b] if peaks[a] and peaks[b] else None for label, (a, b) in wanted.items()}
    times = _timed(setting, repeats, max_seconds)
    made[REVERSIBLE_TIME] = times["reversible"].median / times["coupled"].median
    seconds = {name: dataclasses.asdict(timing) for name, timing in times.items()}
    return {"evidence": found, "seconds": seconds, "ratios": made}


def _timed(setting: MemorySetting, repeats: int, max_seconds: float) -> dict[str, Timing]:
    """Training steps of the fewest reversible steps, run backwards and recorded, in turns."""
    data, first = draw(setting), {}
    functions = {kind: step_of(f"{kind} {REVERSIBLE[0]}", data) for kind in ("reversible", "coupled")}
    for name, function in functions.items():
        function()
        first[name] = once(function, setting.device)[1]
    return interleaved(functions, first, repeats=repeats, max_seconds=2 * max_seconds, device=setting.device)


def needed(setting: MemorySetting, name: str) -> dict[str, Any]:
    """Warm up, take the step once, and return what it needed."""
    step_of(name, draw(dataclasses.replace(setting, **WARM_UP)))()
    data = draw(setting)
    run = step_of(name, data)
    before = begin(setting.device)
    run()
    return {"peak_bytes": peak(setting.device) - before, "baseline_bytes": before}


if __name__ == "__main__":
    print(json.dumps(needed(MemorySetting(**json.loads(sys.argv[1])), sys.argv[2])))
