"""What a mask leaves to be read of keys and values, some of which may not be finite."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from einops import einsum
from torch import Tensor

from .._autograd import is_fake, transforms_active
from ..ops.fold import Fold

# Scores below half of this are lost in rounding beside a bias of this / eps.
LOST = 64.0


class Read(NamedTuple):
    """What is read, in the layout of `fold`.

    Keys and values (the keys themselves, if there are no others), mask or bias of the pairs, which rows attend to
    nothing, and which to a NaN.
    """

    fold: Fold
    keys: Tensor
    values: Tensor
    pairs: Tensor | None
    empty: Tensor | None
    poison: Tensor | None

    def zero_empty(self, values: Tensor, *, rows: bool = False) -> Tensor:
        """0 for the queries that attend to no key; `rows` if a query has more than one number."""
        if self.empty is None:
            return values
        return values.masked_fill(self.empty[..., None] if rows else self.empty, 0.0)

    def finish(self, values: Tensor, *, rows: bool = False) -> Tensor:
        """`zero_empty`, and NaN for the queries that attend to a key which is not finite, as (*batch, N, ...)."""
        values = self.zero_empty(values, rows=rows)
        if self.poison is not None:
            values = values + (self.poison[..., None] if rows else self.poison)
        return self.fold.restored(values)

    def settled(self) -> tuple[Read, Tensor | None]:
        """The same for kernels, and which queries (*#batch, #N, 1) must be read as zeros for that.

        Of biases that are all so low that scores are lost beside them, only who has the largest matters. The kernels
        find that answer but not its gradient, as they weigh by exp(score - logsumexp), which rounds in the same way; a
        row of -inf has none at all. Without scores such a row is attention to its largest biases, now zeros.
        """
        if self.pairs is None:
            return self, None
        if self.pairs.dtype == torch.bool:
            assert self.empty is not None
            return self._replace(pairs=self.pairs | self.empty[..., None]), None
        top = self.pairs.detach().amax(-1, keepdim=True)
        low = top < -LOST / torch.finfo(torch.promote_types(top.dtype, torch.float32)).eps
        largest = torch.zeros_like(top).where(self.pairs == top, -torch.inf)
        return self._replace(pairs=largest.where(low, self.pairs)), self.fold.restored(low)


def surely_finite(*tensors: Tensor) -> bool:
    """Whether all numbers are known to be finite, where the host can look without waiting."""
    looked_at = transforms_active() or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    # What records operations must not record an answer that is true of these numbers only.
    if looked_at or torch._C._len_torch_dispatch_stack() or any(t.device.type != "cpu" or is_fake(t) for t in tensors):
        return False
    return all(math.isfinite(float(t.detach().sum())) for t in tensors)


def without_nan(held: list[Tensor], attended: Tensor, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Keys and values (*#batch, M, ...) read as zeros where they are not finite, and NaN for the rows that read those.

    A key may hold NaN for those who do not attend to it. 0 * NaN is NaN, so it is read as zero, and the queries that do
    attend to it are told apart by a product that costs one number per pair.
    """
    finite = [torch.isfinite(t).all(-1, keepdim=True) for t in held]
    bad = ~(finite[0] & finite[-1]).squeeze(-1)
    reads = attended.expand(*attended.shape[:-1], bad.shape[-1])
    # einsum, unlike @, expands neither of the two.
    number = einsum(reads.to(dtype), bad.to(dtype), "... n m, ... m -> ... n")
    poison = torch.where(number > 0, torch.nan, 0.0).to(dtype)
    return [t.where(f, 0.0) for t, f in zip(held, finite, strict=True)], poison
