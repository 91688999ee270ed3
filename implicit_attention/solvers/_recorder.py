"""The record of a foreign solver: the best state of each problem among all that the solver evaluated."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _validate
from .._autograd import is_batched, transforms_active
from .._norm import norm
from ..problem import Problem, evaluate_pure
from ..solution import Record, Trace
from ..status import Status
from ._rows import flat
from .loop import Outcome, Solver


class Finished(Exception):
    """Raised out of a foreign solver when nothing is left for it to do."""


class Part(NamedTuple):
    """Some of the problems, and where they sit in an object that evaluates them.

    base (Q, n) are states of all problems of `problem`, of the shape `shape`; `position` are the places of `rows`.
    """

    rows: Tensor
    problem: Problem
    base: Tensor
    shape: torch.Size
    position: Tensor


class Recorder:
    """Evaluates f for a foreign solver and records the same as the library's own loop.

    All leading axes are one, P problems of n numbers each. The record of a problem is closed at the first state that
    meets the tolerance (or at the first non-finite one), so it does not depend on how long its neighbours take.

    Args:
        strictness: part of the tolerance at which a record is closed.
    """

    def __init__(
        self, solver: Solver, problem: Problem, initial: Tensor, *, trace: bool = False, strictness: float = 1.0
    ) -> None:
        event = initial.shape[initial.ndim - problem.event_ndim :]
        self.solver, self.problem, self.strictness = solver, problem, strictness
        self.shape, self.lead = initial.shape, initial.shape[: initial.ndim - len(event)]
        self.initial = flat(initial, event).reshape(self.lead.numel(), event.numel())
        self.rows = torch.arange(len(self.initial), device=initial.device)
        self.value = self.initial.clone()
        self.residual = initial.new_full((len(self.value),), torch.inf)
        self.tolerance = torch.zeros_like(self.residual)
        self.num_steps = torch.zeros_like(self.residual, dtype=torch.int32)
        self.num_evals = torch.zeros_like(self.num_steps)
        self.done, self.broken, self.stalled = (torch.zeros_like(self.residual, dtype=torch.bool) for _ in range(3))
        self.energy = self.residual.clone() if trace and problem.has_energy else None
        self.events: list[tuple[Tensor, Tensor, Tensor | None, Tensor]] | None = [] if trace else None
        self.in_map = False
        self.first_mapped = self.evaluate(self.part(self.rows), self.initial, 0)
        self.unreadable = self.broken.clone()

    # Parts of the batch, and their evaluation.

    def part(self, rows: Tensor) -> Part:
        """`rows` as problems of the whole."""
        return Part(rows, self.problem, self.initial, self.shape, rows)

    def alone(self, row: int) -> Part:
        """One problem, evaluated with as few others as the whole allows."""
        rows = torch.tensor([row], device=self.initial.device)
        if not self.lead:
            return self.part(rows)
        batch, last = divmod(row, self.lead[-1])
        index = rows.new_full((*self.lead[:-1], 1), last)
        selected = self.problem.select(index)
        if selected is None:
            return self.part(rows)
        axis = len(self.lead) - 1
        base = self.initial.reshape(self.shape).narrow(axis, last, 1)
        states = base.reshape(self.lead[:-1].numel(), self.initial.shape[1])
        return Part(rows, selected, states, base.shape, rows.new_tensor([batch]))

    def unsettled(self, rows: Tensor) -> Tensor:
        """Those of `rows` in which something is left to do."""
        return rows[~(self.done | self.broken | self.stalled | (self.residual == 0))[rows]]

    def evaluate(self, part: Part, z: Tensor, step: int, *, last: bool = False) -> Tensor:
        """f(z) of the states z (len(rows), n), recorded. `last`: z is the foreign solver's answer.

        Inside a torch.func transform f is being linearised, which is no step: nothing is recorded.
        """
        z = z.reshape(len(part.rows), part.base.shape[1])
        state = part.base.index_copy(0, part.position, z)
        self.in_map = True
        mapped, energy = evaluate_pure(
            part.problem, state.reshape(part.shape), energy=self.energy is not None, call=step
        )
        self.in_map = False
        mapped = mapped.reshape(state.shape)[part.position].to(state.dtype)
        if not transforms_active():
            self._observe(part, z.detach(), mapped.detach(), energy, step, last)
        return mapped

    def _observe(self, part: Part, z: Tensor, mapped: Tensor, energy: Tensor | None, step: int, last: bool) -> None:
        rows = part.rows
        residual = norm(mapped - z)
        tolerance = self.solver.atol + self.solver.rtol * norm(mapped)
        finite = torch.isfinite(residual) & torch.isfinite(tolerance)
        first = self.num_evals[rows] == 0
        met = finite & (residual <= self.strictness * tolerance) & (not self.solver.fixed_budget)
        better = first | met | finite & ((residual < self.residual[rows]) | (last and self.solver.fixed_budget))
        better = better & ~(self.done | self.broken)[rows]
        # As in the library's own loop: a map that is not finite at the initial state makes the value NaN.
        z = torch.where((first & ~finite)[:, None], torch.nan, z)
        self.value[rows] = torch.where(better[:, None], z, self.value[rows])
        self.residual[rows] = torch.where(better, residual, self.residual[rows])
        self.tolerance[rows] = torch.where(better, tolerance, self.tolerance[rows])
        self.num_steps[rows] = torch.where(better, min(step, self.solver.max_steps), self.num_steps[rows])
        self.num_evals[rows] += 1
        if self.energy is not None and energy is not None:
            self.energy[rows] = torch.where(better, energy.reshape(-1)[part.position], self.energy[rows])
        self.broken[rows] |= ~finite & ~self.done[rows]
        self.done[rows] |= met & better
        self._take_down(rows)

    def _take_down(self, rows: Tensor) -> None:
        if self.events is not None:
            energy = None if self.energy is None else self.energy[rows]
            self.events.append((rows, self.residual[rows], energy, self.value[rows]))

    # The results.

    def round_to(self, problem: Problem, dtype: torch.dtype) -> None:
        """Round the values to another precision, and measure the residuals of `problem` at the rounded values."""
        self._measure(problem, self.value.to(dtype))
        self.num_evals += 1
        self._take_down(self.rows)

    def _measure(self, problem: Problem, value: Tensor) -> None:
        states = value.nan_to_num(0.0, 0.0, 0.0).reshape(self.shape)
        mapped, energy = problem.evaluate(states, energy=self.energy is not None)
        mapped = mapped.reshape(value.shape)
        residual = norm(mapped - value)
        self.value, self.residual = value, torch.where(self.unreadable, self.residual.to(value.dtype), residual)
        self.tolerance = self.solver.atol + self.solver.rtol * norm(mapped)
        self.energy = None if energy is None else energy.reshape(-1)
        if not self.solver.fixed_budget:
            self.stalled |= self.done
            self.done = torch.isfinite(self.residual) & (self.residual <= self.tolerance)

    def outcome(self) -> Outcome:
        """All of it, with the leading axes of the initial state."""
        if not self.problem.separates and len(self.rows) > 1 and self.value.dtype == self.initial.dtype:
            # A problem may read others that have moved since its own end.
            self._measure(self.problem, self.value)
        status = torch.full_like(self.num_steps, int(self.solver.exhausted), dtype=torch.int8)
        status[self.stalled] = int(Status.STALLED)
        status[self.broken] = int(Status.DIVERGED)
        status[self.done] = int(Status.CONVERGED)
        status[self.unreadable] = int(Status.NONFINITE)
        record = Record(status, self.residual, self.tolerance, self.num_steps, self.num_evals)
        return Outcome(self.value.reshape(self.shape), record.map(lambda t: t.reshape(self.lead)), self._trace())

    def _trace(self) -> Trace | None:
        """One row per evaluation; a problem with fewer evaluations than others repeats its last entry."""
        if self.events is None:
            return None
        length = int(self.num_evals.max()) if len(self.num_evals) else 1
        residual, value = self.residual.repeat(length, 1), self.value.repeat(length, 1, 1)
        energy = None if self.energy is None else self.energy.repeat(length, 1)
        count = torch.zeros_like(self.num_evals, dtype=torch.int64)
        for rows, best, best_energy, state in self.events:
            residual[count[rows], rows] = best.to(residual.dtype)
            value[count[rows], rows] = state.to(value.dtype)
            if energy is not None and best_energy is not None:
                energy[count[rows], rows] = best_energy.to(energy.dtype)
            count[rows] += 1
        spent = torch.arange(1, length + 1, dtype=torch.int32, device=residual.device)[:, None].minimum(self.num_evals)
        per_problem = [t.reshape(length, *self.lead) for t in (residual, energy, spent) if t is not None]
        return Trace.of(*per_problem, value.reshape(length, *self.shape))


class Options(Mapping[str, Any]):
    """Options of a foreign solver: a copy that cannot be changed, hashable even where the values are not."""

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(_validate.message("options", "be a mapping from names to values", repr(given)))
        self._items = deepcopy(dict(given or {}))

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items))

    def __repr__(self) -> str:
        return repr(self._items)

    def check_reserved(self, reserved: Mapping[str, str]) -> None:
        """Raise if an option is given that the adapter sets from an argument of its own."""
        for name, argument in reserved.items():
            _validate.require(name not in self, "options", f"not hold {name!r}", repr(self), f"use `{argument}`")

    def copy(self) -> dict[str, Any]:
        """A dict of one's own."""
        return deepcopy(self._items)


def needed(package: str, requirement: str, user: str) -> Any:
    """The package, imported now."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package.partition(".")[0]:
            raise
        raise ImportError(f"{user} needs {package.partition('.')[0]}: pip install '{requirement}'") from error


def check_plain(solver: Solver, problem: Problem, initial: Tensor, graph: bool) -> None:
    """Raise where a solver that reads numbers on the host, and records no derivatives, cannot run."""
    name = type(solver).__name__
    _validate.require(
        not graph, "graph", f"be False: the steps of {name} cannot be differentiated", graph, "use Implicit()"
    )
    if is_batched(initial, *problem.tensors()):
        raise ValueError(
            f"{name} cannot run inside torch.vmap: it reads numbers on the host; use solve with Implicit()"
        )
