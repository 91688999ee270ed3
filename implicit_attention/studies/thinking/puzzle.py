"""The interface of the puzzles, and the model that all of them have: an embedding, a block that repeats, a read-out."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...layers import Equilibrium
from ...training import Calibration, SettlingLoss, calibrate
from ..course import Course, course_of
from ..training import make_update

#: Relative residual at which a state counts as settled.
RTOL = 1e-3
#: The seed of the problems for the table.
TO_CALIBRATE = 2**62


class Problems(NamedTuple):
    """Problems of one size.

    inputs: (B, *axes), what is told of every place.
    target: (B, *places), the right class of every place; one that is below 0 is not asked for.
    """

    inputs: Tensor
    target: Tensor


class Asked(NamedTuple):
    """One problem to watch, in words, with what a reader has to know about it."""

    problem: Problems
    title: str
    notes: tuple[str, ...] = ()


class View(NamedTuple):
    """An answer as a picture of H x W cells.

    levels: (H, W), numbers in [0, 1] that have a shade; NaN for walls and what is given.
    cells: the same in characters, all of one width.
    marks: the places of start and goal, (row, column), if there are some.
    """

    levels: Tensor
    cells: list[list[str]]
    marks: tuple[tuple[int, int], ...] = ()


class Thinker(nn.Module):
    """An embedding, one block that repeats, and a read-out with classes on the axis `axis`."""

    def __init__(self, embed: nn.Module, layer: Equilibrium, readout: nn.Module, *, axis: int) -> None:
        super().__init__()
        self.embed, self.layer, self.readout, self.axis = embed, layer, readout, axis

    def told(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the arguments of the block."""
        return (self.embed(inputs),)

    @torch.no_grad()
    def solved(self, inputs: Tensor) -> Thought:
        """Solve one problem, and keep the answers on the way."""
        course = course_of(self.layer, *self.told(inputs))
        answers = [self.readout(z).softmax(self.axis).movedim(self.axis, -1)[0] for z in course.states]
        return Thought(course, answers)


class Thought(NamedTuple):
    """A solve of one problem, and after every evaluation how sure each class of each place is, (*places, classes)."""

    course: Course
    answers: list[Tensor]

    def classes(self, index: int = -1) -> Tensor:
        """Return the answer after an evaluation, (*places)."""
        return self.answers[index].argmax(-1)


@dataclasses.dataclass(frozen=True)
class LoopRecipe:
    """A training by `SettlingLoss`, of steps that it draws, and AdamW with one cycle of the learning rate."""

    updates: int
    batch: int
    rate: float
    steps: range
    seed: int = 0

    def text(self, updates: int) -> str:
        """Return the recipe in one line, with this number of updates."""
        steps = f"{self.steps[0]} to {self.steps[-1]} steps drawn"
        return f"{updates} updates of {self.batch} problems, {steps}, rate {self.rate:g}"


class Puzzle(ABC):
    """A puzzle: its problems, its model and recipe, and an algorithm that checks answers.

    Attributes:
        name: in the terminal.
        kind: of the problems, in words.
        places: what an answer has, in the plural.
        learnt: the problems of the training, in words.
        size: of a problem to watch, by default.
        sizes: those of the table.
        count: of problems of each size in the table.
        sized: the words for a size, with braces for the number.
        lettered: whether squares of its picture have characters.
        judge: the algorithm that checks answers.
        usage: the sizes that can be asked for, in words.
    """

    name: ClassVar[str]
    kind: ClassVar[str]
    places: ClassVar[str]
    learnt: ClassVar[str]
    size: ClassVar[int]
    sizes: ClassVar[tuple[int, ...]]
    count: ClassVar[int]
    sized: ClassVar[str]
    lettered: ClassVar[bool]
    judge: ClassVar[str]
    usage: ClassVar[str]
    recipe: ClassVar[LoopRecipe]

    @abstractmethod
    def fits(self, size: int) -> bool:
        """Return whether problems of this size can be made."""

    @abstractmethod
    def model(self) -> Thinker:
        """Make the model, with weights by torch's generator."""

    @abstractmethod
    def learn(self, count: int, generator: torch.Generator) -> Problems:
        """Draw problems to learn from."""

    @abstractmethod
    def ask(self, size: int, count: int, seed: int) -> Problems:
        """Draw problems that are not learnt from."""

    @abstractmethod
    def read(self, file: Path, **places: Any) -> Asked:
        """Read the problem in a file."""

    @abstractmethod
    def wrong(self, problem: Problems, classes: Tensor) -> int:
        """Count the places of an answer that are wrong, by an algorithm that is not the network."""

    @abstractmethod
    def view(self, problem: Problems, answer: Tensor) -> View:
        """Return an answer (*places, classes) as a picture."""

    def watched(self, size: int, seed: int) -> Asked:
        """Draw one problem to watch."""
        return Asked(self.ask(size, 1, seed), self.sized.format(size))

    def calibrated(self, model: Thinker, times: int = 1) -> dict[str, Calibration]:
        """Solve `times` as many problems of every size as the table has, and compare them with what is right."""
        sets = {}
        for size in self.sizes:
            problems = self.ask(size, times * self.count, TO_CALIBRATE)
            with torch.no_grad():
                sets[self.sized.format(size)] = [(model.told(problems.inputs), problems.target)]
        return calibrate(model.layer, model.readout, sets, axis=model.axis)

    def train(self, model: Thinker, updates: int, report: Callable[[int, float], None]) -> None:
        """Train by the recipe; `report` gets the number of every update and its loss."""
        recipe = self.recipe
        objective = SettlingLoss(model.layer, model.readout, steps=recipe.steps, axis=model.axis)
        optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.rate, total_steps=updates, pct_start=0.15)
        generator = torch.Generator().manual_seed(recipe.seed)
        model.train()
        for update in range(updates):
            problems = self.learn(recipe.batch, generator)
            loss = objective(*model.told(problems.inputs), target=problems.target, done=update / updates)
            number = make_update(model, loss, optimizer)
            schedule.step()
            report(update + 1, number)
        model.eval()
