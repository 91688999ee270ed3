"""The magnetizations of a spin system by every method that holds for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..spins import SpinSystem
from ..spins.approximation import Approximation
from ..spins.driven import DrivenPath
from ..spins.sampling import Samples
from . import spin_methods
from .digits import Completions, Digits, complete, named
from .errors import InputError
from .progress import Listener
from .spin_methods import REFERENCES, SCALARS, Entry


@dataclasses.dataclass(frozen=True)
class Magnetization:
    """The answers of all methods to a system.

    Attributes:
        system: all samples of it.
        equilibrium: whether couplings are symmetric.
        rows: for every method, plain numbers.
        magnetizations: (*batch, N, D) by method, NaN for samples without an answer.
        refused: by method, why it does not hold.
        betas, sweep: inverse temperatures, and rows against them.
        driven, paths: of every method that was driven, plain numbers by step, and its path if it has one.
        samples: of the sampler, if one ran.
        digits, completions: without a file, the images and the completions of their upper halves.
    """

    system: SpinSystem
    equilibrium: bool
    rows: list[dict[str, Any]]
    magnetizations: dict[str, Tensor]
    refused: dict[str, str]
    betas: Tensor | None
    sweep: list[dict[str, Any]]
    driven: list[dict[str, Any]]
    paths: dict[str, DrivenPath]
    samples: Samples | None
    digits: Digits | None
    completions: Completions | None

    @property
    def unreadable(self) -> str:
        """Return a note on samples with numbers that are not finite, or nothing if there are none."""
        names, lost = not_finite(self.system)
        return f"{int(lost.sum())} of {lost.numel()} systems get no answer: NaN or infinity in {names}" if names else ""

    @property
    def reference(self) -> str | None:
        """Return the method that the others' magnetizations are compared with."""
        return _reference(self.magnetizations)


def not_finite(system: SpinSystem) -> tuple[str, Tensor]:
    """Return the names of the arrays that hold a NaN or an infinity, and which samples (*batch) read one."""
    beta = torch.as_tensor(system.beta, dtype=system.field.dtype)
    parts = {"J": (system.couplings, system.pair_axes), "h": (system.field, 2), "beta": (beta, 0)}
    wrong = {name: ~(t.isfinite().flatten(t.ndim - k).all(-1) if k else t.isfinite()) for name, (t, k) in parts.items()}
    lost = torch.zeros(system.batch, dtype=torch.bool)
    for each in wrong.values():
        lost = lost | each
    return " and ".join(name for name, each in wrong.items() if bool(each.any())), lost


def ask(
    system: SpinSystem,
    methods: Sequence[Entry],
    progress: Listener,
    *,
    images: Digits | None = None,
    betas: Tensor | None = None,
    driven: Sequence[Entry] = (),
    fields: Tensor | None = None,
    max_seconds: float,
    seed: int,
    quick: bool,
) -> Magnetization:
    """Ask all methods that hold for the system.

    Args:
        system: all samples of it.
        methods: to ask.
        progress: gets the reports.
        images: those that the system is fitted to, whose lower halves are completed.
        betas: inverse temperatures of a sweep.
        driven: methods to ask in `fields`.
        fields: (T, *batch, N, D).
        max_seconds: after so long no further timed run of a method begins.
        seed: of what is sampled.
        quick: with fewer samples.

    Raises:
        InputError: no method holds for the system.
    """
    spin_methods.warm_up(system)
    entries, refused = spin_methods.applicable(methods, system)
    if not entries:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise InputError(f"`--methods` must list one that holds for this system, got none ({reasons}); leave it out")
    rows: list[dict[str, Any]] = []
    answers: dict[str, Tensor] = {}
    samples = None
    for entry in entries:
        progress.begin(entry.name)
        answer = spin_methods.evaluate(
            entry, system, max_seconds=max_seconds, seed=seed, quick=quick, progress=progress.part
        )
        progress.end(entry.name, answer.row)
        rows.append(answer.row)
        samples = answer.samples or samples
        if answer.magnetization is not None:
            failed = torch.as_tensor(answer.row.get("failed", False)).expand(system.batch)
            answers[entry.name] = answer.magnetization.masked_fill(failed[..., None, None], torch.nan)
    _add_distances(rows, answers, system)
    _mark_averaged(rows, system)
    approximations = [entry for entry in entries if isinstance(entry.method, Approximation)]
    sweep = [] if betas is None else _sweep(approximations, system, betas, progress)
    driven_rows, paths = ([], {}) if fields is None else _drive(driven, system, fields, progress)
    completions = None
    if images is not None:
        progress.begin("completing digits")
        completions = complete(images, approximations, seed=seed, quick=quick, progress=progress.part)
        _add_rates(rows, images, completions)
    equilibrium = spin_methods.in_equilibrium(system)
    return Magnetization(
        system, equilibrium, rows, answers, refused, betas, sweep, driven_rows, paths, samples, images, completions
    )


def _sweep(entries: list[Entry], system: SpinSystem, betas: Tensor, progress: Listener) -> list[dict[str, Any]]:
    rows = []
    # A method whose state is too large for all temperatures at once is left out, with the reason.
    fitting, refused = spin_methods.applicable(entries, spin_methods.at_all(system, betas))
    for entry in fitting:
        progress.begin(f"{entry.name} against beta")
        rows.append(spin_methods.sweep(entry, system, betas))
    return rows + _left_out(refused)


def _drive(
    entries: Sequence[Entry], system: SpinSystem, fields: Tensor, progress: Listener
) -> tuple[list[dict[str, Any]], dict[str, DrivenPath]]:
    """Return the numbers of every method in the fields, or why it does not hold, and the paths."""
    fitting, refused = spin_methods.applicable(entries, system)
    rows, paths = [], {}
    for entry in fitting:
        progress.begin(f"{entry.name}, driven")
        row, path = spin_methods.driven(entry, system, fields)
        rows.append(row)
        if path is not None:
            paths[entry.name] = path
    return rows + _left_out(refused), paths


def _left_out(refused: dict[str, str]) -> list[dict[str, Any]]:
    return [{"method": name, "error": "left out", "message": reason} for name, reason in refused.items()]


def _reference(answers: dict[str, Tensor]) -> str | None:
    return next((name for name in REFERENCES if name in answers), None)


def _add_distances(rows: list[dict[str, Any]], answers: dict[str, Tensor], system: SpinSystem) -> None:
    """Add the distance of magnetizations from the reference, root mean square over sites, in units of R."""
    name = _reference(answers)
    for row in rows:
        if name is not None and row["method"] in answers and row["method"] != name:
            apart = (answers[row["method"]] - answers[name]).square().sum(-1).mean(-1).sqrt() / system.radius
            row |= {"distance": apart.tolist(), "distance_from": name}


def _mark_averaged(rows: list[dict[str, Any]], system: SpinSystem) -> None:
    """Mark the samples for means: those with an answer in every row that has any answer."""
    averaged = torch.ones(system.batch, dtype=torch.bool)
    answered = [row for row in rows if "mean_length" in row]
    for row in answered:
        known = ~torch.as_tensor(row.get("failed", False)).expand(system.batch)
        for name in (*SCALARS, "entropy_production", "mean_length"):
            if row.get(name) is not None:
                known = known & torch.as_tensor(row[name], dtype=torch.float64).isfinite()
        if bool(known.any()):
            averaged = averaged & known
    for row in answered:
        row["averaged"] = averaged.tolist()


def _add_rates(rows: list[dict[str, Any]], images: Digits, completions: Completions) -> None:
    """Add to each method's row how often its log Z names images and its magnetizations complete halves."""
    completed = {row["method"]: row["right"] for row in completions.rows}
    for row in rows:
        if "free_energy" in row:
            log_partition = -torch.as_tensor(row["free_energy"], dtype=torch.float64)
            row["named"] = named(images, log_partition.masked_fill(torch.as_tensor(row["failed"]), torch.nan))
        if row["method"] in completed:
            row["completed"] = completed[row["method"]]
