"""The weights that the package ships, one file for each puzzle, and how they are made anew."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import torch

from ..progress import Listener, reporter
from .puzzle import Puzzle, Thinker

FOLDER = Path(__file__).with_name("weights")


class Weights(NamedTuple):
    """A model with weights that were trained, and lines on where they are from."""

    model: Thinker
    told: tuple[str, str]


def shipped(puzzle: Puzzle) -> Weights:
    """Return the model with the weights that the package ships."""
    from safetensors import safe_open

    file = FOLDER / f"{puzzle.name}.safetensors"
    model = puzzle.model()
    with safe_open(file, "pt") as opened:
        training = json.loads(opened.metadata()["training"])
        model.load_state_dict({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    content = file.read_bytes()
    size, sha256 = round(len(content) / 1000), hashlib.sha256(content).hexdigest()
    told = f"weights {file.name}, {size} kB, sha256 {sha256}", f"from seed {training['seed']}: {training['recipe']}"
    return Weights(model.eval(), told)


def trained(puzzle: Puzzle, updates: int, progress: Listener) -> Weights:
    """Train the model with a line of progress: always the same one, whatever torch's generator would draw."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(puzzle.recipe.seed)
        model = puzzle.model()
        count = sum(p.numel() for p in model.parameters())
        puzzle.train(model, updates, reporter(progress, f"training {count} parameters on {puzzle.learnt}", updates))
    told = "weights trained now", f"from seed {puzzle.recipe.seed}: {puzzle.recipe.text(updates)}"
    return Weights(model, told)


def write(file: Path, puzzle: Puzzle, model: Thinker, updates: int) -> str:
    """Write weights in the form in which they are shipped, and return the sha256 of the file."""
    from safetensors.torch import save

    recipe = puzzle.recipe
    # One text: several have no order, and equal weights are to make equal files.
    told = {"puzzle": puzzle.name, "seed": recipe.seed, "recipe": recipe.text(updates)}
    content = save({name: t.contiguous() for name, t in model.state_dict().items()}, {"training": json.dumps(told)})
    file.write_bytes(content)
    return hashlib.sha256(content).hexdigest()
