"""The multipliers that fix the lengths of Gaussian spins: a convex function with a barrier, and its Newton method."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._autograd import is_batched, uncompiled
from ..solution import Evidence
from ..status import Status

#: Least part of the slope's promise that a step has to keep (Armijo).
ARMIJO = 0.1
#: Rounding errors of the constraint and of phi, in units of eps times the terms they are made of.
ROUNDING = 4.0
#: Largest rounding error of a squared length, of 1, at which a solve may still be called converged.
COARSEST = 0.25
#: Largest slope at the end of a step, uphill, in units of the one downhill at its start.
UPHILL = 0.5
#: How much longer than they are spins are asked to be next; and how near, as a ratio, to what was asked that is done.
LONGER, NEAR = 4.0, 2.0
# The working set is made anew when it falls below this part of its size.
COMPACT_BELOW = 2 / 3
_RUNNING = -1


class _Inverse(torch.autograd.Function):
    """A -> (A^{-1}, log det A, whether A is positive definite) by one Cholesky factorization.

    The derivatives are products with A^{-1}, and so can be taken any number of times.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _inverse(a)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(output[0])
        ctx.save_for_forward(output[0])

    @staticmethod
    def backward(ctx: Any, by_inverse: Tensor, by_logdet: Tensor, _: Any) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return by_logdet[..., None, None] * x - x @ by_inverse @ x

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, Tensor, None]:
        x: Tensor = ctx.saved_tensors[0]
        return -x @ tangent @ x, (x * tangent).sum((-2, -1)), None


def _inverse(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    factor, info = torch.linalg.cholesky_ex(a)
    logdet = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return torch.cholesky_inverse(factor), logdet, info == 0


def inverse_and_logdet(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(A^{-1}, log det A, whether A > 0) of symmetric A, (*batch, n, n); where A is not positive they mean nothing.

    Gradients: of the first two, to any order.
    """
    inverse, logdet, positive = _Inverse.apply(a)  # type: ignore[no-untyped-call]
    return inverse, logdet, positive


class Point(NamedTuple):
    """phi at multipliers t and what Newton's method needs there, per sample.

    value: phi, (*batch). excess: mean squared length of a group's rows, less 1, (*batch, G). hessian: (*batch, G, G).
    positive: whether A > 0. noise: rounding error of value. floor: of excess, the largest.
    """

    value: Tensor
    excess: Tensor
    hessian: Tensor
    positive: Tensor
    noise: Tensor
    floor: Tensor


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
        each = t[..., None].expand(*t.shape, self.tie).flatten(-2)
        return each if self.live is None else torch.where(self.live, each, 1.0)

    def pool(self, rows: Tensor) -> Tensor:
        """Sums over groups, (*batch, G), of what belongs to rows."""
        if self.live is not None:
            rows = torch.where(self.live, rows, 0.0)
        return _grouped(rows, self.tie).sum(-1)

    def start(self) -> Tensor:
        """Multipliers at which A > 0 for certain, by Gershgorin's discs, and exact for a lone site."""
        size = self.couplings.abs().sum(-1)
        own = self.couplings.diagonal(dim1=-2, dim2=-1)
        # The field of a group is what a lone site of that field would need; couplings add their disc.
        square = self.pool(self.field.square().sum(-1)) / self.group_size
        reach = _grouped(size - own.abs() + own, self.tie).amax(-1)
        return reach + (1 + (1 + 4 * square).sqrt()) / 2

    def point(self, t: Tensor) -> Point:
        spread = self.spread(t)
        x, logdet, positive = inverse_and_logdet(torch.diag_embed(spread) - self.couplings)
        m = x @ self.field
        excess = x.diagonal(dim1=-2, dim2=-1) + m.square().sum(-1) - 1
        work = (self.field * m).sum((-2, -1))
        value = (spread.sum(-1) - spread.shape[-1] - logdet + work) / 2
        return Point(
            value, self.pool(excess) / self.group_size, self._hessian(x, m), positive, *self._errors(spread, x, m)
        )

    def _hessian(self, x: Tensor, m: Tensor) -> Tensor:
        rows = x * (x / 2 + m @ m.mT)
        if self.live is not None:
            rows = torch.where(self.live[..., :, None] & self.live[..., None, :], rows, 0.0)
        pooled = _grouped(_grouped(rows, self.tie).sum(-1).mT, self.tie).sum(-1)
        if self.live is None:
            return pooled
        # Without any row phi is constant; its Hessian is made that of a lone row.
        return pooled + torch.where(self.live.any(-1), 0.0, 0.5).to(pooled)[..., None, None]

    def _errors(self, spread: Tensor, x: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        """First-order effect on phi and on lengths of errors of eps in the entries of A, |A_ij| <= max_i A_ii."""
        spread, x, m = spread.detach(), x.detach(), m.detach()
        eps = ROUNDING * torch.finfo(x.dtype).eps
        size = (spread - self.couplings.detach().diagonal(dim1=-2, dim2=-1)).abs().amax(-1)
        noise = eps * (spread.abs().sum(-1) + spread.shape[-1])
        row, length = x.square().sum(-1), m.square().sum(-1)
        each = row + 2 * (row * length * length.sum(-1, keepdim=True)).sqrt()
        return noise, eps * size * (self.pool(each) / self.group_size).amax(-1)


class _State(NamedTuple):
    """Of every sample: where it is, the squared length it asks for, up to 1, the step that it tries next, as a vector
    and a size, and its evidence."""

    t: Tensor
    here: Point
    target: Tensor
    step: Tensor
    size: Tensor
    status: Tensor
    num_steps: Tensor
    num_evals: Tensor


@uncompiled
def minimise(problem: Multipliers, *, rtol: float, max_steps: int) -> tuple[Tensor, Evidence]:
    """The multipliers t*, (*batch, G), by damped Newton steps from `start()`, every sample on its own.

    At the start spins can be far too short, with nothing but the barrier to tell their lengths apart. They are asked to
    grow by steps, so as to stay in the middle of the domain: close to its edge Newton's method is slow.

    The residual is the largest error of a group's mean squared length, the tolerance is rtol or the rounding error of
    that length, if it is larger. Finished samples leave the working set.
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
    evidence = Evidence(
        status=status.reshape(batch),
        residual=residual.reshape(batch),
        tolerance=tolerance.reshape(batch),
        num_steps=record.num_steps.reshape(batch),
        num_evals=record.num_evals.reshape(batch),
    )
    return record.t.reshape(*batch, record.t.shape[-1]), evidence


def _begin(problem: Multipliers) -> _State:
    t = problem.start()
    here = problem.point(t)
    fit = here.positive & here.value.isfinite()
    status = torch.where(fit, _RUNNING, int(Status.NONFINITE)).to(torch.int8)
    none = torch.zeros_like(status, dtype=torch.int32)
    target = (LONGER * (1 + here.excess).amax(-1)).clamp(max=1.0)
    step = _direction(problem, here, target)
    return _State(t, here, target, step, torch.ones_like(target), status, none, none + 1)


def _restored(record: _State, state: _State, places: Tensor | None) -> _State:
    """The record of all samples, with those of the working set brought up to date."""
    if places is None:
        return state
    return pytree.tree_map(lambda old, new: old.index_copy(0, places, new), record, state)  # type: ignore[no-any-return]


def _judged(state: _State, rtol: float) -> _State:
    residual, tolerance = _accuracy(state.here, rtol)
    done = (state.status == _RUNNING) & (residual <= tolerance)
    return state._replace(status=torch.where(done, int(Status.CONVERGED), state.status).to(torch.int8))


def _accuracy(point: Point, rtol: float) -> tuple[Tensor, Tensor]:
    return point.excess.abs().amax(-1), point.floor.clamp(max=COARSEST).clamp(min=rtol)


def _advanced(problem: Multipliers, state: _State) -> _State:
    """After one trial: a step is taken where A > 0 and phi falls, and is halved where not."""
    t, here, target, step, size, status, num_steps, num_evals = state
    active = status == _RUNNING
    trial = t + size[..., None] * step
    there = problem.point(trial)
    good = active & _accepted(problem, state, there)
    # What halving no longer changes is as good as it gets.
    stalled = active & ~good & (trial == t).all(-1)
    t = torch.where(good[..., None], trial, t)
    here = Point(*(_select(good, new, old) for new, old in zip(there, here, strict=True)))
    squares = 1 + here.excess
    grown = good & (squares.amax(-1) <= NEAR * target) & (squares.amin(-1) >= target / NEAR)
    target = torch.where(grown, LONGER * target, target).clamp(max=1.0)
    return _State(
        t,
        here,
        target,
        torch.where(good[..., None], _direction(problem, here, target), step),
        torch.where(good, 1.0, size / 2),
        torch.where(stalled, int(Status.STALLED), status).to(torch.int8),
        num_steps + good.to(num_steps),
        num_evals + active.to(num_evals),
    )


def _grouped(rows: Tensor, tie: int) -> Tensor:
    """The last axis in groups of `tie`, (..., G, tie)."""
    return rows.reshape(*rows.shape[:-1], rows.shape[-1] // tie if tie else 0, tie)


def _select(condition: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(condition.reshape((*condition.shape, *(1,) * (new.ndim - condition.ndim))), new, old)


def _force(problem: Multipliers, point: Point, target: Tensor) -> Tensor:
    """Minus the gradient of phi for spins of squared length `target`."""
    return problem.group_size * (1 + point.excess - target[..., None]) / 2


def _direction(problem: Multipliers, point: Point, target: Tensor) -> Tensor:
    """Newton's step, shortened where spins are short; or Jacobi's where rounding has made the Hessian indefinite."""
    force = _force(problem, point, target)
    factor, info = torch.linalg.cholesky_ex(point.hessian)
    newton = torch.cholesky_solve(force[..., None], factor).squeeze(-1)
    # Of a short spin's squared length c, 1/c and not c is linear in the multiplier. Newton's step for 1/c = 1/target
    # is c/target times that for c = target, which would have to be halved as many times.
    short = ((1 + point.excess) / target[..., None]).amin(-1, keepdim=True).clamp(max=1.0)
    return torch.where((info == 0)[..., None], newton * short, force / point.hessian.diagonal(dim1=-2, dim2=-1))


def _accepted(problem: Multipliers, state: _State, there: Point) -> Tensor:
    """Whether phi falls as far as its slope promises, or is level within its rounding error, and the step ends well
    before the barrier: there the slope has turned uphill."""
    here, target, step, size = state.here, state.target, state.step, state.size
    slope, slope_there = (-(_force(problem, point, target) * step).sum(-1) for point in (here, there))
    longer = (1 - target) / 2 * size * (problem.group_size * step).sum(-1)
    falls = there.value - here.value - longer <= torch.maximum(ARMIJO * size * slope, here.noise)
    return there.positive & falls & (slope_there <= -UPHILL * slope)


def attached(problem: Multipliers, t: Tensor, converged: Tensor, *, steps: int) -> Tensor:
    """The same multipliers as a function of couplings and field, whose first `steps` derivatives are right.

    Each step t + H^{-1} (-grad phi(t)) with the Hessian H held fixed makes one more derivative right, and for a
    solution changes t by no more than its error.
    """
    held: Tensor | None = None
    for _ in range(steps):
        point = problem.point(t)
        if held is None:
            held = torch.linalg.cholesky_ex(point.hessian.detach()).L
        change = torch.cholesky_solve((point.excess * problem.group_size / 2)[..., None], held).squeeze(-1)
        t = t + torch.where(converged[..., None], change, 0.0)
    return t
