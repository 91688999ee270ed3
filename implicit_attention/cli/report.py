"""The files that `compare` writes."""

from __future__ import annotations

import json
import math
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import AnchoredEnergy, solve
from .compare import ATOL, DRAWS, EQUILIBRIUM, EXPLICIT, MAX_STEPS, RTOL, Comparison
from .evaluate import SUCCESS, energy_of
from .methods import STEP_SIZE

SHOWN = 5


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Everything that was measured, as plain values; null where there is no finite number."""
    settings = comparison.settings
    device = settings.torch_device()
    content = {
        "command": "compare",
        "settings": {
            "patterns": settings.patterns,
            "queries_per_task": settings.queries,
            "beta": settings.beta,
            "anchor": settings.anchor,
            "device": settings.device,
            "dtype": settings.dtype,
            "seed": settings.seed,
            "quick": settings.quick,
            "data": "scikit-learn digits" if settings.data is None else settings.data.name,
            "noise": comparison.noise,
            "success": SUCCESS,
            "draws": DRAWS,
            "rtol": RTOL,
            "atol": ATOL,
            "max_steps": MAX_STEPS,
            "descent_step_size": STEP_SIZE,
            "repeats": settings.repeats,
        },
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("implicit_attention", "torch", "numpy", "torchdeq", "scikit-learn")},
        },
        "device": {
            "type": device.type,
            "name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "threads": comparison.threads,
        },
        "rows": comparison.rows,
        "retrieval": comparison.retrieval,
        "status_counts": {row["method"]: row.get("status", {"ERROR": 1}) for row in comparison.rows},
        "unusable_patterns": comparison.unusable,
        "queries_without_exact_gradient": comparison.untrusted,
        "seconds": comparison.seconds,
    }
    result: dict[str, Any] = _plain(content)
    return result


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(comparison: Comparison, path: Path) -> None:
    path.write_text(json.dumps(as_json(comparison), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def figures(comparison: Comparison, out: Path) -> None:
    """convergence.png and retrieval.png."""
    from ..plotting import convergence_figure, retrieval_figure

    settings, sample = comparison.settings, comparison.sample
    traces = {name: s.trace for name, s in comparison.solutions.items() if s.trace is not None}
    what = f"{settings.patterns} patterns, beta {settings.beta:g}, anchor {settings.anchor:g}, {settings.dtype}"
    tolerance = RTOL * float(sample.targets.double().norm(dim=-1).nanmedian()) + ATOL
    convergence_figure(traces, tolerance=tolerance, title=f"Residual against map evaluations\n{what}").savefig(
        out / "convergence.png"
    )
    energy = energy_of(sample.keys, sample.queries, sample.usable, beta=settings.beta, anchor=settings.anchor)
    one, equilibrium = states(energy, comparison)
    chosen = choose(one, equilibrium, sample.targets)
    half = len(sample.queries) // 2
    columns = [f"{'half-masked' if i < half else 'noisy'}" for i in chosen]
    grid = [
        ("query", sample.queries[chosen], None),
        ("one step", one[chosen], retrieved(one, sample.targets)[chosen]),
        ("equilibrium", equilibrium[chosen], retrieved(equilibrium, sample.targets)[chosen]),
        ("truth", sample.targets[chosen], None),
    ]
    rates: dict[str, dict[str, float]] = {e["task"]: {} for e in comparison.retrieval}
    for entry in (e for e in comparison.retrieval if e["beta"] == settings.beta):
        rates[entry["task"]][entry["state"]] = entry["mean"]
    summary = "; ".join(
        f"{task} {100 * r['one step']:.0f} % by one step, {100 * r['equilibrium']:.0f} % at equilibrium"
        for task, r in rates.items()
    )
    retrieval_figure(
        grid,
        columns=columns,
        title=f"Retrieval: {what}\nretrieved over all draws: {summary}\nqueries chosen to show every outcome",
    ).savefig(out / "retrieval.png")


def states(energy: AnchoredEnergy, comparison: Comparison) -> tuple[Tensor, Tensor]:
    """(one step, equilibrium) of all queries."""
    solved = comparison.solutions.get(EQUILIBRIUM)
    with torch.no_grad():
        one = energy.fixed_point_map(energy.field)
        if solved is None:
            solved = solve(energy, energy.field, on_failure="ignore")
    return one, solved.value


def retrieved(z: Tensor, targets: Tensor) -> Tensor:
    exact = targets.double()
    distance = (z.double() - exact).norm(dim=-1)
    near: Tensor = distance < SUCCESS * exact.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    return near


def choose(one: Tensor, equilibrium: Tensor, targets: Tensor) -> list[int]:
    """A few queries of each task that show every outcome which occurs: gained by iterating, both, neither, lost."""
    first, final = retrieved(one, targets), retrieved(equilibrium, targets)
    usable = targets.isfinite().all(-1)
    half = len(targets) // 2
    chosen: list[int] = []
    for rows in (torch.arange(half), torch.arange(half, 2 * half)):
        rows = rows.to(targets.device)
        rows = rows[usable[rows]]
        outcomes = (~first & final, first & final, ~first & ~final, first & ~final)
        groups = [rows[outcome[rows]].tolist() for outcome in outcomes]
        # In turn from every group, until enough.
        picked = [group[i] for i in range(SHOWN) for group in groups if i < len(group)][:SHOWN]
        chosen += sorted(picked)
    return chosen


__all__ = ["EXPLICIT", "as_json", "choose", "figures", "write_json"]
