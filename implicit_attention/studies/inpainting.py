"""An Energy Transformer that learns to fill in hidden patches of images, and its answers beside simple fillings."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..adjoints import Implicit, Phantom
from ..linear import CG
from ..models.image import ImageEnergyTransformer
from ..solvers import Anderson, Picard
from .inpainting_data import ImageTask, harmonic, hidden_pixels, rmse, scattered, visible_mean
from .training import Loss, Trained

#: Steps of the published dynamics after which the picture shows the images; the last is where a training stops.
SHOWN_STEPS = (1, 4, 12)
STEP_SIZE = 0.2
#: Images in the pictures.
SHOWN = 6
#: Held-out images that `--quick` looks at.
QUICK_IMAGES = 48
#: The solver for held-out images, and that of training, where a hundredth is enough for a gradient.
SOLVER = Anderson(rtol=1e-3, max_steps=200)
TRAINING_SOLVER = Anderson(rtol=1e-2, max_steps=60)
ADJOINT = Implicit(CG(rtol=1e-2), fallback=Phantom(5))
MEAN, HARMONIC, EQUILIBRIUM = "visible mean", "harmonic", "equilibrium"
#: After five minutes on two cores errors should be at most this part of another method's.
MARGINS = {"digits": {MEAN: 0.6, HARMONIC: 0.7}, "photos": {MEAN: 0.8, HARMONIC: 0.99}}


class Recipe(NamedTuple):
    """Sizes of the model, images of a batch and the peak learning rate."""

    dim: int
    heads: int
    head_dim: int
    memories: int
    batch: int
    rate: float


RECIPES = {"digits": Recipe(64, 4, 16, 64, 32, 3e-3), "photos": Recipe(64, 4, 16, 128, 8, 2e-3)}


@torch.no_grad()
def spread(model: ImageEnergyTransformer) -> None:
    """Draw larger initial weights than the published ones, from which few hundred updates learn but a mean image.

    From the start tokens differ by their positions, and attention reads them. An equilibrium begins with a weaker
    pull, with which solves are short.
    """
    block = model.block
    pull = 0.1 if block.mode == "published" else 0.05
    for weight in (block.w_query, block.w_key, block.memories):
        nn.init.normal_(weight, std=pull)
    nn.init.normal_(model.embedding.positions, std=0.5)
    # Answers begin near 0, and so near the image that they are added to.
    nn.init.normal_(model.decoder.weight, std=0.01)


class Inpainter(nn.Module):
    """A model of the hidden pixels, for the images of a task.

    The model reads pixels of digits, and answers with pixels, as differences from the mean of all digits. In a
    photograph it reads differences from the mean of the visible pixels, and its answer is added to the harmonic
    interpolation. The unit of both is the usual spread of the pixels.
    """

    def __init__(self, task: ImageTask, recipe: Recipe, mode: str) -> None:
        super().__init__()
        dynamics: dict[str, Any] = {"mode": mode, "on_failure": "ignore"}
        dynamics |= {"steps": SHOWN_STEPS[-1], "step_size": STEP_SIZE} if mode == "published" else {"solver": SOLVER}
        channels = task.held_out.shape[1]
        sizes = recipe.dim, recipe.heads, recipe.head_dim, recipe.memories
        self.model = ImageEnergyTransformer(task.side, task.patch, channels, *sizes, **dynamics)
        self.mode, self.patch = mode, task.patch
        self.remainder, self.mean, self.scale = task.name == "photos", task.mean, task.scale
        spread(self.model)

    def forward(self, images: Tensor, masked: Tensor, base: Tensor | None = None, **options: Any) -> Tensor:
        """Return the images with the hidden patches (count, patches) filled in.

        Args:
            images: (count, channels, side, side).
            masked: the hidden patches.
            base: the harmonic interpolation, if it is known already.
            **options: of the solve.
        """
        hidden = hidden_pixels(masked, images.shape[-1], self.patch)
        answers: Tensor = self.model.images(self.model(self._seen(images, hidden), masked, **options))
        added: Tensor | float = self.mean
        if self.remainder:
            added = harmonic(images, hidden) if base is None else base
        return (added + self.scale * answers).where(hidden, images)

    def energies(self, images: Tensor, masked: Tensor) -> Tensor:
        """Return the energy of every image after every evaluation, (evaluations, count)."""
        hidden = hidden_pixels(masked, images.shape[-1], self.patch)
        energies: Tensor = self.model(self._seen(images, hidden), masked, return_energies=True)[1]
        return energies

    def _seen(self, images: Tensor, hidden: Tensor) -> Tensor:
        return (images - (visible_mean(images, hidden) if self.remainder else self.mean)) / self.scale


class Inpainting(NamedTuple):
    """A training, and its answers to held-out images, always with the same patches hidden.

    Attributes:
        task, recipe, trained: the data, the sizes and the training.
        mode: the dynamics that were trained.
        errors: by method, root mean square errors over the hidden pixels of all held-out images.
        converged: the part of the held-out images whose equilibrium was found.
        evaluations: of the solve, in the mean.
        columns: (heading, images) for the picture.
        hidden: pixels of these images.
        energies: by dynamics, (steps + 1, images).
    """

    task: ImageTask
    recipe: Recipe
    trained: Trained
    mode: str
    errors: dict[str, float]
    converged: float
    evaluations: float
    columns: list[tuple[str, Tensor]]
    hidden: Tensor
    energies: dict[str, Tensor]

    @property
    def answer(self) -> str:
        """Return the name of the trained method, which the verdicts judge."""
        return EQUILIBRIUM if self.mode == "equilibrium" else stage("published", SHOWN_STEPS[-1])

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        """Return whether the errors are within the `MARGINS` of a whole training."""
        verdicts = []
        for baseline, margin in MARGINS[self.task.name].items():
            part = self.errors[self.answer] / self.errors[baseline]
            verdicts.append({"baseline": baseline, "at_most": margin, "part": part, "holds": part <= margin})
        return verdicts


def stage(dynamics: str, steps: int) -> str:
    return f"{dynamics}, {steps} step{'s' * (steps > 1)}"


def training_loss(task: ImageTask, recipe: Recipe) -> Loss:
    """Return the loss of a batch of images of the task, half of whose patches are hidden at random."""

    def loss_of(net: nn.Module, generator: torch.Generator) -> Tensor:
        images = task.draw(recipe.batch, generator)
        return loss(net, images, scattered(recipe.batch, task.patches, generator))

    return loss_of


def loss(net: nn.Module, images: Tensor, masked: Tensor) -> Tensor:
    """Return the root mean square error over the hidden pixels of a batch."""
    solved: dict[str, Any] = {"solver": TRAINING_SOLVER, "adjoint": ADJOINT} if net.mode == EQUILIBRIUM else {}
    wrong: Tensor = net(images, masked, **solved) - images
    # A norm has a gradient where nothing is wrong; visible pixels add 0.
    scored: Tensor = masked.sum() * (images[0].numel() / masked.shape[-1])
    error: Tensor = torch.linalg.vector_norm(wrong) / scored.sqrt()
    return error


@torch.no_grad()
def measured(task: ImageTask, recipe: Recipe, trained: Trained, net: Inpainter, count: int | None = None) -> Inpainting:
    """Fill in `count` held-out images, or all of them, by every method."""
    images, mode = task.held_out[:count], net.mode
    masked = scattered(len(images), task.patches, torch.Generator().manual_seed(0))
    hidden = hidden_pixels(masked, task.side, task.patch)
    answers = {MEAN: visible_mean(images, hidden), HARMONIC: harmonic(images, hidden)}
    nets = {name: Inpainter(task, recipe, name) for name in ("published", EQUILIBRIUM)}
    for same in nets.values():
        same.load_state_dict(net.state_dict())
    stages = [stage(mode, steps) for steps in SHOWN_STEPS]
    for name, steps in zip(stages, SHOWN_STEPS, strict=True):
        plain: dict[str, Any] = {"solver": Picard(max_steps=steps, rtol=0.0, atol=0.0)}
        options = {"max_steps": steps} if mode == "published" else plain
        answers[name] = nets[mode](images, masked, answers[HARMONIC], **options)
    answers[EQUILIBRIUM] = nets[EQUILIBRIUM](images, masked, answers[HARMONIC])
    solve = nets[EQUILIBRIUM].model.block.last_solve
    assert solve is not None
    # The first crops of a photograph are sky, so that images from all over it are shown.
    shown = torch.linspace(0, len(images) - 1, SHOWN).long()
    columns = [("hidden", images), *((name, answers[name]) for name in (*stages, EQUILIBRIUM)), ("truth", images)]
    pictures = [(name, column[shown]) for name, column in columns]
    errors = {name: rmse(images, answer, hidden) for name, answer in answers.items()}
    evidence = float(solve.converged.double().mean()), float(solve.num_evals.double().mean())
    energies = {name: same.energies(images[shown], masked[shown]) for name, same in nets.items()}
    return Inpainting(task, recipe, trained, mode, errors, *evidence, pictures, hidden[shown], energies)
