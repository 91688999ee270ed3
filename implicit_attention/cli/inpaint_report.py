"""The files and the printed report of `train inpaint`."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from ..plotting import energies_figure, reconstruction_figure
from .errors import writable
from .inpaint import HARMONIC, MEAN, QUICK_IMAGES, Inpainting, inpaint
from .progress import Progress, make_console
from .report import Files, options_of, write
from .settings import InpaintSettings
from .training import check_options


def run(settings: InpaintSettings) -> None:
    """Train or go on, measure, write the files and print the errors."""
    check_options(settings)
    with writable(settings.out):
        settings.out.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]), Progress(lambda row: row["line"]) as progress:
        found = inpaint(settings, progress)
        progress.begin("figures")
        with writable(settings.out):
            written = write(settings.out, *files(found))
    console = make_console()
    show(found, console)
    names = f"{', '.join(written[:-1])} and {written[-1]}"
    console.print(f"{names} written to {settings.out} after {found.seconds:.1f} s", markup=False)


def files(found: Inpainting) -> Files:
    """Build the report of `train inpaint`: errors, verdicts, how they came about, and two figures."""
    trained = found.trained
    content = {
        "command": "train inpaint",
        "settings": options_of(found.settings, "resume"),
        "data": found.task.source | {"held_out": len(found.task.held_out), "patch": found.task.patch},
        "model": found.recipe._asdict(),
        "training": {
            **trained.plan._asdict(),
            "resumed_after": trained.resumed_after,
            "seconds": trained.seconds,
            "losses": trained.losses,
        },
        "answer": found.answer,
        "rmse": found.errors,
        "verdicts": found.verdicts,
        "equilibrium": {"converged": found.converged, "evaluations": found.evaluations},
        "threads": torch.get_num_threads(),
        "seconds": found.seconds,
    }
    headings = {name: f"{name}\n{error:.4f}" for name, error in found.errors.items()}
    columns = [(headings.get(name, name), images) for name, images in found.columns]
    title = f"Half of the patches hidden; trained: {found.answer}; root mean square errors of all held-out images"
    figures = {
        "reconstruction.png": reconstruction_figure(columns, found.hidden, title=title),
        "energy.png": energies_figure(found.energies, title="Energy of every image on its way, the same weights"),
    }
    return "metrics.json", content, figures


def show(found: Inpainting, console: Console) -> None:
    """The errors as a table, and the verdicts."""
    count = len(found.task.held_out) if not found.settings.quick else QUICK_IMAGES
    table = Table(title=f"{count} held-out {found.task.name}, half of the patches hidden", title_justify="left")
    table.add_column("filled in by")
    for heading in ("root mean square error", f"against {MEAN}", f"against {HARMONIC}"):
        table.add_column(heading, justify="right")
    for name, error in found.errors.items():
        parts = (f"{100 * (error / found.errors[baseline] - 1):+.0f} %" for baseline in (MEAN, HARMONIC))
        table.add_row(name, f"{error:.4f}", *parts)
    console.print(table)
    plan, first = found.trained.plan, found.trained.resumed_after + 1
    console.print(
        f"trained: {found.answer}, {plan.updates} updates, those from {first} on in {found.trained.seconds:.0f} s",
        markup=False,
    )
    told = f"equilibria found: {100 * found.converged:.0f} %, {found.evaluations:.1f} evaluations in the mean"
    console.print(told, markup=False)
    for verdict in found.verdicts:
        holds = "reached" if verdict["holds"] else "not reached"
        asked = f"at most {verdict['at_most']:g} of the error of {verdict['baseline']}"
        console.print(f"{asked}: {holds}, {verdict['part']:.3f}", markup=False)
