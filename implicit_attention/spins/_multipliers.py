"""A convex function with a barrier, whose minimum fixes the lengths of Gaussian spins, and its Newton method."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._solve import solve
from .._torch import exact_precision, host_may_look, is_plain, uncompiled
from ..adjoints import Implicit
from ..linear import Neumann, _matrices
from ..problem import Linearization, Problem
from ..solution import Record, SolveReport, Status
from ..solvers import Outcome, Solver
from ._damped_newton import RUNNING, SampleFunction, descend, of_samples
from ._matrix_inverse import inverse_and_logdet
from .approximation import SampleProblem

#: A step must lower phi by at least this part of what its slope predicts (Armijo's rule).
ARMIJO = 0.1
#: Rounding errors of squared lengths and of phi, in units of eps times the terms of their sums.
ROUNDING = 4.0
#: A solve may be called converged up to this rounding error of a squared length, which should be 1.
COARSEST = 0.25
#: A step may end where phi climbs, with a slope of at most this part of the descent at its start.
UPHILL = 0.5
#: Squared Newton decrement below which phi is practically quadratic: the full step is accepted, as differences of
#: phi are rounding errors below it.
CLOSE = 0.01
#: Factor by which the inverse temperature grows at a time, and how near to 1, as a ratio, squared lengths must be
#: before it grows.
COLDER, NEAR = 4.0, 2.0
#: Passes by which `guess` finds the fields of the spins at each other.
PASSES = 5


class GaussianMoments(NamedTuple):
    """The moments of Gaussian spins at multipliers t.

    covariance: X = A^{-1}, (*batch, n, n). mean: m = X g, (*batch, n, k). value: phi, (*batch). energy: its part
    sum_i lambda_i/2 + Tr g^T X g/2. logdet: of A. positive: whether A > 0.
    """

    covariance: Tensor
    mean: Tensor
    value: Tensor
    energy: Tensor
    logdet: Tensor
    positive: Tensor


class Level(NamedTuple):
    """The numbers that decide whether a step is taken, per sample.

    t: multipliers, (*batch, G). value, energy, positive: as in `GaussianMoments`. variance and square: means over a
    group of X_ii and of |m_i|^2, (*batch, G). noise: rounding error of value. floor: of squared lengths, the largest.
    coldness: the part of the inverse temperature from here on.
    """

    t: Tensor
    value: Tensor
    energy: Tensor
    variance: Tensor
    square: Tensor
    positive: Tensor
    noise: Tensor
    floor: Tensor
    coldness: Tensor

    def accuracy(self, rtol: float) -> tuple[Tensor, Tensor]:
        """The largest error of a group's mean squared length, (*batch), and the largest that is admitted."""
        residual = (self.variance + self.square - 1).abs().amax(-1)
        return residual, self.floor.clamp(max=COARSEST).clamp(min=rtol)

    def squares(self) -> Tensor:
        """Mean squared lengths, (*batch, G)."""
        return self.variance / self.coldness[..., None] + self.square

    def near(self) -> Tensor:
        """Whether squared lengths are near to 1."""
        squares = self.squares()
        return (squares.amax(-1) <= NEAR) & (squares.amin(-1) >= 1 / NEAR)

    def value_at(self, coldness: Tensor) -> Tensor:
        """phi at a higher temperature, but for a constant."""
        return self.value - (1 - coldness) * self.energy


class Multipliers(SampleProblem, general=True):
    """phi(t) = 1/2 sum_i lambda_i - n/2 - 1/2 log det A + 1/2 Tr g^T A^{-1} g, where A = diag(lambda) - J.

    Its minimum makes Gaussian spins of covariance A^{-1} and mean A^{-1} g have mean squared length 1 in every group of
    `tie` rows that share a multiplier. It is the fixed point of Newton's step t + H^{-1} (-grad phi(t)), whose Jacobian
    is 0 there, while the Hessian H counts as a constant.

    Args:
        couplings: J, symmetric, (*batch, n, n).
        field: g, (*batch, n, k).
        tie: rows that share a multiplier.
        live: which rows exist, (*batch, n), at least one; only where all rows are one group, because
            a row alone leaves phi unchanged at lambda = 1, where it then stays.
        minimum: where it was found, (*batch), elsewhere t is a constant; and A^{-1}, log det A and whether A > 0 there.
            With it nothing may be asked at any other t.
    """

    event_ndim = 1

    def __init__(
        self,
        couplings: Tensor,
        field: Tensor,
        tie: int,
        live: Tensor | None,
        minimum: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    ) -> None:
        self.couplings = couplings
        self.field = field
        self.tie = tie
        self.live = live
        known: Any = minimum or (None,) * 4
        self.converged, self.inverse, self.logdet, self.positive = known
        self.own_axes = {"couplings": 2, "field": 2, "live": 1}
        self.own_axes |= {"converged": 0, "inverse": 2, "logdet": 0, "positive": 0}

    @property
    def group_size(self) -> Tensor | int:
        """Rows per group."""
        return self.tie if self.live is None else self.live.sum(-1, keepdim=True)

    def at_minimum(self, t: Tensor, converged: Tensor) -> tuple[Multipliers, Tensor]:
        """The same at its minimum t alone, which it knows, and t as a function of couplings and field."""
        found = self.replace(*(x.detach() for x in self.tensors())).moments(t, precise=True)
        known = converged, found.covariance, found.logdet, found.positive
        problem = Multipliers(self.couplings, self.field, self.tie, self.live, known)
        if not is_plain(self.couplings, self.field):
            t = solve(problem, t, solver=_KNOWN, adjoint=_ADJOINT, on_failure="ignore").value
        return problem, t

    def fixed_point_map(self, z: Tensor) -> Tensor:
        x, m, *_ = moments = self.moments(z)
        change = self._newton(x.detach(), m.detach(), self.excess(moments) * self.group_size / 2)
        return torch.where(self.converged[..., None], z + change, z.detach())

    def linearize(self, z: Tensor) -> Linearization:
        def by_tensors(u: Tensor) -> tuple[Tensor | None, ...]:
            # A change dJ, dg makes dX = X dJ X and dm = X (dg + dJ m), and the lengths at fixed t what it is to undo.
            x, m, *_ = self.moments(z)
            rows = self.rows(self._newton(x, m, u))[..., None]
            by_field = x @ (rows * m)
            by_couplings = (x * (rows.mT / 2)) @ x + by_field @ m.mT
            return by_couplings, by_field, *(None,) * (len(self.tensors()) - 2)

        return Linearization(torch.zeros_like, torch.zeros_like, by_tensors)

    def _newton(self, x: Tensor, m: Tensor, force: Tensor) -> Tensor:
        """H^{-1} v, or 0 where t is a constant."""
        hessian, converged = self.hessian(x, m), self.converged
        eye = torch.eye(hessian.shape[-1], dtype=hessian.dtype, device=hessian.device)
        safe = torch.where(converged[..., None, None], hessian, eye)
        solution = _matrices.solve(safe, force[..., None]).squeeze(-1)
        return torch.where(converged[..., None], solution, 0.0)

    def rows(self, of_groups: Tensor, elsewhere: float = 0.0) -> Tensor:
        """Numbers of groups, (*batch, G), to their rows, (*batch, n)."""
        # torch.vmap has no rule for flatten inside of a backward pass.
        each = of_groups[..., None].expand(*of_groups.shape, self.tie)
        each = each.reshape(*of_groups.shape[:-1], self.couplings.shape[-1])
        return each if self.live is None else torch.where(self.live, each, elsewhere)

    def mean(self, rows: Tensor) -> Tensor:
        """Means of rows over groups, (*batch, G)."""
        if self.live is not None:
            rows = torch.where(self.live, rows, 0.0)
        return _sums(rows, self.tie) / self.group_size

    def coldness(self) -> Tensor:
        """The part of the inverse temperature, (*batch), at which couplings are no more than spins can take."""
        size = self.couplings.abs().sum(-1) - self.couplings.diagonal(dim1=-2, dim2=-1).abs()
        return (COLDER / size.amax(-1)).clamp(max=1.0)

    def start(self) -> Tensor:
        """Multipliers at which A > 0 for certain, by Gershgorin's discs, and exact for a lone site."""
        size = self.couplings.abs().sum(-1)
        own = self.couplings.diagonal(dim1=-2, dim2=-1)
        reach = _grouped(size - own.abs() + own, self.tie).amax(-1)
        # A group needs the multiplier of a lone site in its field, plus the radius of its Gershgorin disc.
        square = self.mean(self.field.square().sum(-1))
        warm = 1 / self.coldness()[..., None]
        return reach + (warm + (warm.square() + 4 * square).sqrt()) / 2

    def guess(self) -> Tensor:
        """Multipliers, (batch, G), near the solution where couplings are many, weak and random; one axis of samples.

        There the others give spin i a field f_i and add r_i = sum_j J_ij^2 X_jj to what its multiplier would be alone
        (Thouless, Anderson and Palmer). So X_ii = 1/(lambda_i - J_ii - r_i) = c_i and m_i = c_i f_i, of length 1 with

            c_i = 2/(1 + (1 + 4 |f_i|^2)^(1/2)),    f_i = g_i + sum_j J_ij m_j - r_i m_i,

        which is found by passes that take the last m_i from the pass before (Bolthausen). For other couplings A may not
        be positive.
        """
        with exact_precision(self.field):
            # Two digits are more than is true of the approximation.
            g, couplings = self.field.float(), self.couplings.float()
            own = couplings.diagonal(dim1=-2, dim2=-1)
            couplings = couplings - torch.diag_embed(own)
            squares = couplings.square()
            field, before = g, torch.zeros_like(g)
            c = self._lone_variance(field)
            for _ in range(PASSES):
                m = c[..., None] * field
                reaction = torch.linalg.vecdot(squares, c[..., None, :])
                direct = torch.addcmul(g, reaction[..., None], before, value=-1)
                field, before = torch.baddbmm(direct, couplings, m), m
                c = self._lone_variance(field)
            reaction = torch.linalg.vecdot(squares, c[..., None, :])
            return self.mean(own + reaction + 1 / c).to(self.field.dtype)

    def _lone_variance(self, field: Tensor) -> Tensor:
        """X_ii of rows without couplings, (*batch, n), in fields whose squares are averaged over groups."""
        square = self.mean(torch.linalg.vecdot(field, field))
        return 2 / (1 + (1 + 4 * self.rows(square)).sqrt())

    def moments(self, t: Tensor, *, precise: bool = False) -> GaussianMoments:
        """The moments at t; with `precise` phi keeps its digits where couplings and field are weak."""
        spread = self.rows(t, 1.0)
        own = spread - 1 - self.couplings.diagonal(dim1=-2, dim2=-1) if precise else None
        known = None if self.inverse is None else (self.inverse, self.logdet, self.positive)
        x, logdet, positive = inverse_and_logdet(torch.diag_embed(spread) - self.couplings, own, known)
        m = x @ self.field
        # Summed row by row, so that rows without couplings add no rounding error.
        energy = (spread - 1 + (self.field * m).sum(-1)).sum(-1)
        return GaussianMoments(x, m, (energy - logdet) / 2, energy / 2, logdet, positive)

    def excess(self, moments: GaussianMoments) -> Tensor:
        """Mean squared lengths of the rows of every group, less 1, (*batch, G): minus twice the gradient of phi over
        the group's size."""
        squares = moments.covariance.diagonal(dim1=-2, dim2=-1) + moments.mean.square().sum(-1)
        return self.mean(squares) - 1

    def level(self, t: Tensor, moments: GaussianMoments, coldness: Tensor) -> Level:
        x, m, value, energy, _, positive = moments
        spread = self.rows(t, 1.0)
        row, length = torch.linalg.vector_norm(x, dim=-1), torch.linalg.vector_norm(m, dim=-1)
        # First-order effect on phi and on lengths of errors of eps in the entries of A, |A_ij| <= max_i A_ii.
        eps = ROUNDING * torch.finfo(x.dtype).eps
        size = (spread - self.couplings.diagonal(dim1=-2, dim2=-1)).abs().amax(-1)
        noise = eps * (spread.abs().sum(-1) + spread.shape[-1])
        each = row * (row + 2 * length * torch.linalg.vector_norm(length, dim=-1, keepdim=True))
        floor = eps * size * self.mean(each).amax(-1)
        variance, square = self.mean(x.diagonal(dim1=-2, dim2=-1)), self.mean(length.square())
        return Level(t, value, energy, variance, square, positive, noise, floor, coldness)

    def hessian(self, x: Tensor, m: Tensor, coldness: Tensor | None = None) -> Tensor:
        """Second derivatives of phi by t, (*batch, G, G), where spins have covariance x and mean m."""
        pulled = m if coldness is None else coldness[..., None, None] * m
        # In place, as new memory takes more time than the products.
        rows = (pulled @ m.mT).add_(x, alpha=0.5).mul_(x)
        if self.live is not None:
            rows = torch.where(self.live[..., :, None] & self.live[..., None, :], rows, 0.0)
        return _sums(_sums(rows, self.tie).mT, self.tie)


class _Known(Solver):
    """The solver of a problem whose solution is given."""

    def run(self, problem: Problem, initial: Tensor, *, trace: bool = False, graph: bool = False) -> Outcome:
        return Outcome(initial.clone(), Record.unmeasured(initial, Status.CONVERGED, problem.event_ndim))


_KNOWN = _Known()
#: I - J is 1.
_ADJOINT = Implicit(Neumann())


@uncompiled
def minimise(problem: Multipliers, *, rtol: float, max_steps: int) -> tuple[Tensor, SolveReport]:
    """The multipliers t*, (*batch, G), by damped Newton steps from `guess()` or `start()`, every sample on its own.

    Cold spins drive Newton's method to the edge of the domain, along which it creeps. They are cooled by steps instead:
    at the coldness s, a part of the inverse temperature, couplings, field and multipliers are s times what they will
    be, and phi is, but for a constant,

        phi_s(t) = s/2 (sum_i lambda_i + Tr g^T A^{-1} g) - 1/2 log det A,

    whose minimum has X_ii/s + |m_i|^2 = 1: the central path of s = 0 to 1, whose barrier is log det A.

    The residual is the largest error of a group's mean squared length, the tolerance is rtol or the rounding error of
    that length, if it is larger. Samples that are done make their next step nonetheless, unmeasured.
    """

    def solved(*tensors: Tensor) -> tuple[Tensor, ...]:
        phi = _Phi(problem.replace(*tensors), rtol)
        course = descend(phi, *phi.begun(), max_steps)
        level, status = course.point, course.status
        polished = (status == Status.CONVERGED) & (level.coldness == 1)
        t = torch.where(polished[..., None], level.t + course.step, level.t)
        return t, status, *level.accuracy(rtol), course.num_steps, course.num_evals

    t, *record = of_samples(solved, problem.field.ndim - 2, *problem.tensors())
    return t, SolveReport(Record(*record))


@dataclasses.dataclass(frozen=True)
class _Phi(SampleFunction):
    """phi, on whose way down spins are cooled."""

    problem: Multipliers
    rtol: float

    def begun(self) -> tuple[Level, GaussianMoments, Tensor, Tensor]:
        """At the guess where lengths are near to 1 at it, else at the start, which is then the second evaluation."""
        problem, t = self.problem, self.problem.guess()
        moments = problem.moments(t)
        level = problem.level(t, moments, torch.ones_like(t[..., 0]))
        near = level.positive & level.near()
        if not (host_may_look(near) and bool(near.all())):
            t = torch.where(near[..., None], t, problem.start())
            coldness = torch.where(near, level.coldness, problem.coldness())
            moments = problem.moments(t)
            level = problem.level(t, moments, coldness)
        fit = level.positive & level.value.isfinite()
        status = torch.where(fit, RUNNING, int(Status.NONFINITE)).to(torch.int8)
        return level, moments, status, 2 - near.to(torch.int32)

    def point(self, z: Tensor, before: Level) -> tuple[Level, GaussianMoments]:
        moments = self.problem.moments(z)
        level = self.problem.level(z, moments, before.coldness)
        colder = torch.where(level.near(), COLDER * before.coldness, before.coldness)
        return level._replace(coldness=colder.clamp(max=1.0)), moments

    def step(self, point: Level, more: GaussianMoments, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Newton's step, shortened where spins are short; Jacobi's where rounding has made the Hessian indefinite."""
        force = self._force(point, point.coldness)
        hessian = self.problem.hessian(more.covariance, more.mean, point.coldness)
        factor, info = torch.linalg.cholesky_ex(hessian)
        # cholesky_solve would copy the factor.
        half = torch.linalg.solve_triangular(factor, force[..., None], upper=False)
        newton = torch.linalg.solve_triangular(factor.mT, half, upper=True).squeeze(-1)
        # The inverse of the squared length c of a short spin is linear in its multiplier. So Newton's step is made for
        # 1/c = 1: it is c times the step for c = 1, which would have to be halved until it is as short.
        short = point.squares().amin(-1, keepdim=True).clamp(max=1.0)
        step = torch.where((info == 0)[..., None], newton * short, force / hessian.diagonal(dim1=-2, dim2=-1))
        return step, torch.ones_like(point.value)

    def accepts(self, point: Level, trial: Level, step: Tensor, size: Tensor) -> Tensor:
        """Whether phi falls as its slope promises, but for its rounding error, and the step ends well before the
        barrier: beside it the slope has turned uphill."""
        coldness = point.coldness
        slope, trial_slope = (-(self._force(level, coldness) * step).sum(-1) for level in (point, trial))
        falls = trial.value_at(coldness) - point.value_at(coldness) <= ARMIJO * size * slope + point.noise
        return trial.positive & (falls | (slope >= -CLOSE)) & (trial_slope <= -UPHILL * slope)

    def done(self, point: Level) -> Tensor:
        residual, tolerance = point.accuracy(self.rtol)
        return residual <= tolerance

    def _force(self, level: Level, coldness: Tensor) -> Tensor:
        """Minus the gradient of phi_s."""
        return self.problem.group_size * (level.variance + coldness[..., None] * (level.square - 1)) / 2


def _grouped(rows: Tensor, tie: int) -> Tensor:
    """The last axis in groups of `tie`, (..., G, tie)."""
    return rows.reshape(*rows.shape[:-1], rows.shape[-1] // tie, tie)


def _sums(rows: Tensor, tie: int) -> Tensor:
    """Sums over groups of the last axis, (..., G)."""
    return rows if tie == 1 else _grouped(rows, tie).sum(-1)
