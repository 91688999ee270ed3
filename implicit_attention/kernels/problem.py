"""The problem of all operations: the anchored log-sum-exp energy of a batch of queries, as plain tensors."""

from __future__ import annotations

import functools
import math
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._autograd import are_plain

# Up to so many numbers, one per head for example, are read one by one.
MOST_NUMBERS = 256
# Most leading axes of a problem that the short check of shapes accepts.
MOST_AXES = 8
# Precisions of a solve.
PRECISIONS = (torch.float32, torch.float64)
# Limits of an inverse temperature.
LEAST, MOST = math.ulp(0.0), sys.float_info.max


def carries(dtype: torch.dtype, anchor: float | Tensor) -> bool:
    """Whether an anchor that is rounded to `dtype`, as the operations read it, leaves 1 - anchor four digits."""
    if isinstance(anchor, Tensor) or dtype == torch.float64 or anchor == 1:
        return True
    return 1 - anchor >= 1e4 * torch.finfo(torch.float32).eps


class Hopfield(NamedTuple):
    """E(z) = |z|^2/2 - anchor <x, z> - (1 - anchor)/beta log sum_j exp(beta <k_j, z>), the sum over attended keys.

    field: the queries x, (*batch, N, D).
    keys: (*#batch, M, D).
    beta, anchor: numbers or (*#batch).
    mask: boolean (True = the query attends to the key) or added to the scaled scores, (*#batch, #N, #M), or None.
    first: the index of the first query among the keys, where query i attends to keys up to first + i; None where every
        query attends to every key.

    Implementations in torch and Triton, and torch's own registration of operations, read it as it is `packed`.
    """

    field: Tensor
    keys: Tensor
    beta: Any
    anchor: Any
    mask: Tensor | None = None
    first: int | None = None

    def packed(self) -> Hopfield:
        """The same problem by views whose tensors have as many axes as the field; beta and anchor (*#batch, 1, 1)."""
        axes = self.field.ndim
        tensors = (t if isinstance(t, Tensor) else self.field.new_full((), t) for t in (self.beta, self.anchor))
        beta, anchor = (t[(None,) * (axes - 2 - t.ndim)][..., None, None] for t in tensors)
        keys, mask = self.keys[(None,) * (axes - self.keys.ndim)], self.mask
        mask = None if mask is None else mask[(None,) * (axes - mask.ndim)]
        return Hopfield(self.field, keys, beta, anchor, mask, self.first)

    def detached(self) -> Hopfield:
        return Hopfield(*(t.detach() if isinstance(t, Tensor) else t for t in self))  # type: ignore[arg-type]

    def is_plain(self, values: Any = None, *, numbers: bool = False) -> bool:
        """Whether all tensors are plain and fit each other, and numbers are in their range, while `unobserved`.

        values: what is read out, (*#batch, M, E), if anything.
        numbers: whether tensors of beta and anchor are known to be so, but for their precision.
        """
        query, keys, beta, anchor, mask, _ = self
        dtype = query.dtype
        if dtype not in PRECISIONS or not are_plain(dtype, query, keys, keys if values is None else values):
            return False
        if not _fit(query.shape, keys.shape, None if values is None else values.shape):
            return False
        # A short test for the most frequent kind.
        for number, low, high in ((anchor, 0.0, 1.0), (beta, LEAST, MOST)):
            known = low <= number <= high if type(number) is float else numbers and number.dtype == dtype
            if not (known or _is_number_in(number, query, low, high)):
                return False
        if mask is None:
            return True
        fixed = are_plain(torch.bool, mask) or (are_plain(dtype, mask) and not mask.requires_grad)
        return fixed and mask.ndim >= 2 and _broadcasts(mask.shape, (*query.shape[:-1], keys.shape[-2]))

    def to(self, dtype: torch.dtype) -> Hopfield:
        """The same problem in another precision."""
        field, keys, beta, anchor = (t.to(dtype) for t in self[:4])
        mask = self.mask if self.mask is None or self.mask.dtype == torch.bool else self.mask.to(dtype)
        return Hopfield(field, keys, beta, anchor, mask, self.first)


def _is_number_in(value: Any, query: Tensor, low: float, high: float) -> bool:
    """Whether `value` is a number in [low, high], or a small tensor of such numbers, one per batch entry of a query."""
    if type(value) in (float, int):
        return bool(low <= value <= high)
    if not are_plain(query.dtype, value) or value.numel() > MOST_NUMBERS:
        return False
    if not _broadcasts(value.shape, query.shape[:-2]):
        return False
    numbers = value.tolist() if value.ndim == 1 else value.flatten().tolist()
    return all(map(low.__le__, numbers)) and all(map(high.__ge__, numbers))


@functools.lru_cache(maxsize=1024)
def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether `shape` broadcasts to `target` without enlarging it."""
    if shape == target:
        return True
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, whole) for size, whole in pairs)


@functools.lru_cache(maxsize=1024)
def _fit(shape: torch.Size, of_keys: torch.Size, of_values: torch.Size | None) -> bool:
    """Whether the shapes of queries, keys and values (if any) fit each other, with few axes and none empty."""
    if not 2 <= len(shape) <= MOST_AXES + 2 or len(of_keys) < 2 or shape[-1] != of_keys[-1]:
        return False
    lead = shape[:-2]
    if not _broadcasts(of_keys[:-2], lead) or 0 in shape or 0 in of_keys:
        return False
    if of_values is None or of_values == of_keys:
        return True
    fits = len(of_values) >= 2 and of_values[-2] == of_keys[-2] and 0 not in of_values
    return fits and _broadcasts(of_values[:-2], lead)


def triangle(rows: int, count: int, first: int, device: torch.device) -> Tensor:
    """Whether query i attends to key j <= first + i, (N, M)."""
    return torch.arange(count, device=device) <= torch.arange(first, first + rows, device=device)[:, None]


def common(keys: Tensor, attended: Tensor | None = None) -> Tensor:
    """Return the common part of keys (*batch, M, D), (*batch, 1, D): their mean, large ones counting less.

    Softmax weights and covariances do not change when it is taken from all keys, but their rounding, which grows with
    the square of it, does. A key that is far off is no guide and counts by the inverse square of its length; one that
    nobody attends to, `attended` (*#batch, M), changes no bit, whatever it holds.
    """
    keys = keys.detach()
    lengths: Tensor = torch.linalg.vector_norm(keys, dim=-1, keepdim=True)
    if attended is not None:
        lengths = lengths.masked_fill(~attended[..., None], torch.inf)
    tiny = torch.finfo(keys.dtype).tiny
    share = (lengths.amin(-2, keepdim=True) / lengths.clamp(min=tiny)).square().nan_to_num(0.0)
    return (share.mT @ keys) / share.sum(-2, keepdim=True).clamp(min=tiny)
