"""The linear system behind a gradient, (I - J^T) u = g, solved problem by problem with evidence."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._torch import LinearMap, along, norm, transforms_active
from ..failure import forgiven, left_out, lost, policy_of, report_gradients
from ..linear import CG, GMRES, MINRES, LinearSolution, LinearSolver
from ..linear.base import adjoint_rtol, has_no_digits
from ..linear.base import forgiven as within_rounding
from ..problem import Linearization, Problem, first_of, pick, put, widened
from ..solution import UNSURE, Record, Status
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
    request.route.product = "torch"
    with torch.no_grad():
        method = _method(request, problem, z.dtype)
        answer = _solve(request.route.linear_solver(method, z), problem, problem.linearize(z), z, rhs, transpose)
        report_adjoint(request, method, problem, answer, z, rhs)
        if policy_of(request.report.on_failure).backward == "zero":
            failed = forgiven(answer.status, rhs) > Status.UNSTABLE
            answer = replace(answer, value=answer.value.masked_fill(along(failed, answer.value), 0.0))
    return answer


def adjoint_gradients(request: Request, problem: Problem, z: Tensor, cotangent: Tensor) -> Gradients | None:
    """(df/dt)^T u for every tensor t of the problem, with (I - J^T) u = cotangent; without a graph.

    None where a kernel alone could have them, as it can products in half precision, and has not all.

    The tensors are leaves that nobody else keeps: those that need a gradient require grad.
    A fused operation does it where the problem has one. Otherwise one linearisation serves the solve and the gradient;
    where the problem can be restricted, it is worked off in tiles of rows, so that no (N, M) matrix is kept.
    """
    method = _method(request, problem, torch.float16 if request.route.floor is not None else z.dtype)
    found = _gradients(request, method, problem, z, cotangent)
    if found is None:
        return None
    gradients, answer = found
    report_adjoint(request, method, problem, answer, z, cotangent)
    rest = left_out(request.report.on_failure, answer.status, cotangent)
    if rest is not None:
        for tensor in problem.tensors():
            tensor.grad = None
        gradients, _ = _gradients(request, method, problem, z, rest) or found
    return gradients


def _gradients(
    request: Request, method: LinearSolver[Any], problem: Problem, z: Tensor, cotangent: Tensor
) -> Known | None:
    """The gradients, and the solution of the linear system behind them."""
    known: Known | None = None
    if request.linear_solver is None and isinstance(method, CG):
        known = request.route.gradients(problem, z, cotangent, method, request.evaluation)
        if known is not None and not bool((known[1].status == Status.STALLED).any()):
            return known
        if request.route.floor is not None:
            return None
    if known is None:
        request.route.product = "torch"
    return gradients_by_rows(request.route.linear_solver(method, z), problem, z, cotangent, known=known)


def gradients_by_rows(
    method: LinearSolver[Any], problem: Problem, z: Tensor, cotangent: Tensor, known: Known | None = None
) -> Known:
    """The gradients and the answer, from the rows of one tile after another, one linearisation at a time.

    known: the gradients and the answer of a kernel; those of problems that the kernel gave up (STALLED) are added.
    """
    answers, stalled, chosen = [], None, None
    if known is not None:
        stalled = known[1].status == Status.STALLED
        chosen, cotangent = first_of(stalled), torch.where(along(stalled, cotangent), cotangent, 0.0)
    for index, part in _tiles(problem, z, chosen):
        with torch.no_grad():
            given, recorded = rows_of(z, index), type(part).linearize is Problem.linearize
            linear = Tape(part, given) if recorded else part.linearize(given)
            answer = _solve(method, part, linear, given, rows_of(cotangent, index), transpose=True)
            if isinstance(linear, Tape) and not answer.checked:
                linear.products = None
            gradients = linear.vjp_tensors(answer.value)
        if index is None:
            return gradients, answer
        answers.append(answer)
        # Restricting to rows is differentiable: this adds the gradients of the tile up in the whole tensors.
        pairs = [(t, g) for t, g in zip(part.tensors(), gradients, strict=True) if t.requires_grad and g is not None]
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
    last = z.ndim - problem.event_ndim - 1
    answer = _by_field(lambda *parts: torch.cat(parts, last), *answers)
    gradients = tuple(t.grad for t in problem.tensors())
    if known is None or stalled is None:
        return gradients, answer
    both = zip(known[0], gradients, strict=True)
    gradients = tuple(new if old is None else old if new is None else old + new for old, new in both)
    return gradients, _by_field(functools.partial(merged, chosen, stalled), known[1], answer)


def jacobian_product(problem: Problem, z: Tensor, v: Tensor) -> Tensor:
    """J v, tile by tile."""
    tiles = _tiles(problem, z)
    parts = [part.linearize(rows_of(z, index)).jvp(rows_of(v, index)) for index, part in tiles]
    return torch.cat(parts, z.ndim - problem.event_ndim - 1)


def _tiles(problem: Problem, z: Tensor, chosen: Tensor | None = None) -> Iterator[tuple[Tensor | None, Problem]]:
    """Consecutive rows of the problem, with their indices; all, and None, where it is small or cannot be restricted.

    chosen: the rows to take, (*lead[:-1], K), of a problem that can be restricted; None for all.
    """
    lead = z.shape[: z.ndim - problem.event_ndim]
    size = max(TILE // max(math.prod(lead[:-1]), 1), TILE_ROWS)
    if chosen is None and lead and lead[-1] > size and problem.separates:
        rows = torch.arange(lead[-1], device=z.device).expand(*lead[:-1], -1)
        chosen = None if problem.select(rows[..., :1]) is None else rows
    for index in [None] if chosen is None else torch.split(chosen, size, -1):
        with torch.enable_grad():
            part = problem if index is None else problem.select(index)
        assert part is not None
        yield index, part


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


def _by_field(function: Callable[..., Tensor], *answers: LinearSolution) -> LinearSolution:
    """One solution of several, field by field."""
    parts = ((*answer.record, answer.value, answer.negative_curvature) for answer in answers)
    *record, value, curved = map(function, *parts)
    return LinearSolution(Record(*record), value, curved)


def rows_of(tensor: Tensor, index: Tensor | None) -> Tensor:
    """The rows `index` (*lead[:-1], K) of the last leading axis of a state."""
    return tensor if index is None else pick(tensor, index)


def _solve(
    method: LinearSolver[Any],
    problem: Problem,
    linear: Linearization | Tape,
    z: Tensor,
    rhs: Tensor,
    transpose: bool,
    *,
    apart: bool = False,
) -> LinearSolution:
    """The answer, `checked` where the last product with a tape gave its gradients, too.

    apart: whether problems that may read each other are solved one by one whatever comes out.

    Where J = H M with a metric M, and the method needs symmetry, it solves a symmetric system: (I - M H) u = c is
    u = c + M^(1/2) y with (I - M^(1/2) H M^(1/2)) y = M^(1/2) H c, and (I - H M) x = c is x = c + H M^(1/2) y with the
    right-hand side M^(1/2) c.
    """
    symmetrised, root = method.symmetric and problem.has_metric, functools.partial(problem.metric_root_product, z)
    shape = rhs.shape
    flat = (*shape[: rhs.ndim - problem.event_ndim], shape[rhs.ndim - problem.event_ndim :].numel())

    def system(product: LinearMap) -> LinearMap:
        """x - product(x) on vectors (*lead, n)."""
        return lambda v: v - product(v.reshape(shape)).reshape(v.shape)

    def outer(v: Tensor) -> Tensor:
        return problem.outer_product(z, v) if linear.outer is None else linear.outer(v)

    if symmetrised:
        matvec, b = system(lambda v: root(outer(root(v)))), root(outer(rhs) if transpose else rhs).reshape(flat)
    else:
        matvec, b = system(linear.vjp if transpose else linear.jvp), rhs.reshape(flat)
    check, mixed = None, not (apart or problem.separates)
    if isinstance(linear, Tape) and not symmetrised:
        check = system(lambda u: linear.vjp(u, *linear.wanted))
    elif mixed:
        # Problems that read each other take steps that know nothing of the residual.
        check = matvec
    if linear.guess is None:
        answer = method.solve(matvec, b, check=check)
    else:
        guess, spent = linear.guess(rhs, method.rtol, transpose)
        answer = method.solve(matvec, b, initial=guess.reshape(flat), check=check)
        answer = answer.amended(num_steps=answer.num_steps + spent)
    given, saddle = norm(b), answer.negative_curvature
    # One look at all that is rare.
    rare = answer.status > Status.UNSTABLE, _without_digits(answer, norm(answer.value), given), saddle
    fails, empties, curves = torch.stack([which.any() for which in rare]).tolist()
    if mixed and fails:
        answer = _together(method, matvec, b, answer)
    if fails or empties:
        answer = _with_rounding(answer, norm(answer.value), given)
    value = answer.value.reshape(shape)
    if symmetrised:
        value = rhs + (root(value) if transpose else outer(root(value)))
    answer = replace(answer, value=value)
    if not (isinstance(method, CG) and curves):
        return answer
    # MINRES solves the few problems again in which CG met negative curvature.
    again = MINRES(rtol=method.rtol, atol=method.atol, max_steps=method.max_steps, check_every=method.check_every)
    index, part = alone(problem, saddle)
    rows, left = rows_of(z, index), rows_of(rhs.masked_fill(along(~saddle, rhs), 0.0), index)
    # Not together, as the other problems, which they may read, are no part of that system.
    second = _solve(again, part, part.linearize(rows), rows, left, transpose, apart=True)
    status = second.status.masked_fill(second.converged, int(Status.UNSTABLE))
    steps = rows_of(answer.num_steps, index) + second.num_steps
    second = replace(second.amended(status=status, num_steps=steps), negative_curvature=rows_of(saddle, index))
    return _by_field(functools.partial(merged, index, saddle), answer, second)


def _together(method: LinearSolver[Any], matvec: LinearMap, rhs: Tensor, apart: LinearSolution) -> LinearSolution:
    """The answer of all problems as one where that is nearer: they may read each other, as in batch normalisation.

    A Krylov method that takes them one by one need not converge then.
    """
    whole = method.solve(lambda v: matvec(v.reshape(rhs.shape)).reshape(v.shape), rhs.reshape(1, -1))
    value = whole.value.reshape(rhs.shape)
    residual = norm(rhs - matvec(value))
    if not bool(norm(residual.flatten()) < norm(apart.residual.flatten())):
        return apart
    status = whole.status.reshape(()).masked_fill(residual <= apart.tolerance, int(Status.CONVERGED))
    steps = apart.num_steps + whole.num_steps.reshape(())
    return replace(apart.amended(status=status, residual=residual, num_steps=steps), value=value, checked=False)


def _without_digits(answer: LinearSolution, size: Tensor, given: Tensor) -> Tensor:
    """Which problems (*lead) are solved, but singular, and rounding happens to leave them a curvature.

    A length that overflows tells nothing.
    """
    return (answer.status <= Status.UNSTABLE) & has_no_digits(size, given) & (size < torch.inf)


def _with_rounding(answer: LinearSolution, size: Tensor, given: Tensor) -> LinearSolution:
    """The answer, of lengths `size` for right-hand sides of lengths `given`, judged by what rounding explains."""
    empty = _without_digits(answer, size, given)
    status, tolerance = within_rounding(*answer.record[:3], answer.negative_curvature, size, given)
    status, residual = status.masked_fill(empty, int(Status.STALLED)), answer.residual.where(~empty, given)
    value = answer.value.masked_fill(empty[..., None], 0.0)
    return replace(answer.amended(status=status, residual=residual, tolerance=tolerance), value=value, checked=False)


def _method(request: Request, problem: Problem, dtype: torch.dtype) -> LinearSolver[Any]:
    """The method of the request, or the default for products in this precision."""
    return request.linear_solver or _default(problem.symmetric or problem.has_metric, request.solver.rtol, dtype)


@functools.lru_cache(maxsize=256)
def _default(symmetric: bool, rtol: float, dtype: torch.dtype) -> LinearSolver[Any]:
    return (CG if symmetric else GMRES)(rtol=adjoint_rtol(rtol, dtype))


def _gradient_error(
    request: Request, problem: Problem, answer: LinearSolution, z: Tensor, rhs: Tensor
) -> tuple[Tensor | None, bool]:
    """`AdjointReport.gradient_error`, (*lead), and whether there may be something to report: one look of the host."""
    residual, solver = request.report.state_residual, request.solver
    if residual is None or transforms_active() or residual.shape != answer.status.shape:
        return None, True
    flat = (*residual.shape, z.shape[residual.ndim :].numel())
    u, g, state = answer.value.reshape(flat), rhs.reshape(flat), z.reshape(flat)
    size, given, root = norm(u), norm(g), math.sqrt(max(state.shape[-1], 1))
    # |u|/|g|, for the size of A^-1 where A u = g; of a symmetric A Rayleigh's quotient <u, u>/<u, A u>, which is nearer
    # to the smallest eigenvalue, unless there are two signs.
    inverse = size / given
    if problem.symmetric:
        cosine = (u / size[..., None] * (g / given[..., None])).sum(-1)
        inverse = torch.where(answer.negative_curvature, inverse, inverse / cosine)
    # A state below this size is no scale: atol takes it for zero, where rtol takes over.
    scale = norm(state).clamp(min=root * solver.atol / (solver.rtol or SCALE))
    error = torch.nan_to_num(inverse.square() * residual * root / scale, nan=0.0)
    if not bool(((error > UNSURE) | (answer.status > Status.UNSTABLE)).any()):
        return error, False
    # Only the part of the residual along u moves the state far. It costs an evaluation, which is rarely needed.
    moved = (widened(problem)[0].apart().fixed_point_map(z) - z).reshape(u.shape)
    r, u = (v / norm(v)[..., None] for v in (moved, u))
    part = (r * u).sum(-1).abs()
    return torch.where(error > UNSURE, error * part.nan_to_num(1.0), error), True


def report_adjoint(
    request: Request, method: LinearSolver[Any], problem: Problem, answer: LinearSolution, z: Tensor, rhs: Tensor
) -> None:
    """Keep the evidence in the report, and warn of gradients that are wrong or unsure."""
    report, lead = request.report, request.report.lead
    fields = answer.record._asdict() | {"negative_curvature": answer.negative_curvature}
    error, doubtful = _gradient_error(request, problem, answer, z, rhs)
    if error is not None:
        fields["gradient_error"] = error
    tally = None if report.site is None else report.site.tally
    if doubtful or tally is not None:
        fields["lost"] = lost(answer.status, rhs)
    if lead is not None and lead.numel() == answer.status.numel():
        fields = {name: field.reshape(lead) for name, field in fields.items()}
    elif lead is not None and answer.status.shape[answer.status.ndim - len(lead) :] == lead:
        # Systems that further leading axes number, as in jacrev.
        fields = _worst({name: field.reshape(-1, *lead) for name, field in fields.items()})
    without, error = fields.pop("lost", None), fields.get("gradient_error")
    record = Record(*(fields[name] for name in Record._fields))
    del fields["num_evals"]
    if tally is not None:
        tally.add_backward(*record[:4], without)
    if report.status is not None and report.status.shape == record.status.shape:
        # Second derivatives make several solves.
        both = {name: [field, getattr(report, name)] for name, field in fields.items()}
        fields = _worst({name: torch.stack([t for t in pair if t is not None]) for name, pair in both.items()})
    for name, field in fields.items():
        setattr(report, name, field)
    if doubtful or policy_of(report.on_failure).counts:
        if without is not None:
            record = record._replace(status=record.status.masked_fill(without, int(Status.CONVERGED)))
        what = f"the adjoint solve by {type(method).__name__}, whose gradient is therefore wrong,"
        report_gradients(report.on_failure, what, error, record, method.remedies, site=report.site)


def _worst(fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """The evidence of the worst of several solves (K, *lead), problem by problem, and the largest gradient error."""
    worst, errors = fields["status"].argmax(0, keepdim=True), fields.pop("gradient_error", None)
    found = {name: field.gather(0, worst)[0] for name, field in fields.items()}
    return found if errors is None else {**found, "gradient_error": errors.amax(0)}


class Tape:
    """The Jacobian of f at z, transposed, by one evaluation of f that autograd records.

    torch.func, which the general `Problem.linearize` uses so that it can be differentiated and batched itself, costs
    more per product and records anew for the gradients of the tensors.
    """

    # A tape has products with the transpose alone.
    jvp: Any = None
    outer: LinearMap | None = None
    guess: Any = None

    def __init__(self, problem: Problem, z: Tensor) -> None:
        # Statistics that modules keep while they train count the evaluations of the solve alone; and compiled modules
        # may free tensors that a second product would read.
        self.problem, self.z = problem.apart(), z
        self.tensors = self.problem.tensors()
        self.wanted = [t for t in self.tensors if t.requires_grad]
        self.products: Sequence[Tensor | None] | None = None
        with torch.enable_grad():
            self.state = z.detach().requires_grad_()
            self.recorded = self.problem.fixed_point_map(self.state)

    def vjp(self, u: Tensor, *wanted: Tensor) -> Tensor:
        """J^T u; in the same pass `products` become those with the tensors that are `wanted`."""
        product, *self.products = self._products(u, self.state, *wanted)
        # Without a graph to the state f does not depend on it, or does so unseen, for which `linearize` raises.
        return self.problem.linearize(self.z).vjp(u) if product is None else product

    def vjp_tensors(self, u: Tensor) -> Gradients:
        """(df/dt)^T u for every tensor t of the problem that requires grad, of which `products` may be known."""
        products = self._products(u, *self.wanted) if self.products is None else self.products
        if all(product is None for product in products):
            return self.problem.linearize(self.z).vjp_tensors(u)
        pairs = zip(self.wanted, products, strict=True)
        gradients = (torch.zeros_like(t) if product is None else product for t, product in pairs)
        return tuple(next(gradients) if t.requires_grad else None for t in self.tensors)

    def _products(self, u: Tensor, *inputs: Tensor) -> Gradients:
        if not (self.recorded.requires_grad and inputs):
            return (None,) * len(inputs)
        # The graph serves all products; where the tensors are rows of others, it reaches those, too.
        return torch.autograd.grad(self.recorded, inputs, u, retain_graph=True, allow_unused=True)
