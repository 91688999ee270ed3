"""A convex function with a barrier, whose minimum fixes the lengths of Gaussian spins, and its Newton method."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._autograd import exact_precision, looks_every, uncompiled
from ..solution import Record, SolveReport
from ..status import Status
from ._matrix_inverse import inverse_and_logdet

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
# Finished samples leave the working set when fewer than this part of it are running.
COMPACT_BELOW = 2 / 3
#: Passes by which `guess` finds the fields of the spins at each other.
PASSES = 5
_RUNNING = -1


class GaussianMoments(NamedTuple):
    """The moments of Gaussian spins at multipliers t.

    covariance: X = A^{-1}, (*batch, n, n). mean: m = X g, (*batch, n, k). value: phi, (*batch). energy: its part
    sum_i lambda_i/2 + Tr g^T X g/2. positive: whether A > 0.
    """

    covariance: Tensor
    mean: Tensor
    value: Tensor
    energy: Tensor
    positive: Tensor


class Level(NamedTuple):
    """The numbers that decide whether a step is taken, per sample.

    value, energy, positive: as in `GaussianMoments`. variance and square: means over a group of X_ii and of |m_i|^2,
    (*batch, G). noise: rounding error of value. floor: of squared lengths, the largest.
    """

    value: Tensor
    energy: Tensor
    variance: Tensor
    square: Tensor
    positive: Tensor
    noise: Tensor
    floor: Tensor

    def accuracy(self, rtol: float) -> tuple[Tensor, Tensor]:
        """The largest error of a group's mean squared length, (*batch), and the largest that is admitted."""
        residual = (self.variance + self.square - 1).abs().amax(-1)
        return residual, self.floor.clamp(max=COARSEST).clamp(min=rtol)

    def squares(self, coldness: Tensor) -> Tensor:
        """Mean squared lengths, (*batch, G), at a higher temperature."""
        return self.variance / coldness[..., None] + self.square

    def value_at(self, coldness: Tensor) -> Tensor:
        """phi at a higher temperature, but for a constant."""
        return self.value - (1 - coldness) * self.energy


class Multipliers(NamedTuple):
    """phi(t) = 1/2 sum_i lambda_i - n/2 - 1/2 log det A + 1/2 Tr g^T A^{-1} g, where A = diag(lambda) - J.

    Its minimum makes Gaussian spins of covariance A^{-1} and mean A^{-1} g have mean squared length 1 in every group of
    `tie` rows that share a multiplier.

    couplings: J, symmetric, (*batch, n, n). field: g, (*batch, n, k). live: which rows exist, (*batch, n); only where
    all rows are one group, because a row alone leaves phi unchanged at lambda = 1, where it then stays.
    """

    couplings: Tensor
    field: Tensor
    tie: int
    live: Tensor | None

    @property
    def group_size(self) -> Tensor | int:
        """Rows per group."""
        return self.tie if self.live is None else self.live.sum(-1, keepdim=True).clamp(min=1)

    def samples(self, batch: torch.Size) -> Multipliers:
        """The same without derivatives and with one axis of samples."""

        def joined(x: Tensor) -> Tensor:
            return x.detach().reshape(batch.numel(), *x.shape[len(batch) :])

        live = None if self.live is None else joined(self.live)
        return Multipliers(joined(self.couplings), joined(self.field), self.tie, live)

    def take(self, samples: Tensor) -> Multipliers:
        """Some of the samples."""
        live = None if self.live is None else self.live[samples]
        return Multipliers(self.couplings[samples], self.field[samples], self.tie, live)

    def rows(self, of_groups: Tensor, elsewhere: float = 0.0) -> Tensor:
        """Numbers of groups, (*batch, G), to their rows, (*batch, n): the transpose of `pool`."""
        if self._alone:
            return of_groups
        # torch.vmap has no rule for flatten inside of a backward pass.
        each = of_groups[..., None].expand(*of_groups.shape, self.tie)
        each = each.reshape(*of_groups.shape[:-1], of_groups.shape[-1] * self.tie)
        return each if self.live is None else torch.where(self.live, each, elsewhere)

    def pool(self, rows: Tensor) -> Tensor:
        """Sums of rows over groups, (*batch, G)."""
        if self.live is not None:
            rows = torch.where(self.live, rows, 0.0)
        return _sums(rows, self.tie)

    def mean(self, rows: Tensor) -> Tensor:
        """Means of rows over groups, (*batch, G)."""
        return rows if self._alone else self.pool(rows) / self.group_size

    @property
    def _alone(self) -> bool:
        """Whether every row is a group."""
        return self.tie == 1 and self.live is None

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
        x, logdet, positive = inverse_and_logdet(torch.diag_embed(spread) - self.couplings, own)
        m = x @ self.field
        # Summed row by row, so that rows without couplings add no rounding error.
        energies = spread - 1 + (self.field * m).sum(-1)
        energy = energies.sum(-1)
        return GaussianMoments(x, m, (energy - logdet) / 2, energy / 2, positive)

    def excess(self, moments: GaussianMoments) -> Tensor:
        """Mean squared lengths of the rows of every group, less 1, (*batch, G): minus twice the gradient of phi over
        the group's size."""
        squares = moments.covariance.diagonal(dim1=-2, dim2=-1) + moments.mean.square().sum(-1)
        return self.mean(squares) - 1

    def level(self, t: Tensor, moments: GaussianMoments) -> Level:
        x, m, value, energy, positive = moments
        spread = self.rows(t, 1.0)
        row, length = torch.linalg.vector_norm(x, dim=-1), torch.linalg.vector_norm(m, dim=-1)
        # First-order effect on phi and on lengths of errors of eps in the entries of A, |A_ij| <= max_i A_ii.
        eps = ROUNDING * torch.finfo(x.dtype).eps
        size = (spread - self.couplings.diagonal(dim1=-2, dim2=-1)).abs().amax(-1)
        noise = eps * (spread.abs().sum(-1) + spread.shape[-1])
        each = row * (row + 2 * length * torch.linalg.vector_norm(length, dim=-1, keepdim=True))
        floor = eps * size * self.mean(each).amax(-1)
        variance, square = self.mean(x.diagonal(dim1=-2, dim2=-1)), self.mean(length.square())
        return Level(value, energy, variance, square, positive, noise, floor)

    def hessian(self, x: Tensor, m: Tensor, coldness: Tensor | None = None) -> Tensor:
        """Second derivatives of phi by t, (*batch, G, G), where spins have covariance x and mean m."""
        pulled = m if coldness is None else coldness[..., None, None] * m
        # In place, as new memory takes more time than the products.
        rows = (pulled @ m.mT).add_(x, alpha=0.5).mul_(x)
        if self.live is not None:
            rows = torch.where(self.live[..., :, None] & self.live[..., None, :], rows, 0.0)
        pooled = _sums(_sums(rows, self.tie).mT, self.tie)
        if self.live is None:
            return pooled
        # A sample without sites has a constant phi; it gets the Hessian of one lone row, which is invertible.
        return pooled + torch.where(self.live.any(-1), 0.0, 0.5).to(pooled)[..., None, None]


class _State(NamedTuple):
    """The state of the iteration, per sample: multipliers, their level, the part of the inverse temperature, the next
    step as a vector and a size, and the report."""

    t: Tensor
    current: Level
    coldness: Tensor
    step: Tensor
    size: Tensor
    status: Tensor
    num_steps: Tensor
    num_evals: Tensor


@uncompiled
def minimise(problem: Multipliers, *, rtol: float, max_steps: int, polish: bool = False) -> tuple[Tensor, SolveReport]:
    """The multipliers t*, (*batch, G), by damped Newton steps from `guess()` or `start()`, every sample on its own.

    Cold spins drive Newton's method to the edge of the domain, along which it creeps. They are cooled by steps instead:
    at the coldness s, a part of the inverse temperature, couplings, field and multipliers are s times what they will
    be, and phi is, but for a constant,

        phi_s(t) = s/2 (sum_i lambda_i + Tr g^T A^{-1} g) - 1/2 log det A,

    whose minimum has X_ii/s + |m_i|^2 = 1: the central path of s = 0 to 1, whose barrier is log det A.

    The residual is the largest error of a group's mean squared length, the tolerance is rtol or the rounding error of
    that length, if it is larger. Finished samples leave the working set. With `polish` they make their next step
    nonetheless, unmeasured.
    """
    batch = problem.field.shape[:-2]
    every = looks_every(None, problem.field, problem.couplings)
    problem = problem.samples(batch)
    state = record = _begin(problem, every)
    places: Tensor | None = None
    for index in range(max_steps):
        state = _judged(state, rtol)
        if every and index % every == 0:
            running = state.status == _RUNNING
            remaining = int(running.sum())
            if remaining < COMPACT_BELOW * running.shape[0] or remaining == 0:
                record = _restored(record, state, places)
                if remaining == 0:
                    break
                kept = running.nonzero().squeeze(-1)
                places = kept if places is None else places[kept]
                problem, state = problem.take(kept), pytree.tree_map(lambda x, kept=kept: x[kept], state)
        state = _advanced(problem, state)
    else:
        record = _restored(record, _judged(state, rtol), places)
    residual, tolerance = record.current.accuracy(rtol)
    status = torch.where(record.status == _RUNNING, int(Status.MAX_STEPS), record.status).to(torch.int8)
    per_sample = Record(status, residual, tolerance, record.num_steps, record.num_evals)
    report = SolveReport(per_sample.map(lambda x: x.reshape(batch)))
    t = record.t
    if polish:
        t = torch.where(((status == Status.CONVERGED) & (record.coldness == 1))[..., None], t + record.step, t)
    return t.reshape(*batch, t.shape[-1]), report


def _begin(problem: Multipliers, every: int) -> _State:
    """At the guess where lengths are near to 1 at it, else at the start, which is then the second evaluation."""
    t = problem.guess()
    coldness = torch.ones_like(t[..., 0])
    moments = problem.moments(t)
    current = problem.level(t, moments)
    near = current.positive & _near(current, coldness)
    if not (every and bool(near.all())):
        t = torch.where(near[..., None], t, problem.start())
        coldness = torch.where(near, coldness, problem.coldness())
        moments = problem.moments(t)
        current = problem.level(t, moments)
    fit = current.positive & current.value.isfinite()
    status = torch.where(fit, _RUNNING, int(Status.NONFINITE)).to(torch.int8)
    none = torch.zeros_like(status, dtype=torch.int32)
    step = _direction(problem, moments, current, coldness)
    return _State(t, current, coldness, step, torch.ones_like(coldness), status, none, none + 2 - near.to(none))


def _restored(record: _State, state: _State, places: Tensor | None) -> _State:
    """The record of all samples, with those of the working set brought up to date."""
    if places is None:
        return state
    return pytree.tree_map(lambda old, new: old.index_copy(0, places, new), record, state)  # type: ignore[no-any-return]


def _judged(state: _State, rtol: float) -> _State:
    residual, tolerance = state.current.accuracy(rtol)
    done = (state.status == _RUNNING) & (residual <= tolerance)
    return state._replace(status=torch.where(done, int(Status.CONVERGED), state.status).to(torch.int8))


def _advanced(problem: Multipliers, state: _State) -> _State:
    """After one trial: a step is taken where A > 0 and phi falls, and is halved where not."""
    t, current, coldness, step, size, status, num_steps, num_evals = state
    active = status == _RUNNING
    trial = t + size[..., None] * step
    moments = problem.moments(trial)
    trial_level = problem.level(trial, moments)
    good = active & _accepted(problem, state, trial_level)
    # A step too short to change t cannot improve it.
    stalled = active & ~good & (trial == t).all(-1)
    t = torch.where(good[..., None], trial, t)
    current = Level(*(where_samples(good, new, old) for new, old in zip(trial_level, current, strict=True)))
    coldness = torch.where(good & _near(current, coldness), COLDER * coldness, coldness).clamp(max=1.0)
    return _State(
        t,
        current,
        coldness,
        torch.where(good[..., None], _direction(problem, moments, trial_level, coldness), step),
        torch.where(good, 1.0, size / 2),
        torch.where(stalled, int(Status.STALLED), status).to(torch.int8),
        num_steps + good.to(num_steps),
        num_evals + active.to(num_evals),
    )


def _near(level: Level, coldness: Tensor) -> Tensor:
    """Whether squared lengths are near to 1."""
    squares = level.squares(coldness)
    return (squares.amax(-1) <= NEAR) & (squares.amin(-1) >= 1 / NEAR)


def _grouped(rows: Tensor, tie: int) -> Tensor:
    """The last axis in groups of `tie`, (..., G, tie)."""
    return rows.reshape(*rows.shape[:-1], rows.shape[-1] // tie if tie else 0, tie)


def _sums(rows: Tensor, tie: int) -> Tensor:
    """Sums over groups of the last axis, (..., G)."""
    return rows if tie == 1 else _grouped(rows, tie).sum(-1)


def where_samples(condition: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """torch.where with one condition per sample."""
    return torch.where(condition.reshape((*condition.shape, *(1,) * (new.ndim - condition.ndim))), new, old)


def _force(problem: Multipliers, level: Level, coldness: Tensor) -> Tensor:
    """Minus the gradient of phi_s."""
    return problem.group_size * (level.variance + coldness[..., None] * (level.square - 1)) / 2


def _direction(problem: Multipliers, moments: GaussianMoments, level: Level, coldness: Tensor) -> Tensor:
    """Newton's step, shortened where spins are short; or Jacobi's where rounding has made the Hessian indefinite."""
    force = _force(problem, level, coldness)
    hessian = problem.hessian(moments.covariance, moments.mean, coldness)
    factor, info = torch.linalg.cholesky_ex(hessian)
    # cholesky_solve would copy the factor.
    half = torch.linalg.solve_triangular(factor, force[..., None], upper=False)
    newton = torch.linalg.solve_triangular(factor.mT, half, upper=True).squeeze(-1)
    # The inverse of the squared length c of a short spin is linear in its multiplier. So Newton's step is made for
    # 1/c = 1: it is c times the step for c = 1, which would have to be halved until it is as short.
    short = level.squares(coldness).amin(-1, keepdim=True).clamp(max=1.0)
    return torch.where((info == 0)[..., None], newton * short, force / hessian.diagonal(dim1=-2, dim2=-1))


def _accepted(problem: Multipliers, state: _State, trial_level: Level) -> Tensor:
    """Whether phi falls as its slope promises, but for its rounding error, and the step ends well before the barrier:
    beside it the slope has turned uphill."""
    current, coldness, step, size = state.current, state.coldness, state.step, state.size
    slope, trial_slope = (-(_force(problem, level, coldness) * step).sum(-1) for level in (current, trial_level))
    falls = trial_level.value_at(coldness) - current.value_at(coldness) <= ARMIJO * size * slope + current.noise
    return trial_level.positive & (falls | (slope >= -CLOSE)) & (trial_slope <= -UPHILL * slope)
