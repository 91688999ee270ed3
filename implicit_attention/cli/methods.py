"""The methods that `compare` compares, all with one tolerance."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ..adjoints import Adjoint, Implicit, Unrolled
from ..solvers import Anderson, Broyden, GradientDescent, NewtonKrylov, Picard, Solver

STEP_SIZE = 0.5
EXPLICIT = "one-step softmax"
EQUILIBRIUM = "Anderson"


@dataclasses.dataclass(frozen=True)
class Method:
    """One row of the table: a solver (made late, as it may need another package) and how it is differentiated."""

    name: str
    solver: Callable[[], Solver]
    adjoint: Adjoint
    plotted: bool = True


def methods(*, rtol: float, atol: float, max_steps: int, descents: tuple[int, ...]) -> list[Method]:
    """All methods; `descents` are the step counts of unrolled gradient descent."""

    def torchdeq(name: str) -> Callable[[], Solver]:
        def make() -> Solver:
            from ..solvers import TorchDEQ

            return TorchDEQ(name, rtol=rtol, atol=atol, max_steps=max_steps)

        return make

    def own(kind: type[Solver]) -> Callable[[], Solver]:
        return lambda: kind(rtol=rtol, atol=atol, max_steps=max_steps)

    def descent(steps: int) -> Callable[[], Solver]:
        return lambda: GradientDescent(rtol=0.0, atol=0.0, max_steps=steps, step_size=STEP_SIZE)

    # Descents of different lengths are parts of one curve: the longest is plotted.
    return [
        Method(EXPLICIT, lambda: Picard(rtol=0.0, atol=0.0, max_steps=1), Unrolled(), plotted=False),
        *(Method(f"unrolled GD, {n}", descent(n), Unrolled(), plotted=n == max(descents)) for n in descents),
        Method("Picard", own(Picard), Implicit()),
        Method(EQUILIBRIUM, own(Anderson), Implicit()),
        Method("Broyden", own(Broyden), Implicit()),
        Method("Newton-Krylov", own(NewtonKrylov), Implicit()),
        Method("torchdeq Anderson", torchdeq("anderson"), Implicit()),
        Method("torchdeq Broyden", torchdeq("broyden"), Implicit()),
    ]
