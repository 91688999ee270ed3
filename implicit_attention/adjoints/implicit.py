"""The exact gradient of a fixed point, from the implicit function theorem, differentiable to any order.

z = f(z, t) gives dz = (I - J)^{-1} (df/dt) dt with J = df/dz. The linear system x = J x + g is a fixed point, too: the
derivatives of every order are those of one autograd function, `FixedPoint`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from .. import _validate
from .._torch import (
    along,
    at_least_single,
    exact_precision,
    host_may_look,
    is_batched,
    is_differentiated,
    jvp_by_vjp,
    tangent_rule,
    transforms_active,
    vjp,
)
from ..failure import stays_out, unread
from ..linear import LinearSolver
from ..problem import Problem, changed, isolated, pullback
from ..solution import Record, Remedies, Status, Trace
from ..solvers.loop import Outcome
from .base import Adjoint, Request
from .linear_system import adjoint_gradients, alone, merged, rows_of, solve_system


def _check_fallback(argument: str, given: Any) -> None:
    required, remedy = "be None or an adjoint made of steps from any state", "use Phantom(5) or OneStep()"
    _validate.check_instance(argument, given, Adjoint, required, remedy)
    if type(given).through is Adjoint.through:
        # The compiler does not follow the text of an adjoint.
        _validate.refuse(argument, required, repr(given), remedy, TypeError)


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

    linear_solver: LinearSolver[Any] | None = _validate.instance(
        None, LinearSolver, "be None or a LinearSolver", "for example CG() or GMRES()"
    )
    fallback: Adjoint | None = _validate.option(_check_fallback, None)

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
            _validate.refuse("adjoint", required, received, remedy)

    def run(self, request: Request) -> Outcome:
        outcome = fixed_point(request, request.problem.tensors(), self.linear_solver)
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
    failed, value, index = ~outcome.record.converged, outcome.value, None
    if not is_batched(failed, value, *problem.tensors()):
        if not bool(failed.any()):
            return value
        if problem.separates:
            # Those that have converged make no steps.
            index, problem = alone(problem, failed)
    steps = fallback.through(problem, rows_of(value.detach(), index))
    assert steps is not None
    return merged(index, failed, value, steps)


def fixed_point(
    request: Request, tensors: tuple[Tensor, ...], linear_solver: LinearSolver[Any] | None = None
) -> Outcome:
    """The outcome of the solver, its value differentiable with respect to `tensors`."""
    # The solution does not depend on the initial state, whose graph would only be kept alive.
    request = dataclasses.replace(request, initial=request.initial.detach(), linear_solver=linear_solver)
    if not transforms_active() and not is_differentiated(*tensors):
        with torch.no_grad(), exact_precision(request.initial):
            return request.solved(changed(request.problem, lambda t: t), request.initial)
    value, *fields = attached(request, *tensors)
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
    problem, linear = request.problem, isinstance(request.problem, LinearSystem)
    recorded = torch.is_grad_enabled() or transforms_active()
    if not linear and not (host_may_look(z) and math.isfinite(z.sum().item())):
        left_out = unread(z, cotangent, problem.event_ndim)
        problem, z = isolated(problem.replace(*tensors), z, left_out)
        tensors = problem.tensors()
        known = tuple(t.masked_fill(along(left_out, t), 0.0) for t in request.evaluation)
        request = dataclasses.replace(request, evaluation=known)
    with exact_precision(z):
        if not (linear or recorded):
            problem = problem.replace(*(t.detach().requires_grad_(n) for t, n in zip(tensors, needed, strict=True)))
            if (gradients := adjoint_gradients(request, problem, z.detach(), cotangent)) is not None:
                return gradients
        if request.route.floor is not None:
            # Products in half precision have no further derivatives, and no kernel in the place of the one.
            wide = tuple(map(at_least_single, tensors))
            way = dataclasses.replace(request.route, impl="auto", floor=None)
            found = gradients_at(dataclasses.replace(request, route=way, evaluation=()), z, wide, cotangent, needed)
            request.route.product = way.product
            return tuple(None if g is None else g.to(t.dtype) for t, g in zip(tensors, found, strict=True))
        problem = problem.replace(*tensors)
        u = _linear_answer(request, problem, True, z, cotangent)
        if not linear:
            u = stays_out(request.report.on_failure, u, cotangent, problem.event_ndim)
        return pullback(problem, z, u, needed)


def _linear_answer(request: Request, problem: Problem, transpose: bool, z: Tensor, rhs: Tensor) -> Tensor:
    """x with (I - J) x = rhs, or (I - J^T) x = rhs, for the Jacobian J of f at z; differentiable."""
    if isinstance(problem, LinearSystem):
        # The matrix of a system is its Jacobian.
        transpose, z, problem = transpose != problem.transpose, problem.z, problem.inner
    system = LinearSystem(problem, transpose, z, rhs)
    request = dataclasses.replace(request, problem=system, initial=rhs.detach(), trace=False, evaluation=())
    answer: Tensor = attached(request, *system.tensors())[0]
    return answer


class LinearSystem(Problem):
    """x = J x + rhs, or x = J^T x + rhs with `transpose`, for the Jacobian J of a problem's f at z.

    It is a fixed point itself: so the derivative of every order is that of a fixed point.
    """

    def __init__(self, inner: Problem, transpose: bool, z: Tensor, rhs: Tensor) -> None:
        self.inner, self.transpose, self.z, self.rhs = inner, transpose, z, rhs
        self.event_ndim = inner.event_ndim

    def fixed_point_map(self, x: Tensor) -> Tensor:
        mapped = self.inner.fixed_point_map
        product = vjp(mapped, self.z)[1](x)[0] if self.transpose else jvp_by_vjp(mapped, (self.z,), (x,))
        return cast(Tensor, product) + self.rhs


class FixedPoint(torch.autograd.Function):
    """(request, initial, *tensors) -> (value, *record, *trace or *evaluation): a solution, whatever made it.

    Its derivative is the answer of a linear system, which is a fixed point, too.
    """

    @staticmethod
    def forward(request: Request, initial: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        outcome = request.known
        if outcome is None:
            # A copy: what modules keep here, without a graph, they must not read in the backward pass.
            problem = request.problem.replace(*tensors)
            with exact_precision(initial):
                if isinstance(problem, LinearSystem):
                    answer = solve_system(request, problem.inner, problem.z, problem.rhs, transpose=problem.transpose)
                    outcome = Outcome(answer.value, answer.record)
                else:
                    outcome = request.solved(problem, initial, differentiated=True)
        fields = (outcome.value, *outcome.record, *(outcome.trace or ()), *outcome.evaluation)
        # Forward mode cannot attach tangents to outputs that are views.
        return tuple(t.clone() if t._is_view() else t for t in fields if t is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        request, _, *tensors = inputs
        ctx.request = request.without_tensors(len(tensors))
        ctx.mark_non_differentiable(*output[1:])
        ctx.num_outputs = len(output)
        # Kernels keep no trace.
        ctx.save_for_backward(output[0], *tensors, *(() if request.trace else output[6:]))
        ctx.save_for_forward(output[0], *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        (z, *saved), needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        if cotangents[0] is None:
            return (None,) * (2 + len(needed))
        request = dataclasses.replace(ctx.request, evaluation=tuple(saved[len(needed) :]))
        return (None, None, *gradients_at(request, z, saved[: len(needed)], cotangents[0], needed))

    @tangent_rule
    def jvp(ctx: Any, saved: list[Tensor], *tangents: Any) -> tuple[Tensor | None, ...]:
        z, *tensors = saved
        replace, given = ctx.request.problem.replace, zip(tensors, tangents[2:], strict=True)
        moving = {i: d for i, (t, d) in enumerate(given) if d is not None and t.is_floating_point()}

        def mapped(*moved: Tensor) -> Tensor:
            new = dict(zip(moving, moved, strict=True))
            return cast(Tensor, replace(*(new.get(i, t) for i, t in enumerate(tensors))).fixed_point_map(z))

        with exact_precision(z):
            if not moving:
                dz = z * 0
            else:
                forcing = jvp_by_vjp(mapped, [tensors[i] for i in moving], list(moving.values()))
                dz = _linear_answer(ctx.request, replace(*tensors), False, z, forcing)
        return (dz, *(None,) * (ctx.num_outputs - 1))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], request: Request, initial: Tensor, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        problem = _lifted(request.problem, tensors, in_dims[2:], info.batch_size)
        start = _batched_first(initial, in_dims[1], info.batch_size)
        output = attached(dataclasses.replace(request, problem=problem, initial=start), *problem.tensors())
        return output, (0,) * 6 + (1,) * (len(output) - 6)


def _lifted(problem: Problem, tensors: Sequence[Tensor], in_dims: tuple[int | None, ...], size: int) -> Problem:
    """The problem with one more leading axis, of its tensors too, for vmap."""
    if isinstance(problem, LinearSystem):
        inner = _lifted(problem.inner, tensors[:-2], in_dims[:-2], size)
        ends = (_batched_first(t, d, size) for t, d in zip(tensors[-2:], in_dims[-2:], strict=True))
        return LinearSystem(inner, problem.transpose, *ends)
    moved = tuple(t if d is None else t.movedim(d, 0) for t, d in zip(tensors, in_dims, strict=True))
    return VmappedProblem(problem, moved, tuple(None if d is None else 0 for d in in_dims))


def attached(request: Request, *tensors: Tensor) -> Any:
    """The value of a fixed point and its evidence, as `FixedPoint` returns them."""
    if not (transforms_active() or any(map(is_functorch_wrapped_tensor, (request.initial, *tensors)))):
        # Torch would bind the arguments by their signature, which takes as long as a small solve.
        function = super(torch.autograd.Function, FixedPoint)
        return function.apply(request, request.initial, *tensors)  # type: ignore[attr-defined]
    return FixedPoint.apply(request, request.initial, *tensors)  # type: ignore[no-untyped-call]


def _batched_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _each(name: str) -> Any:
    """The method `name` of a problem, mapped over the first axis of states and tensors with torch.vmap."""

    def method(self: VmappedProblem, *states: Tensor) -> Any:
        call = torch.vmap(lambda z, t: getattr(self._rebuild(*t), name)(*z), in_dims=(0, self.in_dims))
        return call(states, self.mapped_tensors)

    return method


class VmappedProblem(Problem):
    """A problem whose tensors carry one more leading axis, mapped over with torch.vmap."""

    def __init__(self, inner: Problem, tensors: tuple[Tensor, ...], in_dims: tuple[int | None, ...]) -> None:
        # Not `inner`, whose tensors are stale and must not be declared.
        self._rebuild, self.mapped_tensors, self.in_dims = inner.replace, tensors, in_dims
        self.event_ndim, self.token_order = inner.event_ndim, inner.token_order
        self.symmetric, self.has_energy, self.has_metric = inner.symmetric, inner.has_energy, inner.has_metric
        self.plain_steps_descend, self.steps_rescaled = inner.plain_steps_descend, inner.steps_rescaled
        self.separates, self.mixes = inner.separates, inner.mixes

    fixed_point_map, retract, energy = _each("fixed_point_map"), _each("retract"), _each("energy")
    divergence, outer_product = _each("divergence"), _each("outer_product")
    metric_product, metric_root_product = _each("metric_product"), _each("metric_root_product")
