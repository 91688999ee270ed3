"""One more key and value that are zeros: what takes a part of the weight and says nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def with_zero_key(
    k: Tensor, v: Tensor, pairs: Tensor | None, bias: Tensor | None, score: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Zeros as a first key and value that all queries attend to.

    Args:
        k: (*batch, M, D).
        v: (*batch, M, E).
        pairs: which query attends to which key, or None; broadcasts to (*batch, N, M).
        bias: added to the scores, or None; broadcasts to (*batch, N, M).
        score: of the new key, broadcasts to (*batch, 1, 1): a sink; None is 0, what a key of zeros has.

    Returns:
        All four with M + 1 keys; a score makes a bias where there was none.
    """
    count = k.shape[-2]
    k, v = (F.pad(t, (0, 0, 1, 0)) for t in (k, v))
    if pairs is not None:
        pairs = F.pad(pairs.expand(*pairs.shape[:-1], count), (1, 0), value=True)
    if score is not None:
        others = k.new_zeros(1, count, dtype=score.dtype) if bias is None else bias.to(score.dtype)
        lead = torch.broadcast_shapes(others.shape[:-1], score.shape[:-1])  # type: ignore[no-untyped-call]
        bias = torch.cat([score.expand(*lead, 1), others.expand(*lead, count)], dim=-1)
    elif bias is not None:
        bias = F.pad(bias.expand(*bias.shape[:-1], count), (1, 0))
    return k, v, pairs, bias
