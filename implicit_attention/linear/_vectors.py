"""Vector algebra along the last axis, one row per problem: nothing here mixes two rows."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from .._torch import along, host_may_look, length

State = TypeVar("State")

#: Shorter vectors of a basis are worked off together.
WIDE = 1024
#: Where a remainder is smaller than its vector by more than this, its parts along a basis are removed a second time.
LOST = 0.1
#: A relative quantity below ROUNDOFF * eps is taken for rounding noise.
ROUNDOFF = 10.0


def dot(left: Tensor, right: Tensor) -> Tensor:
    """left . right, (*batch)."""
    return (left * right).sum(-1)


def normalised(vector: Tensor) -> tuple[Tensor, Tensor]:
    """(vector / scale, scale), scale (*batch) the power of two that brings the largest entry into [1/2, 2).

    A power of two changes no bit of the mantissas, so solutions are exactly equivariant under such rescalings of b, of
    whatever size: the square of 1e20 is no float32, nor is that of 1e-25.
    """
    peak = vector.abs().amax(-1) if vector.shape[-1] else vector.sum(-1)
    # The largest power of two is one below the exponent of the largest number; a scale that underflows is 0.
    most = math.frexp(torch.finfo(peak.dtype).max)[1] - 1
    scale = torch.ldexp(torch.ones_like(peak), torch.frexp(peak).exponent.clamp(max=most))
    scale = torch.where(peak.isfinite() & (scale > 0) & (peak > 0), scale, 1.0)
    return vector / scale.unsqueeze(-1), scale


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, and 0 where the denominator is 0; a (*batch) denominator divides vectors too."""
    divisor = along(denominator, numerator)
    return torch.where(divisor == 0, 0.0, numerator / divisor)


def choose(mask: Tensor, new: Tensor, old: Tensor | float) -> Tensor:
    """New rows where the (*batch) mask holds, old rows (or a number) elsewhere."""
    return torch.where(along(mask, new), new, old)


def freeze(active: Tensor, new: State, old: State) -> State:
    """A dataclass of (*batch, ...) tensors: rows of `new` where active, untouched rows of `old` elsewhere."""
    # A look at a few flags costs less than a pass over each vector.
    if host_may_look(active) and bool(active.all()):
        return new
    names = [field.name for field in fields(new)]  # type: ignore[arg-type]
    pairs = [(name, getattr(new, name), getattr(old, name)) for name in names]
    changes = {name: choose(active, after, before) for name, after, before in pairs if after is not before}
    return replace(new, **changes)  # type: ignore[type-var]


def coordinates(basis: Tensor, vector: Tensor) -> Tensor:
    """Inner products of the rows of a (*batch, k, n) basis with a vector, (*batch, k)."""
    return (basis * vector.unsqueeze(-2)).sum(-1)


def orthogonalise(basis: tuple[Tensor, ...], vector: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(coordinates in the basis, remainder orthogonal to it, lengths of vector and remainder), by Gram-Schmidt.

    It is done twice where that is needed. Reference: Giraud, Langou, Rozloznik (2005): two passes give orthogonality to
    working precision; one does where the remainder has not lost more than a digit.
    """
    size = length(vector)
    total, remainder = _subtracted(basis, vector)
    height = length(remainder)
    again = height < LOST * size
    if not host_may_look(again) or bool(again.any()):
        # A problem has the same bits whatever its neighbours need.
        more, twice = _subtracted(basis, remainder)
        total, remainder = torch.where(again.unsqueeze(-1), total + more, total), choose(again, twice, remainder)
        height = length(remainder)
    return total, remainder, size, height


def _subtracted(basis: tuple[Tensor, ...], vector: Tensor) -> tuple[Tensor, Tensor]:
    """One pass of Gram-Schmidt: the parts along the basis, and the remainder without them."""
    if vector.shape[-1] < WIDE or not host_may_look(vector):
        # The number of operations costs more than the copy of the basis, on another device at any length.
        rows = torch.stack(basis, -2)
        parts = coordinates(rows, vector)
        return parts, vector - (rows * parts.unsqueeze(-1)).sum(-2)
    found, left = [], vector.clone()
    for row in basis:
        found.append((row * left).sum(-1, keepdim=True))
        left.addcmul_(found[-1], row, value=-1)
    return torch.cat(found, -1), left
