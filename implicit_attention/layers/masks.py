"""Which query of a layer attends to which key: masks, missing tokens and causality as one mask and one bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _validate
from ..attention.core import check_causal, split_mask


def pairs_and_bias(
    mask: Tensor | None, key_mask: Tensor | None, *, causal: bool, first: int, shape: tuple[int, ...], like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """(mask, bias), each None or broadcasting to (*batch, heads, N, M).

    Args:
        mask: boolean or additive, (N, M), (*batch, N, M) or (*batch, heads, N, M).
        key_mask: which keys exist, (*batch, M).
        causal: whether query i, which is token first + i, attends to keys up to its own index only.
        first: index of the first query.
        shape: (*batch, heads, N, M).
        like: a tensor of the layer's dtype and device.
    """
    *batch, _, rows, count = shape
    if mask is not None and isinstance(mask, Tensor) and mask.ndim == len(shape) - 1 > 2:
        mask = mask.unsqueeze(-3)
    pairs, bias = split_mask("mask", mask, like)
    if mask is not None:
        meaning = "(N, M), (*batch, N, M) or (*batch, heads, N, M), the last"
        _validate.check_broadcast("mask", mask.shape, shape, meaning)
    if key_mask is not None:
        check_key_mask(key_mask, tuple(batch), count)
        exists = key_mask[..., None, None, :]
        pairs = exists if pairs is None else pairs & exists
    if causal:
        check_causal("mask", mask, "causal")
        order = torch.arange(count, device=like.device)
        before = order <= torch.arange(first, first + rows, device=like.device)[:, None]
        pairs = before if pairs is None else pairs & before
    return pairs, bias


def check_key_mask(key_mask: Any, batch: tuple[int, ...], count: int) -> None:
    """A boolean for every key; samples may share it, keys may not."""
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        received = getattr(key_mask, "dtype", type(key_mask).__name__)
        raise TypeError(_validate.message("key_mask", "be boolean, True = the token exists", received))
    fits = key_mask.ndim > 0 and key_mask.shape[-1] == count
    _validate.require(
        fits, "key_mask", f"have one entry for each of the {count} keys", f"shape {tuple(key_mask.shape)}"
    )
    _validate.check_broadcast("key_mask", key_mask.shape, (*batch, count), "(*batch, M)")
