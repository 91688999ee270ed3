"""Ways to train a block whose fixed point is to be the answer, on 4 x 4 Sudoku: which settle, and which settle right.

Reasoners of two streams (`two_streams`) are among the rows.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

import torch
from torch import nn

from implicit_attention import Equilibrium, FixedPointMap
from implicit_attention.adjoints import Implicit, OneStep, Phantom
from implicit_attention.diagnostics import jacobian_penalty
from implicit_attention.layers import contractive
from implicit_attention.solvers import Anderson, Broyden

from .contenders import Contender, Plan
from .models import Examples, Model, Shape
from .sudoku import MEAN, STEPS, TASK, UPDATES
from .training import CAP, RTOL, Fixed, Loop, Recipe, Segments, Settled, Solved, State, Training
from .two_streams import Reasoner


@dataclasses.dataclass(frozen=True)
class Intermediate:
    """A loop of a drawn number of steps, with a loss after a half of them too."""

    steps: range

    def states(self, model: Model, batch: Examples, draw: random.Random, done: float) -> Iterator[State]:
        x, steps = model.embed(batch.inputs), draw.choice(self.steps)
        half = model.steps(torch.zeros_like(x), x, batch.edges, steps // 2)
        yield torch.stack([half, model.steps(half, x, batch.edges, steps - steps // 2)])


@dataclasses.dataclass(frozen=True)
class Penalised:
    """The fixed point by the implicit gradient; the loss has `weight` times the mean square of its Jacobian added."""

    weight: float

    def states(self, model: Model, batch: Examples, draw: random.Random, done: float) -> Iterator[State]:
        x = model.embed(batch.inputs)
        settled = Equilibrium(model.block, solver=Settled(Implicit()).solver, adjoint=Implicit(), on_failure="ignore")
        z = settled(x, batch.edges)
        problem = FixedPointMap(model.block, x, batch.edges, event_ndim=2)
        yield z, self.weight * jacobian_penalty(problem, z.detach()).mean()


def bounded(shape: Shape) -> Model:
    """A model of which every linear map in the block has a spectral norm of 1 at most."""
    model = Model(shape)
    for module in list(model.block.modules()):
        if isinstance(module, nn.Linear):
            contractive(module, bound=1.0)
    return model


WAYS = (
    Solved(),
    Solved(Anderson(history=1, rtol=RTOL, max_steps=CAP), "Anderson 1"),
    Solved(Anderson(history=5, rtol=RTOL, max_steps=CAP), "Anderson 5"),
    Solved(Broyden(rtol=RTOL, max_steps=CAP), "Broyden"),
    Fixed(8 * MEAN),
)
SETTLED, HARD = "loop, 4 to 16 steps drawn", "4 givens"


def _contender(
    name: str, training: Training, *, updates: int | None = None, make: Callable[[Shape], Model] = Model
) -> Contender:
    """Segments are short: they get as many more updates, so that gradients go through as many blocks."""
    if updates is None:
        updates = UPDATES * MEAN // training.steps if isinstance(training, Segments) else UPDATES
    return Contender(name, Recipe(training, updates), WAYS, make=make)


PUBLIC = Segments(4, 4, start=1.0, noise=0.1, keep=0.95)

CONTENDERS = (
    _contender(SETTLED, Loop(STEPS)),
    _contender("loop, drawn, noise .1 at every step", Loop(STEPS, noise=0.1)),
    _contender("loop, drawn, a loss at half the steps too", Intermediate(STEPS)),
    _contender("loop, drawn, linear maps of norm 1 at most", Loop(STEPS), make=bounded),
    _contender("loop, 10 steps", Loop(MEAN)),
    _contender("segments of 4 steps", Segments(4, 4)),
    _contender("segments, random starts, noise, damping", PUBLIC),
    _contender(
        "two streams, the same segments of 2", dataclasses.replace(PUBLIC, steps=2), updates=4000, make=Reasoner
    ),
    _contender("two streams, loop, 2 to 6 drawn", Loop(range(2, 7)), make=Reasoner),
    _contender("one-step gradient", Settled(OneStep())),
    _contender("phantom gradient (5)", Settled(Phantom(5))),
    _contender("implicit gradient", Settled(Implicit())),
    _contender("implicit gradient, Jacobian penalty", Penalised(1.0)),
    _contender("implicit gradient, else phantom (5)", Settled(Implicit(fallback=Phantom(5)))),
)

PLAN = Plan(
    "RECIPES",
    TASK,
    "4 x 4 Sudoku, trained with 6 to 8 givens in many ways, and solved by many solvers.",
    CONTENDERS,
    (HARD,),
    costs=HARD,
    solver_set=HARD,
    leader=(SETTLED, "solved"),
    notes=(
        "Recipes: 1000 updates; those by segments have as many more as their gradients go through fewer blocks, two "
        "streams by segments 4000, as they learn late. An evaluation of two streams is three blocks, which their FLOPs "
        "do not say.",
    ),
)
