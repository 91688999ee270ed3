"""The exact gradient of a fixed point, from the implicit function theorem, differentiable to any order.

z = f(z, t) gives dz = (I - J)^{-1} (df/dt) dt with J = df/dz. There are two autograd functions: `_FixedPoint` solves
the problem, `_AdjointSolve` the linear system. The backward of each calls `_AdjointSolve`, so that it can be
differentiated again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from .. import _validate
from .._autograd import (
    applied,
    exact_precision,
    grad,
    host_may_look,
    is_batched,
    is_differentiated,
    jvp_by_vjp,
    tangent_rule,
    transforms_active,
    unobserved,
    vjp,
)
from .._declared import first_of
from .._reporting import stays_out
from ..linear import LinearSolver
from ..linear._vectors import along
from ..problem import Linearization, Problem, isolated, pullback
from ..solution import Record, Remedies, Trace
from ..solvers._rows import agree
from ..solvers.loop import Outcome
from ..status import Status
from .base import Adjoint, Request
from .linear_system import adjoint_gradients, merged, rows_of, solve_system


@dataclasses.dataclass(frozen=True)
class Implicit(Adjoint):
    r"""The gradient of the solution itself: exact, whatever way led there.

    ```math
    \frac{dL}{dt} = \left( \frac{\partial f}{\partial t} \right)^\top u, \qquad
    (I - J)^\top u = \frac{\partial L}{\partial z}, \qquad J = \frac{\partial f}{\partial z}
    ```

    Args:
        linear_solver: method for the linear system: `CG()`, `MINRES()`, `GMRES()` or `Neumann()` with their tolerances,
            which are relative to the cotangent. None is CG for symmetric problems (energies) and GMRES for others, with
            the rtol of the solver (at most 1e-2, at least 1e-5 in float32 and 1e-10 in float64; three times it, at most
            3e-3, where a card's products are in half precision): the state's error is in the gradient whatever the
            linear system's is. CG and MINRES solve the symmetric system
            M^(1/2) (I - J^T) M^(-1/2) of an energy with a metric M.
            Where CG meets negative curvature the problem sits on a saddle: MINRES finishes, status UNSTABLE.
        fallback: the adjoint of problems that have not converged, `Phantom(5)` or `OneStep()`; each other one keeps the
            exact gradient. None gives all of them that of this formula. It is for training that drifts out of
            convergence, where a few steps from the state that was reached pull it back while the formula, which holds
            at solutions only, is off without bound. Messages name it ("gradient by Phantom(5)"). A state that is not
            finite has no gradient.

    Gradients: with respect to every tensor of the problem, to any order, under torch.func.grad, vjp, jvp and vmap too.
    The initial state gets the gradient zero: the solution does not depend on it.

    A problem that has not converged has no such gradient, unless it has a `fallback`; `solve` reports it by
    `on_failure`, and so does a backward solve that does not converge (also in `Solution.adjoint`).

    Not for a fixed budget of steps, which ends at no solution: use `Unrolled()` or `Phantom()`.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, Implicit, solve
        >>> shift = torch.tensor(0.5, requires_grad=True)
        >>> problem = FixedPointMap(lambda z, shift: z / 2 + shift, shift, event_ndim=1)
        >>> solve(problem, torch.zeros(1, 1), adjoint=Implicit()).value.sum().backward()
        >>> round(shift.grad.item(), 4)
        2.0
    """

    linear_solver: LinearSolver[Any] | None = None
    fallback: Adjoint | None = None

    def __post_init__(self) -> None:
        if self.fallback is not None:
            required, remedy = "be None or an adjoint made of steps from any state", "use Phantom(5) or OneStep()"
            _validate.check_instance("fallback", self.fallback, Adjoint, required, remedy)
            if type(self.fallback).through is Adjoint.through:
                raise TypeError(_validate.message("fallback", required, repr(self.fallback), remedy))
        if self.linear_solver is not None:
            required, remedy = "be None or a LinearSolver", "for example CG() or GMRES()"
            _validate.check_instance("linear_solver", self.linear_solver, LinearSolver, required, remedy)

    @property
    def needs_solution(self) -> bool:
        return self.fallback is None

    def check(self, request: Request) -> None:
        solver, problem, method = request.solver, request.problem, self.linear_solver
        fits = method is None or not method.symmetric or problem.symmetric or problem.has_metric
        required = "suit a map whose Jacobian is not symmetric"
        remedy = "use GMRES() or Neumann(), or declare FixedPointMap(..., symmetric=True)"
        _validate.require(fits, "linear_solver", required, type(method).__name__, remedy)
        if (solver.fixed_budget or solver.max_steps == 0) and is_differentiated(*problem.tensors()):
            required = "not be Implicit() for a fixed number of steps: where they end is no solution"
            received = f"{type(solver).__name__} with max_steps={solver.max_steps} and rtol={solver.rtol:g}"
            remedy = "use Unrolled() or Phantom(), or a positive rtol"
            raise ValueError(_validate.message("adjoint", required, received, remedy))

    def run(self, request: Request) -> Outcome:
        recorded = torch.is_grad_enabled() or transforms_active()
        outcome = fixed_point(request, request.problem.tensors() if recorded else (), self.linear_solver)
        if self.fallback is None or not (outcome.value.requires_grad or transforms_active()):
            return outcome
        return outcome._replace(value=_fallen_back(self.fallback, request.problem, outcome))

    def advice(self, remedies: Remedies) -> Remedies:
        if self.fallback is None:
            return remedies
        gradients = dict.fromkeys((Status.MAX_STEPS, Status.STALLED, Status.DIVERGED), f"gradient by {self.fallback}")
        gradients[Status.NONFINITE] = "no gradient"
        return {s: f"{remedy}; {gradients[s]}" if s in gradients else remedy for s, remedy in remedies.items()}


def _fallen_back(fallback: Adjoint, problem: Problem, outcome: Outcome) -> Tensor:
    """The value, with the gradient of the `fallback` where a problem has not converged."""
    failed, value = ~outcome.record.converged, outcome.value
    batched, index = is_batched(failed, value, *problem.tensors()), None
    if not batched:
        if not bool(failed.any()):
            return value
        # Those that have converged make no steps, where the problem can be restricted.
        index = first_of(failed)
        part = None if index is None else problem.select(index)
        if part is None or index is None or not (problem.separates or _separates(problem, part, index, failed, value)):
            index, part = None, problem
        problem = part
    steps = fallback.through(problem, rows_of(value.detach(), index))
    assert steps is not None
    return merged(index, failed if index is None else failed.gather(-1, index), value, steps)


@torch.no_grad()
def _separates(problem: Problem, part: Problem, index: Tensor, failed: Tensor, value: Tensor) -> bool:
    """Whether f of the problems `index` alone, the `part`, is that of all where they have `failed`."""
    rows = rows_of(value, index)
    try:
        alone = part.apart().fixed_point_map(rows)
    except Exception:
        # f may take no other number of problems than all.
        return False
    among = rows_of(problem.apart().fixed_point_map(value), index)
    shape = (*rows.shape[: rows.ndim - problem.event_ndim], -1)
    return agree(alone.reshape(shape), among.reshape(shape), rows_of(failed, index))


def fixed_point(
    request: Request, tensors: tuple[Tensor, ...], linear_solver: LinearSolver[Any] | None = None
) -> Outcome:
    """The outcome of the solver, its value differentiable with respect to `tensors`."""
    # The solution does not depend on the initial state, whose graph would only be kept alive.
    request = dataclasses.replace(request, initial=request.initial.detach(), linear_solver=linear_solver)
    if not transforms_active() and not is_differentiated(*tensors):
        with torch.no_grad(), exact_precision(request.initial):
            return request.solved(request.problem.undifferentiated(), request.initial)
    value, *fields = _apply(_FixedPoint, request, request.initial, *tensors)
    return Outcome(value, Record(*fields[:5]), Trace.of(*fields[5:]) if request.trace else None)


def gradients_at(
    request: Request, z: Tensor, tensors: Sequence[Tensor], cotangent: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """(df/dt)^T (I - J^T)^{-1} cotangent at the solution z for each of the problem's tensors that is `needed`.

    Differentiable where derivatives are recorded.
    """
    if torch._C._functorch.is_legacy_batchedtensor(cotangent):
        raise RuntimeError(
            "the adjoint solve cannot run with is_grads_batched=True or vectorize=True; use torch.func.jacrev"
        )
    problem = request.problem
    # A failed problem that the loss leaves out must not reach tensors that it shares with others: 0 * NaN is NaN.
    plain = not torch.is_grad_enabled() and not transforms_active()
    if not (host_may_look(z) and bool(torch.isfinite(z.sum()))):
        lost, unread = ~torch.isfinite(z), cotangent == 0
        if problem.event_ndim:
            lost = lost.flatten(z.ndim - problem.event_ndim).any(-1)
            unread = unread.flatten(z.ndim - problem.event_ndim).all(-1)
        left_out = lost & unread
        problem, z = isolated(problem.replace(*tensors), z, left_out)
        tensors = problem.tensors()
        known = tuple(t.masked_fill(along(left_out, t), 0.0) for t in request.evaluation)
        request = dataclasses.replace(request, evaluation=known)
    with exact_precision(z):
        if plain:
            problem = problem.replace(*(t.detach().requires_grad_(n) for t, n in zip(tensors, needed, strict=True)))
            return adjoint_gradients(request, problem, z.detach(), cotangent)
        problem = problem.replace(*tensors)
        u = _apply(_AdjointSolve, request, True, z, cotangent, *tensors)
        u = stays_out(request.report.on_failure, u, cotangent, problem.event_ndim)
        return pullback(problem, z, u, needed)


def _lifted(
    request: Request, tensors: tuple[Tensor, ...], in_dims: tuple[int | None, ...]
) -> tuple[Request, tuple[Tensor, ...]]:
    """The request and the tensors with one more leading axis, for vmap."""
    moved = tuple(t if d is None else t.movedim(d, 0) for t, d in zip(tensors, in_dims, strict=True))
    dims = tuple(None if d is None else 0 for d in in_dims)
    return dataclasses.replace(request, problem=VmappedProblem(request.problem, moved, dims)), moved


class _FixedPoint(torch.autograd.Function):
    """(request, initial, *tensors) -> (value, *record, *trace or *evaluation)."""

    @staticmethod
    def forward(request: Request, initial: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        with exact_precision(initial):
            # A copy: what modules keep here, without a graph, they must not read in the backward pass.
            outcome = request.solved(request.problem.replace(*tensors), initial, differentiated=True)
        fields = (outcome.value, *outcome.record, *(outcome.trace or ()), *outcome.evaluation)
        # Forward mode cannot attach tangents to outputs that are views.
        return tuple(t.clone() if t._is_view() else t for t in fields if t is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        request, _, *tensors = inputs
        ctx.request = request.without_tensors()
        ctx.mark_non_differentiable(*output[1:])
        # Kernels keep no trace.
        evaluation = () if request.trace else output[6:]
        ctx.num_outputs, ctx.num_kept = len(output), len(evaluation)
        ctx.save_for_backward(output[0], *evaluation, *tensors)
        ctx.save_for_forward(output[0], *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        z, *saved = ctx.saved_tensors
        evaluation, tensors = tuple(saved[: ctx.num_kept]), saved[ctx.num_kept :]
        if cotangents[0] is None:
            return (None,) * (2 + len(tensors))
        request = dataclasses.replace(ctx.request, evaluation=evaluation)
        gradients = gradients_at(request, z, tensors, cotangents[0], _needed(ctx, tensors))
        return (None, None, *gradients)

    @tangent_rule
    def jvp(ctx: Any, saved: list[Tensor], *tangents: Any) -> tuple[Tensor | None, ...]:
        z, *tensors = saved
        request = cast(Request, ctx.request)
        with exact_precision(z):
            forcing = _pushforward(request.problem, z, tensors, tangents[2:])
            dz = z * 0 if forcing is None else _apply(_AdjointSolve, request, False, z, forcing, *tensors)
        return (dz, *(None,) * (ctx.num_outputs - 1))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], request: Request, initial: Tensor, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        lifted, moved = _lifted(request, tensors, in_dims[2:])
        start = _batched_first(initial, in_dims[1], info.batch_size)
        output = _apply(_FixedPoint, lifted, start, *moved)
        return output, (0,) * 6 + (1,) * (len(output) - 6)


class _AdjointSolve(torch.autograd.Function):
    """(request, transpose, z, rhs, *tensors) -> x with (I - J^T) x = rhs, or (I - J) x = rhs without `transpose`."""

    @staticmethod
    def forward(request: Request, transpose: bool, z: Tensor, rhs: Tensor, *tensors: Tensor) -> Tensor:
        return solve_system(request, request.problem.replace(*tensors), z, rhs, transpose=transpose)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        request, ctx.transpose, z, _, *tensors = inputs
        ctx.request = request.without_tensors()
        ctx.save_for_backward(z, output, *tensors)
        ctx.save_for_forward(z, output, *tensors)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        z, x, *tensors = ctx.saved_tensors
        with exact_precision(z):
            v = _apply(_AdjointSolve, ctx.request, not ctx.transpose, z, cotangent, *tensors)
            left, right = (x, v) if ctx.transpose else (v, x)
            by_z, *by_tensors = _bilinear_gradient(ctx.request.problem, z, tensors, left, right, _needed(ctx, tensors))
        return (None, None, by_z, v, *by_tensors)

    @tangent_rule
    def jvp(ctx: Any, saved: list[Tensor], *tangents: Any) -> Tensor:
        z, x, *tensors = saved
        request = cast(Request, ctx.request)
        _, _, dz, drhs, *dtensors = tangents
        transpose = ctx.transpose
        where = [i for i, t in enumerate(tensors) if t.is_floating_point() and dtensors[i] is not None]

        def product(z: Tensor, *floating: Tensor) -> Tensor:
            problem = request.problem.replace(*_filled(tensors, where, floating))
            if transpose:
                return cast(Tensor, vjp(problem.fixed_point_map, z)[1](x)[0])
            return jvp_by_vjp(problem.fixed_point_map, (z,), (x,))

        with exact_precision(z):
            primals = (z, *(tensors[i] for i in where))
            tangents = (torch.zeros_like(z) if dz is None else dz, *(dtensors[i] for i in where))
            change = jvp_by_vjp(product, primals, tangents)
            rhs = change if drhs is None else change + drhs
            return cast(Tensor, _apply(_AdjointSolve, request, transpose, z, rhs, *tensors))

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        request: Request,
        transpose: bool,
        z: Tensor,
        rhs: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, int]:
        lifted, moved = _lifted(request, tensors, in_dims[4:])
        z, rhs = (_batched_first(t, d, info.batch_size) for t, d in ((z, in_dims[2]), (rhs, in_dims[3])))
        return _apply(_AdjointSolve, lifted, transpose, z, rhs, *moved), 0


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    if unobserved() and not any(isinstance(arg, Tensor) and is_functorch_wrapped_tensor(arg) for arg in args):
        return applied(function, *args)
    return function.apply(*args)  # type: ignore[no-untyped-call]


def _needed(ctx: Any, tensors: list[Tensor]) -> list[bool]:
    """Whether the gradient of each tensor is needed; they are the last inputs of an autograd function."""
    if transforms_active():
        return [_is_tracked(t) for t in tensors]
    return list(ctx.needs_input_grad[-len(tensors) :]) if tensors else []


def _is_tracked(tensor: Tensor) -> bool:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if tensor.requires_grad:
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.requires_grad


def _pushforward(problem: Problem, z: Tensor, tensors: list[Tensor], tangents: tuple[Any, ...]) -> Tensor | None:
    """(df/dt) dt at fixed z, or None if no tensor moves."""
    where = [i for i, d in enumerate(tangents) if d is not None and tensors[i].is_floating_point()]
    if not where:
        return None

    def mapped(*moving: Tensor) -> Tensor:
        return problem.replace(*_filled(tensors, where, moving)).fixed_point_map(z)

    return jvp_by_vjp(mapped, [tensors[i] for i in where], [tangents[i] for i in where])


def _bilinear_gradient(
    problem: Problem, z: Tensor, tensors: list[Tensor], left: Tensor, right: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of <left, J right> with respect to z and each tensor that is `needed`."""
    where = [i for i, t in enumerate(tensors) if t.is_floating_point() and needed[i]]

    def bilinear(z: Tensor, *floating: Tensor) -> Tensor:
        _, by_state = vjp(problem.replace(*_filled(tensors, where, floating)).fixed_point_map, z)
        return cast(Tensor, (by_state(left)[0] * right).sum())

    by_z, *by_floating = grad(bilinear, argnums=tuple(range(1 + len(where))))(z, *(tensors[i] for i in where))
    gradients = dict(zip(where, by_floating, strict=True))
    return (by_z, *map(gradients.get, range(len(tensors))))


def _filled(tensors: list[Tensor], where: list[int], new: tuple[Tensor, ...]) -> list[Tensor]:
    replaced = dict(zip(where, new, strict=True))
    return [replaced.get(i, tensor) for i, tensor in enumerate(tensors)]


def _batched_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


class VmappedProblem(Problem):
    """A problem whose tensors carry one more leading axis, mapped over with torch.vmap."""

    def __init__(self, inner: Problem, tensors: tuple[Tensor, ...], in_dims: tuple[int | None, ...]) -> None:
        # A closure, as the tensors of `inner` are stale and must not be declared.
        self._rebuild: Callable[..., Problem] = lambda *ts: inner.replace(*ts)
        self.mapped_tensors = tensors
        self.in_dims = in_dims
        self.event_ndim, self.token_order = inner.event_ndim, inner.token_order
        self.symmetric, self.has_energy, self.has_metric = inner.symmetric, inner.has_energy, inner.has_metric
        self.plain_steps_descend, self.steps_rescaled = inner.plain_steps_descend, inner.steps_rescaled
        self.separates, self.mixes = inner.separates, inner.mixes

    def _vmap(self, method: str, *states: Tensor) -> Tensor:
        def call(*arguments: Tensor) -> Tensor:
            states_of_one, tensors = arguments[: len(states)], arguments[len(states) :]
            result: Tensor = getattr(self._rebuild(*tensors), method)(*states_of_one)
            return result

        return torch.vmap(call, in_dims=(*(0 for _ in states), *self.in_dims))(*states, *self.mapped_tensors)

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return self._vmap("fixed_point_map", z)

    def retract(self, z: Tensor) -> Tensor:
        return self._vmap("retract", z)

    def energy(self, z: Tensor) -> Tensor:
        return self._vmap("energy", z)

    def divergence(self, z: Tensor, mapped: Tensor) -> Tensor:
        return self._vmap("divergence", z, mapped)

    def metric_product(self, z: Tensor, v: Tensor) -> Tensor:
        return self._vmap("metric_product", z, v)

    def metric_root_product(self, z: Tensor, v: Tensor) -> Tensor:
        return self._vmap("metric_root_product", z, v)

    def outer_product(self, z: Tensor, v: Tensor) -> Tensor:
        return self._vmap("outer_product", z, v)

    def linearize(self, z: Tensor) -> Linearization:
        linear = super().linearize(z)
        return linear._replace(outer=lambda v: self.outer_product(z, v)) if self.has_metric else linear
