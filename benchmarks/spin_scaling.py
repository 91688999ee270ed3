"""Time of every method against the number of sites."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from implicit_attention.potentials import AmosResponse
from implicit_attention.solution import SolveReport, Status
from implicit_attention.spins import (
    TAP,
    AdaTAP,
    Approximation,
    Bethe,
    Enumeration,
    GaussianClosure,
    KineticPlefka,
    MeanField,
    SaddlePoint,
    SpinSystem,
    TransferMatrix,
    stationary_state,
    thermodynamics,
)
from implicit_attention.spins.dynamics import DynamicalMethod

from .spin_problems import Sized, one_system

SIZES = (32, 64, 128, 256, 512, 1024)
#: A size is left out if, by the growth so far, it would take longer than this.
CAP_SECONDS = 20.0
#: The exponent is fitted from this size on, where a call takes this long: below, what is measured is Python.
FIT_SECONDS, FIT_SIZE = 0.02, 128
#: Growth of time with size, as an exponent, if there is but one size; and what a noisy machine may make of two.
GROWTH, GROWTHS = 2.0, (1.0, 4.0)


class Case(NamedTuple):
    """A method, and what its systems are like."""

    method: Approximation
    dim: int
    chain: bool = False
    sizes: tuple[int, ...] = SIZES


CASES = {
    "MeanField()": Case(MeanField(), 8),
    "MeanField(AmosResponse())": Case(MeanField(response=AmosResponse()), 8),
    "TAP(order=2)": Case(TAP(order=2), 8),
    "TAP(order=3)": Case(TAP(order=3), 8),
    "SaddlePoint()": Case(SaddlePoint(), 8),
    "SaddlePoint(one_loop=True)": Case(SaddlePoint(one_loop=True), 8),
    "SaddlePoint(shared=True)": Case(SaddlePoint(shared=True), 8),
    "AdaTAP()": Case(AdaTAP(), 8),
    "AdaTAP(), D 1": Case(AdaTAP(), 1),
    "Bethe()": Case(Bethe(), 1),
    "GaussianClosure()": Case(GaussianClosure(), 8),
    "KineticPlefka(order=1)": Case(KineticPlefka(order=1), 8),
    "KineticPlefka(order=2)": Case(KineticPlefka(order=2), 8),
    "TransferMatrix()": Case(TransferMatrix(), 8, chain=True),
    "Enumeration()": Case(Enumeration(), 1, sizes=(4, 8, 12, 16)),
}


def settings(*, quick: bool) -> tuple[Sized, ...]:
    return tuple(Sized(name, case.sizes[:1] if quick else case.sizes) for name, case in CASES.items())


def measured(setting: Sized, *, repeats: int, max_seconds: float, cap: float = CAP_SECONDS) -> dict[str, Any]:
    """The row of one method: F, U, S, C and m of one sample, or m, D and entropy production of dynamics."""
    case = CASES[setting.method]
    points: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for sites in setting.sizes:
        expected = _expected(points, sites)
        if expected is not None and expected > cap:
            left_out[str(sites)] = f"{expected:.0f} s expected, cap {cap:g} s"
            continue
        system = one_system(sites, case.dim, chain=case.chain, seed=setting.seed)
        points.append({"sites": sites, **_point(_asking(case.method), system, repeats, max_seconds)})
    return {
        "method": setting.method,
        "dim": case.dim,
        "chain": case.chain,
        "cap_seconds": cap,
        "evidence": {"points": points, "left_out": left_out},
        "ratios": {"exponent": exponent(points)},
    }


def _asking(method: Approximation) -> Callable[[SpinSystem], SolveReport]:
    if isinstance(method, DynamicalMethod):
        return lambda system: stationary_state(system, method, on_failure="ignore").report
    return lambda system: thermodynamics(system, method, on_failure="ignore").report


def _point(
    ask: Callable[[SpinSystem], SolveReport], system: SpinSystem, repeats: int, max_seconds: float
) -> dict[str, Any]:
    """Seconds: the median of several calls but the first, or the first where it is slow."""
    seconds: list[float] = []
    while len(seconds) <= repeats and 2 * sum(seconds) < max_seconds:
        begin = time.perf_counter()
        found = ask(system)
        seconds.append(time.perf_counter() - begin)
    turns = seconds[1:] or seconds
    return {
        "seconds": statistics.median(turns),
        "low": min(turns),
        "high": max(turns),
        "turns": len(turns),
        "evaluations": int(found.num_evals),
        "status": statuses(found.status),
    }


def statuses(status: torch.Tensor) -> dict[str, int]:
    """How often each status occurs, by name."""
    return {Status(code).name: count for code, count in sorted(Counter(status.flatten().tolist()).items())}


def _expected(points: list[dict[str, Any]], sites: int) -> float | None:
    """Seconds by the growth of the last two sizes."""
    if not points:
        return None
    last = points[-1]
    power = GROWTH
    if len(points) > 1:
        before = points[-2]
        power = math.log(last["seconds"] / before["seconds"]) / math.log(last["sites"] / before["sites"])
        power = min(max(power, GROWTHS[0]), GROWTHS[1])
    return float(last["seconds"] * (sites / last["sites"]) ** power)


def exponent(points: list[dict[str, Any]]) -> float | None:
    """Slope of log seconds against log N, by least squares; None where less than two sizes are slow enough."""
    slow = [p for p in points if p["seconds"] >= FIT_SECONDS and p["sites"] >= FIT_SIZE]
    if len(slow) < 2:
        return None
    logs = [(math.log(p["sites"]), math.log(p["seconds"])) for p in slow]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope
