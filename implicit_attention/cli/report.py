"""The files that the commands write: everything as JSON, and pictures."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ..ops import native_status
from ..plotting import (
    configuration_figure,
    convergence_figure,
    driven_figure,
    rates_figure,
    retrieval_figure,
)
from ..spins.sweep import PANELS, Sweep
from .compare import DRAWS, Comparison
from .contenders import STEP_SIZE, STOP
from .data import TASKS
from .evaluate import SUCCESS
from .potentials import inverse_temperature
from .retrieval import EQUILIBRIUM, NEAREST, ONE, TWO, betas_of, of, retrieved, summary
from .settings import REFERENCES, SAMPLER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..spins import SpinSystem
    from .digits import Completions, Digits
    from .magnetize import Magnetization

#: Queries of a task, and samples of a batch, that are drawn.
SHOWN_QUERIES, SHOWN_SAMPLES = 5, 10
#: Digits of a number in a list with one for every spin, so that a file of many spins stays small.
DIGITS = 8
PACKAGES = ("implicit_attention", "torch", "numpy", "torchdeq", "scikit-learn")

#: The name of the JSON file, its content, and the figures by file name.
Files: TypeAlias = "tuple[str, dict[str, Any], dict[str, Figure]]"


def write(out: Path, name: str, content: dict[str, Any], figures: dict[str, Figure]) -> list[str]:
    """Write everything into the folder `out`; the names of the files."""
    versions = {"python": platform.python_version(), **{package: _version(package) for package in PACKAGES}}
    ran = {"versions": versions, "native": str(native_status())}
    text = json.dumps(_plain(content | ran), indent=1, allow_nan=False)
    # A list of numbers, or of vectors, in one line: there can be one for every spin.
    text = re.sub(r"\[(?:[^][{}\"]|\[[^][{}\"]*\])*\]", lambda match: " ".join(match[0].split()), text)
    (out / name).write_text(text + "\n", encoding="utf-8")
    for file, figure in figures.items():
        figure.savefig(out / file)
    return [name, *figures]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _plain(value: Any) -> Any:
    """Lists for tensors and tuples, null for what is no finite number."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def options_of(settings: Any, *without: str) -> dict[str, Any]:
    """Return the options of a command without its folders, which files must not name."""
    options = dataclasses.asdict(settings)
    return {name: value for name, value in options.items() if name not in ("out", *without)}


def comparison_files(comparison: Comparison) -> Files:
    """Build the report of `compare`: everything that was measured, and two figures."""
    settings = comparison.settings
    device = torch.device(settings.device)
    content = {
        "command": "compare",
        "settings": options_of(settings)
        | {
            "potential": settings.potential_name,
            "beta": inverse_temperature(settings),
            "beta_auto": comparison.auto,
            "queries_per_task": settings.queries,
            "data": "scikit-learn digits" if settings.data is None else settings.data.name,
            "noise": comparison.noise,
            "success": SUCCESS,
            "draws": DRAWS,
            **STOP,
            "descent_step_size": STEP_SIZE,
            "repeats": settings.repeats,
        },
        "device": {
            "type": device.type,
            "name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "threads": comparison.threads,
            "native": comparison.native,
        },
        "rows": comparison.rows,
        "retrieval": comparison.retrieval,
        "summary": summary(comparison.retrieval, inverse_temperature(settings)),
        "status_counts": {row["method"]: row.get("status", {"ERROR": 1}) for row in comparison.rows},
        "unusable_patterns": comparison.unusable,
        "queries_without_exact_gradient": comparison.untrusted,
        "seconds": comparison.seconds,
    }
    beta, anchor = inverse_temperature(settings), settings.anchor
    what = f"{settings.stored} patterns, {settings.other_potential}beta {beta:g}, anchor {anchor:g}, {settings.dtype}"
    figures = {
        "convergence.png": _convergence(comparison, what),
        "rates.png": _rates(comparison),
        "retrieval.png": _retrieval(comparison, what),
    }
    return "compare.json", content, figures


def _convergence(comparison: Comparison, what: str) -> Figure:
    traces = {name: s.trace for name, s in comparison.solutions.items() if s.trace is not None}
    length = float(comparison.sample.targets.double().norm(dim=-1).nanmedian())
    tolerance = STOP["rtol"] * length + STOP["atol"]
    return convergence_figure(traces, tolerance=tolerance, title=f"Residual against map evaluations\n{what}")


def _retrieval(comparison: Comparison, what: str) -> Figure:
    """Queries, what methods make of them, and the truth."""
    sample = comparison.sample
    right = {name: retrieved(z, sample) for name, z in comparison.states.items()}
    rows = []
    for part in sample.parts:
        candidates = torch.arange(len(sample.queries), device=sample.queries.device)[part]
        rows += _choose(candidates[sample.targets[candidates].isfinite().all(-1)], list(right.values()))
    grid: list[tuple[str, Tensor, Tensor | None]] = [("query", sample.queries[rows], None)]
    grid += [(name, z[rows], right[name][rows]) for name, z in comparison.states.items()]
    grid.append(("truth", sample.targets[rows], None))
    columns = [TASKS[row in range(len(sample.queries))[sample.parts[1]]] for row in rows]
    return retrieval_figure(grid, columns=columns, title=f"Retrieval: {what}\nqueries chosen to show every outcome")


def _rates(comparison: Comparison) -> Figure:
    """The sweep, and what it says."""
    entries, settings = comparison.retrieval, comparison.settings

    def rates(found: list[dict[str, Any]]) -> Tensor:
        return torch.tensor([entry["rates"] for entry in found], dtype=torch.float64)

    curves = {task: {s: rates(of(entries, task, s)) for s in (ONE, TWO, EQUILIBRIUM)} for task in TASKS}
    levels = {task: {state: rates(of(entries, task, state))[0] for state in NEAREST} for task in TASKS}
    source = "scikit-learn's digits" if settings.data is None else settings.data.name
    what = f"Retrieval of {settings.stored} patterns ({source})"
    title = f"{what}; {settings.other_potential}stars: each method's own best beta"
    return rates_figure(torch.tensor(betas_of(entries)), curves, levels, title=title)


def _choose(rows: Tensor, right: list[Tensor]) -> list[int]:
    """A few of the rows that show every outcome which occurs; rows with the same outcome take turns."""
    groups: dict[tuple[bool, ...], list[int]] = {}
    for row in rows.tolist():
        groups.setdefault(tuple(bool(hit[row]) for hit in right), []).append(row)
    in_turn = [group[i] for i in range(SHOWN_QUERIES) for group in groups.values() if i < len(group)]
    return sorted(in_turn[:SHOWN_QUERIES])


def magnetization_files(result: Magnetization) -> Files:
    """Build the report of `magnetize`: everything that was found, and its figures."""
    system, images, completions = result.system, result.digits, result.completions
    content = {
        "command": "magnetize",
        "settings": options_of(result.settings, "file", "drive")
        | {
            "source": result.settings.source,
            "sites": system.num_sites,
            "dimensions": system.dim,
            "batch": system.batch,
            "radius": system.radius,
            "measure": system.measure,
            "beta": torch.as_tensor(system.beta, dtype=torch.float64),
            "equilibrium": result.equilibrium,
        },
        "threads": torch.get_num_threads(),
        "rows": [_with_magnetization(row, result) for row in result.rows],
        "reference": result.reference,
        "refused": result.refused,
        "seconds": result.seconds,
    }
    figures = {"spins.png": _spins_figure(result) if images is None else _digits_figure(result, images)}
    if result.betas is not None:
        content["sweep"] = {"beta": result.betas, "rows": result.sweep}
        figures["phase.png"] = _phase_figure(result, result.betas)
    if result.settings.drive is not None:
        content["drive"] = {"source": result.settings.drive.name, "rows": result.driven}
        for name, path in result.paths.items():
            title = f"{result.settings.source} in the fields of {result.settings.drive.name}, {name}"
            several = ", the first sample" if system.batch.numel() > 1 else ""
            if system.batch.numel() > 0:
                figures[f"driven-{name}.png"] = driven_figure(path, title=title + several)
    if images is not None and completions is not None:
        tried = {"completed": len(completions.truth), "completions": completions.rows}
        content["digits"] = images.summary | tried
        figures["completions.png"] = _completions_figure(completions)
    return "thermodynamics.json", content, figures


def _with_magnetization(row: dict[str, Any], result: Magnetization) -> dict[str, Any]:
    m = result.magnetizations.get(row["method"])
    numbers = row if m is None else row | {"magnetization": m.tolist()}
    long = ("magnetization", "magnetization_error")
    return numbers | {name: _rounded(numbers[name]) for name in long if name in numbers}


def _rounded(value: Any) -> Any:
    return [_rounded(item) for item in value] if isinstance(value, list) else float(f"{value:.{DIGITS}g}")


def _spins_figure(result: Magnetization) -> Figure:
    """The field, a configuration of the samples, and what every method answers."""
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
    what = f"{result.settings.source}: {n} spins in {d} dimension{'s' * (d > 1)}"
    if samples <= 1:
        what += f", beta {float(torch.as_tensor(system.beta, dtype=torch.float64).flatten()[0]):g}"
    elif count < samples:
        what += f", the first {count} of {samples} samples"
    title = f"Field and magnetizations\n{what}"
    return configuration_figure(shown, radius=system.radius, couplings=_graph(system), columns=columns, title=title)


def _graph(system: SpinSystem) -> Tensor:
    """Which pairs are coupled in any of the samples, (N, N)."""
    n = system.num_sites
    if system.low_rank:
        return torch.ones(n, n)
    linked = system.couplings.detach() != 0
    if system.pair_axes == 4:
        linked = linked.any(-1).any(-1)
    return linked.reshape(-1, n, n).any(0)


def _digits_figure(result: Magnetization, digits: Digits) -> Figure:
    """An image, the mean image, two configurations and magnetizations for every digit."""
    found = result.magnetizations
    rows = [("an image", digits.examples), ("mean of the images", digits.means)]
    if result.samples is not None:
        rows += [("a sample", result.samples.final[0, ..., 0]), ("another", result.samples.final[1, ..., 0])]
    rows += [(f"m, {name}", m[..., 0]) for name, m in sorted(found.items(), key=lambda pair: pair[0] != SAMPLER)]
    side = math.isqrt(result.system.num_sites)
    title = f"One Ising system of {side} x {side} spins for every digit, fitted to {len(digits.images)} images"
    return _images_figure(rows, title=title)


def _images_figure(rows: list[tuple[str, Tensor]], **options: Any) -> Figure:
    """Rows (name, (10, 64)) with a column for every digit."""
    states = [(name, state[..., None]) for name, state in rows]
    columns = [str(digit) for digit in range(len(states[0][1]))]
    return configuration_figure(states, columns=columns, palette="gray_r", **options)


def _completions_figure(completions: Completions) -> Figure:
    """Truth, what is held, and what every method makes of it."""
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


def _phase_figure(result: Magnetization, betas: Tensor) -> Figure:
    """Every method against beta; of several samples the mean, where all have an answer."""
    curves, failed = {}, {}
    for row in result.sweep:
        if "failed" in row:
            drawn = (name for name in PANELS if name in row)
            curves[row["method"]] = {name: torch.tensor(row[name], dtype=torch.float64) for name in drawn}
            failed[row["method"]] = torch.tensor(row["failed"])
    samples = result.system.batch.numel()
    several = f": mean of {samples} systems, where all have an answer" if samples > 1 else ""
    title = f"{result.settings.source} against inverse temperature{several}"
    return Sweep(betas, curves, failed).plot(exact=[name for name in REFERENCES if name in curves], title=title)
