"""Results that have no derivative, and say so where one is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Refusing(torch.autograd.Function):
    """(result, kind of the error, its message, *inputs) -> the result, whose derivative raises."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, kind: type[Exception], message: str, *inputs: Tensor) -> Tensor:
        ctx.kind, ctx.message = kind, message
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise ctx.kind(ctx.message)


def refusing(result: Tensor, kind: type[Exception], message: str, *inputs: Tensor) -> Tensor:
    """The result, with a backward pass that raises, where it or one of the inputs requires grad."""
    refused: Tensor = _Refusing.apply(result, kind, message, *inputs)  # type: ignore[no-untyped-call]
    return refused
