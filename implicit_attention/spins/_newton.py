"""The multipliers that fix the lengths of Gaussian spins: a convex function with a barrier, and its Newton method."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from .._autograd import is_batched, uncompiled
from ..solution import Record, SolveReport
from ..status import Status

#: Least part of the slope's promise that a step has to keep (Armijo).
ARMIJO = 0.1
#: Rounding errors of the constraint and of phi, in units of eps times the terms they are made of.
ROUNDING = 4.0
#: Largest rounding error of a squared length, of 1, at which a solve may still be called converged.
COARSEST = 0.25
#: Largest slope at the end of a step, uphill, in units of the one downhill at its start.
UPHILL = 0.5
#: Squared decrement below which phi is as good as quadratic and a full step right, whatever rounding makes of phi.
CLOSE = 0.01
#: By how much it gets colder at a time; and how near, as a ratio, to their length spins have to be before.
COLDER, NEAR = 4.0, 2.0
# The working set is made anew when it falls below this part of its size.
COMPACT_BELOW = 2 / 3
_RUNNING = -1


class _Inverse(torch.autograd.Function):
    """A -> (A^{-1}, log det A, whether A is positive definite) by one Cholesky factorization.

    The derivatives are products with A^{-1}, and so can be taken any number of times, in reverse mode.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _inverse(a)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx: Any, by_inverse: Tensor, by_logdet: Tensor, _: Any) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return by_logdet[..., None, None] * x - x @ by_inverse @ x


def _inverse(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    factor, info = torch.linalg.cholesky_ex(a)
    positive = info == 0
    # Of a factor with a zero on its diagonal, which is not finished, cholesky_inverse fails the whole batch.
    factor = torch.where(positive[..., None, None], factor, torch.eye(a.shape[-1], dtype=a.dtype, device=a.device))
    # Torch's tangent of cholesky_inverse is wrong.
    inverse = torch.linalg.inv_ex(a).inverse if forward_mode() else torch.cholesky_inverse(factor)
    logdet = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return inverse, logdet.masked_fill(~positive, torch.nan), positive


def inverse_and_logdet(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(A^{-1}, log det A, whether A > 0) of symmetric A, (*batch, n, n).

    Where A is not positive log det A is NaN, and A^{-1} means nothing.

    Gradients: of the first two, to any order.
    """
    # A Function's rule for tangents would not see those of an outer forward mode.
    if forward_mode() or not a.requires_grad:
        return _inverse(a)
    inverse, logdet, positive = _Inverse.apply(a)  # type: ignore[no-untyped-call]
    return inverse, logdet, positive


def forward_mode() -> bool:
    """Whether tangents can be asked for."""
    return forward_ad._current_level >= 0


class Moments(NamedTuple):
    """Of Gaussian spins at multipliers t.

    covariance: X = A^{-1}, (*batch, n, n). mean: m = X g, (*batch, n, k). value: phi, (*batch). energy: its part
    sum_i lambda_i/2 + Tr g^T X g/2. positive: whether A > 0.
    """

    covariance: Tensor
    mean: Tensor
    value: Tensor
    energy: Tensor
    positive: Tensor


class Point(NamedTuple):
    """phi at multipliers t, (*batch); mean squared length of a group's rows, less 1, (*batch, G), which is minus twice
    its gradient over the group's size; and its Hessian, (*batch, G, G)."""

    value: Tensor
    excess: Tensor
    hessian: Tensor


class Level(NamedTuple):
    """What a step is judged by, per sample.

    value, energy, positive: as in `Moments`. variance and square: means over a group of X_ii and of |m_i|^2,
    (*batch, G). noise: rounding error of value. floor: of squared lengths, the largest.
    """

    value: Tensor
    energy: Tensor
    variance: Tensor
    square: Tensor
    positive: Tensor
    noise: Tensor
    floor: Tensor

    @property
    def residual(self) -> Tensor:
        """The largest error of a group's mean squared length, (*batch)."""
        return (self.variance + self.square - 1).abs().amax(-1)

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
        count = batch.numel()
        couplings = self.couplings.detach().reshape(count, *self.couplings.shape[-2:])
        field = self.field.detach().reshape(count, *self.field.shape[-2:])
        live = None if self.live is None else self.live.reshape(count, self.live.shape[-1])
        return self._replace(couplings=couplings, field=field, live=live)

    def take(self, rows: Tensor) -> Multipliers:
        """Some of the samples."""
        live = None if self.live is None else self.live[rows]
        return self._replace(couplings=self.couplings[rows], field=self.field[rows], live=live)

    def spread(self, t: Tensor) -> Tensor:
        """lambda, (*batch, n), of multipliers t, (*batch, G)."""
        return self.rows(t, 1.0)

    def rows(self, of_groups: Tensor, elsewhere: float = 0.0) -> Tensor:
        """Numbers of groups, (*batch, G), to their rows, (*batch, n): the transpose of `pool`."""
        each = of_groups[..., None].expand(*of_groups.shape, self.tie)
        each = each.reshape(*of_groups.shape[:-1], of_groups.shape[-1] * self.tie)
        return each if self.live is None else torch.where(self.live, each, elsewhere)

    def pool(self, rows: Tensor) -> Tensor:
        """Sums over groups, (*batch, G), of what belongs to rows."""
        if self.live is not None:
            rows = torch.where(self.live, rows, 0.0)
        return _sums(rows, self.tie)

    def coldness(self) -> Tensor:
        """The part of the inverse temperature, (*batch), at which couplings are no more than spins can take."""
        size = self.couplings.abs().sum(-1) - self.couplings.diagonal(dim1=-2, dim2=-1).abs()
        return (COLDER / size.amax(-1)).clamp(max=1.0)

    def start(self) -> Tensor:
        """Multipliers at which A > 0 for certain, by Gershgorin's discs, and exact for a lone site."""
        size = self.couplings.abs().sum(-1)
        own = self.couplings.diagonal(dim1=-2, dim2=-1)
        reach = _grouped(size - own.abs() + own, self.tie).amax(-1)
        # The field of a group is what a lone site of that field would need; couplings add their disc.
        square = self.pool(self.field.square().sum(-1)) / self.group_size
        warm = 1 / self.coldness()[..., None]
        return reach + (warm + (warm.square() + 4 * square).sqrt()) / 2

    def moments(self, t: Tensor) -> Moments:
        spread = self.spread(t)
        x, logdet, positive = inverse_and_logdet(torch.diag_embed(spread) - self.couplings)
        m = x @ self.field
        # Row by row, so that rows that are alone add no rounding error.
        energies = spread - 1 + (self.field * m).sum(-1)
        energy = energies.sum(-1)
        return Moments(x, m, (energy - logdet) / 2, energy / 2, positive)

    def point(self, t: Tensor) -> Point:
        x, m, value, _, _ = self.moments(t)
        variance, square = self._lengths(x, m)
        return Point(value, variance + square - 1, self.hessian(x, m))

    def level(self, t: Tensor, moments: Moments) -> Level:
        x, m, value, energy, positive = moments
        return Level(value, energy, *self._lengths(x, m), positive, *self._errors(self.spread(t), x, m))

    def hessian(self, x: Tensor, m: Tensor, coldness: Tensor | None = None) -> Tensor:
        """Second derivatives of phi by t, (*batch, G, G), where spins have covariance x and mean m."""
        pulled = m if coldness is None else coldness[..., None, None] * m
        rows = x * (x / 2 + pulled @ m.mT)
        if self.live is not None:
            rows = torch.where(self.live[..., :, None] & self.live[..., None, :], rows, 0.0)
        pooled = _sums(_sums(rows, self.tie).mT, self.tie)
        if self.live is None:
            return pooled
        # Without any row phi is constant; its Hessian is made that of a lone row.
        return pooled + torch.where(self.live.any(-1), 0.0, 0.5).to(pooled)[..., None, None]

    def _lengths(self, x: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        """Means over groups of X_ii and of |m_i|^2."""
        size = self.group_size
        return self.pool(x.diagonal(dim1=-2, dim2=-1)) / size, self.pool(m.square().sum(-1)) / size

    def _errors(self, spread: Tensor, x: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        """First-order effect on phi and on lengths of errors of eps in the entries of A, |A_ij| <= max_i A_ii."""
        eps = ROUNDING * torch.finfo(x.dtype).eps
        size = (spread - self.couplings.diagonal(dim1=-2, dim2=-1)).abs().amax(-1)
        noise = eps * (spread.abs().sum(-1) + spread.shape[-1])
        row, length = x.square().sum(-1), m.square().sum(-1)
        each = row + 2 * (row * length * length.sum(-1, keepdim=True)).sqrt()
        return noise, eps * size * (self.pool(each) / self.group_size).amax(-1)


class _State(NamedTuple):
    """Of every sample: where it is, at which part of its inverse temperature, the step that it tries next, as a vector
    and a size, and its evidence."""

    t: Tensor
    here: Level
    coldness: Tensor
    step: Tensor
    size: Tensor
    status: Tensor
    num_steps: Tensor
    num_evals: Tensor


@uncompiled
def minimise(problem: Multipliers, *, rtol: float, max_steps: int, polish: bool = False) -> tuple[Tensor, SolveReport]:
    """The multipliers t*, (*batch, G), by damped Newton steps from `start()`, every sample on its own.

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
    look = not any(is_batched(x) for x in (problem.couplings, problem.field))
    every = (1 if problem.field.device.type == "cpu" else 4) if look else 0
    problem = problem.samples(batch)
    state = record = _begin(problem)
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
    residual, tolerance = _accuracy(record.here, rtol)
    status = torch.where(record.status == _RUNNING, int(Status.MAX_STEPS), record.status).to(torch.int8)
    evidence = SolveReport(
        Record(status, residual, tolerance, record.num_steps, record.num_evals).map(lambda x: x.reshape(batch))
    )
    t = record.t
    if polish:
        t = torch.where(((status == Status.CONVERGED) & (record.coldness == 1))[..., None], t + record.step, t)
    return t.reshape(*batch, t.shape[-1]), evidence


def _begin(problem: Multipliers) -> _State:
    t = problem.start()
    moments, coldness = problem.moments(t), problem.coldness()
    here = problem.level(t, moments)
    fit = here.positive & here.value.isfinite()
    status = torch.where(fit, _RUNNING, int(Status.NONFINITE)).to(torch.int8)
    none = torch.zeros_like(status, dtype=torch.int32)
    step = _direction(problem, moments, here, coldness)
    return _State(t, here, coldness, step, torch.ones_like(coldness), status, none, none + 1)


def _restored(record: _State, state: _State, places: Tensor | None) -> _State:
    """The record of all samples, with those of the working set brought up to date."""
    if places is None:
        return state
    return pytree.tree_map(lambda old, new: old.index_copy(0, places, new), record, state)  # type: ignore[no-any-return]


def _judged(state: _State, rtol: float) -> _State:
    residual, tolerance = _accuracy(state.here, rtol)
    done = (state.status == _RUNNING) & (residual <= tolerance)
    return state._replace(status=torch.where(done, int(Status.CONVERGED), state.status).to(torch.int8))


def _accuracy(level: Level, rtol: float) -> tuple[Tensor, Tensor]:
    return level.residual, level.floor.clamp(max=COARSEST).clamp(min=rtol)


def _advanced(problem: Multipliers, state: _State) -> _State:
    """After one trial: a step is taken where A > 0 and phi falls, and is halved where not."""
    t, here, coldness, step, size, status, num_steps, num_evals = state
    active = status == _RUNNING
    trial = t + size[..., None] * step
    moments = problem.moments(trial)
    there = problem.level(trial, moments)
    good = active & _accepted(problem, state, there)
    # What halving no longer changes is as good as it gets.
    stalled = active & ~good & (trial == t).all(-1)
    t = torch.where(good[..., None], trial, t)
    here = Level(*(_select(good, new, old) for new, old in zip(there, here, strict=True)))
    squares = here.squares(coldness)
    near = good & (squares.amax(-1) <= NEAR) & (squares.amin(-1) >= 1 / NEAR)
    coldness = torch.where(near, COLDER * coldness, coldness).clamp(max=1.0)
    return _State(
        t,
        here,
        coldness,
        torch.where(good[..., None], _direction(problem, moments, there, coldness), step),
        torch.where(good, 1.0, size / 2),
        torch.where(stalled, int(Status.STALLED), status).to(torch.int8),
        num_steps + good.to(num_steps),
        num_evals + active.to(num_evals),
    )


def _grouped(rows: Tensor, tie: int) -> Tensor:
    """The last axis in groups of `tie`, (..., G, tie)."""
    return rows.reshape(*rows.shape[:-1], rows.shape[-1] // tie if tie else 0, tie)


def _sums(rows: Tensor, tie: int) -> Tensor:
    """Sums over groups of the last axis, (..., G)."""
    return rows if tie == 1 else _grouped(rows, tie).sum(-1)


def _select(condition: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(condition.reshape((*condition.shape, *(1,) * (new.ndim - condition.ndim))), new, old)


def _force(problem: Multipliers, level: Level, coldness: Tensor) -> Tensor:
    """Minus the gradient of phi_s."""
    return problem.group_size * (level.variance + coldness[..., None] * (level.square - 1)) / 2


def _direction(problem: Multipliers, moments: Moments, level: Level, coldness: Tensor) -> Tensor:
    """Newton's step, shortened where spins are short; or Jacobi's where rounding has made the Hessian indefinite."""
    force = _force(problem, level, coldness)
    hessian = problem.hessian(moments.covariance, moments.mean, coldness)
    factor, info = torch.linalg.cholesky_ex(hessian)
    newton = torch.cholesky_solve(force[..., None], factor).squeeze(-1)
    # Of a short spin's squared length c, 1/c and not c is linear in the multiplier. Newton's step for 1/c = 1 is c
    # times that for c = 1, which would have to be halved as many times.
    short = level.squares(coldness).amin(-1, keepdim=True).clamp(max=1.0)
    return torch.where((info == 0)[..., None], newton * short, force / hessian.diagonal(dim1=-2, dim2=-1))


def _accepted(problem: Multipliers, state: _State, there: Level) -> Tensor:
    """Whether phi falls as its slope promises, but for its rounding error, and the step ends well before the barrier:
    there the slope has turned uphill."""
    here, coldness, step, size = state.here, state.coldness, state.step, state.size
    slope, slope_there = (-(_force(problem, level, coldness) * step).sum(-1) for level in (here, there))
    falls = there.value_at(coldness) - here.value_at(coldness) <= ARMIJO * size * slope + here.noise
    return there.positive & (falls | (slope >= -CLOSE)) & (slope_there <= -UPHILL * slope)
