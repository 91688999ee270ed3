"""Failures and steps of every method on random systems."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicit_attention.solution import SolveReport
from implicit_attention.spins import (
    TAP,
    AdaTAP,
    Approximation,
    Bethe,
    GaussianClosure,
    KineticPlefka,
    MeanField,
    SaddlePoint,
    SpinSystem,
    stationary_state,
)
from implicit_attention.spins.approximation import FixedPointApproximation
from implicit_attention.spins.dynamics import DynamicalMethod

from .spin_problems import Many, random_systems
from .spin_scaling import statuses

#: Groups of systems of the full run and of the quick one.
GROUPS, QUICK_GROUPS = 100, 3
#: A method begins no further group after this long, but for the saddle point.
CAP_SECONDS, QUICK_CAP_SECONDS = 10.0, 0.2

#: The saddle point is held to no failure at all; the others have several solutions or none.
SADDLE_POINTS = {
    "SaddlePoint()": SaddlePoint(),
    "SaddlePoint(one_loop=True)": SaddlePoint(one_loop=True),
    "SaddlePoint(shared=True)": SaddlePoint(shared=True),
    "SaddlePoint(shared=True, one_loop=True)": SaddlePoint(shared=True, one_loop=True),
}
METHODS: dict[str, Approximation] = {
    **SADDLE_POINTS,
    "MeanField()": MeanField(),
    "TAP(order=2)": TAP(order=2),
    "TAP(order=3)": TAP(order=3),
    "AdaTAP()": AdaTAP(),
    "Bethe()": Bethe(),
    "GaussianClosure()": GaussianClosure(),
    "KineticPlefka(order=1)": KineticPlefka(order=1),
    "KineticPlefka(order=2)": KineticPlefka(order=2),
}


def settings(*, quick: bool) -> tuple[Many, ...]:
    if quick:
        return tuple(Many(name, QUICK_GROUPS, cap_seconds=QUICK_CAP_SECONDS) for name in METHODS)
    return tuple(Many(name, GROUPS, cap_seconds=CAP_SECONDS) for name in METHODS)


@torch.no_grad()
def measured(setting: Many) -> dict[str, Any]:
    """The row of one method: how its solves of all groups ended, and what they cost."""
    method = METHODS[setting.method]
    saddle = setting.method in SADDLE_POINTS
    found: list[SolveReport] = []
    wrong, worst, refused, skipped = 0, 0.0, 0, 0
    begin = time.perf_counter()
    for system in random_systems(setting):
        if not saddle and time.perf_counter() - begin > setting.cap_seconds:
            skipped += setting.per_group
            continue
        try:
            method.check(system)
        except ValueError:
            refused += setting.per_group
            continue
        found.append(_asking(method)(system))
        if isinstance(method, SaddlePoint):
            off = lengths_off(system, method)
            worst = max(worst, float(off.max()))
            wrong += int((~(off <= found[-1].tolerance) & found[-1].converged).sum())
    row: dict[str, Any] = {
        "method": setting.method,
        "cap_seconds": None if saddle else setting.cap_seconds,
        "evidence": {**summary(found), "refused": refused, "skipped": skipped},
        "seconds_per_system": (time.perf_counter() - begin) / max(1, sum(e.status.numel() for e in found)),
        "ratios": {},
    }
    if saddle:
        row["evidence"] |= {"wrong": wrong, "largest_length_error": worst}
        row["ratios"] = {"failures": float(row["evidence"]["failed"] + wrong)}
    return row


def _asking(method: Approximation) -> Callable[[SpinSystem], SolveReport]:
    if isinstance(method, DynamicalMethod):
        return lambda system: stationary_state(system, method, check="stability", on_failure="ignore").report
    if isinstance(method, FixedPointApproximation):
        return lambda system: method.log_partition(system, check="stability").report
    return lambda system: method.log_partition(system).report


def summary(found: list[SolveReport]) -> dict[str, Any]:
    """Counts by status, and the distribution of steps and evaluations."""
    if not found:
        return {"systems": 0, "failed": 0, "status": {}}
    status = torch.cat([e.status for e in found])
    counts: Counter[str] = Counter(statuses(status))
    steps, evaluations = (torch.cat([getattr(e, name) for e in found]).double() for name in ("num_steps", "num_evals"))
    return {
        "systems": len(status),
        "failed": int(torch.cat([e.failed for e in found]).sum()),
        "status": dict(counts),
        "steps_median": float(steps.median()),
        "steps_max": int(steps.max()),
        "evaluations_median": float(evaluations.median()),
        "evaluations_max": int(evaluations.max()),
        "residual_max": float(torch.cat([e.residual for e in found]).nan_to_num(nan=float("inf")).max()),
    }


def lengths_off(system: SpinSystem, method: SaddlePoint) -> Tensor:
    """Largest error of <|s_i|^2>/R^2, or of its mean if shared, by an explicit inverse; infinite where A > 0 fails."""
    scale = torch.as_tensor(system.beta * system.radius**2 / system.dim)[:, None, None]
    multipliers = method.multipliers(system).expand(system.field.shape[:-1])
    matrix = torch.diag_embed(multipliers) - scale * system.couplings
    inverse = torch.linalg.inv(matrix)
    mean = inverse @ (scale * system.field) / system.radius
    squares = inverse.diagonal(dim1=-2, dim2=-1) + mean.square().sum(-1)
    if method.shared:
        squares = squares.mean(-1, keepdim=True)
    off = (squares - 1).abs().amax(-1)
    inside = torch.linalg.eigvalsh(matrix)[:, 0] > 0
    return torch.where(inside, off, torch.inf)
