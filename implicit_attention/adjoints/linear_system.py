"""The linear system behind a gradient, (I - J^T) u = g, solved problem by problem with evidence."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._autograd import host_may_look, is_batched, transforms_active
from .._declared import first_of, pick, put
from .._norm import length, norm
from .._reporting import left_out, lost, report_gradients
from .._types import LinearMap
from ..failure_policy import policy_of
from ..linear import CG, GMRES, MINRES, LinearSolution, LinearSolver
from ..linear._vectors import ORDINARY, along, normalised
from ..linear.base import adjoint_rtol, forgiven, has_no_digits
from ..problem import Linearization, Problem, widened
from ..solution import UNSURE, AdjointReport, Record
from ..solvers import Solver
from ..status import Status
from .base import Request

# Problems solved together: the attention weights of a tile stay in the processor's cache. At least so many rows of each
# batch entry, so that the matrix products are worth their call.
TILE = 1024
TILE_ROWS = 64
# The part of a state that counts as zero where there is an absolute tolerance only: the default rtol.
SCALE = 1e-4

Gradients = tuple[Tensor | None, ...]
Known = tuple[Gradients, LinearSolution]


def solve_system(request: Request, problem: Problem, z: Tensor, rhs: Tensor, *, transpose: bool) -> LinearSolution:
    """x with (I - J) x = rhs, or (I - J^T) x = rhs; the evidence goes to the request's report."""

    def mapped() -> Tensor:
        return problem.fixed_point_map(z)

    request.route.product = "torch"
    with torch.no_grad():
        method = request.linear_solver or _default_method(problem, request.solver, z.dtype)
        answer = _solve(method, problem, problem.linearize(z), z, rhs, transpose)
        report_adjoint(request.report, request.solver, method, answer, problem.symmetric, z, rhs, mapped)
        if policy_of(request.report.on_failure).backward == "zero":
            failed = (answer.status > Status.UNSTABLE) & ~lost(answer.status, rhs)
            answer = replace(answer, value=torch.where(along(failed, answer.value), 0.0, answer.value))
    return answer


def adjoint_gradients(request: Request, problem: Problem, z: Tensor, cotangent: Tensor) -> Gradients | None:
    """(df/dt)^T u for every tensor t of the problem, with (I - J^T) u = cotangent; without a graph.

    None where a kernel alone could have them, as it can products in half precision, and has not all.

    The tensors are leaves that nobody else keeps: those that need a gradient require grad.
    A fused operation does it where the problem has one. Otherwise one linearisation serves the solve and the gradient;
    where the problem can be restricted, it is worked off in tiles of rows, so that no (N, M) matrix is kept.
    """
    half = torch.float16 if request.route.floor is not None else z.dtype
    method = request.linear_solver or _default_method(problem, request.solver, half)
    found = _gradients(request, method, problem, z, cotangent)
    if found is None:
        return None
    gradients, answer, tape = found

    def mapped() -> Tensor:
        return widened(problem)[0].fixed_point_map(z) if tape is None else tape.mapped

    report_adjoint(request.report, request.solver, method, answer, problem.symmetric, z, cotangent, mapped)
    rest = left_out(request.report.on_failure, answer.status, cotangent)
    if rest is not None:
        for tensor in problem.tensors():
            tensor.grad = None
        gradients, _, _ = _gradients(request, method, problem, z, rest) or found
    return gradients


def _gradients(
    request: Request, method: LinearSolver[Any], problem: Problem, z: Tensor, cotangent: Tensor
) -> tuple[Gradients, LinearSolution, Tape | None] | None:
    """The gradients, the solution of the linear system behind them, and the tape if one was recorded."""
    default = request.linear_solver is None and isinstance(method, CG)
    known: Known | None = None
    if default:
        known = request.route.gradients(problem, z, cotangent, method, request.evaluation)
        if known is not None and not bool((known[1].status == Status.STALLED).any()):
            return *known, None
        if request.route.floor is not None:
            return None
    if known is None:
        request.route.product = "torch"
    return gradients_by_rows(method, problem, z, cotangent, known=known)


def gradients_by_rows(
    method: LinearSolver[Any], problem: Problem, z: Tensor, cotangent: Tensor, known: Known | None = None
) -> tuple[Gradients, LinearSolution, Tape | None]:
    """The gradients and the answer, from the rows of one tile after another, one linearisation at a time.

    The tape is that of all rows, where they are one tile that was recorded.

    known: the gradients and the answer of a kernel, to which the problems that it gave up (STALLED) are added.
    """
    answers, stalled, chosen = [], None, None
    if known is not None:
        stalled = known[1].status == Status.STALLED
        chosen, cotangent = first_of(stalled), torch.where(along(stalled, cotangent), cotangent, 0.0)
    for index in _tiles(problem, z, chosen):
        with torch.enable_grad():
            part = problem if index is None else problem.select(index)
        assert part is not None
        with torch.no_grad():
            tape = Tape.of(part, rows_of(z, index))
            linear = part.linearize(rows_of(z, index)) if tape is None else tape.linearization()
            given = rows_of(z, index), rows_of(cotangent, index)
            answer = _solve(method, part, linear, *given, transpose=True, tape=tape)
            gradients = tape.gradients if tape and answer.checked else linear.vjp_tensors(answer.value)
        if index is None:
            return gradients, answer, tape
        answers.append(answer)
        # Restricting to rows is differentiable: this adds the gradients of the tile up in the whole tensors.
        pairs = [(t, g) for t, g in zip(part.tensors(), gradients, strict=True) if t.requires_grad and g is not None]
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
    last = z.ndim - problem.event_ndim - 1
    fields = zip(*((*answer.record, answer.value, answer.negative_curvature) for answer in answers), strict=True)
    rows = [torch.cat(parts, dim=last) for parts in fields]
    gradients = tuple(t.grad for t in problem.tensors())
    if known is not None and stalled is not None:
        before, found = known
        whole = *found.record, found.value, found.negative_curvature
        rows = [merged(chosen, stalled, old, new.to(old.dtype)) for old, new in zip(whole, rows, strict=True)]
        both = zip(before, gradients, strict=True)
        gradients = tuple(new if old is None else old if new is None else old + new for old, new in both)
    *record, value, negative_curvature = rows
    return gradients, LinearSolution(Record(*record), value, negative_curvature), None


def jacobian_product(problem: Problem, z: Tensor, v: Tensor) -> Tensor:
    """J v, tile by tile."""
    parts = []
    for index in _tiles(problem, z):
        part = problem if index is None else problem.select(index)
        assert part is not None
        parts.append(part.linearize(rows_of(z, index)).jvp(rows_of(v, index)))
    return torch.cat(parts, z.ndim - problem.event_ndim - 1)


def _tiles(problem: Problem, z: Tensor, chosen: Tensor | None = None) -> Iterator[Tensor | None]:
    """Consecutive rows of the problem, by their indices; None for all where it is small or cannot be restricted.

    chosen: the rows to take, (*lead[:-1], K), of a problem that can be restricted; None for all.
    """
    lead = z.shape[: z.ndim - problem.event_ndim]
    size = max(TILE // max(math.prod(lead[:-1]), 1), TILE_ROWS)
    if chosen is not None:
        yield from torch.split(chosen, size, -1)
        return
    count = lead[-1] if lead else 0
    starts = range(0, count, size)
    indices = [torch.arange(s, min(s + size, count), device=z.device).expand(*lead[:-1], -1) for s in starts]
    if len(indices) < 2 or not problem.separates or problem.select(indices[0]) is None:
        yield None
    else:
        yield from indices


def alone(problem: Problem, chosen: Tensor) -> tuple[Tensor | None, Problem]:
    """The problems that are `chosen` (*lead) alone, and their indices; all, and None, where they cannot be had alone.

    As few others as fit are among them.
    """
    index = first_of(chosen)
    part = None if index is None else problem.select(index)
    return (None, problem) if part is None else (index, part)


def merged(index: Tensor | None, chosen: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """`old` (*lead, ...), in which those problems of `index` that are `chosen` (*lead) come from `new`."""
    chosen = rows_of(chosen, index)
    rows = torch.where(along(chosen, old), new.reshape((*chosen.shape, *old.shape[chosen.ndim :])), rows_of(old, index))
    return rows if index is None else put(old, index, rows.to(old.dtype))


def rows_of(tensor: Tensor, index: Tensor | None) -> Tensor:
    """The rows `index` (*lead[:-1], K) of the last leading axis of a state."""
    return tensor if index is None else pick(tensor, index)


class _System(NamedTuple):
    """x - J x = rhs on vectors (*lead, n): the map of the left side, the right one, and what makes the answer of x."""

    matvec: LinearMap
    rhs: Tensor
    lift: LinearMap

    @classmethod
    def of(
        cls, method: LinearSolver[Any], problem: Problem, linear: Linearization, z: Tensor, rhs: Tensor, transpose: bool
    ) -> _System:
        """The system for a method; where J = H M with a metric M, and the method needs symmetry, a symmetric one.

        (I - M H) u = c is u = c + M^(1/2) y with (I - M^(1/2) H M^(1/2)) y = M^(1/2) H c, and (I - H M) x = c is
        x = c + H M^(1/2) y with the right-hand side M^(1/2) c.
        """
        if not (method.symmetric and problem.has_metric):
            return cls.flat(linear.vjp if transpose else linear.jvp, problem, rhs, lambda x: x)
        outer = linear.outer
        assert outer is not None

        def root(v: Tensor) -> Tensor:
            return problem.metric_root_product(z, v)

        def lift(y: Tensor) -> Tensor:
            return rhs + (root(y) if transpose else outer(root(y)))

        return cls.flat(lambda v: root(outer(root(v))), problem, root(outer(rhs) if transpose else rhs), lift)

    @classmethod
    def flat(cls, product: LinearMap, problem: Problem, rhs: Tensor, lift: LinearMap) -> _System:
        """The system for states (*lead, *event)."""
        shape = rhs.shape
        lead = shape[: len(shape) - problem.event_ndim]
        flat = rhs.reshape(*lead, shape[len(lead) :].numel())
        return cls(lambda v: v - product(v.reshape(shape)).reshape(v.shape), flat, lambda x: lift(x.reshape(shape)))


def _together(method: LinearSolver[Any], system: _System, apart: LinearSolution) -> LinearSolution:
    """The answer of all problems as one where that is nearer: they may read each other, as in batch normalisation.

    A Krylov method that takes them one by one need not converge then.
    """
    matvec, rhs, _ = system
    whole = method.solve(lambda v: matvec(v.reshape(rhs.shape)).reshape(v.shape), rhs.reshape(1, -1))
    value = whole.value.reshape(rhs.shape)
    residual = norm(rhs - matvec(value))
    if not bool(norm(residual.reshape(1, -1)) < norm(apart.residual.reshape(1, -1))):
        return apart
    status = torch.where(residual <= apart.tolerance, int(Status.CONVERGED), whole.status.reshape(()))
    steps = apart.num_steps + whole.num_steps.reshape(())
    status, steps = status.to(apart.status.dtype), steps.to(apart.num_steps.dtype)
    return replace(apart.amended(status=status, residual=residual, num_steps=steps), value=value, checked=False)


def _solve(
    method: LinearSolver[Any],
    problem: Problem,
    linear: Linearization,
    z: Tensor,
    rhs: Tensor,
    transpose: bool,
    tape: Tape | None = None,
) -> LinearSolution:
    """The answer, `checked` where the last product with the `tape` gave its gradients, too."""
    system = _System.of(method, problem, linear, z, rhs, transpose)
    check = None if tape is None else _System.flat(tape.vjp_both, problem, rhs, system.lift).matvec
    if not problem.separates and check is None:
        # Problems that read each other take steps that know nothing of the residual.
        check = system.matvec
    answer = method.solve(system.matvec, system.rhs, check=check)
    failed = answer.status > Status.UNSTABLE
    if not problem.separates and not is_batched(failed) and bool(failed.any()):
        answer = _together(method, system, answer)
    if isinstance(method, CG) and bool(answer.negative_curvature.any()):
        answer = _finish_with_minres(method, problem, z, rhs, transpose, answer)
    size, given = norm(answer.value), norm(system.rhs)
    # Of a singular system whose rounding happens to leave a curvature; a length that overflows tells nothing.
    empty = (answer.status <= Status.UNSTABLE) & has_no_digits(size, given) & (size < torch.inf)
    if not (host_may_look(empty) and not bool(empty.any())):
        status, residual = answer.status.masked_fill(empty, int(Status.STALLED)), answer.residual.where(~empty, given)
        value = torch.where(empty[..., None], 0.0, answer.value)
        answer = replace(answer.amended(status=status, residual=residual), value=value, checked=False)
    stalled = (answer.status == Status.STALLED) & ~empty
    if not (host_may_look(stalled) and not bool(stalled.any())):
        status, tolerance = forgiven(*answer.record[:3], answer.negative_curvature, size, given)
        answer = answer.amended(status=status, tolerance=tolerance)
    return replace(answer, value=system.lift(answer.value))


def _finish_with_minres(
    method: CG, problem: Problem, z: Tensor, rhs: Tensor, transpose: bool, first: LinearSolution
) -> LinearSolution:
    """Solve again, with MINRES, the few problems in which CG met negative curvature; the others keep their answer."""
    saddle = first.negative_curvature
    again = MINRES(rtol=method.rtol, atol=method.atol, max_steps=method.max_steps, check_every=method.check_every)
    index, part = alone(problem, saddle)
    rows = rows_of(z, index)
    system = _System.of(again, part, part.linearize(rows), rows, rows_of(rhs, index), transpose)
    second = again.solve(system.matvec, torch.where(rows_of(saddle, index)[..., None], system.rhs, 0.0))
    status = torch.where(second.converged, int(Status.UNSTABLE), second.status.to(torch.int64)).to(torch.int8)
    steps = rows_of(first.num_steps, index) + second.num_steps
    new = {"status": status, "residual": second.residual, "num_steps": steps}
    fields = {name: merged(index, saddle, getattr(first, name), field) for name, field in new.items()}
    return replace(first.amended(**fields), value=merged(index, saddle, first.value, second.value), checked=False)


def _default_method(problem: Problem, solver: Solver, dtype: torch.dtype) -> LinearSolver[Any]:
    if problem.symmetric or problem.has_metric:
        return conjugate_gradients(solver.rtol, dtype)
    return GMRES(rtol=adjoint_rtol(solver.rtol, dtype))


@functools.lru_cache(maxsize=256)
def conjugate_gradients(rtol: float, dtype: torch.dtype) -> CG:
    """The default method for symmetric problems whose states are solved to `rtol`."""
    return CG(rtol=adjoint_rtol(rtol, dtype))


def _gradient_error(
    report: AdjointReport,
    solver: Solver,
    answer: LinearSolution,
    symmetric: bool,
    z: Tensor,
    rhs: Tensor,
    mapped: Callable[[], Tensor],
) -> tuple[Tensor | None, bool]:
    """`AdjointReport.gradient_error`, (*lead), and whether there may be something to report: one look of the host.

    `mapped` gives f(z).
    """
    residual = report.state_residual
    if residual is None or transforms_active() or residual.shape != answer.status.shape:
        return None, True
    lead, states = residual.ndim, z
    u, g = answer.value, rhs
    if z.ndim != lead + 1:
        u, g, z = (t.reshape(*residual.shape, z.shape[lead:].numel()) for t in (u, g, z))
    inverse = _inverse(u, g, answer.negative_curvature if symmetric else None)
    root = math.sqrt(max(z.shape[-1], 1))
    size = norm(z).clamp(min=least_size(solver, z.shape[-1]))
    error = torch.nan_to_num(inverse.square() * residual * root / size, nan=0.0)
    worst = float(error.max()) > UNSURE or int(answer.status.max()) > Status.UNSTABLE if error.numel() else False
    if not worst:
        return error, False
    # Only the part of the residual along u moves the state far. It costs an evaluation, which is rarely needed.
    r, u = (normalised(t)[0] for t in ((mapped() - states).reshape(u.shape), u))
    along = (r * u).sum(-1).abs() / (length(r) * length(u))
    return torch.where(error > UNSURE, error * along.nan_to_num(1.0), error), True


def least_size(solver: Solver, dim: int) -> float:
    """The size below which a state of `dim` entries is no scale: atol takes it for zero, where rtol takes over."""
    return math.sqrt(max(dim, 1)) * solver.atol / (solver.rtol or SCALE)


def _inverse(u: Tensor, g: Tensor, indefinite: Tensor | None) -> Tensor:
    """|u|/|g|, for the size of A^-1 where A u = g; of a symmetric A that is not `indefinite` Rayleigh's quotient at u.

    The quotient <u, u>/<u, A u> is nearer to the smallest eigenvalue, unless there are two signs.
    """
    size_of_u = length(u)
    # The most frequent case, with few operations.
    if indefinite is not None and u.numel() and not bool(indefinite.any()):
        product = (u * g).sum(-1)
        low, high = torch.aminmax(product)
        if 1 / ORDINARY < float(low) <= float(high) < ORDINARY:
            return size_of_u.square() / product
    size = length(g)
    low, high = torch.aminmax(size) if size.numel() else (size.sum(), size.sum())
    if not 1 / ORDINARY < float(low) <= float(high) < ORDINARY:
        g, scale = normalised(g)
        u, size = u / scale[..., None], length(g)
        size_of_u = length(u)
    inverse = size_of_u / size
    return inverse if indefinite is None else torch.where(indefinite, inverse, size_of_u.square() / (u * g).sum(-1))


def report_adjoint(
    report: AdjointReport,
    solver: Solver,
    method: LinearSolver[Any],
    answer: LinearSolution,
    symmetric: bool,
    z: Tensor,
    rhs: Tensor,
    mapped: Callable[[], Tensor],
) -> None:
    """Keep the evidence in the report, and warn of gradients that are wrong or unsure."""
    fields = answer.record._asdict() | {"negative_curvature": answer.negative_curvature}
    error, doubtful = _gradient_error(report, solver, answer, symmetric, z, rhs, mapped)
    if error is not None:
        fields["gradient_error"] = error
    tally = None if report.site is None else report.site.tally
    if doubtful or tally is not None:
        fields["lost"] = lost(answer.status, rhs)
    if report.lead is not None and report.lead.numel() == answer.status.numel():
        fields = {name: field.reshape(report.lead) for name, field in fields.items()}
    elif report.lead is not None and answer.status.shape[-len(report.lead) or answer.status.ndim :] == report.lead:
        fields = _worst(fields, answer.status.ndim - len(report.lead))
    without = fields.pop("lost", None)
    record = Record(*(fields[name] for name in Record._fields))
    del fields["num_evals"]
    if tally is not None:
        tally.add_backward(*record[:4], without)
    status, error, before = fields["status"], fields.get("gradient_error"), report.gradient_error
    if report.status is not None and report.status.shape == status.shape:
        # Of several solves (second derivatives make more) the worst is kept, problem by problem.
        worse = status >= report.status
        fields.pop("gradient_error", None)
        fields = {name: torch.where(worse, new, getattr(report, name)) for name, new in fields.items()}
        if error is not None:
            fields["gradient_error"] = error if before is None else torch.maximum(error, before)
    for name, field in fields.items():
        setattr(report, name, field)
    if doubtful or policy_of(report.on_failure).counts:
        if without is not None:
            record = record._replace(status=record.status.masked_fill(without, int(Status.CONVERGED)))
        what = f"the adjoint solve by {type(method).__name__}, whose gradient is therefore wrong,"
        report_gradients(report.on_failure, what, error, record, method.remedies, site=report.site)


def _worst(fields: dict[str, Tensor], extra: int) -> dict[str, Tensor]:
    """Return the evidence of the worst of several systems per problem, numbered by `extra` leading axes."""
    fields = {name: field.flatten(0, extra - 1) for name, field in fields.items()}
    worst = fields["status"].argmax(0, keepdim=True)
    return {name: field.gather(0, worst).squeeze(0) for name, field in fields.items()}


class Tape:
    """The Jacobian of f at z, transposed, by one evaluation of f that autograd records.

    torch.func, which the general `Problem.linearize` uses so that it can be differentiated and batched itself, costs
    more per product and records anew for the gradients of the tensors.
    """

    def __init__(self, problem: Problem, z: Tensor) -> None:
        # Statistics that modules keep while they train count the evaluations of the solve alone; and compiled modules
        # may free tensors that a second product would read.
        problem = problem.apart()
        self.problem, self.z, self.tensors = problem, z, problem.tensors()
        self.wanted = [i for i, t in enumerate(self.tensors) if t.requires_grad]
        self.gradients: Gradients = ()
        with torch.enable_grad():
            self.state = z.detach().requires_grad_()
            self.recorded = problem.fixed_point_map(self.state)
        self.mapped = self.recorded.detach()

    @classmethod
    def of(cls, problem: Problem, z: Tensor) -> Tape | None:
        """A tape, or None for a problem that has products of its own."""
        return cls(problem, z) if type(problem).linearize is Problem.linearize else None

    def linearization(self) -> Linearization:
        return Linearization(lambda v: self.problem.linearize(self.z).jvp(v), self.vjp, self.vjp_tensors)

    def vjp(self, u: Tensor) -> Tensor:
        """J^T u."""
        return self._by_state(u, *self._products(u, self.state))

    def vjp_both(self, u: Tensor) -> Tensor:
        """J^T u; in the same pass `gradients` becomes the result of `vjp_tensors(u)`."""
        product, *gradients = self._products(u, self.state, *(self.tensors[i] for i in self.wanted))
        self.gradients = self._by_tensors(u, tuple(gradients))
        return self._by_state(u, product)

    def vjp_tensors(self, u: Tensor) -> Gradients:
        """(df/dt)^T u for every tensor t of the problem that requires grad."""
        return self._by_tensors(u, self._products(u, *(self.tensors[i] for i in self.wanted)))

    def _products(self, u: Tensor, *inputs: Tensor) -> Gradients:
        if not (self.recorded.requires_grad and inputs):
            return (None,) * len(inputs)
        # The graph serves all products; where the tensors are rows of others, it reaches those, too.
        return torch.autograd.grad(self.recorded, inputs, u, retain_graph=True, allow_unused=True)

    def _by_state(self, u: Tensor, product: Tensor | None) -> Tensor:
        # Without a graph to the state f does not depend on it, or does so unseen, for which `linearize` raises.
        return self.problem.linearize(self.z).vjp(u) if product is None else product

    def _by_tensors(self, u: Tensor, products: Gradients) -> Gradients:
        if all(product is None for product in products):
            return self.problem.linearize(self.z).vjp_tensors(u)
        pairs = zip(self.wanted, products, strict=True)
        gradients = {i: torch.zeros_like(self.tensors[i]) if product is None else product for i, product in pairs}
        return tuple(map(gradients.get, range(len(self.tensors))))
