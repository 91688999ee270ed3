"""Batch axes along which keys do not change, laid beside the queries, so that products never copy the keys."""

from __future__ import annotations

import torch
from torch import Tensor


class Fold:
    """The layout (*kept, *folded, N, ...) of states (*batch, N, ...) over keys whose leading axes are one of `leads`.

    A batched product copies keys that have size 1 along an axis of the batch (grouped queries, one memory for many
    samples). Here such axes are folded into the rows of one product, which reads the keys where they lie.
    """

    def __init__(self, batch: torch.Size, *leads: torch.Size) -> None:
        axes = range(max(len(shape) for shape in (batch, *leads)))
        sizes, *others = [(*(1,) * (len(axes) - len(shape)), *shape) for shape in (batch, *leads)]
        folded = [i for i in axes if sizes[i] != 1 and all(shape[i] == 1 for shape in others)]
        kept = [i for i in axes if i not in folded]
        self.kept = len(kept)
        self.order = (*kept, *folded)
        self.inverse = tuple(self.order.index(i) for i in axes)
        self.in_order = self.order == tuple(axes)

    def moved(self, tensor: Tensor) -> Tensor:
        """(*#batch, N, X) -> (*#kept, *#folded, N, X), a view; leading axes may be missing."""
        if tensor.ndim < len(self.order) + 2:
            tensor = tensor[(None,) * (len(self.order) + 2 - tensor.ndim)]
        return tensor if self.in_order else tensor.permute(*self.order, -2, -1)

    def restored(self, tensor: Tensor) -> Tensor:
        """(*kept, *folded, N, ...) -> (*batch, N, ...), a view."""
        return tensor if self.in_order else tensor.permute(*self.inverse, *range(len(self.order), tensor.ndim))

    def rows(self, tensor: Tensor) -> Tensor:
        """(*kept, *folded, N, X) -> (*kept, rows, X); of keys, which have size 1 along the folded axes, a view."""
        return tensor.flatten(self.kept, -2)

    def product(self, tensor: Tensor, matrix: Tensor) -> Tensor:
        """(*kept, *folded, N, X) times (*kept, X, Y) -> (*kept, *folded, N, Y)."""
        if 2 < tensor.ndim == matrix.ndim:
            return tensor @ matrix
        # Batched even without a batch: the plain product of few rows by few takes other paths, with other bits.
        result = self.rows(tensor)[None] @ matrix[None]
        return result.reshape(*result.shape[1 : 1 + self.kept], *tensor.shape[self.kept : -1], result.shape[-1])
