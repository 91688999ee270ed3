"""What every operation does first: check its arguments, lay them out, choose an implementation.

What is known of shapes and dtypes is refused at once; which kernels are trusted is asked where an operation runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from .. import _validate
from .._types import Impl
from ..errors import UnsupportedImplementation
from . import _trust
from ._triton_support import unsupported
from .attention import FLASH_KEYS, has_kernel
from .problem import Hopfield, carries

_R = TypeVar("_R")

IMPLEMENTATIONS = ("auto", "reference", "sdpa", "triton")
# Where "auto" tries the Triton kernels.
TRITON_DEVICES = ("cuda",)


def laid_out(
    query: Tensor,
    keys: Tensor,
    *,
    beta: float | Tensor,
    anchor: float | Tensor,
    mask: Tensor | None,
    is_causal: bool,
) -> Hopfield:
    """The problem of an operation, all its tensors with as many axes as the query."""
    named = [("query", query), ("keys", keys)]
    for name, tensor in named:
        _validate.check_float_tensor(name, tensor, min_ndim=2)
    _validate.check_same_kind(named)
    _validate.require(keys.shape[-2] > 0, "keys", "hold at least one key", f"shape {tuple(keys.shape)}")
    _validate.require(
        keys.shape[-1] == query.shape[-1],
        "keys",
        f"have the query's dimension {query.shape[-1]} on the last axis",
        f"shape {tuple(keys.shape)}",
    )
    _validate.check_broadcast("keys", keys.shape[:-2], query.shape[:-2], "the leading axes of `query`")
    axes, wide = query.ndim, state_dtype(query.dtype)
    numbers: list[Tensor] = []
    for name, number, high in (("beta", beta, math.inf), ("anchor", anchor, 1.0)):
        if isinstance(number, Tensor):
            _validate.check_float_tensor(name, number)
            _validate.check_broadcast(name, number.shape, query.shape[:-2], "the leading axes of `query`")
            _validate.check_range(name, number, low=0.0, high=high, open_low=name == "beta", remedy="parametrise it")
            # Where the host does not look, what lies outside becomes NaN, and the queries that read it say so.
            number = _validate.inside(number, low=0.0, high=high, open_low=name == "beta")
            numbers.append(number.to(wide)[(None,) * (axes - 2 - number.ndim)][..., None, None])
        else:
            number = _validate.check_number(name, number, low=0.0, high=high, open_low=name == "beta")
            if name == "anchor":
                required = f"leave 1 - anchor its digits in {wide}"
                _validate.require(carries(wide, number), name, required, number, "pass float64 tensors, or 1")
            numbers.append(query.new_full((1,) * axes, number, dtype=wide))
    if mask is not None:
        pairs = (*query.shape[:-1], keys.shape[-2])
        if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
            received = getattr(mask, "dtype", type(mask).__name__)
            raise TypeError(_validate.message("mask", "be boolean (True = attend) or added to the scores", received))
        _validate.check_dense("mask", mask)
        _validate.check_broadcast("mask", mask.shape, pairs, "(*batch, N, M)")
        _validate.require(mask.device == query.device, "mask", f"be on {query.device}", mask.device)
        if mask.dtype != torch.bool:
            mask = mask.to(wide)
        mask = mask[(None,) * (axes - mask.ndim)]
    return Hopfield(query, keys[(None,) * (axes - keys.ndim)], numbers[0], numbers[1], mask, is_causal)


def state_of(problem: Hopfield, argument: str, state: Tensor) -> Tensor:
    """A state, or what has its shape, in the precision of the solve."""
    _validate.check_float_tensor(argument, state)
    shape = problem.field.shape
    _validate.require(state.shape == shape, argument, f"have the query's shape {tuple(shape)}", tuple(state.shape))
    _validate.require(
        state.device == problem.field.device, argument, f"be on the query's device {problem.field.device}", state.device
    )
    return state.to(state_dtype(problem.field.dtype))


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of states: float32 for half-precision inputs."""
    return torch.float32 if torch.finfo(dtype).bits < 32 else dtype


def checked(impl: Impl, problem: Hopfield) -> Impl:
    """`impl`, unless it is named and cannot do the problem; nothing is read or run, so that torch may trace this."""
    _validate.check_choice("impl", impl, IMPLEMENTATIONS)
    if impl == "triton" and (reason := unsupported(problem)) is not None:
        raise UnsupportedImplementation(f"`impl='triton'`: {reason}")
    if impl == "sdpa" and (reason := without_kernel(problem)) is not None:
        raise UnsupportedImplementation(f"`impl='sdpa'`: {reason}; use impl='auto' or 'reference'")
    return impl


def by_triton(
    impl: Impl, operation: str, problem: Hopfield, run: Callable[[], _R], *, fixed_budget: bool = False
) -> _R | None:
    """What `run`, the Triton kernels of an operation, answers if `impl` wants them and they are trusted, else None."""
    if impl != "triton" and not (
        impl == "auto" and problem.field.device.type in TRITON_DEVICES and unsupported(problem) is None
    ):
        return None
    from . import _checks

    check, kernels = _checks.TRITON[operation]
    variant = _checks.triton_variant(problem, kernels, fixed_budget=fixed_budget)
    use = _trust.Use(f"{operation} (triton)", problem.field.device, variant)
    insists = "triton" if impl == "triton" else None
    return _trust.answer(use, partial(check, problem, fixed_budget), run, insists=insists)


def by_attention(impl: Impl, keys: Tensor, run: Callable[[], _R], *, mask: bool, causal: bool = False) -> _R | None:
    """What `run`, which calls torch's attention kernel with the log-sum-exp, answers if that is trusted, else None."""
    if torch.compiler.is_compiling():
        # What is traced cannot be verified; the operations, which are not traced, do not come here.
        return None
    from . import _checks

    variant = _checks.attention_variant(keys, mask=mask, causal=causal)
    use = _trust.Use("attention with log-sum-exp (torch)", keys.device, variant)
    insists = "sdpa" if impl == "sdpa" else None
    return _trust.answer(use, partial(_checks.attention, variant, keys.device), run, insists=insists)


def without_kernel(problem: Hopfield) -> str | None:
    """Why torch's attention kernels, with their log-sum-exp, cannot do a problem."""
    device, count = problem.field.device.type, problem.keys.shape[-2]
    if not has_kernel(device):
        return f"torch {torch.__version__} has no attention kernel that returns the log-sum-exp on {device!r}"
    if device == "cuda" and problem.field.dtype == torch.float64:
        return "torch's attention kernels do not take float64 on 'cuda'"
    if count < FLASH_KEYS:
        return f"at least {FLASH_KEYS} keys are needed (torch's kernel loses NaN below), got {count}"
    return None
