"""The processes of the suite `scale`: what they exchange is counted, and what they do together takes turns."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed

from .measure import TURN_SECONDS, summary

#: Collectives by which processes may exchange something.
_NAMES = ("all_reduce", "broadcast", "reduce", "barrier", "all_gather", "all_gather_into_tensor", "all_gather_single")
COLLECTIVES = tuple(name for name in _NAMES if hasattr(distributed, name))

#: How many processes call a function together, and the function.
Calls = tuple[int, Callable[[], Any]]


@dataclasses.dataclass
class Traffic:
    """Collectives that were called, the bytes given to them, and the seconds until they returned."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Counts the collectives of torch.distributed that are called within."""
    traffic, originals = Traffic(), {name: getattr(distributed, name) for name in COLLECTIVES}

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **options)
            traffic.seconds += time.perf_counter() - begin
            traffic.calls += 1
            given = [t for t in (*args, *options.values()) if isinstance(t, Tensor)]
            traffic.bytes += given[-1].nbytes if given else 0
            return result

        return call

    try:
        for name, function in originals.items():
            setattr(distributed, name, watched(function))
        yield traffic
    finally:
        for name, function in originals.items():
            setattr(distributed, name, function)


@dataclasses.dataclass(frozen=True)
class Team:
    """The processes, and how long they measure."""

    rank: int
    groups: dict[int, Any]
    repeats: int
    max_seconds: float

    def part(self, keys: Tensor, size: int) -> Tensor:
        """The keys that this process holds of all, beside so many others."""
        return keys.tensor_split(size, dim=-2)[self.rank].clone()

    def turns(self, functions: dict[str, Calls]) -> dict[str, dict[str, dict[str, float]]]:
        """Seconds per call of functions that so many processes call together, in turns.

        Returns:
            seconds: to the end of the call. local_seconds: outside collectives. Both of the process where they are
            longest, and those of the first process hold.
        """
        for size, function in functions.values():
            # The first call of all loads what is loaded once.
            self._turn(size, function, 1)
        first = {name: self._turn(size, function, 1)[0] for name, (size, function) in functions.items()}
        rounds = self._agreed(min(self.repeats, self.max_seconds / max(*first.values(), 1e-9)))
        calls = {name: self._agreed(math.ceil(TURN_SECONDS / max(seconds, 1e-6))) for name, seconds in first.items()}
        turns: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
        for _ in range(rounds):
            for name, (size, function) in functions.items():
                turns[name].append(self._turn(size, function, calls[name]))
        return {
            kind: {name: dataclasses.asdict(summary([turn[i] for turn in found])) for name, found in turns.items()}
            for i, kind in enumerate(("seconds", "local_seconds"))
        }

    def _agreed(self, number: float) -> int:
        """Return the number of the first process on all of them, as a whole number of at least one."""
        found = torch.tensor([max(1, int(number))])
        distributed.broadcast(found, 0)
        return int(found)

    def _turn(self, size: int, function: Callable[[], Any], calls: int) -> tuple[float, float]:
        """The most seconds per call that a process took, and outside collectives; 0 in a process that only waits."""
        distributed.barrier()
        if self.rank >= size:
            return 0.0, 0.0
        with counted() as traffic:
            begin = time.perf_counter()
            for _ in range(calls):
                function()
            seconds = time.perf_counter() - begin
        # The longest of both: by two clocks one process could spend more outside than the other in all.
        longest = torch.tensor([seconds, seconds - traffic.seconds], dtype=torch.float64)
        distributed.all_reduce(longest, distributed.ReduceOp.MAX, group=self.groups[size])
        whole, local = (longest / calls).tolist()
        return whole, local
