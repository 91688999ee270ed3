"""One solver on one retrieval task: its fixed points, retrieval, error of the gradient, time and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import Solution, Status, solve
from ..adjoints import Implicit
from ..diagnostics import distinct_fixed_points, smallest_curvature
from ..energies import Energy
from ..linear import CG
from ..solvers import Anderson, Solver
from .comparison import median
from .comparison import summary as reached
from .contenders import STOP, Contender
from .data import TASKS, DataSample
from .measure import error_row, median_times, peak_memory
from .potentials import energy_of

#: A query is retrieved when the returned state is this near to its pattern, relative to the pattern's length.
SUCCESS = 1e-2
#: States nearer than this, relative to their length, are one fixed point.
SAME = 1e-2
#: A point of a curvature below this is a saddle; one nearer to 0 may be the error of an iterated state.
NEGATIVE = -1e-4
LANCZOS_STEPS = 20


@dataclasses.dataclass(frozen=True)
class Task:
    """A sample with its energy and the float64 answers that solvers are measured against.

    Attributes:
        sample: patterns, queries and targets.
        energy: of retrieval, from patterns and queries.
        reference: fixed points, (N, D), NaN for queries that are not finite.
        weights: of the linear functional <weights, z> that is differentiated, (N, D).
        gradient: its exact gradient with respect to the patterns, (M, D).
    """

    sample: DataSample
    energy: Callable[[Tensor, Tensor], Energy]
    reference: Tensor
    weights: Tensor
    gradient: Tensor


def relative_error(z: Tensor, targets: Tensor) -> Tensor:
    """Return |z - target|/|target| for every query, in float64."""
    exact = targets.double()
    error: Tensor = (z.double() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    return error


def prepare(sample: DataSample, *, beta: float, anchor: float, potential: str, seed: int) -> Task:
    """Prepare the task with its reference: the fixed points in float64 and the exact gradient there.

    Queries that are not finite, and those for which the reference itself does not converge, have weight 0.
    """
    exact = sample.to(sample.keys.device, torch.float64)
    generator = torch.Generator().manual_seed(seed + 1)
    weights = torch.randn(sample.queries.shape, generator=generator, dtype=torch.float64).to(sample.keys.device)
    finite = sample.finite
    keys = exact.keys.clone().requires_grad_()
    energy = partial(energy_of, usable=sample.usable, beta=beta, anchor=anchor, potential=potential)
    queries, solver = exact.queries[finite], Anderson(rtol=1e-12, atol=1e-14, max_steps=2000)
    adjoint = Implicit(CG(rtol=1e-12))
    solution = solve(energy(keys, queries), queries, solver=solver, adjoint=adjoint, on_failure="ignore")
    reference = torch.full_like(exact.queries, torch.nan)
    reference[finite] = solution.value.detach()
    trusted = finite.clone()
    # A state that stalls within rounding of the tolerance is still exact for a comparison.
    trusted[finite] = solution.residual <= 1e-9 * (1 + solution.value.detach().norm(dim=-1))
    weights = weights.where(trusted[:, None], 0.0)
    loss = (solution.value * weights[finite]).sum()
    (gradient,) = torch.autograd.grad(loss, [keys], materialize_grads=True)
    return Task(sample, energy, reference, weights, gradient)


def evaluate(
    contender: Contender, task: Task, *, repeats: int, max_seconds: float
) -> tuple[dict[str, Any], Solution | None]:
    """Return (row of numbers, solution) of a solver; one that raises keeps its row, with the error as its status."""
    row: dict[str, Any] = {"method": contender.name}
    solution = None
    try:
        solver = contender.solver()
        row |= {"solver": repr(solver), "adjoint": type(contender.adjoint).__name__}
        energy = task.energy(task.sample.keys, task.sample.queries)
        with torch.no_grad():
            solution = solve(energy, task.sample.queries, solver=solver, on_failure="ignore", trace=contender.plotted)
        row |= _reached(task, energy, solution)
        row |= _cost(contender, task, solver, repeats, max_seconds)
    except Exception as error:
        row |= error_row(error)
    return row, solution


def _reached(task: Task, energy: Energy, solution: Solution) -> dict[str, Any]:
    sample, z = task.sample, solution.value.detach()
    with torch.no_grad():
        mapped = energy.fixed_point_map(z.to(sample.queries.dtype)).to(z.dtype)
        within = solution.residual <= STOP["atol"] + STOP["rtol"] * torch.linalg.vector_norm(mapped, dim=-1)
    converged = solution.converged | ((solution.status == Status.BUDGET) & within)
    state, exact = z.double(), sample.to(z.device, torch.float64)
    curvature = smallest_curvature(task.energy(exact.keys, exact.queries), state, steps=LANCZOS_STEPS)
    saddle = converged & (curvature < NEGATIVE)
    other = converged & ((state - task.reference).norm(dim=-1) > SAME * task.reference.norm(dim=-1))
    all_errors = relative_error(z, sample.targets)

    def summary(part: slice) -> dict[str, Any]:
        error = all_errors[part]
        known = error[error.isfinite()]
        return {
            "queries": len(error),
            **reached(solution, converged, saddle, part),
            "distinct_fixed_points": int(distinct_fixed_points(state[part][converged[part]], rtol=SAME)),
            "other_fixed_point": int(other[part].sum()),
            "retrieval_error_mean": float(known.mean()) if len(known) else None,
            "retrieval_error_median": median(error),
            "retrieval_rate": float((error < SUCCESS).double().mean()),
        }

    return {**summary(slice(None)), "tasks": dict(zip(TASKS, map(summary, sample.parts), strict=True))}


def _cost(contender: Contender, task: Task, solver: Solver, repeats: int, max_seconds: float) -> dict[str, Any]:
    """Measure gradient error, time and memory, on the queries that are finite."""
    sample, finite = task.sample, task.sample.finite
    if not bool(finite.any()):
        return {}
    queries, weights = sample.queries[finite], task.weights[finite]
    keys = sample.keys.clone().requires_grad_()

    def forward() -> Tensor:
        keys.grad = None
        energy = task.energy(keys, queries)
        value = solve(energy, queries, solver=solver, adjoint=contender.adjoint, on_failure="ignore").value
        return (value * weights.to(value.dtype)).sum()

    def backward(loss: Tensor) -> None:
        if loss.requires_grad:
            torch.autograd.backward(loss)

    times = median_times(forward, backward, device=queries.device, repeats=repeats, max_seconds=max_seconds)
    gradient = keys.grad
    error = None if gradient is None else float((gradient.double() - task.gradient).norm() / task.gradient.norm())
    cost = {"forward_seconds": times[0], "backward_seconds": times[1]}
    memory = peak_memory(lambda: backward(forward()), queries.device)
    return {"gradient_error": error, **cost, "peak_memory_bytes": memory}
