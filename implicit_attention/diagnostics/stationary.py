"""The stationary points of an energy of few dimensions: minima, saddles and maxima."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from .._torch import exact_precision
from ..energies import AnchoredEnergy
from ..energies.base import Energy
from ..potentials.masked_keys import in_double
from ..problem import Problem

Kind = Literal["minimum", "saddle", "maximum"]

#: Points nearer to each other than this, relative to 1 + |z|, are one.
APART = 1e-6
#: |grad E| at a point that counts, relative to 1 + |z|.
SMALL = 1e-8
#: Curvatures that are none.
FLAT = 1e-10


@dataclasses.dataclass(frozen=True)
class StationaryPoints:
    """The places at which the gradient of an energy is 0, lowest energy first.

    Not for solutions of many problems: `Solution` has one value for each.

    Attributes:
        value: (K, D), the points.
        energy: (K,), the energy there.
        curvatures: (K, D), eigenvalues of the Hessian there, ascending.
        kind: of each "minimum" (all curvatures > 0), "maximum" (all < 0) or "saddle" (the rest, where a curvature of
            exactly 0 counts).

    Examples:
        >>> import torch
        >>> from implicit_attention.diagnostics import StationaryPoints
        >>> zero = torch.zeros(1, 2)
        >>> points = StationaryPoints(zero, zero[:, 0], torch.tensor([[-1.0, 2.0]]), ["saddle"])
        >>> len(points), points.of_kind("saddle").tolist()
        (1, [[0.0, 0.0]])
    """

    value: Float[Tensor, "K D"]
    energy: Float[Tensor, "K"]
    curvatures: Float[Tensor, "K D"]
    kind: list[Kind]

    def __len__(self) -> int:
        return len(self.kind)

    def of_kind(self, kind: Kind) -> Float[Tensor, "count D"]:
        """The points of one kind."""
        return self.value[[own == kind for own in self.kind]]


@torch.no_grad()
def stationary_points(problem: Problem, starts: Float[Tensor, "S D"], *, steps: int = 100) -> StationaryPoints:
    """Find where the gradient of an energy is 0, minima or not, by guarded Newton steps from every start.

    From z the step is -(H^2 + m I)^(-1) H grad E(z) with the Hessian H: it goes down on |grad E|^2, so that saddles and
    maxima are found as minima are. m grows where |grad E| would not fall. Points that were found more than once count
    once. Ends at which the gradient or the rest of the way is not small are dropped, and those that are flat in all
    directions. All is done in float64.

    Not for many dimensions, as every step holds a dense D x D Hessian per start; and not for the solution of a problem:
    use `solve`.

    Args:
        problem: an energy with one problem per row, all of the same energy, as many rows as there are starts:
            `AnchoredEnergy(potential, starts)`. With an anchor above 0 repeat one query in all rows of its field.
        starts: (S, D). The more of them, the less likely is a point to be missed; nothing certifies that none is.
        steps: Newton steps at most.

    Returns:
        `StationaryPoints`. Of a smooth energy in the plane that grows on all sides, minima - saddles + maxima = 1
        where all are found and none is degenerate.

    Raises:
        TypeError, ValueError: a problem without an energy, of coupled tokens, with a metric or of states on a sphere;
            rows of different energies; starts that do not fit.

    Gradients: none.

    Source: Levenberg (1944) and Marquardt (1963), for the equations grad E = 0.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp
        >>> from implicit_attention.diagnostics import stationary_points
        >>> keys = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> line = torch.linspace(-1.5, 1.5, 8)
        >>> starts = torch.cartesian_prod(line, line)
        >>> points = stationary_points(AnchoredEnergy(LogSumExp(keys, beta=2.0), starts), starts)
        >>> points.kind, points.value[-1].abs().round(decimals=3).tolist()
        (['minimum', 'minimum', 'saddle'], [0.0, 0.0])
    """
    check_energy("problem", problem)
    _validate.check_float_tensor("starts", starts)
    required = "be states of one problem each, shape (S, D)"
    _validate.require(starts.ndim == 2, "starts", required, f"shape {tuple(starts.shape)}")
    steps = _validate.check_integer("steps", steps, low=0)
    problem.check_state(starts)
    problem = doubled(problem)
    assert isinstance(problem, Energy)
    z = in_double(starts)
    with exact_precision(z):
        if not same_energies(problem, z):
            remedy = "call it for one row at a time; with an anchor above 0 repeat one query in all rows of the field"
            required = "have the same energy in all rows"
            raise ValueError(_validate.message("problem", required, "rows that differ at one state", remedy))
        z = _descended(problem, z, steps)
        return _gathered(problem, z)


def check_energy(argument: str, problem: Problem) -> None:
    """Raise unless `problem` is an energy over all states, with one problem per row."""
    if problem.event_ndim != 1:
        remedy = "freeze the keys: RepeatedSelfAttention(tokens, beta).frozen_energy(tokens)"
        received = f"{type(problem).__name__}, whose tokens are coupled (event_ndim {problem.event_ndim})"
        raise ValueError(_validate.message(argument, "have one problem per row (event_ndim 1)", received, remedy))
    remedy = "pass an AnchoredEnergy or an EnergyFunction"
    if not problem.has_energy:
        raise TypeError(_validate.message(argument, "be an energy", type(problem).__name__, remedy))
    free = isinstance(problem, Energy) and not problem.has_metric and type(problem).retract is Problem.retract
    received = f"{type(problem).__name__}, which has a metric or a constraint"
    _validate.require(free, argument, "be an energy over all of the space", received, remedy)


def doubled(problem: Problem) -> Problem:
    """The same problem in float64."""
    return problem.replace(*(in_double(t) if t.is_floating_point() else t for t in problem.tensors()))


def copies(problem: Problem, row: int, states: Tensor) -> Problem:
    """The problem of one row of (N, D) for each of `states` (K, D); the problem itself where it numbers none."""
    index = torch.full(states.shape[:1], row, device=states.device)
    if (rows := problem.select(index)) is not None:
        if isinstance(rows, AnchoredEnergy) and len(rows.field) != len(index):
            # The field of a single row was left to broadcast.
            rows.field = rows.field.expand_as(states).contiguous()
        return rows
    if type(problem) is AnchoredEnergy:
        # A potential that cannot pick rows has the same for all.
        field = problem.field[index]
        return AnchoredEnergy(problem.potential, field, problem.anchor, unbounded="ignore")
    return problem


def same_energies(problem: Problem, like: Tensor) -> bool:
    """Whether all rows have one energy, by its values at three states on the scale of `like` (S, D)."""
    if len(like) < 2:
        return True
    generator = torch.Generator().manual_seed(0)
    finite = like.where(like.isfinite(), 0.0)
    states = torch.randn(3, like.shape[-1], generator=generator, dtype=torch.float64).to(like) * (
        1 + finite.abs().max()
    )
    for state in states:
        energies = problem.energy(state.expand_as(like).contiguous())
        far = (energies - energies[0]).abs() > 1e3 * torch.finfo(like.dtype).eps * (1 + energies[0].abs())
        if bool(far.any()):
            return False
    return True


def _derivatives(problem: Energy, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient in the basis of the Hessian's eigenvectors, its eigenvalues, ascending, and the basis, per row."""
    gradient = problem.gradient(z)
    columns = [problem.hessian_product(z, v.expand_as(z).contiguous()) for v in torch.eye(z.shape[-1]).to(z)]
    hessian = torch.stack(columns, -1)
    finite = hessian.isfinite().all(-1).all(-1) & gradient.isfinite().all(-1)
    hessian = hessian.masked_fill(~finite[:, None, None], 0.0)
    eigenvalues, basis = torch.linalg.eigh((hessian + hessian.mT) / 2)
    return (basis.mT @ gradient[..., None])[..., 0], eigenvalues, basis


def _descended(problem: Energy, z: Tensor, steps: int) -> Tensor:
    """Levenberg and Marquardt on grad E = 0, every row with its own damping; rows that are done leave."""
    z = z[z.isfinite().all(-1)]
    active = torch.arange(len(z), device=z.device)
    damping = torch.full_like(z[:, 0], 1e-2)
    for _ in range(steps):
        if not len(active):
            break
        # The rows are alike, so that those of row 0 serve for all that are active.
        rows = copies(problem, 0, active)
        assert isinstance(rows, Energy)
        now, m = z[active], damping[active]
        slope, curvature, basis = _derivatives(rows, now)
        step = -(curvature * slope) / (curvature.square() + (m * slope.norm(dim=-1))[:, None] + 1e-300)
        proposed = now + (basis @ step[..., None])[..., 0]
        size = slope.norm(dim=-1)
        better = rows.gradient(proposed).norm(dim=-1) < size
        z[active] = proposed.where(better[:, None], now)
        damping[active] = torch.where(better, m / 8, m * 8)
        # Damping without end: a place at which |grad E| is lowest, and not 0.
        going = size.isfinite() & (size > 1e-15 * (1 + now.norm(dim=-1))) & (m < 1e12)
        active = active[going]
    return z


def _gathered(problem: Energy, z: Tensor) -> StationaryPoints:
    """The stationary points among the ends, each once, sorted by energy."""
    rows = copies(problem, 0, z)
    assert isinstance(rows, Energy)
    slope, curvatures, _ = _derivatives(rows, z)
    energy = rows.energy(z)
    scale, size = 1 + z.norm(dim=-1), slope.norm(dim=-1)
    # How far the point may be, to first order. Along a flat direction of a valley there is no such number; where all
    # directions are flat the energy falls off, and a small gradient says nothing.
    flat = (slope.abs() <= 1e-13 * scale[:, None]) & (curvatures.abs() <= FLAT)
    left = torch.where(flat, 0.0, slope / curvatures).norm(dim=-1)
    good = (size <= SMALL * scale) & (left <= APART * scale) & ~flat.all(-1) & energy.isfinite()
    order = torch.argsort(size.masked_fill(~good, torch.inf), stable=True)[: int(good.sum())]
    kept = []
    while len(order):
        first, order = order[0], order[1:]
        kept.append(first)
        order = order[(z[order] - z[first]).norm(dim=-1) > 2 * APART * scale[first]]
    chosen = torch.stack(kept) if kept else order
    chosen = chosen[torch.argsort(energy[chosen], stable=True)]
    curvatures = curvatures[chosen]
    kind: list[Kind] = [
        "minimum" if low > 0 else "maximum" if high < 0 else "saddle"
        for low, *_, high in curvatures[:, [0, -1]].tolist()
    ]
    return StationaryPoints(z[chosen], energy[chosen], curvatures, kind)
