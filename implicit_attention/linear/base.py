"""The base of linear solvers: options, the hooks of a method, results, and the one loop: sweeps from true residuals."""

from __future__ import annotations

import abc
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from .._torch import HALF, LinearMap, Looks, host_may_look, looks_every, norm
from .._validate import Options, check_callable, check_float_tensor, check_same_kind, integer, number, refuse, require
from ..solution import Record, Recorded, Remedies, Status
from ._vectors import ROUNDOFF, choose, freeze, normalised

#: The verdict of a problem that may go on.
RUNNING = -1
#: A sweep that leaves more than this part of the residual is no progress.
PROGRESS = 0.999
#: How far above the tolerance rounding may keep a residual that the method's own recurrence has below it.
SLACK = 10.0
#: The smallest relative tolerance of float32 (with a tenth of slack for a tolerance that was itself rounded).
FLOAT32_RTOL = 1e-6
#: Tolerances of an adjoint that rounding certainly allows.
FINEST_RTOL = {torch.float64: 1e-10, torch.float32: 1e-5}
#: The tolerance of an adjoint whose products are in half precision.
HALF_RTOL = 3e-3
#: A larger tolerance of a state is not that of its adjoint: at 1 a gradient of 0 would do.
LOOSEST_RTOL = 1e-2
#: Rounding an answer x leaves a residual of about this many times eps |x|.
ROUNDING = 4.0
#: Where that is more of the right-hand side than this, the answer has no digits.
MEANINGFUL = 0.02
#: Attention over keys far from the origin loses more, as its products cancel (20 was measured): that is rounding while
#: it stays below this part of the right-hand side.
CANCELLING, SMALL = 32.0, 1e-3


@dataclass(frozen=True)
class SweepState:
    """The part of a method's state that the loop reads; methods add their own (*batch, ...) tensors.

    Not for the results of a solve: those are in `LinearSolution`.

    Attributes:
        residual_norm: the method's own estimate of |residual - A correction|, (*batch).
        verdict: RUNNING, or the `Status` code with which the method gives a problem up, (*batch) int8.
        negative_curvature: whether v . A v <= 0 was met, (*batch) bool.

    Examples:
        >>> import torch
        >>> from implicit_attention.linear import CG
        >>> state = CG().begin(torch.ones(2, 3))
        >>> state.verdict.tolist(), state.negative_curvature.tolist()
        ([-1, -1], [False, False])
    """

    residual_norm: Tensor
    verdict: Tensor
    negative_curvature: Tensor


@dataclass(frozen=True, eq=False)
class LinearSolution(Recorded):
    """The answers x of a batch of systems A x = b, and how each solve went.

    Not for solves of fixed points: those return a `Solution`.

    Attributes:
        record: (*batch) each, and read by name: `status` (CONVERGED, MAX_STEPS, STALLED, NONFINITE or, by Neumann,
            DIVERGED); `residual` |b - A x|_2 of exactly this value, computed with a matvec of its own; `tolerance`
            atol + rtol |b|, which rounding may keep a converged residual above by less than a factor of 10;
            `num_steps` and `num_evals`, matvecs spent: one per step and one per restart, without the residual of
            `initial` and without the last check.
        value: x, (*batch, n); NaN for a problem whose status is NONFINITE.
        negative_curvature: whether v . A v <= 0 was met, (*batch) bool: by CG for a search direction, by MINRES for a
            residual; False for GMRES and Neumann, which do not look.
        direction: CG only, else None: the unit vector v of that curvature, (*batch, n), zero where none was met.
        checked: whether `value` is the last vector that the argument `check` of the solve was called with.

    Examples:
        >>> import torch
        >>> from implicit_attention.linear import CG
        >>> solution = CG().solve(lambda v: -v, torch.ones(2, 3))
        >>> solution.negative_curvature.tolist(), solution.direction.shape
        ([True, True], torch.Size([2, 3]))
    """

    value: Tensor
    negative_curvature: Tensor
    direction: Tensor | None = None
    checked: bool = False


S = TypeVar("S", bound=SweepState)


@dataclass(frozen=True)
class LinearSolver(Options, abc.ABC, Generic[S]):
    """Options of a matrix-free solver of A x = b; a new method is `begin`, `step` and `correction`.

    Not for use as it is: use one of its subclasses, such as `CG()`.

    A solve is a sequence of sweeps. A sweep starts from the true residual r = b - A x, scaled to order one, and steps
    towards the correction A^{-1} r until the method's own residual estimate of every problem meets the tolerance; then
    the residual is computed anew. A problem whose true residual is still too large is swept again, `max_sweeps` times
    in all; if that does not help, it is STALLED, or CONVERGED if it misses the tolerance by less than a factor of 10,
    which is then the rounding error of b - A x itself. `LinearSolution.residual` always tells.

    Args:
        rtol: a problem is converged when |b - A x| <= atol + rtol |b|; at least 1e-6 for float32.
        atol: absolute part of the tolerance, in units of b.
        max_steps: largest `num_steps` of a problem; None: `default_max_steps(n)`.
        check_every: the host looks after so many steps at most whether any problem is still active (a synchronisation),
            and earlier where residuals tell that all end before. None: every step on the CPU, 8 elsewhere. Changes the
            waiting, never the values.

    Examples:
        >>> import dataclasses, torch
        >>> from implicit_attention.linear import LinearSolver, SweepState
        >>> from implicit_attention.linear.base import fresh
        >>> @dataclasses.dataclass(frozen=True)
        ... class Answer(SweepState):
        ...     value: torch.Tensor
        >>> class Identity(LinearSolver):
        ...     symmetric = True
        ...     def begin(self, residual):
        ...         return Answer(**fresh(residual.norm(dim=-1)), value=residual)
        ...     def step(self, matvec, state, active):
        ...         return dataclasses.replace(state, residual_norm=0 * state.residual_norm)
        ...     def correction(self, state):
        ...         return state.value
        >>> Identity().solve(lambda v: v, torch.ones(2, 3)).converged
        tensor([True, True])
    """

    rtol: float = number(1e-6, low=0, high=1)
    atol: float = number(0.0, low=0)
    max_steps: int | None = integer(None, low=1, remedy="use None for the default")
    check_every: int | None = integer(None, low=1, remedy="use None for the default")

    #: Whether the method needs A = A^T on each problem.
    symmetric: ClassVar[bool]
    #: Number of sweeps allowed: the first and the refinements; None: as many as make progress.
    max_sweeps: ClassVar[int | None] = 3
    #: Whether |b - A x| never grows in exact arithmetic: a sweep that makes it grow is then undone, even the first.
    monotone: ClassVar[bool] = True
    #: What to do about a problem that ended with a status.
    remedies: ClassVar[Remedies] = {
        Status.MAX_STEPS: "raise max_steps of the linear solver",
        Status.STALLED: "the system is singular, nearly so (a fold), or not of the kind that the method solves: use "
        "MINRES() if it is symmetric, GMRES() otherwise, a larger rtol, or float64",
        Status.NONFINITE: "check the numbers that the problem reads",
    }
    #: Whether the method finds directions of negative curvature.
    keeps_direction: ClassVar[bool] = False

    @abc.abstractmethod
    def begin(self, residual: Tensor) -> S:
        """The state of correction 0 for right-hand sides `residual` (*batch, n); rows of zeros are problems at rest."""

    @abc.abstractmethod
    def step(self, matvec: LinearMap, state: S, active: Tensor) -> S:
        """One step with one matvec, as a new state: nothing of the old one is overwritten.

        Rows that are not active (*batch) must come back as they were (see `freeze`).
        """

    @abc.abstractmethod
    def correction(self, state: S) -> Tensor:
        """The correction reached, (*batch, n)."""

    def direction(self, state: S) -> Tensor:
        """Unit directions of negative curvature where it was met, (*batch, n); read only if `keeps_direction`."""
        raise NotImplementedError

    def default_max_steps(self, n: int) -> int:
        """10 n, at least 50 and at most 500."""
        return min(max(10 * n, 50), 500)

    def sweep_steps(self, max_steps: int) -> int:
        """The longest sweep."""
        return max_steps

    def _sweep(
        self, matvec: LinearMap, residual: Tensor, live: Tensor, aim: Tensor, num_steps: Tensor, max_steps: int
    ) -> tuple[S, Tensor, Tensor]:
        """The state after the steps of one sweep from a residual, its correction, and the steps of all sweeps so far.

        live: which problems take steps, (*batch), until the method's own residual is at most `aim`, (*batch).
        """
        state = self.begin(residual)
        for step in range(self.sweep_steps(max_steps)):
            # A NaN residual compares false: such a problem rests until the true residual gives its status.
            active = live & (state.residual_norm > aim) & (state.verdict < 0) & (num_steps < max_steps)
            measured = active, state.residual_norm, aim
            if step == 0:
                looks = Looks(looks_every(self.check_every, residual), *measured)
            elif step >= looks.due and not looks.left(step, *measured):
                break
            state, num_steps = self.step(matvec, state, active), num_steps + active
        return state, self.correction(state), num_steps

    @torch.no_grad()
    def solve(
        self, matvec: LinearMap, b: Tensor, *, initial: Tensor | None = None, check: LinearMap | None = None
    ) -> LinearSolution:
        """Solve A x = b for each problem of the batch on its own: one hard or poisoned problem changes no other.

        Runs under `torch.no_grad()` and returns detached tensors; the result is bit for bit the same whatever the other
        rows of the batch hold, provided that `matvec` has that property.

        Args:
            matvec: x -> A x, (*batch, n) -> (*batch, n), linear in each row and acting on each row separately.
            b: right-hand sides, (*batch, n), float32 or float64.
            initial: first guess, (*batch, n); default 0, and 0 where |b - A x| of the guess is not below |b|.
            check: the same map, for the residual of an answer alone, which it is given in the units of b: for who wants
                more of the answer than this product. `LinearSolution.checked` tells whether its last one is the value.

        Returns:
            `LinearSolution`; failures are reported in `status`, never raised.

        Raises:
            TypeError: a wrong type or a dtype other than float32 and float64.
            ValueError: a shape, dtype or device that does not match b, or rtol < 1e-6 with float32.

        """
        check_arguments(self.rtol, matvec, b, initial)
        b, max_steps = b.detach(), self.max_steps or self.default_max_steps(b.shape[-1])
        value = torch.zeros_like(b) if initial is None else initial.detach()
        # In units of a power of two for each problem, so that no size of b, nor its tolerance, over- or underflows.
        _, scale = normalised(b if initial is None else torch.cat([b, value], -1))
        b, value = b / scale.unsqueeze(-1), value / scale.unsqueeze(-1)
        length_of_b = norm(b)
        # Not a number over a tensor, which torch multiplies by a reciprocal: that of a small scale is inf.
        tolerance = torch.full_like(scale, self.atol) / scale + self.rtol * length_of_b
        apply = measure = checked(matvec, b)
        if check is not None:
            product = checked(check, b)
            measure = lambda vector: product(vector * scale.unsqueeze(-1)) / scale.unsqueeze(-1)  # noqa: E731
        residual = b
        if initial is not None:
            # Problems start at 0 where that is no farther; those with b = 0 end there, too.
            left = b - apply(value)
            farther = norm(left) >= length_of_b
            value, residual = choose(~farther, value, 0.0), choose(~farther, left, b)
        size = norm(residual)
        # MAX_STEPS means that a problem may still go on.
        status = torch.full_like(size, Status.MAX_STEPS, dtype=torch.int8)
        status = status.masked_fill(size <= tolerance, int(Status.CONVERGED))
        status = status.masked_fill(~size.isfinite(), int(Status.NONFINITE))
        num_steps = torch.zeros_like(status, dtype=torch.int64)
        curved = torch.zeros_like(status, dtype=torch.bool)
        direction = torch.zeros_like(b) if self.keeps_direction else None
        live, last = status == Status.MAX_STEPS, False
        goes_on = b.numel() > 0 and not (host_may_look(live) and not bool(live.any()))
        for sweep in range(self.max_sweeps or max_steps):
            if not goes_on:
                break
            # A restart begins with the residual, which cost a product.
            cost = min(sweep, 1)
            unit, stretch = normalised(residual)
            aim = tolerance / stretch
            start = choose(live, unit, 0.0)
            state, correction, num_steps = self._sweep(apply, start, live, aim, num_steps + cost * live, max_steps)
            tried = torch.addcmul(value, stretch.unsqueeze(-1), correction)
            left = b - measure(tried)
            after = norm(left)
            kept = live & (after.isfinite() if sweep == 0 and not self.monotone else after < size)
            met = live & state.negative_curvature
            curved = curved | met
            if direction is not None:
                direction = choose(met, self.direction(state), direction)
            # Where a sweep is the last that can help: it made no progress, or no other is allowed.
            settled = ~(after < PROGRESS * size) | (sweep + 1 == self.max_sweeps)
            value, residual = choose(kept, tried, value), choose(kept, left, residual)
            size = torch.where(kept, after, size)
            # By the true residual first, then by the method's verdict, then by the progress made. Where no sweep helps
            # further, and the method claims to be within the tolerance, the rest is rounding, accepted within SLACK.
            rounding = settled & (state.residual_norm <= aim) & (size <= SLACK * tolerance)
            found = status.masked_fill(settled & (num_steps < max_steps), int(Status.STALLED))
            found = found.masked_fill(rounding, int(Status.CONVERGED))
            found = torch.where(state.verdict >= 0, state.verdict, found)
            found = found.masked_fill(size <= tolerance, int(Status.CONVERGED))
            found = found.masked_fill(~after.isfinite() & (sweep == 0), int(Status.NONFINITE))
            status = torch.where(live, found, status)
            # One look: whether a sweep follows, and whether the value is the last vector that was measured.
            other = (live & ~kept).any() | (status == Status.NONFINITE).any()
            live = (status == Status.MAX_STEPS) & (num_steps + 1 < max_steps)
            goes_on, differs = torch.stack([live.any(), other]).tolist()
            last = check is not None and not differs
        # A problem that met a NaN or an infinity gets NaN, not a number, which no product saw.
        broken = status == Status.NONFINITE
        record = Record(status, (size * scale).masked_fill(broken, torch.nan), tolerance * scale, num_steps, num_steps)
        value = choose(~broken, value * scale.unsqueeze(-1), torch.nan)
        return LinearSolution(record, value, curved, direction, last)


def fresh(residual_norm: Tensor) -> dict[str, Tensor]:
    """The fields of a `SweepState` at the start of a sweep: no problem has a verdict or met negative curvature."""
    return {
        "residual_norm": residual_norm,
        "verdict": torch.full_like(residual_norm, RUNNING, dtype=torch.int8),
        "negative_curvature": torch.zeros_like(residual_norm, dtype=torch.bool),
    }


def taken(state: S, advanced: S, active: Tensor, blocked: Tensor, negative: Tensor) -> S:
    """The state after a step: `advanced` where a problem is active and not blocked, STALLED where it is blocked.

    negative: where negative curvature was met, (*batch).
    """
    state = freeze(active & ~blocked, advanced, state)
    return replace(
        state,
        verdict=state.verdict.masked_fill(blocked, int(Status.STALLED)),
        negative_curvature=state.negative_curvature | negative,
    )


def checked(matvec: LinearMap, b: Tensor) -> LinearMap:
    """Matvec, with every result compared with b in shape, dtype and device (no synchronisation)."""

    def apply(vector: Tensor) -> Tensor:
        product = matvec(vector)
        if product.shape != b.shape:
            refuse("matvec", f"return the shape {tuple(b.shape)} of b", tuple(product.shape))
        if product.dtype != b.dtype or product.device != b.device:
            check_same_kind([("b", b), ("matvec(x)", product)])
        return product

    return apply


def has_no_digits(size: Tensor, rhs: Tensor) -> Tensor:
    """Whether an answer, of norm `size`, of a system I - J is so long that the rounding of I - J explains it.

    Kernels give such a query up, too: its curvature is within ROUNDOFF eps of 0.
    """
    return ROUNDOFF * torch.finfo(size.dtype).eps * size > rhs


def forgiven(
    status: Tensor, residual: Tensor, tolerance: Tensor, negative_curvature: Tensor, size: Tensor, rhs: Tensor
) -> tuple[Tensor, Tensor]:
    """(status, tolerance), with stalled problems counted as solved where rounding of the answer explains the residual.

    Near a fold the answer, of norm `size`, is large against the right-hand side, of norm `rhs`, and no answer of that
    precision has a smaller residual: it is exact for a matrix that differs by rounding.
    """
    unit = torch.finfo(size.dtype).eps * size
    # A singular system drives the answer to 1/eps, where everything would be forgiven.
    stalled = (status == Status.STALLED) & (ROUNDING * unit <= MEANINGFUL * rhs)
    floor = torch.maximum(ROUNDING * unit, torch.minimum(CANCELLING * unit, SMALL * rhs))
    solved = torch.where(negative_curvature, int(Status.UNSTABLE), int(Status.CONVERGED)).to(torch.int8)
    status = torch.where(stalled & (residual <= floor), solved, status)
    return status, torch.where(stalled, torch.maximum(tolerance, floor), tolerance)


def adjoint_rtol(of_state: float, dtype: torch.dtype) -> float:
    """Return the default tolerance of an adjoint: that of the state, whose error the gradient has in any case.

    dtype: of products. In half precision coarse ones reach three times the tolerance of the state.
    """
    if dtype in HALF:
        return min(max(3 * of_state, FINEST_RTOL[torch.float32]), HALF_RTOL)
    return min(max(of_state, FINEST_RTOL[dtype]), LOOSEST_RTOL)


def check_arguments(rtol: float, matvec: LinearMap, b: Tensor, initial: Tensor | None) -> None:
    """Types, shapes, dtypes and devices; nothing here reads the numbers in a tensor."""
    check_callable("matvec", matvec, "pass lambda x: A @ x")
    check_float_tensor("b", b, min_ndim=1)
    wide, remedy = b.dtype in (torch.float32, torch.float64), "convert it with b.float()"
    require(wide, "b", "have the dtype float32 or float64", b.dtype, remedy, TypeError)
    if b.dtype == torch.float32:
        remedy = "use rtol >= 1e-6 or convert the problem to float64"
        require(rtol >= 0.9 * FLOAT32_RTOL, "rtol", f"be >= {FLOAT32_RTOL:g} for float32", rtol, remedy)
    if initial is not None:
        check_float_tensor("initial", initial)
        require(initial.shape == b.shape, "initial", f"have the shape {tuple(b.shape)} of b", tuple(initial.shape))
        check_same_kind([("b", b), ("initial", initial)])
