"""`implicit-attention train inpaint`: an Energy Transformer learns to fill in hidden patches of images."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from typer import Option

from .command import Console, Files, Progress
from .train import TrainCommand, numbers, updates

if TYPE_CHECKING:
    from ..studies.inpainting import Inpainting


@dataclasses.dataclass(frozen=True)
class Inpaint(TrainCommand):
    """Train an Energy Transformer to fill in hidden patches of images, and compare it with two simple fillings.

    Half of the patches of every image are hidden. Reported are root mean square errors over the hidden pixels of
    held-out images, beside the mean of the visible pixels and harmonic interpolation. A training that was killed goes
    on with --resume, and ends with the same weights to the bit.
    """

    name: ClassVar[str] = "train inpaint"

    data: Annotated[
        Literal["digits", "photos"],
        Option(help="scikit-learn's digits, or crops of its two photographs; the right third of both is held out."),
    ] = "digits"
    mode: Annotated[
        Literal["published", "equilibrium"],
        Option(help="Twelve steps down the energy, as published, or the minimum of the energy with its field."),
    ] = "published"
    out: Annotated[Path, Option(help="Folder for metrics.json, the pictures and checkpoint.pt.")] = Path("inpaint")

    @property
    def modules(self) -> tuple[str, ...]:
        return ("matplotlib", "sklearn", "scipy")

    def run(self, progress: Progress) -> Inpainting:
        """Train or go on, and measure."""
        from ..studies import inpainting, inpainting_data

        task, recipe = inpainting_data.load(self.data), inpainting.RECIPES[self.data]
        if self.rate is not None:
            recipe = recipe._replace(rate=self.rate)
        net = inpainting.Inpainter(task, recipe, self.mode)
        epoch, loss = -(-task.epoch // recipe.batch), inpainting.training_loss(task, recipe)
        identity = {"data": self.data, "mode": self.mode, "seed": self.seed, **recipe._asdict()}
        trained = self.train(net, loss, epoch, recipe.rate, progress, identity)
        progress.begin("held-out images")
        count = inpainting.QUICK_IMAGES if self.quick else None
        return inpainting.measured(task, recipe, trained, net, count)

    def files(self, result: Inpainting) -> Files:
        """Return errors, verdicts and settings, and two figures."""
        from ..plotting import energies_figure, reconstruction_figure
        from .report import options_of

        task = result.task
        content = {
            "settings": options_of(self, "resume"),
            "data": task.source | {"held_out": len(task.held_out), "patch": task.patch},
            "model": result.recipe._asdict(),
            "training": numbers(result.trained),
            "answer": result.answer,
            "rmse": result.errors,
            "verdicts": result.verdicts,
            "equilibrium": {"converged": result.converged, "evaluations": result.evaluations},
        }
        headings = {name: f"{name}\n{error:.4f}" for name, error in result.errors.items()}
        columns = [(headings.get(name, name), images) for name, images in result.columns]
        title = f"Half of the patches hidden; trained: {result.answer}; root mean square errors of all held-out images"
        figures = {
            "reconstruction.png": reconstruction_figure(columns, result.hidden, title=title),
            "energy.png": energies_figure(result.energies, title="Energy of every image on its way, the same weights"),
        }
        return "metrics.json", content, figures

    def show(self, result: Inpainting, console: Console) -> None:
        """Print the errors as a table, and the verdicts."""
        from rich.table import Column, Table

        from ..studies.inpainting import HARMONIC, MEAN, QUICK_IMAGES

        title = f"{QUICK_IMAGES if self.quick else len(result.task.held_out)} held-out {self.data}"
        headings = "root mean square error", f"against {MEAN}", f"against {HARMONIC}"
        columns = (Column(heading, justify="right") for heading in headings)
        table = Table("filled in by", *columns, title=f"{title}, half of the patches hidden", title_justify="left")
        for name, error in result.errors.items():
            parts = (f"{100 * (error / result.errors[baseline] - 1):+.0f} %" for baseline in (MEAN, HARMONIC))
            table.add_row(name, f"{error:.4f}", *parts)
        console.print(table)
        console.print(f"trained: {result.answer}, {updates(result.trained)}", markup=False)
        solved = f"equilibria found: {100 * result.converged:.0f} %, {result.evaluations:.1f} evaluations in the mean"
        console.print(solved, markup=False)
        for verdict in result.verdicts:
            holds = "reached" if verdict["holds"] else "not reached"
            margin = f"at most {verdict['at_most']:g} of the error of {verdict['baseline']}"
            console.print(f"{margin}: {holds}, {verdict['part']:.3f}", markup=False)
