"""Euclidean lengths of vectors of any size: the square of 1e20 is no float32, nor is that of 1e-25."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._autograd import host_may_look


def _range(dtype: torch.dtype) -> tuple[float, float]:
    info = torch.finfo(dtype)
    return math.sqrt(info.tiny / info.eps), 2.0 ** (math.frexp(info.max)[1] * 5 // 8)


#: The least length whose square has all its digits, and a power of two by which shorter vectors get there.
_RANGE = {dtype: _range(dtype) for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}


def length(vector: Tensor) -> Tensor:
    """Euclidean length of vectors whose squares are representable, (*batch)."""
    size: Tensor = torch.linalg.vector_norm(vector, dim=-1)
    return size


def norm(vector: Tensor) -> Tensor:
    """Euclidean length, (*batch, n) -> (*batch); squares neither overflow nor underflow."""
    size = length(vector)
    least, power = _RANGE[size.dtype]
    if size.numel() and host_may_look(size):
        low, high = torch.aminmax(size.detach())
        if least <= float(low) and float(high) < math.inf:
            return size
    # Powers of two change no bit of the others.
    factor = torch.ones_like(size).masked_fill(size < least, power).masked_fill(~(size < torch.inf), 1 / power)
    return length(vector * factor.unsqueeze(-1)) / factor


def resolves(size: Tensor) -> Tensor:
    """Whether squares of numbers of this size, (*batch), have all their digits."""
    return size >= _RANGE[size.dtype][0]
