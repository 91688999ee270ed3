"""The answer of a solve: the value, its status problem by problem, and the record of how the solve went."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from . import _validate
from ._torch import exact_precision, is_batched, is_fake, norm

__all__ = ["AdjointReport", "Record", "Solution", "SolveReport", "Status", "Trace", "summarize"]


class Status(enum.IntEnum):
    """The status of one problem of a batch.

    Tensors of status hold the integer codes. Codes up to `UNSTABLE` are answers, larger ones failures. `sentence`
    states the fact; what to do about it is known to the method that failed, whose `remedies` say it by status. Not for
    a whole batch: print the `Solution` or the `SolveReport`, which count the codes.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, Picard, Status, solve
        >>> problem = FixedPointMap(torch.cos, event_ndim=1)
        >>> solution = solve(problem, torch.zeros(1, 1), solver=Picard(max_steps=3), on_failure="ignore")
        >>> status = Status(int(solution.status[0]))
        >>> status.name, status.failed
        ('MAX_STEPS', True)
    """

    CONVERGED = 0, "converged: residual {residual:.1e} <= {tolerance:.1e} after {steps} steps"
    EXPLICIT = 1, "no step was asked for (max_steps=0), the initial state is returned; residual {residual:.1e}"
    BUDGET = 2, "fixed budget of {steps} steps used as asked (rtol = atol = 0); residual {residual:.1e}"
    UNSTABLE = 3, "converged to a stationary point with negative curvature (a saddle): residual {residual:.1e}"
    MAX_STEPS = 4, "residual {residual:.1e} > {tolerance:.1e} after {steps} steps"
    STALLED = 5, "residual {residual:.1e} > {tolerance:.1e} and no step improves it after {steps} steps"
    DIVERGED = (
        6,
        "the iteration left the finite numbers, or an energy without a lower bound fell without end; the "
        "best state, after {steps} steps, has residual {residual:.1e}",
    )
    NONFINITE = 7, "the problem reads a NaN or an infinity: its map is not finite at the initial state"
    OUT_OF_RANGE = 8, "solved (residual {residual:.1e}), but out of the range of the approximation or energy"

    #: The message of the status, with places for `residual`, `tolerance` and `steps`.
    sentence: str

    def __new__(cls, code: int, sentence: str = "") -> Status:
        status = int.__new__(cls, code)
        status._value_, status.sentence = code, sentence
        return status

    @property
    def failed(self) -> bool:
        """Whether the value that carries this status is not an answer."""
        return self > Status.UNSTABLE


#: The remedy that helps plain steps, and with them every method; the problem adds which of its numbers do it.
CONTRACT = "make f contract more"
#: The remedies by the attributes that hold these numbers.
LEVERS = {"beta": "lower beta", "anchor": "raise the anchor"}
OF_ATTENTION = " or ".join(LEVERS.values())


def advice(remedies: Mapping[Status, str], to_contract: str) -> dict[Status, str]:
    """The remedies of a solver, with what makes f of the problem at hand contract more, where that is known."""
    if not to_contract:
        return dict(remedies)
    return {status: text.replace(CONTRACT, f"{CONTRACT} ({to_contract})") for status, text in remedies.items()}


#: The advice of a method about problems that ended with a status.
Remedies: TypeAlias = Mapping[Status, str]
NO_REMEDIES: Remedies = {}
#: Estimated relative errors of gradients that a user should know of.
UNSURE = 0.15

#: A converged solution is reported as loose where its residual is more than this part of its value.
LOOSE = 0.01
_REMEDY = "lower atol for data of this scale, or rtol"
NOT_MEASURED = "not measured"
NO_GRADIENT = "the implicit gradient there is that of no solution: use Implicit(fallback=Phantom(5)) or Unrolled()"


class Record(NamedTuple):
    """The record of a solve, problem by problem, as plain tensors (*lead), which solvers and compiled graphs return.

    Attributes:
        status: (*lead), int8 codes of `Status`.
        residual: (*lead), |f(z) - z|_2 of the very value that was returned; NaN where it was not measured (`EXPLICIT`).
        tolerance: (*lead), atol + rtol |f(z)|_2, which the residual had to reach.
        num_steps: (*lead), updates that led to the value.
        num_evals: (*lead), evaluations of f (matrix-vector products of inner solves included) spent on the problem.
    """

    status: Tensor
    residual: Tensor
    tolerance: Tensor
    num_steps: Tensor
    num_evals: Tensor

    @classmethod
    def unmeasured(cls, states: Tensor, status: Status, event_ndim: int = 0) -> Record:
        """The record of problems with these states (*lead, *event), of which the status alone is known."""
        lead = states.shape[: states.ndim - event_ndim]
        unknown, none = states.detach().new_full(lead, torch.nan), states.new_zeros(lead, dtype=torch.int32)
        return cls(states.new_full(lead, int(status), dtype=torch.int8), unknown, unknown, none, none)

    def map(self, function: Callable[[Tensor], Tensor]) -> Record:
        """The record with `function` applied to every field."""
        return Record(*map(function, self))

    def nonfinite_at(self, problems: Tensor) -> Record:
        """The record in which these problems (*lead) are NONFINITE, with residuals that nobody knows."""
        status = self.status.masked_fill(problems, int(Status.NONFINITE))
        return self._replace(status=status, residual=self.residual.masked_fill(problems, torch.nan))

    @property
    def converged(self) -> Tensor:
        """(*lead), True where the residual reached the tolerance."""
        return (self.status == Status.CONVERGED) | (self.status == Status.UNSTABLE)

    @property
    def failed(self) -> Tensor:
        """(*lead), True where the value is not an answer."""
        # torch.compile compares tensors with numbers, not with subclasses of int.
        return self.status > int(Status.UNSTABLE)

    def worst(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """The whole index of the worst problem among those that `index` selects by the first axes."""
        axes = self.status.shape[len(index) :]
        if not axes:
            return index
        status, residual, tolerance = (field[index].flatten() for field in self[:3])
        # By status; among equals by residual, where it was measured.
        strain = (residual / tolerance.clamp_min(torch.finfo(tolerance.dtype).tiny)).nan_to_num(torch.inf)
        last = int(torch.where(status == status.max(), strain, -1.0).argmax())
        return (*index, *map(int, np.unravel_index(last, axes)))

    def message(self, index: tuple[int, ...], remedies: Remedies = NO_REMEDIES) -> str:
        """Describe the outcome of one problem, with the remedy for its status if there is one."""
        code, residual, tolerance, num_steps, _ = (field[index].item() for field in self)
        status = Status(int(code))
        text = status.sentence.format(residual=residual, tolerance=tolerance, steps=num_steps)
        text = text.replace("has residual nan", f"was {NOT_MEASURED}").replace("nan", NOT_MEASURED)
        return f"{text}; {remedies[status]}" if status in remedies else text


class Trace(NamedTuple):
    """The course of a solve: the best state after every iteration, and the numbers measured at it.

    Attributes:
        residual: of the best state so far, (iterations, *lead).
        energy: of the best state so far, (iterations, *lead); None for a map without one.
        num_evals: map evaluations spent by then, (iterations, *lead).
        value: the best state so far, (iterations, *lead, *event).
    """

    residual: Tensor
    energy: Tensor | None
    num_evals: Tensor
    value: Tensor

    @classmethod
    def of(cls, residual: Tensor, *others: Tensor) -> Trace:
        """The course by its fields, of which the energy may be left out."""
        *energy, num_evals, value = others
        return cls(residual, energy[0] if energy else None, num_evals, value)


@dataclasses.dataclass(repr=False)
class AdjointReport:
    """The report of the linear solves behind a gradient, per problem; empty until a backward pass has run.

    Not for the forward solve: see `SolveReport`.

    Of several solves (repeated passes, second derivatives) the worst is kept.

    Attributes:
        status: (*lead), int8 codes of `Status`; UNSTABLE where the solution has negative curvature.
        residual: (*lead), of the linear system; of an energy with a metric of the symmetric one.
        tolerance: (*lead), which that residual had to reach.
        num_steps: (*lead), matrix-vector products.
        negative_curvature: (*lead), whether a direction of negative curvature was met.
        gradient_error: (*lead), an estimate, to first order, of the relative error of the gradient that comes from the
            state, which is solved to a residual only: |r| sqrt(n)/|z|, the change of the state in units of the size of
            its n entries, times the square of what the backward solve found of |(I - J)^-1|. Near a fold that is large
            though the status is CONVERGED; values above 0.25 mean only "large". The estimate assumes that f bends on
            the scale of its state, and is too large for a map that is nearly linear. Beyond 0.15 the estimate counts
            only the part of the residual along the flat direction, and a warning names the problems that stay above
            it. None with on_failure="ignore", inside torch.func, and in a compiled graph.
        state_residual: (*lead), the residual of the states, from which `gradient_error` is estimated.
        unsolved: (*lead), where the solve itself failed, for an adjoint whose gradient is then wrong; None for others.
        reconstruction_error: (*lead), of `Reversible()`: the largest difference between an entry of the start and of
            the state that the steps back arrived at, relative to the largest entry of the start and f there. 0 where f
            is the same function at each evaluation; None for other adjoints. `residual` and `status` are about it.
        lead: the shape of the fields, where heads or sites have axes of their own that the problems solved have not.
        on_failure: how a backward solve that fails is reported: "raise", "warn", "ignore" or a `FailurePolicy`.
        site: the layer that solved, at which failures are reported and counted.
        awaited: whether the returned value has a graph, whose backward pass fills this report.
        in_graph: whether the solve was a part of a compiled graph. Its backward pass leaves this report empty, and
            warns of failures itself, unless `on_failure` is "ignore".

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, solve
        >>> shift = torch.ones(3, 1, requires_grad=True)
        >>> solution = solve(FixedPointMap(lambda z, b: z.sin() / 2 + b, shift, event_ndim=1), torch.zeros(3, 1))
        >>> solution.adjoint
        AdjointReport(no backward pass yet)
        >>> solution.value.sum().backward()
        >>> solution.adjoint.status.tolist()
        [0, 0, 0]
    """

    status: Tensor | None = None
    residual: Tensor | None = None
    tolerance: Tensor | None = None
    num_steps: Tensor | None = None
    negative_curvature: Tensor | None = None
    gradient_error: Tensor | None = None
    state_residual: Tensor | None = None
    unsolved: Tensor | None = None
    reconstruction_error: Tensor | None = None
    lead: torch.Size | None = None
    on_failure: Any = "raise"
    site: Any = None
    awaited: bool = False
    in_graph: bool = False

    @property
    def failed(self) -> Tensor | None:
        """(*lead), True where the gradient is wrong; None before a backward pass."""
        if self.status is None:
            return None
        failed = self.status > Status.UNSTABLE
        return failed | self.unsolved if self.unsolved is not None and self.unsolved.shape == failed.shape else failed

    def __repr__(self) -> str:
        if self.status is None or self.residual is None or self.num_steps is None:
            if self.in_graph:
                return "AdjointReport(not kept by a compiled graph, whose backward pass warns of what fails)"
            return "AdjointReport(no backward pass yet)"
        text = "" if self.gradient_error is None else f"; gradient error <= {_largest(self.gradient_error):.1e}"
        if self.gradient_error is not None and (count := int((self.gradient_error > UNSURE).sum())):
            text += f", beyond {UNSURE:.0%} for {count}"
        if self.unsolved is not None and (count := int(self.unsolved.sum())):
            text += f"; {count} at states that are no solution, where it is wrong"
        if self.reconstruction_error is not None:
            text += f"; start reconstructed to {_largest(self.reconstruction_error):.1e}"
        return f"AdjointReport({summarize(self.status, self.residual, self.num_steps, self.tolerance)}{text})"


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Recorded:
    """Base of results that carry a `Record`: its fields by name."""

    record: Record

    @property
    def status(self) -> Tensor:
        """(*lead), int8 codes of `Status`, whose names are `statuses`."""
        return self.record.status

    @property
    def statuses(self) -> Any:
        """The names of the statuses, lists nested as the axes (*lead) are; one name where there is one problem only."""
        return _named(self.record.status.tolist())

    @property
    def residual(self) -> Tensor:
        """(*lead), |f(z) - z|_2 of the very value that was returned; NaN where it was not measured (`EXPLICIT`)."""
        return self.record.residual

    @property
    def tolerance(self) -> Tensor:
        """(*lead), atol + rtol |f(z)|_2, which the residual had to reach."""
        return self.record.tolerance

    @property
    def num_steps(self) -> Tensor:
        """(*lead), updates that led to the value."""
        return self.record.num_steps

    @property
    def num_evals(self) -> Tensor:
        """(*lead), evaluations of f (matrix-vector products of inner solves included) spent on the problem."""
        return self.record.num_evals

    @property
    def converged(self) -> Tensor:
        """(*lead), True where the residual reached the tolerance."""
        return self.record.converged

    @property
    def failed(self) -> Tensor:
        """(*lead), True where the value is not an answer."""
        return self.record.failed

    def amended(self, **fields: Tensor) -> Self:
        """The same with some fields of its record replaced."""
        return dataclasses.replace(self, record=self.record._replace(**fields))


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class SolveReport(Recorded):
    """The report of a solve, problem by problem. `lead` are the axes that number problems.

    Not for the values: those are in the `Solution`.

    Attributes:
        record: status, residual, tolerance, num_steps and num_evals, (*lead) each, which are read here by name.
        adjoint: how the backward solve went, filled when a gradient was computed with `Implicit()`.
        remedies: what the method advises, by status.
        tolerances: rtol and atol of the solver, from which |f(z)| is known; None where a method has its own.
        route: by which functions it ran; printed, for example "native: evaluate, step, product; float32; 8 heads". None
            for methods of their own, as those of spins, and for steps without a solve.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, solve
        >>> cosine = FixedPointMap(torch.cos, event_ndim=1)
        >>> report = solve(cosine, torch.zeros(3, 1)).report
        >>> report.status.tolist(), report.map(lambda field: field[:1]).status.tolist()
        ([0, 0, 0], [0])
    """

    adjoint: AdjointReport = dataclasses.field(default_factory=AdjointReport)
    remedies: Remedies = dataclasses.field(default_factory=dict)
    tolerances: tuple[float, float] | None = dataclasses.field(default=None, kw_only=True)
    route: Any = dataclasses.field(default=None, kw_only=True)

    @property
    def _parts(self) -> dict[str, Any]:
        """The fields that all kinds of reports have."""
        return {name: getattr(self, name) for name in _OF_REPORTS}

    @property
    def _size(self) -> Tensor:
        """(*lead), |f(z)| as the tolerance tells it; NaN where it does not."""
        rtol, atol = self.tolerances or (0.0, 0.0)
        # At most that, where atol leaves no digits of it.
        least = torch.finfo(self.tolerance.dtype).eps * self.tolerance
        return (self.tolerance - atol).maximum(least) / rtol if rtol else torch.full_like(least, torch.nan)

    @property
    def relative_residual(self) -> Tensor:
        """(*lead), residual / |f(z)|_2; 0 where both are 0. Far above rtol where the absolute tolerance decided."""
        return torch.where(self.residual == 0, 0.0, self.residual / self._size)

    def message(self, *index: int) -> str:
        """The sentence for one problem: what happened and what to do.

        Args:
            index: of the problem, one number for each axis that numbers problems. With fewer the sentence is that of
                the worst of all problems that are meant, and says which that is; without any, of all problems.
        """
        status = self.status
        seen = not is_batched(status)
        _validate.require(seen, "message", "be asked outside of torch.vmap", "a status inside of it")
        few, required = len(index) <= status.ndim, f"have at most {status.ndim} numbers, one for each axis of `status`"
        _validate.require(few, "index", required, index)
        for axis, (given, size) in enumerate(zip(index, status.shape, strict=False)):
            _validate.require(-size <= given < size, f"index[{axis}]", f"be in [{-size}, {size - 1}]", given)
        count = status[index].numel()
        if count == 0:
            return "no problems"
        worst = self.record.worst(index)
        text, relative = self.record.message(worst, self.remedies), float(self.relative_residual[worst])
        if self.adjoint.awaited and self.adjoint.unsolved is not None and bool(self.failed[worst]):
            text = f"{text}; {NO_GRADIENT}"
        if int(self.status[worst]) == Status.CONVERGED and relative > LOOSE:
            text = f"{text}; that is {relative:.1e} of |value|: {_REMEDY}"
        return text if count == 1 else f"the worst of {count} problems, {shown_index(worst)}: {text}"

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The report with `function` applied to every field, as where heads or sites get axes of their own.

        A backward solve reports in the new shape, too.
        """
        record = self.record.map(function)
        self.adjoint.lead = record.status.shape
        self.adjoint.unsolved = None if self.adjoint.unsolved is None else record.failed
        return dataclasses.replace(self, record=record)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._summary()})"

    def _summary(self) -> str:
        size = self._size
        text = summarize(self.status, self.residual, self.num_evals, self.tolerance, size)
        if is_batched(size, self.status) or is_fake(self.status):
            return text
        loose = int(((self.status == Status.CONVERGED) & (self.relative_residual > LOOSE)).sum())
        return f"{text}; {loose} with a residual above {LOOSE:.0%} of |value|: {_REMEDY}" if loose else text


# Torch's compiler does not follow `dataclasses.fields` of a class.
_OF_REPORTS = tuple(field.name for field in dataclasses.fields(SolveReport))


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True, eq=False)
class Solution(SolveReport):
    """The answer to a fixed-point problem, problem by problem, with its `SolveReport`.

    Not for keeping during training, as it holds the graph: keep `Solution.report`.

    Attributes:
        value: z, of the initial state's shape; float32 where the inputs are half precision.
        trace: the course of the iteration, if it was asked for.
        course: the states behind `states(at=...)`.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, solve
        >>> cosine = FixedPointMap(torch.cos, event_ndim=1)
        >>> solution = solve(cosine, torch.zeros(3, 1))
        >>> solution.value.shape, bool(solution.converged.all()), solution.message(0)[:9]
        (torch.Size([3, 1]), True, 'converged')
    """

    value: Tensor
    trace: Trace | None = None
    course: tuple[Tensor, ...] = ()
    energy_function: Callable[[Tensor], Tensor] | None = None

    @property
    def energy(self) -> Tensor | None:
        """E(value) per problem, (*lead), computed when asked for; None for a map without an energy."""
        if self.energy_function is None:
            return None
        with torch.no_grad(), exact_precision(self.value):
            return self.energy_function(self.value.detach())

    def states(self, at: Sequence[int]) -> Tensor:
        """The states after `at` steps of a solve with `Unrolled()` and trace=True, with the graph of those steps.

        They are those of `trace`, the best so far; where all problems finished sooner, the value. For losses at
        intermediate states.

        Args:
            at: numbers of steps; 0 is the initial state.

        Returns:
            (len(at), *lead, *event).

        Raises:
            ValueError: no such states were kept, or fewer steps were made.
        """
        if not self.course:
            required = "be asked of a solve with adjoint=Unrolled() and trace=True"
            received = "one without a trace" if self.trace is None else "one of which no graph of the steps is kept"
            remedy = "pass both to `solve`" if self.trace is None else "read `trace.value` for the numbers alone"
            _validate.refuse("states", required, received, remedy)
        steps, first = len(self.course) - 1, self.course[0]
        spent = torch.tensor([Status.EXPLICIT, Status.BUDGET, Status.MAX_STEPS], device=first.device)
        ended = is_batched(self.status) or bool(torch.isin(self.status, spent).any())
        for count in at:
            _validate.check_integer("at", count, low=0)
            few = ended and count > steps
            _validate.require(not few, "at", f"be at most the {steps} steps that were made", count, "raise max_steps")
        picked = [self.course[min(count, steps)] for count in at]
        return torch.stack(picked) if picked else first.new_empty((0, *first.shape))

    @property
    def _size(self) -> Tensor:
        value = self.value.detach()
        return norm(value.reshape(*self.residual.shape, value.shape[self.residual.ndim :].numel()))

    @property
    def report(self) -> SolveReport:
        """The same without the value, the trace and the tensors that they were computed from."""
        return SolveReport(**self._parts)


def _largest(numbers: Tensor) -> float:
    return float(numbers.max()) if numbers.numel() else 0.0


def _named(codes: Any) -> Any:
    return [_named(code) for code in codes] if isinstance(codes, list) else Status(codes).name


def shown_index(index: tuple[int, ...]) -> str:
    """The index of a problem as messages show it."""
    return str(index[0]) if len(index) == 1 else str(index)


def summarize(
    status: Tensor, residual: Tensor, num_evals: Tensor, tolerance: Tensor | None = None, size: Tensor | None = None
) -> str:
    """One line over all problems: counts by status, largest residual, median and largest number of evaluations.

    With tolerances the residual is that which is largest beside its own; with sizes both are relative to its size.
    """
    if is_batched(status) or is_fake(status):
        return f"problems {tuple(status.shape)}, which the host cannot see"
    if status.numel() == 0:
        return "no problems"
    counts = ", ".join(f"{count} {name}" for name, count in status_counts(status).items())
    spent = f"evaluations median {int(num_evals.flatten().median())}, max {int(num_evals.max())}"
    return f"{counts}; {_accuracy(residual, tolerance, size)}; {spent}"


def status_counts(status: Tensor) -> dict[str, int]:
    """The number of problems by the name of their status."""
    return {Status(code).name: count for code, count in sorted(Counter(status.flatten().tolist()).items())}


def _accuracy(residual: Tensor, tolerance: Tensor | None, size: Tensor | None) -> str:
    aim = torch.zeros_like(residual) if tolerance is None else tolerance
    worst = torch.where(aim > 0, residual / aim, residual).nan_to_num(-1.0, torch.inf).argmax()
    found, wanted, unit = (float(x.flatten()[worst]) for x in (residual, aim, residual if size is None else size))
    if math.isnan(found):
        return f"residual {NOT_MEASURED}"
    if not wanted > 0:
        return f"residual <= {found:.1e}"
    if size is None or not wanted < unit < math.inf:
        return f"residual {found:.1e}, tolerance {wanted:.1e}"
    return f"relative residual {found / unit:.1e}, tolerance {wanted / unit:.1e}"
