"""Whether the native operations can do a problem."""

from __future__ import annotations

import torch

from ..problem import Hopfield
from .library import unavailable
from .operands import AXES, LARGEST

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def unsupported(problem: Hopfield) -> str | None:
    """Why the native operations cannot do `problem`, as "reason; remedy"; None if they can."""
    field, keys = problem.field, problem.keys
    if field.device.type != "cpu":
        return f"the native operations run on a CPU, not on {str(field.device)!r}; use impl='auto'"
    if field.dtype not in DTYPES:
        return f"the native operations do not compute in {field.dtype}; use float32 or float64, or impl='auto'"
    if field.ndim - 2 > AXES:
        return f"the native operations take at most {AXES} leading axes, got {field.ndim - 2}; flatten some"
    if max(field.numel(), keys.numel(), field.shape[:-1].numel()) > LARGEST:
        return "the native operations count no more than 2^55 numbers; use impl='auto'"
    return unavailable()
