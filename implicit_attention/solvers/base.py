"""What a solver is: options, an initial state and a step. The loop around it is in `iterate.py`."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import _validate
from .._fused_rule import FusedRule
from ..problem import Problem
from ..solution import Record
from .iterate import Iteration, Outcome, iterate


class Update(NamedTuple):
    """What a step returns.

    state: the solver's memory, a nested tuple whose tensors have the problems' leading axes.
    candidate: the state to evaluate next, (*lead, n).
    stalled: (*lead), problems that the method gives up; None for none.
    num_evals: (*lead), evaluations beyond the one that led here (inner products); None for none.
    """

    state: Any
    candidate: Tensor
    stalled: Tensor | None = None
    num_evals: Tensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Solver:
    """Base of all solvers.

    A problem has converged when |f(z) - z|_2 <= atol + rtol |f(z)|_2 at a state that the solver accepts.

    Args:
        rtol: tolerance relative to |f(z)|.
        atol: absolute tolerance, in the units of the state: what a solution at 0 is held to. Where |f(z)| <= atol/rtol
            (1e-4 by default) it decides, and for data of its own scale any state has converged: lower it, or scale the
            data. `repr(solution)` and `solution.message()` say where that happened. With rtol = atol = 0 exactly
            `max_steps` steps are made, status BUDGET.
        max_steps: largest number of updates; 0 returns the initial state, status EXPLICIT.
        check_every: steps between two looks at whether all problems are finished, each of which makes the host wait;
            None is 1 on a CPU and 4 on an accelerator. Results do not depend on it.
    """

    rtol: float = 1e-4
    atol: float = 1e-8
    max_steps: int = 200
    check_every: int | None = None

    #: Whether the steps can be differentiated through (`Unrolled`).
    differentiable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _validate.store_plain(self)
        _validate.check_number("rtol", self.rtol, low=0.0)
        _validate.check_number("atol", self.atol, low=0.0)
        _validate.check_integer("max_steps", self.max_steps, low=0)
        if self.check_every is not None:
            _validate.check_integer("check_every", self.check_every, low=1)

    @property
    def fixed_budget(self) -> bool:
        """Whether all steps are made whatever the residual."""
        return self.rtol == 0 and self.atol == 0

    def stop(self, problem: Problem) -> FusedRule | None:
        """What a fused operation would have to do to be this solver on such a problem, or None if none can be."""
        return None

    def check_problem(self, problem: Problem) -> None:
        """Raise if the method cannot solve such a problem."""

    def needs_energy(self, problem: Problem, step: int) -> bool:
        """Whether E(z) is read at the state reached after this many steps."""
        return False

    def init(self, problem: Problem, z: Tensor) -> Any:
        """The memory before the first evaluation, for a state z of shape (*lead, n)."""
        return ()

    def accept(self, problem: Problem, state: Any, point: Iteration) -> Tensor | None:
        """(*lead), whether the evaluated candidate is better than what it came from; None accepts all."""
        return None

    def step(self, problem: Problem, state: Any, point: Iteration, accepted: Tensor) -> Update:
        """The next candidate, from the evaluated one (or, where it was rejected, from the memory)."""
        raise NotImplementedError(f"{type(self).__name__} must define step(problem, state, point, accepted)")

    def run(self, problem: Problem, initial: Tensor, *, trace: bool = False, graph: bool = False) -> Outcome:
        """Solve `problem` from `initial`. With `graph` every step is recorded for differentiation."""
        stop = None if trace or graph else self.stop(problem)
        if stop is not None and (found := problem.solve_fused(initial, stop)) is not None:
            return Outcome(found[0], Record(*found[1:]))
        return iterate(self, problem, initial, trace=trace, graph=graph)


def rows_where(condition: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """torch.where with one condition per problem, (*lead), on states (*lead, n)."""
    return torch.where(condition[..., None], yes, no)
