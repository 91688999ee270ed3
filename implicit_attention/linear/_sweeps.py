"""The one loop of the linear solvers: sweeps from true residuals, per-problem freezing, the final evidence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._types import LinearMap
from .._validate import check_float_tensor, check_same_kind, message, require
from ..status import Status
from ._solution import LinearSolution
from ._vectors import choose, norm, normalised

if TYPE_CHECKING:
    from .base import LinearSolver

#: A sweep that leaves more than this part of the residual is no progress.
PROGRESS = 0.999
#: How far above the tolerance rounding may keep a residual that the method's own recurrence has below it.
SLACK = 10.0
#: The smallest relative tolerance of float32 (with a tenth of slack for a tolerance that was itself rounded).
FLOAT32_RTOL = 1e-6


@dataclass(frozen=True)
class System:
    """The batch to solve: A as a checked map, b in units of its own size, the tolerance (*batch) and the step limit."""

    apply: LinearMap
    b: Tensor
    tolerance: Tensor
    max_steps: int


@dataclass(frozen=True)
class Record:
    """Where every problem stands between two sweeps; status MAX_STEPS means that it may still go on."""

    value: Tensor
    residual: Tensor
    residual_norm: Tensor
    status: Tensor
    num_steps: Tensor
    negative_curvature: Tensor
    direction: Tensor | None


def run(solver: LinearSolver[Any], matvec: LinearMap, b: Tensor, initial: Tensor | None) -> LinearSolution:
    """Sweep until no problem may go on; see `LinearSolver.solve`."""
    check_arguments(solver.rtol, matvec, b, initial)
    b, max_steps = b.detach(), solver.max_steps or solver.default_max_steps(b.shape[-1])
    if b.numel() == 0:
        return evidence(first_record(b, b, b.sum(-1), b.sum(-1), solver.keeps_direction), b.new_ones(()))
    # In units of a power of two for each problem, so that no size of b, nor its tolerance, over- or underflows.
    _, scale = normalised(b if initial is None else torch.cat([b, initial.detach()], -1))
    unit = b / scale.unsqueeze(-1)
    # Not a number over a tensor, which torch multiplies by a reciprocal: that of a small scale is inf.
    tolerance = torch.full_like(scale, solver.atol) / scale + solver.rtol * norm(unit)
    system = System(checked(matvec, b), unit, tolerance, max_steps)
    record = opened(system, None if initial is None else initial.detach() / scale.unsqueeze(-1), solver.keeps_direction)
    for sweep in range(solver.max_sweeps or max_steps):
        cost = min(sweep, 1)  # the residual with which a restart begins
        live = (record.status == Status.MAX_STEPS) & (record.num_steps + cost < max_steps)
        if not bool(live.any()):
            break
        record = replace(record, num_steps=record.num_steps + cost * live)
        record = swept(solver, system, record, live, sweep)
    return evidence(record, scale)


def swept(solver: LinearSolver[Any], system: System, record: Record, live: Tensor, sweep: int) -> Record:
    """One sweep of the live problems, undone where it made the residual worse."""
    unit, scale = normalised(record.residual)
    state = solver.begin(choose(live, unit, torch.zeros_like(unit)))
    state, num_steps = stepped(solver, system, state, live, system.tolerance / scale, record.num_steps)
    value = torch.addcmul(record.value, scale.unsqueeze(-1), solver.correction(state))
    residual = system.b - system.apply(value)
    reached = norm(residual)
    kept = live & (reached.isfinite() if sweep == 0 and not solver.monotone else reached < record.residual_norm)
    met, direction = live & state.negative_curvature, record.direction
    if direction is not None:
        direction = choose(met, solver.direction(state), direction)
    after = Record(
        value=choose(kept, value, record.value),
        residual=choose(kept, residual, record.residual),
        residual_norm=torch.where(kept, reached, record.residual_norm),
        status=record.status,
        num_steps=num_steps,
        negative_curvature=record.negative_curvature | met,
        direction=direction,
    )
    # Where a sweep is the last that can help: it made no progress, or no other is allowed.
    settled = ~(reached < PROGRESS * record.residual_norm) | (sweep + 1 == solver.max_sweeps)
    claimed = state.residual_norm * scale <= system.tolerance
    status = judged(system, after, state.verdict, settled, claimed)
    status = coded(~reached.isfinite() & (sweep == 0), Status.NONFINITE, status)
    return replace(after, status=torch.where(live, status, record.status))


def judged(system: System, record: Record, verdict: Tensor, settled: Tensor, claimed: Tensor) -> Tensor:
    """Status after a sweep: by the true residual first, then by the method's verdict, then by the progress made."""
    status = coded(settled & (record.num_steps < system.max_steps), Status.STALLED, record.status)
    # Refined, and still short of what the method claims: that is rounding, and good enough within SLACK.
    rounding = settled & claimed & (record.residual_norm <= SLACK * system.tolerance)
    status = coded(rounding, Status.CONVERGED, status)
    status = torch.where(verdict >= 0, verdict, status)
    return coded(record.residual_norm <= system.tolerance, Status.CONVERGED, status)


def stepped(
    solver: LinearSolver[Any], system: System, state: Any, live: Tensor, tolerance: Tensor, num_steps: Tensor
) -> tuple[Any, Tensor]:
    """Step while any live problem is above its tolerance, has no verdict and has steps left."""
    check_every = solver.check_every or (1 if live.device.type == "cpu" else 4)
    for step in range(solver.sweep_steps(system.max_steps)):
        # A NaN residual compares false: such a problem rests until the true residual gives its status.
        wanted = (state.residual_norm > tolerance) & (state.verdict < 0)
        active = live & wanted & (num_steps < system.max_steps)
        if step and step % check_every == 0 and not bool(active.any()):
            break
        state = solver.step(system.apply, state, active)
        num_steps = num_steps + active
    return state, num_steps


def opened(system: System, initial: Tensor | None, keeps_direction: bool) -> Record:
    """The record of the initial guess; problems with b = 0 start, and end, at 0."""
    value, residual = torch.zeros_like(system.b), system.b
    if initial is not None:
        asked = norm(system.b) != 0
        value = choose(asked, initial, value)
        residual = choose(asked, system.b - system.apply(value), system.b)
    return first_record(value, residual, norm(residual), system.tolerance, keeps_direction)


def first_record(value: Tensor, residual: Tensor, reached: Tensor, tolerance: Tensor, keeps_direction: bool) -> Record:
    status = torch.full_like(reached, Status.MAX_STEPS, dtype=torch.int8)
    status = coded(reached <= tolerance, Status.CONVERGED, status)
    return Record(
        value=value,
        residual=residual,
        residual_norm=reached,
        status=coded(~reached.isfinite(), Status.NONFINITE, status),
        num_steps=torch.zeros_like(status, dtype=torch.int64),
        negative_curvature=torch.zeros_like(status, dtype=torch.bool),
        direction=torch.zeros_like(value) if keeps_direction else None,
    )


def evidence(record: Record, scale: Tensor) -> LinearSolution:
    """The solution to hand out, in the units of b: a problem that met a NaN or an infinity gets NaN, not a number."""
    broken = record.status == Status.NONFINITE
    return LinearSolution(
        value=choose(broken, torch.full_like(record.value, torch.nan), record.value * scale.unsqueeze(-1)),
        status=record.status,
        residual=(record.residual_norm * scale).masked_fill(broken, torch.nan),
        num_steps=record.num_steps,
        negative_curvature=record.negative_curvature,
        direction=record.direction,
    )


def coded(where: Tensor, status: Status, otherwise: Tensor) -> Tensor:
    return otherwise.masked_fill(where, int(status))


def checked(matvec: LinearMap, b: Tensor) -> LinearMap:
    """Matvec, with every result compared with b in shape, dtype and device (no synchronisation)."""

    def apply(vector: Tensor) -> Tensor:
        product = matvec(vector)
        require(product.shape == b.shape, "matvec", f"return the shape {tuple(b.shape)} of b", tuple(product.shape))
        check_same_kind([("b", b), ("matvec(x)", product)])
        return product

    return apply


def check_arguments(rtol: float, matvec: LinearMap, b: Tensor, initial: Tensor | None) -> None:
    """Types, shapes, dtypes and devices; nothing here reads the numbers in a tensor."""
    if not callable(matvec):
        raise TypeError(message("matvec", "be callable", type(matvec).__name__, "pass lambda x: A @ x"))
    check_float_tensor("b", b, min_ndim=1)
    if b.dtype not in (torch.float32, torch.float64):
        raise TypeError(message("b", "have the dtype float32 or float64", b.dtype, "convert it with b.float()"))
    if b.dtype == torch.float32:
        remedy = "use rtol >= 1e-6 or convert the problem to float64"
        require(rtol >= 0.9 * FLOAT32_RTOL, "rtol", f"be >= {FLOAT32_RTOL:g} for float32", rtol, remedy)
    if initial is not None:
        check_float_tensor("initial", initial)
        require(initial.shape == b.shape, "initial", f"have the shape {tuple(b.shape)} of b", tuple(initial.shape))
        check_same_kind([("b", b), ("initial", initial)])
