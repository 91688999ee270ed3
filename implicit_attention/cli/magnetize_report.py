"""The files that `magnetize` writes."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..plotting.spins import configuration_figure, phase_figure
from .digits import CLASSES, DATA, FIT, PSEUDOCOUNT, SIDE, THRESHOLD, Completions, Digits
from .magnetize import Magnetization
from .report import _plain, _version
from .spin_methods import REFERENCES, SAMPLER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Samples of a batch that are drawn.
SHOWN = 10
PANELS = {
    "mean_length": "mean of |m_i|/R",
    "largest_susceptibility": "largest eigenvalue of chi",
    "heat_capacity": "heat capacity C",
    "entropy_production": "entropy production per step",
}
#: Digits of a number in a long list.
DIGITS = 8


def as_json(result: Magnetization) -> dict[str, Any]:
    """Everything that was found, as plain values; null where there is no finite number."""
    settings, system = result.settings, result.system
    content = {
        "command": "magnetize",
        "settings": {
            "source": settings.source,
            "sites": system.num_sites,
            "dimensions": system.dim,
            "batch": list(system.batch),
            "radius": system.radius,
            "measure": system.measure,
            "beta": torch.as_tensor(system.beta, dtype=torch.float64).tolist(),
            "equilibrium": result.equilibrium,
            "sweep": settings.sweep,
            "methods": settings.methods,
            "dtype": settings.dtype,
            "seed": settings.seed,
            "quick": settings.quick,
        },
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("implicit_attention", "torch", "numpy", "scikit-learn")},
        },
        "threads": torch.get_num_threads(),
        "rows": [_with_magnetization(row, result) for row in result.rows],
        "reference": result.reference,
        "refused": result.refused,
        "seconds": result.seconds,
    }
    if result.betas is not None:
        content["sweep"] = {"beta": result.betas.tolist(), "rows": result.sweep}
    if result.digits is not None and result.completions is not None:
        content["digits"] = {
            "fit": FIT,
            "pseudocount_per_image": PSEUDOCOUNT,
            "threshold": THRESHOLD,
            "images": len(result.digits.images),
            "held_out": len(result.digits.held_out),
            "completed": len(result.completions.truth),
            "completions": result.completions.rows,
        }
    plain: dict[str, Any] = _plain(content)
    return plain


def _with_magnetization(row: dict[str, Any], result: Magnetization) -> dict[str, Any]:
    """The row, with numbers for every spin in so many digits that a file of many spins stays small."""
    m = result.magnetizations.get(row["method"])
    long = {} if m is None else {"magnetization": m.tolist()}
    if "magnetization_error" in row:
        long["magnetization_error"] = row["magnetization_error"]
    return row | {name: _rounded(value) for name, value in long.items()}


def _rounded(value: Any) -> Any:
    return [_rounded(item) for item in value] if isinstance(value, list) else float(f"{value:.{DIGITS}g}")


def write_json(result: Magnetization, path: Path) -> None:
    text = json.dumps(as_json(result), indent=1, allow_nan=False)
    # A list of numbers in one line: there is one for every spin.
    text = re.sub(r"\[[^][{}\"]*\]", lambda match: " ".join(match[0].split()), text)
    path.write_text(text + "\n", encoding="utf-8")


def figures(result: Magnetization, out: Path) -> list[str]:
    """Draw spins.png, and phase.png and completions.png where there is something to draw; their names."""
    drawn = {"spins.png": _spins_figure(result) if result.digits is None else _digits_figure(result, result.digits)}
    if result.betas is not None:
        drawn["phase.png"] = _phase_figure(result, result.betas)
    if result.completions is not None and result.digits is not None:
        drawn["completions.png"] = _completions_figure(result.completions, result.digits)
    for name, figure in drawn.items():
        figure.savefig(out / name)
    return list(drawn)


def _spins_figure(result: Magnetization) -> Figure:
    """The field, a configuration of the samples, and what every method answers."""
    system = result.system
    n, d = system.num_sites, system.dim
    several = system.batch.numel() > 1
    field = system.field.detach()
    longest = torch.linalg.vector_norm(field, dim=-1).nan_to_num().amax((-1,), keepdim=True)
    rows = [("field h, scaled", field / longest.clamp(min=torch.finfo(field.dtype).tiny)[..., None] * system.radius)]
    if result.samples is not None:
        rows.append(("a sample", result.samples.final[0]))
    rows += [(f"m, {name}", m) for name, m in result.magnetizations.items()]
    shown = [(name, state.reshape(-1, n, d)[:SHOWN]) for name, state in rows]
    count = len(shown[0][1])
    columns = [f"sample {i}" for i in range(count)] if several else ()
    what = f"{result.settings.source}: {n} spins in {d} dimension{'s' * (d > 1)}"
    if not several:
        what += f", beta {float(torch.as_tensor(system.beta, dtype=torch.float64).flatten()[0]):g}"
    elif count < system.batch.numel():
        what += f", the first {count} of {system.batch.numel()} samples"
    return configuration_figure(shown, radius=system.radius, columns=columns, title=f"Field and magnetizations\n{what}")


def _digits_figure(result: Magnetization, digits: Digits) -> Figure:
    """An image, the mean image, two configurations and magnetizations for every digit."""
    first = torch.stack([digits.held_out[digits.held_out_digits == c][0] for c in range(CLASSES)])
    rows = [("an image", first), (DATA, digits.means)]
    if result.samples is not None:
        rows += [("a sample", result.samples.final[0, ..., 0]), ("another", result.samples.final[1, ..., 0])]
    found = result.magnetizations
    rows += [(f"m, {name}", m[..., 0]) for name, m in sorted(found.items(), key=lambda pair: pair[0] != SAMPLER)]
    title = f"One Ising system of {SIDE} x {SIDE} spins for every digit, fitted to {len(digits.images)} images"
    columns = [str(c) for c in range(CLASSES)]
    return configuration_figure(
        [(name, state[..., None]) for name, state in rows], columns=columns, palette="gray_r", title=title
    )


def _completions_figure(completions: Completions, digits: Digits) -> Figure:
    """Truth, what is held, and what every method makes of it."""
    half = SIDE * SIDE // 2
    truth = completions.truth[completions.shown]
    upper = truth[:, :half]
    rows = [("an image", truth), ("what is held", torch.cat([upper, torch.full_like(upper, torch.nan)], -1))]
    notes = {}
    rates = {row["method"]: row["right"] for row in completions.rows}
    for name, guesses in completions.guesses.items():
        lower = guesses[completions.shown]
        label = f"{name}\n{100 * rates[name]:.1f} %"
        rows.append((label, torch.cat([upper.to(lower), lower], -1)))
        right = (lower.sign() == truth[:, half:]).sum(-1)
        notes[label] = [f"{int(count)}/{half}" for count in right]
    title = (
        "The lower half of an image, given the upper half: mean of the spins, and how many signs are right\n"
        f"(on the left: of all {len(completions.truth)} images, which the fit has not seen)"
    )
    return configuration_figure(
        [(name, state[..., None]) for name, state in rows],
        columns=[str(c) for c in range(CLASSES)],
        notes=notes,
        palette="gray_r",
        title=title,
    )


def _phase_figure(result: Magnetization, betas: Tensor) -> Figure:
    """Every method against beta; of several samples the mean, where all have an answer."""
    rows = [row for row in result.sweep if "failed" in row]
    curves, failed = {}, {}
    for row in rows:
        lists = {name: torch.tensor(row[name], dtype=torch.float64) for name in PANELS if name in row}
        curves[row["method"]] = {name: value.reshape(len(betas), -1).mean(-1) for name, value in lists.items()}
        failed[row["method"]] = torch.tensor(row["failed"]).reshape(len(betas), -1).any(-1)
    panels = {name: label for name, label in PANELS.items() if any(name in curve for curve in curves.values())}
    samples = result.system.batch.numel()
    title = f"{result.settings.source} against inverse temperature"
    if samples > 1:
        title += f": mean of {samples} systems, where all have an answer"
    return phase_figure(
        betas,
        curves,
        panels=panels or {"mean_length": PANELS["mean_length"]},
        failed=failed,
        exact=[name for name in REFERENCES if name in curves],
        title=title,
    )
