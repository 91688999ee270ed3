"""Small helpers around torch's automatic differentiation."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

_P = ParamSpec("_P")
_R = TypeVar("_R")


def transforms_active() -> bool:
    """Whether a torch.func transform (grad, vjp, jvp, vmap) or a forward-mode level is open."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_fake(tensor: Tensor) -> bool:
    """Whether there is a shape, but no numbers: on the device meta, or under torch's FakeTensorMode."""
    return tensor.device.type == "meta" or isinstance(tensor, FakeTensor)


def is_plain(*tensors: Tensor) -> bool:
    """Whether no derivative of what is computed from `tensors` can be asked for, so that fused kernels may be used."""
    if transforms_active():
        return False
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


def has_tangent(tensor: Tensor) -> bool:
    """Whether forward-mode differentiation tracks `tensor`."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def is_differentiated(*tensors: Tensor) -> bool:
    """Whether a derivative with respect to one of `tensors` can be asked for."""
    return any((torch.is_grad_enabled() and t.requires_grad) or has_tangent(t) for t in tensors)


def exact_precision(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """A context in which autocast does not lower the precision of what is computed from `tensor`."""
    if tensor.device.type == "meta":
        return contextlib.nullcontext()
    return torch.autocast(tensor.device.type, enabled=False)


def uncompiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function`, left out of what torch.compile compiles: one clean graph break.

    For what asks the host when to stop, which would break the graph at every step.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            outside: Callable[_P, _R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
            return outside(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def is_batched(tensor: Tensor) -> bool:
    """Whether `tensor` is inside torch.vmap at any level, so that the host cannot look at its numbers."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


def vjp(function: Callable[..., Any], *primals: Tensor) -> tuple[Any, Callable[..., Any]]:
    """torch.func.vjp, (outputs, pullback), with one type."""
    outputs, pullback = torch.func.vjp(function, *primals)[:2]
    return outputs, pullback


def jvp_by_vjp(function: Callable[..., Tensor], primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> Tensor:
    """J t of `function` with reverse mode only: the vjp is linear in its cotangent, and J t is the vjp of that.

    torch.func.jvp cannot be called inside the jvp rule of a torch.autograd.Function.
    """
    out, pullback = vjp(function, *primals)
    _, pushforward = vjp(pullback, torch.zeros_like(out))
    tangent: Tensor = pushforward(tuple(tangents))[0]
    return tangent


def sum_to_shape(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Undo a broadcast: the gradient of an expanded tensor."""
    return tensor.sum_to_size(shape) if tensor.shape != shape else tensor
