"""The solvers that `compare` compares, all with one tolerance."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TypedDict

from ..adjoints import Adjoint, Implicit, Unrolled
from ..solvers import Anderson, Broyden, GradientDescent, NewtonKrylov, Picard, Solver


class Stop(TypedDict):
    """The options that decide where a solver stops."""

    rtol: float
    atol: float
    max_steps: int


STOP = Stop(rtol=1e-5, atol=1e-8, max_steps=200)
STEP_SIZE = 0.5
EQUILIBRIUM = "Anderson"


@dataclasses.dataclass(frozen=True)
class Contender:
    """One row of the table: a solver, built late as it may need another package, and its adjoint."""

    name: str
    solver: Callable[[], Solver]
    adjoint: Adjoint = dataclasses.field(default_factory=Implicit)
    plotted: bool = True


def contenders(descents: tuple[int, ...]) -> list[Contender]:
    """List all contenders; `descents` are the step counts of unrolled gradient descent."""

    def torchdeq(name: str) -> Solver:
        from ..solvers import TorchDEQ

        return TorchDEQ(name, **STOP)

    def descent(steps: int) -> Contender:
        solver = partial(GradientDescent, rtol=0.0, atol=0.0, max_steps=steps, step_size=STEP_SIZE)
        # Descents of different lengths are parts of one curve: the longest is plotted.
        return Contender(f"unrolled GD, {steps}", solver, Unrolled(), plotted=steps == max(descents))

    return [
        Contender("one-step softmax", partial(Picard, rtol=0.0, atol=0.0, max_steps=1), Unrolled(), plotted=False),
        *map(descent, descents),
        Contender("Picard", partial(Picard, **STOP)),
        Contender(EQUILIBRIUM, partial(Anderson, **STOP)),
        Contender("Broyden", partial(Broyden, **STOP)),
        Contender("Newton-Krylov", partial(NewtonKrylov, **STOP)),
        Contender("torchdeq Anderson", partial(torchdeq, "anderson")),
        Contender("torchdeq Broyden", partial(torchdeq, "broyden")),
    ]
