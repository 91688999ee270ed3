"""The arguments of `nn.MultiheadAttention`: tokens and masks, validated and in the library's conventions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _validate
from ._base import Masks, check_shape, joined_masks


def mask_and_bias(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, queries: Tensor, *, count: int, more: int, batched: bool
) -> Masks:
    """(mask, bias), each None or broadcasting to (B, H, N, M + more), of torch's masks, where True means ignore.

    Args:
        attn_mask: boolean or additive, (N, M) or (B * H, N, M).
        key_padding_mask: boolean or additive, (B, M), or (M,) if not batched.
        queries: (B, H, N, D).
        count: M, the number of keys that the masks cover.
        more: the number of keys behind them, to which every query may attend.
        batched: whether the caller's tensors have an axis of samples.
    """
    batch, heads, rows = queries.shape[:3]
    masks: dict[str, Tensor] = {}
    if attn_mask is not None:
        pair, head = (rows, count), (batch * heads, rows, count)
        _check_mask("attn_mask", attn_mask, f"(N, M) = {pair} or (B * num_heads, N, M) = {head}", pair, head)
        masks["attn_mask"] = attn_mask if attn_mask.ndim == 2 else attn_mask.unflatten(0, (batch, heads))  # type: ignore[no-untyped-call]
    if key_padding_mask is not None:
        keys = (batch, count) if batched else (count,)
        _check_mask("key_padding_mask", key_padding_mask, f"{'(B, M)' if batched else '(M,)'} = {keys}", keys)
        masks["key_padding_mask"] = key_padding_mask.reshape(batch, 1, 1, count)
    attended = {name: ~mask if mask.dtype == torch.bool else mask for name, mask in masks.items()}
    mask, bias = joined_masks(attended, queries)
    return None if mask is None else F.pad(mask, (0, more), value=True), None if bias is None else F.pad(
        bias, (0, more)
    )


def _check_mask(argument: str, mask: Any, meaning: str, *shapes: tuple[int, ...]) -> None:
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        received = str(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
        required = "be boolean (True = ignore) or additive floating-point"
        raise TypeError(_validate.message(argument, required, received, f"use {argument}.bool()"))
    check_shape(tuple(mask.shape) in shapes, argument, mask, f"have shape {meaning}")


def check_tokens(query: Tensor, key: Tensor, value: Tensor, widths: tuple[int, int, int], batch_first: bool) -> None:
    """Check that tokens have their widths and belong to one batch, and that there are as many values as keys."""
    for name, tokens, width in zip(("query", "key", "value"), (query, key, value), widths, strict=True):
        _validate.check_float_tensor(name, tokens)
        axes = "have 3 axes, or 2 without a batch" if name == "query" else f"have {query.ndim} axes like `query`"
        check_shape(tokens.ndim == query.ndim and tokens.ndim in (2, 3), name, tokens, axes)
        check_shape(tokens.shape[-1] == width, name, tokens, f"have width {width} on its last axis")
    if query.ndim == 3:
        axis = 0 if batch_first else 1
        required = f"have the {query.shape[axis]} samples of `query` on axis {axis}"
        check_shape(key.shape[axis] == query.shape[axis], "key", key, required, f"batch_first is {batch_first}")
    required = f"have a row for each key, leading axes {tuple(key.shape[:-1])}"
    check_shape(value.shape[:-1] == key.shape[:-1], "value", value, required)
