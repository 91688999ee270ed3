"""The figures of the answers of all methods to a spin system."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..plotting import configuration_figure, driven_figure
from ..spins import SpinSystem
from ..spins.sweep import PANELS, Sweep
from .digits import Completions, Digits
from .magnetization import Magnetization
from .spin_methods import REFERENCES, SAMPLER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Samples of a batch that are drawn.
SHOWN_SAMPLES = 10


def figures(result: Magnetization, source: str, drive: str) -> dict[str, Figure]:
    """Draw all figures, by the names of their files; `source` and `drive` name the system and its fields in titles."""
    system, images, completions = result.system, result.digits, result.completions
    drawn = {"spins.png": _spins_figure(result, source) if images is None else _digits_figure(result, images)}
    if result.betas is not None:
        drawn["phase.png"] = _phase_figure(result, source)
    if system.batch.numel() > 0:
        several = ", the first sample" if system.batch.numel() > 1 else ""
        for name, path in result.paths.items():
            title = f"{source} in the fields of {drive}, {name}{several}"
            drawn[f"driven-{name}.png"] = driven_figure(path, title=title)
    if completions is not None:
        drawn["completions.png"] = _completions_figure(completions)
    return drawn


def _spins_figure(result: Magnetization, source: str) -> Figure:
    """Draw the field, a configuration of the samples, and the answer of every method."""
    system = result.system
    n, d, samples = system.num_sites, system.dim, system.batch.numel()
    field = system.field.detach()
    longest = torch.linalg.vector_norm(field, dim=-1).nan_to_num().amax((-1,), keepdim=True)
    rows = [("field h, scaled", field / longest.clamp(min=torch.finfo(field.dtype).tiny)[..., None] * system.radius)]
    if result.samples is not None:
        rows.append(("a sample", result.samples.final[0]))
    rows += [(f"m, {name}", m) for name, m in result.magnetizations.items()]
    shown = [(name, state.reshape(-1, n, d)[:SHOWN_SAMPLES]) for name, state in rows]
    count = len(shown[0][1])
    columns = [f"sample {i}" for i in range(count)] if samples > 1 else ()
    what = f"{source}: {n} spins in {d} dimension{'s' * (d > 1)}"
    if samples <= 1:
        what += f", beta {float(torch.as_tensor(system.beta, dtype=torch.float64).flatten()[0]):g}"
    elif count < samples:
        what += f", the first {count} of {samples} samples"
    title = f"Field and magnetizations\n{what}"
    return configuration_figure(shown, radius=system.radius, couplings=_graph(system), columns=columns, title=title)


def _graph(system: SpinSystem) -> Tensor:
    """Return which pairs are coupled in any of the samples, (N, N)."""
    n = system.num_sites
    if system.low_rank:
        return torch.ones(n, n)
    numbers = system.couplings if system.graph is None else system.graph.dense(system.live_numbers, 2 * system.block)
    linked = numbers.detach() != 0
    if linked.shape[-1] != n or system.block:
        linked = linked.any(-1).any(-1)
    return linked.reshape(-1, n, n).any(0)


def _digits_figure(result: Magnetization, digits: Digits) -> Figure:
    """Draw an image, the mean image, two configurations and magnetizations for every digit."""
    rows = [("an image", digits.examples), ("mean of the images", digits.means)]
    if result.samples is not None:
        rows += [("a sample", result.samples.final[0, ..., 0]), ("another", result.samples.final[1, ..., 0])]
    answers = sorted(result.magnetizations.items(), key=lambda pair: pair[0] != SAMPLER)
    rows += [(f"m, {name}", m[..., 0]) for name, m in answers]
    side = math.isqrt(result.system.num_sites)
    title = f"One Ising system of {side} x {side} spins for every digit, fitted to {len(digits.images)} images"
    return _images_figure(rows, title=title)


def _images_figure(rows: list[tuple[str, Tensor]], **options: Any) -> Figure:
    """Draw rows (name, (10, 64)) with a column for every digit."""
    states = [(name, state[..., None]) for name, state in rows]
    columns = [str(digit) for digit in range(len(states[0][1]))]
    return configuration_figure(states, columns=columns, palette="gray_r", **options)


def _completions_figure(completions: Completions) -> Figure:
    """Draw the truth, the clamped upper half, and the completion of every method."""
    truth = completions.truth[completions.shown]
    upper, hidden = truth.tensor_split(2, dim=-1)
    rows = [("an image", truth), ("what is held", torch.cat([upper, torch.full_like(upper, torch.nan)], -1))]
    notes = {}
    for row in completions.rows:
        lower = completions.guesses[row["method"]][completions.shown]
        label = f"{row['method']}\n{100 * row['right']:.1f} %"
        rows.append((label, torch.cat([upper.to(lower), lower], -1)))
        right = (lower.sign() == hidden).sum(-1)
        notes[label] = [f"{int(count)}/{hidden.shape[-1]}" for count in right]
    title = (
        "The lower half of an image, given the upper half: mean of the spins, and how many signs are right\n"
        f"(on the left: of all {len(completions.truth)} images, which the fit has not seen)"
    )
    return _images_figure(rows, notes=notes, title=title)


def _phase_figure(result: Magnetization, source: str) -> Figure:
    """Draw every method against beta; of several samples the mean, where all have an answer."""
    curves, failed = {}, {}
    for row in result.sweep:
        if "failed" in row:
            drawn = (name for name in PANELS if name in row)
            curves[row["method"]] = {name: torch.tensor(row[name], dtype=torch.float64) for name in drawn}
            failed[row["method"]] = torch.tensor(row["failed"])
    samples = result.system.batch.numel()
    several = f": mean of {samples} systems, where all have an answer" if samples > 1 else ""
    title = f"{source} against inverse temperature{several}"
    assert result.betas is not None
    return Sweep(result.betas, curves, failed).plot(exact=[name for name in REFERENCES if name in curves], title=title)
