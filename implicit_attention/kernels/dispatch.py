"""Choice of the kernel: a named one or an error, else the fastest that can do the problem and is trusted, or none.

Shapes and dtypes are checked before an operation runs, trust in kernels while it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._autograd import host_may_look_at_constant, is_fake
from .._fused_rule import FusedRule
from .._types import Impl, check_impl
from ..errors import UnsupportedImplementation
from ..status import Status
from . import checks, trust
from .fold import widened
from .native import checks as native_checks
from .native.adjoint import solve_adjoint as native_adjoint
from .native.library import library, warn_once
from .native.operands import unsupported as native_unsupported
from .native.solve import solve as native_solve
from .problem import Hopfield
from .rule import THERE, AdjointAnswer, AdjointRule, Solved
from .triton import checks as triton_checks
from .triton.support import FINEST, hidden, too_fine, unsupported

_R = TypeVar("_R")

# Where "auto" tries the Triton kernels.
TRITON_DEVICES = ("cuda",)


def checked(impl: Impl, problem: Hopfield) -> Impl:
    """Return `impl`, or raise if it is named and cannot do the problem; it reads no numbers, which torch may trace."""
    check_impl(impl)
    reasons = {"native": native_unsupported, "triton": unsupported}
    reason = reasons[impl](problem) if impl in reasons else None
    if reason is not None:
        raise UnsupportedImplementation(f"`impl={impl!r}`: {reason}")
    return impl


def default_rtol(impl: Impl, problem: Hopfield) -> float:
    """The tolerance of a solve that was given none."""
    return FINEST.get(problem.keys.dtype, 1e-4) if _is_for_triton(impl, problem) else 1e-4


def _is_for_triton(impl: Impl, problem: Hopfield) -> bool:
    able = problem.field.device.type in TRITON_DEVICES and unsupported(problem) is None
    return impl == "triton" or (impl == "auto" and able)


def solve(problem: Hopfield, initial: Tensor, rule: FusedRule, impl: Impl, *, keep_mean: bool = True) -> Solved | None:
    """Every query solved from `initial`, (*batch, N, D), by a kernel; None where none answers.

    The mean may be left out where it costs extra.
    """
    if problem.field.shape[-1] == 0 < initial.shape[:-1].numel():
        # States of no entries still have weights: those of states with one entry, 0.
        field, keys, initial = (widened(t, 1) for t in (problem.field, problem.keys, initial))
        wide = solve(problem._replace(field=field, keys=keys), initial, rule, impl, keep_mean=keep_mean)
        return None if wide is None else wide._replace(state=wide.state[..., :0], mean=wide.mean[..., :0])
    if initial.numel() == 0:
        return Solved.allocated(initial.new_zeros, initial.shape, initial.dtype)

    def by_kernel() -> Solved:
        from .triton.solve import solve as triton_solve

        part = hidden(problem.keys, rule)
        found = triton_solve(problem, initial, rule._replace(rtol=rule.rtol - part))
        # Residuals and tolerances with what rounding may hide.
        more = (found.tolerance - rule.atol) * (part / (rule.rtol - part)) if part else 0.0
        return found._replace(residual=found.residual + more, tolerance=found.tolerance + more)

    answer = _by_triton(impl, "hopfield_solve", problem, by_kernel, rule)
    if answer is not None:
        return answer
    problem = problem.to(initial.dtype)
    return by_native(
        impl, "hopfield_solve", problem, partial(native_solve, problem, initial, rule, keep_mean=keep_mean)
    )


def solve_adjoint(
    problem: Hopfield,
    state: Tensor,
    cotangent: Tensor,
    rtol: float | None,
    max_steps: int,
    impl: Impl,
    *,
    by_bias: Tensor | None = None,
) -> AdjointAnswer | None:
    """The solution of A u = cotangent, (*batch, N, D), for every query at its state, by a kernel; None where none does.

    Queries that it gives up, at saddles above all, have the status STALLED and add 0 to every gradient; NaN during the
    capture of a CUDA graph, where nothing can solve them again.

    by_bias: zeros (*batch, M), to which (df/db)^T u is added for a bias b of every key; Triton does not know it.
    """
    if state.numel() == 0:
        return AdjointAnswer.allocated(state.new_zeros, state.shape, problem.keys.shape, state.dtype)

    def by_kernel() -> AdjointAnswer:
        from .triton.adjoint import solve_adjoint as triton_adjoint
        from .triton.solve import solve as triton_solve

        there = triton_solve(problem, state, THERE)
        rule = AdjointRule.of(rtol, max_steps, problem.keys.dtype)
        return triton_adjoint(problem, state, cotangent, there.mean, there.logsumexp, rule)

    answer = _by_triton(impl, "hopfield_adjoint", problem, by_kernel) if by_bias is None else None
    if answer is None:
        wide, rule = problem.to(state.dtype), AdjointRule.of(rtol, max_steps, state.dtype)

        def run_native() -> AdjointAnswer:
            mean = native_solve(wide, state, THERE).mean
            return native_adjoint(wide, state, cotangent, mean, rule, by_bias=by_bias)

        answer = by_native(impl, "hopfield_adjoint", wide, run_native)
    if answer is None:
        return None
    stalled = answer.status == Status.STALLED
    if not may_look(state):
        return unanswered(answer, stalled)
    if not bool(stalled.any()):
        return answer
    value, by_beta = answer.value.masked_fill(stalled[..., None], 0.0), answer.by_beta.masked_fill(stalled, 0.0)
    return answer._replace(value=value, by_beta=by_beta)


def may_look(tensor: Tensor) -> bool:
    """Whether the host may wait for numbers: it may not while a CUDA graph is captured."""
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def unanswered(answer: AdjointAnswer, stalled: Tensor) -> AdjointAnswer:
    """Answers with NaN for stalled queries and their sums: nothing can solve them again during a capture."""
    poison = torch.zeros_like(answer.by_beta).masked_fill(stalled, torch.nan)
    value, by_beta = answer.value + poison[..., None], answer.by_beta + poison
    by_keys = answer.by_keys + poison.sum(-1)[..., None, None].sum_to_size(*answer.by_keys.shape[:-2], 1, 1)
    return answer._replace(value=value, by_beta=by_beta, by_keys=by_keys)


def _by_triton(
    impl: Impl, operation: str, problem: Hopfield, run: Callable[[], _R], rule: FusedRule = THERE
) -> _R | None:
    """Return the answer of `run`, Triton kernels, if `impl` wants them and they are trusted, else None."""
    if not _is_for_triton(impl, problem):
        return None
    if (reason := too_fine(problem.keys, rule)) is not None:
        if impl == "auto":
            return None
        raise UnsupportedImplementation(f"`impl='triton'`: {reason}")
    check, kernels = triton_checks.CHECKS[operation]
    variant = triton_checks.variant(problem, kernels, rule)
    use = trust.Use(f"{operation} (triton)", problem.field.device, variant)
    insists = "triton" if impl == "triton" else None
    return trust.answer(use, partial(check, problem, variant), run, insists=insists)


def native_use(operation: str, keys: Tensor, mask: Tensor | None, first: int | None) -> trust.Use | None:
    """The native library in a configuration; None, and a warning once, where there is none."""
    loaded = library()
    if loaded is None:
        warn_once()
        return None
    kind = "none" if mask is None else checks.mask_kind(mask)
    return _native_use(operation, keys.device, loaded.isa, keys.dtype, keys.shape[-1], kind, first is not None)


@functools.lru_cache(maxsize=256)
def _native_use(operation: str, device: torch.device, *variant: Any) -> trust.Use:
    return trust.Use(f"{operation} (native)", device, native_checks.NativeVariant(*variant))


def by_native(impl: Impl, operation: str, problem: Hopfield, run: Callable[[], _R]) -> _R | None:
    """Return the answer of `run`, the native library, if `impl` wants it and it is trusted, else None."""
    field, keys, _, _, mask, first = problem
    if impl != "native" and not (impl == "auto" and field.device.type == "cpu"):
        return None
    if not host_may_look_at_constant(*(t for t in problem if isinstance(t, Tensor))):
        # A mode of torch sees operations on tensors, and not what a library writes to their memory.
        if impl == "native" and not is_fake(field):
            reason = "a mode is active that sees operations of torch alone, or the tensors are wrapped"
            raise UnsupportedImplementation(f"`impl='native'`: {reason}; use impl='auto'")
        return None
    use = native_use(operation, keys, mask, first)
    if use is None or (impl == "auto" and native_unsupported(problem) is not None):
        return None
    check = partial(native_checks.CHECKS[operation], use.variant)
    return trust.answer(use, check, run, insists="native" if impl == "native" else None)


def by_attention(keys: Tensor, run: Callable[[], _R], *, mask: bool, causal: bool = False) -> _R | None:
    """Return the answer of `run`, torch's attention kernel with its log-sum-exp, if that is trusted, else None."""
    if torch.compiler.is_compiling():
        # A check cannot run while torch traces. The registered operations are never traced through.
        return None
    variant = checks.attention_variant(keys, mask=mask, causal=causal)
    use = trust.Use("attention with log-sum-exp (torch)", keys.device, variant)
    return trust.answer(use, partial(checks.attention, variant, keys.device), run)
