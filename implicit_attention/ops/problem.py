"""The problem of all operations: the anchored log-sum-exp energy of a batch of queries, as plain tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def carries(dtype: torch.dtype, anchor: float | Tensor) -> bool:
    """Whether an anchor that is rounded to `dtype`, as the operations read it, leaves 1 - anchor four digits."""
    if isinstance(anchor, Tensor) or dtype == torch.float64 or anchor == 1:
        return True
    return 1 - anchor >= 1e4 * torch.finfo(torch.float32).eps


class Hopfield(NamedTuple):
    """E(z) = |z|^2/2 - anchor <x, z> - (1 - anchor)/beta log sum_j exp(beta <k_j, z>), the sum over attended keys.

    field: the queries x, (*batch, N, D).
    keys: (*#batch, M, D), with as many axes.
    beta, anchor: (*#batch, 1, 1), with as many axes.
    mask: boolean (True = the query attends to the key) or added to the scaled scores, (*#batch, #N, #M), or None.
    first: the index of the first query among the keys, where query i attends to keys up to first + i; None where every
        query attends to every key.
    """

    field: Tensor
    keys: Tensor
    beta: Tensor
    anchor: Tensor
    mask: Tensor | None = None
    first: int | None = None

    def to(self, dtype: torch.dtype) -> Hopfield:
        """The same problem in another precision."""
        field, keys, beta, anchor = (t.to(dtype) for t in self[:4])
        mask = self.mask if self.mask is None or self.mask.dtype == torch.bool else self.mask.to(dtype)
        return Hopfield(field, keys, beta, anchor, mask, self.first)


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
