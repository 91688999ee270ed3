"""One method on one retrieval task: what it reached, what it retrieved, how wrong its gradient is, what it cost."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from .. import AnchoredEnergy, LogSumExp, Solution, Status, solve
from ..adjoints import Implicit
from ..diagnostics import distinct_fixed_points, smallest_curvature
from ..linear import CG
from ..solvers import Anderson
from .data import TASKS, Sample
from .measure import median_times, peak_memory
from .methods import Method

#: A query is retrieved when the returned state is this near to its pattern, relative to the pattern's length.
SUCCESS = 1e-2
#: States nearer than this, relative to their length, are one fixed point.
SAME = 1e-2
#: Curvature below which a point is a saddle; what is nearer to 0 is within the error of an iterated state.
NEGATIVE = -1e-4
LANCZOS_STEPS = 20


@dataclasses.dataclass(frozen=True)
class Task:
    """A sample with its energy's constants and the float64 answers that methods are measured against."""

    sample: Sample
    beta: float
    anchor: float
    rtol: float
    atol: float
    reference: Tensor
    weights: Tensor
    gradient: Tensor

    def energy(self, keys: Tensor, queries: Tensor) -> AnchoredEnergy:
        return energy_of(keys, queries, self.sample.usable, beta=self.beta, anchor=self.anchor)


def energy_of(keys: Tensor, queries: Tensor, usable: Tensor, *, beta: float, anchor: float) -> AnchoredEnergy:
    """The energy of retrieval; patterns that are not usable are masked out and so not read by anyone."""
    mask = None if bool(usable.all()) else usable[..., None, :]
    return AnchoredEnergy(LogSumExp(keys, beta, mask=mask), queries, anchor)


def prepare(sample: Sample, *, beta: float, anchor: float, rtol: float, atol: float, seed: int) -> Task:
    """The task with its reference: the fixed points in float64 and the exact gradient there.

    The gradient is that of a fixed random linear functional of the states, <weights, z>, with respect to the patterns.
    Queries that are not finite, and those for which the reference itself does not converge, have weight 0.
    """
    exact = sample.to(sample.keys.device, torch.float64)
    generator = torch.Generator().manual_seed(seed + 1)
    weights = torch.randn(sample.queries.shape, generator=generator, dtype=torch.float64).to(sample.keys.device)
    finite = sample.finite
    keys = exact.keys.clone().requires_grad_()
    energy = energy_of(keys, exact.queries[finite], sample.usable, beta=beta, anchor=anchor)
    solution = solve(
        energy,
        exact.queries[finite],
        solver=Anderson(rtol=1e-12, atol=1e-14, max_steps=2000),
        adjoint=Implicit(CG(rtol=1e-12)),
        on_failure="ignore",
    )
    reference = torch.full_like(exact.queries, torch.nan)
    reference[finite] = solution.value.detach()
    trusted = finite.clone()
    # What stalls within rounding of the tolerance is still exact for a comparison.
    trusted[finite] = solution.residual <= 1e-9 * (1 + solution.value.detach().norm(dim=-1))
    weights = weights.where(trusted[:, None], 0.0)
    loss = (solution.value * weights[finite]).sum()
    (gradient,) = torch.autograd.grad(loss, [keys], materialize_grads=True)
    return Task(sample, beta, anchor, rtol, atol, reference, weights, gradient)


def evaluate(
    method: Method, task: Task, *, repeats: int, max_seconds: float, trace: bool
) -> tuple[dict[str, Any], Solution | None]:
    """(row of numbers, solution) of a method; one that raises keeps its row, with the error as its status."""
    row: dict[str, Any] = {"method": method.name}
    solution = None
    try:
        solver = method.solver()
        row["solver"] = repr(solver)
        row["adjoint"] = type(method.adjoint).__name__
        energy = task.energy(task.sample.keys, task.sample.queries)
        with torch.no_grad():
            solution = solve(
                energy, task.sample.queries, solver=solver, on_failure="ignore", trace=trace and method.plotted
            )
        row |= _reached(task, energy, solution)
        row |= _cost(method, task, solver, repeats, max_seconds)
    except Exception as error:
        text = str(error).strip().splitlines()
        row |= {"error": type(error).__name__, "message": text[0] if text else ""}
    return row, solution


def _reached(task: Task, energy: AnchoredEnergy, solution: Solution) -> dict[str, Any]:
    sample, z = task.sample, solution.value.detach()
    with torch.no_grad():
        mapped = energy.fixed_point_map(z.to(sample.queries.dtype)).to(z.dtype)
        within = solution.residual <= task.atol + task.rtol * torch.linalg.vector_norm(mapped, dim=-1)
    converged = solution.converged | ((solution.status == Status.BUDGET) & within)
    exact = z.double()
    targets = sample.targets.double()
    columns = {
        "evaluations": solution.num_evals,
        "residual": solution.residual.double(),
        "converged": converged,
        "saddle": converged & (curvature(task, exact) < NEGATIVE),
        "status": solution.status,
        "error": (exact - targets).norm(dim=-1) / targets.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny),
        "other": converged & ((exact - task.reference).norm(dim=-1) > SAME * task.reference.norm(dim=-1)),
    }
    half = z.shape[0] // 2
    parts = {"all": slice(None), TASKS[0]: slice(0, half), TASKS[1]: slice(half, None)}
    summaries = {name: _summary(exact[part], {k: v[part] for k, v in columns.items()}) for name, part in parts.items()}
    return {**summaries.pop("all"), "tasks": summaries}


def _summary(z: Tensor, column: dict[str, Tensor]) -> dict[str, Any]:
    evaluations, residual, error = column["evaluations"].double(), column["residual"], column["error"]
    known, reached = error[error.isfinite()], residual[residual.isfinite()]
    return {
        "queries": len(z),
        "evaluations_median": _median(evaluations),
        "evaluations_max": float(evaluations.max()),
        "residual_median": _median(reached) if len(reached) else None,
        "residual_max": float(reached.max()) if len(reached) else None,
        "converged": float(column["converged"].double().mean()),
        "saddles": int(column["saddle"].sum()),
        "distinct_fixed_points": int(distinct_fixed_points(z[column["converged"]], rtol=SAME)),
        "other_fixed_point": int(column["other"].sum()),
        "retrieval_error_mean": float(known.mean()) if len(known) else None,
        "retrieval_error_median": _median(error),
        "retrieval_rate": float((error < SUCCESS).double().mean()),
        "status": {_name(code): n for code, n in sorted(Counter(column["status"].tolist()).items())},
    }


def _name(code: int) -> str:
    return next(status.name for status in Status if status == code)


def _median(values: Tensor) -> float:
    return float(values.sort().values[(len(values) - 1) // 2])


def curvature(task: Task, z: Tensor) -> Tensor:
    """Smallest eigenvalue of the Hessian of E per query, in float64; NaN for states that are not finite."""
    exact = task.sample.to(z.device, torch.float64)
    energy = energy_of(exact.keys, exact.queries, task.sample.usable, beta=task.beta, anchor=task.anchor)
    return smallest_curvature(energy, z, steps=LANCZOS_STEPS)


def _cost(method: Method, task: Task, solver: Any, repeats: int, max_seconds: float) -> dict[str, Any]:
    """Gradient error, time and memory, on the queries that are finite."""
    sample, finite = task.sample, task.sample.finite
    if not bool(finite.any()):
        return {}
    queries, weights = sample.queries[finite], task.weights[finite]
    device = queries.device
    keys = sample.keys.clone().requires_grad_()

    def forward() -> Tensor:
        keys.grad = None
        energy = task.energy(keys, queries)
        value = solve(energy, queries, solver=solver, adjoint=method.adjoint, on_failure="ignore").value
        return (value * weights.to(value.dtype)).sum()

    def backward(loss: Tensor) -> None:
        if loss.requires_grad:
            torch.autograd.backward(loss)

    seconds = median_times(forward, backward, device=device, repeats=repeats, warmup=1, max_seconds=max_seconds)
    gradient = keys.grad
    memory = peak_memory(lambda: backward(forward()), device)
    norm = task.gradient.norm()
    error = None if gradient is None else float((gradient.double() - task.gradient).norm() / norm)
    return {
        "gradient_error": error,
        "forward_seconds": seconds[0],
        "backward_seconds": seconds[1],
        "peak_memory_bytes": memory,
    }
