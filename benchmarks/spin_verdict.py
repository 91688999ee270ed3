"""`python -m benchmarks.spin_verdict`: what knowing whether a solution is stable costs, beside the forward itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from implicit_attention.spins import TAP, GaussianClosure, KineticPlefka, MeanField, SpinSystem, magnetization
from implicit_attention.spins.approximation import FixedPointApproximation

from .measure import interleaved, once
from .spin_problems import one_system

METHODS = (MeanField(), TAP(), GaussianClosure(), KineticPlefka(), KineticPlefka(order=2))
SITES, DIM = 256, 64


def functions(system: SpinSystem, method: FixedPointApproximation) -> dict[str, Callable[[], Any]]:
    """One forward without the code of verdicts, with verdicts not asked for, and with them."""
    ask = partial(magnetization, system, method, on_failure="ignore")

    def bare() -> Any:
        with patch.object(FixedPointApproximation, "_judged", lambda self, system, solution, check: solution):
            return ask()

    return {"bare": bare, "none": ask, "stability": partial(ask, check="stability")}


def main() -> None:
    print(
        f"magnetization(), N {SITES}, D {DIM}, float64, {torch.get_num_threads()} threads; seconds, medians of 9 turns"
    )
    print(f"{'method':28}{'bare':>9}{'none':>9}{'stability':>11}{'none/bare':>11}{'stability/bare':>16}")
    system = one_system(SITES, DIM, chain=False, seed=0)
    for method in METHODS:
        called = functions(system, method)
        with torch.no_grad():
            times = interleaved(called, {name: once(f)[1] for name, f in called.items()}, repeats=9, max_seconds=60.0)
        bare, none, asked = (times[name].median for name in called)
        name = f"{type(method).__name__}({getattr(method, 'order', '')})"
        print(f"{name:28}{bare:9.4f}{none:9.4f}{asked:11.4f}{none / bare:11.2f}{asked / bare:16.2f}")


if __name__ == "__main__":
    main()
