"""Accelerated steps that are kept only where they pay: the part that Anderson, Broyden and Newton share."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from .. import _validate
from .._torch import host_may_look, norm, resolves
from ..kernels import rule
from ..problem import Problem
from .loop import Iteration, Solver, Update, rows_where, unflat

Guard: TypeAlias = Literal["auto", "energy", "residual", "none"]

# Steps shorter than this part of the proposed one are given up.
SHORTEST = 2.0**-24


class Proposal(NamedTuple):
    """direction (*lead, n); accelerated (*lead), whether it is more than the plain step; num_evals spent on it.

    A direction that is not finite is never tried: the plain step is.
    """

    direction: Tensor
    accelerated: Tensor
    num_evals: Tensor | None = None


class Memory(NamedTuple):
    """The last accepted point, the step tried from it (if it may be tried again), and the memory of the method.

    force: -grad E there, where that is not r.
    """

    z: Tensor
    r: Tensor
    residual: Tensor
    energy: Tensor | None
    force: Tensor | None
    direction: Tensor
    length: Tensor
    accelerated: Tensor
    history: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Safeguarded(Solver):
    """Base of solvers that propose a direction from every accepted point and test where it leads.

    Not for use as it is: use `Anderson()`, `Broyden()` or `NewtonKrylov()`, or write one by defining `propose`.

    The guard decides what is kept. "energy": E must fall by |r|^2/4, with a metric by half of `problem.divergence` (for
    a shortened step in proportion); where E cannot resolve that in the given precision, by the trapezoid rule on its
    gradient. "residual": |r| must fall. "none": every finite state is kept. "auto" is "energy" for energies and
    "residual" for other maps. A rejected step is replaced by the plain one, f(z), and the history of that problem
    starts anew; a plain step that is not certain to descend (`problem.plain_steps_descend`) is tested too, and halved
    until it does. Where E curves downwards along the last step, the next one is four plain steps long. Where plain
    steps are certain to descend, the last of a budget is one.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, solve
        >>> from implicit_attention.solvers import Safeguarded
        >>> from implicit_attention.solvers.safeguard import Proposal
        >>> class Longer(Safeguarded):
        ...     def propose(self, problem, history, point, accepted):
        ...         return Proposal(1.5 * point.r, accepted)
        >>> half = FixedPointMap(lambda z: z / 2 + 1, event_ndim=1)
        >>> solve(half, torch.zeros(3, 1), solver=Longer()).value[0].round(decimals=2)
        tensor([2.])
    """

    guard: Guard = _validate.choice("auto", get_args(Guard))

    def check_problem(self, problem: Problem) -> None:
        fits, required = problem.has_energy, "be 'residual', 'none' or 'auto' for a map without an energy"
        _validate.require(fits or self.guard != "energy", "guard", required, repr(self.guard))

    def needs_energy(self, problem: Problem, step: int) -> bool:
        return self._guard(problem) == "energy" and step >= self.plain_start(problem)

    def _guard(self, problem: Problem) -> str:
        if self.guard != "auto":
            return self.guard
        return "energy" if problem.has_energy else "residual"

    def _stretches(self, problem: Problem) -> bool:
        """Whether steps are stretched where E curves downwards."""
        has_curvature = problem.symmetric or problem.has_metric
        return self._guard(problem) == "energy" and has_curvature and not self.backtracks

    def plain_start(self, problem: Problem) -> int:
        """Number of first steps that are certain to be plain, and that the method does not learn from."""
        return 0

    # Hooks of a method.

    def init_history(self, z: Tensor) -> Any:
        """The method's memory before any step."""
        return ()

    def remember(self, problem: Problem, history: Any, dz: Tensor, dr: Tensor, fresh: Tensor) -> Any:
        """The memory with one more accepted step, where `fresh`; elsewhere emptied."""
        return history

    def propose(self, problem: Problem, history: Any, point: Iteration, accepted: Tensor) -> Proposal:
        """The direction to try from an accepted point."""
        raise NotImplementedError

    #: Whether a rejected accelerated step is shortened rather than replaced by the plain one.
    backtracks: ClassVar[bool] = False
    #: An accelerated step s is not evaluated unless <r, s> >= slope |r|^2, and it is cut to longest |r|.
    slope: ClassVar[float] = rule.SLOPE
    longest: ClassVar[float] = rule.LONGEST
    #: For maps that are no gradient: how much |r| may grow in one step.
    growth: ClassVar[float] = 20.0

    # The shared part.

    def init(self, problem: Problem, z: Tensor) -> Memory:
        unknown = z.new_zeros(z.shape[:-1])
        by_energy = self._guard(problem) == "energy"
        energy = unknown if by_energy else None
        plain = torch.zeros_like(unknown, dtype=torch.bool)
        force = z if problem.has_metric and by_energy else None
        return Memory(z, z, unknown, energy, force, z, unknown, plain, self.init_history(z))

    def accept(self, problem: Problem, state: Memory, point: Iteration) -> Tensor | None:
        if point.step <= self.plain_start(problem):
            return None
        guard = self._guard(problem)
        # A plain step needs no test where it descends, or where there is nothing better to fall back on.
        free = problem.plain_steps_descend or guard != "energy"
        if free and host_may_look(state.accelerated) and not bool(state.accelerated.any()):
            return None
        if guard == "residual":
            good = point.residual < (1.0 if problem.symmetric else self.growth) * state.residual
            # Nothing is better than 0; a step that is given up there would be replaced by plain ones.
            return good | (point.residual == 0) | ~state.accelerated
        good = point.residual < torch.inf
        if guard == "energy":
            good = good & self._descends(problem, state, point)
        return good | ~state.accelerated if free else good

    def _descends(self, problem: Problem, state: Memory, point: Iteration) -> Tensor:
        assert point.energy is not None
        assert state.energy is not None
        before, now, promise = state.r, point.r, state.residual.square()
        if state.force is not None and point.force is not None:
            before, now = state.force, point.force
            promise = 2 * problem.divergence(*(unflat(t, point.event_shape) for t in (state.z, state.z + state.r)))
        plain = slope = (before * state.direction).sum(-1)
        if state.force is not None and not self.backtracks:
            # Where the metric grows along a plain step, E may fall by less than the promise, however short it is made.
            plain = torch.minimum(promise, slope)
        accelerated = state.accelerated & (not self.backtracks)
        required = rule.DESCENT * state.length * torch.where(accelerated, promise, plain)
        # By -grad E, which is r without a metric: the fall of E along the step to third order, free of cancellation.
        trapezoid = state.length * ((before + now) * state.direction).sum(-1) / 2
        eps = torch.finfo(point.z.dtype).eps
        if problem.steps_rescaled:
            # The promise of r is in other units than E, so that only the sign of the change of E counts.
            measured = state.energy - point.energy
            resolved = measured.abs() > rule.ENERGY_SLACK * rule.rounding_of(point.energy, state.energy, eps)
            return rows_where(resolved, measured > 0, trapezoid >= required) & (point.energy < torch.inf)
        return rule.descends(point.energy, state.energy, required, trapezoid, eps)

    def _tested(self, problem: Problem, proposal: Proposal, point: Iteration, downward: Tensor) -> Proposal:
        """The proposal where it passes the tests that need no evaluation, the plain step elsewhere."""
        (s, usable, num_evals), force = proposal, point.force
        reach = norm(s)
        usable = usable & (reach < torch.inf)
        if force is not None or (self._guard(problem) != "none" and problem.symmetric):
            s = s * rule.shortened(point.residual, reach, self.longest)[..., None]
            plain = point.residual.square() if force is None else (force * point.r).sum(-1)
            slope = ((point.r if force is None else force) * s).sum(-1)
            usable = usable & rule.promises(plain, slope, reach, self.slope)
        if problem.plain_steps_descend and not self.backtracks and point.step + 1 == self.max_steps:
            # The last evaluation is not staked on a step that may be rejected.
            usable = torch.zeros_like(usable)
        elif self._stretches(problem):
            s = rows_where(downward, rule.STRETCH * point.r, s)
            usable = (usable | downward) if point.step > 1 else usable
        return Proposal(rows_where(usable, s, point.r), usable, num_evals)

    def step(self, problem: Problem, state: Memory, point: Iteration, accepted: Tensor) -> Update:
        warm_up = self.plain_start(problem)
        if point.step < warm_up:
            return Update(state, point.mapped)
        if point.step == warm_up:
            # There is no step yet to learn from.
            history, downward = state.history, torch.zeros_like(accepted)
        else:
            history, downward = self._learnt(problem, state, point, accepted)
        found: Any = point.z, point.r, point.residual, point.energy, point.force
        # Mostly all are accepted.
        whole = host_may_look(accepted) and bool(accepted.all())
        pairs = zip(found, state, strict=False)
        # What the guard does not read is None from the beginning.
        kept: Any = [None if old is None else new if whole else rows_where(accepted, new, old) for new, old in pairs]
        z, r, residual, energy, force = kept
        point = point._replace(z=z, r=r, residual=residual, force=force)
        proposal = self._tested(problem, self.propose(problem, history, point, accepted), point, downward)
        direction, accelerated, length, stalled = *proposal[:2], torch.ones_like(state.length), None
        if not whole:
            # Where the last step was not accepted, the plain step or a shorter one.
            to_plain = ~accepted & state.accelerated & (not self.backtracks)
            direction = rows_where(accepted, direction, rows_where(to_plain, r, state.direction))
            length = torch.where(accepted | to_plain, 1.0, state.length / 2)
            accelerated = rows_where(accepted, accelerated, state.accelerated & ~to_plain)
            stalled = length < SHORTEST
        memory = Memory(z, r, residual, energy, force, direction, length, accelerated, history)
        return Update(memory, z.addcmul(length[..., None], direction), stalled, proposal.num_evals)

    def _learnt(self, problem: Problem, state: Memory, point: Iteration, accepted: Tensor) -> tuple[Any, Tensor]:
        """The history with the last step where it was `accepted`, and where E curved downwards along it."""
        dz, dr = point.z - state.z, point.r - state.r
        history = self.remember(problem, state.history, dz, dr, accepted)
        # Where r was 0 nothing moved, and nothing is learned. The next step is 0, too, but its derivative by r counts
        # where steps are differentiated: with a history of 0/0 it would be that of a plain step, whose products need
        # not converge, and as 4 r the step would have one that grows without bound.
        moved = (point.z != state.z).any(-1)
        if torch.is_grad_enabled():
            history = _kept_still(moved, history, state.history)
        if not self._stretches(problem):
            return history, accepted
        change = dr if point.force is None or state.force is None else point.force - state.force
        # Products that underflow show nothing of the curvature.
        return history, accepted & moved & ((dz * change).sum(-1) >= 0) & resolves(state.residual)


def _kept_still(moved: Tensor, new: Any, old: Any) -> Any:
    """The new history where something `moved`, else the old, which may have fewer columns."""
    if not isinstance(new, tuple):
        return rows_where(moved, new, torch.zeros_like(new) if old is None else old)
    missing = (None,) * len(new)
    items = [_kept_still(moved, *pair) for pair in zip(new, (*(old or ()), *missing), strict=False)]
    return type(new)(*items) if hasattr(new, "_fields") else tuple(items)
