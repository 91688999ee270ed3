"""Base classes of methods: each computes a log-partition function, whose derivatives are all other quantities."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from .._solve import solve
from .._torch import grad
from ..adjoints import Adjoint
from ..potentials import SphereUnits, SphericalLaw
from ..problem import Linearization, Problem, restricted
from ..solution import AdjointReport, Record, Remedies, Solution, SolveReport, Status
from ..solvers import Anderson, Picard, Solver
from ._curvature import everywhere
from .bonds import Graph
from .methods import listed
from .system import SpinSystem

#: The check of a solution: none beyond its equations, or "stability", that it is a minimum.
Check: TypeAlias = Literal["none", "stability"]


class LogPartition(NamedTuple):
    """log Z of every sample, (*batch), and the report of the solve behind it, whose problems are the samples.

    Not for free energies, from which samples that cannot be solved are kept away: use `free_energy`.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import Enumeration, SpinSystem
        >>> value, report = Enumeration().log_partition(SpinSystem(torch.zeros(2, 2), torch.zeros(2, 1)))
        >>> round(float(value), 6), bool(report.converged)
        (0.0, True)
    """

    value: Tensor
    report: SolveReport


class Answer(NamedTuple):
    """The answer of spins at fixed couplings: <s_i>, (*batch, N, D), the solved state, and the report of the solve.

    Attributes:
        magnetization: <s_i>; `initial=answer.magnetization` starts the next solve there.
        state: of the method's own equations, None where there are none to be solved.
        report: of the solve, whose problems are the samples.

    Not for couplings that are a function of the field: `magnetization` adds their part.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import MeanField, SpinSystem
        >>> system = SpinSystem(torch.tensor([[0.0, 0.5], [0.5, 0.0]]), field=torch.tensor([[0.3], [0.0]]))
        >>> answer = MeanField().answer(system)
        >>> answer.magnetization.shape, bool(answer.report.converged)
        (torch.Size([2, 1]), True)
    """

    magnetization: Tensor
    state: Tensor | None
    report: SolveReport


@dataclasses.dataclass(frozen=True, kw_only=True)
class Approximation:
    """Base of the methods. A subclass defines `log_partition`, and `check`, which refuses what it cannot treat.

    log Z has to be differentiable with respect to field, couplings and beta, each with the others fixed, as often as
    derivatives of F are wanted: magnetizations are the first with respect to the field, susceptibilities the second.
    A method receives finite numbers alone: samples with others are taken out, and their answers are NaN. Unless
    `symmetric` is False, so are samples with asymmetric couplings that `check` could not look at.

    Not for use by itself: use one of its subclasses, such as `AdaTAP()`, or derive your own method.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import Approximation, Enumeration, MeanField, SpinSystem, free_energy
        >>> couplings = torch.tensor([[0.0, 0.5], [0.5, 0.0]])
        >>> system = SpinSystem(couplings, field=torch.tensor([[0.3], [0.0]]))
        >>> methods: list[Approximation] = [Enumeration(), MeanField()]
        >>> [round(float(free_energy(system, method)), 3) for method in methods]
        [-0.164, -0.058]
    """

    #: Whether log Z is the true one of every system that `check` lets pass.
    exact: ClassVar[bool] = False
    #: Whether couplings have to be symmetric, J_ij = J_ji^T.
    symmetric: ClassVar[bool] = True
    #: Advice for the statuses with which a sample may end.
    remedies: ClassVar[Remedies] = {
        Status.MAX_STEPS: "raise max_steps, or lower beta",
        Status.STALLED: "use a larger rtol, or float64",
        Status.DIVERGED: "lower beta, or use AdaTAP()",
        Status.NONFINITE: "look for NaN, infinities, beta <= 0 and asymmetric couplings in this sample",
        Status.OUT_OF_RANGE: "lower beta, or use a method that holds there",
    }

    @property
    def by_products(self) -> bool:
        """Whether products J v are all that it needs of the couplings, so that they may be a `LowRank`."""
        return False

    @property
    def by_bonds(self) -> bool:
        """Whether it reads no pairs but those that are coupled, so that `Bonds` may have any number of sites."""
        return self.by_products

    def check(self, system: SpinSystem) -> None:
        """Raise if the method cannot treat the system."""
        name = type(self).__name__
        if not (self.by_products if system.low_rank else self.by_bonds):
            others = "" if system.low_rank or system.block else " or TAP()" if system.dim > 1 else ", TAP() or Bethe()"
            system.check_dense(f"for {name}, which reads every pair", f"MeanField(){others}")
        if self.symmetric:
            system.check_symmetric(name)

    def site_response(self) -> SphericalLaw:
        """The law by which a spin without neighbours answers its field."""
        return SphereUnits()

    def inverse_variances(self, system: SpinSystem) -> Tensor | None:
        """Lambda_i, (*batch, N), if Lambda - beta J is the method's inverse covariance of all spins; else None."""
        return None

    def check_initial(self, system: SpinSystem, initial: Tensor) -> None:
        """Raise if no solve can start from these magnetizations."""
        required = f"be None for {type(self).__name__}, which has one answer"
        remedy = f"leave it out, or use {listed(lambda kind: issubclass(kind, FixedPointApproximation))}"
        _validate.refuse("initial", required, "a tensor", remedy)

    def log_partition(self, system: SpinSystem) -> LogPartition:
        """log Z relative to the uniform measure, without `system.base_measure()`."""
        raise NotImplementedError(f"{type(self).__name__} must define log_partition(system)")

    def answer(self, system: SpinSystem, *, initial: Tensor | None = None, check: Check = "none") -> Answer:
        """<s_i> = (1/beta) d log Z/dh_i at fixed couplings; NaN in samples that have no log Z."""
        adjoint = AdjointReport()

        def log_z(field: Tensor) -> tuple[Tensor, tuple[Tensor, Record]]:
            nonlocal adjoint
            value, report = self.log_partition(system.at(field, system.couplings, system.beta))
            known, adjoint = value.isfinite(), report.adjoint
            return value.masked_fill(~known, 0.0).sum(), (known, report.record)

        by_field, (known, record) = grad(log_z, has_aux=True)(system.field)
        m = (by_field / system.beta_over(2)).masked_fill(~known[..., None, None], torch.nan)
        return Answer(m, None, SolveReport(record, adjoint))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedPointApproximation(Approximation, _validate.Options):
    """Base of methods whose log Z is stationary where a fixed-point problem, one per sample, is solved.

    There may be several such points; each is a branch. Solvers of equations also find those where the free energy has
    no minimum, so that the default is short damped steps first, which descend, and `Anderson` once near. A solver that
    the user passes starts at once. A solution that is no minimum, such as m = 0 below a transition, has the status
    UNSTABLE with `check="stability"`, and CONVERGED without: the check costs more than most solves. Residuals and
    tolerances are in units of the state of every site (`unit`), so that a strong field loosens no other site.

    Not for methods that need no iteration: derive these from `Approximation`.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import TAP, FixedPointApproximation, SpinSystem
        >>> method, system = TAP(), SpinSystem(torch.zeros(2, 2), torch.ones(2, 1))
        >>> isinstance(method, FixedPointApproximation), method.problem(system).event_ndim
        (True, 2)
    """

    remedies: ClassVar[Remedies] = {
        **Approximation.remedies,
        Status.MAX_STEPS: "pass a solver with more steps, such as Anderson(max_steps=5000), or lower beta",
        Status.UNSTABLE: "choose another branch by `initial=`, such as one of `stability`, or add a small field",
    }

    solver: Solver | None = _validate.instance(None, Solver, "be None or a Solver", "for example Anderson()")
    adjoint: Adjoint | None = _validate.instance(None, Adjoint, "be None or an Adjoint", "for example Implicit()")
    #: Relative residual of the default solver; None is 1e-11, or 1e-6 in float32.
    rtol: float | None = _validate.number(None, low=0.0, high=1.0, open_low=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        alone, remedy = None in (self.rtol, self.solver), "give the solver its own rtol"
        _validate.require(alone, "rtol", "be None beside a solver", self.rtol, remedy)

    def problem(self, system: SpinSystem) -> Problem:
        """The fixed-point problem, whose last two axes make a sample."""
        raise NotImplementedError(f"{type(self).__name__} must define problem(system)")

    def start(self, system: SpinSystem) -> Tensor:
        """The state that the solver starts from; a field as strong as the couplings leads to any branch."""
        raise NotImplementedError(f"{type(self).__name__} must define start(system)")

    def state_at(self, system: SpinSystem, m: Tensor) -> Tensor:
        """The state of spins with the magnetizations m, (*batch, N, D), which are shorter than R."""
        raise NotImplementedError(f"{type(self).__name__} must define state_at(system, m)")

    def value(self, system: SpinSystem, state: Tensor) -> Tensor:
        """log Z, (*batch), at a state of the problem."""
        raise NotImplementedError(f"{type(self).__name__} must define value(system, state)")

    def default_solver(self, dtype: torch.dtype) -> Solver:
        """The solver near a solution where the user passes none."""
        return physics_solver(dtype, self.rtol)

    def damping(self, system: SpinSystem) -> float | Tensor:
        """The factor by which a step z -> f(z) is shortened so that it descends, a number or (*batch)."""
        return 0.5

    def unit(self, system: SpinSystem) -> Tensor | None:
        """The unit of every site's state, (*batch, N, #D), by which sites count alike in residuals; None for 1."""
        return None

    def contracting(self, system: SpinSystem) -> Tensor | None:
        """(*batch), whether plain steps are certain to contract, so that there is one solution; None if unknown."""
        return None

    def unstable(self, system: SpinSystem, state: Tensor) -> Tensor | None:
        """(*batch), whether a solution is no minimum of the free energy; None if that is not known."""
        return None

    def out_of_range(self, system: SpinSystem, state: Tensor) -> Tensor | None:
        """(*batch), whether the approximation does not hold at a solution; None if that is not known at little cost."""
        return None

    def check_initial(self, system: SpinSystem, initial: Tensor) -> None:
        _validate.check_float_tensor("initial", initial)
        shape, received = tuple(system.field.shape), f"shape {tuple(initial.shape)}"
        _validate.require(initial.shape == shape, "initial", f"have the field's shape {shape}", received)
        device = system.field.device
        remedy = "move it with .to(device)"
        _validate.require(initial.device == device, "initial", f"be on the field's {device}", initial.device, remedy)

    def begin(self, system: SpinSystem, initial: Tensor | None) -> Tensor:
        """The state that the solver starts from: that of the magnetizations `initial` unless they are None."""
        if initial is None:
            return self.start(system)
        m = initial.detach().to(system.field.dtype)
        if system.mask is not None:
            m = m.masked_fill(~system.mask[..., None], 0.0)
        # Magnetizations of some methods, such as `SaddlePoint(one_loop=True)`, have length R or more.
        longest = (1 - 4 * torch.finfo(m.dtype).eps) * system.radius
        m = m * (longest / torch.linalg.vector_norm(m, dim=-1, keepdim=True)).clamp(max=1.0)
        return self.state_at(system, m)

    def log_partition(
        self, system: SpinSystem, *, initial: Tensor | None = None, check: Check = "none"
    ) -> LogPartition:
        solution = self.solution(system, self.begin(system, initial), check=check)
        return LogPartition(self.value(system, solution.value), solution.report)

    def magnetization_at(self, system: SpinSystem, state: Tensor) -> Tensor:
        """<s_i> at a solution, by default the derivative of log Z at a fixed state, in which log Z is stationary."""

        def log_z(field: Tensor) -> Tensor:
            return self.value(system.at(field, system.couplings, system.beta), state)

        return gradient(log_z, system.field) / system.beta_over(2)

    def answer(self, system: SpinSystem, *, initial: Tensor | None = None, check: Check = "none") -> Answer:
        solution = self.solution(system, self.begin(system, initial), check=check)
        return Answer(self.magnetization_at(system, solution.value), solution.value, solution.report)

    def solution(self, system: SpinSystem, start: Tensor, *, check: Check = "none") -> Solution:
        """The solution that a start leads to."""
        problem, spent = self.problem(system), None
        problem.token_order = system.token_order
        unit = self.unit(system) if system.token_order is None else None
        if unit is not None:
            _validate.check_float_tensor("initial", start, min_ndim=2)
            problem, start = InUnits(problem, unit), start / unit
        solver = self.solver
        if solver is None:
            solver = self.default_solver(start.dtype)
            if system.token_order is not None:
                # No decision may depend on the whole sample. Plain steps settle the tokens before, and a short history
                # forgets their way: softmax couplings took 8 evaluations in the place of 8 to 13.
                solver = dataclasses.replace(physics_solver(start.dtype, self.rtol), history=1, plain_steps=5)
            elif (certain := self.contracting(system)) is None or not everywhere(certain):
                near, spent = _settled(problem, start, self.damping(system))
                if certain is not None:
                    # Where there is one solution, any solver may start at once.
                    near, spent = torch.where(certain[..., None, None], start, near), spent.masked_fill(certain, 0)
                start = near
        # `free_energy`, `thermodynamics` and their like report failures.
        solution = solve(problem, start, solver=solver, adjoint=self.adjoint, on_failure="ignore")
        if unit is not None:
            solution = dataclasses.replace(solution, value=unit * solution.value)
        if spent is not None:
            solution = solution.amended(num_evals=solution.num_evals + spent)
        # After a fixed budget of steps the status is BUDGET, which claims no solution.
        return solution if solver.fixed_budget else self._judged(system, solution, check)

    @torch.no_grad()
    def _judged(self, system: SpinSystem, solution: Solution, check: Check) -> Solution:
        """The solution, with the status UNSTABLE or OUT_OF_RANGE where one of these holds."""
        status, state = solution.status, solution.value.detach()
        unstable = self.unstable(system, state) if check == "stability" else None
        beyond = self.out_of_range(system, state)
        for verdict, doubtful in ((Status.UNSTABLE, unstable), (Status.OUT_OF_RANGE, beyond)):
            if doubtful is not None:
                status = status.masked_fill(solution.converged & doubtful, int(verdict))
        return solution.amended(status=status)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResponseApproximation(FixedPointApproximation):
    """Base of methods in which every spin answers a field by a `SphericalLaw`. The state is m by default."""

    response: SphericalLaw = dataclasses.field(default_factory=SphereUnits)

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.check_instance("response", self.response, SphericalLaw, remedy="for example SphereUnits()")

    def check(self, system: SpinSystem) -> None:
        super().check(system)
        self.response.check("system", system.dim, system.radius)

    def site_response(self) -> SphericalLaw:
        return self.response

    def start(self, system: SpinSystem) -> Tensor:
        return self.response.magnetization(system.live_field, system.beta_over(0), system.radius)

    def state_at(self, system: SpinSystem, m: Tensor) -> Tensor:
        return m

    def magnetization_at(self, system: SpinSystem, state: Tensor) -> Tensor:
        return state


class SampleProblem(Problem, general=True):
    """Base of problems that solve all sites of a sample together, on two axes. All their tensors are attributes.

    `own_axes` gives, for every attribute that may differ between samples, the number of its axes for one sample.
    """

    event_ndim = 2
    row_block = 1
    own_axes: Mapping[str, int] = {}

    def select(self, index: Tensor) -> Self | None:
        clone = restricted(self, index, **self.own_axes)
        for name, part in vars(self).items():
            if isinstance(part, Graph | SpinSystem | Problem):
                setattr(clone, name, chosen := part.select(index))
                if chosen is None:
                    return None
        return clone

    def check_undeclared(self, z: Tensor) -> None:
        """Accept every problem: it reads nothing but attributes."""


@torch.no_grad()
def _settled(problem: Problem, start: Tensor, damping: float | Tensor) -> tuple[Tensor, Tensor]:
    """A state near the end of damped steps, and the number of evaluations that they took."""
    constant = problem.replace(*(t.detach() for t in problem.tensors()))
    step = torch.as_tensor(damping, dtype=start.dtype, device=start.device).detach()[..., None, None]
    near = solve(_Damped(constant, step), start, solver=_SETTLING, on_failure="ignore")
    sound = torch.isfinite(near.value).flatten(-2).all(-1)[..., None, None]
    return torch.where(sound, near.value, start), near.num_evals


class _Wrapped(SampleProblem, general=True):
    """Base of problems that another one is turned into, sample by sample, by a factor (*#batch, #N, #D)."""

    def __init__(self, problem: Problem, factor: Tensor) -> None:
        self.problem = problem
        self.factor = factor
        self.own_axes = {"factor": 2}
        self.row_block = problem.row_block

    def check_undeclared(self, z: Tensor) -> None:
        self.problem.check_undeclared(z)


class _Damped(_Wrapped):
    """z = z + factor (f(z) - z), for a part of every step."""

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return z + self.factor * (self.problem.fixed_point_map(z) - z)


class InUnits(_Wrapped):
    """The same problem for the state in units of the factor, a power of two for every site."""

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return self.problem.fixed_point_map(self.factor * z) / self.factor

    def linearize(self, z: Tensor) -> Linearization:
        inner = self.problem.linearize(self.factor * z)

        def guess(rhs: Tensor, rtol: float | Tensor, transpose: bool) -> tuple[Tensor, Tensor]:
            assert inner.guess is not None
            scale = 1 / self.factor if transpose else self.factor
            found, spent = inner.guess(scale * rhs, rtol, transpose)
            return found / scale, spent

        return Linearization(
            lambda v: inner.jvp(self.factor * v) / self.factor,
            lambda u: self.factor * inner.vjp(u / self.factor),
            lambda u: (*inner.vjp_tensors(u / self.factor), None),
            guess=None if inner.guess is None else guess,
        )


@torch.no_grad()
def field_unit(system: SpinSystem) -> Tensor:
    """A unit of each site's field, (*batch, N, 1), for residuals in which the strongest field does not decide alone.

    The largest of its own field, that of the others and 1/(beta R), as a power of two.
    """
    size = system.live_numbers.abs()
    size = torch.linalg.matrix_norm(size) if system.block else size
    sums = size.sum(-1, keepdim=True) if system.graph is None else system.graph.sums_of(size)[..., None]
    own = torch.linalg.vector_norm(system.live_field, dim=-1, keepdim=True)
    return power_of_two(torch.maximum(own, system.radius * sums).maximum(1 / (system.beta_tensor(2) * system.radius)))


def power_of_two(size: Tensor) -> Tensor:
    """The next power of two, by which nothing is rounded."""
    return torch.exp2(size.log2().ceil())


# Near enough to a minimum for an accelerated solver to stay at it.
_SETTLING = Picard(rtol=1e-3, atol=1e-6, max_steps=200)


def physics_solver(dtype: torch.dtype, rtol: float | None = None) -> Anderson:
    """The solver of mean-field equations where the user passes none: it makes ten digits."""
    tolerance = (1e-6 if dtype == torch.float32 else 1e-11) if rtol is None else rtol
    return Anderson(rtol=tolerance, atol=tolerance, max_steps=1000)


def gradient(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """The derivative of a number per sample."""
    derivative: Tensor = grad(lambda z: function(z).sum())(z)
    return derivative


def require_ising(method: Approximation, system: SpinSystem) -> None:
    """Raise unless spins are numbers."""
    required = f"have spins of dimension 1 for {type(method).__name__}"
    remedy = "use MeanField or SaddlePoint for vectors"
    _validate.require(system.dim == 1, "system", required, f"D = {system.dim}", remedy)


def require_numbers(method: str, system: SpinSystem, remedy: str) -> None:
    """Raise unless the coupling of every pair is a number."""
    shapes = "(N, N) or (*batch, N, N)" if system.graph is None else "(E,) or (*batch, E)"
    required = f"have a number for each pair, {shapes}, for {method}"
    received = f"shape {tuple(system.couplings.shape)}"
    _validate.require(not system.block, "couplings", required, received, remedy)
