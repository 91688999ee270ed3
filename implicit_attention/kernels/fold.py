"""Batch axes along which keys do not change, laid beside the queries, so that products never copy the keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._autograd import is_exporting

BLOCK = 8
# Torch multiplies matrices by itself where rows, inner and outer size have a product below this.
SMALL_PRODUCT = 400


def aligned(size: int, dtype: torch.dtype) -> int:
    """The next size at which rows begin at multiples of 16 bytes, on which the bits of products depend."""
    count = 16 // dtype.itemsize
    return -(-size // count) * count


def row_block(inner: int, outer: int, dtype: torch.dtype) -> int:
    """Rows come in multiples of this, so that a row's bits do not depend on how many others there are.

    Attention was measured to give a row the same bits for all multiples of 8 on a CPU, but for products so small that
    torch multiplies them by itself, in another order: there are so many rows that none is.
    """
    return -(-SMALL_PRODUCT // (BLOCK * aligned(inner, dtype) * aligned(outer, dtype))) * BLOCK


def widened(tensor: Tensor, size: int) -> Tensor:
    """`tensor` with zeros up to `size` on its last axis."""
    return F.pad(tensor, (0, size - tensor.shape[-1])) if tensor.shape[-1] < size else tensor


def addressable(tensor: Tensor) -> Tensor:
    """`tensor`, copied unless its rows lie apart from each other and the numbers of a row side by side.

    A kernel is told where rows begin. Torch's kernels take the rest for granted, and answer other layouts with whatever
    lies there: `scaled_dot_product_attention` refuses them before, its operations by themselves do not look.
    """
    apart = tensor.shape[-2] < 2 or tensor.stride(-2) >= tensor.shape[-1]
    return tensor if apart and tensor.stride(-1) == 1 else tensor.contiguous()


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
        if is_exporting():
            # An exported program has open sizes, and runs on other machines, which have other bits.
            between = (None,) * (tensor.ndim - matrix.ndim if self.kept else 0)
            return tensor @ matrix[(..., *between, slice(None), slice(None))]
        columns = matrix.shape[-1]
        # Zeros, because bits depend on whether rows begin at multiples of 16 bytes.
        inner, outer = (aligned(size, tensor.dtype) for size in matrix.shape[-2:])
        tensor = widened(tensor, inner)
        if (inner, outer) != matrix.shape[-2:]:
            matrix = F.pad(matrix, (0, outer - columns, 0, inner - matrix.shape[-2]))
        if 2 < tensor.ndim == matrix.ndim:
            return (tensor @ matrix)[..., :columns]
        # Batched even without a batch: the plain product of few rows by few takes other paths, with other bits.
        result = self.rows(tensor)[None] @ matrix[None]
        return result.reshape(*result.shape[1 : 1 + self.kept], *tensor.shape[self.kept : -1], outer)[..., :columns]
