"""Plans of blocks that learn small puzzles and are asked larger ones: who competes, how, and what is drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from implicit_attention import Anderson, Picard

from .contenders import Claim, Contender, Guess, Plan
from .training import RTOL, Fixed, Loop, Progressive, Recipe, Solved, Task, Training


@dataclasses.dataclass(frozen=True)
class Larger:
    """A task, a block that is repeated, its recipe, and the sets by size, the smallest of which is learnt.

    kind: of the blocks, in words. make: (shape, blocks=, dim=) -> the model. narrow: width at which a stack has the
    parameters of one block. steps: to draw from. most: evaluations of a puzzle. trivial: name and answer of it.
    """

    metric: str
    task: Task
    told: str
    kind: str
    make: Callable[..., Any]
    narrow: int
    steps: range
    recipe: Recipe
    sets: tuple[str, ...]
    most: int
    trivial: tuple[str, Guess]
    #: Whether settled answers are checked a second time.
    checked: bool = True

    @property
    def mean(self) -> int:
        """The steps of those that have a fixed number of them."""
        return (self.steps[0] + self.steps[-1]) // 2

    @property
    def tied(self) -> str:
        return f"{self.kind}, tied, {self.steps[0]} to {self.steps[-1]} steps drawn"

    @property
    def few(self) -> tuple[str, ...]:
        """The sets for contenders that do not settle, and cost most evaluations."""
        return self.sets[:3]

    @property
    def solved(self) -> Solved:
        return Solved(Picard(rtol=RTOL, max_steps=self.most))

    @property
    def loops(self) -> tuple[Fixed, Fixed]:
        """As many steps as were trained, in the mean, and eight times as many."""
        return Fixed(self.mean), Fixed(8 * self.mean)

    def trained(self, training: Training) -> Recipe:
        return dataclasses.replace(self.recipe, training=training)

    def repeated(self, name: str, training: Training, *, checks: bool = False) -> Contender:
        """The same block, trained otherwise."""
        most = self.most if checks and self.checked else 0
        ways = self.solved, *self.loops
        return Contender(name, self.trained(training), ways, self.few, make=self.make, checks=most)

    def stack(self, name: str, dim: int | None = None) -> Contender:
        make = partial(self.make, blocks=self.mean, dim=dim)
        return Contender(name, self.trained(Loop(self.mean)), self.loops[:1], self.few, make=make)

    def plan(
        self,
        *others: Contender,
        claims: tuple[tuple[str, str, str, float, str], ...],
        notes: tuple[str, ...],
        puzzles: int = 500,
        drawn: tuple[Contender, ...] = (),
    ) -> Plan:
        """The plan with all contenders, and `others`, of which the figure shows those that are `drawn`, as solved.

        claims: (way, set, sense, bound, field).
        """
        solver = Anderson(history=1, rtol=RTOL, max_steps=self.most)
        ways = self.solved, *self.loops, Solved(solver, "solved, Anderson(1)")
        deep, (name, guess) = f"stack of {self.mean}, the same FLOPs", self.trivial
        progressive = "the same, progressive loss"
        contenders = (
            Contender(self.tied, self.recipe, ways, make=self.make, checks=self.most if self.checked else 0),
            self.repeated(f"{self.kind}, tied, {self.mean} steps", Loop(self.mean), checks=True),
            self.repeated(progressive, Progressive(self.steps[-1]), checks=True),
            self.stack(deep),
            self.stack(f"stack of {self.mean}, the same parameters", self.narrow),
            *others,
            Contender(name, None, guess=guess),
        )
        return Plan(
            self.metric,
            self.task,
            self.told,
            contenders,
            self.sets,
            costs=self.sets[2],
            solver_set=self.sets[0],
            leader=(self.tied, "solved"),
            drawn=(
                (self.tied, "solved"),
                *((self.tied, way.name) for way in self.loops),
                (progressive, "solved"),
                *((each.name, self.solved.name) for each in drawn),
                (deep, self.loops[0].name),
                (name, "guess"),
            ),
            claims=tuple(Claim(self.tied, *claim) for claim in claims),
            notes=notes,
            puzzles=puzzles,
        )
