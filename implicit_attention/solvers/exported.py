"""A fixed budget of steps as plain operations, which torch.export and ONNX can record."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _validate
from .._autograd import into_onnx
from ..errors import UnsupportedImplementation
from ..problem import Problem
from ._rows import flat, rows_where, unflat
from .iterate import Solver, evaluated, updated


def is_budget(solver: Solver) -> bool:
    """Whether the steps are counted before anything is computed, and are all made of tensor operations."""
    counted = solver.fixed_budget or solver.max_steps == 0
    return counted and solver.differentiable and type(solver).run is Solver.run


def check_budget(solver: Solver) -> None:
    """Raise if an exported program cannot hold the steps of this solver."""
    if not is_budget(solver):
        where = "ONNX" if into_onnx() else "an exported program"
        required = f"make a number of steps that is known beforehand, to be a part of {where}"
        remedy = "use a fixed budget: solver=Picard(max_steps=4, rtol=0, atol=0), or max_steps=0"
        raise UnsupportedImplementation(_validate.message("solver", required, repr(solver), remedy))


def check_no_evidence(wanted: bool, name: str) -> None:
    """Raise if the evidence `name` of a solve is wanted, which no exported program has."""
    if wanted:
        remedy = "leave it out, and look at the evidence before the model is exported"
        raise UnsupportedImplementation(_validate.message(name, "be False in an exported program", True, remedy))


def stepped(solver: Solver, problem: Problem, initial: Tensor) -> Tensor:
    """The state after a fixed budget of steps: that of `solver.run`, without evidence, and without a look at numbers.

    A problem that leaves the finite numbers is not kept from there on, and may end in NaN.
    """
    lead, event = initial.shape[: initial.ndim - problem.event_ndim], initial.shape[initial.ndim - problem.event_ndim :]
    every = torch.ones(lead, dtype=torch.bool, device=initial.device)
    z = value = flat(initial, event)
    state, going = solver.init(problem, z), None
    for index in range(solver.max_steps + 1):
        z = flat(problem.retract(unflat(z, event)), event)
        tested = type(solver).accept is not Solver.accept
        if index == solver.max_steps and not tested:
            value = z
            break
        point, _ = evaluated(problem, z, solver.needs_energy(problem, index), index, event, None, solver.end_rule)
        accepted = solver.accept(problem, state, point)
        kept = going if accepted is None else accepted if going is None else accepted & going
        value = z if kept is None else rows_where(kept, z, value)
        if index == solver.max_steps:
            break
        update = updated(solver, problem, state, point, every if accepted is None else accepted)
        state, z = update.state, update.candidate
        if update.stalled is not None:
            going = ~update.stalled if going is None else going & ~update.stalled
    return unflat(value, event)
