"""The choice of a kernel of `kernels` that solves a problem as a solver would, if there is one.

The solvers' loop and the linear solvers do everything else.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from . import _validate
from ._autograd import are_plain, is_differentiated, is_fake, sum_to_shape, transforms_active, unobserved
from ._fused_rule import FusedRule
from ._types import Impl
from .energies import AnchoredEnergy
from .errors import UnsupportedImplementation
from .kernels import dispatch
from .kernels.native.library import library
from .kernels.native.step import MOST_MIXED, NativeStep
from .kernels.problem import Hopfield, carries
from .kernels.rule import AdjointAnswer
from .potentials import LogSumExp, Potential
from .potentials._read import surely_finite, without_nan, without_nan_before
from .potentials.log_sum_exp import OverLogSumExp, as_log_sum_exp
from .problem import Problem
from .solution import Record
from .solvers import Anderson, Picard
from .solvers.iterate import Solver


@dataclasses.dataclass(frozen=True)
class Lowered:
    """The fused solve of an `AnchoredEnergy` of `LogSumExp`, and its adjoint.

    potential: the potential of the energy, or the `LogSumExp` that computes it.
    rule: the solver's steps and tolerances; None for the adjoint alone.
    """

    energy: AnchoredEnergy
    potential: LogSumExp
    rule: FusedRule | None
    impl: Impl

    def solve(self, initial: Tensor) -> tuple[Tensor, Record] | None:
        """The solution from `initial`, and how the solve went, without a graph; None where no kernel answers."""
        assert self.rule is not None
        problem, initial = self.isolated(initial)
        solved = dispatch.solve(problem, initial, self.rule, dispatch.checked(self.impl, problem), keep_mean=False)
        return None if solved is None else (solved.state, solved.record)

    def adjoint(
        self, z: Tensor, cotangent: Tensor, rtol: float, max_steps: int
    ) -> tuple[tuple[Tensor | None, ...], AdjointAnswer] | None:
        """The gradients of the energy's tensors, by conjugate gradients at z; None where no kernel has them all.

        It has the gradient of a bias per key, which is the same for all queries.

        A problem that it could not solve has a failing status and an approximate gradient or NaN; one that it gives up
        (STALLED) adds nothing.
        """
        energy, potential = self.energy, self.potential
        problem = self.isolated(z)[0]
        own, by_bias = self._own.bias, None
        if (own is not None and own.requires_grad) or potential.bias is not own:
            if (own is not None and own.requires_grad and not is_per_key(own)) or self.impl == "triton":
                return None
            by_bias = z.new_zeros(*z.shape[:-2], potential.keys.shape[-2])
        impl = dispatch.checked(self.impl, problem)
        answer = dispatch.solve_adjoint(problem, z, cotangent, rtol, max_steps, impl, by_bias=by_bias)
        if answer is None:
            return None
        by_potential: list[Tensor | None] = [answer.by_keys]
        if isinstance(potential.beta, Tensor):
            by_potential.append(sum_to_shape(answer.by_beta.sum(-1), potential.beta.shape))
        if potential.mask is not None:
            by_potential.append(None)
        if potential.bias is not None:
            by_potential.append(None if by_bias is None else by_bias[..., None, :])
        if isinstance(energy.potential, OverLogSumExp):
            by_potential = list(energy.potential.own_gradients(tuple(by_potential)))
        if own is not None and by_potential[-1] is not None:
            by_potential[-1] = sum_to_shape(by_potential[-1], own.shape)
        return (*by_potential, *energy._by_own(answer.value, lambda: potential.mean(z))), answer

    @property
    def _own(self) -> LogSumExp:
        """The user's `LogSumExp`, with the tensors that may need a gradient."""
        potential = self.energy.potential
        own = potential.parts[0] if isinstance(potential, OverLogSumExp) else potential
        assert isinstance(own, LogSumExp)
        return own

    def isolated(self, initial: Tensor) -> tuple[Hopfield, Tensor]:
        """The problem, in which keys that are not finite are 0; the states of queries that read such a key are NaN."""
        problem = hopfield_of(self.energy, self.potential)
        if (problem.mask is None and problem.first is None) or surely_finite(problem.keys):
            return problem, initial
        dtype = problem.field.dtype
        if problem.mask is None:
            assert problem.first is not None
            rows = problem.field.shape[-2]
            (keys,), poison = without_nan_before([problem.keys], problem.first, rows, dtype)
        else:
            attended = problem.mask if problem.mask.dtype == torch.bool else torch.ne(problem.mask, -torch.inf)
            (keys, _), poison = without_nan([problem.keys, problem.keys], attended, dtype)
        return problem._replace(keys=keys), initial if poison is None else initial + poison[..., None]


def hopfield_of(energy: AnchoredEnergy, potential: LogSumExp) -> Hopfield:
    """The problem as the operations take it, made of views; `potential` is that of the energy, or computes it."""
    pairs = potential.mask if potential.bias is None else potential.bias
    if potential.bias is not None and potential.mask is not None:
        pairs = potential.bias.where(potential.mask, -torch.inf)
    # Where the host does not look, a number outside of its range becomes NaN.
    beta = _validate.inside(potential.beta, low=0.0, open_low=True)
    anchor = _validate.inside(energy.anchor, low=0.0, high=1.0)
    return Hopfield(energy.field, potential.keys, beta, anchor, pairs, potential.query_offset).packed()


def lower(problem: Problem, solver: Solver | None, impl: Impl, *, every_step: bool = False) -> Lowered | None:
    """The operation that solves `problem` as `solver` does, or None if there is none or `impl` is "reference".

    Args:
        problem: the problem to solve.
        solver: the method; None for the adjoint alone, whatever method solved the problem.
        impl: "auto" takes a kernel where there is one; "native" and "triton" insist on theirs.
        every_step: whether every step must be recorded, for a trace or for a gradient through the steps.

    Raises:
        UnsupportedImplementation: an `impl` was named that cannot do it, and why.
    """
    if impl == "reference":
        return None
    insists = impl != "auto"
    lowered, reason = _matched(problem, solver, impl, every_step)
    if insists and lowered is not None:
        reason = _underivable(lowered._own, impl)
    if insists and reason is not None:
        raise UnsupportedImplementation(f"`impl={impl!r}`: {reason}")
    if lowered is None or reason is not None:
        return None
    if insists:
        dispatch.checked(impl, hopfield_of(lowered.energy, lowered.potential))
    if torch.compiler.is_compiling() or is_fake(lowered.energy.field):
        # As a part of a graph the operations take tensors of transforms, and shapes that are not known yet.
        return lowered
    wrapped = any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in problem.tensors())
    return None if wrapped or lowered.energy.field.numel() == 0 else lowered


def _matched(
    problem: Problem, solver: Solver | None, impl: Impl, every_step: bool
) -> tuple[Lowered | None, str | None]:
    """Return the fused operation for the problem, or the reason why there is none, as "reason; remedy"."""
    potential = getattr(problem, "potential", problem)
    made_of = as_log_sum_exp(potential) if isinstance(potential, Potential) else None
    # Exact types: a subclass may compute something else, and so may attributes that were added.
    if type(problem) is not AnchoredEnergy or made_of is None or not problem._has_only("potential", "field", "anchor"):
        names = f"not for {type(problem).__name__} of {type(potential).__name__}"
        return None, f"it exists for AnchoredEnergy of LogSumExp, {names} (or with added attributes); use impl='auto'"
    if every_step:
        kept = "no step is kept, for a trace, a callback or Unrolled()"
        return None, f"{kept}; use Implicit() without a trace and without a callback, or impl='auto'"
    rule = None if solver is None else solver.fused_rule(problem)
    if solver is not None and rule is None:
        name = type(solver).__name__
        return None, f"there is no kernel for {name} with these options; use Anderson() or Picard(), or impl='auto'"
    if not carries(problem.field.dtype, problem.anchor):
        digits = f"an anchor of {problem.anchor} leaves 1 - anchor no digits in {problem.field.dtype}"
        return None, f"{digits}; use impl='auto' or float64"
    return Lowered(problem, made_of, rule, impl), None


def is_per_key(bias: Tensor) -> bool:
    """Whether a bias is the same for all queries."""
    return bias.ndim < 2 or bias.shape[-2] == 1


def _underivable(potential: LogSumExp, impl: Impl) -> str | None:
    """The reason why a named implementation would leave out a derivative; None if it leaves out none."""
    if transforms_active():
        return "there is no derivative inside torch.func; use impl='auto' or 'reference'"
    bias = potential.bias
    if bias is not None and is_differentiated(bias) and not (impl == "native" and is_per_key(bias)):
        return "there is no derivative with an additive mask that requires grad; use impl='auto' or 'reference'"
    return None


def written_out(problem: Problem) -> Problem:
    """The same problem with every product of its potential written out, for impl="reference"."""
    if not isinstance(problem, AnchoredEnergy) or not isinstance(problem.potential, LogSumExp | OverLogSumExp):
        return problem
    clone = problem.replace(*problem.tensors())
    clone.potential = problem.potential.written_out()
    return clone


def native_step(solver: Solver, problem: Problem, initial: Tensor) -> Callable[[Tensor, Tensor], NativeStep] | None:
    """Return what makes the steps on a user's map natively, given states and rows to solve; None where nothing can."""
    if type(solver) is Anderson:
        history, ridge, plain_steps = solver._history(problem), solver.ridge, solver._plain_steps(problem)
        fits = history <= MOST_MIXED and solver._guard(problem) == "residual" and not problem.symmetric
    else:
        history, ridge, plain_steps = 0, 0.0, solver.max_steps + 1
        fits = type(solver) is Picard and solver.damping == 0
    # The bits of a token must not depend on whether those behind it are plain tensors.
    if not fits or problem.has_energy or problem.mixes or problem.token_order is not None or not unobserved():
        return None
    if initial.dtype not in (torch.float32, torch.float64) or not 0 < initial.numel() < 2**31:
        return None
    loaded = library() if are_plain(initial.dtype, initial) else None
    if loaded is None:
        return None
    rule = FusedRule(solver.rtol, solver.atol, solver.max_steps, plain_steps)
    return functools.partial(NativeStep, loaded, rule, history, ridge, Anderson.growth)
