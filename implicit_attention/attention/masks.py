"""Which query attends to which key: masks, missing tokens and causality as one boolean mask and one additive bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _validate
from .._torch import HALF
from ..potentials._attention import triangle as triangle


def mask_and_bias(
    mask: Tensor | None, *, shape: tuple[int, ...], like: Tensor, key_mask: Tensor | None = None, name: str = "mask"
) -> tuple[Tensor | None, Tensor | None]:
    """(mask, bias), each None or broadcasting to `shape`.

    Args:
        mask: boolean (True = attend) or additive, broadcasts to `shape`.
        shape: of the scores, (*batch, N, M) or (*batch, heads, N, M).
        like: a tensor of the queries' dtype and device.
        key_mask: which keys exist, (*batch, M), beside a shape with heads.
        name: what the caller's users call `mask`.
    """
    pairs, bias = split_mask(name, mask, like)
    if mask is not None:
        _validate.check_broadcast(name, mask.shape, shape, "the shape of the scores (..., N, M)")
    if key_mask is not None:
        *lead, _, count = shape
        check_key_mask(key_mask, tuple(lead[:-1]), count)
        existing = key_mask[..., None, None, :]
        pairs = existing if pairs is None else pairs & existing
    return pairs, bias


def split_mask(argument: str, mask: Tensor | None, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(mask, bias) from a boolean or an additive mask."""
    if mask is None:
        return None, None
    required, remedy = "be boolean (True = attend) or additive floating-point", f"use {argument}.bool()"
    _validate.check_boolean(argument, mask, required, remedy, or_float=True)
    _validate.check_dense(argument, mask)
    remedy = "move it with .to(device)"
    _validate.require(mask.device == like.device, argument, f"be on {like.device}", mask.device, remedy)
    if mask.dtype == torch.bool:
        return mask, None
    if like.dtype in HALF:
        return None, mask if mask.dtype == like.dtype else mask.float()
    return None, mask.to(like.dtype)


def check_order(argument: str, make: Any) -> None:
    """Raise for a causal flag beside keys that are spread over processes: no process knows where its keys begin."""
    make = getattr(make, "func", make)
    remedy = "use distributed.sequence_parallel, or a mask of the local keys"
    whole = not getattr(make, "keys_are_spread", False)
    name = getattr(make, "__name__", type(make).__name__)
    _validate.require(whole, argument, f"be False with keys that are spread over processes ({name})", True, remedy)


def check_causal(argument: str, mask: Tensor | None, causal: str) -> None:
    """Raise if a mask beside a causal flag says more than which keys exist."""
    if mask is not None and mask.ndim > 1 and mask.shape[-2] != 1:
        required = f"have one row for all queries, shape (..., 1, M), beside {causal}=True, which it may contradict"
        remedy = f"pass {causal}=False with the causal triangle in {argument}, e.g. mask & mask.new_ones(N, M).tril()"
        _validate.refuse(argument, required, f"shape {tuple(mask.shape)}", remedy)


def check_key_mask(key_mask: Any, batch: tuple[int, ...], count: int) -> None:
    """A boolean for each of `count` keys; all samples may have the same one."""
    _validate.check_boolean("key_mask", key_mask, "be boolean, True = the token exists")
    fits, received = key_mask.shape[-1:] == (count,), f"shape {tuple(key_mask.shape)}"
    _validate.require(fits, "key_mask", f"have one entry for each of the {count} keys", received)
    _validate.check_broadcast("key_mask", key_mask.shape, (*batch, count), "(*batch, M)")


def check_whole() -> None:
    """Raise inside `context_parallel`, which torch's attention alone handles: each process has a part of the tokens."""
    replaced = torch.nn.functional.scaled_dot_product_attention
    # By identity first, which the compiler can follow.
    if replaced is not torch._C._nn.scaled_dot_product_attention and "context_parallel" in replaced.__module__:
        raise ValueError(
            "equilibrium attention inside `context_parallel` would attend to the tokens of this process only: an "
            "equilibrium needs all keys at every evaluation; keep sequences whole and shard samples (DDP, FSDP) or "
            "heads (parallelize_module with ColwiseParallel and RowwiseParallel)"
        )
